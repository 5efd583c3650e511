# SPDX-License-Identifier: Apache-2.0
"""Rows for pretraining from a stream of documents that several processes share, and that can be resumed exactly."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from .loading import Collator, Step, deal, unchanged, without_signals
from .pretraining import MAX_ROWS_OF_A_DOCUMENT, checked_row_builder
from .rows import MOST_BYTES

# Number of documents of a lane that are tokenized together.
DOCUMENTS_OF_A_BATCH = 64

Row = Mapping[str, Any]
Documents = Mapping[str, Sequence[Any]]  # columns
BuildRows = Callable[[Documents, Sequence[int]], Mapping[str, list]]


class _Reader:
    """Reads the documents of a lane, one batch at a time, and builds rows from them."""

    def __init__(self, lane: "Lane", number: int, state: Mapping[str, Any] | None):
        self.lane, self.number, self.state = lane, number, state
        self.stream = copy.deepcopy(lane.documents)
        if state is not None:
            self.stream.load_state_dict(dict(state))
        self.documents = iter(self.stream)
        self.exhausted = False

    def place(self) -> dict[str, Any]:
        """The position of the stream: how many documents were read, and the stream's own state."""
        return {"documents": self.number, "stream": self.state}

    def fill(self, rows: list[Row], size: int) -> None:
        """Continues reading until there are `size` rows, or the stream ends."""
        while len(rows) < size and not self.exhausted:
            rows += self._read()

    def _read(self) -> list[Row]:
        numbers: list[int] = []
        documents: list[Mapping[str, Any]] = []
        size = 0
        while len(documents) < self.lane.documents_of_a_batch and size < MOST_BYTES:
            document = next(self.documents, None)
            if document is None:
                self.exhausted = True
                break
            if self.number % self.lane.num_lanes == self.lane.lane:
                numbers.append(self.number)
                documents.append(document)
                # In characters, of which there are at most as many as bytes.
                size += sum(len(value) for value in document.values() if isinstance(value, str))
            self.number += 1
        self.state = self.stream.state_dict()
        if not documents:
            return []
        # A document of a .jsonl file may lack a column that others have.
        names = dict.fromkeys(name for document in documents for name in document)
        columns = {name: [document.get(name) for document in documents] for name in names}
        rows = self.lane.build_rows(columns, numbers)
        return [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]


@dataclass
class Lane:
    """Every `num_lanes`-th document of a stream, from number `lane` on, as rows in random order.

    Rows are drawn from a block of at least `buffer_size` rows, while the next block is read. The position of a lane is
    the beginning of its block in the stream and the number of rows drawn from the block. To return to a position, only
    its block is read, and nothing before it.

    Args:
        documents: one document in each row.
        build_rows: makes rows from a batch of documents and their numbers.
        lane, num_lanes: number of this lane, and of all lanes that share the stream.
        buffer_size: rows of a block.
        seed: of the order.
        documents_of_a_batch: how many documents `build_rows` gets at once; fewer if they are long.
    """

    documents: IterableDataset
    build_rows: BuildRows
    lane: int
    num_lanes: int
    buffer_size: int
    seed: int
    documents_of_a_batch: int = DOCUMENTS_OF_A_BATCH

    def rows(self, epoch: int, state: Mapping[str, Any] | None = None) -> Iterator[tuple[Row, dict[str, Any]]]:
        """The rows of an epoch, from the beginning or from a state, each with the state of the lane after it."""
        state = state or {"documents": 0, "stream": None, "drawn": 0}
        reader = _Reader(self, state["documents"], state["stream"])
        drawn, place = state["drawn"], reader.place()
        block: list[Row] = []
        reader.fill(block, self.buffer_size)
        while block:
            ahead: list[Row] = []
            ahead_place = reader.place()
            rng = np.random.default_rng((self.seed, epoch, self.lane, place["documents"]))
            for number, i in enumerate(rng.permutation(len(block)), start=1):
                reader.fill(ahead, min(number, self.buffer_size))
                if number > drawn:
                    yield {**block[i], "epoch": epoch}, {**place, "drawn": number}
            reader.fill(ahead, self.buffer_size)
            block, place, drawn = ahead, ahead_place, 0


class _LaneSteps(torch.utils.data.IterableDataset):
    """The steps of an epoch from the lanes of one process; workers run this."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        states: Mapping[int, Mapping[str, Any]],
        epoch: int,
        rows_per_lane: int,
        accumulation: int,
        collate_fn: Collator,
    ):
        self.lanes, self.states, self.epoch = lanes, dict(states), epoch
        self.rows_per_lane, self.accumulation, self.collate_fn = rows_per_lane, accumulation, collate_fn

    def __iter__(self) -> Iterator[Step]:
        readers = {lane.lane: lane.rows(self.epoch, self.states.get(lane.lane)) for lane in self.lanes}
        states = self.states
        while True:
            rows = []
            for lane, reader in readers.items():
                for row, state in islice(reader, self.rows_per_lane):
                    rows.append(row)
                    states = {**states, lane: state}
            if not rows:
                return
            groups = deal(rows, [len(row["input_ids"]) for row in rows], self.accumulation)
            batches = [self.collate_fn(group or rows[:1]) for group in groups]
            numbers = sorted({row["index"] // MAX_ROWS_OF_A_DOCUMENT for row in rows})
            where = f"epoch {self.epoch + 1}, rows of the documents {', '.join(str(number + 1) for number in numbers)}"
            yield Step(batches, [len(group) for group in groups], {"lanes": states}, where)


class StreamLoader:
    """Optimizer steps from a stream of documents that several processes share.

    A stream that begins on n processes has n lanes, and its documents go to the lanes in turn: every process reads all
    documents, but only one process tokenizes each. A step takes the same number of rows from each lane. An epoch ends
    for all processes together, when no lane has a row left: every row is trained on once, and a process that runs out
    of rows before the others computes batches that are ignored. The same lanes may continue on fewer processes, each
    of which then has several lanes.

    Args:
        documents: one document in each row.
        build_rows: makes rows from a batch of documents and their numbers.
        collate_fn: makes a batch of rows; each row also has its `epoch`.
        per_device_train_batch_size: rows of one micro-batch.
        gradient_accumulation_steps: micro-batches of a step on each process.
        buffer_size: number of rows among which rows are drawn at random.
        seed: of the order.
        num_workers: 0 reads the stream in this process; 1 or more in another process.
        pin_memory: return batches in page-locked memory, from which a GPU reads them faster.
        blank: a row for processes that have none left.
        documents_of_a_batch: how many documents of a lane `build_rows` gets at once.
    """

    def __init__(
        self,
        documents: IterableDataset,
        build_rows: BuildRows,
        collate_fn: Collator,
        per_device_train_batch_size: int,
        gradient_accumulation_steps: int = 1,
        buffer_size: int = 10_000,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        blank: Row | None = None,
        documents_of_a_batch: int = DOCUMENTS_OF_A_BATCH,
    ):
        self.documents, self.build_rows, self.collate_fn = documents, build_rows, collate_fn
        self.micro_batch, self.accumulation = per_device_train_batch_size, gradient_accumulation_steps
        self.buffer_size, self.seed = buffer_size, seed
        self.num_workers, self.pin_memory, self.blank = num_workers, pin_memory, blank
        self.documents_of_a_batch = documents_of_a_batch

    def _lanes(self, num_lanes: int, num_processes: int, process_index: int) -> tuple[list[Lane], int]:
        """The lanes of a process, and the number of rows of each lane in a step."""
        if num_lanes % num_processes != 0:
            fitting = [n for n in range(1, num_lanes + 1) if num_lanes % n == 0]
            raise ValueError(
                f"The stream began on {num_lanes} processes, whose parts cannot be divided among {num_processes}: "
                f"continue on {' or '.join(map(str, fitting))}."
            )
        lanes = [
            Lane(
                self.documents,
                self.build_rows,
                lane,
                num_lanes,
                self.buffer_size,
                self.seed,
                self.documents_of_a_batch,
            )
            for lane in range(process_index, num_lanes, num_processes)
        ]
        rows, rest = divmod(self.micro_batch * self.accumulation, len(lanes))
        if rest:
            raise ValueError(
                f"The stream began on {num_lanes} processes: on {num_processes}, a step must hold a multiple of "
                f"{len(lanes)} rows on each (--per_device_train_batch_size × --gradient_accumulation_steps)."
            )
        return lanes, rows

    def _epoch(self, lanes: Sequence[Lane], rows: int, epoch: int, states: Mapping[int, Any]) -> Iterator[Step]:
        return iter(
            DataLoader(
                _LaneSteps(lanes, states, epoch, rows, self.accumulation, self.collate_fn),
                batch_size=None,
                num_workers=min(1, self.num_workers),
                collate_fn=unchanged,
                pin_memory=self.pin_memory,
                worker_init_fn=without_signals,
                generator=torch.Generator(),  # otherwise, drawing the workers' seed would change dropout
            )
        )

    def steps(
        self,
        num_processes: int = 1,
        process_index: int = 0,
        position: Mapping[str, Any] | None = None,
        any_process: Callable[[bool], bool] = bool,
    ) -> Iterator[Step]:
        """See `TrainingLoader.steps`. Raises ValueError if the stream contains no text."""
        position = position or {"epoch": 0, "num_lanes": num_processes, "lanes": {}}
        epoch, num_lanes = position["epoch"], position["num_lanes"]
        lanes, rows = self._lanes(num_lanes, num_processes, process_index)
        states = {
            lane.lane: position["lanes"][str(lane.lane)] for lane in lanes if str(lane.lane) in position["lanes"]
        }
        fresh = not position["lanes"]
        while True:
            steps, number = self._epoch(lanes, rows, epoch, states), 0
            while any_process((step := next(steps, None)) is not None):
                if step is None:
                    blank = self.collate_fn([self.blank])  # type: ignore[list-item]
                    step = Step([blank] * self.accumulation, [0] * self.accumulation, {"lanes": states})
                number, states = number + 1, step.position["lanes"]
                here = {str(lane): state for lane, state in states.items()}
                step.position = {"epoch": epoch, "num_lanes": num_lanes, "lanes": here}
                yield step
            if number == 0 and fresh:
                raise ValueError("The stream of documents contains no text.")
            epoch, states, fresh = epoch + 1, {}, True

    def check_position(self, position: Mapping[str, Any], num_processes: int = 1) -> None:
        """As `TrainingLoader.check_position`: the lanes must be divided evenly, and so must the rows of a step."""
        self._lanes(position["num_lanes"], num_processes, 0)

    def merge(self, positions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As `TrainingLoader.merge`."""
        lanes = {lane: state for position in positions for lane, state in position["lanes"].items()}
        return {**positions[0], "lanes": lanes}

    def steps_per_epoch(self, num_processes: int = 1) -> float:
        """Raises ValueError: the length of a stream is unknown."""
        raise ValueError("The length of a stream is unknown: give --max_train_steps and --eval_strategy no or steps.")

    def step_size(self, num_processes: int = 1) -> str:
        """As `TrainingLoader.step_size`."""
        return f"{self.micro_batch * self.accumulation * num_processes} rows"

    def summary(self, num_steps: int, num_processes: int = 1) -> str:
        """As `TrainingLoader.summary`."""
        return "a stream of documents"


def stream_columns(documents: IterableDataset) -> list[str]:
    """The columns of a stream's first document.

    Raises:
        ValueError: if there is none.
    """
    first = next(iter(documents), None)
    if first is None:
        raise ValueError("The stream of documents is empty.")
    return list(first)


def pretraining_stream(
    documents: IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    collate_fn: Collator,
    max_length: int,
    short_seq_prob: float = 0.1,
    seed: int = 0,
    text_column: str = "text",
    language: str = "en",
    with_word_starts: bool = False,
    sentence_order: bool = True,
    **options: Any,
) -> StreamLoader:
    """A [`StreamLoader`] of the rows that [`pretraining_dataset`] makes; `options` are the loader's own.

    Raises:
        ValueError: as [`pretraining_dataset`], and if the stream contains no document.
    """
    build_rows = checked_row_builder(
        documents,
        stream_columns(documents),
        tokenizer=tokenizer,
        max_length=max_length,
        short_seq_prob=short_seq_prob,
        seed=seed,
        text_column=text_column,
        language=language,
        with_word_starts=with_word_starts,
        sentence_order=sentence_order,
    )
    blank = {"input_ids": [tokenizer.mask_token_id], "sentence_starts": [], "word_starts": [True], "index": 0}
    return StreamLoader(documents, build_rows, collate_fn, seed=seed, blank=blank, **options)
