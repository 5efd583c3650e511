# SPDX-License-Identifier: Apache-2.0
"""Nyström attention from its kernels, forward and backward, of tensors of one dtype on one device.

Of sequences, the forward pass reads queries and values twice and keys once, and writes the context: six of what could
at best be four. In the backward pass, what queries, keys and values get from several sides is added up in place.
Legend as in `tiles.py`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import landmark_attention, landmarks, pseudo_inverse, token_attention
from .tiles import Rows, unit_stride


def run_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    conv_weight: Tensor | None,
    seed: Tensor | None,
    rows: Rows | None,
    num_landmarks: int,
    pinv_iterations: int,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The context, and what the backward pass needs: q~, k~, A⁺, B V, the logarithms of its sums, and A⁺ B V.

    Args:
        query, key, value: (B, H, N, D), float16, bfloat16 or float32, N > M.
        conv_weight: (H, 1, T, 1), T odd; None for no convolution.
        seed: (1,) int64, from which dropout is drawn; None for none. dropout_p: its probability, with a seed.
        rows: the ragged batch; None where every token is valid.
        num_landmarks: M. pinv_iterations: steps of the pseudo-inverse.

    Returns: the context is (B, H, N, D), zero at invalid tokens.
    """
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    if conv_weight is not None:
        conv_weight = conv_weight.contiguous()
    with torch.autocast(query.device.type, enabled=False):
        query_landmarks = landmarks.run_forward(query, num_landmarks, rows)
        seen, lse, key_landmarks = landmark_attention.run_forward(query_landmarks, key, value, rows)
        inverse, landmark_values = pseudo_inverse.run_forward(
            query_landmarks, key_landmarks, seen, pinv_iterations, rows
        )
        context = token_attention.run_forward(
            query, key_landmarks, landmark_values, value, conv_weight, rows, seed, dropout_p
        )
    return context, query_landmarks, key_landmarks, inverse, seen, lse, landmark_values


def run_backward(
    context_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    conv_weight: Tensor | None,
    seed: Tensor | None,
    rows: Rows | None,
    query_landmarks: Tensor,
    key_landmarks: Tensor,
    inverse: Tensor,
    seen: Tensor,
    lse: Tensor,
    landmark_values: Tensor,
    *,
    pinv_iterations: int,
    dropout_p: float,
    of_taps: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key and value, (B, H, N, D), and of conv_weight, if there is one and `of_taps`."""
    query, key, value, context_grad = (unit_stride(states) for states in (query, key, value, context_grad))
    with torch.autocast(query.device.type, enabled=False):
        query_grad, key_landmarks_grad, landmark_values_grad = token_attention.run_backward(
            query, key_landmarks, landmark_values, context_grad, rows, seed, dropout_p
        )
        value_grad = weight_grad = None
        if conv_weight is not None:
            value_grad, weight_grad = token_attention.run_convolution_backward(
                value, conv_weight.contiguous(), context_grad, query_landmarks.shape[2], rows, of_taps
            )
        of_query, of_key = pseudo_inverse.run_backward(
            query_landmarks, key_landmarks, landmark_values_grad @ seen.mT, pinv_iterations, rows
        )
        seen_grad = inverse.mT @ landmark_values_grad
        query_landmarks_grad, key_grad, value_grad = landmark_attention.run_backward(
            query_landmarks, key, value, seen, lse, seen_grad, key_landmarks_grad + of_key, value_grad, rows
        )
        landmarks.add_gradient(query_grad, query_landmarks_grad + of_query, rows)
    return query_grad, key_grad, value_grad, weight_grad


class Attention(torch.autograd.Function):
    """`run_forward`'s context, differentiable once."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        """inputs: those of `run_forward`."""
        context, *saved = run_forward(*inputs)
        query, key, value, conv_weight, seed, ctx.rows, _, ctx.pinv_iterations, ctx.dropout_p = inputs
        ctx.save_for_backward(query, key, value, conv_weight, seed, *saved)
        return context

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, context_grad: Tensor) -> tuple[Any, ...]:
        query, key, value, conv_weight, seed, *saved = ctx.saved_tensors
        gradients = run_backward(
            context_grad, query, key, value, conv_weight, seed, ctx.rows, *saved,
            pinv_iterations=ctx.pinv_iterations, dropout_p=ctx.dropout_p, of_taps=ctx.needs_input_grad[3],
        )  # fmt: skip
        return *gradients, None, None, None, None, None
