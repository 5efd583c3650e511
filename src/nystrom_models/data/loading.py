# SPDX-License-Identifier: Apache-2.0
"""Loaders: optimizer steps for training, from a data set of known length; every row once, for evaluation."""

import atexit
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader

Collator = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Tensor]]


@dataclass
class Step:
    """One process's part of an optimizer step. All processes have the same number of micro-batches."""

    batches: Sequence[Mapping[str, Tensor]]
    num_rows: list[int]  # of each micro-batch; 0 if nothing is left for this process: the batch then does not count
    position: dict[str, Any]  # where the next step begins, for `steps()` of the loader
    where: str = ""  # a description of its rows, for messages

    def pin_memory(self) -> "Step":
        """The same step in page-locked memory; called by PyTorch's data loader."""
        batches = [{name: tensor.pin_memory() for name, tensor in batch.items()} for batch in self.batches]
        return replace(self, batches=batches)


class TrainingLoader(Protocol):
    """An endless sequence of optimizer steps, from any position."""

    def steps(
        self,
        num_processes: int = 1,
        process_index: int = 0,
        position: Mapping[str, Any] | None = None,
        any_process: Callable[[bool], bool] = bool,
    ) -> Iterator[Step]:
        """The steps of one process, from the first, or from a `position` that [`merge`] returned.

        `any_process` returns whether its argument is true on any process; all processes call it equally often.
        """

    def check_position(self, position: Mapping[str, Any], num_processes: int = 1) -> None:
        """Raises ValueError if a run cannot go on from a position on this number of processes."""

    def merge(self, positions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The position of the run, as JSON values, from the positions of all processes."""

    def steps_per_epoch(self, num_processes: int = 1) -> float:
        """Optimizer steps of one pass over the data."""

    def step_size(self, num_processes: int = 1) -> str:
        """A description of the size of an optimizer step."""

    def summary(self, num_steps: int, num_processes: int = 1) -> str:
        """A description of the data of a run of `num_steps` steps."""


def without_signals(worker: int) -> None:
    """For workers: ignores signals. A signal to all processes of a run is meant for the training process, which needs
    one more step from its workers, perhaps after a long evaluation."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "SIGUSR1"):  # not on Windows, which cannot send SIGTERM either
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _end_workers() -> None:
    """When Python exits, it sends SIGTERM to its daemons and waits for them: those that ignore it are ended first."""
    daemons = [child for child in multiprocessing.active_children() if child.daemon]
    if daemons and hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # PyTorch's handler reports killed workers as an error
    for child in daemons:
        child.terminate()
    until = time.monotonic() + 1
    for child in daemons:
        child.join(max(0, until - time.monotonic()))
        child.kill()


# Runs before that of multiprocessing, which is registered earlier.
atexit.register(_end_workers)


def unchanged(item: Any) -> Any:
    """A collate function for data that already are batches."""
    return item


def deal(rows: Sequence[Any], lengths: Sequence[int], num_groups: int) -> list[list[Any]]:
    """Divides the rows of a step into groups of the same number of rows (± 1) and of similar lengths."""
    by_length = np.argsort(np.asarray(lengths), kind="stable")
    return [[rows[i] for i in group] for group in np.array_split(by_length, num_groups)]


@dataclass
class _Plan:
    groups: list[list[tuple[int, int]]]  # (epoch, row) of every micro-batch of one process
    rows: int  # how many rows have been trained on after the step
    where: str


class _PlannedSteps(torch.utils.data.Dataset):
    """Collates the rows of a plan; workers run this."""

    def __init__(self, dataset: Dataset, collate_fn: Collator):
        self.dataset, self.collate_fn = dataset, collate_fn

    def __getitems__(self, plan: _Plan) -> Step:
        batches = []
        for group in plan.groups:
            # A process without rows computes a batch that is ignored.
            epochs, indices = zip(*group, strict=True) if group else ((0,), (0,))
            rows = self.dataset.__getitems__(list(indices))
            batches.append(self.collate_fn([{**row, "epoch": epoch} for row, epoch in zip(rows, epochs, strict=True)]))
        return Step(batches, [len(group) for group in plan.groups], {"rows": plan.rows}, plan.where)


# With `group_by_length`, rows are sorted by length among this many steps.
GROUPED_STEPS = 50


@dataclass
class _Order:
    rows: np.ndarray  # of an epoch, in the order of training
    tokens: np.ndarray  # number of tokens before each row
    ends: np.ndarray | None = None  # where steps end, if this does not follow from tokens or rows


class RowLoader:
    """Optimizer steps from a data set whose rows can be counted.

    Each epoch is a random order of all rows that depends only on `seed` and the epoch; epochs follow each other
    without a gap. A step takes the next rows, of any length, so that steps are similar. Within a step, rows of similar
    length share a micro-batch. The position of a run is the number of rows trained on, so it may continue with another
    number of processes or another micro-batch size.

    Steps of rows of similar length would need less padding, but would differ in size: 32 rows of 20 tokens are a small
    step and 32 rows of 500 tokens a large one, with the same learning rate. Steps whose size is given in tokens may be
    grouped by length.

    Args:
        dataset: rows with a column of lengths.
        collate_fn: makes a batch of rows; each row also has its `epoch`.
        per_device_train_batch_size: rows of one micro-batch; with `tokens_per_step`, the largest number of rows.
        gradient_accumulation_steps: micro-batches of a step on each process; without `tokens_per_step`.
        tokens_per_step: the size of a step in tokens, over all processes, instead of in rows: a step takes the rows
            that begin within its share of the tokens.
        group_by_length: with `tokens_per_step`, a step takes rows of similar length: many short rows or a few long
            ones, with the same number of tokens. The last step of an epoch may then be smaller.
        seed: of the order.
        num_workers: processes that make batches; 0 makes them in this one.
        pin_memory: return batches in page-locked memory, from which a GPU reads them faster.
        length_column: name of the column of lengths.

    Raises:
        ValueError: if `tokens_per_step` is less than the longest row.
    """

    def __init__(
        self,
        dataset: Dataset,
        collate_fn: Collator,
        per_device_train_batch_size: int,
        gradient_accumulation_steps: int = 1,
        tokens_per_step: int | None = None,
        group_by_length: bool = False,
        seed: int = 0,
        num_workers: int = 0,
        pin_memory: bool = False,
        length_column: str = "length",
    ):
        if group_by_length and tokens_per_step is None:
            raise ValueError(
                "With group_by_length, steps of a fixed number of rows differ in size: give tokens_per_step."
            )
        if len(dataset) == 0:
            raise ValueError("The training set is empty.")
        self.dataset, self.collate_fn = dataset, collate_fn
        self.micro_batch, self.accumulation = per_device_train_batch_size, gradient_accumulation_steps
        self.tokens_per_step, self.group_by_length, self.seed = tokens_per_step, group_by_length, seed
        self.num_workers, self.pin_memory = num_workers, pin_memory
        self.lengths = np.asarray(dataset[length_column])
        self.num_tokens = int(self.lengths.sum())
        if tokens_per_step is not None and tokens_per_step < self.lengths.max():
            raise ValueError(
                f"--tokens_per_step {tokens_per_step} is less than the {self.lengths.max()} tokens of the longest "
                "row: raise it, or lower --max_length (--block_size)."
            )
        self._order = lru_cache(maxsize=2)(self._order_of_epoch)

    def _order_of_epoch(self, epoch: int) -> _Order:
        rng = np.random.default_rng((self.seed, epoch))
        rows, ends = rng.permutation(len(self.dataset)), None
        if self.group_by_length:
            steps = self._grouped_steps(rows, rng)
            rows, ends = np.concatenate(steps), np.cumsum([len(step) for step in steps])
        lengths = self.lengths[rows]
        return _Order(rows, np.cumsum(lengths) - lengths, ends)

    def _grouped_steps(self, rows: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
        """Steps of rows of similar length, in random order; rows are sorted among those of every 50 steps."""
        assert self.tokens_per_step is not None
        steps: list[np.ndarray] = []
        tokens_before = 0
        blocks = max(1, round(self.num_tokens / (GROUPED_STEPS * self.tokens_per_step)))
        for block in np.array_split(rows, blocks):
            block = block[np.argsort(self.lengths[block], kind="stable")]
            lengths = self.lengths[block]
            # So that the steps of all blocks are those of an epoch.
            ends = [-(-tokens // self.tokens_per_step) for tokens in (tokens_before, tokens_before + lengths.sum())]
            tokens_before += lengths.sum()
            number = max(1, ends[1] - ends[0])
            # The same number of tokens in each, up to a part of a row. A row that ends at a border belongs to the step
            # before it: otherwise, of rows of one length, the last step would have one more than the others.
            borders = lengths.sum() * np.arange(1, number) / number
            parts = np.split(block, np.searchsorted(np.cumsum(lengths), borders, side="right"))
            steps += [parts[i] for i in rng.permutation(len(parts)) if len(parts[i])]
        return steps

    def _rows_per_step(self, num_processes: int) -> int:
        rows = self.micro_batch * self.accumulation * num_processes
        if rows > len(self.dataset):
            most = len(self.dataset) // (self.accumulation * num_processes)
            works = f"--per_device_train_batch_size {most} works" if most else "lower --gradient_accumulation_steps"
            raise ValueError(
                f"The training set has {len(self.dataset)} rows, fewer than the {rows} of one optimizer step "
                f"(--per_device_train_batch_size {self.micro_batch} × --gradient_accumulation_steps "
                f"{self.accumulation} × {num_processes} {'process' if num_processes == 1 else 'processes'}): {works}."
            )
        return rows

    def _end_of_step(self, first: int, num_processes: int) -> int:
        """The row after the last row of the step that begins with row `first`; rows are counted over all epochs."""
        if self.tokens_per_step is None:
            return first + self._rows_per_step(num_processes)
        epoch, place = divmod(first, len(self.dataset))
        order = self._order(epoch)
        if order.ends is not None:
            return epoch * len(self.dataset) + int(order.ends[np.searchsorted(order.ends, place, side="right")])
        tokens = epoch * self.num_tokens + int(order.tokens[place])
        end = (tokens // self.tokens_per_step + 1) * self.tokens_per_step
        epoch, rest = divmod(end, self.num_tokens)
        return epoch * len(self.dataset) + int(np.searchsorted(self._order(epoch).tokens, rest))

    def _rows(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Epoch and number in the data set of rows that are counted over all epochs."""
        for row in range(first, end):
            epoch, place = divmod(row, len(self.dataset))
            yield epoch, int(self._order(epoch).rows[place])

    def _plans(self, num_processes: int, process_index: int, first: int) -> Iterator[_Plan]:
        while True:
            end = self._end_of_step(first, num_processes)
            rows = list(self._rows(first, end))
            rounds = self.accumulation
            if self.tokens_per_step is not None:
                rounds = math.ceil(len(rows) / (self.micro_batch * num_processes))
            groups = deal(rows, [self.lengths[row] for _, row in rows], rounds * num_processes)
            # In each round, all processes compute groups of similar length.
            epoch, place = divmod(first, len(self.dataset))
            where = f"epoch {epoch + 1}, {len(rows)} rows from number {place + 1} of its order on"
            yield _Plan(groups[process_index::num_processes], end, where)
            first = end

    def steps(
        self,
        num_processes: int = 1,
        process_index: int = 0,
        position: Mapping[str, Any] | None = None,
        any_process: Callable[[bool], bool] = bool,
    ) -> Iterator[Step]:
        """As `TrainingLoader.steps`."""
        first = 0 if position is None else position["rows"]
        return iter(
            DataLoader(
                _PlannedSteps(self.dataset, self.collate_fn),
                batch_sampler=self._plans(num_processes, process_index, first),  # type: ignore[arg-type]
                collate_fn=unchanged,
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                worker_init_fn=without_signals,
                generator=torch.Generator(),  # otherwise, drawing the workers' seed would change dropout
            )
        )

    def check_position(self, position: Mapping[str, Any], num_processes: int = 1) -> None:
        """As `TrainingLoader.check_position`: any number goes on from any position."""

    def merge(self, positions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """As `TrainingLoader.merge`."""
        return dict(positions[0])

    def steps_per_epoch(self, num_processes: int = 1) -> float:
        """As `TrainingLoader.steps_per_epoch`."""
        if self.tokens_per_step is not None:
            steps = self.num_tokens / self.tokens_per_step
            return float(math.ceil(steps)) if self.group_by_length else steps  # grouped steps end with their epoch
        return len(self.dataset) / self._rows_per_step(num_processes)

    def step_size(self, num_processes: int = 1) -> str:
        """As `TrainingLoader.step_size`."""
        if self.tokens_per_step is not None:
            return f"{self.tokens_per_step} tokens"
        return f"{self._rows_per_step(num_processes)} rows"

    def summary(self, num_steps: int, num_processes: int = 1) -> str:
        """As `TrainingLoader.summary`."""
        rows, epochs = len(self.dataset), num_steps / self.steps_per_epoch(num_processes)
        return f"{rows:,} rows of {self.num_tokens / rows:.0f} tokens on average, {epochs:.2f} epochs"


def eval_dataloader(
    dataset: Dataset,
    collate_fn: Callable[[Any], Any],
    per_device_eval_batch_size: int,
    length_column: str = "length",
    num_workers: int = 0,
    pin_memory: bool = False,
) -> DataLoader:
    """Every row once, from short to long, with the least padding."""
    if len(dataset) == 0:
        raise ValueError("The evaluation set is empty.")
    order = np.argsort(np.asarray(dataset[length_column]), kind="stable").tolist()
    return DataLoader(
        dataset,
        batch_size=per_device_eval_batch_size,
        sampler=order,
        collate_fn=collate_fn,
        num_workers=num_workers,
        pin_memory=pin_memory,
        worker_init_fn=without_signals,
        generator=torch.Generator(),
    )
