# SPDX-License-Identifier: Apache-2.0
"""Landmarks of the queries, the means of their segments (eq. 16 of arXiv:2102.03902), and their gradient.

A program computes one segment of a row for some channels of all heads. The keys' landmarks are summed in
`landmark_attention.py`, which reads the keys anyway. Legend as in `rows.py`; P parts, C = H·D channels.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ..common import kernel, on_device
from .rows import Rows, find_segments, row_arguments, valid_tokens

# Numbers of tokens and channels that a program reads at once, for any length: a longer segment is read in blocks. With
# one warp, no sum over tokens goes through shared memory: on an H100 the forward kernel then takes half of the time.
_BLOCKS = {"BLOCK_S": 8, "BLOCK_C": 128, "num_warps": 1}


@kernel
def _landmarks_fwd_kernel(
    q, q_landmarks, mask, positions, sizes, exists, N, H, longest,
    MASKED: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    channels = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channels < H * D
    q += row * N * H * D
    first, stop, size = find_segments(positions, sizes, exists, row, segment, N, longest, M, MASKED)
    total = tl.zeros([BLOCK_C], tl.float32)
    for start in range(first, stop, BLOCK_S):
        tokens = start + tl.arange(0, BLOCK_S)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)[:, None] & inside[None, :]
        states = tl.load(q + tokens[:, None] * (H * D) + channels[None, :], mask=valid, other=0.0)
        total += tl.sum(states.to(tl.float32), axis=0)
    place = ((row * H + channels // D) * M + segment) * D + channels % D
    mean = total / tl.maximum(size, 1).to(tl.float32)
    tl.store(q_landmarks + place, mean.to(q_landmarks.dtype.element_ty), mask=inside)


@kernel
def _landmarks_bwd_kernel(
    dq, dq_landmarks, partial_dq_landmarks, mask, positions, sizes, exists, N, H, longest, parts,
    MASKED: tl.constexpr, M: tl.constexpr, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    channels = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = channels < H * D
    dq += row * N * H * D
    first, stop, size = find_segments(positions, sizes, exists, row, segment, N, longest, M, MASKED)
    head = row * H + channels // D
    place = segment * D + channels % D
    share = tl.load(dq_landmarks + head * M * D + place, mask=inside, other=0.0)
    for part in range(parts):
        share += tl.load(partial_dq_landmarks + (head * parts + part) * M * D + place, mask=inside, other=0.0)
    share = share / tl.maximum(size, 1).to(tl.float32)
    for start in range(first, stop, BLOCK_S):
        tokens = start + tl.arange(0, BLOCK_S)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)[:, None] & inside[None, :]
        places = dq + tokens[:, None] * (H * D) + channels[None, :]
        grad = tl.load(places, mask=valid, other=0.0).to(tl.float32) + share[None, :]
        tl.store(places, grad.to(dq.dtype.element_ty), mask=valid)


def _grid(batch: int, heads: int, count: int, dim: int) -> tuple[int, int, int]:
    return count, batch, triton.cdiv(heads * dim, _BLOCKS["BLOCK_C"])


def landmarks_forward(q: Tensor, num_landmarks: int, rows: Rows | None = None) -> Tensor:
    """Segment means of queries, summed in float32.

    Args:
        q: (B, N, H, D), contiguous, N >= M. num_landmarks: M. rows: the ragged batch; None: every token is valid.

    Returns: (B, H, M, D), in the dtype of `q`, contiguous, zero where a landmark does not exist.
    """
    batch, length, heads, dim = q.shape
    q_landmarks = q.new_empty(batch, heads, num_landmarks, dim)
    with on_device(q):
        _landmarks_fwd_kernel[_grid(batch, heads, num_landmarks, dim)](
            q, q_landmarks, N=length, H=heads, M=num_landmarks, D=dim, **row_arguments(rows), **_BLOCKS
        )
    return q_landmarks


def landmarks_backward(dq: Tensor, dq_landmarks: Tensor, partial: Tensor, rows: Rows | None = None) -> None:
    """Adds the gradient of the landmarks to the gradient of the queries, dq (B, N, H, D), in place.

    Args:
        dq_landmarks, partial: (B, H, M, D) and (B, H, P, M, D), float32, contiguous. The gradient of the landmarks is
            the sum of dq_landmarks and of the P parts.
    """
    batch, length, heads, dim = dq.shape
    parts, count = partial.shape[2:4]
    with on_device(dq):
        arguments: dict[str, Any] = {"N": length, "H": heads, "parts": parts, "M": count, "D": dim}
        _landmarks_bwd_kernel[_grid(batch, heads, count, dim)](
            dq, dq_landmarks, partial, **arguments, **row_arguments(rows), **_BLOCKS
        )
