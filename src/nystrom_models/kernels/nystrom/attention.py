# SPDX-License-Identifier: Apache-2.0
"""Nyström attention from its stages, forward and backward, for tensors of one dtype on one device: a function for
autograd, and an operator of PyTorch for `torch.compile`.

Legend as in `rows.py`. Memory traffic in tensors of size (B, N, H, D): the forward pass reads or writes six (queries
and values are read twice, because the landmarks are needed first; keys are read once; the context is written); at
least four are needed. The backward pass reads or writes 13: it reads queries, keys, values and the incoming gradient
twice, writes two gradients, and writes, reads and writes the third.
"""

from typing import Any

import torch
from torch import Tensor

from ..common import by_token, refuse_second_derivatives
from .convolution import convolution_backward
from .landmark_attention import landmark_attention_backward, landmark_attention_forward
from .landmarks import landmarks_backward, landmarks_forward
from .pseudo_inverse import pseudo_inverse_backward, pseudo_inverse_forward
from .rows import Rows
from .token_attention import token_attention_backward, token_attention_forward


def forward(
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
    """The context, and what the backward pass needs: q~, k~, B V, the logarithms of the sums of B, and W = A⁺ B V.

    Args:
        query, key, value: (B, H, N, D), float16, bfloat16 or float32, N > M.
        conv_weight: (H, 1, T, 1), T odd; None for no convolution.
        seed: (1,) int64, from which dropout is drawn; None for none. dropout_p: its probability, with a seed.
        rows: the tensors of `Rows`, the ragged batch; empty where every token is valid.
        num_landmarks: M. pinv_iterations: steps of the pseudo-inverse.

    Returns: the context is (B, H, N, D), laid out as (B, N, H, D), zero at invalid tokens.
    """
    q, k, v = by_token(query), by_token(key), by_token(value)
    conv_weight = None if conv_weight is None else conv_weight.contiguous()
    ragged = Rows(*rows) if rows else None
    q_landmarks = landmarks_forward(q, num_landmarks, ragged)
    seen, lse, k_landmarks = landmark_attention_forward(q_landmarks, k, v, ragged)
    w = pseudo_inverse_forward(q_landmarks, k_landmarks, seen, pinv_iterations, ragged)
    out = token_attention_forward(q, k_landmarks, w, v, conv_weight, ragged, seed, dropout_p)
    return out.transpose(1, 2), q_landmarks, k_landmarks, seen, lse, w


def backward(
    context_grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    conv_weight: Tensor | None,
    seed: Tensor | None,
    rows: list[Tensor],
    q_landmarks: Tensor,
    k_landmarks: Tensor,
    seen: Tensor,
    lse: Tensor,
    w: Tensor,
    pinv_iterations: int,
    dropout_p: float,
    of_taps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, (B, H, N, D), and of conv_weight, which is empty unless `of_taps`."""
    q, k, v, do = by_token(query), by_token(key), by_token(value), by_token(context_grad)
    ragged = Rows(*rows) if rows else None
    dq, dk_landmarks, dw = token_attention_backward(q, k_landmarks, w, do, ragged, seed, dropout_p)
    dv = dweight = None
    if conv_weight is not None:
        dv, dweight = convolution_backward(v, conv_weight.contiguous(), do, w.shape[2], ragged, of_taps)
    dq_landmarks, dk_landmarks, dseen = pseudo_inverse_backward(
        q_landmarks, k_landmarks, seen, dw, dk_landmarks, pinv_iterations, ragged
    )
    partial, dk, dv = landmark_attention_backward(q_landmarks, k, v, seen, lse, dseen, dk_landmarks, dv, ragged)
    landmarks_backward(dq, dq_landmarks, partial, ragged)
    dweight = query.new_empty(0) if dweight is None else dweight
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), dweight


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, conv_weight, seed, rows, *_, ctx.pinv_iterations, ctx.dropout_p = inputs
    ctx.num_rows = len(rows)
    ctx.save_for_backward(query, key, value, conv_weight, seed, *rows, *output[1:])


def _gradients(ctx: Any, run_backward: Any, context_grad: Tensor) -> tuple[Any, ...]:
    refuse_second_derivatives("eager")
    query, key, value, conv_weight, seed, *saved = ctx.saved_tensors
    rows, saved = saved[: ctx.num_rows], saved[ctx.num_rows :]
    of_taps = conv_weight is not None and ctx.needs_input_grad[3]
    *gradients, dweight = run_backward(
        context_grad, query, key, value, conv_weight, seed, rows, *saved, ctx.pinv_iterations, ctx.dropout_p, of_taps
    )
    return *gradients, dweight if of_taps else None


class Attention(torch.autograd.Function):
    """The context of `forward`, which has the same arguments; differentiable once."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = forward(*inputs)
        _save(ctx, inputs, output)
        return output[0]

    @staticmethod
    def backward(ctx: Any, context_grad: Tensor) -> tuple[Any, ...]:
        return *_gradients(ctx, backward, context_grad), None, None, None, None, None


# The same for graphs: torch.compile does not trace into operators.
_operator = torch.library.custom_op("nystrom_models::nystrom_attention", forward, mutates_args=())
_backward_operator = torch.library.custom_op("nystrom_models::nystrom_attention_backward", backward, mutates_args=())


@_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, conv_weight: Any, seed: Any, rows: Any, count: int, *options: Any):
    q_landmarks = query.new_empty(*query.shape[:2], count, query.shape[3])
    seen = torch.empty_like(q_landmarks, dtype=torch.float32)
    lse = seen.new_empty(seen.shape[:3])
    context = torch.empty_like(by_token(query)).transpose(1, 2)
    return context, q_landmarks, torch.empty_like(seen), seen, lse, torch.empty_like(q_landmarks)


@_backward_operator.register_fake
def _(context_grad: Tensor, query: Tensor, key: Tensor, value: Tensor, conv_weight: Any, *others: Any):
    gradients = [torch.empty_like(by_token(states)).transpose(1, 2) for states in (query, key, value)]
    of_taps = others[-1]
    return *gradients, query.new_empty(conv_weight.shape if of_taps else 0)


def _operator_gradients(ctx: Any, context_grad: Tensor, *_: Any) -> tuple[Any, ...]:
    gradients = _gradients(ctx, _backward_operator, context_grad)
    return *gradients, None, [None] * ctx.num_rows, None, None, None


_operator.register_autograd(_operator_gradients, setup_context=_save)


def attention_in_graph(*inputs: Any) -> Tensor:
    """The context of `forward`, which has the same arguments, as an operator in a graph; differentiable once."""
    return _operator(*inputs)[0]
