# SPDX-License-Identifier: Apache-2.0
"""Causal linear attention by the kernels, where they apply. Triton is imported by the first call that needs it.

Legend: B batch, H heads, N tokens, F features, D head size.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ...models.attention_linear import causal_linear_attention_reference
from .. import device
from ..first_try import difference, find_fault

logger = logging.get_logger(__name__)

MAX_FEATURES = 128
MAX_HEAD_SIZE = 128
# The largest product of features and channels, each rounded up to a power of two, that fits into 99 KiB of shared
# memory in half precision; in float32 it is half as much.
MAX_FEATURES_TIMES_HEAD_SIZE = 8192


@dataclasses.dataclass(frozen=True)
class CausalInputs:
    """The arguments of `attention_linear.causal_linear_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    state: Tensor | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.query, self.key, self.value]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the kernels compute."""
        return device.dtype_of(self.value)

    def why_not(self) -> str | None:
        """Why the kernels cannot compute this, and what to change; None if they can."""
        here = self.query.device
        given = [tensor for tensor in (*self.tensors, self.mask, self.state) if tensor is not None]
        if any(tensor.device != here for tensor in given):
            return f"they need all tensors, the mask and the state on one device, and some are not on {here}"
        return (
            device.why_not_on(here)
            or device.why_not_in_this_graph(self.tensors)
            or device.why_not_of_tensors(self.tensors, self.mask)
            or self._why_not_of_this_shape()
        )

    def _why_not_of_this_shape(self) -> str | None:
        if self.query.shape[2] <= 1:
            return "one token is a step of the recurrence, which PyTorch's operations compute"
        features, dim = self.query.shape[-1], self.value.shape[-1]
        advice = "raise num_attention_heads with the same hidden_size"
        for name, size, most in (("features", features, MAX_FEATURES), ("channels", dim, MAX_HEAD_SIZE)):
            if size > most:
                return f"{size} {name} of a head do not fit, the most is {most}: {advice}"
        fitting = MAX_FEATURES_TIMES_HEAD_SIZE // (2 if self.dtype == torch.float32 else 1)
        if device.power_of_two(features) * device.power_of_two(dim) > fitting:
            return f"{features} features and {dim} channels of a head do not fit in {self.dtype}: {advice}"
        if self.state is not None and self.state.dtype != torch.float32:
            return f"they take a state in float32, not {self.state.dtype}"
        return None


def why_not(*arguments: Any, **options: Any) -> str | None:
    """Why the kernels cannot compute this attention, and what to change; None if they can.

    Arguments: those of `CausalInputs`.
    """
    return CausalInputs(*arguments, **options).why_not()


def causal_linear_attention_if_possible(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor] | None:
    """`attention_linear.causal_linear_attention` by the kernels, differentiable once. None if they do not apply or if
    they differ from PyTorch's operations at their first try.

    On a GPU the reason is logged once, except for single tokens. In graphs of torch.compile it is one operator.
    """
    inputs = CausalInputs(*arguments, **options)
    if inputs.query.device.type not in device.DEVICE_TYPES or inputs.query.shape[2] <= 1:
        return None
    reason = inputs.why_not() or _fault(inputs)
    if reason is None:
        return compute(inputs)
    if not torch.compiler.is_compiling():
        logger.warning_once(
            f'Linear attention without its Triton kernels: {reason}. attn_implementation="sdpa" silences this.'
        )
    return None


def compute(inputs: CausalInputs) -> tuple[Tensor, Tensor]:
    """The attention and the last state of inputs that the kernels accept."""
    from .attention import causal_linear_attention

    query, key, value = (tensor.to(inputs.dtype) for tensor in inputs.tensors)
    return causal_linear_attention(query, key, value, inputs.mask, inputs.state)


def _fault(inputs: CausalInputs) -> str | None:
    given = (*inputs.tensors, inputs.state)
    backward = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in given)
    sizes = inputs.query.shape[-1], inputs.value.shape[-1]
    return find_fault(_try, inputs.query.device, inputs.dtype, *sizes, inputs.mask is not None, backward)


def _try(where: torch.device, dtype: torch.dtype, features: int, dim: int, masked: bool, backward: bool) -> str | None:
    """Compares the kernels that the model then runs with PyTorch's operations, on a small attention of two parts."""
    from .causal import PART_TOKENS

    length = PART_TOKENS + 3
    generator = torch.Generator("cpu").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu")

    query, key = (draw(2, 1, length, features).exp().to(where, dtype) for _ in range(2))
    value, gradient = (draw(2, 1, length, dim).to(where, dtype) for _ in range(2))
    mask = None
    if masked:
        mask = torch.ones(2, length, dtype=torch.bool, device=where)
        mask[0, 7:30] = False
    results = []
    with torch.set_grad_enabled(backward):
        for by_kernels in (True, False):
            q, k, v = (tensor.detach().requires_grad_(backward) for tensor in (query, key, value))
            if by_kernels:
                found = list(compute(CausalInputs(q, k, v, mask)))
            else:
                found = list(causal_linear_attention_reference(q, k, v, mask))
            if backward:
                found += torch.autograd.grad(found[0], (q, k, v), gradient)
            results.append(found)
    ours, theirs = results
    return difference(where, ours, theirs, dtype)
