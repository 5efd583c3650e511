# SPDX-License-Identifier: Apache-2.0
"""When Python may branch on the values of tensors."""

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual
from transformers.utils.import_utils import is_tracing

# It has wrapped tensors of its own, which `torch.func` does not know.
_OLDER_VMAP = torch._C._dispatch_key_parse("Batched")


def can_read_values(tensor: Tensor) -> bool:
    """Whether Python may read the values of this tensor: not while a graph is recorded, not for tensors without values
    (meta and fake tensors), and not under `torch.func.vmap`, where one tensor stands for several."""
    return not (is_tracing(tensor) or tensor.is_meta or is_batched(tensor))


def supports_autograd_functions() -> bool:
    """Whether functions with a gradient of their own (`torch.autograd.Function`) can be called: a TorchScript trace,
    which is for inference, cannot hold them."""
    return not torch.jit.is_tracing()


def is_compiling() -> bool:
    """Whether `torch.compile` records a graph, which may hold this package's operators. An exported graph may not:
    other programs must be able to run it."""
    # The flag behind `torch.compiler.is_exporting()`, which torch.compile of torch 2.11 takes for True.
    return torch.compiler.is_compiling() and not torch.compiler._is_exporting_flag


def has_tangent(tensor: Tensor) -> bool:
    """Whether a derivative is carried forward with a tensor (`torch.func.jvp`, `torch.autograd.forward_ad`)."""
    return unpack_dual(tensor).tangent is not None


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor stands for several, under `torch.func.vmap`, or under the older one of
    `torch.autograd.grad(is_grads_batched=True)` and `torch.autograd.functional.jacobian(vectorize=True)`."""
    functorch = torch._C._functorch
    if torch._C._dispatch_keys(tensor).has(_OLDER_VMAP):
        return True
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False
