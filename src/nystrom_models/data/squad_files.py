# SPDX-License-Identifier: Apache-2.0
"""Files of questions in SQuAD's format, and as flat rows."""

import json
import os
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from datasets import Dataset, Features, List, Value

from .file_rows import check_files, decoded_lines, rows_of_files
from .files import file_ending, load_files
from .json_files import json_rows
from .question_answering import is_impossible, without_impossible_answers

_FEATURES = Features(
    {
        "id": Value("string"),
        "title": Value("string"),
        "context": Value("large_string"),
        "question": Value("string"),
        "answers": {"text": List(Value("string")), "answer_start": List(Value("int64"))},
    }
)


def _is_nested(path: str) -> bool:
    """Whether a file is one JSON object that holds all rows, and not an object for each, on one line or many."""
    if file_ending(path) != ".json":
        return False
    first = next((line for line in decoded_lines(path) if line.strip()), "")
    if not first.lstrip().startswith("{"):
        return False  # a list, which is not read yet
    return any("data" in row for _, row in islice(json_rows(path), 1))


def _value(item: Any, field: str, kind: type, where: str) -> Any:
    if not isinstance(item, dict) or not isinstance(item.get(field), kind):
        raise ValueError(f"{where} has no {field!r} of the type {kind.__name__}.")
    return item[field]


def _row(item: Any, title: str, context: str, where: str) -> dict[str, Any]:
    answers = [] if is_impossible(item.get("is_impossible"), where) else item.get("answers") or []
    if isinstance(answers, dict):  # as in the data set on the Hub
        texts, starts = (_value(answers, field, list, f"{where}.answers") for field in ("text", "answer_start"))
        if len(texts) != len(starts):
            raise ValueError(f"{where}.answers has {len(texts)} 'text', but {len(starts)} 'answer_start'.")
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    elif not isinstance(answers, list):
        raise ValueError(f"{where} has no 'answers' of the type list.")
    name = item.get("id")
    return {
        "id": where if name is None else str(name),
        "title": title,
        "context": context,
        "question": _value(item, "question", str, where),
        "answers": {
            "text": [_value(answer, "text", str, f"{where}, an answer,") for answer in answers],
            "answer_start": [_value(answer, "answer_start", int, f"{where}, an answer,") for answer in answers],
        },
    }


def _questions(files: Sequence[tuple[str, int, int]]) -> Iterator[dict[str, Any]]:
    """The questions of files, given by path, time of the last change and size (for the cache)."""
    for path, _, _ in files:
        try:
            content = json.loads("".join(decoded_lines(path)))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not JSON ({error}).") from error
        for i, document in enumerate(_value(content, "data", list, path)):
            where = f"{path}, data[{i}]"
            if isinstance(document, dict) and "paragraphs" not in document:
                context = _value(document, "context", str, where)
                yield _row(document, str(document.get("title", "")), context, where)
                continue
            for j, paragraph in enumerate(_value(document, "paragraphs", list, where)):
                place = f"{where}.paragraphs[{j}]"
                context = _value(paragraph, "context", str, place)
                for k, question in enumerate(_value(paragraph, "qas", list, place)):
                    _value(question, "question", str, f"{place}.qas[{k}]")
                    yield _row(question, str(document.get("title", "")), context, f"{place}.qas[{k}]")


def load_squad_files(
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    flag: str = "--train_file",
    cache_dir: str | os.PathLike | None = None,
) -> Dataset:
    """Questions, one per row, with the columns `id`, `title`, `context`, `question` and `answers`; none where
    `is_impossible` is true.

    Args:
        paths: SQuAD's own `.json` files, of version 1.1 or 2.0: an object whose `data` hold `paragraphs` with `qas`;
            an object whose `data` are flat rows; or the files of [`load_files`], with these columns.
        flag, cache_dir: of [`load_files`].

    Raises:
        FileNotFoundError, ValueError: as [`load_files`] does; with the place in the file if a field is missing.
    """
    names = [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    check_files(names, flag)
    nested = list(map(_is_nested, names))
    if not any(nested):
        return without_impossible_answers(load_files(names, flag, cache_dir), f"the files of {flag}")
    if not all(nested):
        one, other = names[nested.index(True)], names[nested.index(False)]
        raise ValueError(f"{one} is one object with 'data', but {other} is not: give {flag} files of one format.")
    return rows_of_files(_questions, _FEATURES, names, flag, cache_dir)
