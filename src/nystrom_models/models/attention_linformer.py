# SPDX-License-Identifier: Apache-2.0
"""Linformer attention: keys and values of a sequence are projected to K slots, then attended to as usual.

Wang et al. 2020, "Linformer: Self-Attention with Linear Complexity", arXiv:2006.04768.

Legend: B batch, H heads, N tokens, L valid tokens of a row, K slots (the paper's k), C = H·D width, D head size,
P the longest sequence a projection is made for, S tokens of a slot, R chosen rows. A mask is (B, N), bool, True at
valid tokens. The token of rank r among the valid ones uses column r of a projection, wherever it lies.

For each row of the batch and each head (eq. 7 of the paper):

    K' = E (X W_k) + b_k,  V' = F (X W_v) + b_v        K×D
    out = softmax(q K'ᵀ / √D) V'

The bias comes after the projection, as in the authors' code. E and F are K×P matrices ("linear"), or act on slots of S
consecutive tokens: their mean, their maximum by channel, or a weighted sum with S taps ("conv", stride = kernel = S).
Where a projection is linear and shared by the heads, E (X W) = (E X) W: K rows go through W instead of N.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention_ops import (
    attend,
    depthwise_convolution,
    gather_tokens,
    is_tracing,
    pad_tokens,
    positions_by_rank,
    split_heads,
)

# ---- reference: one row of the batch at a time, the paper's equation in order ----


def _projection_matrix(
    projected: Tensor, projection: Tensor | None, projection_type: str, kernel_size: int | None
) -> Tensor:
    """E as a matrix (H, K', L) acting on the valid tokens of a row, whose projected states are (H, L, D).

    A maximum is no matrix: here the weight of a token in a slot is the share of channels in which it is the maximum.
    """
    heads, length, _ = projected.shape
    if projection_type == "linear":
        return projection[..., :length].expand(heads, -1, -1)
    slots = -(-length // kernel_size)
    matrix = projected.new_zeros(heads, slots, length)
    for slot in range(slots):
        tokens = slice(slot * kernel_size, min((slot + 1) * kernel_size, length))
        count = tokens.stop - tokens.start
        if projection_type == "mean_pool":
            matrix[:, slot, tokens] = 1 / count
        elif projection_type == "conv":
            matrix[:, slot, tokens] = projection[..., :count]
        else:
            largest = projected[:, tokens].argmax(dim=1)  # (H, D)
            matrix[:, slot, tokens] = F.one_hot(largest, count).to(matrix.dtype).mean(dim=1)
    return matrix


def _project_reference(
    projected: Tensor, projection: Tensor | None, projection_type: str, kernel_size: int | None
) -> Tensor:
    """E (X W), (H, K', D), from X W of a row's valid tokens, (H, L, D)."""
    if projection_type == "max_pool":
        return torch.stack([part.amax(dim=1) for part in projected.split(kernel_size, dim=1)], dim=1)
    return _projection_matrix(projected, projection, projection_type, kernel_size) @ projected


def _probabilities_reference(
    query: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    projection_type: str,
    kernel_size: int | None,
) -> Tensor:
    """softmax(q K'ᵀ / √D), (H, R, K'), for queries (H, R, D) and a row's valid tokens (L, C)."""
    heads, _, dim = query.shape
    keys = split_heads(F.linear(states, weight)[None], heads)[0]
    keys = _project_reference(keys, projection, projection_type, kernel_size)
    if bias is not None:
        keys = keys + bias.view(heads, 1, dim)
    return torch.softmax(query @ keys.mT * dim**-0.5, dim=-1)


def linformer_attention_map(
    query: Tensor,
    hidden_states: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    key_projection: Tensor | None,
    value_projection: Tensor | None,
    mask: Tensor | None = None,
    *,
    projection_type: str = "linear",
    kernel_size: int | None = None,
    rows: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """The matrix softmax(q K'ᵀ / √D) F that carries X W_v to the output (without b_v).

    Args:
        rows: (R,) or (B, R) int64, the queries whose rows are wanted; None for all N.
        The others: see `linformer_attention`. `value_bias` does not enter.

    Returns: (B, H, R, N), zero in the columns of invalid tokens. Its rows need not sum to 1: those of F do not. For
    "max_pool", F holds the share of channels in which a token is its slot's maximum. Memory is linear in N where rows
    are given.
    """
    batch, heads, length, _ = query.shape
    maps = []
    for row in range(batch):
        valid = torch.arange(length, device=query.device) if mask is None else mask[row].nonzero().squeeze(-1)
        wanted = query[row]
        if rows is not None:
            wanted = wanted[:, rows if rows.dim() == 1 else rows[row]]
        full = query.new_zeros(heads, wanted.shape[1], length)
        if len(valid):
            states = hidden_states[row, valid]
            probabilities = _probabilities_reference(
                wanted, states, key_weight, key_bias, key_projection, projection_type, kernel_size
            )
            probabilities = torch.dropout(probabilities, dropout_p, train=dropout_p > 0)
            values = split_heads(F.linear(states, value_weight)[None], heads)[0]
            matrix = _projection_matrix(values, value_projection, projection_type, kernel_size)
            full = full.index_copy(-1, valid, probabilities @ matrix)
        maps.append(full)
    return torch.stack(maps)


def linformer_attention_reference(
    query: Tensor,
    hidden_states: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    key_projection: Tensor | None,
    value_projection: Tensor | None,
    mask: Tensor | None = None,
    *,
    projection_type: str = "linear",
    kernel_size: int | None = None,
    conv_weight: Tensor | None = None,
    dropout_p: float = 0.0,
) -> Tensor:
    """`linformer_attention` written as in the paper, row by row: every token through W, then through E."""
    batch, heads, _, dim = query.shape
    contexts = []
    for row in range(batch):
        states = hidden_states[row] if mask is None else hidden_states[row][mask[row]]
        if len(states) == 0:
            contexts.append(torch.zeros_like(query[row]))
            continue
        probabilities = _probabilities_reference(
            query[row], states, key_weight, key_bias, key_projection, projection_type, kernel_size
        )
        probabilities = torch.dropout(probabilities, dropout_p, train=dropout_p > 0)
        values = split_heads(F.linear(states, value_weight)[None], heads)[0]
        values = _project_reference(values, value_projection, projection_type, kernel_size)
        if value_bias is not None:
            values = values + value_bias.view(heads, 1, dim)
        contexts.append(probabilities @ values)
    context = torch.stack(contexts)
    if conv_weight is not None:
        values = split_heads(F.linear(hidden_states, value_weight, value_bias), heads)
        context = context + depthwise_convolution(values, conv_weight, mask)
    return context


# ---- fast path ----


def _columns(projection: Tensor, length: int) -> Tensor:
    """The first columns of E (..., K, P): (..., K, N)."""
    if is_tracing():
        # A copy: a view of the whole matrix and of a part of it would make different graphs.
        return projection.index_select(-1, torch.arange(length, device=projection.device))
    return projection[..., :length]


def _num_slots(length: int, kernel_size: int) -> int:
    """ceil(N / S), or more, but at least 2 in a graph, which would otherwise hold only for lengths beyond S."""
    return length // kernel_size + 2 if is_tracing() else -(-length // kernel_size)


def _slots(states: Tensor, kernel_size: int) -> Tensor:
    """(..., N, C) -> (..., K', S, C), zeros after the last token."""
    slots = _num_slots(states.shape[-2], kernel_size)
    states = F.pad(states, (0, 0, 0, slots * kernel_size - states.shape[-2]))
    if is_tracing():
        # The same view; this operator leaves no condition on the length in the graph.
        return states.unfold(-2, kernel_size, kernel_size).mT
    return states.unflatten(-2, (slots, kernel_size))


def _project_shared(
    states: Tensor, projection: Tensor | None, lengths: Tensor | None, projection_type: str, kernel_size: int | None
) -> Tensor:
    """E X, (B, K', C), for a linear E shared by the heads; X (B, N, C) by rank, zero at padding."""
    if projection_type == "linear":
        return _columns(projection, states.shape[1]) @ states
    slots = _slots(states, kernel_size)
    if projection_type == "conv":
        return (slots * projection[:, None]).sum(dim=-2)
    count = _slot_counts(states, lengths, kernel_size)
    return slots.sum(dim=-2) / count[..., None].clamp_min(1).to(states.dtype)


def _project_heads(
    states: Tensor, projection: Tensor | None, lengths: Tensor | None, projection_type: str, kernel_size: int | None
) -> Tensor:
    """E (X W), (B, H, K', D), for one E a head or a maximum; X W (B, H, N, D) by rank, zero at padding."""
    if projection_type == "linear":
        return _columns(projection, states.shape[2]) @ states
    slots = _slots(states, kernel_size)
    if projection_type == "conv":
        return (slots * projection[:, None, :, None]).sum(dim=-2)
    count = _slot_counts(states, lengths, kernel_size)  # (1 or B, K')
    inside = torch.arange(kernel_size, device=states.device) < count[..., None]
    largest = slots.masked_fill(~inside[:, None, :, :, None], torch.finfo(states.dtype).min).amax(dim=-2)
    return largest.masked_fill((count == 0)[:, None, :, None], 0)


def _slot_counts(states: Tensor, lengths: Tensor | None, kernel_size: int) -> Tensor:
    """(B, K') int64, or (1, K') without padding: valid tokens in each slot of states (..., N, C)."""
    length = states.shape[-2]
    start = torch.arange(_num_slots(length, kernel_size), device=states.device) * kernel_size
    ends = torch.full((1, 1), length, device=states.device) if lengths is None else lengths[:, None]
    return (ends - start).clamp(min=0, max=kernel_size)


def linformer_attention(
    query: Tensor,
    hidden_states: Tensor,
    key_weight: Tensor,
    value_weight: Tensor,
    key_bias: Tensor | None,
    value_bias: Tensor | None,
    key_projection: Tensor | None,
    value_projection: Tensor | None,
    mask: Tensor | None = None,
    *,
    projection_type: str = "linear",
    kernel_size: int | None = None,
    conv_weight: Tensor | None = None,
    dropout_p: float = 0.0,
    tokens: Tensor | None = None,
) -> Tensor:
    """Linformer attention in O(N K) time and O(N) memory, from the layer's input to the heads' outputs.

    Args:
        query: (B, H, N, D). hidden_states: (B, N, C), the layer's input X.
        key_weight, value_weight: (C, C), as in `nn.Linear.weight`. key_bias, value_bias: (C,) or None.
        key_projection, value_projection: E and F. For "linear" (K, P), or (H, K, P) with one a head, P >= N; for
            "conv" the taps, (S,) or (H, S); None for pooling. The same tensor for both is projected with once.
        mask: (B, N) bool, True at valid tokens, wherever they lie; None for all valid.
        projection_type: "linear", "mean_pool", "max_pool" or "conv".
        kernel_size: S, for all types but "linear".
        conv_weight: (H, 1, kernel, 1), a depthwise convolution of V that is added; None for none.
        dropout_p: probability of dropping an attention weight.
        tokens: (T,) int64, ascending, the places of the valid tokens in the flattened mask: `hidden_states` is then
            (1, T, C), of these tokens alone, and no linear layer sees padding.

    Returns: (B, H, N, D). Values at invalid tokens are finite and mean nothing.
    """
    heads = query.shape[1]
    states, by_rank, lengths, slot_mask = hidden_states, None, None, None
    if mask is None and projection_type != "linear" and is_tracing():
        # There may be slots without a token.
        mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    if mask is not None:
        lengths = mask.long().sum(dim=-1)
        within = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
        if tokens is None:
            states = gather_tokens(hidden_states, positions_by_rank(mask))
            states = states * within[..., None].to(states.dtype)
        else:
            by_rank = within.flatten().nonzero_static(size=len(tokens)).squeeze(-1)
            states = pad_tokens(hidden_states, by_rank, mask.shape)
        if projection_type != "linear":
            slot_mask = _slot_counts(states, lengths, kernel_size) > 0

    def project(weight: Tensor, bias: Tensor | None, projection: Tensor | None, shared: Tensor | None) -> Tensor:
        if shared is not None:
            return split_heads(F.linear(shared, weight, bias), heads)
        if mask is None or by_rank is None:
            projected = F.linear(states, weight)
        else:
            projected = pad_tokens(F.linear(hidden_states, weight), by_rank, mask.shape)
        projected = split_heads(projected, heads)
        projected = _project_heads(projected, projection, lengths, projection_type, kernel_size)
        return projected if bias is None else projected + bias.view(heads, 1, -1)

    def share(projection: Tensor | None) -> Tensor | None:
        by_head = projection is not None and projection.dim() == (3 if projection_type == "linear" else 2)
        if by_head or projection_type == "max_pool":
            return None
        return _project_shared(states, projection, lengths, projection_type, kernel_size)

    shared_key = share(key_projection)
    shared_value = shared_key if value_projection is key_projection else share(value_projection)
    keys = project(key_weight, key_bias, key_projection, shared_key)
    values = project(value_weight, value_bias, value_projection, shared_value)
    skip = None
    if conv_weight is not None:
        token_values = F.linear(hidden_states, value_weight, value_bias)
        if mask is not None and tokens is not None:
            token_values = pad_tokens(token_values, tokens, mask.shape)
        skip = depthwise_convolution(split_heads(token_values, heads), conv_weight, mask)
    return attend(query, keys, values, slot_mask, dropout_p, skip)
