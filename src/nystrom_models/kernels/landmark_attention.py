# SPDX-License-Identifier: Apache-2.0
"""What the landmarks see: softmax(q~ kᵀ / √D) v over the valid keys, M queries over N keys.

The keys are split into parts, so that few heads fill a device; a second launch merges the parts by the logarithms of
their sums. A part is a stretch between the first and the last valid token of its row: padding around costs nothing.
Legend as in `tiles.py`; P parts.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .tiles import (
    LOG2_E,
    Rows,
    dot,
    landmark_count,
    load_tile,
    new_states,
    on_device,
    row_arguments,
    split_count,
    store_tile,
    strides,
    tile,
    unit_stride,
    valid_extent,
    valid_tokens,
)


@triton.jit
def _part(
    positions, sizes, exists, exact, row, N, M, longest, MASKED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The stretch of tokens of this program; for rows that are exact, each landmark's own token, else -1."""
    landmarks = tl.arange(0, BLOCK_M)
    first = 0
    stop = N
    own = landmarks * 0 - 1
    if MASKED:
        count = landmark_count(exists, row, M, BLOCK_M)
        first, stop = valid_extent(positions, sizes, row, count, M, longest)
        is_exact = tl.load(exact + row) != 0
        own_token = tl.load(positions + (row * M + landmarks) * longest, mask=landmarks < count, other=-1)
        own = tl.where(is_exact, own_token.to(tl.int32), -2)
    parts = tl.num_programs(0)
    size = tl.cdiv(stop - first, parts * BLOCK_N) * BLOCK_N
    start = first + tl.program_id(0) * size
    return start, tl.minimum(start + size, stop), own


@triton.jit
def _scores(q, k, tokens, valid, own, scale, MASKED: tl.constexpr):
    """Base-two logarithms of the unnormalised attention weights (BLOCK_M, BLOCK_N)."""
    scores = dot(q, tl.trans(k)) * (scale * LOG2_E)
    if MASKED:
        # A landmark that is a token takes that token's value as it is.
        own_scores = tl.where(own[:, None] == tokens[None, :], 0.0, -float("inf"))
        scores = tl.where(own[:, None] == -2, scores, own_scores)
    return tl.where(valid[None, :], scores, -float("inf"))


@triton.jit
def _landmark_attention_forward(
    query_landmarks, key, key_b, key_h, key_n, value, value_b, value_h, value_n, partial, partial_lse,
    scale, H, N, M, D, mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    key += row * key_b + program % H * key_h
    value += row * value_b + program % H * value_h
    landmarks = tl.arange(0, BLOCK_M)
    q = load_tile(query_landmarks + program * M * D, landmarks, D, landmarks < M, D, BLOCK_D)
    start, stop, own = _part(positions, sizes, exists, exact, row, N, M, longest, MASKED, BLOCK_M, BLOCK_N)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    context = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)
        k = load_tile(key, tokens, key_n, valid, D, BLOCK_D)
        v = load_tile(value, tokens, value_n, valid, D, BLOCK_D)
        scores = _scores(q, k, tokens, valid, own, scale, MASKED)
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        # Finite before the first valid key.
        reference = tl.maximum(new_largest, -1e30)
        weights = tl.exp2(scores - reference[:, None])
        keep = tl.exp2(largest - reference)
        total = total * keep + tl.sum(weights, axis=1)
        context = context * keep[:, None] + dot(weights.to(v.dtype), v)
        largest = new_largest
    context = context / tl.where(total > 0, total, 1.0)[:, None]
    lse = tl.where(total > 0, largest + tl.log2(tl.where(total > 0, total, 1.0)), -float("inf"))
    place = program * tl.num_programs(0) + tl.program_id(0)
    store_tile(partial + place * M * D, landmarks, D, landmarks < M, context, D, BLOCK_D)
    tl.store(partial_lse + place * M + landmarks, lse, mask=landmarks < M)


@triton.jit
def _merge(
    partial, partial_lse, context, lse, parts, M, D, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    landmarks = tl.arange(0, BLOCK_M)
    inside = landmarks < M
    largest = tl.full([BLOCK_M], -1e30, tl.float32)
    for part in range(parts):
        of_part = partial_lse + (program * parts + part) * M + landmarks
        largest = tl.maximum(largest, tl.load(of_part, mask=inside, other=-float("inf")))
    total = tl.zeros([BLOCK_M], tl.float32)
    merged = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in range(parts):
        of_part = partial_lse + (program * parts + part) * M + landmarks
        share = tl.exp2(tl.load(of_part, mask=inside, other=-float("inf")) - largest)
        merged += share[:, None] * load_tile(
            partial + (program * parts + part) * M * D, landmarks, D, inside, D, BLOCK_D
        )
        total += share
    merged = merged / tl.where(total > 0, total, 1.0)[:, None]
    store_tile(context + program * M * D, landmarks, D, inside, merged, D, BLOCK_D)
    tl.store(lse + program * M + landmarks, largest + tl.log2(tl.where(total > 0, total, 1.0)), mask=inside)


@triton.jit
def _landmark_attention_backward(
    query_landmarks, key, key_b, key_h, key_n, value, value_b, value_h, value_n, context, lse, context_grad,
    partial_query_grad, key_grad, value_grad, grad_b, grad_h, grad_n,
    scale, H, N, M, D, mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    key += row * key_b + program % H * key_h
    value += row * value_b + program % H * value_h
    key_grad += row * grad_b + program % H * grad_h
    value_grad += row * grad_b + program % H * grad_h
    landmarks = tl.arange(0, BLOCK_M)
    inside = landmarks < M
    q = load_tile(query_landmarks + program * M * D, landmarks, D, inside, D, BLOCK_D)
    g = load_tile(context_grad + program * M * D, landmarks, D, inside, D, BLOCK_D)
    seen = load_tile(context + program * M * D, landmarks, D, inside, D, BLOCK_D)
    mean_grad = tl.sum(g * seen, axis=1)
    g = g.to(q.dtype)
    log_total = tl.load(lse + program * M + landmarks, mask=inside, other=0.0)
    start, stop, own = _part(positions, sizes, exists, exact, row, N, M, longest, MASKED, BLOCK_M, BLOCK_N)
    q_grad = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)
        k = load_tile(key, tokens, key_n, valid, D, BLOCK_D)
        v = load_tile(value, tokens, value_n, valid, D, BLOCK_D)
        weights = tl.exp2(_scores(q, k, tokens, valid, own, scale, MASKED) - log_total[:, None])
        scores_grad = weights * (dot(g, tl.trans(v)) - mean_grad[:, None]) * scale
        if MASKED:
            scores_grad = tl.where(own[:, None] == -2, scores_grad, 0.0)
        scores_grad = scores_grad.to(q.dtype)
        q_grad += dot(scores_grad, k)
        # Of invalid tokens in between: zeros, as their weights are.
        store_tile(key_grad, tokens, grad_n, tokens < stop, dot(tl.trans(scores_grad), q), D, BLOCK_D)
        store_tile(value_grad, tokens, grad_n, tokens < stop, dot(tl.trans(weights.to(q.dtype)), g), D, BLOCK_D)
    place = program * tl.num_programs(0) + tl.program_id(0)
    store_tile(partial_query_grad + place * M * D, landmarks, D, inside, q_grad, D, BLOCK_D)


def _sizes(num_landmarks: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    sizes = {"BLOCK_M": tile(num_landmarks), "BLOCK_D": tile(dim), "num_warps": 8, "num_stages": 1}
    # Products in float32 hold their operands in registers.
    return sizes | {"BLOCK_N": 16 if dtype == torch.float32 else 32}


def run_forward(query_landmarks: Tensor, key: Tensor, value: Tensor, rows: Rows | None) -> tuple[Tensor, Tensor]:
    """As `landmark_attention`, landmarks contiguous, keys and values with unit stride.

    And the base-two logarithms (B, H, M) of the sums of the weights, which the backward pass needs.
    """
    batch, heads, length, dim = key.shape
    count = query_landmarks.shape[2]
    sizes = _sizes(count, dim, key.dtype)
    parts = split_count(triton.cdiv(length, sizes["BLOCK_N"]), batch * heads, key.device)
    context = key.new_empty(batch, heads, count, dim, dtype=torch.float32)
    lse = context.new_empty(batch, heads, count)
    partial = context.new_empty(batch, heads, parts, count, dim)
    partial_lse = context.new_empty(batch, heads, parts, count)
    with on_device(key):
        _landmark_attention_forward[(parts, batch * heads)](
            query_landmarks, key, *strides(key), value, *strides(value), partial, partial_lse,
            dim**-0.5, heads, length, count, dim, **row_arguments(rows), **sizes,
        )  # fmt: skip
        _merge[(batch * heads,)](
            partial, partial_lse, context, lse, parts, count, dim,
            BLOCK_M=sizes["BLOCK_M"], BLOCK_D=sizes["BLOCK_D"], num_stages=1,
        )  # fmt: skip
    return context, lse


def run_backward(
    query_landmarks: Tensor,
    key: Tensor,
    value: Tensor,
    context: Tensor,
    lse: Tensor,
    context_grad: Tensor,
    rows: Rows | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the landmarks (B, H, M, D), and of keys and values (B, H, N, D)."""
    batch, heads, length, dim = key.shape
    count = query_landmarks.shape[2]
    sizes = _sizes(count, dim, key.dtype)
    parts = split_count(triton.cdiv(length, sizes["BLOCK_N"]), batch * heads, key.device)
    partial = context.new_empty(batch, heads, parts, count, dim)
    # No program comes to the padding around a row.
    key_grad = new_states(key, length, zeros=rows is not None)
    value_grad = new_states(value, length, zeros=rows is not None)
    with on_device(key):
        _landmark_attention_backward[(parts, batch * heads)](
            query_landmarks, key, *strides(key), value, *strides(value), context, lse, context_grad.contiguous(),
            partial, key_grad, value_grad, *strides(key_grad),
            dim**-0.5, heads, length, count, dim, **row_arguments(rows), **sizes,
        )  # fmt: skip
    return partial.sum(dim=2).to(query_landmarks.dtype), key_grad, value_grad


class _LandmarkAttention(torch.autograd.Function):
    forward = staticmethod(run_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query_landmarks, key, value, ctx.rows = inputs
        context, lse = output
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(query_landmarks, key, value, context, lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, context_grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        query_landmarks, key, value, context, lse = ctx.saved_tensors
        return *run_backward(query_landmarks, key, value, context, lse, context_grad, ctx.rows), None


def landmark_attention(query_landmarks: Tensor, key: Tensor, value: Tensor, rows: Rows | None = None) -> Tensor:
    """softmax(q~ kᵀ / √D) v over the valid keys, and no M×N matrix is stored; differentiable once.

    Args:
        query_landmarks: (B, H, M, D). key, value: (B, H, N, D), of the same dtype.
        rows: the ragged batch; None where every token is valid.

    Returns: (B, H, M, D) float32. Where every token of a row is its own landmark, the value of that token. A row
    without a valid token gets zeros.
    """
    return _LandmarkAttention.apply(query_landmarks.contiguous(), unit_stride(key), unit_stride(value), rows)[0]
