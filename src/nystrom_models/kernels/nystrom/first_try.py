# SPDX-License-Identifier: Apache-2.0
"""The first try: a small attention, computed by the kernels and by PyTorch's operations and compared."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...models.attention_nystrom import nystrom_attention_reference
from ...models.depthwise_convolution import depthwise_convolution
from ..first_try import difference, find_fault
from .inputs import AttentionInputs

# A probability so small that nothing is dropped: the kernels with dropout can then be compared with PyTorch.
RARELY = 1e-12


class Variant(NamedTuple):
    """What the compiled kernels depend on. Batch sizes and lengths are arguments of the same machine code."""

    device: torch.device
    dtype: torch.dtype
    num_landmarks: int
    dim: int
    pinv_iterations: int
    taps: int
    masked: bool
    dropout: bool
    backward: bool
    of_taps: bool

    @classmethod
    def of(cls, inputs: AttentionInputs) -> "Variant":
        """The facts about inputs that the kernels accept."""
        assert inputs.num_landmarks is not None
        backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs.tensors)
        return cls(
            inputs.query.device,
            inputs.dtype,
            inputs.num_landmarks,
            inputs.dim,
            inputs.pinv_iterations,
            inputs.taps,
            inputs.mask is not None,
            # With torch.compile(dynamic=True), PyTorch 2.11 makes a symbol of the comparison, but not of the branch.
            True if inputs.dropout_p > 0 else False,  # noqa: SIM210
            backward,
            # A frozen convolution, as with LoRA, gets no gradient, which is another kernel.
            backward and inputs.conv_weight is not None and inputs.conv_weight.requires_grad,
        )


def fault(inputs: AttentionInputs, attend: Callable[[AttentionInputs], Tensor]) -> str | None:
    """What is wrong with the kernels that `attend` would run for these inputs; None if they agree with PyTorch.

    The first time, both compute a small attention, with its gradients if they are needed. This compiles the kernels
    that the model then runs.
    """
    device, *facts = Variant.of(inputs)
    return find_fault(_try, device, attend, *facts)


def _try(device: torch.device, attend: Callable[[AttentionInputs], Tensor], *facts: Any) -> str | None:
    variant = Variant(device, *facts)
    dtype = variant.dtype
    length = 2 * variant.num_landmarks + 3
    with torch.set_grad_enabled(variant.backward):
        # On the CPU, for any default device, so that the numbers are the same everywhere.
        generator = torch.Generator("cpu").manual_seed(0)
        draw = functools.partial(torch.randn, generator=generator, device="cpu")
        *states, gradient = (draw(2, 1, length, variant.dim).to(device, dtype) for _ in range(4))
        taps = (draw(1, 1, variant.taps, 1) / max(variant.taps, 1) ** 0.5).to(device, dtype)
        mask = torch.ones(2, length, dtype=torch.bool, device=device)
        if variant.masked:
            mask[0, : variant.num_landmarks // 2] = False
        kept = mask[:, None, :, None]
        results = []
        for function in (attend, _reference):
            wanted = (*[variant.backward] * 3, variant.of_taps)
            leaves = [
                tensor.detach().requires_grad_(needed) for tensor, needed in zip((*states, taps), wanted, strict=True)
            ]
            inputs = AttentionInputs(
                query=leaves[0],
                key=leaves[1],
                value=leaves[2],
                mask=mask if variant.masked else None,
                num_landmarks=variant.num_landmarks,
                pinv_iterations=variant.pinv_iterations,
                conv_weight=leaves[3] if variant.taps else None,
                dropout_p=RARELY if variant.dropout else 0.0,
            )
            out = function(inputs)
            found = [out * kept]
            if variant.backward:
                found += torch.autograd.grad(out, [leaf for leaf in leaves if leaf.requires_grad], gradient * kept)
            results.append(found)
    ours, theirs = results
    return difference(device, ours, theirs, dtype)


def _reference(inputs: AttentionInputs) -> Tensor:
    skip = None
    if inputs.conv_weight is not None:
        skip = depthwise_convolution(inputs.value, inputs.conv_weight, inputs.mask)
    return nystrom_attention_reference(
        inputs.query,
        inputs.key,
        inputs.value,
        inputs.mask,
        num_landmarks=inputs.num_landmarks,
        pinv_iterations=inputs.pinv_iterations,
        skip=skip,
    )
