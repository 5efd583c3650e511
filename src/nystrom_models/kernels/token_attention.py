# SPDX-License-Identifier: Apache-2.0
"""What the tokens get: softmax(q k~ᵀ / √D) W over the landmarks plus the depthwise convolution of V, in one launch.

The convolution of a block of tokens is a matrix product too: a banded matrix of the taps times the window of V around
the block. The gradient of the taps sums gradient · Vᵀ over all blocks first, and then along diagonals.
Legend as in `tiles.py`; P parts, T taps of the convolution.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .tiles import (
    LOG2_E,
    Rows,
    dot,
    landmark_count,
    load_tile,
    new_states,
    on_device,
    row_arguments,
    split_count,
    store_tile,
    strides,
    tile,
    unit_stride,
    valid_tokens,
)


@triton.jit
def _weights(q, k, count, scale, BLOCK_M: tl.constexpr):
    """softmax(q k~ᵀ / √D) over the landmarks that exist, of which there is one at least."""
    scores = dot(q, tl.trans(k)) * (scale * LOG2_E)
    scores = tl.where((tl.arange(0, BLOCK_M) < count)[None, :], scores, -float("inf"))
    weights = tl.exp2(scores - tl.max(scores, axis=1)[:, None])
    return weights / tl.sum(weights, axis=1)[:, None]


@triton.jit
def _kept(seed, program, tokens, M, dropout_p, BLOCK_M: tl.constexpr):
    """What remains of each weight (len(tokens), BLOCK_M): 0 with probability p, else 1 / (1 - p).

    Drawn from the seed and the weight's place alone, so that the backward pass draws the same.
    """
    places = tokens[:, None] * M + tl.arange(0, BLOCK_M)[None, :]
    drawn = tl.rand(tl.load(seed) + program, places)
    return tl.where(drawn >= dropout_p, 1.0 / (1.0 - dropout_p), 0.0)


@triton.jit
def _convolve(
    accumulator, states, stride, taps, block, mask, row, N, D, MASKED: tl.constexpr, TRANSPOSED: tl.constexpr,
    TAPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Adds to (BLOCK_N, BLOCK_D) the convolution of states (N, D), zero where invalid, at the tokens from `block` on.

    TRANSPOSED: with the taps in the opposite order, as the gradient of the states has them.
    """
    place = tl.arange(0, BLOCK_N)
    for start in range(0, BLOCK_N + TAPS - 1, BLOCK_N):
        tokens = block - TAPS // 2 + start + place
        x = load_tile(states, tokens, stride, valid_tokens(mask, row, tokens, N, N, MASKED), D, BLOCK_D)
        tap = start + place[None, :] - place[:, None]
        band = (tap >= 0) & (tap < TAPS)
        if TRANSPOSED:
            tap = TAPS - 1 - tap
        accumulator += dot(tl.load(taps + tap, mask=band, other=0.0), x)
    return accumulator


@triton.jit
def _token_attention_forward(
    query, query_b, query_h, query_n, key_landmarks, landmark_values, value, value_b, value_h, value_n, taps,
    context, context_b, context_h, context_n, seed, dropout_p,
    scale, H, N, M, D, mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, TAPS: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * BLOCK_N
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    query += row * query_b + program % H * query_h
    tokens = block + tl.arange(0, BLOCK_N)
    valid = valid_tokens(mask, row, tokens, N, N, MASKED)
    out = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # A block of padding alone gets its zeros without work.
    if tl.max(valid.to(tl.int32), axis=0) > 0:
        landmarks = tl.arange(0, BLOCK_M)
        count = M
        if MASKED:
            count = landmark_count(exists, row, M, BLOCK_M)
        q = load_tile(query, tokens, query_n, valid, D, BLOCK_D)
        k = load_tile(key_landmarks + program * M * D, landmarks, D, landmarks < M, D, BLOCK_D)
        w = load_tile(landmark_values + program * M * D, landmarks, D, landmarks < M, D, BLOCK_D)
        weights = _weights(q, k, count, scale, BLOCK_M)
        if DROPOUT:
            weights *= _kept(seed, program, tokens, M, dropout_p, BLOCK_M)
        out = dot(weights.to(w.dtype), w)
        if TAPS > 0:
            value += row * value_b + program % H * value_h
            taps += program % H * TAPS
            out = _convolve(out, value, value_n, taps, block, mask, row, N, D, MASKED, False, TAPS, BLOCK_N, BLOCK_D)
        out = tl.where(valid[:, None], out, 0.0)
    context += row * context_b + program % H * context_h
    store_tile(context, tokens, context_n, tokens < N, out, D, BLOCK_D)


@triton.jit
def _token_attention_backward(
    query, query_b, query_h, query_n, key_landmarks, landmark_values,
    context_grad, context_b, context_h, context_n, query_grad, grad_b, grad_h, grad_n,
    partial_key_grad, partial_value_grad, seed, dropout_p,
    scale, H, N, M, D, mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    parts = tl.num_programs(0)
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    query += row * query_b + program % H * query_h
    context_grad += row * context_b + program % H * context_h
    query_grad += row * grad_b + program % H * grad_h
    landmarks = tl.arange(0, BLOCK_M)
    count = M
    if MASKED:
        count = landmark_count(exists, row, M, BLOCK_M)
    k = load_tile(key_landmarks + program * M * D, landmarks, D, landmarks < M, D, BLOCK_D)
    w = load_tile(landmark_values + program * M * D, landmarks, D, landmarks < M, D, BLOCK_D)
    k_grad = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    w_grad = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Parts take blocks in turn, so that padding at one end is shared out among them.
    for block in range(tl.program_id(0) * BLOCK_N, N, parts * BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        valid = valid_tokens(mask, row, tokens, N, N, MASKED)
        q_grad = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        if tl.max(valid.to(tl.int32), axis=0) > 0:
            q = load_tile(query, tokens, query_n, valid, D, BLOCK_D)
            # Zero at invalid tokens, whose results are zero whatever comes in.
            g = load_tile(context_grad, tokens, context_n, valid, D, BLOCK_D)
            weights = _weights(q, k, count, scale, BLOCK_M)
            weights_grad = dot(g, tl.trans(w))
            dropped = weights
            if DROPOUT:
                kept = _kept(seed, program, tokens, M, dropout_p, BLOCK_M)
                weights_grad *= kept
                dropped = weights * kept
            scores_grad = weights * (weights_grad - tl.sum(weights * weights_grad, axis=1)[:, None]) * scale
            scores_grad = scores_grad.to(q.dtype)
            q_grad = dot(scores_grad, k)
            k_grad += dot(tl.trans(scores_grad), q)
            w_grad += dot(tl.trans(dropped.to(q.dtype)), g)
        store_tile(query_grad, tokens, grad_n, tokens < N, q_grad, D, BLOCK_D)
    place = (program * parts + tl.program_id(0)) * M * D
    store_tile(partial_key_grad + place, landmarks, D, landmarks < M, k_grad, D, BLOCK_D)
    store_tile(partial_value_grad + place, landmarks, D, landmarks < M, w_grad, D, BLOCK_D)


@triton.jit
def _convolution_backward(
    context_grad, context_b, context_h, context_n, taps, value_grad, grad_b, grad_h, grad_n,
    H, N, D, mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, TAPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0) * BLOCK_N
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    context_grad += row * context_b + program % H * context_h
    value_grad += row * grad_b + program % H * grad_h
    taps += program % H * TAPS
    tokens = block + tl.arange(0, BLOCK_N)
    valid = valid_tokens(mask, row, tokens, N, N, MASKED)
    out = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if tl.max(valid.to(tl.int32), axis=0) > 0:
        out = _convolve(
            out, context_grad, context_n, taps, block, mask, row, N, D, MASKED, True, TAPS, BLOCK_N, BLOCK_D
        )
        out = tl.where(valid[:, None], out, 0.0)
    store_tile(value_grad, tokens, grad_n, tokens < N, out, D, BLOCK_D)


@triton.jit
def _taps_backward(
    value, value_b, value_h, value_n, context_grad, context_b, context_h, context_n, products,
    B, H, N, D, mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, TAPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """products (H, P, BLOCK_N, windows · BLOCK_N): Σ over blocks of gradient (BLOCK_N, D) times window of Vᵀ."""
    window = tl.program_id(0)
    part = tl.program_id(1)
    head = tl.program_id(2)
    place = tl.arange(0, BLOCK_N)
    blocks = tl.cdiv(N, BLOCK_N)
    product = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    for item in range(part, B * blocks, tl.num_programs(1)):
        row = (item // blocks).to(tl.int64)
        tokens = item % blocks * BLOCK_N + place
        valid = valid_tokens(mask, row, tokens, N, N, MASKED)
        if tl.max(valid.to(tl.int32), axis=0) > 0:
            g = load_tile(context_grad + row * context_b + head * context_h, tokens, context_n, valid, D, BLOCK_D)
            tokens += window * BLOCK_N - TAPS // 2
            valid = valid_tokens(mask, row, tokens, N, N, MASKED)
            v = load_tile(value + row * value_b + head * value_h, tokens, value_n, valid, D, BLOCK_D)
            product += dot(g, tl.trans(v))
    width = tl.num_programs(0) * BLOCK_N
    products += (head.to(tl.int64) * tl.num_programs(1) + part) * BLOCK_N * width + window * BLOCK_N
    tl.store(products + place[:, None] * width + place[None, :], product)


def _sizes(num_landmarks: int, dim: int, dtype: torch.dtype) -> dict[str, Any]:
    sizes = {"BLOCK_M": tile(num_landmarks), "BLOCK_D": tile(dim), "num_warps": 8, "num_stages": 1}
    # Products in float32 hold their operands in registers.
    return sizes | {"BLOCK_N": 16 if dtype == torch.float32 else 64}


def _convolution_sizes(dim: int, dtype: torch.dtype) -> dict[str, Any]:
    block = 32 if dtype == torch.float32 else 64
    return {"BLOCK_N": block, "BLOCK_D": tile(dim), "num_warps": 8 if dtype == torch.float32 else 4, "num_stages": 1}


def _taps(conv_weight: Tensor | None) -> int:
    return 0 if conv_weight is None else conv_weight.shape[2]


def _gradient_of_value(context_grad: Tensor, conv_weight: Tensor, rows: Rows | None) -> Tensor:
    batch, heads, length, dim = context_grad.shape
    value_grad = new_states(context_grad, length)
    sizes = _convolution_sizes(dim, context_grad.dtype)
    with on_device(context_grad):
        _convolution_backward[(triton.cdiv(length, sizes["BLOCK_N"]), batch * heads)](
            context_grad, *strides(context_grad), conv_weight, value_grad, *strides(value_grad),
            heads, length, dim, **row_arguments(rows), TAPS=_taps(conv_weight), **sizes,
        )  # fmt: skip
    return value_grad


def _gradient_of_taps(value: Tensor, context_grad: Tensor, conv_weight: Tensor, rows: Rows | None) -> Tensor:
    """(H, 1, T, 1): at t the sum of gradient[n] · value[n + t - T // 2] over the batch, the tokens n and D."""
    batch, heads, length, dim = value.shape
    sizes = _convolution_sizes(dim, value.dtype)
    taps, size = _taps(conv_weight), sizes["BLOCK_N"]
    windows = triton.cdiv(size + taps - 1, size)
    blocks = triton.cdiv(length, size)
    parts = split_count(batch * blocks, windows * heads, value.device)
    products = value.new_empty(heads, parts, size, windows * size, dtype=torch.float32)
    with on_device(value):
        _taps_backward[(windows, parts, heads)](
            value, *strides(value), context_grad, *strides(context_grad), products,
            batch, heads, length, dim, **row_arguments(rows), TAPS=taps, **sizes,
        )  # fmt: skip
    start = torch.arange(size, device=value.device)[:, None]
    diagonals = (start + torch.arange(taps, device=value.device)).expand(heads, size, taps)
    return products.sum(dim=1).gather(2, diagonals).sum(dim=1)[:, None, :, None].to(conv_weight.dtype)


def run_forward(
    query: Tensor,
    key_landmarks: Tensor,
    landmark_values: Tensor,
    value: Tensor | None,
    conv_weight: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    rows: Rows | None,
) -> Tensor:
    """As `token_attention`; landmarks, their values and taps contiguous, queries and values with unit stride."""
    batch, heads, length, dim = query.shape
    count = key_landmarks.shape[2]
    sizes = _sizes(count, dim, query.dtype)
    context = new_states(query, length)
    with on_device(query):
        _token_attention_forward[(triton.cdiv(length, sizes["BLOCK_N"]), batch * heads)](
            query, *strides(query), key_landmarks, landmark_values,
            value, *((0, 0, 0) if value is None else strides(value)), conv_weight,
            context, *strides(context), seed, dropout_p,
            dim**-0.5, heads, length, count, dim, **row_arguments(rows),
            TAPS=_taps(conv_weight), DROPOUT=seed is not None, **sizes,
        )  # fmt: skip
    return context


def run_backward(
    query: Tensor,
    key_landmarks: Tensor,
    landmark_values: Tensor,
    value: Tensor | None,
    conv_weight: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    context_grad: Tensor,
    rows: Rows | None,
    of_value: bool = True,
    of_taps: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of the first five; where there is a convolution, those of value and taps if they are wanted."""
    context_grad = unit_stride(context_grad)
    batch, heads, length, dim = query.shape
    count = key_landmarks.shape[2]
    sizes = _sizes(count, dim, query.dtype)
    parts = split_count(triton.cdiv(length, sizes["BLOCK_N"]), batch * heads, query.device)
    partial = query.new_empty(2, batch, heads, parts, count, dim, dtype=torch.float32)
    query_grad = new_states(query, length)
    with on_device(query):
        _token_attention_backward[(parts, batch * heads)](
            query, *strides(query), key_landmarks, landmark_values,
            context_grad, *strides(context_grad), query_grad, *strides(query_grad), *partial,
            seed, dropout_p, dim**-0.5, heads, length, count, dim, **row_arguments(rows),
            DROPOUT=seed is not None, **sizes,
        )  # fmt: skip
    key_landmarks_grad, landmark_values_grad = partial.sum(dim=3).to(query.dtype)
    value_grad = weight_grad = None
    if value is not None and conv_weight is not None:
        value_grad = _gradient_of_value(context_grad, conv_weight, rows) if of_value else None
        weight_grad = _gradient_of_taps(value, context_grad, conv_weight, rows) if of_taps else None
    return query_grad, key_landmarks_grad, landmark_values_grad, value_grad, weight_grad


class _TokenAttention(torch.autograd.Function):
    forward = staticmethod(run_forward)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.dropout_p, ctx.rows = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, context_grad: Tensor) -> tuple[Any, ...]:
        query, key_landmarks, landmark_values, value, conv_weight, seed = ctx.saved_tensors
        gradients = run_backward(
            query, key_landmarks, landmark_values, value, conv_weight, seed, ctx.dropout_p, context_grad, ctx.rows,
            of_value=ctx.needs_input_grad[3], of_taps=ctx.needs_input_grad[4],
        )  # fmt: skip
        return *gradients, None, None, None


def token_attention(
    query: Tensor,
    key_landmarks: Tensor,
    landmark_values: Tensor,
    value: Tensor | None = None,
    conv_weight: Tensor | None = None,
    rows: Rows | None = None,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(q k~ᵀ / √D) W over the landmarks that exist, plus the convolution of V; differentiable once.

    Args:
        query: (B, H, N, D). key_landmarks: (B, H, M, D). landmark_values: W, (B, H, M, D). All of the same dtype.
        value: (B, H, N, D), conv_weight: (H, 1, T, 1), T odd, of that dtype too; both, or neither for no convolution.
        rows: the ragged batch; None where every token is valid.
        seed: (1,) int64, from which it is drawn which weights of the landmarks are dropped; None to drop none.
        dropout_p: probability of dropping a weight, with a seed.

    Returns: (B, H, N, D), laid out as (B, N, H, D), zero at invalid tokens; gradients that come in there are ignored.
    """
    if (value is None) != (conv_weight is None):
        raise ValueError("Give both value and conv_weight, or neither for no convolution.")
    if value is not None and conv_weight is not None:
        value, conv_weight = unit_stride(value), conv_weight.contiguous()
    landmarks = key_landmarks.contiguous(), landmark_values.contiguous()
    return _TokenAttention.apply(unit_stride(query), *landmarks, value, conv_weight, seed, dropout_p, rows)
