# SPDX-License-Identifier: Apache-2.0
"""The gradient of an optimizer step: that of the mean loss over all micro-batches of all processes."""

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor, nn

from ..data.loading import Step
from .objectives import Batch, Objective
from .scores import Sums


def add_gradients(
    accelerator: Accelerator, model: nn.Module, objective: Objective, step: Step
) -> tuple[Tensor, Sums, Tensor]:
    """Adds the gradient of a step to that of the weights. All processes call it.

    Args:
        model: as Accelerate has prepared it.
        objective: that of this step.
        step: the micro-batches of this process.

    Returns:
        This process's share of the loss, of shape (); its scores; and the number of its tokens, int64 of shape ().
    """
    names, counts = _count_targets(objective, step)
    # A blocking copy would wait until a GPU has finished the step before.
    counts = counts.to(accelerator.device, non_blocking=True)
    totals = accelerator.reduce(counts.sum(1), "sum")
    loss, scores = torch.zeros((), device=accelerator.device), Sums(accelerator)
    num_tokens = torch.zeros((), dtype=torch.int64, device=accelerator.device)
    for number, (batch, num_rows) in enumerate(zip(step.batches, step.num_rows, strict=True)):
        accelerator.sync_gradients = number == len(step.batches) - 1
        # DDP waits for the gradients of all weights. If there are only some, they are averaged below.
        averages = accelerator.sync_gradients and not objective.is_partial
        with nullcontext() if averages else accelerator.no_sync(model):
            batch = send_to_device(batch, accelerator.device, non_blocking=True)
            shares = {name: (counts[i, number], totals[i]) for i, name in enumerate(names)}
            loss += _backward(accelerator, model, objective, batch, shares, num_rows > 0, scores)
        if num_rows > 0:
            num_tokens += batch["attention_mask"].sum()
    if objective.is_partial:
        _average_gradients(accelerator, model)
    return loss, scores, num_tokens


def _average_gradients(accelerator: Accelerator, model: nn.Module) -> None:
    """Averages the existing gradients over the processes, as DDP does if all weights have one."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = accelerator.reduce(parameter.grad, "mean")


def _count_targets(objective: Objective, step: Step) -> tuple[list[str], Tensor]:
    """The names of the losses, and the number of targets of each in every micro-batch, int64 of shape (losses,
    micro-batches)."""
    targets = [objective.num_targets(batch) for batch in step.batches]
    names, rows = list(targets[0]), torch.tensor(step.num_rows) > 0
    return names, torch.stack([torch.stack([counts[name] for counts in targets]) * rows for name in names])


def _backward(
    accelerator: Accelerator,
    model: nn.Module,
    objective: Objective,
    batch: Batch,
    shares: Mapping[str, tuple[Tensor, Tensor]],
    counted: bool,
    sums: Sums,
) -> Tensor:
    """Adds the gradient of a micro-batch's share of the step's loss, and adds its scores to `sums`.

    Args:
        shares: for each loss the number of its targets in the micro-batch, and in all of the step.
        counted: whether the micro-batch has rows of the step; without, it only keeps the processes together.

    Returns: the share.
    """
    outputs = objective.forward(model, batch)
    losses, weighted = objective.losses(outputs), []
    for name, (count, total) in shares.items():
        # The mean of a loss without targets is 0 / 0.
        losses[name] = torch.where(count > 0, losses[name], 0.0)
        # In float32, or in float64 if the model is in float64.
        dtype = torch.promote_types(losses[name].dtype, torch.float32)
        share = count.to(dtype) / total.clamp(min=1)
        weighted.append(losses[name] * (share * objective.weights.get(name, 1.0)))
    loss = torch.stack(weighted).sum()
    # DDP, FSDP and DeepSpeed average gradients over processes.
    accelerator.backward(loss * accelerator.num_processes)
    with torch.no_grad():
        scores = objective.scores(outputs, batch, with_loss=False)
        scores |= {name: (losses[name] * count, count) for name, (count, _) in shares.items()}
        if not counted:
            scores = {name: (total * 0, count * 0) for name, (total, count) in scores.items()}
        sums.add(scores)
    return loss.detach()
