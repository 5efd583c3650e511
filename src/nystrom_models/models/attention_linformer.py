# SPDX-License-Identifier: Apache-2.0
"""Linformer attention: keys and values of a sequence are projected to K slots, then attended to as usual.

Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", arXiv:2006.04768.

Legend: B batch, H heads, N tokens, L valid tokens of a row, K slots (the paper's k), D head size, P the longest
sequence of a projection, S tokens of a slot, R chosen rows. A mask is (B, N), bool, True at valid tokens. The
token of rank r among the valid ones uses column r of a projection, wherever it lies.

For each row of the batch and each head (eq. 7 of the paper):

    K' = E k,  V' = F v                                K×D
    out = softmax(q K'ᵀ / √D) V'

E and F are K×P matrices ("linear"), or act on slots of S consecutive tokens: their mean, their maximum by channel, or
a weighted sum with S taps ("conv", stride = kernel = S).
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.import_utils import is_tracing

from .masked_attention import Attend, attend, attention_weights, visible_keys
from .token_layout import positions_by_rank, take_tokens, token_ranks

# ---- reference: one row of the batch at a time, the paper's equation in order ----


def _project_reference(
    states: Tensor, projection: Tensor | None, projection_type: str, kernel_size: int | None
) -> Tensor:
    """E k, (H, K', D), of the valid tokens of a row, (H, L, D)."""
    if projection_type == "linear":
        return projection[..., : states.shape[1]] @ states
    slots = []
    for part in states.split(kernel_size, dim=1):
        if projection_type == "mean_pool":
            slots.append(part.mean(dim=1))
        elif projection_type == "max_pool":
            slots.append(part.amax(dim=1))
        else:
            slots.append((projection[..., : part.shape[1], None] * part).sum(dim=1))
    return torch.stack(slots, dim=1)


def linformer_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    key_projection: Tensor | None,
    value_projection: Tensor | None,
    projection_type: str = "linear",
    kernel_size: int | None = None,
    dropout_p: float = 0.0,
    skip: Tensor | None = None,
) -> Tensor:
    """`linformer_attention` written as in the paper, row by row."""
    contexts = []
    for row in range(query.shape[0]):
        valid = slice(None) if mask is None else mask[row]
        keys, values = key[row][:, valid], value[row][:, valid]
        if keys.shape[1] == 0:
            contexts.append(torch.zeros_like(query[row]))
            continue
        keys = _project_reference(keys, key_projection, projection_type, kernel_size)
        values = _project_reference(values, value_projection, projection_type, kernel_size)
        weights = torch.softmax(query[row] @ keys.transpose(-2, -1) * query.shape[-1] ** -0.5, dim=-1)
        contexts.append(torch.dropout(weights, dropout_p, train=dropout_p > 0) @ values)
    context = torch.stack(contexts)
    return context if skip is None else context + skip


# ---- projections of all rows at once: valid tokens come first in each row, zeros after them ----


def project(
    states: Tensor, projection: Tensor | None, projection_type: str, kernel_size: int | None, lengths: Tensor | None
) -> Tensor:
    """E k for each row: tokens (B, H, N, D) -> slots (B, H, K', D), or (B, N, C) -> (B, K', C).

    Args:
        states: tokens in the order of their ranks, zero after the L valid tokens of a row.
        projection: for "linear" (K, P), P >= N, or (H, K, P) with one for each head; for "conv" the taps, (S,) or
            (H, S); None for pooling.
        projection_type: "linear", "mean_pool", "max_pool" or "conv".
        kernel_size: S, for all types but "linear".
        lengths: (B,) int64, L; None if all rows are full.
    """
    if projection_type == "linear":
        return _columns(projection, states.shape[-2]) @ states
    slots = _slots(states, kernel_size)  # (..., K', S, D)
    if projection_type == "conv":
        return (slots * projection[..., None, :, None]).sum(dim=-2)
    count = slot_counts(states.shape[-2], lengths, kernel_size, states)  # (1 or B, K')
    if states.dim() == 4:
        count = count[:, None]
    if projection_type == "mean_pool":
        # A sum may leave the range of float16, and a number of tokens needs more digits than bfloat16 has.
        precise = torch.promote_types(states.dtype, torch.float32)
        return (slots.sum(dim=-2, dtype=precise) / count[..., None].clamp_min(1)).to(states.dtype)
    inside = torch.arange(kernel_size, device=states.device) < count[..., None]
    largest = slots.masked_fill(~inside[..., None], torch.finfo(states.dtype).min).amax(dim=-2)
    return largest.masked_fill((count == 0)[..., None], 0)


def slot_counts(length: int, lengths: Tensor | None, kernel_size: int, like: Tensor) -> Tensor:
    """(B, K') int64, or (1, K') if all rows are full: valid tokens in each slot of rows of `length` tokens.

    like: a tensor that gives the device, and the graph while one is recorded.
    """
    start = torch.arange(_num_slots(length, kernel_size, like), device=like.device) * kernel_size
    ends = torch.full((1, 1), length, device=like.device) if lengths is None else lengths[:, None]
    return (ends - start).clamp(min=0, max=kernel_size)


def _columns(projection: Tensor, length: int) -> Tensor:
    """The first columns of E (..., K, P): (..., K, N)."""
    if is_tracing(projection):
        # A copy, because views of the whole matrix and of a part of it would give different graphs.
        return projection.index_select(-1, torch.arange(length, device=projection.device))
    return projection[..., :length]


def _num_slots(length: int, kernel_size: int, like: Tensor) -> int:
    """ceil(N / S); in a graph more, and at least 2: otherwise it would be valid only for lengths above S."""
    return length // kernel_size + 2 if is_tracing(like) else -(-length // kernel_size)


def _slots(states: Tensor, kernel_size: int) -> Tensor:
    """(..., N, C) -> (..., K', S, C), zeros after the last token."""
    slots = _num_slots(states.shape[-2], kernel_size, states)
    states = F.pad(states, (0, 0, 0, slots * kernel_size - states.shape[-2]))
    if is_tracing(states):
        # The same view; this operator leaves no condition on the length in the graph.
        return states.unfold(states.dim() - 2, kernel_size, kernel_size).transpose(-2, -1)
    return states.unflatten(-2, (slots, kernel_size))


def projection_matrix(
    states: Tensor,
    projection: Tensor | None,
    projection_type: str,
    kernel_size: int | None,
    lengths: Tensor | None,
) -> Tensor:
    """F as a matrix (1 or B, 1 or H, K', N) that acts on the tokens, for attention maps.

    A maximum is not linear: for "max_pool", the weight of a token in a slot is the share of channels in which it is
    the maximum. Only this case reads the values of the states (B, H, N, D). The other arguments: see `project`.
    """
    length = states.shape[-2]
    if projection_type == "linear":
        matrix = _columns(projection, length)
        return matrix[None] if matrix.dim() == 3 else matrix[None, None]
    count = slot_counts(length, lengths, kernel_size, states)  # (1 or B, K')
    place = torch.arange(length, device=states.device)
    slot = torch.arange(count.shape[1], device=states.device)[:, None]
    inside = (place // kernel_size == slot) & (place < slot * kernel_size + count[..., None])  # (1 or B, K', N)
    if projection_type == "mean_pool":
        precise = torch.promote_types(states.dtype, torch.float32)
        return (inside.to(precise) / count[..., None].clamp_min(1)).to(states.dtype)[:, None]
    if projection_type == "conv":
        taps = projection[..., place % kernel_size]  # (N,) or (H, N)
        taps = taps[:, None] if taps.dim() == 2 else taps
        return taps * inside[:, None].to(taps.dtype)
    slots = _slots(states, kernel_size)
    within = torch.arange(kernel_size, device=states.device) < count[..., None]
    largest = slots.masked_fill(~within[:, None, ..., None], torch.finfo(states.dtype).min).argmax(dim=-2)
    shares = F.one_hot(largest, kernel_size).to(states.dtype).mean(dim=-2)  # (B, H, K', S)
    return shares[..., place % kernel_size] * inside[:, None].to(states.dtype)


# ---- attention ----


def linformer_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    key_projection: Tensor | None,
    value_projection: Tensor | None,
    projection_type: str = "linear",
    kernel_size: int | None = None,
    dropout_p: float = 0.0,
    skip: Tensor | None = None,
    attend: Attend = attend,
) -> Tensor:
    """Linformer attention in O(N K) time and O(N) memory.

    If the heads share a projection, a model may apply it before the linear layers of keys and values, because
    E (X W) = (E X) W, and W then multiplies K rows instead of N: use `project` and `attend` for this.

    Args:
        query, key, value: (B, H, N, D). Keys and values are projected as they are; a bias that should be added after
            the projection must not be in them.
        mask: (B, N) bool, True at valid tokens, wherever they lie; None for all valid.
        key_projection, value_projection, projection_type, kernel_size: E and F, see `project`.
        dropout_p: probability of dropping an attention weight.
        skip: (B, H, N, D), added to the result. On a CPU without gradients it is overwritten by the result.
        attend: the function that computes the softmax attention.

    Returns: (B, H, N, D). Values at invalid tokens are finite, but meaningless.
    """
    (key, value), lengths = _by_rank((key, value), mask)
    keys = project(key, key_projection, projection_type, kernel_size, lengths)
    values = project(value, value_projection, projection_type, kernel_size, lengths)
    return attend(query, keys, values, slot_mask(key, projection_type, kernel_size, lengths), dropout_p, skip)


def linformer_attention_map(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    key_projection: Tensor | None,
    value_projection: Tensor | None,
    projection_type: str = "linear",
    kernel_size: int | None = None,
    dropout_p: float = 0.0,
    rows: Tensor | None = None,
) -> Tensor:
    """The matrix softmax(q K'ᵀ / √D) F that maps the values of the tokens to the output.

    Args:
        rows: (R,) or (B, R) int64, the queries whose rows are returned; None for all N.
        The others: see `linformer_attention`.

    Returns: (B, H, R, N), zero in the columns of invalid tokens. Like those of F, its rows need not sum to
    one. For "max_pool", F holds the share of channels in which a token is its slot's maximum. Memory is linear in N if
    rows are given.
    """
    (key, value), lengths = _by_rank((key, value), mask)
    keys = project(key, key_projection, projection_type, kernel_size, lengths)
    matrix = projection_matrix(value, value_projection, projection_type, kernel_size, lengths)
    attention_map = slots_map(
        query, keys, matrix, slot_mask(key, projection_type, kernel_size, lengths), dropout_p=dropout_p, rows=rows
    )
    if mask is None:
        return attention_map
    ranks = token_ranks(mask)[:, None, None].expand(*attention_map.shape[:3], -1)
    return attention_map.gather(3, ranks).masked_fill(~mask[:, None, None], 0)


def slots_map(
    query: Tensor,
    keys: Tensor,
    matrix: Tensor,
    slot_mask: Tensor | None,
    *,
    dropout_p: float = 0.0,
    rows: Tensor | None = None,
) -> Tensor:
    """The map (B, H, R, N) from the keys of the slots (B, H, K', D) and F as a matrix; columns are tokens by rank."""
    query = query if rows is None else take_tokens(query, rows)
    weights = attention_weights(query, keys, visible_keys(slot_mask))
    return torch.dropout(weights, dropout_p, train=dropout_p > 0) @ matrix


def slot_mask(states: Tensor, projection_type: str, kernel_size: int | None, lengths: Tensor | None) -> Tensor | None:
    """(1 or B, K') bool, True at slots with a valid token; None if all slots have one. states: (..., N, D)."""
    if projection_type == "linear" or (lengths is None and not is_tracing(states)):
        return None
    return slot_counts(states.shape[-2], lengths, kernel_size, states) > 0


def _by_rank(tensors: tuple[Tensor, ...], mask: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """States (B, H, N, D) with the valid tokens of each row first and zeros after them, and L, (B,)."""
    if mask is None:
        return tensors, None
    positions, lengths = positions_by_rank(mask), mask.sum(dim=-1)
    padding = torch.arange(mask.shape[1], device=mask.device) >= lengths[:, None]
    ranked = (take_tokens(states, positions) for states in tensors)
    return tuple(states.masked_fill(padding[:, None, :, None], 0) for states in ranked), lengths
