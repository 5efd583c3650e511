# SPDX-License-Identifier: Apache-2.0
"""One run at a time writes to an `--output_dir`."""

import errno
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Windows has no such locks.
fcntl: Any = importlib.import_module("fcntl") if os.name != "nt" else None

NAME = ".running"
# The folders that this process has locked: closing a second file of a lock would end the lock.
_held: set[str] = set()
# What a lock that another process has is reported as; anything else means that the file system has no locks.
_TAKEN = (errno.EACCES, errno.EAGAIN)


@contextmanager
def folder_lock(output_dir: str | os.PathLike) -> Iterator[None]:
    """Locks a folder for this process until the block ends, or the process dies in any way. Within the block, this
    process may lock it again. Nothing is locked on Windows, and on file systems that have no locks.

    Raises:
        ValueError: if another process has locked it.
    """
    folder = os.path.realpath(output_dir)
    if fcntl is None or folder in _held:
        yield
        return
    path = Path(output_dir, NAME)
    # Of a lock of this kind, child processes get no part: data loaders may outlive a killed run by seconds.
    with open(path, "a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                file.seek(0)
                raise ValueError(
                    f"Another run (process {file.read().strip() or 'unknown'}) is writing to --output_dir "
                    f"{output_dir}: wait for its end, or give another --output_dir."
                ) from error
        file.seek(0)
        file.truncate()
        file.write(f"{os.getpid()}\n")
        file.flush()
        _held.add(folder)
        try:
            yield
        finally:
            _held.remove(folder)
            path.unlink(missing_ok=True)
