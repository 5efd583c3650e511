# SPDX-License-Identifier: Apache-2.0
"""Data loaders for training and evaluation."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader, Sampler
from transformers.trainer_pt_utils import get_length_grouped_indices


class LengthGroupedBatches(Sampler[int]):
    """Indices in random order, rows of about the same length side by side.

    As Transformers' `LengthGroupedSampler`, but the batches come in random order, not from long to short, and the
    order is a function of `seed` and the epoch.

    Args:
        lengths: one length a row.
        batch_size: rows of one optimizer step, over all processes and accumulated micro-batches: grouping by it makes
            the rows of a step the same however they are divided.
        seed: of the order.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int = 0):
        self.lengths = list(lengths)
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Accelerate's data loaders."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        indices = get_length_grouped_indices(self.lengths, self.batch_size, generator=generator)
        num_batches = len(indices) // self.batch_size
        for batch in torch.randperm(num_batches, generator=generator).tolist():
            yield from indices[batch * self.batch_size : (batch + 1) * self.batch_size]
        yield from indices[num_batches * self.batch_size :]


def train_dataloader(
    dataset: Dataset,
    collate_fn: Callable[[Any], Any],
    per_device_train_batch_size: int,
    total_train_batch_size: int | None = None,
    seed: int = 0,
    length_column: str = "length",
    num_workers: int = 0,
) -> DataLoader:
    """Length-grouped, shuffled batches; the incomplete last one is left out.

    Args:
        dataset: with a column of lengths.
        collate_fn: makes a batch of rows.
        per_device_train_batch_size: rows of one micro-batch.
        total_train_batch_size: rows of one optimizer step (processes times accumulation steps times the above).
        seed: of the order.
        length_column: name of that column.
        num_workers: processes that collate; 0 collates in this one.

    Raises:
        ValueError: if the data set is smaller than one optimizer step.
    """
    total = total_train_batch_size or per_device_train_batch_size
    if len(dataset) < total:
        raise ValueError(
            f"The training set has {len(dataset)} rows, fewer than the {total} of one optimizer step: lower "
            "--per_device_train_batch_size or --gradient_accumulation_steps."
        )
    return DataLoader(
        dataset,
        batch_size=per_device_train_batch_size,
        sampler=LengthGroupedBatches(dataset[length_column], total, seed),
        collate_fn=collate_fn,
        drop_last=True,
        num_workers=num_workers,
    )


def stream_dataloader(
    dataset: IterableDataset,
    collate_fn: Callable[[Any], Any],
    per_device_train_batch_size: int,
    num_workers: int = 0,
) -> DataLoader:
    """Batches of a stream in its own order; the incomplete last one is left out. Rows are not grouped by length."""
    return DataLoader(
        dataset.with_format(None),
        batch_size=per_device_train_batch_size,
        collate_fn=collate_fn,
        drop_last=True,
        num_workers=num_workers,
    )


def eval_dataloader(
    dataset: Dataset, collate_fn: Callable[[Any], Any], per_device_eval_batch_size: int, length_column: str = "length"
) -> DataLoader:
    """Every row once, from short to long, which wastes least on padding."""
    if len(dataset) == 0:
        raise ValueError("The evaluation set is empty.")
    order = torch.tensor(dataset[length_column]).argsort(stable=True).tolist()
    return DataLoader(
        dataset,
        batch_size=per_device_eval_batch_size,
        sampler=order,
        collate_fn=collate_fn,
    )
