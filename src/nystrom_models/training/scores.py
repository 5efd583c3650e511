# SPDX-License-Identifier: Apache-2.0
"""Scores over a data set, or over the steps since the last log, with the same result on any number of processes."""

from collections.abc import Mapping

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from .objectives import Objective


class Sums:
    """Sums and numbers of targets, by name. [`means`] gives the same values on all processes."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
        self.sums: dict[str, Tensor] = {}

    def add(self, scores: Mapping[str, tuple[Tensor, Tensor]]) -> None:
        """Adds (sums, numbers) of any shape."""
        for name, (total, count) in scores.items():
            pair = torch.stack([value.detach().to(self.dtype).sum() for value in (total, count)])
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
        return {name: float(total / count) for name, (total, count) in sums.items()}


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
        sums.add(accelerator.gather_for_metrics(objective.scores(model(**batch), batch)))
    model.train(was_training)
    return sums.means(reduce=False)


@torch.no_grad()
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
    was_training = model.training
    model.eval()
    parts, numbers = [], []
    for batch in _batches(accelerator, dataloader, desc):
        if "index" not in batch:
            raise ValueError("The batches have no index: predictions could not be assigned to rows.")
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "index")}
        logits, index = accelerator.gather_for_metrics((model(**inputs).logits.float(), batch["index"]))
        parts.append(logits.cpu())
        numbers.append(index.cpu())
    model.train(was_training)
    logits, index = torch.cat(parts), torch.cat(numbers)
    if not torch.equal(index.sort().values, torch.arange(len(index))):
        raise ValueError(f"The {len(index)} rows are not numbered from 0 to {len(index) - 1}, each once.")
    return logits[index.argsort()]
