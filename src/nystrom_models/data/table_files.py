# SPDX-License-Identifier: Apache-2.0
"""Tables: .csv and .tsv files."""

import csv
import os
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets

from .file_rows import lines_of_any_system, no_rows, require_rows, rows_of_files, stream_of_files, suffix

# How Python's `csv` reads the tables; in .tsv files, quotes are text.
TABLES: dict[str, dict[str, Any]] = {".csv": {}, ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE}}

# What becomes a number if the whole column is so: "01" and "+1" would be written differently afterwards.
_INTEGER = r"^(0|-?[1-9][0-9]*)$"
_NUMBER = r"^-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_MOST_DIGITS = 18  # all such integers are int64

# The most characters of a field of a table: the largest C long of all platforms.
LARGEST_FIELD = 2**31 - 1


def _records(path: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a .csv or .tsv file, each with the number of its last line; that of an empty line is empty."""
    csv.field_size_limit(LARGEST_FIELD)
    reader = csv.reader(lines_of_any_system(path), strict=True, **TABLES[suffix(path)])
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {reader.line_num}: {error}. Quote a field that has quotes or line breaks, and write its "
            "quotes twice."
        ) from error


def _header(records: Iterator[tuple[int, list[str]]]) -> list[str]:
    """The names of a table's columns, from its first rows; pandas writes an index without a name."""
    first = next((row for _, row in records if row), [])
    return [name or f"Unnamed: {i}" for i, name in enumerate(first)]


def _columns(names: Sequence[str]) -> list[str]:
    """The columns of the first table. Raises a ValueError if other tables have others, or one has two of a name."""
    columns = _header(_records(names[0]))
    for path in names:
        header = _header(_records(path))
        if several := sorted({name for name in header if header.count(name) > 1}):
            raise ValueError(f"{path}: several columns are called {', '.join(several)}: give each its own name.")
        if sorted(header) != sorted(columns):
            raise ValueError(f"{path}: its columns are {header}, but must be {columns}, as in the first file.")
    return columns


def _rows_of_tables(files: Sequence[tuple[str, int, int]]) -> Iterator[dict[str, str | None]]:
    """The fields of .csv or .tsv files as texts; an empty one is missing. "NA" and "null" are texts."""
    for path, *_ in files:
        records, empty = _records(path), 0
        header = _header(records)
        for line, row in records:
            if not row:
                empty = empty or line
            elif empty and len(header) == 1:
                # Without it, all later rows would get other numbers. At the end of a file, such lines are no rows.
                raise ValueError(f"{path}, line {empty}: empty. Remove the line, or write a text there.")
            elif len(row) != len(header):
                counts = f"{len(row)} fields, but the header has {len(header)}"
                raise ValueError(f"{path}, line {line}: {counts}, {header}.")
            else:
                yield {name: field or None for name, field in zip(header, row, strict=True)}


def load_tables(
    names: Sequence[str], flag: str, cache_dir: str | os.PathLike | None, streaming: bool
) -> Dataset | IterableDataset:
    """`.csv` or `.tsv` files, as [`files.load_files`] reads them, whose arguments and errors these are."""
    # Here, because a stream is read file by file, while training.
    features = Features({name: Value("string") for name in _columns(names)})
    if not features:
        raise no_rows(names, flag)
    if streaming:
        require_rows(_rows_of_tables, names, flag)
        return stream_of_files(_rows_of_tables, features, names)
    dataset = rows_of_files(_rows_of_tables, features, names, flag, cache_dir)
    numbers = {name: _numbers(dataset.data.column(name)) for name in dataset.column_names}
    dataset = _with_columns(dataset, {name: column for name, column in numbers.items() if column is not None})
    dataset.info.builder_name = "csv"
    return dataset


def _numbers(texts: pa.ChunkedArray) -> pa.ChunkedArray | None:
    """The numbers that a column of texts holds; None if one text is something else, or there are none."""
    texts = pc.utf8_trim_whitespace(texts)

    def every(condition: pa.ChunkedArray) -> bool:
        return pc.all(condition, min_count=1).as_py() or False  # of those that are not missing

    if every(pc.match_substring_regex(texts, _INTEGER)):
        fits = every(pc.less_equal(pc.utf8_length(texts), _MOST_DIGITS))
        return pc.cast(texts, pa.int64()) if fits else None
    return pc.cast(texts, pa.float64()) if every(pc.match_substring_regex(texts, _NUMBER)) else None


def _with_columns(dataset: Dataset, columns: dict[str, pa.Array | pa.ChunkedArray]) -> Dataset:
    """The data set with some of its columns replaced."""
    if not columns:
        return dataset
    parts, new = [dataset.remove_columns(list(columns))], Dataset(pa.table(columns))
    if not parts[0].column_names:
        return new
    return concatenate_datasets([*parts, new], axis=1).select_columns(dataset.column_names)
