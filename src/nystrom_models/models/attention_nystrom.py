# SPDX-License-Identifier: Apache-2.0
"""Nyström attention: softmax attention approximated through landmarks, in time and memory linear in the tokens.

Xiong et al. 2021, "Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention", arXiv:2102.03902.

Legend: B batch, H heads, N tokens, L valid tokens of a row, M landmarks, m = min(M, L), S tokens of the longest
segment, D head size, R chosen rows; in cross-attention N queries and K keys. A mask is (B, N), bool, True at valid
tokens.

For each row of the batch and each head (equation numbers of the paper):

    q~, k~ = means of the segments of q, k              landmarks (eq. 16)
    F = softmax(q k~ᵀ / √D)                             N×m
    A = softmax(q~ k~ᵀ / √D)                            m×m
    B = softmax(q~ kᵀ / √D)                             m×N, over valid keys
    out = F A⁺ (B V) + skip                             (eq. 17; the skip is the convolution of figure 4)

The i-th landmark of a row with L <= M tokens is its i-th token. Then A⁺ B selects the row's own tokens, F is the exact
attention, and so is the result.

In cross-attention the landmarks q~ are means of segments of the queries, and k~ of the keys; their numbers may differ.
With at most M keys, A⁺ B selects the keys. With at most M queries, F is A, and A A⁺ B = B is the exact attention. In
both cases exact attention is linear in the other length, and is computed directly.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from transformers.utils.generic import maybe_autocast
from transformers.utils.import_utils import is_tracing

from .masked_attention import (
    Attend,
    attend,
    attend_within_rows,
    attention_weights,
    softmax_attention_map,
    visible_keys,
)
from .precise_product import multiply
from .token_layout import gather_tokens, merge_heads, positions_by_rank, split_heads, take_tokens


def scaled_query(query: Tensor, scaling: float | None) -> Tensor:
    """Queries (..., D), rescaled so that attention with 1 / √D gives attention with `scaling` (None for 1 / √D)."""
    factor = 1.0 if scaling is None else scaling * query.shape[-1] ** 0.5
    return query if abs(factor - 1) <= 1e-6 else query * factor


def iterative_pinv(matrix: Tensor, iterations: int = 6) -> Tensor:
    """Moore-Penrose inverse by the cubic iteration of eq. 14 (lemma 1, after Razavi et al. 2014).

    Z <- Z/4 (13 I - A Z (15 I - A Z (7 I - A Z))), starting from Z = Aᵀ / (‖A‖₁ ‖A‖∞) for each matrix.

    Args:
        matrix: (..., m, m) float32 or float64. A zero row and column stays zero, so matrices may be padded.
        iterations: number of steps. Each makes the rounding errors of a singular matrix about three times as large: in
            float32, 20 steps leave a few digits, and 35 give NaN.

    Returns: (..., m, m), of the same dtype.
    """
    absolute = matrix.abs()
    norm = absolute.sum(dim=-2).amax(dim=-1) * absolute.sum(dim=-1).amax(dim=-1)
    inverse = matrix.transpose(-2, -1) / norm.clamp_min(torch.finfo(matrix.dtype).tiny)[..., None, None]
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        product = multiply(matrix, inverse)
        inner = 15 * identity - multiply(product, 7 * identity - product)
        inverse = multiply(0.25 * inverse, 13 * identity - multiply(product, inner))
    return inverse


# ---- reference: one row of the batch at a time, the paper's equations in order ----


def segment_sizes(length: int, num_landmarks: int) -> list[int]:
    """Tokens of each of the m = min(M, L) segments.

    With s = L // m, the first (s + 1) m - L segments have s, the others s + 1, as in the authors' code.
    """
    count = min(num_landmarks, length)
    if count == 0:
        return []
    size = length // count
    small = (size + 1) * count - length
    return [size] * small + [size + 1] * (count - small)


def segment_means(states: Tensor, num_landmarks: int) -> Tensor:
    """Landmarks (..., m, D) of valid states (..., L, D): the means of the segments (eq. 16)."""
    sizes = segment_sizes(states.shape[-2], num_landmarks)
    return torch.stack([part.mean(dim=-2) for part in states.split(sizes, dim=-2)], dim=-2)


def _nystrom_factors(
    query: Tensor, valid_query: Tensor, valid_key: Tensor, num_landmarks: int | None, pinv_iterations: int
) -> tuple[Tensor, Tensor]:
    """F (H, R, m) for the queries (H, R, D), and A⁺ B (H, m, L) from the valid queries and keys (H, L, D)."""
    length, dim = valid_key.shape[-2:]
    scale = dim**-0.5
    if num_landmarks is None or min(length, valid_query.shape[-2]) <= num_landmarks:
        to_tokens = torch.eye(length, dtype=query.dtype, device=query.device).expand(query.shape[0], length, length)
        return torch.softmax(query @ valid_key.transpose(-2, -1) * scale, dim=-1), to_tokens

    query_landmarks, key_landmarks = (segment_means(states, num_landmarks) for states in (valid_query, valid_key))
    f = torch.softmax(query @ key_landmarks.transpose(-2, -1) * scale, dim=-1)
    pinv = _landmark_pinv(query_landmarks, key_landmarks, None, pinv_iterations)
    b = torch.softmax(query_landmarks @ valid_key.transpose(-2, -1) * scale, dim=-1)
    return f, (pinv @ b.to(pinv.dtype)).to(query.dtype)


def nystrom_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    num_landmarks: int | None,
    pinv_iterations: int = 6,
    dropout_p: float = 0.0,
    skip: Tensor | None = None,
) -> Tensor:
    """`nystrom_attention` written as in the paper, row by row, storing F and B."""
    contexts = []
    for row in range(query.shape[0]):
        valid = slice(None) if mask is None else mask[row]
        states = (query[row], query[row][:, valid], key[row][:, valid], value[row][:, valid])
        contexts.append(_attend_in_a_row(*states, num_landmarks, pinv_iterations, dropout_p))
    context = torch.stack(contexts)
    return context if skip is None else context + skip


def _attend_in_a_row(
    query: Tensor,
    valid_query: Tensor,
    valid_key: Tensor,
    valid_value: Tensor,
    num_landmarks: int | None,
    pinv_iterations: int,
    dropout_p: float,
) -> Tensor:
    """F A⁺ (B V), (H, R, D), with the factors of these queries and keys."""
    f, to_tokens = _nystrom_factors(query, valid_query, valid_key, num_landmarks, pinv_iterations)
    return torch.dropout(f, dropout_p, train=dropout_p > 0) @ (to_tokens @ valid_value)


# ---- fast path: all rows at once, as two softmax attentions; nothing of size N×M is stored ----


class Segments(NamedTuple):
    """The segments of a ragged batch, whose means are the landmarks. They depend only on the mask and M.

    positions: (B, M, S) int64, of a segment's tokens. inside: (B, M, S) bool, False beyond its last token.
    size: (B, M) int64, the number of its tokens, at least 1. exists: (B, M) bool, True for the m landmarks of a row.
    exact: (B,) bool, True where L <= M.
    """

    positions: Tensor
    inside: Tensor
    size: Tensor
    exists: Tensor
    exact: Tensor


def landmark_segments(mask: Tensor, num_landmarks: int) -> Segments:
    """Assign the valid tokens of each row to the segments of `segment_sizes`, by rank."""
    batch, length = mask.shape
    lengths = mask.long().sum(dim=-1, keepdim=True)  # (B, 1)
    count = lengths.clamp(min=1, max=num_landmarks)
    size = lengths // count
    small = (size + 1) * count - lengths
    segment = torch.arange(num_landmarks, device=mask.device)  # (M,)
    start = segment * size + (segment - small).clamp_min(0)
    stop = start + size + (segment >= small).long()
    # ceil(N / M). In a graph at least 2: otherwise the graph would be valid only for lengths beyond M.
    longest = length // num_landmarks + 2 if is_tracing(mask) else -(-length // num_landmarks)
    rank = start[..., None] + torch.arange(longest, device=mask.device)  # (B, M, S)
    exists = segment < lengths
    inside = (rank < stop[..., None]) & exists[..., None]
    positions = positions_by_rank(mask)
    index = positions.gather(1, torch.where(inside, rank, 0).flatten(1)).view(batch, num_landmarks, longest)
    return Segments(index, inside, (stop - start).clamp_min(1), exists, lengths.squeeze(-1) <= num_landmarks)


def _unpadded_means(states: Tensor, num_landmarks: int) -> Tensor:
    """Landmarks (B, H, M, D) of states (B, H, N, D) without padding, N >= M. There are two groups of segments: those
    of s tokens, then those of s + 1.

    A mean is computed as a product with a row of 2⁻ᵉ, times 2ᵉ / s. The product reads half precision and sums in
    float32. A row of 1 / s would be rounded in half precision, and would shift all means in one direction.
    """
    heads, length = states.shape[1:3]
    size = length // num_landmarks
    small = (size + 1) * num_landmarks - length
    groups = [(small, size), (num_landmarks - small, size + 1)]
    tokens = merge_heads(states)
    parts = tokens.split([count * size for count, size in groups], dim=1) if small < num_landmarks else [tokens]
    means = []
    for part, (count, size) in zip(parts, groups, strict=False):
        share = 2.0 ** -size.bit_length()
        sums = (tokens.new_full((1, size), share) @ part.unflatten(1, (count, size))).squeeze(2)
        means.append(sums * (1 / (share * size)))
    return split_heads(torch.cat(means, dim=1) if len(means) > 1 else means[0], heads)


def _gathered_means(states: Tensor, segments: Segments) -> Tensor:
    """Landmarks (B, H, M, D) of states (B, H, N, D) of a ragged batch; zero where a landmark does not exist."""
    heads = states.shape[1]
    tokens = gather_tokens(merge_heads(states), segments.positions)  # (B, M, S, H·D)
    size = segments.size.to(torch.promote_types(tokens.dtype, torch.float32))
    share = 2.0 ** -torch.ceil(torch.log2(size))  # as in _unpadded_means
    shares = segments.inside.to(tokens.dtype) * share[..., None].to(tokens.dtype)  # (B, M, S)
    sums = (shares.unsqueeze(-2) @ tokens).squeeze(-2)
    means = sums.to(size.dtype) / (share * size)[..., None]
    return split_heads(means.to(tokens.dtype), heads)


def _landmark_pinv(
    query_landmarks: Tensor,
    key_landmarks: Tensor,
    exists: Tensor | None,
    iterations: int,
    query_exists: Tensor | None = None,
) -> Tensor:
    """A⁺ (..., m, m) of A = softmax(q~ k~ᵀ / √D), in float32 or float64; zero for landmarks that do not exist.

    query_exists: (B, M) bool, for cross-attention, where queries and keys may have different numbers of landmarks.

    Raises ValueError for fewer than one iteration.
    """
    if iterations < 1:
        raise ValueError(f"pinv_iterations={iterations} must be at least 1 (6 in the paper).")
    dtype = torch.promote_types(query_landmarks.dtype, torch.float32)
    # In half precision the iterations would lose the small singular values, so autocast is switched off.
    with maybe_autocast(query_landmarks.device.type, enabled=False):
        query, key = query_landmarks.to(dtype), key_landmarks.to(dtype)
        scores = multiply(query, key.transpose(-2, -1)) * query.shape[-1] ** -0.5
        if exists is not None:
            scores = scores.masked_fill(~exists[:, None, None, :], torch.finfo(dtype).min)
        a = torch.softmax(scores, dim=-1)
        if exists is not None:
            rows = exists if query_exists is None else query_exists
            a = a * (rows[:, None, :, None] & exists[:, None, None, :])
        return iterative_pinv(a, iterations)


class Landmarks(NamedTuple):
    """The landmarks of a batch of rows.

    query, key: (B, H, M, D), q~ and k~; zero where a landmark does not exist.
    pinv: (B, H, M, M), A⁺, in float32 or float64.
    segments: the segments whose means they are; None if all rows are full and have more than M tokens.
    """

    query: Tensor
    key: Tensor
    pinv: Tensor
    segments: Segments | None


def _landmarks_of(
    states: Tensor, mask: Tensor | None, num_landmarks: int, segments: Segments | None = None
) -> tuple[Tensor, Segments | None]:
    """Landmarks (B, H, M, D) of states (B, H, N, D), and their segments; None where all rows have more than M.

    segments: those of the mask, if they are known. Without a mask they are used only while a graph is recorded.

    Raises ValueError for fewer than one landmark.
    """
    if num_landmarks < 1:
        raise ValueError(f"num_landmarks={num_landmarks} must be at least 1 (64 in the paper), or None for softmax.")
    if mask is None and is_tracing(states):
        # The graph must be valid for lengths below and above M.
        mask = torch.ones(states.shape[0], states.shape[2], dtype=torch.bool, device=states.device)
    if mask is None:
        return _unpadded_means(states, num_landmarks), None
    segments = landmark_segments(mask, num_landmarks) if segments is None else segments
    return _gathered_means(states, segments), segments


def _landmarks(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    num_landmarks: int,
    pinv_iterations: int,
    segments: Segments | None,
) -> Landmarks:
    query_landmarks, segments = _landmarks_of(query, mask, num_landmarks, segments)
    key_landmarks, _ = _landmarks_of(key, mask, num_landmarks, segments)
    exists = None if segments is None else segments.exists
    pinv = _landmark_pinv(query_landmarks, key_landmarks, exists, pinv_iterations)
    return Landmarks(query_landmarks, key_landmarks, pinv, segments)


def is_exact(query: Tensor, num_landmarks: int | None) -> bool:
    """Whether no row has more than M tokens. False while a graph is recorded, which must be valid for longer rows."""
    return num_landmarks is None or (not is_tracing(query) and query.shape[2] <= num_landmarks)


def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    num_landmarks: int | None,
    pinv_iterations: int = 6,
    dropout_p: float = 0.0,
    skip: Tensor | None = None,
    segments: Segments | None = None,
    attend: Attend = attend,
) -> Tensor:
    """Nyström attention (eq. 17) in O(N M) time and O(N) memory.

    Args:
        query, key, value: (B, H, N, D), float16, bfloat16, float32 or float64.
        mask: (B, N) bool, True at valid tokens, wherever they lie; None for all valid.
        num_landmarks: M. Rows of at most M valid tokens get exact attention. None: exact attention for all.
        pinv_iterations: steps of `iterative_pinv`, in float32 whatever the dtype.
        dropout_p: probability of dropping an entry of F = softmax(q k~ᵀ / √D), the attention of a token.
        skip: (B, H, N, D), added to the result, such as `depthwise_convolution(value, weight, mask)`. On a CPU without
            gradients it is overwritten by the result.
        segments: `landmark_segments(mask, num_landmarks)`, if it is computed once for many layers.
        attend: the function that computes each of the two softmax attentions.

    Returns: (B, H, N, D). Values at invalid tokens are finite, but meaningless.
    """
    if is_exact(query, num_landmarks):
        return attend_within_rows(query, key, value, mask, dropout_p, skip, attend)
    landmarks = _landmarks(query, key, mask, num_landmarks, pinv_iterations, segments)
    seen = attend(landmarks.query, key, value, mask)  # B V
    landmark_values = _landmark_values(landmarks.pinv, seen).to(value.dtype)
    if landmarks.segments is None:
        return attend(query, landmarks.key, landmark_values, None, dropout_p, skip)
    segments = landmarks.segments
    landmark_values = _own_values_where_exact(landmark_values, value, segments)
    return attend(query, landmarks.key, landmark_values, segments.exists, dropout_p, skip)


def _landmark_values(pinv: Tensor, seen: Tensor) -> Tensor:
    """A⁺ (B V), (B, H, M, D), or A⁺ B, (B, H, M, N), in the dtype of A⁺, under autocast, too."""
    with maybe_autocast(pinv.device.type, enabled=False):
        return pinv @ seen.to(pinv.dtype)


def _own_values_where_exact(landmark_values: Tensor, value: Tensor, segments: Segments) -> Tensor:
    """A⁺ B V (B, H, M, D); where every token is its own landmark, a landmark's values are its token's values."""
    own_values = split_heads(gather_tokens(merge_heads(value), segments.positions[..., 0]), value.shape[1])
    return torch.where(segments.exact[:, None, None, None], own_values, landmark_values)


def nystrom_attention_map(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None = None,
    *,
    num_landmarks: int | None,
    pinv_iterations: int = 6,
    dropout_p: float = 0.0,
    segments: Segments | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """The attention matrix F A⁺ B (eq. 15) that Nyström attention applies, for inspection and tests.

    Args:
        rows: (R,) or (B, R) int64, the queries whose rows are returned; None for all N.
        The others: see `nystrom_attention`.

    Returns: (B, H, R, N), zero in the columns of invalid tokens. Memory is linear in N if rows are given.
    """
    if is_exact(query, num_landmarks):
        weights = softmax_attention_map(query, key, mask, rows=rows)
        return torch.dropout(weights, dropout_p, train=dropout_p > 0)
    wanted = query if rows is None else take_tokens(query, rows)
    landmarks = _landmarks(query, key, mask, num_landmarks, pinv_iterations, segments)
    b = attention_weights(landmarks.query, key, visible_keys(mask))
    to_tokens = _landmark_values(landmarks.pinv, b)  # A⁺ B
    segments = landmarks.segments
    if segments is not None:
        places = torch.arange(key.shape[2], device=key.device)
        own = (segments.positions[:, :, :1] == places) & segments.exists[..., None]  # (B, M, N)
        to_tokens = torch.where(segments.exact[:, None, None, None], own[:, None].to(to_tokens.dtype), to_tokens)
    f = attention_weights(wanted, landmarks.key, visible_keys(None if segments is None else segments.exists))
    f = torch.dropout(f, dropout_p, train=dropout_p > 0)
    attention_map = f @ to_tokens.to(f.dtype)
    return attention_map if mask is None else attention_map.masked_fill(~mask[:, None, None], 0)


# ---- cross-attention: queries and keys of different sequences ----


def nystrom_cross_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    *,
    num_landmarks: int | None,
    pinv_iterations: int = 6,
    dropout_p: float = 0.0,
) -> Tensor:
    """`nystrom_cross_attention`, row by row, storing F and B."""
    contexts = []
    for row in range(query.shape[0]):
        valid = slice(None) if key_mask is None else key_mask[row]
        states = (query[row], query[row], key[row][:, valid], value[row][:, valid])
        contexts.append(_attend_in_a_row(*states, num_landmarks, pinv_iterations, dropout_p))
    return torch.stack(contexts)


def nystrom_cross_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    *,
    num_landmarks: int | None,
    pinv_iterations: int = 6,
    dropout_p: float = 0.0,
    attend: Attend = attend,
) -> Tensor:
    """Nyström attention of queries to the keys of another sequence, in O((N + K) M) time and O(N + K) memory.

    Args:
        query: (B, H, N, D). All of them count as tokens: only the caller knows which are padding.
        key, value: (B, H, K, D).
        key_mask: (B, K) bool, True at valid keys, wherever they lie; None for all valid.
        num_landmarks: M. Rows of at most M queries or at most M valid keys get exact attention. None: exact for all.
        The others: see `nystrom_attention`.

    Returns: (B, H, N, D). A row without a valid key is finite, but meaningless.
    """
    if num_landmarks is None or (not is_tracing(query) and min(query.shape[2], key.shape[2]) <= num_landmarks):
        return attend(query, key, value, key_mask, dropout_p)
    query_landmarks, query_segments = _landmarks_of(query, None, num_landmarks)
    key_landmarks, key_segments = _landmarks_of(key, key_mask, num_landmarks)
    exists = None if key_segments is None else key_segments.exists
    query_exists = None if exists is None else torch.ones_like(exists)
    if query_segments is not None:
        query_exists = query_segments.exists
    pinv = _landmark_pinv(query_landmarks, key_landmarks, exists, pinv_iterations, query_exists)
    seen = attend(query_landmarks, key, value, key_mask)  # B V
    landmark_values = _landmark_values(pinv, seen).to(value.dtype)
    if key_segments is not None:
        landmark_values = _own_values_where_exact(landmark_values, value, key_segments)
    context = attend(query, key_landmarks, landmark_values, exists, dropout_p)
    if query_segments is None:
        return context
    # In a graph: where every query is its own landmark, the result is the attention of the landmarks.
    if dropout_p > 0:
        seen = attend(query_landmarks, key, value, key_mask, dropout_p)
    landmark = torch.arange(query.shape[2], device=query.device).clamp_max(num_landmarks - 1)
    return torch.where(query_segments.exact[:, None, None, None], seen.index_select(2, landmark), context)


def nystrom_cross_attention_map(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None = None,
    *,
    num_landmarks: int | None,
    pinv_iterations: int = 6,
) -> Tensor:
    """The matrix F A⁺ B (B, H, N, K) that `nystrom_cross_attention` applies, zero at invalid keys."""
    # A linear map applied to the identity gives its matrix.
    identity = torch.eye(key.shape[2], dtype=key.dtype, device=key.device).expand(*key.shape[:3], -1)
    attention_map = nystrom_cross_attention(
        query, key, identity, key_mask, num_landmarks=num_landmarks, pinv_iterations=pinv_iterations
    )
    return attention_map if key_mask is None else attention_map.masked_fill(~key_mask[:, None, None], 0)
