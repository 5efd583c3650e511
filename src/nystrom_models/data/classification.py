# SPDX-License-Identifier: Apache-2.0
"""Examples for sequence classification, with one label or several, and regression."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import ClassLabel, Dataset, Value
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from .rows import cutting_on_the_right, make_rows
from .unknown_text import check_known_documents
from .windows import window_starts

TruncationStrategy = Literal["head", "tail", "head_tail", "windows"]


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
    split_special_tokens: bool = False  # in a text, "[MASK]" is these six characters, not a special token


def is_table(dataset: Dataset) -> bool:
    """Whether the rows come from .csv or .tsv files, in which an empty field is a missing value."""
    return dataset.builder_name == "csv"


def require_column(dataset: Dataset, column: str, where: str, values: bool = True, flag: str | None = None) -> None:
    """Raises a ValueError if a column does not exist or, with `values`, lacks one; the message calls the data set
    `where`, and says that `flag` names the column."""
    if column not in dataset.column_names:
        hint = f": give {flag}" if flag else ""
        raise ValueError(
            f"{where[0].upper()}{where[1:]} has no column {column!r}; its columns are {dataset.column_names}{hint}."
        )
    for row, batch in _batches(dataset, column) if values else ():
        if batch.null_count:
            row += batch.is_null().to_pylist().index(True)
            hint = ' An empty field of a .csv or .tsv file is no value; in .jsonl files, "" is an empty text.'
            hint = hint if is_table(dataset) else ""
            raise ValueError(f"The column {column!r} of {where} has no value in row {row}.{hint}")


def require_texts(dataset: Dataset, column: str, where: str, flag: str | None = None) -> None:
    """As [`require_column`]; and if the column holds something else than text."""
    require_column(dataset, column, where, flag=flag)
    dtype = getattr(dataset.features[column], "dtype", dataset.features[column])
    if dtype not in ("string", "large_string"):
        hint = " In .csv and .tsv files, a column that holds only numbers is never text: write the file as .jsonl."
        hint = hint if is_table(dataset) else ""
        raise ValueError(f"The column {column!r} of {where} must hold text, but holds {dtype}.{hint}")


def require_labels(dataset: Dataset, column: str, several: bool, where: str, flag: str | None = None) -> None:
    """As [`require_column`] and [`require_kind_of_labels`]. If rows have several labels, no list lacks a value, and an
    empty field of a .csv or .tsv file, which is read as missing, is a row without labels."""
    if several and column in dataset.column_names and is_table(dataset) and not has_lists(dataset, column):
        return
    require_column(dataset, column, where, flag=flag)
    require_kind_of_labels(dataset, column, several, where)
    if several and has_lists(dataset, column):
        require_full_lists(dataset, column, where)


def require_kind_of_labels(dataset: Dataset, column: str, several: bool, where: str) -> None:
    """Raises a ValueError if labels are neither texts nor numbers; with `several`, they may be lists of them."""
    feature = _label_feature(dataset, column)
    if isinstance(feature, dict):
        raise ValueError(
            f"The column {column!r} of {where} must hold labels, but holds objects. A file needs an object for each "
            'row, as pandas writes with df.to_json(path, orient="records", lines=True).'
        )
    if not isinstance(feature, Value | ClassLabel):
        raise ValueError(f"The column {column!r} of {where} must hold labels, but holds {dataset.features[column]}.")
    if has_lists(dataset, column) and not several:
        raise ValueError(
            f"The column {column!r} of {where} holds lists, but each row needs one label: only --multi_label takes "
            "several."
        )


def require_full_lists(dataset: Dataset, column: str, where: str) -> None:
    """Raises a ValueError if a list of a column, which has one in every row, lacks a value."""
    for row, values in _batches(dataset, column):
        if pc.list_flatten(values).null_count:
            row += next(i for i, items in enumerate(values.to_pylist()) if None in items)
            raise ValueError(f"The column {column!r} of {where} has a list without a value in row {row}.")


def _batches(dataset: Dataset, column: str) -> Iterator[tuple[int, pa.ChunkedArray]]:
    """The values of a column, some rows at a time, each time with the number of the first row, counted from 1."""
    row = 1
    for batch in dataset.select_columns([column]).with_format("arrow").iter(10_000):
        yield row, batch[column]
        row += len(batch)


def has_lists(dataset: Dataset, column: str) -> bool:
    """Whether the labels of a row are a list."""
    return hasattr(dataset.features[column], "feature")


def _label_feature(dataset: Dataset, column: str) -> Any:
    feature = dataset.features[column]
    return feature.feature if has_lists(dataset, column) else feature


def has_decimals(dataset: Dataset, column: str) -> bool:
    """Whether labels are floating-point numbers."""
    return str(getattr(_label_feature(dataset, column), "dtype", "")).startswith(("float", "double"))


def has_integers(dataset: Dataset, column: str) -> bool:
    """Whether labels are integers that have no names in the data set."""
    feature = _label_feature(dataset, column)
    return isinstance(feature, Value) and feature.dtype.startswith(("int", "uint"))


def _label_values(dataset: Dataset, column: str, labels: Sequence[Any], delimiter: str | None) -> list[Any]:
    """The labels, by name if the data set numbers them; lists of labels if a row has several."""
    feature = _label_feature(dataset, column)
    if delimiter is not None and not has_lists(dataset, column):
        texts = ["" if label is None else str(label) for label in labels]
        labels = [[part.strip() for part in text.split(delimiter) if part.strip()] for text in texts]
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


def _kept(length: int, size: int, strategy: TruncationStrategy, overlap: int) -> list[list[int]]:
    """Which of `length` tokens are read, `size` of them at a time: the tail, half of each end, or all in windows."""
    if strategy == "windows":
        return [list(range(start, min(start + size, length))) for start in window_starts(length, size, overlap)]
    head = size // 2 if strategy == "head_tail" else 0
    return [[*range(head), *range(length - (size - head), length)]]


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
    doc_stride: int = 0,
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
        truncation_strategy: what is read of a text that is too long: `"head"`, `"tail"`, `"head_tail"`, half of each;
            or `"windows"`, all of it in several rows, each with the text's label.
        label_delimiter: a row has several labels: a list, or a text that is split at this delimiter. Needs
            `label_names`.
        num_proc: processes of `datasets.Dataset.map`.
        load_from_cache_file: whether its cached result is used.
        desc: label of the progress bar.
        where: the name of the data set in error messages.
        doc_stride: tokens that neighbouring windows share, as in Transformers' example scripts. The last window of a
            text is as long as the others and may share more.
        apart: the two texts of a pair are tokenized and truncated each by itself, for models with `dual_encoder`.

    Returns:
        Columns `input_ids`, `token_type_ids`, `attention_mask`, `labels` (class ids; floats for regression; a 1.0 or
        0.0 for each class where a row has several labels), `length`, `index`, the number of the row, `document`, the
        number of its text, and `truncated`, whether the text is longer than `max_length`. With `apart`, each of the
        first three is a pair, and the length that of both texts.

    Raises:
        ValueError: if a column does not exist, has a wrong type or lacks a value, a label is not in `label_names`,
            the tokenizer knows less than half of the texts, `truncation_strategy` is not `"head"` for pairs, or
            `doc_stride` leaves no room for new tokens.
    """
    text_columns = [text_column] if isinstance(text_column, str) else list(text_column)
    ids = label_names if isinstance(label_names, Mapping) or label_names is None else None
    if label_names is not None and ids is None:
        ids = {name: i for i, name in enumerate(label_names)}
    if apart and len(text_columns) != 2:
        raise ValueError(f"A model with dual_encoder=True needs two text columns, but they are {text_columns}.")
    _check_texts(dataset, tokenizer, max_length, text_columns, truncation_strategy, doc_stride, where, apart)
    if label_column is not None:
        check_labels(dataset, label_column, ids, regression, label_delimiter, where)
    check_known_documents(dataset, text_columns, tokenizer, where)

    def build_rows(batch, indices):
        texts = [batch[column] for column in text_columns]
        if apart:
            rows = _tokenized_apart(texts, tokenizer, max_length, truncation_strategy)
        else:
            rows = _tokenized(texts, tokenizer, max_length, truncation_strategy, doc_stride)
        if label_column is not None:
            labels = encoded_labels(
                dataset, label_column, batch[label_column], ids, regression, label_delimiter, where
            )
            rows["labels"] = [labels[i] for i in rows["document"]]
        rows["length"] = [sum(map(len, row)) if apart else len(row) for row in rows["input_ids"]]
        rows["document"] = [indices[i] for i in rows["document"]]
        return rows

    # Of a long text, all tokens are in memory unless the tokenizer cuts it.
    batch_size = 1000 if truncation_strategy == "head" else 100
    return make_rows(dataset, build_rows, batch_size, num_proc, load_from_cache_file, desc)


def _check_texts(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    text_columns: Sequence[str],
    truncation_strategy: TruncationStrategy,
    doc_stride: int,
    where: str,
    apart: bool,
) -> None:
    """Raises the errors of [`classification_dataset`] about texts and their length."""
    if not 1 <= len(text_columns) <= 2:
        raise ValueError(f"One or two text columns are needed, but they are {text_columns}.")
    together = len(text_columns) > 1 and not apart
    if truncation_strategy != "head" and together:
        raise ValueError(f"Pairs of texts need --truncation_strategy head, but it is {truncation_strategy}.")
    if truncation_strategy == "windows" and apart:
        raise ValueError(
            "Texts of a model with dual_encoder=True have no windows: --truncation_strategy head or tail."
        )
    room = max_length - tokenizer.num_special_tokens_to_add(pair=together)
    if room < 1:
        raise ValueError(f"--max_length must leave room for text beside special tokens, but is {max_length}.")
    if truncation_strategy == "windows" and doc_stride >= room:
        raise ValueError(
            f"--doc_stride must be less than {room}, the tokens of a text in a window of --max_length {max_length}, "
            f"but is {doc_stride}."
        )
    for column in text_columns:
        require_texts(dataset, column, where)


def _found(ids: Mapping[Hashable, int]) -> Callable[[Hashable], int | None]:
    """Gives the id of a label. A file whose labels are all numbers has the number 1, another one the text "1"."""
    by_name = {str(label): i for label, i in ids.items()}

    def find(label: Hashable) -> int | None:
        named = by_name.get(str(label))
        # As keys, True and False are 1 and 0: their names come first.
        return named if named is not None and isinstance(label, bool) else ids.get(label, named)

    return find


def encoded_labels(
    dataset: Dataset,
    label_column: str,
    labels: Sequence[Any],
    ids: Mapping[Hashable, int] | None,
    regression: bool,
    label_delimiter: str | None,
    where: str,
) -> list[Any]:
    """Labels of rows of a data set as [`classification_dataset`] gives them, whose arguments and errors these are.

    labels: those of the rows, after [`check_labels`]. ids: by label; None if labels are ids.
    """
    if regression:
        numbers = [float(label) for label in labels]
        if not all(map(math.isfinite, numbers)):
            raise ValueError(f"The column {label_column!r} of {where} holds a label that is not finite.")
        return numbers
    if ids is None:
        return list(labels)
    values = _label_values(dataset, label_column, labels, label_delimiter)
    found = _found(ids)
    if label_delimiter is None:
        return [found(label) for label in values]
    classes = sorted(set(ids.values()))
    return [[float(i in row) for i in classes] for row in (set(map(found, labels)) for labels in values)]


def check_labels(
    dataset: Dataset,
    label_column: str,
    ids: Mapping[Hashable, int] | None,
    regression: bool,
    label_delimiter: str | None,
    where: str,
) -> None:
    """Raises the errors of [`classification_dataset`] about labels."""
    require_labels(dataset, label_column, label_delimiter is not None, where)
    if regression:
        dtype = str(dataset.features[label_column].dtype)
        if not dtype.startswith(("int", "uint", "float", "double")):
            raise ValueError(
                f"The column {label_column!r} of {where} must hold numbers for regression, but holds {dtype}."
            )
    elif ids is not None:
        found = _found(ids)
        labels = set(_unique_labels(dataset, label_column, label_delimiter))
        unknown = [label for label in labels if found(label) is None]
        by_name = label_delimiter is not None and not has_lists(dataset, label_column)
        if has_decimals(dataset, label_column) and (by_name or all(isinstance(label, str) for label in ids)):
            raise ValueError(
                f"The column {label_column!r} of {where} holds decimal numbers, and the labels are {list(ids)}. "
                "Names of classes, such as 1.10, must be text: write them in a .jsonl or .parquet file."
            )
        if unknown:
            hint = " If its labels are hidden, remove their column." if where.startswith("the test ") else ""
            raise ValueError(
                f"The column {label_column!r} of {where} contains {sorted(unknown, key=str)}, not among the "
                f"labels {list(ids)}.{hint}"
            )


def _tokenized(
    texts: Sequence[Sequence[str]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    truncation_strategy: TruncationStrategy,
    doc_stride: int,
) -> dict[str, list]:
    """The tokenizer's columns of one or two columns of texts, truncated; besides, `document` and `truncated`."""
    if truncation_strategy == "head":
        return _cut_by_tokenizer(texts, tokenizer, max_length)
    whole = dict(tokenizer(*texts, truncation=False, return_special_tokens_mask=True, verbose=False))
    masks = whole.pop("special_tokens_mask")
    rows: dict[str, list] = {name: [] for name in (*whole, "document", "truncated")}
    for i, special in enumerate(masks):
        parts, truncated = [list(range(len(special)))], len(special) > max_length
        if truncated:
            # The special tokens at both ends stay.
            start, end = special.index(0), len(special) - special[::-1].index(0)
            room = max_length - start - (len(special) - end)
            parts = [
                [*range(start), *(start + k for k in part), *range(end, len(special))]
                for part in _kept(end - start, room, truncation_strategy, doc_stride)
            ]
        for part in parts:
            for name, values in whole.items():
                rows[name].append([values[i][k] for k in part])
            rows["document"].append(i)
            rows["truncated"].append(truncated)
    return rows


def _tokenized_apart(
    texts: Sequence[Sequence[str]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    truncation_strategy: TruncationStrategy,
) -> dict[str, list]:
    """As [`_tokenized`], of two columns of texts, each by itself: pairs of the tokenizer's columns."""
    both = [_tokenized([column], tokenizer, max_length, truncation_strategy, 0) for column in texts]
    truncated = [any(of_pair) for of_pair in zip(*(half.pop("truncated") for half in both), strict=True)]
    document, _ = (half.pop("document") for half in both)
    rows: dict[str, list] = {name: list(zip(*(half[name] for half in both), strict=True)) for name in both[0]}
    return {**rows, "document": document, "truncated": truncated}


def _cut_by_tokenizer(
    texts: Sequence[Sequence[str]], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> dict[str, list]:
    """As [`_tokenized`]; of a pair, the longer text is cut first."""
    tokenizer = cutting_on_the_right(tokenizer)
    encoded = tokenizer(*texts, truncation=True, max_length=max_length, verbose=False)
    rows = dict(encoded)
    full = [i for i, row in enumerate(rows["input_ids"]) if len(row) >= max_length]
    if encoded.is_fast:
        cut = {i for i in full if encoded.encodings[i].overflowing}
    else:
        whole = [[column[i] for i in full] for column in texts]
        lengths = map(len, tokenizer(*whole, truncation=False, verbose=False)["input_ids"] if full else ())
        cut = {i for i, length in zip(full, lengths, strict=True) if length > max_length}
    number = len(rows["input_ids"])
    return {**rows, "document": list(range(number)), "truncated": [i in cut for i in range(number)]}


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
