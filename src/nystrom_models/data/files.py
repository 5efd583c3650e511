# SPDX-License-Identifier: Apache-2.0
"""Local files as data sets."""

import csv
import glob
import gzip
import json
import os
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from typing import IO, Any

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets, load_dataset, packaged_modules
from datasets.exceptions import DatasetGenerationError, DatasetsError

from .caching import with_code

# How Python's `csv` reads the tables; in .tsv files, quotes are text.
_TABLES: dict[str, dict[str, Any]] = {".csv": {}, ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE}}

# What becomes a number if the whole column is so: "01" and "+1" would be written differently afterwards.
_INTEGER = r"^(0|-?[1-9][0-9]*)$"
_NUMBER = r"^-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?$"
_MOST_DIGITS = 18  # all such integers are int64

# The most characters of a field of a table: the largest C long of all platforms.
LARGEST_FIELD = 2**31 - 1

# Rows whose types are found, and that are written, at once: documents may be books.
_PART = 100

# Sequences of genomes and proteins. Its readers are part of `datasets` from 5.1 on.
_FASTA: tuple[str, dict[str, Any]] = ("fasta", {"columns": ["id", "description", "sequence"]})

# The reader of `datasets` for a suffix, and its options. Texts, tables and JSON are read by this module: `datasets`
# separates documents by a line without spaces, makes other texts of "01", "NA" and 2024-01-31, and gives a column the
# type of its first rows.
_READERS: dict[str, tuple[str, dict[str, Any]]] = {
    ".parquet": ("parquet", {}),
    **dict.fromkeys((".fa", ".fasta", ".fna", ".ffn", ".faa", ".frn"), _FASTA),
}

_JSON = (".json", ".jsonl")

# The suffixes of all files that can be read.
FORMATS = (".txt", *_JSON, *_TABLES, *_READERS)


def file_ending(path: str) -> str:
    """The suffix of a data file, without .gz.

    Raises:
        ValueError: if files with this suffix cannot be read.
    """
    ending = os.path.splitext(path.removesuffix(".gz"))[1].lower()
    if ending not in FORMATS:
        raise ValueError(f"{path} must end in one of {', '.join(FORMATS)}, each also with .gz.")
    return ending


def _open(path: str) -> IO[bytes]:
    return gzip.open(path) if path.endswith(".gz") else open(path, "rb")  # type: ignore[return-value]


def decoded_lines(path: str) -> Iterator[str]:
    """Lines of text. Raises a ValueError with file and line if a line is not UTF-8 or the file is damaged."""
    number = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, start=1):
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}, line {number}: not UTF-8 ({error.reason} at byte {error.start}).") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged after line {number}: {error}.") from error


def lines_of_any_system(path: str) -> Iterator[str]:
    r"""As [`decoded_lines`]; in a file without any \n, lines end in \r, as in files of Excel for Mac."""
    for number, line in enumerate(decoded_lines(path), start=1):
        yield from re.split(r"(?<=\r)", line) if number == 1 and not line.endswith("\n") else [line]


def _load(
    names: Sequence[str], ending: str, cache_dir: str | os.PathLike | None, streaming: bool
) -> Dataset | IterableDataset:
    if ending == ".parquet" and any(name.endswith(".gz") for name in names):
        # `datasets` cannot read .parquet.gz. Such files are rare, because Parquet already compresses its columns.
        parts = []
        for name in names:
            with _open(name) as file:
                parts.append(Dataset(pq.read_table(pa.BufferReader(file.read()))))
        rows = concatenate_datasets(parts)
        return rows.to_iterable_dataset() if streaming else rows
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


def _no_rows(names: Sequence[str], flag: str) -> ValueError:
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
        names, flag, cache_dir: of [`load_files`].
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
            writer_batch_size=_PART,
        )
    except DatasetGenerationError as error:
        raise error.__cause__ if isinstance(error.__cause__, ValueError) else error from None
    except ValueError as error:
        if "corresponds to no data" not in str(error):
            raise
        raise _no_rows(names, flag) from None
    return rows


def _stream_of_files(
    read: Callable[..., Iterator[dict[str, Any]]], features: Features | None, names: Sequence[str], **options: Any
) -> IterableDataset:
    """As [`rows_of_files`], read during iteration; each file is a shard."""
    return IterableDataset.from_generator(
        with_code(read), features=features, gen_kwargs={"files": _files(names), **options}
    )


def _records(path: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a .csv or .tsv file, each with the number of its last line; that of an empty line is empty."""
    csv.field_size_limit(LARGEST_FIELD)
    reader = csv.reader(lines_of_any_system(path), strict=True, **_TABLES[file_ending(path)])
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


def _rows_of_tables(files: Sequence[tuple[str, int, int]]) -> Iterator[dict[str, str | None]]:
    """The fields of .csv or .tsv files as texts; an empty one is missing. "NA" and "null" are texts."""
    columns = _header(_records(files[0][0]))
    for path, *_ in files:
        records, empty = _records(path), 0
        header = _header(records)
        if several := sorted({name for name in header if header.count(name) > 1}):
            raise ValueError(f"{path}: several columns are called {', '.join(several)}: give each its own name.")
        if sorted(header) != sorted(columns):
            raise ValueError(f"{path}: its columns are {header}, but must be {columns}, as in the first file.")
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


def _load_tables(
    names: Sequence[str], flag: str, cache_dir: str | os.PathLike | None, streaming: bool
) -> Dataset | IterableDataset:
    features = Features({name: Value("string") for name in _header(_records(names[0]))})
    if not features:
        raise _no_rows(names, flag)
    if streaming:
        return _stream_of_files(_rows_of_tables, features, names)
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
        return _stream_of_files(_documents, features, names)
    return rows_of_files(_documents, features, names, flag, cache_dir)


def _integer(digits: str) -> int | float:
    """A number of JSON; those beyond int64, such as hashes, as floating-point numbers."""
    value = int(digits)
    return value if -(2**63) <= value < 2**63 else float(digits)


_DECODER = json.JSONDecoder(parse_int=_integer)
_NOT_SPACE = re.compile(r"\S")

# Characters beyond the basic plane are written as two escapes: a high and a low half.
_HIGH, _LOW = r"\\u[dD][89abAB][\da-fA-F]{2}", r"\\u[dD][c-fC-F][\da-fA-F]{2}"
_HALF = re.compile(rf"{_HIGH}|{_LOW}")
_LONE_HALF = re.compile(rf"(?<!\\)(?:{_HIGH}(?!{_LOW})|(?<!{_HIGH}){_LOW})")


class _Incomplete(Exception):
    """A text ends within a JSON value. `args`: the text from the beginning of the value, and the line of it."""


def _values(path: str, text: str, line: int, whole: bool) -> Iterator[Any]:
    """The JSON values of a text that begins in this line of a file, one after another.

    Raises:
        _Incomplete: if the text ends within a value, and is not the `whole` rest of the file.
        ValueError: if it is not JSON, or if a value holds half of a character beyond the basic plane.
    """
    begin = _NOT_SPACE.search(text)
    while begin is not None:
        start = begin.start()
        try:
            value, end = _DECODER.raw_decode(text, start)
        except json.JSONDecodeError as error:
            if not whole and _NOT_SPACE.search(text, error.pos) is None:
                raise _Incomplete(text[start:], line + text.count("\n", 0, start)) from None
            # What a line lacks at its end is found missing at the beginning of the next one.
            before = text[: error.pos]
            at = error.pos if before.rpartition("\n")[2].strip() else len(before.rstrip())
            place = f"{path}, line {line + text.count(chr(10), 0, at)}"
            raise ValueError(
                f"{place}: not JSON ({error.msg}, column {at - text.rfind(chr(10), 0, at)}). A file holds objects "
                "without commas between them, one after another, or a list of objects."
            ) from error
        if half := _HALF.search(text, start, end):
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                lone = _LONE_HALF.search(text, start, end) or half
                place = f"{path}, line {line + text.count(chr(10), 0, lone.start())}"
                raise ValueError(f"{place}: {error.reason}, but it holds {error.object[error.start]!a}.") from error
        begin = _NOT_SPACE.search(text, end)
        if begin is None:
            text = ""  # it may be as large as the file, and is not needed while the value is read
        yield value


def _items(path: str) -> Iterator[tuple[str, Any]]:
    """What a JSON file lists, or has one after another, each with its place."""
    lines, items, by_line = enumerate(decoded_lines(path), start=1), 0, True
    for number, text in lines:
        whole = False
        while text:
            values = _values(path, text, number, whole)
            text = ""  # it may be large, and is not needed while the values are read
            try:
                for value in values:
                    by_line &= items > 0 or not isinstance(value, list)
                    for item in value if isinstance(value, list) else [value]:
                        items += 1
                        yield f"{path}, line {number}" if by_line else f"{path}, item {items}", item
            except _Incomplete as incomplete:
                # A list, or an object over several lines. Each try has at least twice as many lines as the one before:
                # the work stays linear. Most objects have less than 64 lines.
                text, number = incomplete.args
                more = [line for _, line in islice(lines, max(64, 1 + text.count("\n")))]
                text, whole, by_line = text + "".join(more), not more, False


def _json_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a .json or .jsonl file, each with its place."""
    for place, row in _items(path):
        if not isinstance(row, dict):
            raise ValueError(f"{place}: must be a JSON object, but is {json.dumps(row)[:40]}.")
        yield place, row


def _columns(rows: Iterable[tuple[str, dict[str, Any]]]) -> tuple[str, ...]:
    """The names of the columns, in the order in which they occur."""
    return tuple(dict.fromkeys(name for _, row in rows for name in row))


def _with_types(schema: pa.Schema, columns: dict[str, list[Any]]) -> pa.Schema:
    """A schema to which the types of these values are added. Integers and other numbers have the type of the latter;
    texts that look like dates are texts."""
    types = pa.schema([(name, pa.array(values).type) for name, values in columns.items()])
    return pa.unify_schemas([schema, types], promote_options="permissive")


_LEFT_OUT = "columns that are left out"


def _json_schema(names: Sequence[str]) -> pa.Schema:
    """The columns of .json or .jsonl files and the types that hold all their values. A column that began with objects
    and has no such type is left out; the schema's metadata say why, as a JSON object by column.

    Raises:
        ValueError: with the place and column of a value that has another type than those before.
    """
    schema = pa.schema([])
    left_out: dict[str, str] = {}
    for path in names:
        rows = _json_rows(path)
        while part := list(islice(rows, _PART)):
            columns = [name for name in _columns(part) if name not in left_out]
            try:
                schema = _with_types(schema, {name: [row.get(name) for _, row in part] for name in columns})
            except pa.ArrowException:  # value by value, also because large integers and others fit only so
                for place, row in part:
                    for name in [name for name in columns if name in row and name not in left_out]:
                        try:
                            schema = _with_types(schema, {name: [row[name]]})
                        except pa.ArrowException as error:
                            why = f"{place}, column {name!r}: {error}"
                            index = schema.get_field_index(name)
                            before = pa.null() if index < 0 else schema.field(index).type
                            if not (_has_objects(row[name]) if before == pa.null() else _holds_structs(before)):
                                raise ValueError(f"{why}.") from error
                            left_out[name] = why
                            schema = schema if index < 0 else schema.remove(index)
    return schema.with_metadata({_LEFT_OUT: json.dumps(left_out)})


def _has_objects(value: Any) -> bool:
    """Whether a JSON value is an object, or a list with one at any depth."""
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_has_objects, value)))


def _holds_structs(dtype: pa.DataType) -> bool:
    """Whether values of this type are objects, or lists with them at any depth."""
    return pa.types.is_struct(dtype) or (pa.types.is_list(dtype) and _holds_structs(dtype.value_type))


def _schema_of_json(files: Sequence[tuple[str, int, int]]) -> Iterator[dict[str, bytes]]:
    """[`_json_schema`] as a row, which is kept in the cache: files of gigabytes are not read again at each start."""
    yield {"schema": _json_schema([path for path, *_ in files]).serialize().to_pybytes()}


def _rows_of_json(
    files: Sequence[tuple[str, int, int]], columns: Sequence[str], others: bool
) -> Iterator[dict[str, Any]]:
    """The rows of .json or .jsonl files; a field that a row does not have is missing.

    others: whether columns that are not in `columns` are kept, too.
    """
    for path, *_ in files:
        for _, row in _json_rows(path):
            yield dict.fromkeys(columns) | {name: row[name] for name in row if others or name in columns}


def _load_json(
    names: Sequence[str], flag: str, cache_dir: str | os.PathLike | None, streaming: bool
) -> Dataset | IterableDataset:
    if streaming:  # without types: they would be those of the first rows, and later values would be cast to them
        columns = _columns(islice(chain.from_iterable(map(_json_rows, names)), _PART))
        return _stream_of_files(_rows_of_json, None, names, columns=columns, others=True)
    found = rows_of_files(_schema_of_json, Features({"schema": Value("binary")}), names, flag, cache_dir)
    schema = pa.ipc.read_schema(pa.py_buffer(found[0]["schema"]))
    left_out = json.loads(schema.metadata[_LEFT_OUT.encode()])
    schema = schema.remove_metadata()
    if left_out and not schema.names:
        raise ValueError(f"{next(iter(left_out.values()))}.")
    for name, why in left_out.items():
        warnings.warn(f"The column {name!r} of {flag} is left out: {why}.", stacklevel=2)
    if not schema.names:
        raise _no_rows(names, flag)
    features = Features.from_arrow_schema(schema)
    options: dict[str, Any] = {"columns": tuple(schema.names), "others": False}
    return rows_of_files(_rows_of_json, features, names, flag, cache_dir, **options)


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
        with _open(name) as file:
            try:
                beginning = file.read(1)
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{name} is damaged: {error}.") from error
        if not beginning:
            raise ValueError(f"{name}, given by {flag}, is empty.")
    if (ending := endings.pop()) in _TABLES:
        return _load_tables(names, flag, cache_dir, streaming)
    if ending == ".txt":
        return _load_texts(names, flag, cache_dir, streaming)
    if ending in _JSON:
        return _load_json(names, flag, cache_dir, streaming)
    try:
        dataset = _load(names, ending, cache_dir, streaming)
        if isinstance(dataset, IterableDataset):
            return dataset
    except (DatasetsError, EOFError, TypeError, ValueError, zlib.error) as error:
        for name in names if ending != ".parquet" else ():
            for _ in decoded_lines(name):  # names the line that is not UTF-8
                pass
        if "corresponds to no data" in str(error):
            raise _no_rows(names, flag) from error
        raise ValueError(f"{', '.join(names)}, given by {flag}, cannot be read: {error.__cause__ or error}") from error
    if len(dataset) == 0:
        raise _no_rows(names, flag)
    return dataset


def _with_columns(dataset: Dataset, columns: dict[str, pa.Array | pa.ChunkedArray]) -> Dataset:
    """The data set with some of its columns replaced."""
    if not columns:
        return dataset
    parts, new = [dataset.remove_columns(list(columns))], Dataset(pa.table(columns))
    if not parts[0].column_names:
        return new
    return concatenate_datasets([*parts, new], axis=1).select_columns(dataset.column_names)
