# SPDX-License-Identifier: Apache-2.0
"""What the kernels share: the rows of a ragged batch, matrix products, loads and stores.

Legend: B batch, H heads, N tokens, M landmarks, S tokens of the longest segment, D head size. BLOCK_* are the sizes of
tiles, powers of two and at least 16, beyond which loads give zeros. A program is one (row of the batch, head), or a
part of it.
"""

import contextlib
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..models.attention_nystrom import Segments

# Kernels are made for the interpreter or for a device when they are defined, by TRITON_INTERPRET.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# 2**x is an instruction, e**x is not.
LOG2_E = tl.constexpr(1.4426950408889634)


class Rows(NamedTuple):
    """A ragged batch as the kernels read it; bool tensors as uint8.

    mask: (B, N). positions: (B, M, S) int64, size: (B, M) int64, exists: (B, M), exact: (B,), of `Segments`.
    """

    mask: Tensor
    positions: Tensor
    size: Tensor
    exists: Tensor
    exact: Tensor

    @classmethod
    def of(cls, mask: Tensor, segments: Segments) -> "Rows":
        """mask: (B, N) bool, contiguous or not."""
        return cls(
            mask.contiguous().view(torch.uint8),
            segments.positions.contiguous(),
            segments.size.contiguous(),
            segments.exists.contiguous().view(torch.uint8),
            segments.exact.contiguous().view(torch.uint8),
        )


def row_arguments(rows: Rows | None) -> dict[str, Any]:
    """The arguments of a kernel by which it reads a ragged batch."""
    if rows is None:
        return dict.fromkeys(("mask", "positions", "sizes", "exists", "exact"), None) | {"longest": 0, "MASKED": False}
    return {
        "mask": rows.mask,
        "positions": rows.positions,
        "sizes": rows.size,
        "exists": rows.exists,
        "exact": rows.exact,
        "longest": rows.positions.shape[2],
        "MASKED": True,
    }


def tile(size: int) -> int:
    """The tile that holds `size` elements: tl.dot takes powers of two from 16 on."""
    return max(16, triton.next_power_of_2(size))


def unit_stride(states: Tensor) -> Tensor:
    """states (B, H, N, D), copied only where the D channels of a token do not lie side by side."""
    return states if states.stride(-1) == 1 else states.contiguous()


def strides(states: Tensor) -> tuple[int, int, int]:
    return states.stride(0), states.stride(1), states.stride(2)


def new_states(like: Tensor, length: int, zeros: bool = False) -> Tensor:
    """(B, H, N, D), laid out as (B, N, H, D), as linear layers take it. like: (B, H, ..., D)."""
    batch, heads, dim = like.shape[0], like.shape[1], like.shape[-1]
    make = torch.zeros if zeros else torch.empty
    return make(batch, length, heads, dim, dtype=like.dtype, device=like.device).transpose(1, 2)


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


@triton.jit
def dot(a, b, precision: tl.constexpr = "ieee"):
    """a b, summed in float32: half precision by tensor cores, float32 as such and not rounded to TF32, or as told."""
    if INTERPRETED:
        # The interpreter holds bfloat16 as integers, and would multiply those.
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=precision)


@triton.jit
def landmark_count(exists, row, M, MASKED: tl.constexpr, BLOCK_M: tl.constexpr):
    """m = min(M, L): the landmarks that exist are the first of a row."""
    if MASKED:
        landmarks = tl.arange(0, BLOCK_M)
        return tl.sum(tl.load(exists + row * M + landmarks, mask=landmarks < M, other=0).to(tl.int32), axis=0)
    else:
        return M


@triton.jit
def find_segments(positions, sizes, exists, row, landmarks, N, M, longest, MASKED: tl.constexpr):
    """The segments of one or many of a row's landmarks: the first token, the one after the last, and how many.

    The valid tokens between the first and the last are those of the segment. All are 0 where there is none.
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
def stretch(positions, sizes, count, row, N, M, longest, MASKED: tl.constexpr, BLOCK_N: tl.constexpr):
    """The tokens of this program: one part of those from the first valid token of the row to the last."""
    first = 0
    stop = N
    if MASKED:
        last = row * M + tl.maximum(count - 1, 0)
        first = tl.load(positions + row * M * longest).to(tl.int32)
        stop = tl.load(positions + last * longest + tl.load(sizes + last) - 1).to(tl.int32) + 1
        stop = tl.where(count > 0, stop, first)
    size = tl.cdiv(stop - first, tl.num_programs(0) * BLOCK_N) * BLOCK_N
    start = first + tl.program_id(0) * size
    return start, tl.minimum(start + size, stop)


@triton.jit
def valid_tokens(mask, row, tokens, stop, N, MASKED: tl.constexpr):
    """Which of the positions `tokens` are valid, from 0 and before `stop`."""
    inside = (tokens >= 0) & (tokens < stop)
    if MASKED:
        inside = tl.load(mask + row * N + tokens, mask=inside, other=0) != 0
    return inside


@triton.jit
def load_tile(states, rows, stride, valid, D, BLOCK_D: tl.constexpr):
    """(len(rows), BLOCK_D) of states (N, D), zero where not valid: what stands there is never read."""
    channels = tl.arange(0, BLOCK_D)
    inside = valid[:, None] & (channels[None, :] < D)
    return tl.load(states + rows[:, None] * stride + channels[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(states, rows, stride, inside, content, D, BLOCK_D: tl.constexpr):
    channels = tl.arange(0, BLOCK_D)
    inside = inside[:, None] & (channels[None, :] < D)
    tl.store(states + rows[:, None] * stride + channels[None, :], content.to(states.dtype.element_ty), mask=inside)
