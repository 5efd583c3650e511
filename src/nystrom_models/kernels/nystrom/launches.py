# SPDX-License-Identifier: Apache-2.0
"""How the stages that go through the tokens are launched.

On an H100, launches of the published size were timed; `python -m benchmarks kernels --sweep` measures others on a GPU.
All other numbers come from the registers and the shared memory that compilers report for capability 8.0 to 12.0. They
are static tables and not `triton.autotune`, because the number of parts of a sum must not depend on a measurement:
results would not be reproducible.
"""

import torch
import triton

from ..common import Launch, capability_compiled_for, count_parts, programs_at_once, tile

# For each stage: in half precision; in half precision if landmarks times head size is more than 64 · 64 (for the
# convolution, if the head size is more than 64); in float32.
LAUNCHES = {
    "landmark_attention_fwd": (Launch(32, 4, 3, 2), Launch(32, 8, 2, 1), Launch(16, 8, 1, 1)),
    "landmark_attention_bwd": (Launch(32, 4, 3, 2), Launch(16, 8, 2, 1), Launch(16, 8, 1, 1)),
    "token_attention_fwd": (Launch(64, 4, 2, 2), Launch(64, 8, 1, 1), Launch(32, 4, 1, 2)),
    "token_attention_bwd": (Launch(64, 4, 2, 2), Launch(32, 8, 1, 1), Launch(16, 8, 1, 1)),
    "convolution_bwd": (Launch(64, 4, 2, 3), Launch(32, 8, 2, 1), Launch(64, 4, 1, 3)),
}

# By compute capability, other launches for the first entry: the fastest that were timed with 64 landmarks and heads of
# 64 in bfloat16.
TIMED = {
    90: {
        "landmark_attention_bwd": Launch(32, 4, 1, 2),
        "token_attention_fwd": Launch(64, 4, 3, 2),
        "token_attention_bwd": Launch(64, 4, 3, 2),
    }
}


def find_launch(stage: str, dtype: torch.dtype, num_landmarks: int, dim: int, device: torch.device) -> Launch:
    """The launch of a stage for tensors of this dtype and these sizes on a device."""
    if dtype == torch.float32:
        return LAUNCHES[stage][2]
    if dim > 64 if stage == "convolution_bwd" else tile(num_landmarks) * tile(dim) > 64 * 64:
        return LAUNCHES[stage][1]
    return TIMED.get(capability_compiled_for(device), {}).get(stage, LAUNCHES[stage][0])


def plan_launch(stage: str, states: torch.Tensor, num_landmarks: int, taps: int = 0) -> tuple[int, dict[str, int]]:
    """The number of parts into which the tokens of states (B, N, H, D) are split, and the sizes of the kernel.

    taps: those of a convolution, or 0. In half precision the window of a block spans at most three blocks.
    """
    batch, length, heads, dim = states.shape
    launch = find_launch(stage, states.dtype, num_landmarks, dim, states.device)
    block = max(launch.block, tile((taps - 1) // 2))
    at_once = programs_at_once(states.device, launch.resident)
    parts = count_parts(triton.cdiv(length, block), batch * heads, at_once)
    sizes = {"M": num_landmarks, "D": dim}
    sizes |= {"BLOCK_M": tile(num_landmarks), "BLOCK_N": block, "BLOCK_D": tile(dim)}
    return parts, sizes | {"num_warps": launch.warps, "num_stages": launch.stages}
