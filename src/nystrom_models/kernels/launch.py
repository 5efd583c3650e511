# SPDX-License-Identifier: Apache-2.0
"""How the kernels that go through the tokens are launched.

The numbers come from what compilers report, registers and shared memory for capability 8.0 and 9.0, not yet from a
clock; `python -m benchmarks kernels --sweep` measures others on a GPU.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .tiles import tile


class Launch(NamedTuple):
    """How a kernel is launched.

    block: tokens that a program takes at a time, a power of two from 16 on. warps: of a program. stages: blocks in
    flight, of which all but one are being loaded. resident: programs that a multiprocessor of an H100 runs at once.
    """

    block: int
    warps: int
    stages: int
    resident: int


# By kernel: in half precision; the same where landmarks times head size is more than 64 · 64; in float32.
LAUNCHES = {
    "landmark_attention": (Launch(32, 8, 4, 2), Launch(32, 8, 2, 1), Launch(32, 8, 1, 2)),
    "landmark_attention_backward": (Launch(32, 4, 3, 2), Launch(16, 8, 2, 1), Launch(16, 8, 1, 1)),
    "token_attention": (Launch(64, 4, 2, 2), Launch(64, 8, 1, 1), Launch(16, 8, 1, 4)),
    "token_attention_backward": (Launch(64, 4, 2, 2), Launch(32, 8, 1, 1), Launch(32, 8, 1, 2)),
    "convolution_backward": (Launch(64, 4, 2, 3), Launch(64, 8, 1, 1), Launch(64, 8, 1, 1)),
}

# What a program does besides its blocks, counted in blocks: it reads landmarks and taps and writes its part's sums.
STARTUP = 4
MAX_PARTS = 64
# Programs that run at once where there is no device to ask.
_RESIDENT_INTERPRETED = 16


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.lru_cache(4096)
def count_parts(blocks: int, programs: int, resident: int) -> int:
    """Into how many parts the blocks of each of so many programs are best split, where `resident` run at once.

    Fewer parts leave multiprocessors without work in the last round, more have more to do besides.
    """

    def duration(parts: int) -> int:
        return triton.cdiv(programs * parts, resident) * (triton.cdiv(blocks, parts) + STARTUP)

    return min(range(1, min(blocks, MAX_PARTS) + 1), key=duration)


def launch_place(dtype: torch.dtype, num_landmarks: int, dim: int) -> int:
    """Which of a kernel's `LAUNCHES` is for tensors of this dtype and sizes."""
    return 2 if dtype == torch.float32 else int(tile(num_landmarks) * tile(dim) > 64 * 64)


def plan_launch(kernel: str, states: Tensor, num_landmarks: int, taps: int = 0) -> tuple[int, dict[str, Any]]:
    """Into how many parts the tokens of states (B, H, N, D) are split, and the kernel's sizes.

    taps: of a convolution, whose window of a block two blocks hold.
    """
    batch, heads, length, dim = states.shape
    launch = LAUNCHES[kernel][launch_place(states.dtype, num_landmarks, dim)]
    block = max(launch.block, tile(taps - 1))
    resident = launch.resident * _multiprocessors(states.device) if states.is_cuda else _RESIDENT_INTERPRETED
    parts = count_parts(triton.cdiv(length, block), batch * heads, resident)
    sizes = {"BLOCK_M": tile(num_landmarks), "BLOCK_N": block, "BLOCK_D": tile(dim)}
    return parts, sizes | {"num_warps": launch.warps, "num_stages": launch.stages}
