# SPDX-License-Identifier: Apache-2.0
"""The attention of the kernels as one operator of PyTorch, which `torch.compile` takes into its graphs as it is.

Its backward pass is an operator too. Both are chains of the kernels' functions; the gradients between them are those
of the product A⁺ (B V). Legend as in `tiles.py`.
"""

from typing import Any

import torch
from torch import Tensor

from . import landmark_attention, landmarks, pseudo_inverse, token_attention
from .tiles import Rows, new_states, unit_stride


def _landmark_values(inverse: Tensor, seen: Tensor, dtype: torch.dtype) -> Tensor:
    return (inverse @ seen).to(dtype)


@torch.library.custom_op("nystrom_models::nystrom_attention", mutates_args=())
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    conv_weight: Tensor | None,
    seed: Tensor | None,
    rows: list[Tensor],
    num_landmarks: int,
    pinv_iterations: int,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The context, and what the backward pass needs: landmarks of queries and keys, A⁺, B V, logarithms of sums."""
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    of_rows = Rows(*rows) if rows else None
    with torch.autocast(query.device.type, enabled=False):
        query_landmarks, key_landmarks = landmarks.run_forward(query, key, num_landmarks, of_rows)
        inverse = pseudo_inverse.run_forward(query_landmarks, key_landmarks, pinv_iterations, of_rows)[0]
        seen, lse = landmark_attention.run_forward(query_landmarks, key, value, of_rows)
        context = token_attention.run_forward(
            query,
            key_landmarks,
            _landmark_values(inverse, seen, value.dtype),
            None if conv_weight is None else value,
            None if conv_weight is None else conv_weight.contiguous(),
            seed,
            dropout_p,
            of_rows,
        )
    return context, query_landmarks, key_landmarks, inverse, seen, lse


@_forward.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    conv_weight: Tensor | None,
    seed: Tensor | None,
    rows: list[Tensor],
    num_landmarks: int,
    pinv_iterations: int,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, length, dim = query.shape
    query_landmarks = query.new_empty(batch, heads, num_landmarks, dim)
    inverse = query.new_empty(batch, heads, num_landmarks, num_landmarks, dtype=torch.float32)
    seen = torch.empty_like(query_landmarks, dtype=torch.float32)
    lse = seen.new_empty(batch, heads, num_landmarks)
    return new_states(query, length), query_landmarks, torch.empty_like(query_landmarks), inverse, seen, lse


@torch.library.custom_op("nystrom_models::nystrom_attention_backward", mutates_args=())
def _backward(
    context_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    conv_weight: Tensor | None,
    seed: Tensor | None,
    rows: list[Tensor],
    query_landmarks: Tensor,
    key_landmarks: Tensor,
    inverse: Tensor,
    seen: Tensor,
    lse: Tensor,
    pinv_iterations: int,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value, (B, H, N, D), and of the taps, empty where there are none."""
    query, key, value = unit_stride(query), unit_stride(key), unit_stride(value)
    of_rows = Rows(*rows) if rows else None
    with torch.autocast(query.device.type, enabled=False):
        query_grad, key_landmarks_grad, landmark_values_grad, skip_grad, weight_grad = token_attention.run_backward(
            query,
            key_landmarks,
            _landmark_values(inverse, seen, value.dtype),
            None if conv_weight is None else value,
            None if conv_weight is None else conv_weight.contiguous(),
            seed,
            dropout_p,
            context_grad,
            of_rows,
        )
        landmark_values_grad = landmark_values_grad.to(inverse.dtype)
        query_landmarks_grad, key_grad, value_grad = landmark_attention.run_backward(
            query_landmarks, key, value, seen, lse, inverse.mT @ landmark_values_grad, of_rows
        )
        of_inverse = pseudo_inverse.run_backward(
            query_landmarks, key_landmarks, landmark_values_grad @ seen.mT, pinv_iterations, of_rows
        )
        of_means = landmarks.run_backward(
            query_landmarks_grad + of_inverse[0], key_landmarks_grad + of_inverse[1], query.shape[2], of_rows
        )
        query_grad, key_grad = query_grad + of_means[0], key_grad + of_means[1]
    if skip_grad is not None:
        value_grad = value_grad + skip_grad
    return query_grad, key_grad, value_grad, query.new_empty(0) if weight_grad is None else weight_grad


@_backward.register_fake
def _(
    context_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    conv_weight: Tensor | None,
    seed: Tensor | None,
    rows: list[Tensor],
    query_landmarks: Tensor,
    key_landmarks: Tensor,
    inverse: Tensor,
    seen: Tensor,
    lse: Tensor,
    pinv_iterations: int,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    length = query.shape[2]
    weight_grad = query.new_empty(0) if conv_weight is None else torch.empty_like(conv_weight.contiguous())
    return new_states(query, length), new_states(key, length), new_states(value, length), weight_grad


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, conv_weight, seed, rows, _, ctx.pinv_iterations, ctx.dropout_p = inputs
    ctx.num_rows = len(rows)
    ctx.save_for_backward(query, key, value, conv_weight, seed, *rows, *output[1:])


def _gradients(ctx: Any, context_grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
    query, key, value, conv_weight, seed, *saved = ctx.saved_tensors
    rows, saved = saved[: ctx.num_rows], saved[ctx.num_rows :]
    gradients = _backward(
        context_grad, query, key, value, conv_weight, seed, rows, *saved, ctx.pinv_iterations, ctx.dropout_p
    )
    of_taps = None if conv_weight is None else gradients[3]
    return *gradients[:3], of_taps, None, [None] * ctx.num_rows, None, None, None


_forward.register_autograd(_gradients, setup_context=_save)


def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    conv_weight: Tensor | None,
    seed: Tensor | None,
    rows: Rows | None,
    num_landmarks: int,
    pinv_iterations: int,
    dropout_p: float,
) -> Tensor:
    """As `kernels.nystrom_attention`, of tensors of one dtype; differentiable once.

    Args:
        seed: see `token_attention`. rows: the ragged batch; None where every token is valid.
    """
    of_rows = [] if rows is None else list(rows)
    return _forward(query, key, value, conv_weight, seed, of_rows, num_landmarks, pinv_iterations, dropout_p)[0]
