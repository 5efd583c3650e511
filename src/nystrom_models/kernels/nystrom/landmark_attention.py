# SPDX-License-Identifier: Apache-2.0
"""The attention of the landmarks, softmax(q~ kᵀ / √D) v with M queries over N valid keys, and the keys' landmarks.

The keys are read once for both. They are split into parts, so that a few heads are enough to occupy a device; if there
are several parts, a second launch merges them by the logarithms of their sums. Parts lie between the first and the
last valid token of a row: padding before and after is never read. Legend as in `rows.py`; P parts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import LOG2_E, dot, kernel, load_tile, on_device, store_tile
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

# The logarithm of a sum over no token: finite, so that differences are not NaN.
EMPTY = tl.constexpr(-1e30)
# Number of landmarks that a program of the merge processes.
_MERGED = 16


@triton.jit
def _scores(q, k, tokens, valid, first, is_exact, scale, MASKED: tl.constexpr, FLOAT32: tl.constexpr):
    """Base-two logarithms of the unnormalised attention weights (BLOCK_M, BLOCK_N)."""
    scores = dot(q, tl.trans(k), None, FLOAT32) * (scale * LOG2_E)
    if MASKED:
        # A landmark that is a single token gets the value of that token. Rows of absent landmarks are arbitrary.
        own_scores = tl.where(first[:, None] == tokens[None, :], 0.0, -float("inf"))
        scores = tl.where(is_exact, own_scores, scores)
    return tl.where(valid[None, :], scores, -float("inf"))


@triton.jit
def _members(first, stop, tokens, valid, dtype: tl.constexpr):
    """(BLOCK_M, BLOCK_N), 1 where a token belongs to a landmark's segment."""
    inside = (tokens[None, :] >= first[:, None]) & (tokens[None, :] < stop[:, None]) & valid[None, :]
    # Through float32, because the interpreter cannot convert bool to bfloat16.
    return inside.to(tl.float32).to(dtype)


@kernel
def _landmark_attention_fwd_kernel(
    q_landmarks, k, v, partial_out, partial_k_landmarks, partial_lse, scale,
    mask, positions, sizes, exists, N, H, longest,
    MASKED: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    k += (row * N * H + program % H) * D
    v += (row * N * H + program % H) * D
    landmarks = tl.arange(0, BLOCK_M)
    q = load_tile(q_landmarks + program * M * D, landmarks, D, landmarks < M, D, BLOCK_D)
    first, last, size = find_segments(positions, sizes, exists, row, landmarks, N, longest, M, MASKED)
    _, is_exact, begin, end = describe_row(first, last, size, N, M, MASKED)
    start, stop = part_of(begin, end, BLOCK_N)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)
        k_block = load_tile(k, tokens, H * D, valid, D, BLOCK_D)
        v_block = load_tile(v, tokens, H * D, valid, D, BLOCK_D)
        sums = dot(_members(first, last, tokens, valid, k.dtype.element_ty), k_block, sums)
        scores = _scores(q, k_block, tokens, valid, first, is_exact, scale, MASKED, "tf32x3")
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        # Finite also before the first valid key.
        reference = tl.maximum(new_largest, EMPTY)
        weights = tl.exp2(scores - reference[:, None])
        keep = tl.exp2(largest - reference)
        total = total * keep + tl.sum(weights, axis=1)
        out = dot(weights.to(v.dtype.element_ty), v_block, out * keep[:, None])
        largest = new_largest
    total_or_one = tl.where(total > 0, total, 1.0)
    place = program * tl.num_programs(0) + tl.program_id(0)
    store_tile(partial_out + place * M * D, landmarks, D, landmarks < M, out / total_or_one[:, None], D, BLOCK_D)
    means = sums / tl.maximum(size, 1).to(tl.float32)[:, None]
    store_tile(partial_k_landmarks + place * M * D, landmarks, D, landmarks < M, means, D, BLOCK_D)
    lse = tl.where(total > 0, largest + tl.log2(total_or_one), EMPTY)
    tl.store(partial_lse + place * M + landmarks, lse, mask=landmarks < M)


@kernel
def _merge_kernel(
    partial_out, partial_k_landmarks, partial_lse, out, k_landmarks, lse, parts,
    M: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """For some landmarks of a head: the mean of the parts, weighted by their sums, and the sum of the keys' parts."""
    program = tl.program_id(0).to(tl.int64)
    landmarks = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = landmarks < M
    largest = tl.full([BLOCK_M], EMPTY, tl.float32)
    for part in range(parts):
        place = (program * parts + part) * M
        largest = tl.maximum(largest, tl.load(partial_lse + place + landmarks, mask=inside, other=EMPTY))
    total = tl.zeros([BLOCK_M], tl.float32)
    merged = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    means = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in range(parts):
        place = (program * parts + part) * M
        share = tl.exp2(tl.load(partial_lse + place + landmarks, mask=inside, other=EMPTY) - largest)
        merged += share[:, None] * load_tile(partial_out + place * D, landmarks, D, inside, D, BLOCK_D)
        means += load_tile(partial_k_landmarks + place * D, landmarks, D, inside, D, BLOCK_D)
        total += share
    store_tile(out + program * M * D, landmarks, D, inside, merged / total[:, None], D, BLOCK_D)
    store_tile(k_landmarks + program * M * D, landmarks, D, inside, means, D, BLOCK_D)
    tl.store(lse + program * M + landmarks, largest + tl.log2(total), mask=inside)


@kernel
def _landmark_attention_bwd_kernel(
    q_landmarks, k, v, out, lse, do, dk_landmarks, partial_dq_landmarks, dk, dv, scale,
    mask, positions, sizes, exists, N, H, longest,
    MASKED: tl.constexpr, ADD: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """ADD: dv already holds another gradient of the values, with zeros at the padding before and after a row.

    Float32 is multiplied without tensor cores, which would need all landmarks in shared memory twice.
    """
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    head = (row * N * H + program % H) * D
    k += head
    v += head
    dk += head
    dv += head
    landmarks = tl.arange(0, BLOCK_M)
    inside = landmarks < M
    q = load_tile(q_landmarks + program * M * D, landmarks, D, inside, D, BLOCK_D)
    # Rounded before delta is summed, so that the weights times (do v - delta) sum to zero over the tokens: a component
    # that all keys share then cancels.
    g = load_tile(do + program * M * D, landmarks, D, inside, D, BLOCK_D).to(q.dtype)
    seen = load_tile(out + program * M * D, landmarks, D, inside, D, BLOCK_D)
    delta = tl.sum(g.to(tl.float32) * seen, axis=1)
    log_total = tl.load(lse + program * M + landmarks, mask=inside, other=0.0)
    first, last, size = find_segments(positions, sizes, exists, row, landmarks, N, longest, M, MASKED)
    _, is_exact, begin, end = describe_row(first, last, size, N, M, MASKED)
    shares = load_tile(dk_landmarks + program * M * D, landmarks, D, inside, D, BLOCK_D)
    shares = (shares / tl.maximum(size, 1).to(tl.float32)[:, None]).to(q.dtype)
    if MASKED:
        store_padding(dk, H * D, begin, end, N, D, BLOCK_N, BLOCK_D)
        if not ADD:
            store_padding(dv, H * D, begin, end, N, D, BLOCK_N, BLOCK_D)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    start, stop = part_of(begin, end, BLOCK_N)
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)
        k_block = load_tile(k, tokens, H * D, valid, D, BLOCK_D)
        v_block = load_tile(v, tokens, H * D, valid, D, BLOCK_D)
        if ADD:
            dv_block = load_tile(dv, tokens, H * D, tokens < stop, D, BLOCK_D).to(tl.float32)
        else:
            dv_block = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        scores = _scores(q, k_block, tokens, valid, first, is_exact, scale, MASKED, "ieee")
        weights = tl.exp2(scores - log_total[:, None])
        ds = weights * (dot(g, tl.trans(v_block), None, "ieee") - delta[:, None]) * scale
        if MASKED:
            ds = tl.where(is_exact, 0.0, ds)
        ds = ds.to(q.dtype)
        dq = dot(ds, k_block, dq, "ieee")
        # Zero at invalid tokens between valid ones, because their weights are zero.
        dk_block = dot(tl.trans(ds), q, None, "ieee")
        dk_block = dot(tl.trans(_members(first, last, tokens, valid, q.dtype)), shares, dk_block, "ieee")
        store_tile(dk, tokens, H * D, tokens < stop, dk_block, D, BLOCK_D)
        dv_block = dot(tl.trans(weights.to(q.dtype)), g, dv_block, "ieee")
        store_tile(dv, tokens, H * D, tokens < stop, dv_block, D, BLOCK_D)
    place = program * tl.num_programs(0) + tl.program_id(0)
    store_tile(partial_dq_landmarks + place * M * D, landmarks, D, inside, dq, D, BLOCK_D)


def landmark_attention_forward(
    q_landmarks: Tensor, k: Tensor, v: Tensor, rows: Rows | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """softmax(q~ kᵀ / √D) v over the valid keys, without storing an M×N matrix, and the segment means of the keys.

    Args:
        q_landmarks: (B, H, M, D), contiguous. k, v: (B, N, H, D), of the same dtype, contiguous.
        rows: the ragged batch; None where every token is valid.

    Returns: the context (B, H, M, D); the base-two logarithms (B, H, M) of the sums of the weights; the keys'
    landmarks (B, H, M, D), zero where they do not exist; all float32. Where every token of a row is its own landmark,
    its context is the value of that token. A row without a valid token gets zeros.
    """
    batch, length, heads, dim = k.shape
    count = q_landmarks.shape[2]
    parts, sizes = plan_launch("landmark_attention_fwd", k, count)
    partial_out = k.new_empty(batch, heads, parts, count, dim, dtype=torch.float32)
    partial_k_landmarks = torch.empty_like(partial_out)
    partial_lse = partial_out.new_empty(batch, heads, parts, count)
    with on_device(k):
        _landmark_attention_fwd_kernel[(parts, batch * heads)](
            q_landmarks, k, v, partial_out, partial_k_landmarks, partial_lse, dim**-0.5,
            N=length, H=heads, **row_arguments(rows), **sizes,
        )  # fmt: skip
        if parts == 1:
            return partial_out.squeeze(2), partial_lse.squeeze(2), partial_k_landmarks.squeeze(2)
        out = partial_out.new_empty(batch, heads, count, dim)
        k_landmarks, lse = torch.empty_like(out), out.new_empty(batch, heads, count)
        _merge_kernel[(batch * heads, triton.cdiv(count, _MERGED))](
            partial_out, partial_k_landmarks, partial_lse, out, k_landmarks, lse, parts,
            M=count, D=dim, BLOCK_M=_MERGED, BLOCK_D=sizes["BLOCK_D"],
        )  # fmt: skip
    return out, lse, k_landmarks


def landmark_attention_backward(
    q_landmarks: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    do: Tensor,
    dk_landmarks: Tensor,
    dv: Tensor | None = None,
    rows: Rows | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the queries' landmarks, as P parts of a sum (B, H, P, M, D) float32, and of keys and values.

    Args:
        q_landmarks, k, v: as in `landmark_attention_forward`. out, lse: its results.
        do, dk_landmarks: gradients of the context and the keys' landmarks, (B, H, M, D) float32, contiguous.
        dv: (B, N, H, D), contiguous: another gradient of the values, to which this one is added in place.
    """
    batch, length, heads, dim = k.shape
    count = q_landmarks.shape[2]
    parts, sizes = plan_launch("landmark_attention_bwd", k, count)
    partial_dq_landmarks = out.new_empty(batch, heads, parts, count, dim)
    add = dv is not None
    dk = torch.empty_like(k)
    dv = torch.empty_like(v) if dv is None else dv
    with on_device(k):
        _landmark_attention_bwd_kernel[(parts, batch * heads)](
            q_landmarks, k, v, out, lse, do, dk_landmarks, partial_dq_landmarks, dk, dv, dim**-0.5,
            N=length, H=heads, **row_arguments(rows), ADD=add, **sizes,
        )  # fmt: skip
    return partial_dq_landmarks, dk, dv
