# SPDX-License-Identifier: Apache-2.0
"""Softmax attention with dropout on a CPU, without storing the weights.

PyTorch stores the weights and the drawn numbers of all tokens, several times, where dropout is wanted on a CPU. Here
they are computed in blocks that stay in the caches, and again in the backward pass, from the same seed.

Legend: B batch, H heads, N queries, K keys, D head size.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK_WEIGHTS = 2**18  # of each thread: 1 MB in float32
_LEVELS = 2**16


def attention_with_dropout(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float) -> Tensor:
    """dropout(softmax(query keyᵀ / √D)) value, in O(N + K) memory.

    Args:
        query: (B, H, N, D). key, value: (B, H, K, D). Weights are computed in float32 at least.
        mask: (B, 1, 1, K) bool, True at visible keys, at least one in each row; None for all.
        dropout_p: probability of dropping a weight, rounded to a positive multiple of 2⁻¹⁶. The others are divided by
            the probability of being kept. It is drawn from PyTorch's generator; the drawn weights depend on the sizes
            and on the number of threads.

    Returns: (B, H, N, D), under autocast in its dtype. Second derivatives store the weights.

    Raises ValueError for a probability outside 0 to 1.
    """
    if not 0 <= dropout_p <= 1:
        raise ValueError(
            f"The attention's dropout is {dropout_p}, but must lie between 0 and 1: correct "
            "attention_probs_dropout_prob (in some models attention_dropout) in the configuration."
        )
    if torch.is_autocast_enabled("cpu") and query.dtype != torch.float64:
        query, key, value = (states.to(torch.get_autocast_dtype("cpu")) for states in (query, key, value))
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
    # The backward pass must draw the same blocks, also in a thread with another number of threads.
    block_size = BLOCK_WEIGHTS * torch.get_num_threads()
    return _AttentionWithDropout.apply(query, key, value, mask, dropout_p, seed, block_size)


class _AttentionWithDropout(torch.autograd.Function):
    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *drawing: Any) -> Tensor:
        return _attend(query, key, value, mask, *drawing)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.drawing = inputs[4:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        if torch.is_grad_enabled():
            # create_graph=True, or torch.func.grad: the gradient is differentiated in turn. By views: one input may be
            # computed from another, as a landmark's values are from its key, and that path is not of this function.
            query, key, value = (states.view_as(states) for states in (query, key, value))
            wanted = [states for states in (query, key, value) if states.requires_grad]
            context = _attend(query, key, value, mask, *ctx.drawing)
            found = iter(torch.autograd.grad(context, wanted, gradient, create_graph=True))
            return (*(next(found) if states.requires_grad else None for states in (query, key, value)), *[None] * 4)
        query_gradient = torch.empty_like(query)
        # Sums over blocks of queries lose digits in half precision.
        key_gradient, value_gradient = (
            torch.zeros_like(states, dtype=torch.promote_types(states.dtype, torch.float32)) for states in (key, value)
        )
        keep_probability, scaling = _keep_probability(ctx.drawing[0]), query.shape[-1] ** -0.5
        with torch.autocast("cpu", enabled=False):
            for rows, queries, weights, kept in _blocks(query, key, mask, *ctx.drawing):
                of_context = gradient[rows, :, queries] / keep_probability
                value_gradient[rows] += (weights * kept).to(value.dtype).mT @ of_context
                # Of the weights; then, through the softmax, of the scores.
                changes = (of_context @ value[rows].mT).to(weights.dtype).mul_(kept).mul_(weights)
                changes.addcmul_(weights, changes.sum(dim=-1, keepdim=True), value=-1)
                changes = changes.mul_(scaling).to(query.dtype)
                query_gradient[rows, :, queries] = changes @ key[rows]
                key_gradient[rows] += changes.mT @ query[rows, :, queries]
        return query_gradient, key_gradient.to(key.dtype), value_gradient.to(value.dtype), None, None, None, None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, seed: int, block_size: int
) -> Tensor:
    context = value.new_empty(*query.shape[:-1], value.shape[-1])
    keep_probability = _keep_probability(dropout_p)
    with torch.autocast("cpu", enabled=False):
        for rows, queries, weights, kept in _blocks(query, key, mask, dropout_p, seed, block_size):
            context[rows, :, queries] = ((weights * kept).to(value.dtype) @ value[rows]) / keep_probability
    return context


def _dropped_levels(dropout_p: float) -> int:
    """The probability of dropping a weight, in units of 2⁻¹⁶."""
    return max(1, round(dropout_p * _LEVELS))


def _keep_probability(dropout_p: float) -> float:
    """The divisor of the weights that are kept. If none is, the result is 0, not 0 / 0."""
    return max(1, _LEVELS - _dropped_levels(dropout_p)) / _LEVELS


class _Block(NamedTuple):
    """A block of weights that are computed at once.

    rows, queries: the rows of the batch and the queries of the block. weights: (b, H, n, K), softmax(query keyᵀ / √D).
    kept: the same shape and dtype, 0 where a weight is dropped, else 1.
    """

    rows: slice
    queries: slice
    weights: Tensor
    kept: Tensor


def _blocks(
    query: Tensor, key: Tensor, mask: Tensor | None, dropout_p: float, seed: int, block_size: int
) -> Iterator[_Block]:
    """The blocks, one after the other; with the same seed and block size, the same ones."""
    batch, heads, length, dim = query.shape
    of_query = max(1, heads * key.shape[2])
    num_queries = max(1, min(length, block_size // of_query))
    num_rows = max(1, block_size // (of_query * num_queries)) if num_queries == length else 1
    generator, dropped_levels = torch.Generator("cpu").manual_seed(seed), _dropped_levels(dropout_p)
    # Scores in half precision would keep two or three digits, and their errors become those of the weights, times the
    # scores.
    dtype = torch.promote_types(query.dtype, torch.float32)
    key = key.to(dtype)
    for row in range(0, batch, num_rows):
        rows = slice(row, row + num_rows)
        for first in range(0, length, num_queries):
            queries = slice(first, first + num_queries)
            scores = (query[rows, :, queries].to(dtype) * dim**-0.5) @ key[rows].mT
            if mask is not None:
                scores.masked_fill_(~mask[rows], -torch.inf)
            weights = torch.softmax(scores, dim=-1)
            yield _Block(rows, queries, weights, _draw(scores.shape, dropped_levels, generator).to(dtype))


def _draw(shape: torch.Size, dropped_levels: int, generator: torch.Generator) -> Tensor:
    """True where a weight is kept. A random number of 64 bits decides on four weights."""
    numbers = torch.empty(-(-shape.numel() // 4), dtype=torch.int64, device="cpu")
    levels = numbers.random_(-(2**63), None, generator=generator).view(torch.int16)
    return (levels > dropped_levels - 1 - _LEVELS // 2)[: shape.numel()].view(shape)
