# SPDX-License-Identifier: Apache-2.0
"""How the kernels that go through the tokens are launched.

The numbers come from what compilers report, registers and shared memory for capability 8.0 and 9.0, not yet from a
clock; `python -m benchmarks kernels --sweep` measures others on a GPU.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .tiles import tile


class Launch(NamedTuple):
    """block: tokens that a program takes at a time, a power of two from 16 on. warps: of a program. stages: blocks in
    flight, of which all but one are being loaded. programs: how many a multiprocessor is given, as far as there are
    blocks."""

    block: int
    warps: int
    stages: int
    programs: int = 4


# By kernel: in half precision; the same where landmarks times head size is more than 64 · 64; in float32.
LAUNCHES = {
    "landmark_attention": (Launch(32, 8, 4), Launch(32, 8, 2), Launch(32, 8, 1)),
    "landmark_attention_backward": (Launch(32, 4, 3), Launch(16, 8, 2), Launch(16, 8, 1)),
    "token_attention": (Launch(64, 4, 2), Launch(64, 8, 1), Launch(16, 8, 1)),
    "token_attention_backward": (Launch(64, 4, 2), Launch(32, 8, 1), Launch(32, 8, 1)),
    "convolution_backward": (Launch(64, 4, 2), Launch(64, 8, 1), Launch(64, 8, 1)),
}

# Programs that a device can run at once, where there is none to ask.
_PROGRAMS_INTERPRETED = 16


def launch_place(dtype: torch.dtype, num_landmarks: int, dim: int) -> int:
    """Which of a kernel's `LAUNCHES` is for tensors of this dtype and sizes."""
    return 2 if dtype == torch.float32 else int(tile(num_landmarks) * tile(dim) > 64 * 64)


def plan_launch(kernel: str, states: Tensor, num_landmarks: int, taps: int = 0) -> tuple[int, dict[str, Any]]:
    """Into how many parts the tokens of states (B, H, N, D) are split, so that they fill the device; and the sizes.

    taps: of a convolution, whose window of a block two blocks hold.
    """
    batch, heads, length, dim = states.shape
    launch = LAUNCHES[kernel][launch_place(states.dtype, num_landmarks, dim)]
    block = max(launch.block, tile(taps - 1))
    if states.is_cuda:
        wanted = launch.programs * torch.cuda.get_device_properties(states.device).multi_processor_count
    else:
        wanted = _PROGRAMS_INTERPRETED
    parts = max(1, min(triton.cdiv(length, block), triton.cdiv(wanted, batch * heads)))
    sizes = {"BLOCK_M": tile(num_landmarks), "BLOCK_N": block, "BLOCK_D": tile(dim)}
    return parts, sizes | {"num_warps": launch.warps, "num_stages": launch.stages}
