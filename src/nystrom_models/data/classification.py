# SPDX-License-Identifier: Apache-2.0
"""Examples for sequence classification, with one label or several, and regression."""

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from datasets import ClassLabel, Dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

TruncationStrategy = Literal["head", "tail", "head_tail"]


@dataclass(frozen=True)
class TextTask:
    """What a model predicts from a text or a pair of texts."""

    text_columns: tuple[str, ...]
    label_column: str = "label"
    label_names: tuple[str, ...] | None = None  # in the order of their ids; None: found in the training set
    regression: bool = False  # the label is a number
    multi_label: bool = False  # the label is a list of classes, or a text that is split at `label_delimiter`
    label_delimiter: str = ","
    metric: str = "classification"  # configuration of the metric module
    best_metric: str = "accuracy"  # the metric by which models are compared
    prediction_names: tuple[str, ...] | None = None  # names of the classes in prediction files; None: label_names
    prediction_files: Mapping[str, str] = field(default_factory=dict)  # by split
    example: str | None = None  # a text, for model cards


def require_column(dataset: Dataset, column: str, where: str) -> None:
    """Raises a ValueError if a column does not exist or lacks a value; the message calls the data set `where`."""
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


def _listed(dataset: Dataset, column: str) -> bool:
    """Whether the labels of a row are a list."""
    return hasattr(dataset.features[column], "feature")


def _label_feature(dataset: Dataset, column: str) -> Any:
    feature = dataset.features[column]
    return feature.feature if _listed(dataset, column) else feature


def _label_values(dataset: Dataset, column: str, labels: Sequence[Any], delimiter: str | None) -> list[Any]:
    """The labels, by name if the data set numbers them; lists of labels if a row has several."""
    feature = _label_feature(dataset, column)
    if delimiter is not None and not _listed(dataset, column):
        labels = [[part.strip() for part in str(label).split(delimiter) if part.strip()] for label in labels]
    if isinstance(feature, ClassLabel):
        return [feature.int2str(label) for label in labels]
    return list(labels)


def _unique_labels(dataset: Dataset, column: str, delimiter: str | None) -> Iterator[Hashable]:
    """Every label that occurs, at least once."""
    for batch in dataset.select_columns([column]).iter(10_000):
        for label in _label_values(dataset, column, batch[column], delimiter):
            yield from label if delimiter is not None else (label,)


def class_labels(dataset: Dataset, label_column: str, delimiter: str | None = None) -> dict[Hashable, int]:
    """Class ids by label: in the order of the column's `ClassLabel`, otherwise sorted.

    With a `delimiter`, a row has several labels: a list, or a text that is split at the delimiter.
    """
    feature = _label_feature(dataset, label_column)
    if isinstance(feature, ClassLabel):
        labels = feature.names
    else:
        labels = sorted(set(_unique_labels(dataset, label_column, delimiter)))
    return {label: i for i, label in enumerate(labels)}


def _truncate(rows: dict[str, list[list[int]]], max_length: int, strategy: TruncationStrategy) -> None:
    """Truncates rows: keeps the special tokens at both ends, and the last of the other tokens, or half at each end."""
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
    label_delimiter: str | None = None,
    num_proc: int | None = None,
    load_from_cache_file: bool = True,
    desc: str = "Tokenizing",
    where: str = "the data set",
    apart: bool = False,
) -> Dataset:
    """Tokenized rows with a label.

    Args:
        dataset: with one or two text columns, and a label column.
        tokenizer: truncates texts to `max_length`; in a pair, the longer text first.
        max_length: the longest row, special tokens included.
        text_column: the text, or the two texts of a pair.
        label_column: the label; `None` leaves labels out.
        label_names: the classes in the order of their ids, or a mapping from label to id; if None, labels are ids.
        regression: the label is a number.
        truncation_strategy: which part of a text that is too long is kept: `"head"`, `"tail"`, or `"head_tail"`, half
            of each.
        label_delimiter: a row has several labels: a list, or a text that is split at this delimiter. Needs
            `label_names`.
        num_proc: processes of `datasets.Dataset.map`.
        load_from_cache_file: whether its cached result is used.
        desc: label of the progress bar.
        where: the name of the data set in error messages.
        apart: the two texts of a pair are tokenized and truncated each by itself, for models with `dual_encoder`.

    Returns:
        Columns `input_ids`, `token_type_ids`, `attention_mask`, `labels` (class ids; floats for regression; a 1.0 or
        0.0 for each class where a row has several labels), `length` and `index`, the number of the row. With `apart`,
        each of the first three is a pair, and the length that of both texts.

    Raises:
        ValueError: if a column does not exist, has a wrong type or lacks a value, a label is not in `label_names`, or
            `truncation_strategy` is not `"head"` for pairs.
    """
    text_columns = [text_column] if isinstance(text_column, str) else list(text_column)
    ids = label_names if isinstance(label_names, Mapping) or label_names is None else None
    if label_names is not None and ids is None:
        ids = {name: i for i, name in enumerate(label_names)}
    if apart and len(text_columns) != 2:
        raise ValueError(f"A model with dual_encoder=True needs two text columns, but they are {text_columns}.")
    _check_texts(dataset, tokenizer, max_length, text_columns, truncation_strategy, where, apart)
    if label_column is not None:
        _check_labels(dataset, label_column, ids, regression, label_delimiter, where)

    def build_rows(batch, indices):
        texts = [batch[column] for column in text_columns]
        if apart:
            both = [_tokenized([column], tokenizer, max_length, truncation_strategy) for column in texts]
            rows: dict[str, list] = {name: list(zip(*(half[name] for half in both), strict=True)) for name in both[0]}
        else:
            rows = _tokenized(texts, tokenizer, max_length, truncation_strategy)
        if label_column is not None:
            labels = batch[label_column]
            if regression:
                labels = [float(label) for label in labels]
                if not all(map(math.isfinite, labels)):
                    raise ValueError(f"The column {label_column!r} of {where} holds a label that is not finite.")
            elif ids is not None:
                labels = _label_values(dataset, label_column, labels, label_delimiter)
                if label_delimiter is None:
                    labels = [ids[label] for label in labels]
                else:
                    labels = [[float(name in row) for name in ids] for row in map(set, labels)]
            rows["labels"] = labels
        rows["length"] = [sum(map(len, row)) if apart else len(row) for row in rows["input_ids"]]
        rows["index"] = indices
        return rows

    return dataset.map(
        build_rows,
        batched=True,
        with_indices=True,
        remove_columns=dataset.column_names,
        num_proc=num_proc,
        load_from_cache_file=load_from_cache_file,
        desc=desc,
    )


def _check_texts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    text_columns: Sequence[str],
    truncation_strategy: TruncationStrategy,
    where: str,
    apart: bool,
) -> None:
    """Raises the errors of [`classification_dataset`] about texts and their length."""
    if not 1 <= len(text_columns) <= 2:
        raise ValueError(f"One or two text columns are needed, but they are {text_columns}.")
    together = len(text_columns) > 1 and not apart
    if truncation_strategy != "head" and together:
        raise ValueError(f"Pairs of texts need --truncation_strategy head, but it is {truncation_strategy}.")
    if max_length <= tokenizer.num_special_tokens_to_add(pair=together):
        raise ValueError(f"--max_length must leave room for text beside special tokens, but is {max_length}.")
    for column in text_columns:
        require_column(dataset, column, where)
        if (dtype := dataset.features[column].dtype) not in ("string", "large_string"):
            raise ValueError(f"The column {column!r} of {where} must hold text, but holds {dtype}.")


def _check_labels(
    dataset: Dataset,
    label_column: str,
    ids: Mapping[Hashable, int] | None,
    regression: bool,
    label_delimiter: str | None,
    where: str,
) -> None:
    """Raises the errors of [`classification_dataset`] about labels."""
    require_column(dataset, label_column, where)
    if regression:
        dtype = str(dataset.features[label_column].dtype)
        if not dtype.startswith(("int", "uint", "float", "double")):
            raise ValueError(
                f"The column {label_column!r} of {where} must hold numbers for regression, but holds {dtype}."
            )
    elif ids is not None:
        unknown = set(_unique_labels(dataset, label_column, label_delimiter)) - ids.keys()
        if unknown:
            raise ValueError(
                f"The column {label_column!r} of {where} contains {sorted(unknown, key=str)}, not among the "
                f"labels {list(ids)}."
            )


def _tokenized(
    texts: Sequence[Sequence[str]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    truncation_strategy: TruncationStrategy,
) -> dict[str, list]:
    """The tokenizer's columns of one or two columns of texts, truncated."""
    by_tokenizer = truncation_strategy == "head"
    rows = dict(
        tokenizer(
            *texts,
            truncation=by_tokenizer,
            max_length=max_length if by_tokenizer else None,
            return_special_tokens_mask=not by_tokenizer,
            verbose=False,
        )
    )
    if not by_tokenizer:
        _truncate(rows, max_length, truncation_strategy)
        del rows["special_tokens_mask"]
    return rows


@dataclass
class ClassificationCollator(DataCollatorWithPadding):
    """Pads the rows of [`classification_dataset`] to the longest of a batch. Pairs that stand apart become (B, 2, N).

    Args:
        with_index: add the numbers of the rows, for `predict`. A model does not take them.
    """

    with_index: bool = False

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        rows = [
            {name: row[name] for name in (*self.tokenizer.model_input_names, "labels") if name in row}
            for row in features
        ]
        first = rows[0]["input_ids"][:1]
        apart = len(first) == 1 and bool(np.ndim(first[0]))
        batch = self._pairs(rows) if apart else dict(super().__call__(rows))
        return batch | ({"index": torch.tensor([row["index"] for row in features])} if self.with_index else {})

    def _pairs(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Pairs whose texts stand apart, (B, 2, N), both padded to the longest of either."""
        texts = [
            {name: row[name][number] for name in self.tokenizer.model_input_names if name in row}
            for row in rows
            for number in range(2)
        ]
        batch = {name: values.unflatten(0, (-1, 2)) for name, values in super().__call__(texts).items()}
        labels = [row["labels"] for row in rows if "labels" in row]
        return batch | ({"labels": torch.tensor(labels)} if labels else {})
