# SPDX-License-Identifier: Apache-2.0
"""On which devices and tensors the kernels of all families run. Nothing here imports Triton."""

import functools
import importlib.util

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing

from ..models.tracing import has_tangent, is_compiling

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Largest size of a grid along its second dimension.
_MAX_PROGRAMS = 65535

# Device types on which kernels are tried; tests add "cpu", where Triton interprets them.
DEVICE_TYPES = {"cuda"}


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


# A constant in graphs: torch.compile calls it while it traces.
@torch.compiler.assume_constant_result
def compute_capability(device: torch.device) -> int:
    """Ten times the compute capability of a CUDA device: 80 for an A100, 90 for an H100; 0 for other devices."""
    if device.type != "cuda":
        return 0
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


@torch.compiler.assume_constant_result
def why_not_on(device: torch.device) -> str | None:
    """Why kernels cannot run on a device, for any model, and what to change; None if they can."""
    if device.type not in DEVICE_TYPES:
        return f"they need tensors on a CUDA device, and these are on {device.type}"
    if not _has_triton():
        return "the package triton is not installed: pip install triton"
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return "they are written for NVIDIA GPUs and were never tried on AMD GPUs"
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    if compute_capability(device) < 80:
        return "they need a GPU of compute capability 8.0 (A100) or newer"
    return None


def why_not_in_this_graph(tensors: list[Tensor]) -> str | None:
    """Why the graph that is being recorded cannot hold kernels, or which tensors are not plain tensors."""
    if is_compiling():
        return None  # torch.compile accepts the operator
    if torch.compiler.is_compiling():
        return "a graph is being exported, for other programs"  # which may not know the operator
    captured = tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
    if (is_tracing(tensors[0]) and not captured) or torch._C._are_functorch_transforms_active():
        return "a graph is being recorded (torch.jit, torch.fx) or transformed, which needs PyTorch's operations"
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return f"they need plain tensors, not {type(tensor).__name__}"
        if has_tangent(tensor):
            return "forward derivatives (torch.autograd.forward_ad) need PyTorch's operations"
    return None


def why_not_of_tensors(tensors: list[Tensor], mask: Tensor | None) -> str | None:
    """What is wrong with dtypes and sizes, for kernels of any family. The first tensors are (B, H, N, D)."""
    dtypes = {tensor.dtype for tensor in tensors}
    if not dtypes <= set(DTYPES) or (len(dtypes) > 1 and not torch.is_autocast_enabled(tensors[0].device.type)):
        return f"they take one dtype, float16, bfloat16 or float32, and not {', '.join(sorted(map(str, dtypes)))}"
    if mask is not None and mask.dtype != torch.bool:
        return f"they take a mask of torch.bool, not {mask.dtype}: mask.bool()"
    batch, heads, length = tensors[0].shape[:3]
    if mask is not None and mask.shape != (batch, length):
        return f"they take a mask of shape {(batch, length)}, not {tuple(mask.shape)}: mask.expand({batch}, {length})"
    dim = max(tensor.shape[3] for tensor in tensors)
    if batch * heads > _MAX_PROGRAMS:
        return f"batch size times heads is {batch * heads}, above {_MAX_PROGRAMS}: take a smaller batch"
    if length * heads * dim >= 2**31:
        return "an example has 2**31 elements or more"
    return None


def dtype_of(tensor: Tensor) -> torch.dtype:
    """The dtype in which kernels compute: that of autocast where it is on."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def power_of_two(size: int) -> int:
    """The smallest power of two that is not less than a size of 1 or more, as those of tiles are."""
    return 1 << (size - 1).bit_length()
