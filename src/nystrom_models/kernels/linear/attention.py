# SPDX-License-Identifier: Apache-2.0
"""Causal linear attention as an operator of PyTorch, for autograd and for graphs of `torch.compile`.

Legend as in `causal.py`.
"""

from typing import Any

import torch
from torch import Tensor

from ..common import by_token, refuse_second_derivatives
from .causal import PART_TOKENS, causal_backward, causal_forward


def forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The context (B, H, N, D), laid out as (B, N, H, D), the last state, and all states for the backward pass.

    Args:
        query, key: φ(q), φ(k), (B, H, N, F). value: (B, H, N, D). mask: (B, N) bool. state: (B, H, F, D + 1).
    """
    out, states = causal_forward(by_token(query), by_token(key), by_token(value), mask, state)
    return out.transpose(1, 2), states[:, :, -1].clone(), states


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    states: Tensor,
    context_grad: Tensor,
    final_grad: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key, value and the first state."""
    q, k, v, do = by_token(query), by_token(key), by_token(value), by_token(context_grad)
    dq, dk, dv, dstate = causal_backward(q, k, v, mask, states, do, final_grad)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dstate


_operator = torch.library.custom_op("nystrom_models::causal_linear_attention", forward, mutates_args=())
_backward_operator = torch.library.custom_op(
    "nystrom_models::causal_linear_attention_backward", backward, mutates_args=()
)


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Any, state: Any):
    parts = (query.shape[2] + PART_TOKENS - 1) // PART_TOKENS
    states = query.new_empty(*query.shape[:2], parts + 1, query.shape[3], value.shape[3] + 1, dtype=torch.float32)
    return torch.empty_like(by_token(value)).transpose(1, 2), torch.empty_like(states[:, :, -1]), states


@_backward_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Any, states: Tensor, *gradients: Any):
    same = [torch.empty_like(by_token(tensor)).transpose(1, 2) for tensor in (query, key, value)]
    return *same, torch.empty_like(states[:, :, -1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, mask, _ = inputs
    ctx.save_for_backward(query, key, value, mask, output[2])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, context_grad: Tensor | None, final_grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    refuse_second_derivatives("sdpa")
    query, key, value, mask, states = ctx.saved_tensors
    if context_grad is None:
        context_grad = torch.zeros_like(value)
    dq, dk, dv, dstate = _backward_operator(query, key, value, mask, states, context_grad, final_grad)
    return dq, dk, dv, None, dstate if ctx.needs_input_grad[4] else None


_operator.register_autograd(_gradients, setup_context=_save)


def causal_linear_attention(*inputs: Any) -> tuple[Tensor, Tensor]:
    """The context and the last state of `forward`, which has the same arguments; differentiable once."""
    context, final, _ = _operator(*inputs)
    return context, final
