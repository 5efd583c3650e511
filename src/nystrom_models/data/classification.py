# SPDX-License-Identifier: Apache-2.0
"""Examples for sequence classification and regression."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from datasets import ClassLabel, Dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

TruncationStrategy = Literal["head", "tail", "head_tail"]


@dataclass(frozen=True)
class TextTask:
    """What is to be told from a text or a pair of texts."""

    text_columns: tuple[str, ...]
    label_column: str = "label"
    label_names: tuple[str, ...] | None = None  # in the order of their ids; None: those of the training set
    regression: bool = False  # the label is a number
    metric: str = "classification"  # configuration of the metric module
    prediction_names: tuple[str, ...] | None = None  # how prediction files write the classes; None: by label_names
    prediction_files: Mapping[str, str] = field(default_factory=dict)  # by split


def require_column(dataset: Dataset, column: str, where: str) -> None:
    """Raises a ValueError, which calls the data set `where`, if a column does not exist or lacks a value."""
    if column not in dataset.column_names:
        raise ValueError(
            f"{where[0].upper()}{where[1:]} has no column {column!r}; its columns are {dataset.column_names}."
        )
    row = 0
    for batch in dataset.select_columns([column]).with_format("arrow").iter(10_000):
        if batch[column].null_count:
            row += batch[column].is_null().to_pylist().index(True)
            raise ValueError(f"The column {column!r} of {where} has no value in row {row + 1}.")
        row += len(batch)


def _label_values(dataset: Dataset, column: str, labels: Sequence[Any]) -> Sequence[Any]:
    """The labels themselves, by name where the data set numbers them."""
    feature = dataset.features[column]
    return feature.int2str(labels) if isinstance(feature, ClassLabel) else labels


def class_labels(dataset: Dataset, label_column: str) -> dict[Hashable, int]:
    """Class ids by label: in the order of the column's `ClassLabel`, else sorted."""
    feature = dataset.features[label_column]
    labels = feature.names if isinstance(feature, ClassLabel) else sorted(dataset.unique(label_column))
    return {label: i for i, label in enumerate(labels)}


def _truncate(rows: dict[str, list[list[int]]], max_length: int, strategy: TruncationStrategy) -> None:
    """Keeps the last tokens of each row, or its first and last by halves, besides the special ones at both ends."""
    for i, special in enumerate(rows["special_tokens_mask"]):
        length = len(special)
        if length > max_length:
            start = special.index(0)
            end = length - special[::-1].index(0)
            budget = max_length - start - (length - end)
            head = budget // 2 if strategy == "head_tail" else 0
            kept = [*range(start + head), *range(end - (budget - head), length)]
            for name in rows:
                rows[name][i] = [rows[name][i][k] for k in kept]


def classification_dataset(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    text_column: str | Sequence[str] = "text",
    label_column: str | None = "label",
    label_names: Sequence[str] | Mapping[Hashable, int] | None = None,
    regression: bool = False,
    truncation_strategy: TruncationStrategy = "head",
    num_proc: int | None = None,
    desc: str = "Tokenizing",
    where: str = "the data set",
) -> Dataset:
    """Tokenized rows with a label.

    Args:
        dataset: with one or two text columns, and a label column.
        tokenizer: truncates a text to `max_length`, of a pair the longer one first.
        max_length: the longest row, special tokens included.
        text_column: the text, or the two texts of a pair.
        label_column: the label; `None` leaves labels out.
        label_names: the classes in the order of their ids, or ids by label; the labels are ids if not given.
        regression: the label is a number.
        truncation_strategy: what is kept of a text that is too long: its `"head"`, its `"tail"`, or half of each.
        num_proc: processes of `datasets.Dataset.map`.
        desc: text beside the progress bar.
        where: what error messages call the data set.

    Returns:
        Columns `input_ids`, `token_type_ids`, `attention_mask`, `labels` (class ids, or floats for regression) and
        `length`.

    Raises:
        ValueError: if a column does not exist, has another type or lacks a value, a label is none of `label_names`, or
            a pair is to be truncated other than at its end.
    """
    text_columns = [text_column] if isinstance(text_column, str) else list(text_column)
    if not 1 <= len(text_columns) <= 2:
        raise ValueError(f"One or two text columns are needed, but they are {text_columns}.")
    if truncation_strategy != "head" and len(text_columns) > 1:
        raise ValueError(f"Pairs of texts need --truncation_strategy head, but it is {truncation_strategy}.")
    if max_length <= tokenizer.num_special_tokens_to_add(pair=len(text_columns) > 1):
        raise ValueError(f"--max_length must leave room for text beside special tokens, but is {max_length}.")
    for column in text_columns:
        require_column(dataset, column, where)
        if (dtype := dataset.features[column].dtype) not in ("string", "large_string"):
            raise ValueError(f"The column {column!r} of {where} must hold text, but holds {dtype}.")
    ids = label_names if isinstance(label_names, Mapping) or label_names is None else None
    if label_names is not None and ids is None:
        ids = {name: i for i, name in enumerate(label_names)}
    if label_column is not None:
        require_column(dataset, label_column, where)
        if regression:
            if not str(dataset.features[label_column].dtype).startswith(("int", "uint", "float", "double")):
                raise ValueError(
                    f"The column {label_column!r} of {where} must hold numbers for regression, but holds "
                    f"{dataset.features[label_column].dtype}."
                )
        elif ids is not None:
            labels = dataset.unique(label_column)
            unknown = set(_label_values(dataset, label_column, labels)) - ids.keys()
            if unknown:
                raise ValueError(
                    f"The column {label_column!r} of {where} holds {sorted(unknown, key=str)}, which is none of "
                    f"the labels {list(ids)}."
                )

    def tokenize(batch):
        rows = dict(
            tokenizer(
                *(batch[column] for column in text_columns),
                truncation=truncation_strategy == "head",
                max_length=max_length if truncation_strategy == "head" else None,
                return_special_tokens_mask=truncation_strategy != "head",
                verbose=False,
            )
        )
        if truncation_strategy != "head":
            _truncate(rows, max_length, truncation_strategy)
            del rows["special_tokens_mask"]
        if label_column is not None:
            labels = batch[label_column]
            if regression:
                labels = [float(label) for label in labels]
                if not all(map(math.isfinite, labels)):
                    raise ValueError(f"The column {label_column!r} of {where} holds a label that is not finite.")
            elif ids is not None:
                labels = [ids[label] for label in _label_values(dataset, label_column, labels)]
            rows["labels"] = labels
        rows["length"] = [len(row) for row in rows["input_ids"]]
        return rows

    return dataset.map(tokenize, batched=True, remove_columns=dataset.column_names, num_proc=num_proc, desc=desc)


class ClassificationCollator(DataCollatorWithPadding):
    """Pads the rows of [`classification_dataset`] to the longest of a batch."""

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        return super().__call__([{name: row[name] for name in row if name != "length"} for row in features])
