# SPDX-License-Identifier: Apache-2.0
"""Lines of local files, and rows that are made of them and kept in the cache."""

import gzip
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from datasets import Dataset, Features, IterableDataset
from datasets.exceptions import DatasetGenerationError

from .caching import with_code

# Rows whose types are found, and that are written, at once: documents may be books.
PART = 100


def suffix(path: str) -> str:
    """The suffix of a file in small letters, without .gz."""
    return os.path.splitext(path.removesuffix(".gz"))[1].lower()


def open_file(path: str) -> IO[bytes]:
    """A file to read, unpacked if it is compressed."""
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def decoded_lines(path: str) -> Iterator[str]:
    """Lines of text. Raises a ValueError with file and line if a line is not UTF-8 or the file is damaged."""
    number = 0
    try:
        with open_file(path) as file:
            for number, line in enumerate(file, start=1):
                if number == 1 and line.count(0) > len(line) // 4:
                    # Also valid UTF-8, with a NUL after each letter, if there is no byte-order mark.
                    raise ValueError(f"{path} is UTF-16 or another encoding with NUL bytes: save it as UTF-8.")
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start}).") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged after line {number}: {error}.") from error


def lines_of_any_system(path: str) -> Iterator[str]:
    r"""As [`decoded_lines`]; in a file without any \n, lines end in \r, as in files of Excel for Mac."""
    for number, line in enumerate(decoded_lines(path), start=1):
        yield from re.split(r"(?<=\r)", line) if number == 1 and not line.endswith("\n") else [line]


def check_files(names: Sequence[str], flag: str) -> None:
    """Raises an error if a flag names no file, or one that does not exist."""
    if not names:
        raise ValueError(f"{flag} has no file: give at least one.")
    for name in names:
        if not os.path.isfile(name):
            raise FileNotFoundError(f"{flag} {name} is not a file.")
        if "::" in os.path.abspath(name):
            raise ValueError(f"{flag} {name}: `datasets` cannot read files with :: in their path. Rename it.")


def _files(names: Sequence[str]) -> list[tuple[str, int, int]]:
    """Path, time of the last change and size of each file."""
    return [(os.path.abspath(name), os.stat(name).st_mtime_ns, os.stat(name).st_size) for name in names]


def no_rows(names: Sequence[str], flag: str) -> ValueError:
    """The error of files without rows."""
    return ValueError(f"The files of {flag} contain no rows: {', '.join(names)}.")


def rows_of_files(
    read: Callable[..., Iterator[dict[str, Any]]],
    features: Features,
    names: Sequence[str],
    flag: str,
    cache_dir: str | os.PathLike | None = None,
    split: str = "train",
    **options: Any,
) -> Dataset:
    """Rows that a function reads from files, kept in the cache until a file changes.

    Args:
        read: gives rows; its argument `files` has path, time of the last change and size of each.
        features: the columns.
        names, flag, cache_dir: of [`files.load_files`].
        split: name of the split, as of `datasets`.
        options: further arguments of `read`.

    Raises:
        ValueError: of `read`, or if there are no rows.
    """
    try:
        rows = Dataset.from_generator(
            with_code(read),
            features=features,
            cache_dir=None if cache_dir is None else os.fspath(cache_dir),
            gen_kwargs={"files": tuple(_files(names)), **options},
            split=split,
            writer_batch_size=PART,
        )
    except DatasetGenerationError as error:
        raise error.__cause__ if isinstance(error.__cause__, ValueError) else error from None
    except ValueError as error:
        if "corresponds to no data" not in str(error):
            raise
        raise no_rows(names, flag) from None
    return rows


def stream_of_files(
    read: Callable[..., Iterator[dict[str, Any]]], features: Features | None, names: Sequence[str], **options: Any
) -> IterableDataset:
    """As [`rows_of_files`], read during iteration; each file is a shard."""
    return IterableDataset.from_generator(
        with_code(read), features=features, gen_kwargs={"files": _files(names), **options}
    )


def require_rows(read: Callable[..., Iterator[dict[str, Any]]], names: Sequence[str], flag: str) -> None:
    """Raises a ValueError unless `read`, as in [`rows_of_files`], gives a row; it reads no further."""
    if next(read(_files(names)), None) is None:
        raise no_rows(names, flag)
