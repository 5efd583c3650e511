# SPDX-License-Identifier: Apache-2.0
"""Examples for extractive question answering: positions of answers, and offsets to find their text again."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Encoding
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from .classification import is_table, require_column, require_texts
from .rows import documents_of_a_batch, make_rows, padding_on_the_right
from .unknown_text import check_known_documents
from .windows import window_starts


@dataclass(frozen=True)
class QuestionTask:
    """Questions in SQuAD's columns: `question`, `context`, `answers`, `id`."""

    version_2: bool = False  # some questions have no answer
    best_metric: str = "f1"


def usual_stride(length: int) -> int:
    """Tokens that neighbouring windows share by default, for windows of this length."""
    return min(128, length // 3)


def answers_of(value: Any) -> list[tuple[str, int]]:
    """Text and first character of each answer, from an object with two lists or a list of objects."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return list(zip(value["text"], value["answer_start"], strict=True))
    return [(answer["text"], answer["answer_start"]) for answer in value]


def is_answered(value: Any) -> bool:
    """Whether a value of the column `answers` holds any, in whatever form, which [`answers_of`] may refuse."""
    return any(value.values()) if isinstance(value, Mapping) else bool(value)


def is_impossible(value: Any, where: str) -> bool:
    """Whether a value of SQuAD's field `is_impossible` says that its question has no answer."""
    if value is not None and value not in (True, False):
        raise ValueError(f"{where}: 'is_impossible' must be true or false, but is {value!r}.")
    return bool(value)


def without_impossible_answers(dataset: Dataset, where: str) -> Dataset:
    """Questions of which those whose `is_impossible` is true have no answer, whatever `answers` holds: some data sets
    keep plausible answers there. Raises a ValueError if the column holds anything else than true and false."""
    if not {"is_impossible", "answers"} <= set(dataset.column_names):
        return dataset
    flags = [is_impossible(value, f"Row {row} of {where}") for row, value in enumerate(dataset["is_impossible"], 1)]
    answers = dataset["answers"]
    if not any(flag and is_answered(value) for flag, value in zip(flags, answers, strict=True)):
        return dataset
    kept = [None if flag else value for flag, value in zip(flags, answers, strict=True)]
    return dataset.remove_columns("answers").add_column("answers", kept, feature=dataset.features["answers"])


def require_questions(dataset: Dataset, where: str) -> None:
    """Raises a ValueError unless each row has a question and a context, and ids, if there are any, all differ."""
    for column in ("question", "context"):
        require_texts(dataset, column, where)
    if "id" in dataset.column_names:
        seen: dict[Any, int] = {}
        for row, name in enumerate(dataset["id"], start=1):
            if name is None:
                raise ValueError(
                    f"The column 'id' of {where} has no value in row {row}: give every question an id, or none, for "
                    "the numbers of the rows."
                )
            if name in seen:
                raise ValueError(f"The column 'id' of {where} has {name!r} in rows {seen[name]} and {row}.")
            seen[name] = row


def require_answers(dataset: Dataset, version_2: bool, where: str) -> None:
    """Raises a ValueError, with row and field, unless every answer is in its context at the given place."""
    require_column(dataset, "answers", where, values=False)
    for number, row in enumerate(dataset.select_columns(["context", "answers"]), start=1):
        try:
            answers = answers_of(row["answers"])
        except (KeyError, TypeError, ValueError):
            hint = " A .csv or .tsv file cannot hold it: give .jsonl or .parquet." if is_table(dataset) else ""
            raise ValueError(
                f"The column 'answers' of {where} must hold an object with the lists 'text' and 'answer_start', of "
                f"the same length, but row {number} holds {str(row['answers'])[:80]!r}.{hint}"
            ) from None
        if not answers and not version_2:
            raise ValueError(
                f"Row {number} of {where} has no answer: give --version_2_with_negative if some questions have none."
            )
        for text, start in answers:
            if isinstance(start, bool) or not isinstance(start, int):
                raise ValueError(
                    f"Row {number} of {where}: 'answers.answer_start' must be the number of a character, but is "
                    f"{start!r}."
                )
            if text is not None and not isinstance(text, str):
                raise ValueError(f"Row {number} of {where}: 'answers.text' must hold text, but holds {text!r}.")
            if not text or not text.strip():
                raise ValueError(
                    f"Row {number} of {where} has an empty answer in 'answers.text': leave the list empty if there "
                    "is no answer."
                )
            found = row["context"][start : start + len(text)] if start >= 0 else ""
            if found != text:
                place = row["context"].find(text)
                hint = f"it is at {place}" if place >= 0 else "it is not in the context"
                raise ValueError(
                    f"Row {number} of {where}: 'answers.answer_start' is {start}, where 'context' has {found[:60]!r} "
                    f"instead of the answer {text[:60]!r}; {hint}."
                )


def token_span(starts: Sequence[int], ends: Sequence[int], start: int, end: int) -> tuple[int, int] | None:
    """The first and the last token with any of the characters from `start` up to but not including `end`, or None.

    Args:
        starts, ends: the first character of each token, and the one after its last, both ascending.
    """
    first, last = bisect_right(ends, start), bisect_left(starts, end) - 1
    return (first, last) if first <= last else None


def _span_of(answer: tuple[str, int], starts: Sequence[int], ends: Sequence[int]) -> tuple[int, int] | None:
    """The tokens of an answer, without white space around it."""
    text, start = answer
    start += len(text) - len(text.lstrip())
    return token_span(starts, ends, start, start + len(text.strip()))


def question_answering_dataset(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    with_answers: bool,
    doc_stride: int = 128,
    num_proc: int | None = None,
    load_from_cache_file: bool = True,
    desc: str = "Tokenizing",
    where: str = "the data set",
) -> Dataset:
    """Tokenized questions, each with its context, or with one window of a context that is too long.

    The answer of a row is the first answer to its question that is in its window; if none is, it is [CLS].

    Args:
        dataset: with the columns `question`, `context` and, for `with_answers`, `answers`.
        tokenizer: a fast one, which returns the characters of each token.
        max_length: the longest row, special tokens included.
        with_answers: add the positions of answers.
        doc_stride: tokens that neighbouring windows share; the last one of a context may share more.
        num_proc: processes of `datasets.Dataset.map`.
        load_from_cache_file: whether its cached result is used.
        desc: text beside the progress bar.
        where: the name of the data set in error messages.

    Returns:
        Columns `input_ids`, `token_type_ids`, `attention_mask`; `start_positions` and `end_positions`;
        `context_start`, the position of the first token of the context; `char_starts` and `char_ends`, for each token
        of the context its first character and the one after its last; `null_position`, the position of [CLS];
        `length`; `index`, the number of the row; `document`, the number of its question.

    Raises:
        ValueError: if the tokenizer is not a fast one or knows less than half of the contexts, or a question leaves no
            room for `doc_stride` and a new token.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not tell where in a text a token is: a fast tokenizer is needed, "
            "one with a tokenizer.json (--tokenizer_name)."
        )
    check_known_documents(dataset, ["context"], tokenizer, where)

    def build_rows(batch, indices):
        rows: dict[str, list] = {}
        questions = _encode(tokenizer, [question.strip() for question in batch["question"]])
        # Often many questions are about one context, which may be a whole contract: it is tokenized once.
        distinct = list(dict.fromkeys(batch["context"]))
        contexts = dict(zip(distinct, _encode(tokenizer, distinct), strict=True))
        for i, document in enumerate(indices):
            answers = answers_of(batch["answers"][i]) if with_answers else []
            try:
                parts = _windows(
                    questions[i], contexts[batch["context"][i]], answers, tokenizer, max_length, doc_stride
                )
            except _NoRoomError as error:
                raise ValueError(f"Row {document + 1} of {where}: {error}") from None
            for row in parts:
                if not with_answers:
                    del row["start_positions"], row["end_positions"]
                for name, value in (row | {"document": document, "length": len(row["input_ids"])}).items():
                    rows.setdefault(name, []).append(value)
        return rows

    batch_size = documents_of_a_batch(dataset, "context")
    return make_rows(dataset, build_rows, batch_size, num_proc, load_from_cache_file, desc)


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> Sequence[Encoding]:
    """Whole texts without special tokens, which `post_process` of the tokenizer's backend adds to two of them."""
    encoded = tokenizer(texts, add_special_tokens=False, truncation=False, padding=False, verbose=False)
    assert encoded.encodings is not None  # a fast tokenizer has them
    return encoded.encodings


class _NoRoomError(Exception):
    """A question leaves too little of a row."""


def _windows(
    question: Encoding,
    context: Encoding,
    answers: Sequence[tuple[str, int]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    overlap: int,
) -> list[dict[str, Any]]:
    """The rows of a question, from all tokens of it and its context."""
    whole = tokenizer.backend_tokenizer.post_process(question, context)
    length, tokens = len(whole), len(context)
    # The tokens of the context are neighbours; if there are none, a row has all the others.
    first = whole.sequence_ids.index(1) if tokens else length
    room = max_length - (length - tokens)
    if length > max_length and room <= overlap:
        raise _NoRoomError(
            f"the question has {len(question)} tokens, which leaves {max(room, 0)} of --max_seq_length {max_length} "
            f"for the context, but windows share --doc_stride {overlap}: raise --max_seq_length, lower --doc_stride, "
            "or shorten the question."
        )
    columns: dict[str, np.ndarray] = {
        "input_ids": np.array(whole.ids, np.int32),
        "token_type_ids": np.array(whole.type_ids, np.int8),
        "attention_mask": np.array(whole.attention_mask, np.int8),
    }
    columns = {name: values for name, values in columns.items() if name in tokenizer.model_input_names}
    # Not those of `whole`: `post_process` has removed the space before a word from them a second time.
    starts, ends = np.array(context.offsets, np.int32).reshape(-1, 2).T
    spans = [span for answer in answers if (span := _span_of(answer, starts, ends)) is not None]
    rows = []
    for begin in window_starts(tokens, max(room, 1), overlap if length > max_length else 0):
        end = min(begin + max(room, 1), tokens)
        row: dict[str, Any] = {
            name: np.concatenate([values[:first], values[first + begin : first + end], values[first + tokens :]])
            for name, values in columns.items()
        }
        null = int((row["input_ids"] == tokenizer.cls_token_id).argmax())  # 0 without a [CLS]
        inside = next(((a, b) for a, b in spans if begin <= a and b < end), None)
        answer = (null, null) if inside is None else tuple(first - begin + token for token in inside)
        row |= {"start_positions": answer[0], "end_positions": answer[1], "null_position": null}
        row |= {"context_start": first, "char_starts": starts[begin:end], "char_ends": ends[begin:end]}
        rows.append(row)
    return rows


@dataclass
class QuestionAnsweringCollator(DataCollatorWithPadding):
    """Pads the rows of [`question_answering_dataset`] on the right, to the longest of a batch.

    Args:
        with_index: add the numbers of the rows, `context_mask` and `null_position`, for `predict_rows`. A model does
            not take them.
    """

    with_index: bool = False

    def __post_init__(self):
        self.tokenizer = padding_on_the_right(self.tokenizer)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        names = self.tokenizer.model_input_names
        batch = dict(super().__call__([{name: row[name] for name in names if name in row} for row in features]))
        for name in ("start_positions", "end_positions"):
            if name in features[0]:
                batch[name] = torch.tensor([row[name] for row in features])
        if self.with_index:
            mask = torch.zeros(batch["input_ids"].shape, dtype=torch.bool)
            for values, row in zip(mask, features, strict=True):
                values[row["context_start"] : row["context_start"] + len(row["char_starts"])] = True
            batch["context_mask"] = mask
            for name in ("index", "null_position"):
                batch[name] = torch.tensor([row[name] for row in features])
        return batch
