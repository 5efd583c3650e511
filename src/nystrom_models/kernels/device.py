# SPDX-License-Identifier: Apache-2.0
"""Which devices the kernels of all families run on. Nothing here imports Triton."""

import functools
import importlib.util

import torch

# The device types that kernels may be tried on; tests add "cpu", where Triton interprets.
DEVICE_TYPES = {"cuda"}


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def compute_capability(device: torch.device) -> int:
    """Ten times that of a CUDA device: 80 for an A100, 90 for an H100; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


# A constant to torch.compile, which asks while it records a graph.
@torch.compiler.assume_constant_result
def why_not_on(device: torch.device) -> str | None:
    """Why no kernel of this package runs on a device, whatever the model, with what to change; None if they run."""
    if device.type not in DEVICE_TYPES:
        return f"they need tensors on a CUDA device, and these are on {device.type}"
    if not _has_triton():
        return "the package triton is not installed: pip install triton"
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return "they were made for NVIDIA's GPUs and never tried on AMD's"
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    if compute_capability(device) < 80:
        return "they need a GPU of compute capability 8.0 (A100) or newer"
    return None
