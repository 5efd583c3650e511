# SPDX-License-Identifier: Apache-2.0
"""Local files as data sets."""

import codecs
import glob
import gzip
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import (
    ClassLabel,
    Dataset,
    Features,
    IterableDataset,
    Value,
    concatenate_datasets,
    load_dataset,
    packaged_modules,
)
from datasets.exceptions import DatasetsError

from .file_rows import (
    check_files,
    decoded_lines,
    lines_of_any_system,
    no_rows,
    open_file,
    require_rows,
    rows_of_files,
    stream_of_files,
    suffix,
)
from .json_files import JSON, load_json
from .table_files import TABLES, load_tables

# Sequences of genomes and proteins. Its readers are part of `datasets` from 5.1 on.
_FASTA: tuple[str, dict[str, Any]] = ("fasta", {"columns": ["id", "description", "sequence"]})

_DIGIT = re.compile("[0-9]")

# The lines of a FASTA file that are checked: they show its format, and a whole genome would take a minute each start.
_CHECKED_LINES = 10_000

# The reader of `datasets` for a suffix, and its options. Texts, tables and JSON are read by this package: `datasets`
# separates documents by a line without spaces, makes other texts of "01", "NA" and 2024-01-31, and gives a column the
# type of its first rows.
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}),
    **dict.fromkeys((".fa", ".fasta", ".fna", ".ffn", ".faa", ".frn"), _FASTA),
}

# The suffixes of all files that can be read.
FORMATS = (".txt", *JSON, *TABLES, *_READERS)


def file_ending(path: str) -> str:
    """The suffix of a data file, without .gz.

    Raises:
        ValueError: if files with this suffix cannot be read.
    """
    ending = suffix(path)
    if ending not in FORMATS:
        raise ValueError(f"{path} must end in one of {', '.join(FORMATS)}, each also with .gz.")
    return ending


def _has_rows(path: str) -> bool:
    """Whether a file has rows. Of a `.parquet` file without any, `datasets` says only that a batch size is 0."""
    return suffix(path) != ".parquet" or path.endswith(".gz") or pq.read_metadata(path).num_rows > 0


def _numbered_classes(path: str) -> dict[str, list[str]]:
    """The names of the classes that the columns of a `.parquet` file number, also in lists, by column."""
    features = Features.from_arrow_schema(pq.read_schema(path))
    inner = {name: getattr(feature, "feature", feature) for name, feature in features.items()}
    return {name: feature.names for name, feature in inner.items() if isinstance(feature, ClassLabel)}


def _check_numbered_classes(names: Sequence[str]) -> None:
    """Raises a ValueError if `.parquet` files number their classes differently: `datasets` would read all numbers as
    the first file's."""
    first = _numbered_classes(names[0])
    for path in names[1:]:
        for column, classes in _numbered_classes(path).items():
            if first.get(column, classes) != classes:
                raise ValueError(
                    f"{path}: the column {column!r} numbers the classes {classes}, but that of {names[0]} numbers "
                    f"{first[column]}: write the same order into both files, or the names of the classes as text."
                )


def _check_sequences(path: str) -> bool:
    """Whether a FASTA file has a sequence. `datasets` leaves out lines before the first header and takes the numbers
    of lines for bases, without a message, and names neither file nor line of a fault in a stream.

    Raises:
        ValueError: unless it begins with a header, after comments; if one of the first lines after it has a digit, is
            not UTF-8, or is not there because the file is damaged.
    """
    with open_file(path) as file:
        if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8:
            raise ValueError(
                f"{path} begins with a byte-order mark, which hides its first header: save it as UTF-8 without one."
            )
    has_header = False
    for number, line in enumerate(lines_of_any_system(path), start=1):
        if has_header and number > _CHECKED_LINES:
            break
        if line.startswith(">"):
            has_header = True
        elif not line.startswith(";"):
            if not has_header and line.strip():
                raise ValueError(
                    f"{path}, line {number}: {line.strip()[:30]!r} is before the first header. A FASTA file has a "
                    "header before each sequence, such as >chr1."
                )
            if digit := _DIGIT.search(line):
                raise ValueError(
                    f"{path}, line {number}: {line.strip()[:30]!r} has the digit {digit[0]!r}, which would be read as "
                    "a base. Leave out numbers of lines and bases, as in the lines of GenBank files."
                )
    return has_header


def _load(
    names: Sequence[str], ending: str, cache_dir: str | os.PathLike | None, streaming: bool
) -> Dataset | IterableDataset:
    if ending == ".parquet" and any(name.endswith(".gz") for name in names):
        # `datasets` cannot read .parquet.gz. Such files are rare, because Parquet already compresses its columns.
        parts = []
        for name in names:
            with open_file(name) as file:
                parts.append(Dataset(pq.read_table(pa.BufferReader(file.read()))))
        rows = concatenate_datasets(parts)
        return rows.to_iterable_dataset() if streaming else rows
    if ending == ".parquet":
        _check_numbered_classes(names)
    builder, options = _READERS[ending]
    if not hasattr(packaged_modules, builder):
        raise ValueError(f"{ending} files are read by datasets 5.1 or newer; update it from {datasets.__version__}.")
    return load_dataset(
        builder,
        # To `datasets`, * ? [ and ] in a name stand for other characters.
        data_files={"train": [glob.escape(os.path.abspath(name)) for name in names]},
        split="train",
        cache_dir=None if cache_dir is None else os.fspath(cache_dir),
        streaming=streaming,
        **options,
    )


def _documents(files: Sequence[tuple[str, int, int]]) -> Iterator[dict[str, str]]:
    """The documents of .txt files: lines between lines that are empty, or have only spaces."""
    for path, *_ in files:
        # Lines may also end in \r\n, or in \r alone.
        every = (part for line in decoded_lines(path) for part in line.rstrip("\r\n").split("\r"))
        for blank, lines in groupby(every, key=lambda line: not line.strip()):
            if not blank:
                yield {"text": "\n".join(lines)}


def _load_texts(
    names: Sequence[str], flag: str, cache_dir: str | os.PathLike | None, streaming: bool
) -> Dataset | IterableDataset:
    features = Features({"text": Value("string")})
    if streaming:
        require_rows(_documents, names, flag)
        return stream_of_files(_documents, features, names)
    return rows_of_files(_documents, features, names, flag, cache_dir)


def load_files(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    flag: str = "--train_file",
    cache_dir: str | os.PathLike | None = None,
    streaming: bool = False,
) -> Any:
    """Reads one file or several of one format as one data set.

    Args:
        paths: `.txt` (column `text`; documents are separated by lines that are empty or have only spaces), `.jsonl`
            or `.json` (objects, one after another, or a list of objects; texts that look like dates are texts), `.csv`
            or `.tsv` (with a header; an empty field is missing, and in `.tsv` files quotes are text), `.parquet` or
            FASTA (`.fa`, `.fasta`, `.fna`, `.ffn`, `.faa`, `.frn`; columns `id`, `description` and `sequence`), each
            also compressed as `.gz`; in UTF-8. A column of a table that holds only numbers becomes numbers; integers
            only if they are written as they would be then: 01 stays text.
        flag: the flag that gave the paths, for error messages.
        cache_dir: where `datasets` keeps its files; None for its default.
        streaming: returns an `IterableDataset`, which reads the files during iteration, instead of a `Dataset`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the endings are unknown or differ, a line is malformed (with file and line number), a file is
            damaged, the files disagree in the type of a column, or there are no rows.
    """
    names = [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    check_files(names, flag)
    endings = {file_ending(name) for name in names}
    if len(endings) > 1:
        raise ValueError(f"The files of {flag} must have one format, but they end in {sorted(endings)}.")
    for name in names:
        with open_file(name) as file:
            try:
                beginning = file.read(1)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{name} is damaged: {error}.") from error
        if not beginning:
            raise ValueError(f"{name}, given by {flag}, is empty.")
    if (ending := endings.pop()) in TABLES:
        return load_tables(names, flag, cache_dir, streaming)
    if ending == ".txt":
        return _load_texts(names, flag, cache_dir, streaming)
    if ending in JSON:
        return load_json(names, flag, cache_dir, streaming)
    if _READERS[ending] is _FASTA and True not in [_check_sequences(name) for name in names]:
        raise no_rows(names, flag)
    try:
        filled = list(filter(_has_rows, names))
        dataset = _load(filled, ending, cache_dir, streaming) if filled else Dataset.from_dict({})
        if isinstance(dataset, IterableDataset):
            return dataset
    except (DatasetsError, EOFError, TypeError, ValueError, zlib.error) as error:
        for name in names if ending != ".parquet" else ():
            for _ in decoded_lines(name):  # names the line that is not UTF-8
                pass
        if "corresponds to no data" in str(error):
            raise no_rows(names, flag) from error
        raise ValueError(f"{', '.join(names)}, given by {flag}, cannot be read: {error.__cause__ or error}") from error
    if len(dataset) == 0:
        raise no_rows(names, flag)
    return dataset
