# SPDX-License-Identifier: Apache-2.0
"""Files with a word and its labels on each line, as in CoNLL's shared tasks and WNUT."""

import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from datasets import Dataset, Features, List, Value

from .file_rows import check_files, lines_of_any_system, rows_of_files, suffix
from .files import load_files

# Files of rows with lists, which are not in this format.
_WITH_LISTS = (".json", ".jsonl", ".parquet")


def _fields(line: str) -> list[str]:
    """Columns between tabs, or else between spaces: other white space, such as no-break spaces, is part of a word."""
    return line.strip("\r\n").split("\t") if "\t" in line else re.split(" +", line.strip(" \r\n"))


def _has_labels(path: str) -> bool:
    """Whether a line has another column than that of the word."""
    return any(len(fields) > 1 for fields in map(_fields, lines_of_any_system(path)) if fields[:1] != ["-DOCSTART-"])


def _sentences(
    files: Sequence[tuple[str, int, int]], text_column: str, label_column: str, least: int
) -> Iterator[dict[str, Any]]:
    """The sentences of files, given by path, time of the last change and size (for the cache).

    least: the smallest number of columns; if there is only one, the labels are the words.
    """
    for path, _, _ in files:
        words: list[str] = []
        labels: list[str] = []
        width = 0
        for number, line in enumerate(lines_of_any_system(path), start=1):
            fields = _fields(line)
            if not "".join(fields).strip() or fields[0] == "-DOCSTART-":
                if words:
                    yield {text_column: words, label_column: labels}
                words, labels = [], []
                continue
            width = width or len(fields)
            if len(fields) != width or width < least:
                wanted = "a word and its label are needed" if width < least else f"the first line has {width}"
                raise ValueError(
                    f"{path}, line {number}: {len(fields)} columns, but {wanted}; an empty line ends a sentence."
                )
            label = fields[-1].strip(" ") if len(fields) > 1 else fields[0]  # a space between tabs may be a word
            if not label:
                raise ValueError(f"{path}, line {number}: the label of {fields[0]!r} is empty.")
            words.append(fields[0])
            labels.append(label)
        if words:
            yield {text_column: words, label_column: labels}


def load_conll_files(
    text_column: str,
    label_column: str,
    paths: str | os.PathLike | Sequence[str | os.PathLike],
    flag: str = "--train_file",
    cache_dir: str | os.PathLike | None = None,
) -> Dataset:
    """Sentences, one per row, as a list of words and a list of labels.

    Args:
        text_column, label_column: the names that the columns get.
        paths: `.json`, `.jsonl` or `.parquet` files that have these columns, for [`load_files`]; any other file, such
            as `.conll`, `.txt` or `.tsv`, but not `.csv`, also as `.gz`, has one word per line, as the first of
            columns separated by tabs or else by spaces. The last column is the label; files of `--test_file` may have
            none. An empty line or `-DOCSTART-` ends a sentence.
        flag, cache_dir: of [`load_files`].

    Raises:
        FileNotFoundError, ValueError: as [`load_files`] does; with file and line if columns are missing.
    """
    names = [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    if any(suffix(name) in _WITH_LISTS for name in names):
        return load_files(names, flag, cache_dir)
    if tables := [name for name in names if suffix(name) == ".csv"]:
        raise ValueError(
            f"{tables[0]}, given by {flag}: .csv files cannot hold lists of words. Give .jsonl or .parquet, or a word "
            "and its label in each line, separated by a tab, in a .tsv or .conll file."
        )
    check_files(names, flag)
    features = Features({text_column: List(Value("string")), label_column: List(Value("string"))})
    unlabelled = flag == "--test_file" and not any(map(_has_labels, names))
    rows = rows_of_files(
        _sentences,
        features,
        names,
        flag,
        cache_dir,
        text_column=text_column,
        label_column=label_column,
        least=1 if unlabelled else 2,
    )
    return rows.remove_columns(label_column) if unlabelled else rows
