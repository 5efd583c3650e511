# SPDX-License-Identifier: Apache-2.0
"""JSON files: objects one after another, divided into lines in any way, or lists of objects."""

import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, Value

from .file_rows import PART, decoded_lines, no_rows, rows_of_files, stream_of_files

JSON = (".json", ".jsonl")


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


def json_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
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
    types = pa.schema([(name, _type(values)) for name, values in columns.items()])
    return pa.unify_schemas([schema, types], promote_options="permissive")


def _type(values: list[Any]) -> pa.DataType:
    """The type that holds these values. Raises a pyarrow.ArrowException if there is none."""
    array = pa.array(values)
    # Among decimal numbers, pyarrow makes 1.0 of true.
    if _has_decimals(array.type) and not _same(values, array.to_pylist()):
        raise pa.ArrowTypeError("Expected numbers, got true or false")
    return array.type


def _has_decimals(dtype: pa.DataType) -> bool:
    """Whether values of this type are decimal numbers, or hold them at any depth."""
    inner = [dtype.field(i).type for i in range(dtype.num_fields)]
    return pa.types.is_floating(dtype) or any(map(_has_decimals, inner))


def _same(value: Any, stored: Any) -> bool:
    """Whether a JSON value is still true or false where it was before."""
    if isinstance(value, list):
        return all(map(_same, value, stored))
    if isinstance(value, dict):
        return all(_same(item, stored[name]) for name, item in value.items())
    return not isinstance(value, bool) or value is stored


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
        rows = json_rows(path)
        while part := list(islice(rows, PART)):
            columns = [name for name in _columns(part) if name not in left_out]
            try:
                schema = _with_types(schema, {name: [row.get(name) for _, row in part] for name in columns})
            except pa.ArrowException:
                schema = _with_each_value(schema, part, left_out)
    return schema.with_metadata({_LEFT_OUT: json.dumps(left_out)})


def _with_each_value(
    schema: pa.Schema, rows: Iterable[tuple[str, dict[str, Any]]], left_out: dict[str, str]
) -> pa.Schema:
    """As [`_with_types`], value by value: large integers and other numbers fit only so, and faults have a place.

    Args:
        left_out: why columns are left out; those that have to be are added.
    """
    for place, row in rows:
        for name, value in row.items():
            if name in left_out:
                continue
            try:
                schema = _with_types(schema, {name: [value]})
            except pa.ArrowException as error:
                why = f"{place}, column {name!r}: {error}"
                index = schema.get_field_index(name)
                before = pa.null() if index < 0 else schema.field(index).type
                if not (_has_objects(value) if before == pa.null() else _holds_structs(before)):
                    raise ValueError(f"{why}.") from error
                left_out[name] = why
                schema = schema if index < 0 else schema.remove(index)
    return schema


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
    files: Sequence[tuple[str, int, int]], columns: Sequence[str], left_out: Sequence[str] = ()
) -> Iterator[dict[str, Any]]:
    """The rows of .json or .jsonl files without some of their fields; one that a row does not have is missing."""
    for path, *_ in files:
        for _, row in json_rows(path):
            yield dict.fromkeys(columns) | {name: row[name] for name in row if name not in left_out}


def load_json(
    names: Sequence[str], flag: str, cache_dir: str | os.PathLike | None, streaming: bool
) -> Dataset | IterableDataset:
    """`.json` or `.jsonl` files, as [`files.load_files`] reads them, whose arguments and errors these are."""
    if streaming:  # without types: they would be those of the first rows, and later values would be cast to them
        columns = _columns(islice(chain.from_iterable(map(json_rows, names)), PART))
        if not columns:
            raise no_rows(names, flag)
        return stream_of_files(_rows_of_json, None, names, columns=columns)
    found = rows_of_files(_schema_of_json, Features({"schema": Value("binary")}), names, flag, cache_dir)
    schema = pa.ipc.read_schema(pa.py_buffer(found[0]["schema"]))
    left_out = json.loads(schema.metadata[_LEFT_OUT.encode()])
    schema = schema.remove_metadata()
    if left_out and not schema.names:
        raise ValueError(f"{next(iter(left_out.values()))}.")
    for name, why in left_out.items():
        warnings.warn(f"The column {name!r} of {flag} is left out: {why}.", stacklevel=2)
    if not schema.names:
        raise no_rows(names, flag)
    features = Features.from_arrow_schema(schema)
    options: dict[str, Any] = {"columns": tuple(schema.names), "left_out": tuple(left_out)}
    return rows_of_files(_rows_of_json, features, names, flag, cache_dir, **options)
