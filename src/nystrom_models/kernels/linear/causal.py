# SPDX-License-Identifier: Apache-2.0
"""Causal linear attention by chunks, forward and backward.

    out_i = φ(q_i) S_i / (φ(q_i) z_i + ε),  [S_i, z_i] = Σ_(j<=i) φ(k_j) [v_jᵀ, 1]

(eq. 9 to 12 of arXiv:2006.16236.) Here q and k are φ(q) and φ(k). The tokens are split into parts of a fixed size. A
first launch sums each part; from the sums before it, a second one goes through each part chunk by chunk, with the
scores of a chunk's own tokens. Parts do not depend on the length, so that not even a rounding of a token's result
depends on what comes later.

Backward, with r_i = 1 / (q_i z_i + ε), g_i = r_i do_i and e_i = -g_i · out_i:

    dq_i = Σ_(j<=i) (g_i · v_j + e_i) k_j,  dk_j = Σ_(i>=j) (g_i · v_j + e_i) q_i,  dv_j = Σ_(i>=j) (q_i · k_j) g_i

where the first sum takes the states S, and the others the states R_j = Σ_(i>=j) q_iᵀ [g_i, e_i], from the last part to
the first. What all values have in common cancels in g_i · v_j + e_i: so e is made of the rounded g and the unrounded
out, which is computed again, and states are multiplied in three products of TF32, as exact as float32.

In units of a tensor (B, N, H, D) with F = D features, the forward pass moves six: keys and values are read twice; four
could not be avoided. The backward pass moves 13 of seven.

Legend: B batch, H heads, N tokens, F features, D head size, P parts.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import dot, kernel, load_tile, on_device, store_tile, tile

EPSILON = tl.constexpr(1e-6)
# Tokens of a part and of a chunk. Part of the results: another number rounds otherwise.
PART_TOKENS = 512
CHUNK_TOKENS = 64


@triton.jit
def _valid(mask, row, tokens, stop, N, MASKED: tl.constexpr):
    inside = tokens < stop
    if MASKED:
        inside = tl.load(mask + row * N + tokens, mask=inside, other=0) != 0
    return inside


@triton.jit
def _load_state(states, D: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK_F, BLOCK_D) and the last column (BLOCK_F) of a state (F, D + 1)."""
    features = tl.arange(0, BLOCK_F)
    state = load_tile(states, features, D + 1, features < F, D, BLOCK_D)
    return state, tl.load(states + features * (D + 1) + D, mask=features < F, other=0.0)


@triton.jit
def _gradients(
    do, reciprocal, column, tokens, stop, stride, D: tl.constexpr, BLOCK_D: tl.constexpr, dtype: tl.constexpr
):
    """g (len(tokens), BLOCK_D) in `dtype` and e (len(tokens))."""
    inside = tokens < stop
    g = load_tile(do, tokens, stride, inside, D, BLOCK_D).to(tl.float32)
    g *= tl.load(reciprocal + tokens, mask=inside, other=0.0)[:, None]
    return g.to(dtype), tl.load(column + tokens, mask=inside, other=0.0)


@kernel
def _part_sums_kernel(
    left, right, reciprocal, column, sums, mask, N, H,
    MASKED: tl.constexpr, BACKWARD: tl.constexpr, G: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Of each part Σ left_iᵀ [right_i, 1], or backward Σ left_iᵀ [g_i, e_i], g of right = do: (F, D + 1)."""
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    head = row * N * H + program % H
    left += head * F
    right += head * D
    total = tl.zeros([BLOCK_F, BLOCK_D], tl.float32)
    last = tl.zeros([BLOCK_F], tl.float32)
    start = tl.program_id(0) * PART
    stop = tl.minimum(start + PART, N)
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        valid = _valid(mask, row, tokens, stop, N, MASKED)
        a = load_tile(left, tokens, H * F, valid, F, BLOCK_F)
        if BACKWARD:
            b, e = _gradients(
                right, reciprocal + program * N, column + program * N, tokens, stop, H * D, D, BLOCK_D, G
            )
            last += tl.sum(a.to(tl.float32) * e[:, None], axis=0)
        else:
            b = load_tile(right, tokens, H * D, valid, D, BLOCK_D)
            last += tl.sum(a.to(tl.float32), axis=0)
        total = dot(tl.trans(a).to(b.dtype), b, total)
    sums += (program * tl.num_programs(0) + tl.program_id(0)) * F * (D + 1)
    features = tl.arange(0, BLOCK_F)
    store_tile(sums, features, D + 1, features < F, total, D, BLOCK_D)
    tl.store(sums + features * (D + 1) + D, last, mask=features < F)


@triton.jit
def _attend(q, k, v, state, last, BLOCK_N: tl.constexpr):
    """A chunk's outputs, float32, and the reciprocals of their normalisers."""
    index = tl.arange(0, BLOCK_N)
    scores = tl.where(index[:, None] >= index[None, :], dot(q, tl.trans(k)), 0.0)
    precise = q.to(tl.float32)
    out = dot(precise, state, dot(scores.to(v.dtype), v))
    reciprocal = 1.0 / (tl.sum(scores, axis=1) + tl.sum(precise * last[None, :], axis=1) + EPSILON)
    return out * reciprocal[:, None], reciprocal


@kernel
def _causal_fwd_kernel(
    q, k, v, states, out, mask, N, H,
    MASKED: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    head = row * N * H + program % H
    states += (program * (tl.num_programs(0) + 1) + tl.program_id(0)) * F * (D + 1)
    state, last = _load_state(states, D, F, BLOCK_F, BLOCK_D)
    start = tl.program_id(0) * PART
    stop = tl.minimum(start + PART, N)
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        inside = tokens < stop
        valid = _valid(mask, row, tokens, stop, N, MASKED)
        q_block = load_tile(q + head * F, tokens, H * F, inside, F, BLOCK_F)
        k_block = load_tile(k + head * F, tokens, H * F, valid, F, BLOCK_F)
        v_block = load_tile(v + head * D, tokens, H * D, valid, D, BLOCK_D)
        result, _ = _attend(q_block, k_block, v_block, state, last, BLOCK_N)
        store_tile(out + head * D, tokens, H * D, inside, result, D, BLOCK_D)
        state = dot(tl.trans(k_block), v_block, state)
        last += tl.sum(k_block.to(tl.float32), axis=0)


@kernel
def _causal_bwd_dq_kernel(
    q, k, v, do, states, dq, reciprocal, column, mask, N, H,
    MASKED: tl.constexpr, G: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq, and r and e of each token for what follows."""
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    head = row * N * H + program % H
    states += (program * (tl.num_programs(0) + 1) + tl.program_id(0)) * F * (D + 1)
    state, last = _load_state(states, D, F, BLOCK_F, BLOCK_D)
    index = tl.arange(0, BLOCK_N)
    start = tl.program_id(0) * PART
    stop = tl.minimum(start + PART, N)
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        inside = tokens < stop
        valid = _valid(mask, row, tokens, stop, N, MASKED)
        q_block = load_tile(q + head * F, tokens, H * F, inside, F, BLOCK_F)
        k_block = load_tile(k + head * F, tokens, H * F, valid, F, BLOCK_F)
        v_block = load_tile(v + head * D, tokens, H * D, valid, D, BLOCK_D)
        out, r = _attend(q_block, k_block, v_block, state, last, BLOCK_N)
        tl.store(reciprocal + program * N + tokens, r, mask=inside)
        g = load_tile(do + head * D, tokens, H * D, inside, D, BLOCK_D).to(tl.float32) * r[:, None]
        g = g.to(G)
        e = -tl.sum(g.to(tl.float32) * out, axis=1)
        tl.store(column + program * N + tokens, e, mask=inside)
        dscores = dot(g, tl.trans(v_block).to(G)) + e[:, None]
        dscores = tl.where(index[:, None] >= index[None, :], dscores, 0.0)
        result = dot(dscores.to(G), k_block.to(G)) + e[:, None] * last[None, :]
        result = dot(g.to(tl.float32), tl.trans(state), result)
        store_tile(dq + head * F, tokens, H * F, inside, result, F, BLOCK_F)
        state = dot(tl.trans(k_block), v_block, state)
        last += tl.sum(k_block.to(tl.float32), axis=0)


@kernel
def _causal_bwd_dkv_kernel(
    q, k, v, do, states, reciprocal, column, dk, dv, mask, N, H,
    MASKED: tl.constexpr, G: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """states: R of the tokens after each part, the last part's first."""
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    head = row * N * H + program % H
    parts = tl.num_programs(0)
    states += (program * (parts + 1) + parts - 1 - tl.program_id(0)) * F * (D + 1)
    state, last = _load_state(states, D, F, BLOCK_F, BLOCK_D)
    index = tl.arange(0, BLOCK_N)
    start = tl.program_id(0) * PART
    stop = tl.minimum(start + PART, N)
    blocks = tl.cdiv(stop - start, BLOCK_N)
    for step in range(blocks):
        tokens = start + (blocks - 1 - step) * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = tokens < stop
        valid = _valid(mask, row, tokens, stop, N, MASKED)
        q_block = load_tile(q + head * F, tokens, H * F, inside, F, BLOCK_F)
        k_block = load_tile(k + head * F, tokens, H * F, valid, F, BLOCK_F)
        v_block = load_tile(v + head * D, tokens, H * D, valid, D, BLOCK_D)
        g, e = _gradients(
            do + head * D, reciprocal + program * N, column + program * N, tokens, stop, H * D, D, BLOCK_D, G
        )
        # Rows are keys here, and columns the queries that are not before them.
        after = index[:, None] <= index[None, :]
        scores = tl.where(after, dot(k_block, tl.trans(q_block)), 0.0)
        result = dot(k_block.to(tl.float32), state, dot(scores.to(G), g))
        store_tile(dv + head * D, tokens, H * D, inside, result, D, BLOCK_D)
        dscores = tl.where(after, dot(v_block.to(G), tl.trans(g)) + e[None, :], 0.0)
        result = dot(dscores.to(G), q_block.to(G)) + last[None, :]
        result = dot(v_block.to(tl.float32), tl.trans(state), result)
        if MASKED:
            result = tl.where(valid[:, None], result, 0.0)
        store_tile(dk + head * F, tokens, H * F, inside, result, F, BLOCK_F)
        state = dot(tl.trans(q_block).to(G), g, state)
        last += tl.sum(q_block.to(tl.float32) * e[:, None], axis=0)


def _sizes(q: Tensor, v: Tensor) -> dict[str, Any]:
    features, dim = q.shape[-1], v.shape[-1]
    wide = tile(features) * tile(dim) > 64 * 64
    precise = v.dtype == torch.float32
    return {
        "N": q.shape[1],
        "H": q.shape[2],
        "F": features,
        "D": dim,
        "PART": PART_TOKENS,
        "BLOCK_N": CHUNK_TOKENS // 2 if precise or wide else CHUNK_TOKENS,
        "BLOCK_F": tile(features),
        "BLOCK_D": tile(dim),
        "num_warps": 8 if wide else 4,
        "num_stages": 1 if precise or wide else 2,
    }


def _mask(mask: Tensor | None) -> dict[str, Any]:
    if mask is None:
        return {"mask": None, "MASKED": False}
    return {"mask": mask.contiguous().view(torch.uint8), "MASKED": True}


def _add_up(first: Tensor | None, sums: Tensor) -> Tensor:
    """(B, H, P + 1, F, D + 1) of sums (B, H, P, F, D + 1): `first`, and with each of the sums added, one after one."""
    first = torch.zeros_like(sums[:, :, 0]) if first is None else first.to(torch.float32)
    return torch.cat([first[:, :, None], sums], dim=2).cumsum(dim=2)


def _gradient_dtype(dtype: torch.dtype) -> Any:
    """Of g, which may exceed float16's range where a normaliser is small."""
    return {torch.bfloat16: tl.bfloat16}.get(dtype, tl.float32)


def causal_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The outputs (B, N, H, D), and the states (B, H, P + 1, F, D + 1) float32 before each part and after the last.

    Args:
        q, k: φ(q), φ(k), (B, N, H, F). v: (B, N, H, D), of the same dtype, all contiguous.
        mask: (B, N) bool. state: (B, H, F, D + 1), of the tokens before; None: zeros.
    """
    batch, length, heads, features = q.shape
    grid = (triton.cdiv(length, PART_TOKENS), batch * heads)
    sums = q.new_empty(batch, heads, grid[0], features, v.shape[-1] + 1, dtype=torch.float32)
    out = torch.empty_like(v)
    with on_device(q):
        sizes, masked = _sizes(q, v), _mask(mask)
        _part_sums_kernel[grid](k, v, None, None, sums, BACKWARD=False, G=None, **masked, **sizes)
        states = _add_up(state, sums)
        _causal_fwd_kernel[grid](q, k, v, states, out, **masked, **sizes)
    return out, states


def causal_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    states: Tensor,
    do: Tensor,
    dfinal: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v and of the first state, from those of the outputs and of the last state.

    states: of `causal_forward`. do: (B, N, H, D), contiguous. dfinal: (B, H, F, D + 1); None: zeros.
    """
    batch, length, heads, _ = q.shape
    grid = (triton.cdiv(length, PART_TOKENS), batch * heads)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    reciprocal = q.new_empty(batch, heads, length, dtype=torch.float32)
    column = torch.empty_like(reciprocal)
    sums = torch.empty_like(states[:, :, 1:])
    with on_device(q):
        sizes, masked = _sizes(q, v) | {"G": _gradient_dtype(q.dtype)}, _mask(mask)
        _causal_bwd_dq_kernel[grid](q, k, v, do, states, dq, reciprocal, column, **masked, **sizes)
        # Queries count, whether their tokens are valid or not: their outputs have gradients.
        _part_sums_kernel[grid](q, do, reciprocal, column, sums, BACKWARD=True, **_mask(None), **sizes)
        after = _add_up(dfinal, sums.flip(2))
        _causal_bwd_dkv_kernel[grid](q, k, v, do, after, reciprocal, column, dk, dv, **masked, **sizes)
    return dq, dk, dv, after[:, :, -1].clone()
