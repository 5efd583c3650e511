# SPDX-License-Identifier: Apache-2.0
"""Causal linear attention by chunks, forward and backward.

    out_i = φ(q_i) S_i / (φ(q_i) z_i + ε),  [S_i, z_i] = Σ_(j<=i) φ(k_j) [v_jᵀ, 1]

(eq. 9 to 12 of arXiv:2006.16236.) Here q and k are φ(q) and φ(k). The tokens are split into parts of a fixed size. A
first launch sums over each part. A second launch starts each part from the sum of the parts before it and goes through
the part chunk by chunk; within a chunk it computes the scores of the tokens. The parts do not depend on the length, so
a token's result does not depend on later tokens, not even by rounding.

Backward, with r_i = 1 / (q_i z_i + ε), g_i = r_i do_i and e_i = -g_i · out_i:

    dq_i = Σ_(j<=i) (g_i · v_j + e_i) k_j,  dk_j = Σ_(i>=j) (g_i · v_j + e_i) q_i,  dv_j = Σ_(i>=j) (q_i · k_j) g_i

The first sum uses the states S; the other two use the states R_j = Σ_(i>=j) q_iᵀ [g_i, e_i], from the last part to the
first. A component that all values share cancels in g_i · v_j + e_i. To keep this exact, e is computed from the rounded
g and the unrounded out, which is recomputed, and a state is not rounded when it is multiplied: in half precision it is
split into a sum of two operands.

Memory traffic in tensors of size (B, N, H, D), with F = D features: the forward pass reads or writes six, because keys
and values are read twice; at least four are needed. The backward pass reads or writes 13; at least seven are needed.

Legend: B batch, H heads, N tokens, F features, D head size, P parts.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import dot, kernel, load_tile, on_device, store_tile, tile

EPSILON = tl.constexpr(1e-6)
# Number of tokens of a part. The rounding of the results depends on it.
PART_TOKENS = 512


@triton.jit
def _rounded(a, dtype: tl.constexpr):
    """`a` rounded as an operand of products in `dtype`. For float32, used with float16 inputs: to the nearest TF32,
    which has as many mantissa bits as float16.
    """
    if dtype == tl.float32:
        bits = (a.to(tl.float32).to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return bits.to(tl.float32, bitcast=True)
    else:
        return a.to(dtype)


@triton.jit
def _times(a, b, acc, HALF: tl.constexpr, G: tl.constexpr):
    """a b + acc, where one operand is in half precision and the other is rounded to G, or both are float32.

    Float32 is multiplied without tensor cores, which would need each operand in registers twice.
    """
    if HALF:
        return dot(a.to(G), b.to(G), acc, "tf32")
    else:
        return dot(a, b, acc, "ieee")


@triton.jit
def _times_state(a, state, acc, HALF: tl.constexpr, G: tl.constexpr):
    """a state + acc, with `a` as in `_times`; in half precision, the float32 state is split into two operands."""
    if HALF:
        large = _rounded(state, G)
        acc = _times(a, state - large.to(tl.float32), acc, HALF, G)
        return _times(a, large, acc, HALF, G)
    else:
        return _times(a, state, acc, HALF, G)


@triton.jit
def _valid(mask, row, tokens, stop, N, MASKED: tl.constexpr):
    inside = tokens < stop
    if MASKED:
        inside = tl.load(mask + row * N + tokens, mask=inside, other=0) != 0
    return inside


@triton.jit
def _load_state(states, D: tl.constexpr, F: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr):
    """A state (F, D + 1) as its first D columns (BLOCK_F, BLOCK_D) and its last column (BLOCK_F)."""
    features = tl.arange(0, BLOCK_F)
    state = load_tile(states, features, D + 1, features < F, D, BLOCK_D)
    return state, tl.load(states + features * (D + 1) + D, mask=features < F, other=0.0)


@triton.jit
def _gradients(
    do,
    reciprocal,
    column,
    tokens,
    stop,
    stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HALF: tl.constexpr,
    dtype: tl.constexpr,
):
    """g (len(tokens), BLOCK_D), rounded as an operand of products, and e (len(tokens))."""
    inside = tokens < stop
    g = load_tile(do, tokens, stride, inside, D, BLOCK_D).to(tl.float32)
    g *= tl.load(reciprocal + tokens, mask=inside, other=0.0)[:, None]
    if HALF:
        g = _rounded(g, dtype)
    return g, tl.load(column + tokens, mask=inside, other=0.0)


@kernel
def _part_sums_kernel(
    left, right, reciprocal, column, sums, mask, N, H,
    MASKED: tl.constexpr, BACKWARD: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr,
    F: tl.constexpr, D: tl.constexpr,
    PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The sum of each part, (F, D + 1): Σ left_iᵀ [right_i, 1]; if BACKWARD, Σ left_iᵀ [g_i, e_i] with right = do."""
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
                right, reciprocal + program * N, column + program * N, tokens, stop, H * D, D, BLOCK_D, HALF, G
            )
            last += tl.sum(a.to(tl.float32) * e[:, None], axis=0)
            total = _times(tl.trans(a), b, total, HALF, G)
        else:
            b = load_tile(right, tokens, H * D, valid, D, BLOCK_D)
            last += tl.sum(a.to(tl.float32), axis=0)
            total = dot(tl.trans(a), b, total, "ieee")
    sums += (program * tl.num_programs(0) + tl.program_id(0)) * F * (D + 1)
    features = tl.arange(0, BLOCK_F)
    store_tile(sums, features, D + 1, features < F, total, D, BLOCK_D)
    tl.store(sums + features * (D + 1) + D, last, mask=features < F)


@triton.jit
def _attend(q, k, v, state, last, HALF: tl.constexpr, G: tl.constexpr, BLOCK_N: tl.constexpr):
    """The outputs of a chunk, float32, and the reciprocals of their normalisers."""
    index = tl.arange(0, BLOCK_N)
    scores = tl.where(index[:, None] >= index[None, :], dot(q, tl.trans(k), None, "ieee"), 0.0)
    out = _times_state(q, state, dot(scores.to(v.dtype), v, None, "ieee"), HALF, G)
    reciprocal = 1.0 / (tl.sum(scores, axis=1) + tl.sum(q.to(tl.float32) * last[None, :], axis=1) + EPSILON)
    return out * reciprocal[:, None], reciprocal


@kernel
def _causal_fwd_kernel(
    q, k, v, states, out, mask, N, H,
    MASKED: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
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
        result, _ = _attend(q_block, k_block, v_block, state, last, HALF, G, BLOCK_N)
        store_tile(out + head * D, tokens, H * D, inside, result, D, BLOCK_D)
        state = dot(tl.trans(k_block), v_block, state, "ieee")
        last += tl.sum(k_block.to(tl.float32), axis=0)


@kernel
def _causal_bwd_dq_kernel(
    q, k, v, do, states, dq, reciprocal, column, mask, N, H,
    MASKED: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq, and r and e of each token for the next launches."""
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
        out, r = _attend(q_block, k_block, v_block, state, last, HALF, G, BLOCK_N)
        tl.store(reciprocal + program * N + tokens, r, mask=inside)
        g = load_tile(do + head * D, tokens, H * D, inside, D, BLOCK_D).to(tl.float32) * r[:, None]
        if HALF:
            g = _rounded(g, G)
        e = -tl.sum(g.to(tl.float32) * out, axis=1)
        tl.store(column + program * N + tokens, e, mask=inside)
        dscores = _times(g, tl.trans(v_block), None, HALF, G) + e[:, None]
        dscores = tl.where(index[:, None] >= index[None, :], dscores, 0.0)
        if HALF:
            dscores = _rounded(dscores, G)
        result = _times(dscores, k_block, e[:, None] * last[None, :], HALF, G)
        result = _times_state(g, tl.trans(state), result, HALF, G)
        store_tile(dq + head * F, tokens, H * F, inside, result, F, BLOCK_F)
        state = dot(tl.trans(k_block), v_block, state, "ieee")
        last += tl.sum(k_block.to(tl.float32), axis=0)


@kernel
def _causal_bwd_dkv_kernel(
    q, k, v, do, states, reciprocal, column, dk, dv, mask, N, H,
    MASKED: tl.constexpr, HALF: tl.constexpr, G: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_F: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """states: the state R of the tokens after each part, in order from the last part to the first."""
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
            do + head * D, reciprocal + program * N, column + program * N, tokens, stop, H * D, D, BLOCK_D, HALF, G
        )
        # Rows are keys; columns are queries, masked where they come before the key.
        after = index[:, None] <= index[None, :]
        scores = tl.where(after, dot(k_block, tl.trans(q_block), None, "ieee"), 0.0)
        if HALF:
            scores = _rounded(scores, G)
        result = _times_state(k_block, state, _times(scores, g, None, HALF, G), HALF, G)
        store_tile(dv + head * D, tokens, H * D, inside, result, D, BLOCK_D)
        dscores = tl.where(after, _times(v_block, tl.trans(g), None, HALF, G) + e[None, :], 0.0)
        if HALF:
            dscores = _rounded(dscores, G)
        result = _times(dscores, q_block, None, HALF, G) + last[None, :]
        result = _times_state(v_block, tl.trans(state), result, HALF, G)
        if MASKED:
            result = tl.where(valid[:, None], result, 0.0)
        store_tile(dk + head * F, tokens, H * F, inside, result, F, BLOCK_F)
        state = _times(tl.trans(q_block), g, state, HALF, G)
        last += tl.sum(q_block.to(tl.float32) * e[:, None], axis=0)


def _sizes(q: Tensor, v: Tensor) -> dict[str, Any]:
    features, dim = q.shape[-1], v.shape[-1]
    large = tile(features) * tile(dim) > 64 * 64
    # With bfloat16 inputs all operands are bfloat16. With float16 inputs those of the gradients are float32.
    wide = large or v.dtype != torch.bfloat16
    return {
        "HALF": v.dtype != torch.float32,
        "G": tl.bfloat16 if v.dtype == torch.bfloat16 else tl.float32,
        "N": q.shape[1],
        "H": q.shape[2],
        "F": features,
        "D": dim,
        "PART": PART_TOKENS,
        "BLOCK_N": 16 if v.dtype == torch.float32 or (large and v.dtype == torch.float16) else 32 if wide else 64,
        "BLOCK_F": tile(features),
        "BLOCK_D": tile(dim),
        "num_warps": 8 if wide else 4,
        "num_stages": 1 if wide else 2,
    }


def _mask(mask: Tensor | None) -> dict[str, Any]:
    if mask is None:
        return {"mask": None, "MASKED": False}
    return {"mask": mask.contiguous().view(torch.uint8), "MASKED": True}


def _add_up(first: Tensor | None, sums: Tensor) -> Tensor:
    """The running sums (B, H, P + 1, F, D + 1) of `sums` (B, H, P, F, D + 1), which start from `first`."""
    first = torch.zeros_like(sums[:, :, 0]) if first is None else first.to(torch.float32)
    return torch.cat([first[:, :, None], sums], dim=2).cumsum(dim=2)


def causal_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The outputs (B, N, H, D), and the states (B, H, P + 1, F, D + 1) float32 before each part and after the last.

    Args:
        q, k: φ(q), φ(k), (B, N, H, F). v: (B, N, H, D), of the same dtype, all contiguous.
        mask: (B, N) bool. state: (B, H, F, D + 1), after the previous tokens; None: zeros.
    """
    batch, length, heads, features = q.shape
    grid = (triton.cdiv(length, PART_TOKENS), batch * heads)
    sums = q.new_empty(batch, heads, grid[0], features, v.shape[-1] + 1, dtype=torch.float32)
    out = torch.empty_like(v)
    with on_device(q):
        sizes, masked = _sizes(q, v), _mask(mask)
        _part_sums_kernel[grid](k, v, None, None, sums, BACKWARD=False, **masked, **sizes)
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
        sizes, masked = _sizes(q, v), _mask(mask)
        _causal_bwd_dq_kernel[grid](q, k, v, do, states, dq, reciprocal, column, **masked, **sizes)
        # Not masked: the outputs of invalid queries have gradients, too.
        _part_sums_kernel[grid](q, do, reciprocal, column, sums, BACKWARD=True, **_mask(None), **sizes)
        after = _add_up(dfinal, sums.flip(2))
        _causal_bwd_dkv_kernel[grid](q, k, v, do, after, reciprocal, column, dk, dv, **masked, **sizes)
    return dq, dk, dv, after[:, :, -1].clone()
