# SPDX-License-Identifier: Apache-2.0
"""GLUE's tasks from files: GLUE's own files, or any other format that `load_files` reads."""

import os
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, concatenate_datasets

from .file_rows import check_files, decoded_lines
from .files import FORMATS, file_ending, load_files
from .glue import GLUE_TASKS

# The names of a task's columns in GLUE's own files, where they differ from the names on the Hub.
_COLUMNS: dict[str, dict[str, str]] = {
    "mrpc": {"sentence1": "#1 String", "sentence2": "#2 String", "label": "Quality"},
    "qqp": {"label": "is_duplicate"},
    "stsb": {"label": "score"},
    "mnli": {"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"},
}

# CoLA's files for training and validation have no header.
_COLA = ["source", "label", "mark", "sentence"]
_COLA_TEST = ["index", "sentence"]

# The names of the files of a split, in GLUE's folders and elsewhere.
_SPLITS = {
    "train": ("train",),
    "validation": ("dev", "validation"),
    "validation_matched": ("dev_matched", "validation_matched"),
    "validation_mismatched": ("dev_mismatched", "validation_mismatched"),
    "test": ("test",),
    "test_matched": ("test_matched",),
    "test_mismatched": ("test_mismatched",),
}
_AX_FOLDERS, _AX_FILES = ("diagnostic", "ax"), ("diagnostic", "ax", "test")


def _read_tsv(path: str, task_name: str, predicted: bool) -> Dataset:
    """One of GLUE's .tsv files: fields between tabs, in which quotes are text.

    predicted: whether predictions will be numbered by its rows, so that none may be left out.
    """
    rows = enumerate((line.rstrip("\r\n").split("\t") for line in decoded_lines(path)), start=1)
    header = next(rows, (0, [""]))[1]
    kept, torn = [], []
    if task_name == "cola" and header != _COLA_TEST:
        kept, header = [header], _COLA
    for number, row in rows:
        if len(row) == len(header):
            kept.append(row)
        elif task_name == "qqp" and len(row) < len(header) and not predicted:
            torn.append(number)  # a question that contains a line break
        elif row != [""]:
            why = " Predictions are numbered by row, so that a broken line of a test set is not left out."
            fault = f"{path}, line {number}: {len(row)} fields, but the columns are {len(header)}, {header}."
            raise ValueError(fault + why if predicted else fault)
    if torn:
        warnings.warn(f"{path}: {len(torn)} broken lines were left out, the first is line {torn[0]}.", stacklevel=2)
    if not kept:
        raise ValueError(f"{path} contains no rows.")
    columns = {name: list(values) for name, values in zip(header, zip(*kept, strict=True), strict=True)}
    return Dataset.from_dict(columns)


def _labels(values: Sequence[Any], task_name: str, path: str) -> list[Any]:
    """The labels, converted to numbers if the task's labels are numbers."""
    try:
        if GLUE_TASKS[task_name].regression:
            return [None if value is None else float(value) for value in values]
        labels = [int(value) if re.fullmatch(r"-?\d+", str(value)) else value for value in values]
    except ValueError as error:
        raise ValueError(f"{path}: a label is not a number ({error}).") from error
    examples = {isinstance(label, int): label for label in labels if label is not None}
    if len(examples) > 1:
        raise ValueError(
            f"{path}: some labels are numbers and others are not, such as {examples[True]} and {examples[False]!r}: "
            "give all labels as numbers, or all as names."
        )
    return labels


def load_glue_files(
    task_name: str,
    paths: Sequence[str | os.PathLike],
    flag: str = "--train_file",
    cache_dir: str | os.PathLike | None = None,
) -> Dataset:
    """Files of one split of a GLUE task, with the columns that [`GLUE_TASKS`] names.

    Args:
        task_name: one of [`GLUE_TASKS`].
        paths: GLUE's own `.tsv` files (quotes are text, CoLA's have no header, and broken lines of QQP are left out
            with a warning, but refused in a test set), or files that [`load_files`] reads, with GLUE's column names or
            those of [`GLUE_TASKS`].
        flag, cache_dir: see [`load_files`].

    Raises:
        FileNotFoundError, ValueError: as [`load_files`]; with file and line if fields are missing.
    """
    names = [os.fspath(path) for path in paths]
    check_files(names, flag)
    if all(file_ending(name) == ".tsv" for name in names):
        dataset = concatenate_datasets([_read_tsv(name, task_name, flag.startswith("--test")) for name in names])
    else:
        dataset = load_files(names, flag, cache_dir)
    known = _COLUMNS.get(task_name, {})
    renamed = {
        theirs: ours
        for ours, theirs in known.items()
        if theirs in dataset.column_names and ours not in dataset.column_names
    }
    dataset = dataset.rename_columns(renamed)
    if "label" in dataset.column_names:
        labels = _labels(dataset["label"], task_name, names[0])
        position = dataset.column_names
        dataset = dataset.remove_columns("label").add_column("label", labels).select_columns(position)
    return dataset


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _find(folder: Path, stems: Sequence[str]) -> Path | None:
    """The file with one of these names and any suffix that can be read; GLUE's own file first."""
    for stem in stems:
        for ending in (".tsv", *(ending for ending in FORMATS if ending != ".tsv")):
            for path in (folder / f"{stem}{ending}", folder / f"{stem}{ending}.gz"):
                if path.is_file():
                    return path
    return None


def find_glue_files(data_dir: str | os.PathLike, task_name: str) -> dict[str, list[str]]:
    """The files of a task, by split, in a folder that has a folder for each task, like GLUE's own.

    A task's folder has GLUE's name or the task's name (`STS-B`, `stsb`). Its files are `train`, `dev` or `validation`,
    and `test`, for MNLI with `_matched` and `_mismatched`, and its diagnostic set `diagnostic/diagnostic.tsv`.

    Raises:
        FileNotFoundError: if the folder, the task's folder, or its training or validation files are missing.
    """
    root = Path(data_dir)
    if not root.is_dir():
        raise FileNotFoundError(f"--data_dir {root} is not a folder.")
    folders = {_plain(path.name): path for path in sorted(root.iterdir()) if path.is_dir()}
    if task_name not in folders:
        raise FileNotFoundError(
            f"--data_dir {root} has no folder for {task_name}; it has {', '.join(sorted(folders)) or 'none'}."
        )
    splits = {name for name in _SPLITS if name == "train" or name.endswith("matched") == (task_name == "mnli")}
    found = {split: _find(folders[task_name], _SPLITS[split]) for split in _SPLITS if split in splits}
    missing = [f"{_SPLITS[split][0]}.tsv" for split, path in found.items() if path is None and "test" not in split]
    if missing:
        raise FileNotFoundError(f"{folders[task_name]} has no {' and no '.join(missing)}.")
    if task_name == "mnli":
        places = [folders[name] for name in _AX_FOLDERS if name in folders]
        found["test_ax"] = next((path for place in places if (path := _find(place, _AX_FILES))), None)
    return {split: [str(path)] for split, path in found.items() if path is not None}
