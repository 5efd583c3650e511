# SPDX-License-Identifier: Apache-2.0
"""Examples for extractive question answering: positions of answers, and offsets to find their text again."""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

from .classification import require_column
from .rows import make_rows, padding_on_the_right
from .unknown_text import check_known_documents
from .windows import window_starts


@dataclass(frozen=True)
class QuestionTask:
    """Questions in SQuAD's columns: `question`, `context`, `answers`, `id`."""

    version_2: bool = False  # some questions have no answer
    best_metric: str = "f1"


def answers_of(value: Any) -> list[tuple[str, int]]:
    """Text and first character of each answer, from an object with two lists or a list of objects."""
    if value is None:
        return []
    if isinstance(value, Mapping):
        return list(zip(value["text"], value["answer_start"], strict=True))
    return [(answer["text"], answer["answer_start"]) for answer in value]


def require_questions(dataset: Dataset, where: str) -> None:
    """Raises a ValueError unless each row has a question and a context, and ids, if there are any, all differ."""
    for column in ("question", "context"):
        require_column(dataset, column, where)
        if (dtype := getattr(dataset.features[column], "dtype", None)) not in ("string", "large_string"):
            raise ValueError(f"The column {column!r} of {where} must hold text, but holds {dtype or 'lists'}.")
    if "id" in dataset.column_names:
        seen: dict[Any, int] = {}
        for row, name in enumerate(dataset["id"], start=1):
            if name in seen:
                raise ValueError(f"The column 'id' of {where} has {name!r} in rows {seen[name]} and {row}.")
            seen[name] = row


def require_answers(dataset: Dataset, version_2: bool, where: str) -> None:
    """Raises a ValueError, with row and field, unless every answer is in its context at the given place."""
    if "answers" not in dataset.column_names:
        columns = dataset.column_names
        raise ValueError(f"{where[0].upper()}{where[1:]} has no column 'answers'; its columns are {columns}.")
    for number, row in enumerate(dataset.select_columns(["context", "answers"]), start=1):
        try:
            answers = answers_of(row["answers"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                f"The column 'answers' of {where} must hold an object with the lists 'text' and 'answer_start', of "
                f"the same length, but row {number} holds {str(row['answers'])[:80]!r}."
            ) from None
        if not answers and not version_2:
            raise ValueError(
                f"Row {number} of {where} has no answer: give --version_2_with_negative if some questions have none."
            )
        for text, start in answers:
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
        questions = [question.strip() for question in batch["question"]]
        encoded = tokenizer(questions, batch["context"], truncation=False, return_offsets_mapping=True, verbose=False)
        offsets = encoded.pop("offset_mapping")
        for i, document in enumerate(indices):
            answers = answers_of(batch["answers"][i]) if with_answers else []
            whole = {name: values[i] for name, values in encoded.items()}
            sides = encoded.sequence_ids(i)
            try:
                parts = _windows(whole, sides, offsets[i], answers, tokenizer, max_length, doc_stride)
            except _NoRoomError as error:
                raise ValueError(f"Row {document + 1} of {where}: {error}") from None
            for row in parts:
                if not with_answers:
                    del row["start_positions"], row["end_positions"]
                for name, value in (row | {"document": document, "length": len(row["input_ids"])}).items():
                    rows.setdefault(name, []).append(value)
        return rows

    return make_rows(dataset, build_rows, 100, num_proc, load_from_cache_file, desc)


class _NoRoomError(Exception):
    """A question leaves too little of a row."""


def _windows(
    whole: Mapping[str, Sequence[int]],
    sides: Sequence[int | None],
    offsets: Sequence[tuple[int, int]],
    answers: Sequence[tuple[str, int]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    overlap: int,
) -> list[dict[str, Any]]:
    """The rows of a question, from all its tokens; `sides` has a 1 for those of the context."""
    length = len(sides)
    context = [i for i, side in enumerate(sides) if side == 1]
    first, last = (context[0], context[-1]) if context else (length, length - 1)
    room = max_length - (length - len(context))
    if length > max_length and room <= overlap:
        raise _NoRoomError(
            f"the question has {sides.count(0)} tokens, which leaves {max(room, 0)} of --max_seq_length {max_length} "
            f"for the context, but windows share --doc_stride {overlap}: raise --max_seq_length, lower --doc_stride, "
            "or shorten the question."
        )
    starts, ends = [offsets[i][0] for i in context], [offsets[i][1] for i in context]
    spans = [span for answer in answers if (span := _span_of(answer, starts, ends)) is not None]
    cls_token = tokenizer.cls_token_id
    rows = []
    for begin in window_starts(len(context), max(room, 1), overlap if length > max_length else 0):
        end = min(begin + max(room, 1), len(context))
        places = [*range(first), *context[begin:end], *range(last + 1, length)]
        row: dict[str, Any] = {name: [values[i] for i in places] for name, values in whole.items()}
        null = row["input_ids"].index(cls_token) if cls_token in row["input_ids"] else 0
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
            batch |= {"context_mask": mask}
            for name in ("index", "null_position"):
                batch[name] = torch.tensor([row[name] for row in features])
        return batch
