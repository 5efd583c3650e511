# SPDX-License-Identifier: Apache-2.0
"""Products of small float32 matrices in full precision, whatever PyTorch's settings for TF32 are."""

from typing import Any

import torch
from torch import Tensor

from .product_rule import product_tangent
from .tracing import supports_autograd_functions

# TF32 keeps 10 bits of a float32's 23.
_KEPT_BITS = -(1 << 13)


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, in float32 also where a GPU may multiply in TF32 (`torch.set_float32_matmul_precision("high")`).

    TF32 would leave an error of 5e-4 in a pseudo-inverse, instead of 3e-7.
    """
    if left.is_cuda and left.dtype == torch.float32:
        if not supports_autograd_functions():
            return split_product(left, right)
        function = _SplitProduct if torch.compiler.is_compiling() else _WithTangents
        return function.apply(left, right)
    return left @ right


def split_product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right as three products of factors that TF32 represents exactly; the product of the two small parts is
    dropped."""
    left_large, right_large = ((tensor.view(torch.int32) & _KEPT_BITS).view(torch.float32) for tensor in (left, right))
    small_parts = left_large @ (right - right_large) + (left - left_large) @ right_large
    return left_large @ right_large + small_parts


class _SplitProduct(torch.autograd.Function):
    """`split_product`, with gradients that are split products, too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(left: Tensor, right: Tensor) -> Tensor:
        return split_product(left, right)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        left, right = ctx.saved_tensors
        left_gradient = multiply(gradient, right.mT) if ctx.needs_input_grad[0] else None
        right_gradient = multiply(left.mT, gradient) if ctx.needs_input_grad[1] else None
        return left_gradient, right_gradient


class _WithTangents(_SplitProduct):
    """The same, also differentiable forwards (`torch.func.jvp`), which torch.compile refuses."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, left_tangent: Tensor | None, right_tangent: Tensor | None) -> Tensor:
        left, right = ctx.saved_tensors
        return product_tangent(multiply, left, right, left_tangent, right_tangent)
