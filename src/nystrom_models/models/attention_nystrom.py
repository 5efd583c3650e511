# SPDX-License-Identifier: Apache-2.0
"""Nyström attention: softmax attention approximated through landmarks, in time and memory linear in the tokens.

Xiong et al. 2021, "Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention", arXiv:2102.03902.

Legend: B batch, H heads, N tokens, L valid tokens of a row, M landmarks, m = min(M, L), S tokens of the longest
segment, D head size, R chosen rows. A mask is (B, N), bool, True at valid tokens.

For each row of the batch and each head (equation numbers of the paper):

    q~, k~ = means of the segments of q, k              landmarks (eq. 16)
    F = softmax(q k~ᵀ / √D)                             N×m
    A = softmax(q~ k~ᵀ / √D)                            m×m
    B = softmax(q~ kᵀ / √D)                             m×N, over valid keys
    out = F A⁺ (B V) + DConv(V)                         (eq. 17 and figure 4)

The i-th landmark of a row with L <= M tokens is its i-th token. There A⁺ B is a selection of the row's own tokens, F
is the exact attention, and so is the result.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .attention_ops import (
    attend,
    depthwise_convolution,
    gather_tokens,
    is_tracing,
    merge_heads,
    positions_by_rank,
    split_heads,
)


def iterative_pinv(matrix: Tensor, iterations: int = 6) -> Tensor:
    """Moore-Penrose inverse by the cubic iteration of eq. 14 (lemma 1, after Razavi et al. 2014).

    Z <- Z/4 (13 I - A Z (15 I - A Z (7 I - A Z))), from Z = Aᵀ / (‖A‖₁ ‖A‖∞) of each matrix by itself.

    Args:
        matrix: (..., m, m) float32 or float64. A zero row and column stays zero, so matrices may be padded.
        iterations: number of steps.

    Returns: (..., m, m), of the same dtype.
    """
    absolute = matrix.abs()
    norm = absolute.sum(dim=-2).amax(dim=-1) * absolute.sum(dim=-1).amax(dim=-1)
    inverse = matrix.mT / norm.clamp_min(torch.finfo(matrix.dtype).tiny)[..., None, None]
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = 0.25 * inverse @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product)))
    return inverse


# ---- reference: one row of the batch at a time, the paper's equations in order ----


def segment_sizes(length: int, num_landmarks: int) -> list[int]:
    """Tokens of each of the m = min(M, L) segments.

    With s = L // m, the first (s + 1) m - L segments hold s, the others s + 1, as in the authors' code.
    """
    count = min(num_landmarks, length)
    if count == 0:
        return []
    size = length // count
    small = (size + 1) * count - length
    return [size] * small + [size + 1] * (count - small)


def _nystrom_factors(
    query: Tensor, valid_query: Tensor, valid_key: Tensor, num_landmarks: int | None, pinv_iterations: int
) -> tuple[Tensor, Tensor]:
    """F (H, R, m) for the queries (H, R, D), and A⁺ B (H, m, L) from the valid queries and keys (H, L, D)."""
    length, dim = valid_key.shape[-2:]
    scale = dim**-0.5
    if num_landmarks is None or length <= num_landmarks:
        to_tokens = torch.eye(length, dtype=query.dtype, device=query.device).expand(query.shape[0], length, length)
        return torch.softmax(query @ valid_key.mT * scale, dim=-1), to_tokens

    sizes = segment_sizes(length, num_landmarks)
    query_landmarks = torch.stack([part.mean(dim=-2) for part in valid_query.split(sizes, dim=-2)], dim=-2)
    key_landmarks = torch.stack([part.mean(dim=-2) for part in valid_key.split(sizes, dim=-2)], dim=-2)
    f = torch.softmax(query @ key_landmarks.mT * scale, dim=-1)
    pinv = _landmark_pinv(query_landmarks, key_landmarks, None, pinv_iterations)
    b = torch.softmax(query_landmarks @ valid_key.mT * scale, dim=-1)
    return f, (pinv @ b.to(pinv.dtype)).to(query.dtype)


def nystrom_attention_map(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    *,
    num_landmarks: int | None,
    pinv_iterations: int = 6,
    rows: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """The attention matrix F A⁺ B (eq. 15) that Nyström attention applies, to look at and to test against.

    Args:
        query, key: (B, H, N, D). mask: (B, N) bool or None.
        num_landmarks: M, or None for the exact softmax matrix.
        pinv_iterations: steps of `iterative_pinv`.
        rows: (R,) or (B, R) int64, the queries whose rows are wanted; None for all N.
        dropout_p: probability of dropping an entry of F.

    Returns: (B, H, R, N), zero in the columns of invalid tokens. Memory is linear in N where rows are given.
    """
    batch, heads, length, _ = query.shape
    maps = []
    for row in range(batch):
        valid = torch.arange(length, device=query.device) if mask is None else mask[row].nonzero().squeeze(-1)
        wanted = query[row]
        if rows is not None:
            wanted = wanted[:, rows if rows.dim() == 1 else rows[row]]
        f, to_tokens = _nystrom_factors(
            wanted, query[row][:, valid], key[row][:, valid], num_landmarks, pinv_iterations
        )
        f = torch.dropout(f, dropout_p, train=dropout_p > 0)
        full = query.new_zeros(heads, wanted.shape[1], length)
        maps.append(full.index_copy(-1, valid, f @ to_tokens))
    return torch.stack(maps)


def nystrom_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    num_landmarks: int | None,
    pinv_iterations: int = 6,
    conv_weight: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """`nystrom_attention` written as in the paper, row by row, storing F and B."""
    contexts = []
    for row in range(query.shape[0]):
        valid = slice(None) if mask is None else mask[row]
        f, to_tokens = _nystrom_factors(
            query[row], query[row][:, valid], key[row][:, valid], num_landmarks, pinv_iterations
        )
        f = torch.dropout(f, dropout_p, train=dropout_p > 0)
        contexts.append(f @ (to_tokens @ value[row][:, valid]))
    context = torch.stack(contexts)
    if conv_weight is not None:
        context = context + depthwise_convolution(value, conv_weight, mask)
    return context


# ---- fast path: all rows at once, two softmax attentions, nothing of size N×M stored ----


class Segments(NamedTuple):
    """Where the landmarks of a ragged batch come from; a function of the mask and M alone.

    positions: (B, M, S) int64, of a segment's tokens. inside: (B, M, S) bool, False beyond its last token.
    size: (B, M) int64, its tokens, at least 1. exists: (B, M) bool, True for the m landmarks of a row.
    exact: (B,) bool, True where L <= M.
    """

    positions: Tensor
    inside: Tensor
    size: Tensor
    exists: Tensor
    exact: Tensor


def landmark_segments(mask: Tensor, num_landmarks: int) -> Segments:
    """Lay the valid tokens of each row out in the segments of `segment_sizes`, by rank."""
    batch, length = mask.shape
    lengths = mask.long().sum(dim=-1, keepdim=True)  # (B, 1)
    count = lengths.clamp(min=1, max=num_landmarks)
    size = lengths // count
    small = (size + 1) * count - lengths
    segment = torch.arange(num_landmarks, device=mask.device)  # (M,)
    start = segment * size + (segment - small).clamp_min(0)
    stop = start + size + (segment >= small).long()
    # ceil(N / M), but at least 2 in a graph, which would otherwise hold only for lengths beyond M.
    longest = length // num_landmarks + 2 if is_tracing() else -(-length // num_landmarks)
    rank = start[..., None] + torch.arange(longest, device=mask.device)  # (B, M, S)
    exists = segment < lengths
    inside = (rank < stop[..., None]) & exists[..., None]
    positions = positions_by_rank(mask)
    index = positions.gather(1, torch.where(inside, rank, 0).flatten(1)).view(batch, num_landmarks, longest)
    return Segments(index, inside, (stop - start).clamp_min(1), exists, lengths.squeeze(-1) <= num_landmarks)


def _segment_means(states: Tensor, num_landmarks: int) -> Tensor:
    """Landmarks (B, H, M, D) of states (B, H, N, D) without padding, N >= M: two groups of segments, as they lie.

    A mean is a product with a row of 1 / s: it reads half precision as it is, adds in float32 and rounds once.
    """
    heads, length = states.shape[1:3]
    size = length // num_landmarks
    small = (size + 1) * num_landmarks - length
    groups = [(small, size), (num_landmarks - small, size + 1)]
    tokens = merge_heads(states)
    parts = tokens.split([count * size for count, size in groups], dim=1) if small < num_landmarks else [tokens]
    means = []
    for part, (count, size) in zip(parts, groups, strict=False):
        shares = tokens.new_full((1, size), 1 / size)
        means.append((shares @ part.unflatten(1, (count, size))).squeeze(2))
    return split_heads(torch.cat(means, dim=1) if len(means) > 1 else means[0], heads)


def _gathered_means(states: Tensor, segments: Segments) -> Tensor:
    """Landmarks (B, H, M, D) of states (B, H, N, D) of a ragged batch; zero where a landmark does not exist."""
    heads = states.shape[1]
    tokens = gather_tokens(merge_heads(states), segments.positions)  # (B, M, S, H·D)
    shares = segments.inside.to(tokens.dtype) / segments.size[..., None].to(tokens.dtype)  # (B, M, S)
    return split_heads((shares.unsqueeze(-2) @ tokens).squeeze(-2), heads)


def _landmark_pinv(query_landmarks: Tensor, key_landmarks: Tensor, exists: Tensor | None, iterations: int) -> Tensor:
    """A⁺ (..., m, m) of A = softmax(q~ k~ᵀ / √D), in float32 at least, zero for landmarks that do not exist."""
    dtype = torch.promote_types(query_landmarks.dtype, torch.float32)
    # Six multiplications in half precision would lose the small singular values, and autocast would make them so.
    with torch.autocast(query_landmarks.device.type, enabled=False):
        scores = query_landmarks.to(dtype) @ key_landmarks.to(dtype).mT * query_landmarks.shape[-1] ** -0.5
        if exists is not None:
            scores = scores.masked_fill(~exists[:, None, None, :], torch.finfo(dtype).min)
        a = torch.softmax(scores, dim=-1)
        if exists is not None:
            a = a * (exists[:, None, :, None] & exists[:, None, None, :])
        return iterative_pinv(a, iterations)


# Where faster kernels are, they are put here: same arguments, None where they do not apply. This file travels alone
# with checkpoints, so it cannot import them.
fast_kernels: Callable[..., Tensor | None] | None = None


def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    num_landmarks: int | None,
    pinv_iterations: int = 6,
    conv_weight: Tensor | None = None,
    dropout_p: float = 0.0,
    segments: Segments | None = None,
) -> Tensor:
    """Nyström attention (eq. 17) in O(N M) time and O(N) memory.

    Args:
        query, key, value: (B, H, N, D), float16, bfloat16, float32 or float64.
        mask: (B, N) bool, True at valid tokens, wherever they lie; None for all valid.
        num_landmarks: M. Rows of at most M valid tokens get exact attention. None: exact attention for all.
        pinv_iterations: steps of `iterative_pinv`, in float32 whatever the dtype.
        conv_weight: (H, 1, kernel, 1), the depthwise convolution of V that is added; None for none.
        dropout_p: probability of dropping an entry of F = softmax(q k~ᵀ / √D), the attention of a token.
        segments: `landmark_segments(mask, num_landmarks)`, to compute it once for many layers.

    Returns: (B, H, N, D). Values at invalid tokens are finite and mean nothing.
    """
    length = query.shape[2]
    # While tracing, the graph must hold for lengths on both sides of M.
    exact = num_landmarks is None or (not is_tracing() and length <= num_landmarks)
    if not exact and fast_kernels is not None and not torch.jit.is_tracing():
        context = fast_kernels(
            query,
            key,
            value,
            mask,
            num_landmarks=num_landmarks,
            pinv_iterations=pinv_iterations,
            conv_weight=conv_weight,
            dropout_p=dropout_p,
            segments=segments,
        )
        if context is not None:
            return context
    skip = None if conv_weight is None else depthwise_convolution(value, conv_weight, mask)
    if exact:
        return attend(query, key, value, mask, dropout_p, skip)
    if mask is None and is_tracing():
        mask = torch.ones(query.shape[0], length, dtype=torch.bool, device=query.device)
    if mask is None:
        query_landmarks = _segment_means(query, num_landmarks)
        key_landmarks = _segment_means(key, num_landmarks)
        pinv = _landmark_pinv(query_landmarks, key_landmarks, None, pinv_iterations)
        landmark_values = pinv @ attend(query_landmarks, key, value).to(pinv.dtype)
        return attend(query, key_landmarks, landmark_values.to(value.dtype), None, dropout_p, skip)
    segments = landmark_segments(mask, num_landmarks) if segments is None else segments
    query_landmarks = _gathered_means(query, segments)
    key_landmarks = _gathered_means(key, segments)
    pinv = _landmark_pinv(query_landmarks, key_landmarks, segments.exists, pinv_iterations)
    landmark_values = (pinv @ attend(query_landmarks, key, value, mask).to(pinv.dtype)).to(value.dtype)
    # Where every token is its own landmark, A⁺ B selects the tokens: their own values, first of each segment.
    own_values = split_heads(gather_tokens(merge_heads(value), segments.positions[..., 0]), value.shape[1])
    landmark_values = torch.where(segments.exact[:, None, None, None], own_values, landmark_values)
    return attend(query, key_landmarks, landmark_values, segments.exists, dropout_p, skip)
