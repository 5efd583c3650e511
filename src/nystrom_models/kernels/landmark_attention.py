# SPDX-License-Identifier: Apache-2.0
"""What the landmarks see, softmax(q~ kᵀ / √D) v over the valid keys, M queries over N keys; and the keys' landmarks.

The keys are read once for both. They are split into parts, so that few heads fill a device; a second launch merges the
parts, by the logarithms of their sums. A part is a stretch between the first and the last valid token of its row:
padding around costs nothing. Legend as in `tiles.py`; P parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import plan_launch
from .tiles import (
    LOG2_E,
    Rows,
    dot,
    find_segments,
    landmark_count,
    load_tile,
    new_states,
    on_device,
    row_arguments,
    store_tile,
    stretch,
    strides,
    valid_tokens,
)


@triton.jit
def _scores(q, k, tokens, valid, first, is_exact, scale, MASKED: tl.constexpr):
    """Base-two logarithms of the unnormalised attention weights (BLOCK_M, BLOCK_N)."""
    scores = dot(q, tl.trans(k)) * (scale * LOG2_E)
    if MASKED:
        # A landmark that is a token takes that token's value as it is. What does not exist takes any.
        own_scores = tl.where(first[:, None] == tokens[None, :], 0.0, -float("inf"))
        scores = tl.where(is_exact, own_scores, scores)
    return tl.where(valid[None, :], scores, -float("inf"))


@triton.jit
def _members(first, stop, tokens, valid, dtype: tl.constexpr):
    """(BLOCK_M, BLOCK_N), 1 where a token belongs to a landmark's segment."""
    inside = (tokens[None, :] >= first[:, None]) & (tokens[None, :] < stop[:, None]) & valid[None, :]
    # By way of float32, for the interpreter makes no bfloat16 of truth values.
    return inside.to(tl.float32).to(dtype)


@triton.jit
def _landmark_attention_forward(
    query_landmarks, key, key_b, key_h, key_n, value, value_b, value_h, value_n, partial, partial_sums, partial_lse,
    scale, H, N, M, D, mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    key += row * key_b + program % H * key_h
    value += row * value_b + program % H * value_h
    landmarks = tl.arange(0, BLOCK_M)
    q = load_tile(query_landmarks + program * M * D, landmarks, D, landmarks < M, D, BLOCK_D)
    count = landmark_count(exists, row, M, MASKED, BLOCK_M)
    start, stop = stretch(positions, sizes, count, row, N, M, longest, MASKED, BLOCK_N)
    segment, segment_stop, _ = find_segments(positions, sizes, exists, row, landmarks, N, M, longest, MASKED)
    is_exact = False
    if MASKED:
        is_exact = tl.load(exact + row) != 0
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    context = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)
        k = load_tile(key, tokens, key_n, valid, D, BLOCK_D)
        v = load_tile(value, tokens, value_n, valid, D, BLOCK_D)
        sums += dot(_members(segment, segment_stop, tokens, valid, k.dtype), k)
        scores = _scores(q, k, tokens, valid, segment, is_exact, scale, MASKED)
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
    store_tile(partial_sums + place * M * D, landmarks, D, landmarks < M, sums, D, BLOCK_D)
    tl.store(partial_lse + place * M + landmarks, lse, mask=landmarks < M)


@triton.jit
def _merge(
    partial, partial_sums, partial_lse, context, key_landmarks, lse, parts, H, N, M, D,
    mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
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
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in range(parts):
        of_part = partial_lse + (program * parts + part) * M + landmarks
        share = tl.exp2(tl.load(of_part, mask=inside, other=-float("inf")) - largest)
        place = (program * parts + part) * M * D
        merged += share[:, None] * load_tile(partial + place, landmarks, D, inside, D, BLOCK_D)
        sums += load_tile(partial_sums + place, landmarks, D, inside, D, BLOCK_D)
        total += share
    merged = merged / tl.where(total > 0, total, 1.0)[:, None]
    _, _, size = find_segments(positions, sizes, exists, program // H, landmarks, N, M, longest, MASKED)
    means = sums / tl.maximum(size, 1).to(tl.float32)[:, None]
    store_tile(context + program * M * D, landmarks, D, inside, merged, D, BLOCK_D)
    store_tile(key_landmarks + program * M * D, landmarks, D, inside, means, D, BLOCK_D)
    tl.store(lse + program * M + landmarks, largest + tl.log2(tl.where(total > 0, total, 1.0)), mask=inside)


@triton.jit
def _landmark_attention_backward(
    query_landmarks, key, key_b, key_h, key_n, value, value_b, value_h, value_n, context, lse,
    context_grad, key_landmarks_grad, partial_query_grad, key_grad, value_grad, grad_b, grad_h, grad_n,
    scale, H, N, M, D, mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
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
    # Rounded first: weights times (g v - mean_grad) then sum to zero over the tokens, whatever the keys have in common.
    g = g.to(q.dtype)
    mean_grad = tl.sum(g.to(tl.float32) * seen, axis=1)
    log_total = tl.load(lse + program * M + landmarks, mask=inside, other=0.0)
    count = landmark_count(exists, row, M, MASKED, BLOCK_M)
    start, stop = stretch(positions, sizes, count, row, N, M, longest, MASKED, BLOCK_N)
    segment, segment_stop, size = find_segments(positions, sizes, exists, row, landmarks, N, M, longest, MASKED)
    is_exact = False
    if MASKED:
        is_exact = tl.load(exact + row) != 0
    shares = load_tile(key_landmarks_grad + program * M * D, landmarks, D, inside, D, BLOCK_D)
    shares = (shares / tl.maximum(size, 1).to(tl.float32)[:, None]).to(q.dtype)
    q_grad = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)
        k = load_tile(key, tokens, key_n, valid, D, BLOCK_D)
        v = load_tile(value, tokens, value_n, valid, D, BLOCK_D)
        if ADD:
            before = load_tile(value_grad, tokens, grad_n, tokens < stop, D, BLOCK_D)
        weights = tl.exp2(_scores(q, k, tokens, valid, segment, is_exact, scale, MASKED) - log_total[:, None])
        scores_grad = weights * (dot(g, tl.trans(v)) - mean_grad[:, None]) * scale
        if MASKED:
            scores_grad = tl.where(is_exact, 0.0, scores_grad)
        scores_grad = scores_grad.to(q.dtype)
        q_grad += dot(scores_grad, k)
        # Of invalid tokens in between: zeros, as their weights are.
        k_grad = dot(tl.trans(scores_grad), q)
        k_grad += dot(tl.trans(_members(segment, segment_stop, tokens, valid, q.dtype)), shares)
        store_tile(key_grad, tokens, grad_n, tokens < stop, k_grad, D, BLOCK_D)
        v_grad = dot(tl.trans(weights.to(q.dtype)), g)
        if ADD:
            v_grad += before.to(tl.float32)
        store_tile(value_grad, tokens, grad_n, tokens < stop, v_grad, D, BLOCK_D)
    place = program * tl.num_programs(0) + tl.program_id(0)
    store_tile(partial_query_grad + place * M * D, landmarks, D, inside, q_grad, D, BLOCK_D)


def run_forward(
    query_landmarks: Tensor, key: Tensor, value: Tensor, rows: Rows | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(q~ kᵀ / √D) v over the valid keys, and no M×N matrix is stored; and the segment means of the keys.

    Args:
        query_landmarks: (B, H, M, D), contiguous. key, value: (B, H, N, D), of the same dtype, with unit stride.
        rows: the ragged batch; None where every token is valid.

    Returns: the context (B, H, M, D) float32; the base-two logarithms (B, H, M) float32 of the sums of the weights;
    the keys' landmarks (B, H, M, D), in the dtype of `key`, zero where they do not exist. Where every token of a row
    is its own landmark, its context is the value of that token. A row without a valid token gets zeros.
    """
    batch, heads, length, dim = key.shape
    count = query_landmarks.shape[2]
    parts, sizes = plan_launch("landmark_attention", key, count)
    context = key.new_empty(batch, heads, count, dim, dtype=torch.float32)
    lse = context.new_empty(batch, heads, count)
    key_landmarks = torch.empty_like(query_landmarks)
    partial = context.new_empty(2, batch, heads, parts, count, dim)
    partial_lse = context.new_empty(batch, heads, parts, count)
    with on_device(key):
        _landmark_attention_forward[(parts, batch * heads)](
            query_landmarks, key, *strides(key), value, *strides(value), *partial, partial_lse,
            dim**-0.5, heads, length, count, dim, **row_arguments(rows), **sizes,
        )  # fmt: skip
        _merge[(batch * heads,)](
            *partial, partial_lse, context, key_landmarks, lse, parts, heads, length, count, dim,
            **row_arguments(rows), BLOCK_M=sizes["BLOCK_M"], BLOCK_D=sizes["BLOCK_D"], num_stages=1,
        )  # fmt: skip
    return context, lse, key_landmarks


def run_backward(
    query_landmarks: Tensor,
    key: Tensor,
    value: Tensor,
    context: Tensor,
    lse: Tensor,
    context_grad: Tensor,
    key_landmarks_grad: Tensor,
    value_grad: Tensor | None = None,
    rows: Rows | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the queries' landmarks (B, H, M, D) float32, and of keys and values (B, H, N, D).

    Args:
        query_landmarks, key, value: as in `run_forward`. context, lse: its results.
        context_grad, key_landmarks_grad: (B, H, M, D) float32, contiguous.
        value_grad: (B, H, N, D), of `new_states`: what values got from elsewhere. It is added to and returned.
    """
    batch, heads, length, dim = key.shape
    count = query_landmarks.shape[2]
    parts, sizes = plan_launch("landmark_attention_backward", key, count)
    partial = context.new_empty(batch, heads, parts, count, dim)
    add = value_grad is not None
    # No program comes to the padding around a row.
    key_grad = new_states(key, length, zeros=rows is not None)
    value_grad = new_states(value, length, zeros=rows is not None) if value_grad is None else value_grad
    with on_device(key):
        _landmark_attention_backward[(parts, batch * heads)](
            query_landmarks, key, *strides(key), value, *strides(value), context, lse,
            context_grad, key_landmarks_grad, partial, key_grad, value_grad, *strides(key_grad),
            dim**-0.5, heads, length, count, dim, **row_arguments(rows), ADD=add, **sizes,
        )  # fmt: skip
    return partial.sum(dim=2), key_grad, value_grad
