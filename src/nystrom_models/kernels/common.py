# SPDX-License-Identifier: Apache-2.0
"""Shared by the kernels of all families: compilation and launches, products, loads and stores.

Legend: B batch, H heads, N tokens, D head size. BLOCK_* are the sizes of tiles: powers of two, at least 16. The part
of a tile outside its tensor is loaded as zeros.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .device import compute_capability

# When a function is defined, TRITON_INTERPRET decides whether it runs in the interpreter or on a device.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# 2**x is one instruction, e**x is not.
LOG2_E = tl.constexpr(1.4426950408889634)

# A kernel is compiled once for a model. Arguments that vary between batches are not specialised: by default, a value
# of 1 or a multiple of 16 would be compiled as another variant, in the middle of an epoch.
kernel: Callable[[Callable], Any] = triton.jit(
    do_not_specialize=["N", "H", "longest", "parts", "programs", "iterations", "threshold"]
)


def refuse_second_derivatives(implementation: str) -> None:
    """Raises RuntimeError in a backward pass that is itself recorded; `implementation` can be derived twice."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(
            "The Triton kernels are differentiable once. For second derivatives (create_graph=True), load the model "
            f'with attn_implementation="{implementation}".'
        )


class Launch(NamedTuple):
    """How a kernel that goes through the tokens is launched.

    block: tokens that a program processes at a time, a power of two, at least 16. warps: warps of a program. stages:
    blocks in the software pipeline, all but one of them being loaded. resident: programs that a multiprocessor runs
    at once.
    """

    block: int
    warps: int
    stages: int
    resident: int


# Work of a program besides its blocks, in units of blocks: it reads landmarks and taps and writes its part's sums.
STARTUP = 4
MAX_PARTS = 64
# Number of multiprocessors if there is no device.
_INTERPRETED_MULTIPROCESSORS = 8


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def capability_compiled_for(device: torch.device) -> int:
    """Ten times the compute capability of a device, or of the target if Triton compiles without a device; 0 if Triton
    interprets the kernels.
    """
    if device.type == "cuda" or INTERPRETED:
        return compute_capability(device)
    return triton.runtime.driver.active.get_current_target().arch


def programs_at_once(device: torch.device, resident: int) -> int:
    """How many programs a device runs at once if each multiprocessor runs `resident` of them."""
    return resident * _multiprocessors(device)


@functools.lru_cache(4096)
def count_parts(blocks: int, programs: int, at_once: int) -> int:
    """The number of parts into which each of the `programs` splits its `blocks`, if `at_once` programs run at once.

    Fewer parts leave multiprocessors idle in the last round; more parts add work besides the blocks.
    """

    def duration(parts: int) -> int:
        return triton.cdiv(programs * parts, at_once) * (triton.cdiv(blocks, parts) + STARTUP)

    return min(range(1, min(blocks, MAX_PARTS) + 1), key=duration)


def tile(size: int) -> int:
    """The size of the tile that holds `size` elements: tl.dot takes powers of two, at least 16."""
    return max(16, triton.next_power_of_2(size))


def by_token(states: Tensor) -> Tensor:
    """States (B, H, N, D) as (B, N, H, D), contiguous: a view if they come from linear layers, otherwise a copy."""
    return states.transpose(1, 2).contiguous()


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which may differ from the device of the tensors."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


# Triton 3.6, which torch 2.11 brings, takes no plain string as the default of an argument.
TF32X3 = tl.constexpr("tf32x3")


@triton.jit
def dot(a, b, acc=None, FLOAT32: tl.constexpr = TF32X3):
    """a b + acc, summed in float32.

    FLOAT32: how float32 is multiplied: "tf32x3", by tensor cores in three TF32 products, as exact as float32 except
    for the last bit or two; "bf16x3", in three bfloat16 products, with errors of about 2**-16; "ieee", as float32,
    without tensor cores and with half the registers and shared memory.
    """
    if INTERPRETED:
        # The interpreter stores bfloat16 as integers and would multiply the integers. It knows no "bf16x3".
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision=FLOAT32)


@triton.jit
def load_tile(states, rows, stride, inside, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of D elements, `stride` apart, as (len(rows), BLOCK_D); rows that are not `inside` are not read: zeros."""
    channels = tl.arange(0, BLOCK_D)
    inside = inside[:, None]
    if BLOCK_D != D:
        inside = inside & (channels < D)[None, :]
    return tl.load(states + rows[:, None] * stride + channels[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(states, rows, stride, inside, content, D: tl.constexpr, BLOCK_D: tl.constexpr):
    channels = tl.arange(0, BLOCK_D)
    inside = inside[:, None]
    if BLOCK_D != D:
        inside = inside & (channels < D)[None, :]
    tl.store(states + rows[:, None] * stride + channels[None, :], content.to(states.dtype.element_ty), mask=inside)
