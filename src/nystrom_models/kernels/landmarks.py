# SPDX-License-Identifier: Apache-2.0
"""Landmarks of the queries, the means of their segments (eq. 16 of arXiv:2102.03902), and what they give back.

A program is one segment of a head. The keys' landmarks are summed where the keys are read anyway, in
`landmark_attention.py`. Legend as in `tiles.py`.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .tiles import (
    Rows,
    find_segments,
    load_tile,
    on_device,
    row_arguments,
    store_tile,
    strides,
    tile,
    valid_tokens,
)


@triton.jit
def _landmarks_forward(
    query, query_b, query_h, query_n, query_landmarks,
    H, N, M, D, mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    query += row * query_b + program % H * query_h
    first, stop, size = find_segments(positions, sizes, exists, row, segment, N, M, longest, MASKED)
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(first, stop, BLOCK_S):
        tokens = start + tl.arange(0, BLOCK_S)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)
        total += tl.sum(load_tile(query, tokens, query_n, valid, D, BLOCK_D).to(tl.float32), axis=0)
    channels = tl.arange(0, BLOCK_D)
    mean = total / tl.maximum(size, 1).to(tl.float32)
    place = query_landmarks + (program * M + segment) * D + channels
    tl.store(place, mean.to(query_landmarks.dtype.element_ty), mask=channels < D)


@triton.jit
def _landmarks_backward(
    query_landmarks_grad, query_grad, grad_b, grad_h, grad_n,
    H, N, M, D, mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    query_grad += row * grad_b + program % H * grad_h
    first, stop, size = find_segments(positions, sizes, exists, row, segment, N, M, longest, MASKED)
    channels = tl.arange(0, BLOCK_D)
    place = query_landmarks_grad + (program * M + segment) * D + channels
    share = tl.load(place, mask=channels < D, other=0.0) / tl.maximum(size, 1).to(tl.float32)
    for start in range(first, stop, BLOCK_S):
        tokens = start + tl.arange(0, BLOCK_S)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)
        grad = load_tile(query_grad, tokens, grad_n, valid, D, BLOCK_D).to(tl.float32)
        store_tile(query_grad, tokens, grad_n, valid, grad + share[None, :], D, BLOCK_D)


def _sizes(length: int, num_landmarks: int, dim: int, rows: Rows | None) -> dict[str, Any]:
    longest = -(-length // num_landmarks) if rows is None else rows.positions.shape[2]
    block = min(64, tile(longest))
    return {"BLOCK_S": block, "BLOCK_D": tile(dim), "num_warps": 4 if block > 16 else 1}


def run_forward(query: Tensor, num_landmarks: int, rows: Rows | None = None) -> Tensor:
    """Segment means of queries, summed in float32.

    Args:
        query: (B, H, N, D), with unit stride, N >= M. num_landmarks: M.
        rows: the ragged batch; None where every token is valid.

    Returns: (B, H, M, D), in the dtype of `query`, contiguous, zero where a landmark does not exist.
    """
    batch, heads, length, dim = query.shape
    query_landmarks = query.new_empty(batch, heads, num_landmarks, dim)
    with on_device(query):
        _landmarks_forward[(num_landmarks, batch * heads)](
            query, *strides(query), query_landmarks,
            heads, length, num_landmarks, dim, **row_arguments(rows), **_sizes(length, num_landmarks, dim, rows),
        )  # fmt: skip
    return query_landmarks


def add_gradient(query_grad: Tensor, query_landmarks_grad: Tensor, rows: Rows | None = None) -> None:
    """Adds to query_grad, (B, H, N, D), what the landmarks' gradient, (B, H, M, D) float32 contiguous, gives them."""
    batch, heads, length, dim = query_grad.shape
    count = query_landmarks_grad.shape[2]
    with on_device(query_grad):
        _landmarks_backward[(count, batch * heads)](
            query_landmarks_grad, query_grad, *strides(query_grad),
            heads, length, count, dim, **row_arguments(rows), **_sizes(length, count, dim, rows),
        )  # fmt: skip
