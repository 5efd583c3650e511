# SPDX-License-Identifier: Apache-2.0
"""Scores over a data set, or over the steps since the last log, with the same result on any number of processes."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from .objectives import Batch, Objective


def score_line(scores: Mapping[str, float]) -> str:
    """The scores that are defined, to be printed in one line."""
    return ", ".join(f"{name} {value:.4g}" for name, value in scores.items() if not math.isnan(value))


class Sums:
    """Sums and numbers of targets, by name. [`means`] gives the same values on all processes."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
        self.sums: dict[str, Tensor] = {}

    def add(self, scores: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Adds (sums, numbers) of any shape."""
        for name, (total, count) in scores.items():
            self._add(name, torch.stack([self._sum(value.detach().to(self.dtype)) for value in (total, count)]))

    @staticmethod
    def _sum(value: Tensor) -> Tensor:
        return value.sum() if value.ndim else value

    def merge(self, other: "Sums") -> None:
        """Adds the sums and numbers of another."""
        for name, pair in other.sums.items():
            self._add(name, pair)

    def _add(self, name: str, pair: Tensor) -> None:
        self.sums[name] = self.sums[name] + pair if name in self.sums else pair

    def reduced(self) -> dict[str, list[float]]:
        """The sums and numbers over all processes, for [`load`]."""
        sums = self.accelerator.reduce(self.sums, "sum") if self.sums else {}
        return {name: pair.tolist() for name, pair in sums.items()}

    def load(self, sums: Mapping[str, list[float]]) -> None:
        """Continues from the result of [`reduced`]. Only the main process adds it, so that it is counted once."""
        device, main = self.accelerator.device, self.accelerator.is_main_process
        self.sums = {name: torch.tensor(pair, dtype=self.dtype, device=device) * main for name, pair in sums.items()}

    def means(self, reduce: bool = True) -> dict[str, float]:
        """Sum divided by number, for every name; NaN without targets."""
        sums = self.accelerator.reduce(self.sums, "sum") if reduce and self.sums else self.sums
        if not sums:
            return {}
        # Read together, because the host waits for a GPU at each reading.
        total, count = torch.stack(list(sums.values())).unbind(1)
        return dict(zip(sums, (total / count).tolist(), strict=True))


def _batches(accelerator: Accelerator, dataloader: DataLoader, desc: str) -> tqdm:
    """The batches of this process on its device, with a progress bar on the main one."""
    # Not `accelerator.prepare`, which keeps a reference to every loader.
    prepared = prepare_data_loader(dataloader, accelerator.device, put_on_device=True, non_blocking=True)
    return tqdm(prepared, desc=desc, leave=False, disable=not accelerator.is_main_process)


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: nn.Module, objective: Objective, dataloader: DataLoader, desc: str = "Evaluating"
) -> dict[str, float]:
    """Mean losses and accuracies over every target of a data set, each row counted once.

    Args:
        accelerator: gathers over the processes.
        model: [`TrainingState.model`], or a model on the accelerator's device.
        objective: names the scores.
        dataloader: from [`eval_dataloader`].
        desc: label of the progress bar.
    """
    was_training = model.training
    model.eval()
    sums = Sums(accelerator)
    for batch in _batches(accelerator, dataloader, desc):
        # This drops the rows that only fill the last batch of the processes.
        sums.add(accelerator.gather_for_metrics(objective.scores(objective.forward(model, batch), batch)))
    model.train(was_training)
    return sums.means(reduce=False)


# What a row gives, such as its logits, from the model's outputs and the batch: tensors (B, ...).
Outputs = Callable[[Any, Batch], Mapping[str, Tensor]]

# Entries of a batch that are not inputs of the model, or would only make it compute a loss.
_NOT_INPUTS = frozenset(("index", "labels", "start_positions", "end_positions", "context_mask", "null_position"))


@torch.no_grad()
def _predictions(
    accelerator: Accelerator, model: nn.Module, dataloader: DataLoader, outputs: Outputs, desc: str
) -> tuple[dict[str, list[Tensor]], Tensor]:
    """What `outputs` gives, batch by batch, from all processes, and the numbers of the rows in this order."""
    was_training = model.training
    model.eval()
    parts: dict[str, list[Tensor]] = {}
    numbers = []
    for batch in _batches(accelerator, dataloader, desc):
        if "index" not in batch:
            raise ValueError("The batches have no index: predictions could not be assigned to rows.")
        inputs = {name: value for name, value in batch.items() if name not in _NOT_INPUTS}
        found = {**outputs(model(**inputs), batch), "index": batch["index"]}
        # The batches of the processes differ in length.
        found = {name: accelerator.pad_across_processes(value, dim=1) for name, value in found.items()}
        found = accelerator.gather_for_metrics(found)
        numbers.append(found.pop("index").cpu())
        for name, value in found.items():
            parts.setdefault(name, []).append(value.cpu())
    model.train(was_training)
    index = torch.cat(numbers)
    if not torch.equal(index.sort().values, torch.arange(len(index))):
        raise ValueError(f"The {len(index)} rows are not numbered from 0 to {len(index) - 1}, each once.")
    return parts, index


def _logits(outputs: Any, batch: Batch) -> dict[str, Tensor]:
    return {"logits": outputs.logits.float()}


def predict(accelerator: Accelerator, model: nn.Module, dataloader: DataLoader, desc: str = "Predicting") -> Tensor:
    """The logits of every row, float32 of shape (rows, classes), on all processes and in the data set's order.

    Args:
        accelerator: gathers over the processes.
        model: as prepared by Accelerate, or on the accelerator's device.
        dataloader: of any order; its batches have an `index`, the number of each row. Labels are not needed.
        desc: label of the progress bar.

    Raises:
        ValueError: if batches have no `index`, or rows are missing or repeated.
    """
    parts, index = _predictions(accelerator, model, dataloader, _logits, desc)
    return torch.cat(parts["logits"])[index.argsort()]


def predict_rows(
    accelerator: Accelerator, model: nn.Module, dataloader: DataLoader, outputs: Outputs, desc: str = "Predicting"
) -> dict[str, list[Tensor]]:
    """As [`predict`], for outputs of any shape: for each name that `outputs` gives, a tensor for every row.

    The tensors of a row may be padded at the end, to the longest row of its batch.
    """
    parts, index = _predictions(accelerator, model, dataloader, outputs, desc)
    order = index.argsort().tolist()
    rows = {name: [row for part in batches for row in part.unbind()] for name, batches in parts.items()}
    return {name: [values[i] for i in order] for name, values in rows.items()}
