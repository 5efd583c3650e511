# SPDX-License-Identifier: Apache-2.0
"""The attention of the tokens, softmax(q k~ᵀ / √D) W over the landmarks, plus the depthwise convolution of V, in one
launch.

A program processes blocks of tokens one after the other. It keeps the landmarks and the taps, and reads only the
queries and values of each block. The convolution's gradients are in `convolution.py`. Legend as in `rows.py`; P parts,
T taps of the convolution, W = A⁺ B V the landmarks' values.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import LOG2_E, dot, kernel, load_tile, on_device, store_tile
from .convolution import band_of_taps, convolve, load_window, window_blocks
from .launches import plan_launch
from .rows import (
    Rows,
    describe_row,
    find_segments,
    part_of,
    row_arguments,
    store_padding,
    valid_tokens,
)


@triton.jit
def _softmax(q, k, count, scale, BLOCK_M: tl.constexpr, FLOAT32: tl.constexpr):
    """softmax(q k~ᵀ / √D) over the landmarks that exist, at least one."""
    scores = dot(q, tl.trans(k), None, FLOAT32) * (scale * LOG2_E)
    scores = tl.where((tl.arange(0, BLOCK_M) < count)[None, :], scores, -float("inf"))
    weights = tl.exp2(scores - tl.max(scores, axis=1)[:, None])
    return weights / tl.sum(weights, axis=1)[:, None]


@triton.jit
def _dropout(seed, program, tokens, threshold, BLOCK_M: tl.constexpr):
    """The factor of each weight (len(tokens), BLOCK_M): 0 with probability p = threshold / 2³¹, else 1 / (1 - p).

    It depends only on the seed and the position of the weight, so that the backward pass draws the same factors. Each
    call of Philox gives four words, for four weights that are BLOCK_M / 4 apart. Seven rounds are the fewest without
    known flaws.
    """
    quarter: tl.constexpr = BLOCK_M // 4
    places = tokens[:, None] * quarter + tl.arange(0, quarter)[None, :]
    first, second, third, fourth = tl.randint4x(tl.load(seed) + program, places, n_rounds=7)
    words = tl.join(tl.join(first, third), tl.join(second, fourth))  # (len(tokens), quarter, 2, 2)
    words = tl.reshape(tl.permute(words, (0, 2, 3, 1)), (tokens.shape[0], BLOCK_M))
    kept = (words.to(tl.uint32, bitcast=True) >> 1).to(tl.int32) >= threshold
    return tl.where(kept, 1.0 / (1.0 - threshold.to(tl.float32) / 2147483648.0), 0.0)


@kernel
def _token_attention_fwd_kernel(
    q, k_landmarks, w, v, taps, out, seed, threshold, scale,
    mask, positions, sizes, exists, N, H, longest,
    MASKED: tl.constexpr, TAPS: tl.constexpr, DROPOUT: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    head = (row * N * H + program % H) * D
    q += head
    v += head
    out += head
    landmarks = tl.arange(0, BLOCK_M)
    inside = landmarks < M
    k_block = load_tile(k_landmarks + program * M * D, landmarks, D, inside, D, BLOCK_D).to(q.dtype.element_ty)
    w_block = load_tile(w + program * M * D, landmarks, D, inside, D, BLOCK_D)
    BANDS: tl.constexpr = TAPS > 0 and q.dtype.element_ty != tl.float32
    if TAPS > 0:
        taps += program % H * TAPS
    if BANDS:
        band = band_of_taps(taps, 0, TAPS, False, BLOCK_N)
        band_1 = band_of_taps(taps, BLOCK_N, TAPS, False, BLOCK_N)
        if window_blocks(TAPS, BLOCK_N) > 2:
            band_2 = band_of_taps(taps, 2 * BLOCK_N, TAPS, False, BLOCK_N)
    first, last, size = find_segments(positions, sizes, exists, row, landmarks, N, longest, M, MASKED)
    count, _, begin, end = describe_row(first, last, size, N, M, MASKED)
    if MASKED:
        store_padding(out, H * D, begin, end, N, D, BLOCK_N, BLOCK_D)
    start, stop = part_of(begin, end, BLOCK_N)
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)
        q_block = load_tile(q, tokens, H * D, valid, D, BLOCK_D)
        weights = _softmax(q_block, k_block, count, scale, BLOCK_M, "tf32x3")
        if DROPOUT:
            weights *= _dropout(seed, program, tokens, threshold, BLOCK_M)
        result = dot(weights.to(w_block.dtype), w_block)
        if BANDS:
            window = tokens - TAPS // 2
            result = dot(band, load_window(v, window, mask, row, N, H, MASKED, D, BLOCK_D), result)
            window += BLOCK_N
            result = dot(band_1, load_window(v, window, mask, row, N, H, MASKED, D, BLOCK_D), result)
            if window_blocks(TAPS, BLOCK_N) > 2:
                window += BLOCK_N
                result = dot(band_2, load_window(v, window, mask, row, N, H, MASKED, D, BLOCK_D), result)
        elif TAPS > 0:
            result = convolve(v, taps, tokens, result, mask, row, N, H, MASKED, TAPS, False, D, BLOCK_D)
        if MASKED:
            result = tl.where(valid[:, None], result, 0.0)
        store_tile(out, tokens, H * D, tokens < stop, result, D, BLOCK_D)


@kernel
def _token_attention_bwd_kernel(
    q, k_landmarks, w, do, dq, partial_dk_landmarks, partial_dw, seed, threshold, scale,
    mask, positions, sizes, exists, N, H, longest,
    MASKED: tl.constexpr, DROPOUT: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Float32 is multiplied without tensor cores, which would need all landmarks in shared memory twice."""
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    head = (row * N * H + program % H) * D
    q += head
    do += head
    dq += head
    landmarks = tl.arange(0, BLOCK_M)
    inside = landmarks < M
    k_block = load_tile(k_landmarks + program * M * D, landmarks, D, inside, D, BLOCK_D).to(q.dtype.element_ty)
    w_block = load_tile(w + program * M * D, landmarks, D, inside, D, BLOCK_D)
    first, last, size = find_segments(positions, sizes, exists, row, landmarks, N, longest, M, MASKED)
    count, _, begin, end = describe_row(first, last, size, N, M, MASKED)
    if MASKED:
        store_padding(dq, H * D, begin, end, N, D, BLOCK_N, BLOCK_D)
    dk = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dw = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start, stop = part_of(begin, end, BLOCK_N)
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)
        q_block = load_tile(q, tokens, H * D, valid, D, BLOCK_D)
        # Zero at invalid tokens: their results are zero for all inputs.
        g = load_tile(do, tokens, H * D, valid, D, BLOCK_D)
        weights = _softmax(q_block, k_block, count, scale, BLOCK_M, "ieee")
        dweights = dot(g, tl.trans(w_block), None, "ieee")
        dropped = weights
        if DROPOUT:
            kept = _dropout(seed, program, tokens, threshold, BLOCK_M)
            dweights *= kept
            dropped = weights * kept
        dw = dot(tl.trans(dropped.to(g.dtype)), g, dw, "ieee")
        delta = tl.sum(weights * dweights, axis=1)
        ds = (weights * (dweights - delta[:, None]) * scale).to(g.dtype)
        store_tile(dq, tokens, H * D, tokens < stop, dot(ds, k_block, None, "ieee"), D, BLOCK_D)
        dk = dot(tl.trans(ds), q_block, dk, "ieee")
    place = (program * tl.num_programs(0) + tl.program_id(0)) * M * D
    store_tile(partial_dk_landmarks + place, landmarks, D, inside, dk, D, BLOCK_D)
    store_tile(partial_dw + place, landmarks, D, inside, dw, D, BLOCK_D)


def _dropout_arguments(seed: Tensor | None, dropout_p: float) -> dict[str, object]:
    return {"seed": seed, "threshold": round(dropout_p * 2**31), "DROPOUT": seed is not None}


def token_attention_forward(
    q: Tensor,
    k_landmarks: Tensor,
    w: Tensor,
    v: Tensor,
    conv_weight: Tensor | None = None,
    rows: Rows | None = None,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """softmax(q k~ᵀ / √D) W over the landmarks that exist, plus the convolution of V.

    Args:
        q, v: (B, N, H, D). k_landmarks: (B, H, M, D) float32. w: W, (B, H, M, D), in the dtype of `q`. All contiguous.
        conv_weight: (H, 1, T, 1), T odd and at most 65, contiguous, in that dtype; None for no convolution.
        rows: the ragged batch; None where every token is valid.
        seed: (1,) int64, from which the dropped weights of the landmarks are drawn; None to drop none.
        dropout_p: probability of dropping a weight, with a seed.

    Returns: (B, N, H, D), zero at invalid tokens.
    """
    batch, length, heads, _ = q.shape
    taps = 0 if conv_weight is None else conv_weight.shape[2]
    parts, sizes = plan_launch("token_attention_fwd", q, k_landmarks.shape[2], taps)
    out = torch.empty_like(q)
    with on_device(q):
        _token_attention_fwd_kernel[(parts, batch * heads)](
            q, k_landmarks, w, v, conv_weight, out, scale=q.shape[-1] ** -0.5, N=length, H=heads,
            TAPS=taps, **_dropout_arguments(seed, dropout_p), **row_arguments(rows), **sizes,
        )  # fmt: skip
    return out


def token_attention_backward(
    q: Tensor,
    k_landmarks: Tensor,
    w: Tensor,
    do: Tensor,
    rows: Rows | None = None,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, (B, N, H, D), and of k_landmarks and w, (B, H, M, D) float32.

    Args:
        q, k_landmarks, w, rows, seed, dropout_p: as in `token_attention_forward`.
        do: (B, N, H, D), contiguous. What it holds at invalid tokens is ignored.
    """
    batch, length, heads, dim = q.shape
    count = k_landmarks.shape[2]
    parts, sizes = plan_launch("token_attention_bwd", q, count)
    partial = q.new_empty(2, batch, heads, parts, count, dim, dtype=torch.float32)
    dq = torch.empty_like(q)
    with on_device(q):
        _token_attention_bwd_kernel[(parts, batch * heads)](
            q, k_landmarks, w, do, dq, *partial, scale=dim**-0.5, N=length, H=heads,
            **_dropout_arguments(seed, dropout_p), **row_arguments(rows), **sizes,
        )  # fmt: skip
    dk_landmarks, dw = partial.squeeze(3) if parts == 1 else partial.sum(dim=3)
    return dq, dk_landmarks, dw
