# SPDX-License-Identifier: Apache-2.0
"""Derivatives forwards of functions of two tensors that are linear in each."""

from collections.abc import Callable

from torch import Tensor


def product_tangent(
    product: Callable[[Tensor, Tensor], Tensor],
    left: Tensor,
    right: Tensor,
    left_tangent: Tensor | None,
    right_tangent: Tensor | None,
) -> Tensor:
    """The tangent of product(left, right), by the product rule. A tangent of None is zero; one of the two is given."""
    parts = []
    if left_tangent is not None:
        parts.append(product(left_tangent, right))
    if right_tangent is not None:
        parts.append(product(left, right_tangent))
    return sum(parts[1:], parts[0])
