# SPDX-License-Identifier: Apache-2.0
"""Landmarks of queries and keys, the means of their segments (eq. 16 of arXiv:2102.03902), in one launch.

A program is one segment of a head; it reads each of its tokens once, of both. Legend as in `tiles.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .tiles import Rows, load_tile, new_states, on_device, row_arguments, store_tile, strides, tile, unit_stride


@triton.jit
def _segment_size(sizes, exists, row, segment, N, M, MASKED: tl.constexpr):
    """The number of tokens of a segment, 0 if it does not exist."""
    if MASKED:
        size = tl.load(sizes + row * M + segment).to(tl.int32)
        return tl.where(tl.load(exists + row * M + segment) != 0, size, 0)
    else:
        size = N // M
        return size + (segment >= (size + 1) * M - N).to(tl.int32)


@triton.jit
def _segment_tokens(positions, row, segment, rank, inside, N, M, longest, MASKED: tl.constexpr):
    """Where the tokens of these ranks within a segment stand."""
    if MASKED:
        return tl.load(positions + (row * M + segment) * longest + rank, mask=inside, other=0)
    else:
        size = N // M
        return segment * size + tl.maximum(segment - ((size + 1) * M - N), 0) + rank


@triton.jit
def _landmarks_forward(
    query, query_b, query_h, query_n, key, key_b, key_h, key_n, query_landmarks, key_landmarks,
    H, N, M, D, mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    query += row * query_b + program % H * query_h
    key += row * key_b + program % H * key_h
    size = _segment_size(sizes, exists, row, segment, N, M, MASKED)
    query_sum = tl.zeros([BLOCK_D], tl.float32)
    key_sum = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, size, BLOCK_S):
        rank = start + tl.arange(0, BLOCK_S)
        inside = rank < size
        tokens = _segment_tokens(positions, row, segment, rank, inside, N, M, longest, MASKED)
        query_sum += tl.sum(load_tile(query, tokens, query_n, inside, D, BLOCK_D).to(tl.float32), axis=0)
        key_sum += tl.sum(load_tile(key, tokens, key_n, inside, D, BLOCK_D).to(tl.float32), axis=0)
    channels = tl.arange(0, BLOCK_D)
    place = (program * M + segment) * D + channels
    size = tl.maximum(size, 1).to(tl.float32)
    tl.store(query_landmarks + place, (query_sum / size).to(query_landmarks.dtype.element_ty), mask=channels < D)
    tl.store(key_landmarks + place, (key_sum / size).to(key_landmarks.dtype.element_ty), mask=channels < D)


@triton.jit
def _landmarks_backward(
    query_landmarks_grad, key_landmarks_grad, query_grad, key_grad, grad_b, grad_h, grad_n,
    H, N, M, D, mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    query_grad += row * grad_b + program % H * grad_h
    key_grad += row * grad_b + program % H * grad_h
    size = _segment_size(sizes, exists, row, segment, N, M, MASKED)
    channels = tl.arange(0, BLOCK_D)
    place = (program * M + segment) * D + channels
    share = 1.0 / tl.maximum(size, 1).to(tl.float32)
    of_query = tl.load(query_landmarks_grad + place, mask=channels < D, other=0.0).to(tl.float32) * share
    of_key = tl.load(key_landmarks_grad + place, mask=channels < D, other=0.0).to(tl.float32) * share
    for start in range(0, size, BLOCK_S):
        rank = start + tl.arange(0, BLOCK_S)
        inside = rank < size
        tokens = _segment_tokens(positions, row, segment, rank, inside, N, M, longest, MASKED)
        zeros = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
        store_tile(query_grad, tokens, grad_n, inside, zeros + of_query[None, :], D, BLOCK_D)
        store_tile(key_grad, tokens, grad_n, inside, zeros + of_key[None, :], D, BLOCK_D)


def _sizes(length: int, num_landmarks: int, dim: int, rows: Rows | None) -> dict[str, Any]:
    longest = -(-length // num_landmarks) if rows is None else rows.positions.shape[2]
    block = min(64, tile(longest))
    return {"BLOCK_S": block, "BLOCK_D": tile(dim), "num_warps": 4 if block > 16 else 1}


def run_forward(query: Tensor, key: Tensor, num_landmarks: int, rows: Rows | None) -> tuple[Tensor, Tensor]:
    """As `landmarks`; queries and keys with unit stride."""
    batch, heads, length, dim = query.shape
    query_landmarks = query.new_empty(batch, heads, num_landmarks, dim)
    key_landmarks = torch.empty_like(query_landmarks)
    with on_device(query):
        _landmarks_forward[(num_landmarks, batch * heads)](
            query, *strides(query), key, *strides(key), query_landmarks, key_landmarks,
            heads, length, num_landmarks, dim, **row_arguments(rows), **_sizes(length, num_landmarks, dim, rows),
        )  # fmt: skip
    return query_landmarks, key_landmarks


def run_backward(
    query_landmarks_grad: Tensor, key_landmarks_grad: Tensor, length: int, rows: Rows | None
) -> tuple[Tensor, Tensor]:
    """The gradients of queries and keys, (B, H, N, D)."""
    batch, heads, count, dim = query_landmarks_grad.shape
    # Padding belongs to no segment, and no program writes there.
    query_grad = new_states(query_landmarks_grad, length, zeros=rows is not None)
    key_grad = new_states(key_landmarks_grad, length, zeros=rows is not None)
    with on_device(query_grad):
        _landmarks_backward[(count, batch * heads)](
            query_landmarks_grad.contiguous(), key_landmarks_grad.contiguous(),
            query_grad, key_grad, *strides(query_grad),
            heads, length, count, dim, **row_arguments(rows), **_sizes(length, count, dim, rows),
        )  # fmt: skip
    return query_grad, key_grad


class _Landmarks(torch.autograd.Function):
    forward = staticmethod(run_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        query, _, _, ctx.rows = inputs
        ctx.length = query.shape[2]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query_landmarks_grad: Tensor, key_landmarks_grad: Tensor) -> tuple[Any, ...]:
        return *run_backward(query_landmarks_grad, key_landmarks_grad, ctx.length, ctx.rows), None, None


def landmarks(query: Tensor, key: Tensor, num_landmarks: int, rows: Rows | None = None) -> tuple[Tensor, Tensor]:
    """Segment means of queries and keys, summed in float32; differentiable once.

    Args:
        query, key: (B, H, N, D), float16, bfloat16 or float32, N >= M.
        num_landmarks: M.
        rows: the ragged batch; None where every token is valid.

    Returns: two of (B, H, M, D), in the dtype of `query`, contiguous, zero where a landmark does not exist.
    """
    return _Landmarks.apply(unit_stride(query), unit_stride(key), num_landmarks, rows)
