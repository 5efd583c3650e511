# SPDX-License-Identifier: Apache-2.0
"""Two emulated devices: CPU tensors that report another device.

As on real devices, an operation on tensors of different devices is an error.
"""

from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "emulated"
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
# What Apple's MPS lacks, besides float64, in the lowest supported PyTorch.
LACKING = ("nonzero_static", "_linalg_svd", "_adaptive_avg_pool2d")
_like_mps = False


class EmulatedTensor(torch.Tensor):
    """A tensor on an emulated device; `memory` is the CPU tensor with its values."""

    @staticmethod
    def __new__(cls, memory: torch.Tensor, device: torch.device):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=device,
        )
        made.memory = memory
        return made

    def __repr__(self) -> str:
        return f"EmulatedTensor({self.memory!r}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


class _Dispatch(TorchDispatchMode):
    """For functions that create tensors on a device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return run(function, args, kwargs or {})


def run(function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Computes an operation on the memory of its tensors; the result is on their device, or on the requested one."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    # CPU scalars can be combined with any device.
    devices = {tensor.device for tensor in tensors if tensor.dim() > 0 or isinstance(tensor, EmulatedTensor)}
    if len(devices) > 1 and function not in COPIES:
        raise RuntimeError(f"{function}: expected all tensors on one device, but found {devices}")
    asked = kwargs.get("device")
    if asked is not None:
        device = torch.device(asked)
        device = torch.device(NAME, device.index or 0) if device.type == NAME else device
    else:
        device = tensors[0].device if function in COPIES else next(iter(devices), torch.device("cpu"))

    def unwrap(value: Any) -> Any:
        if isinstance(value, EmulatedTensor):
            return value.memory
        return torch.device("cpu") if isinstance(value, torch.device) and value.type == NAME else value

    result = function(*tree_map(unwrap, args), **tree_map(unwrap, kwargs))
    # A tensor that is changed in place stays the same object.
    known = {id(unwrap(tensor)): tensor for tensor in tensors if tensor.device == device}
    if _like_mps and device.type == NAME:
        if function.__name__.split(".")[0] in LACKING:
            raise NotImplementedError(f"{function} is not implemented for this device")
        if any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(result)):
            raise TypeError(f"{function}: this device has no float64")

    def wrap(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in known:
            return known[id(value)]
        return EmulatedTensor(value, device) if device.type == NAME else value

    return tree_map(wrap, result)


def register() -> None:
    """Registers the devices with PyTorch in this process: once, and before its first backward pass."""
    _setup_privateuseone_for_python_backend(NAME)


@contextmanager
def emulated_devices(like_mps: bool = False):
    """A context in which tensors can be created on, and moved to, the two devices that it yields.

    like_mps: whether these lack what Apple's MPS lacks.
    """
    global _like_mps
    before, _like_mps = _like_mps, like_mps
    try:
        with _Dispatch():
            yield torch.device(NAME, 0), torch.device(NAME, 1)
    finally:
        _like_mps = before
