# SPDX-License-Identifier: Apache-2.0
"""Examples for token classification: a label for each word, assigned to its first token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from tokenizers.pre_tokenizers import ByteLevel
from transformers import DataCollatorForTokenClassification, PreTrainedTokenizerBase

from ..models.losses import IGNORED
from .classification import has_lists, require_column, require_full_lists
from .rows import make_rows, padding_on_the_right
from .unknown_text import check_known_documents
from .windows import owners, word_windows


@dataclass(frozen=True)
class TokenTask:
    """What a model predicts for each word of a text that is already divided into words."""

    text_column: str = "tokens"
    label_column: str = "ner_tags"
    label_names: tuple[str, ...] | None = None  # in the order of their ids; None: found in the data
    label_all_tokens: bool = False  # all tokens of a word get its label, not only the first one
    best_metric: str = "f1"


def put_spaces_before_words(tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes a byte-level tokenizer, such as RoBERTa's, read a list of words as it reads them in a text, where a word
    begins with the space before it; so does the first word of a text from then on."""
    if not tokenizer.is_fast or not isinstance(tokenizer.backend_tokenizer.pre_tokenizer, ByteLevel):
        return
    for part in (tokenizer.backend_tokenizer.pre_tokenizer, tokenizer.backend_tokenizer.post_processor):
        if hasattr(part, "add_prefix_space"):
            part.add_prefix_space = True
    # Saved, because some classes of Transformers make their parts anew when they are loaded.
    tokenizer.add_prefix_space = tokenizer.init_kwargs["add_prefix_space"] = True


def reads_spaces(tokenizer: PreTrainedTokenizerBase, word: str) -> bool:
    """Whether a word after a space, as in a text, has other tokens than the same word in a list of words."""
    in_list = tokenizer([word, word], is_split_into_words=True, add_special_tokens=False, verbose=False)
    in_text = tokenizer(f"{word} {word}", add_special_tokens=False, verbose=False)
    return bool(in_list["input_ids"] != in_text["input_ids"])


def require_words(dataset: Dataset, column: str, where: str, flag: str | None = None) -> None:
    """Raises a ValueError unless a column, which `flag` names, holds a list of words in every row."""
    require_column(dataset, column, where, flag=flag)
    inner = getattr(dataset.features[column], "feature", None)
    if getattr(inner, "dtype", None) not in ("string", "large_string", "null"):
        raise ValueError(
            f"The column {column!r} of {where} must hold a list of words in each row, but holds "
            f"{dataset.features[column]}."
        )


def require_tags(dataset: Dataset, text_column: str, label_column: str, where: str, flag: str | None = None) -> None:
    """Raises a ValueError unless a column, which `flag` names, holds as many labels as another one holds words, in
    every row."""
    require_column(dataset, label_column, where, flag=flag)
    if not has_lists(dataset, label_column):
        raise ValueError(
            f"The column {label_column!r} of {where} must hold a list of labels in each row, but holds "
            f"{dataset.features[label_column]}."
        )
    for column in (text_column, label_column):
        require_full_lists(dataset, column, where)
    row = 0
    for batch in dataset.select_columns([text_column, label_column]).with_format("arrow").iter(10_000):
        words, labels = (batch[name].combine_chunks() for name in (text_column, label_column))
        sizes = [column.value_lengths().to_numpy(zero_copy_only=False) for column in (words, labels)]
        if (sizes[0] != sizes[1]).any():
            number = int((sizes[0] != sizes[1]).argmax())
            raise ValueError(
                f"Row {row + number + 1} of {where} has {sizes[0][number]} words in {text_column!r}, but "
                f"{sizes[1][number]} labels in {label_column!r}."
            )
        row += len(words)


def tag_values(feature: Any, tags: Sequence[Any], names: Sequence[str] | None) -> list[str]:
    """The labels of a row by name: numbers are those of the `ClassLabel` that `feature` is, or of `names`. Others are
    their own names, such as -1, for which `token_classification_dataset` raises ValueError."""
    if isinstance(feature, ClassLabel):
        names = feature.names
    if names is not None:
        return [names[tag] if isinstance(tag, int) and 0 <= tag < len(names) else str(tag) for tag in tags]
    return list(tags)


def tag_names(dataset: Dataset, column: str, where: str) -> list[str]:
    """The labels that occur: in the order of the column's `ClassLabel`, else sorted.

    Raises:
        ValueError: for numbers without names, in which no entity can be found.
    """
    feature = dataset.features[column].feature
    if isinstance(feature, ClassLabel):
        return list(feature.names)
    if getattr(feature, "dtype", None) not in ("string", "large_string", "null"):
        raise ValueError(
            f"The column {column!r} of {where} holds labels as {feature.dtype}: give their names in the order of "
            "these numbers, such as --label_names O B-person I-person."
        )
    found: set[str] = set()
    for batch in dataset.select_columns([column]).iter(10_000):
        found.update(tag for row in batch[column] for tag in row)
    return sorted(found)


def inside(names: Sequence[str]) -> list[int]:
    """For each label, the label of a word's further tokens: I-x for B-x, if there is an I-x."""
    ids = {name: i for i, name in enumerate(names)}
    return [ids.get(f"I-{name[2:]}", i) if name.startswith("B-") else i for i, name in enumerate(names)]


def token_classification_dataset(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    task: TokenTask,
    label_names: Sequence[str] | None,
    doc_stride: int = 0,
    num_proc: int | None = None,
    load_from_cache_file: bool = True,
    desc: str = "Tokenizing",
    where: str = "the data set",
) -> Dataset:
    """Tokenized rows with a label for each word, on its first token.

    A text that is longer than a row becomes several rows of whole words. If rows overlap, a word belongs to the row in
    which it has the most context; in the other rows its tokens have no label. A word that is longer than a row keeps
    the tokens that fit.

    Args:
        dataset: with a column of lists of words and, if `label_names` is given, one of lists of labels.
        tokenizer: a fast one, which returns the word of each token.
        max_length: the longest row, special tokens included.
        task: names the columns.
        label_names: the classes in the order of their ids; None leaves labels out.
        doc_stride: the largest number of tokens that neighbouring rows of a text share.
        num_proc: processes of `datasets.Dataset.map`.
        load_from_cache_file: whether its cached result is used.
        desc: text beside the progress bar.
        where: the name of the data set in error messages.

    Returns:
        Columns `input_ids`, `token_type_ids`, `attention_mask`; `labels`, -100 where a token has none; `words`, for
        the first token of each word that belongs to this row the number of this word, else -1; `length`; `index`, the
        number of the row; `document`, the number of its text; `shortened`, the number of its words that are longer
        than a row. A text without tokens has no row.

    Raises:
        ValueError: if the tokenizer is not a fast one or knows less than half of the words, a row is too short for a
            token or for `doc_stride`, columns are missing or of another type or length, or a label is not in
            `label_names`.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not tell which word a token belongs to: a fast tokenizer is needed, "
            "one with a tokenizer.json (--tokenizer_name)."
        )
    room = max_length - tokenizer.num_special_tokens_to_add()
    if room < 1:
        raise ValueError(f"--max_seq_length must leave room for text beside special tokens, but is {max_length}.")
    if not 0 <= doc_stride < room:
        raise ValueError(
            f"--doc_stride must be at least 0 and less than {room}, the tokens of a text in a row of --max_seq_length "
            f"{max_length}, but is {doc_stride}."
        )
    require_words(dataset, task.text_column, where)
    check_known_documents(dataset, [task.text_column], tokenizer, where)
    if label_names is not None:
        require_tags(dataset, task.text_column, task.label_column, where)
        _check_names(dataset, task, label_names, where)
        feature = dataset.features[task.label_column].feature
        ids, further = {name: i for i, name in enumerate(label_names)}, inside(label_names)

    lists = dict.fromkeys(tokenizer.model_input_names, "int8") | {"input_ids": "int32", "words": "int32"}
    lists |= {} if label_names is None else {"labels": "int64"}
    features = Features(
        {name: List(Value(dtype)) for name, dtype in lists.items()}
        | {name: Value("int64") for name in ("shortened", "document", "length")}
    )

    def build_rows(batch, indices):
        rows: dict[str, list] = {name: [] for name in features}
        encoded = tokenizer(batch[task.text_column], is_split_into_words=True, truncation=False, verbose=False)
        for number, document in enumerate(indices):
            labels = None
            if label_names is not None:
                tags = tag_values(feature, batch[task.label_column][number], task.label_names)
                labels = [ids[tag] for tag in tags]
            whole = {name: values[number] for name, values in encoded.items()}
            for row in _rows(whole, encoded.word_ids(number), labels, room, doc_stride):
                if labels is not None and task.label_all_tokens:
                    _label_all(row, labels, further)
                row |= {"document": document, "length": len(row["input_ids"])}
                for name, values in rows.items():
                    values.append(row[name])
        return rows

    return make_rows(dataset, build_rows, 100, num_proc, load_from_cache_file, desc, features)


def _check_names(dataset: Dataset, task: TokenTask, label_names: Sequence[str], where: str) -> None:
    known, feature = set(label_names), dataset.features[task.label_column].feature
    for number, tags in enumerate(dataset[task.label_column], start=1):
        unknown = set(tag_values(feature, tags, task.label_names)) - known
        if unknown:
            raise ValueError(
                f"The column {task.label_column!r} of {where} contains {sorted(unknown)} in row {number}, not among "
                f"the labels {list(label_names)}: correct them, or, if the labels of a test set are hidden, remove "
                "their column."
            )


def _rows(
    whole: Mapping[str, Sequence[int]],
    word_of: Sequence[int | None],
    labels: Sequence[int] | None,
    room: int,
    overlap: int,
) -> list[dict[str, Any]]:
    """The rows of one text, each with the columns of the tokenizer, `word_ids`, `words`, `labels` and `shortened`."""
    body = [i for i, word in enumerate(word_of) if word is not None]
    if not body:
        return []
    tokens: dict[int, list[int]] = {}  # positions by word, without words that have no token
    for i in body:
        tokens.setdefault(word_of[i], []).append(i)  # type: ignore[arg-type]
    shortened = {word for word, places in tokens.items() if len(places) > room}
    spans = [(word, places[:room]) for word, places in tokens.items()]
    sizes = [len(places) for _, places in spans]
    windows = word_windows(sizes, room, overlap)
    owner = owners(sizes, windows)
    rows = []
    for number, (begin, end) in enumerate(windows):
        # The special tokens at both ends stay.
        places = [
            *range(body[0]),
            *(i for _, span in spans[begin:end] for i in span),
            *range(body[-1] + 1, len(word_of)),
        ]
        first = {span[0]: word for k, (word, span) in enumerate(spans[begin:end], begin) if owner[k] == number}
        row: dict[str, Any] = {name: [values[i] for i in places] for name, values in whole.items()}
        row["words"] = [first.get(i, -1) for i in places]
        row["word_ids"] = [word_of[i] for i in places]
        row["shortened"] = sum(word in shortened for word in first.values())
        if labels is not None:
            row["labels"] = [labels[first[i]] if i in first else IGNORED for i in places]
        rows.append(row)
    return rows


def _label_all(row: dict[str, Any], labels: Sequence[int], further: Sequence[int]) -> None:
    """Labels all tokens of the words that belong to a row."""
    owned = {word for word in row["words"] if word >= 0}
    for i, word in enumerate(row["word_ids"]):
        if word in owned and row["words"][i] < 0:
            row["labels"][i] = further[labels[word]]


class TokenClassificationCollator(DataCollatorForTokenClassification):
    """Pads the rows of [`token_classification_dataset`] on the right, to the longest of a batch; labels with -100.

    Args:
        tokenizer: names the inputs of the model, and pads them.
        with_index: add the numbers of the rows, for `predict_rows`. A model does not take them.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, with_index: bool = False):
        super().__init__(padding_on_the_right(tokenizer))
        self.with_index = with_index

    def __call__(self, features: Sequence[Mapping[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        names = (*self.tokenizer.model_input_names, "labels")
        batch = dict(super().__call__([{name: row[name] for name in names if name in row} for row in features]))
        return batch | ({"index": torch.tensor([row["index"] for row in features])} if self.with_index else {})
