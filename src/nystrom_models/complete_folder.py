# SPDX-License-Identifier: Apache-2.0
"""Writes the files of a folder all or not at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Where files are until all are written. A process that is killed leaves it.
PARTIAL = ".partial"


@contextmanager
def moved_when_complete(folder: Path) -> Iterator[Path]:
    """A folder to write in, on the same disk. Its files take the place of those in `folder` after all are written:
    after an error, such as that of a full disk, `folder` is as it was, or missing if it is new."""
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    partial = folder / PARTIAL
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        yield partial
        # Files only: a folder, such as that of a tokenizer's chat templates, cannot take the place of another.
        for path in [path for path in partial.rglob("*") if path.is_file()]:
            target = folder / path.relative_to(partial)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.replace(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        for path in new:
            if path.exists() and not any(path.iterdir()):
                path.rmdir()
