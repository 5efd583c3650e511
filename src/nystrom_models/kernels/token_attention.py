# SPDX-License-Identifier: Apache-2.0
"""What the tokens get: softmax(q k~ᵀ / √D) W over the landmarks plus the depthwise convolution of V, in one launch.

A program takes blocks of tokens one after the other; it holds the landmarks and the taps, so that of a block only its
queries and values are read. The convolution of a block is a product of matrices too: of a banded matrix of the taps
and the window of V around the block, two blocks long. In the backward pass, one launch gives the gradients of queries
and landmarks, another those of V and the taps, from the windows of the incoming gradient: the taps' are the sums along
the diagonals of Σ V · gradientᵀ. Legend as in `tiles.py`; P parts, T taps of the convolution.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import plan_launch
from .tiles import (
    LOG2_E,
    Rows,
    dot,
    landmark_count,
    load_tile,
    new_states,
    on_device,
    row_arguments,
    store_tile,
    stretch,
    strides,
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
def _band(taps, start, TAPS: tl.constexpr, REVERSED: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BLOCK_N, BLOCK_N): the taps by which the tokens of a block take those of its window, from its place `start` on.

    The window begins T // 2 tokens before the block. REVERSED: as the gradient of the convolved states takes them.
    """
    place = tl.arange(0, BLOCK_N)
    tap = start + place[None, :] - place[:, None]
    inside = (tap >= 0) & (tap < TAPS)
    if REVERSED:
        tap = TAPS - 1 - tap
    return tl.load(taps + tap, mask=inside, other=0.0)


@triton.jit
def _load_window(states, window, stride, mask, row, N, D, MASKED: tl.constexpr, BLOCK_D: tl.constexpr):
    """(len(window), BLOCK_D) of states (N, D) at these tokens, zero where there is none or none that is valid."""
    return load_tile(states, window, stride, valid_tokens(mask, row, window, N, N, MASKED), D, BLOCK_D)


@triton.jit
def _token_attention_forward(
    query, query_b, query_h, query_n, key_landmarks, landmark_values, value, value_b, value_h, value_n, taps,
    context, context_b, context_h, context_n, seed, dropout_p,
    scale, H, N, M, D, mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, TAPS: tl.constexpr, DROPOUT: tl.constexpr, HOLD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """HOLD: hold the two bands of taps; without, there may be more of them, each made for every block anew."""
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    query += row * query_b + program % H * query_h
    context += row * context_b + program % H * context_h
    landmarks = tl.arange(0, BLOCK_M)
    k = load_tile(key_landmarks + program * M * D, landmarks, D, landmarks < M, D, BLOCK_D)
    w = load_tile(landmark_values + program * M * D, landmarks, D, landmarks < M, D, BLOCK_D)
    count = landmark_count(exists, row, M, MASKED, BLOCK_M)
    if TAPS > 0:
        value += row * value_b + program % H * value_h
        taps += program % H * TAPS
    if HOLD:
        band = _band(taps, 0, TAPS, False, BLOCK_N)
        next_band = _band(taps, BLOCK_N, TAPS, False, BLOCK_N)
    start, stop = stretch(positions, sizes, count, row, N, M, longest, MASKED, BLOCK_N)
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)
        q = load_tile(query, tokens, query_n, valid, D, BLOCK_D)
        weights = _weights(q, k, count, scale, BLOCK_M)
        if DROPOUT:
            weights *= _kept(seed, program, tokens, M, dropout_p, BLOCK_M)
        out = dot(weights.to(w.dtype), w)
        if HOLD:
            window = tokens - TAPS // 2
            out += dot(band, _load_window(value, window, value_n, mask, row, N, D, MASKED, BLOCK_D))
            window += BLOCK_N
            out += dot(next_band, _load_window(value, window, value_n, mask, row, N, D, MASKED, BLOCK_D))
        elif TAPS > 0:
            for place in range(0, BLOCK_N + TAPS - 1, BLOCK_N):
                window = tokens - TAPS // 2 + place
                x = _load_window(value, window, value_n, mask, row, N, D, MASKED, BLOCK_D)
                out += dot(_band(taps, place, TAPS, False, BLOCK_N), x)
        store_tile(context, tokens, context_n, tokens < stop, tl.where(valid[:, None], out, 0.0), D, BLOCK_D)


@triton.jit
def _token_attention_backward(
    query, query_b, query_h, query_n, key_landmarks, landmark_values,
    context_grad, context_b, context_h, context_n, query_grad, grad_b, grad_h, grad_n,
    partial_key_grad, partial_value_grad, seed, dropout_p,
    scale, H, N, M, D, mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    query += row * query_b + program % H * query_h
    context_grad += row * context_b + program % H * context_h
    query_grad += row * grad_b + program % H * grad_h
    landmarks = tl.arange(0, BLOCK_M)
    k = load_tile(key_landmarks + program * M * D, landmarks, D, landmarks < M, D, BLOCK_D)
    w = load_tile(landmark_values + program * M * D, landmarks, D, landmarks < M, D, BLOCK_D)
    count = landmark_count(exists, row, M, MASKED, BLOCK_M)
    k_grad = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    w_grad = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start, stop = stretch(positions, sizes, count, row, N, M, longest, MASKED, BLOCK_N)
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)
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
        store_tile(query_grad, tokens, grad_n, tokens < stop, dot(scores_grad, k), D, BLOCK_D)
        k_grad += dot(tl.trans(scores_grad), q)
        w_grad += dot(tl.trans(dropped.to(q.dtype)), g)
    place = (program * tl.num_programs(0) + tl.program_id(0)) * M * D
    store_tile(partial_key_grad + place, landmarks, D, landmarks < M, k_grad, D, BLOCK_D)
    store_tile(partial_value_grad + place, landmarks, D, landmarks < M, w_grad, D, BLOCK_D)


@triton.jit
def _convolution_backward(
    value, value_b, value_h, value_n, context_grad, context_b, context_h, context_n, taps,
    value_grad, grad_b, grad_h, grad_n, products,
    H, N, M, D, mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, TAPS: tl.constexpr, OF_TAPS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """products (B·H, P, 2, BLOCK_N, BLOCK_N): Σ over a part's blocks of V (BLOCK_N, D) times window of gradientᵀ."""
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    value += row * value_b + program % H * value_h
    context_grad += row * context_b + program % H * context_h
    value_grad += row * grad_b + program % H * grad_h
    taps += program % H * TAPS
    band = _band(taps, 0, TAPS, True, BLOCK_N)
    next_band = _band(taps, BLOCK_N, TAPS, True, BLOCK_N)
    product = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    next_product = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    count = landmark_count(exists, row, M, MASKED, BLOCK_M)
    start, stop = stretch(positions, sizes, count, row, N, M, longest, MASKED, BLOCK_N)
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)
        window = tokens - TAPS // 2
        g = _load_window(context_grad, window, context_n, mask, row, N, D, MASKED, BLOCK_D)
        window += BLOCK_N
        next_g = _load_window(context_grad, window, context_n, mask, row, N, D, MASKED, BLOCK_D)
        out = tl.where(valid[:, None], dot(band, g) + dot(next_band, next_g), 0.0)
        store_tile(value_grad, tokens, grad_n, tokens < stop, out, D, BLOCK_D)
        if OF_TAPS:
            v = load_tile(value, tokens, value_n, valid, D, BLOCK_D)
            product += dot(v, tl.trans(g))
            next_product += dot(v, tl.trans(next_g))
    if OF_TAPS:
        place = tl.arange(0, BLOCK_N)
        products += (program * tl.num_programs(0) + tl.program_id(0)) * 2 * BLOCK_N * BLOCK_N
        products += place[:, None] * BLOCK_N + place[None, :]
        tl.store(products, product)
        tl.store(products + BLOCK_N * BLOCK_N, next_product)


def run_forward(
    query: Tensor,
    key_landmarks: Tensor,
    landmark_values: Tensor,
    value: Tensor,
    conv_weight: Tensor | None = None,
    rows: Rows | None = None,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(q k~ᵀ / √D) W over the landmarks that exist, plus the convolution of V.

    Args:
        query, value: (B, H, N, D), with unit stride. key_landmarks: (B, H, M, D). landmark_values: W, (B, H, M, D).
        conv_weight: (H, 1, T, 1), T odd; None for no convolution. All of the same dtype, the last three contiguous.
        rows: the ragged batch; None where every token is valid.
        seed: (1,) int64, from which it is drawn which weights of the landmarks are dropped; None to drop none.
        dropout_p: probability of dropping a weight, with a seed.

    Returns: (B, H, N, D), laid out as (B, N, H, D), zero at invalid tokens.
    """
    batch, heads, length, dim = query.shape
    count = key_landmarks.shape[2]
    taps = 0 if conv_weight is None else conv_weight.shape[2]
    # In float32 the registers cannot hold the bands.
    hold = taps > 0 and query.dtype != torch.float32
    parts, sizes = plan_launch("token_attention", query, count, taps if hold else 0)
    # No program comes to the padding around a row.
    context = new_states(query, length, zeros=rows is not None)
    with on_device(query):
        _token_attention_forward[(parts, batch * heads)](
            query, *strides(query), key_landmarks, landmark_values,
            value, *strides(value), conv_weight,
            context, *strides(context), seed, dropout_p,
            dim**-0.5, heads, length, count, dim, **row_arguments(rows),
            TAPS=taps, DROPOUT=seed is not None, HOLD=hold, **sizes,
        )  # fmt: skip
    return context


def run_backward(
    query: Tensor,
    key_landmarks: Tensor,
    landmark_values: Tensor,
    context_grad: Tensor,
    rows: Rows | None = None,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the first three: of queries (B, H, N, D), of landmarks and their values (B, H, M, D) float32.

    Args:
        query, key_landmarks, landmark_values, rows, seed, dropout_p: as in `run_forward`.
        context_grad: (B, H, N, D), with unit stride. What it holds at invalid tokens is ignored.
    """
    batch, heads, length, dim = query.shape
    count = key_landmarks.shape[2]
    parts, sizes = plan_launch("token_attention_backward", query, count)
    partial = query.new_empty(2, batch, heads, parts, count, dim, dtype=torch.float32)
    query_grad = new_states(query, length, zeros=rows is not None)
    with on_device(query):
        _token_attention_backward[(parts, batch * heads)](
            query, *strides(query), key_landmarks, landmark_values,
            context_grad, *strides(context_grad), query_grad, *strides(query_grad), *partial,
            seed, dropout_p, dim**-0.5, heads, length, count, dim, **row_arguments(rows),
            DROPOUT=seed is not None, **sizes,
        )  # fmt: skip
    key_landmarks_grad, landmark_values_grad = partial.sum(dim=3)
    return query_grad, key_landmarks_grad, landmark_values_grad


def run_convolution_backward(
    value: Tensor,
    conv_weight: Tensor,
    context_grad: Tensor,
    num_landmarks: int,
    rows: Rows | None = None,
    of_taps: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The gradients that value and conv_weight get from the convolution; that of conv_weight if it is wanted.

    Args:
        value, conv_weight, rows: as in `run_forward`. num_landmarks: M, of the ragged batch.
        context_grad: (B, H, N, D), with unit stride. What it holds at invalid tokens is ignored.
    """
    batch, heads, length, dim = value.shape
    taps = conv_weight.shape[2]
    parts, sizes = plan_launch("convolution_backward", value, num_landmarks, taps)
    size = sizes["BLOCK_N"]
    value_grad = new_states(value, length, zeros=rows is not None)
    products = value.new_empty(batch, heads, parts, 2, size, size, dtype=torch.float32) if of_taps else None
    with on_device(value):
        _convolution_backward[(parts, batch * heads)](
            value, *strides(value), context_grad, *strides(context_grad), conv_weight,
            value_grad, *strides(value_grad), products,
            heads, length, num_landmarks, dim, **row_arguments(rows), TAPS=taps, OF_TAPS=of_taps, **sizes,
        )  # fmt: skip
    if products is None:
        return value_grad, None
    # The token at i of a block saw the gradient at j of its window by tap i - j + T - 1.
    products = products.sum(dim=(0, 2)).transpose(1, 2).flatten(2)  # (H, size, 2 size)
    place = torch.arange(size, device=value.device)[:, None]
    window = place + torch.arange(taps - 1, -1, -1, device=value.device)
    of_taps_grad = products.gather(2, window.expand(heads, size, taps)).sum(dim=1)
    return value_grad, of_taps_grad[:, None, :, None].to(conv_weight.dtype)
