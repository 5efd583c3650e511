# SPDX-License-Identifier: Apache-2.0
"""Losses of the heads, in float32 at least.

`num_items_in_batch` is the divisor of a sum that Transformers' Trainer passes: the number of labels that count in all
batches of an optimizer step, on all devices. Without it, the loss is a mean over this batch.

Legend: B batch, N tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

# Labels with this value do not count.
IGNORED = -100


def ignore_padding(labels: Tensor, attention_mask: Tensor | None, ignore_index: int = IGNORED) -> Tensor:
    """The labels (B, N) of tokens in int64, with `ignore_index` at padding."""
    labels = int64_labels(labels)
    if attention_mask is None:
        return labels
    # A mask may begin with the columns of tokens in a cache.
    return labels.masked_fill(attention_mask[:, -labels.shape[1] :] == 0, ignore_index)


def require_integers(name: str, labels: Tensor) -> None:
    """Raises ValueError unless labels have a dtype that can number classes or places."""
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"{name} are numbers of classes or places, and must be int64, but are {labels.dtype}.")


def int64_labels(labels: Tensor) -> Tensor:
    """Class ids of any integer dtype, or of bool for two classes, in the only one that PyTorch's loss takes."""
    require_integers("labels", labels)
    return labels.long()


def cross_entropy(
    logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None, ignore_index: int = IGNORED
) -> Tensor:
    """Mean cross entropy of logits (..., classes) over the labels (...) that count; 0 if none does.

    Raises ValueError for labels of a floating-point dtype.
    """
    labels = int64_labels(labels).flatten().to(logits.device)
    total = F.cross_entropy(_precise(logits).flatten(0, -2), labels, ignore_index=ignore_index, reduction="sum")
    return mean(total, (labels != ignore_index).sum(), num_items_in_batch)


def squared_error(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Mean squared error of numbers (B,) or (B, num_labels)."""
    logits = _precise(logits)
    total = F.mse_loss(logits, _like(logits, labels), reduction="sum")
    return mean(total, labels.numel(), num_items_in_batch)


def binary_cross_entropy(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
    """Mean over (B, num_labels) of the cross entropy of each label, 0 or 1, by itself."""
    logits = _precise(logits)
    total = F.binary_cross_entropy_with_logits(logits, _like(logits, labels), reduction="sum")
    return mean(total, labels.numel(), num_items_in_batch)


def _like(logits: Tensor, labels: Tensor) -> Tensor:
    """The labels in the shape (B, num_labels) of the logits; with one label, (B,) are taken, too."""
    if labels.shape != logits.shape and (logits.shape[-1] != 1 or labels.shape != logits.shape[:-1]):
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, but must be (batch, num_labels) = {tuple(logits.shape)}."
        )
    return labels.to(logits).view_as(logits)


def _precise(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def mean(total: Tensor, count: Tensor | int, num_items_in_batch: Tensor | int | None) -> Tensor:
    """A sum over labels, divided by their number, or by `num_items_in_batch` if it is given; 0 if that is 0."""
    if num_items_in_batch is not None:
        count = num_items_in_batch
    count = at_least_one(count)
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def at_least_one(count: Tensor | int) -> Tensor | int:
    """A number of labels as a divisor: 1 where there are none, so that their loss is 0 instead of 0 / 0."""
    return count.clamp_min(1) if isinstance(count, Tensor) else max(count, 1)
