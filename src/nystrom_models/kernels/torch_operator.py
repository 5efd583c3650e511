# SPDX-License-Identifier: Apache-2.0
"""The attention of the kernels as one operator of PyTorch, which `torch.compile` takes into its graphs as it is.

Its backward pass is an operator too. Legend as in `tiles.py`.
"""

from typing import Any

import torch
from torch import Tensor

from . import attention
from .tiles import Rows, new_states


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """As `attention.run_forward`."""
    of_rows = Rows(*rows) if rows else None
    return attention.run_forward(
        query, key, value, conv_weight, seed, of_rows, num_landmarks, pinv_iterations, dropout_p
    )


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    batch, heads, length, dim = query.shape
    query_landmarks = query.new_empty(batch, heads, num_landmarks, dim)
    inverse = query.new_empty(batch, heads, num_landmarks, num_landmarks, dtype=torch.float32)
    seen = torch.empty_like(query_landmarks, dtype=torch.float32)
    lse = seen.new_empty(batch, heads, num_landmarks)
    key_landmarks, landmark_values = torch.empty_like(query_landmarks), torch.empty_like(query_landmarks)
    return new_states(query, length), query_landmarks, key_landmarks, inverse, seen, lse, landmark_values


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
    landmark_values: Tensor,
    pinv_iterations: int,
    dropout_p: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `attention.run_backward`; the last is empty where there is no convolution."""
    saved = query_landmarks, key_landmarks, inverse, seen, lse, landmark_values
    of_rows = Rows(*rows) if rows else None
    query_grad, key_grad, value_grad, weight_grad = attention.run_backward(
        context_grad, query, key, value, conv_weight, seed, of_rows, *saved,
        pinv_iterations=pinv_iterations, dropout_p=dropout_p,
    )  # fmt: skip
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
    landmark_values: Tensor,
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
    *options: Any,
) -> Tensor:
    """The context of `attention.run_forward`, with its arguments, differentiable once."""
    return _forward(query, key, value, conv_weight, seed, [] if rows is None else list(rows), *options)[0]
