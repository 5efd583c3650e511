# SPDX-License-Identifier: Apache-2.0
"""The rows of a ragged batch: segments, valid tokens and padding, and the part of a row that a program computes.

Legend: B batch, H heads, N tokens, M landmarks, S tokens of the longest segment, D head size, m = min(M, L) landmarks
of a row with L valid tokens. A program computes one (row, head) or a part of it; the grid's first axis is the parts.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...models.attention_nystrom import Segments
from ..common import store_tile


class Rows(NamedTuple):
    """A ragged batch in the form that the kernels read; bool tensors become uint8.

    mask: (B, N). positions: (B, M, S) int64, size: (B, M) int64, exists: (B, M), of `Segments`.
    """

    mask: Tensor
    positions: Tensor
    size: Tensor
    exists: Tensor

    @classmethod
    def of(cls, mask: Tensor, segments: Segments) -> "Rows":
        """mask: (B, N) bool, contiguous or not."""
        return cls(
            mask.contiguous().to(torch.uint8),  # Inductor of torch 2.11 cannot view bool as another type
            segments.positions.contiguous(),
            segments.size.contiguous(),
            segments.exists.contiguous().to(torch.uint8),
        )


def row_arguments(rows: Rows | None) -> dict[str, Any]:
    """The arguments of a kernel that describe a ragged batch; None if every token is valid."""
    if rows is None:
        return {"mask": None, "positions": None, "sizes": None, "exists": None, "longest": 0, "MASKED": False}
    return {
        "mask": rows.mask,
        "positions": rows.positions,
        "sizes": rows.size,
        "exists": rows.exists,
        "longest": rows.positions.shape[2],
        "MASKED": True,
    }


@triton.jit
def find_segments(positions, sizes, exists, row, landmarks, N, longest, M: tl.constexpr, MASKED: tl.constexpr):
    """The segments of one or several landmarks of a row: the first token, the one after the last, and the number of
    tokens.

    The valid tokens between the first and the last belong to the segment. All three are 0 if the segment does not
    exist.
    """
    if MASKED:
        place = row * M + landmarks
        there = tl.load(exists + place, mask=landmarks < M, other=0) != 0
        size = tl.load(sizes + place, mask=there, other=0).to(tl.int32)
        first = tl.load(positions + place * longest, mask=there, other=0).to(tl.int32)
        stop = tl.load(positions + place * longest + size - 1, mask=there, other=-1).to(tl.int32) + 1
        return first, stop, size
    else:
        short = N // M
        small = (short + 1) * M - N
        size = tl.where(landmarks < M, short + (landmarks >= small).to(tl.int32), 0)
        first = landmarks * short + tl.maximum(landmarks - small, 0)
        return first, first + size, size


@triton.jit
def describe_row(first, stop, size, N, M: tl.constexpr, MASKED: tl.constexpr):
    """From all segments of a row: m, whether L <= M, the first valid token, and the one after the last valid token."""
    if MASKED:
        end = tl.max(stop, axis=0)
        begin = tl.min(tl.where(size > 0, first, end), axis=0)
        return tl.sum((size > 0).to(tl.int32), axis=0), tl.max(size, axis=0) <= 1, begin, end
    else:
        return M, False, 0, N


@triton.jit
def part_of(begin, end, BLOCK_N: tl.constexpr):
    """The part of the tokens from `begin` to `end` that this program computes: a multiple of BLOCK_N tokens, except at
    the end.
    """
    size = tl.cdiv(end - begin, tl.num_programs(0) * BLOCK_N) * BLOCK_N
    start = begin + tl.program_id(0) * size
    return start, tl.minimum(start + size, end)


@triton.jit
def valid_tokens(mask, row, tokens, stop, N, MASKED: tl.constexpr):
    """Which of the positions `tokens` are at least 0, before `stop`, and valid."""
    inside = (tokens >= 0) & (tokens < stop)
    if MASKED:
        inside = tl.load(mask + row * N + tokens, mask=inside, other=0) != 0
    return inside


@triton.jit
def store_padding(
    states, stride, begin, end, N, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Writes zeros before the first valid token of a row and after the last; each program writes its part of them."""
    outside = N - (end - begin)
    size = tl.cdiv(outside, tl.num_programs(0))
    start = tl.program_id(0) * size
    stop = tl.minimum(start + size, outside)
    for block in range(start, stop, BLOCK_N):
        places = block + tl.arange(0, BLOCK_N)
        tokens = tl.where(places < begin, places, places + (end - begin))
        zeros = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        store_tile(states, tokens, stride, places < stop, zeros, D, BLOCK_D)
