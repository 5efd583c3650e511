# SPDX-License-Identifier: Apache-2.0
"""Softmax attention over the valid keys, from which the families build their attention.

Legend: B batch, H heads, N queries, K keys, D head size. A key mask is (B, K), bool, True at valid keys.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import maybe_autocast

from .attention_dropout import attention_with_dropout
from .cpu_blocks import add_attention
from .token_layout import take_tokens
from .tracing import can_read_values, has_tangent

# softmax(query keyᵀ / √D) value, with the arguments of `attend`.
Attend = Callable[..., Tensor]

# Rows are attended to one by one only if each spares at least this many scores on average. A call of its own costs as
# much as 30,000 to 60,000 scores (on a CPU, with 2 and 12 heads); the double of that is safe.
LEAST_SPARED_SCORES = 2**17


def visible_keys(key_mask: Tensor | None) -> Tensor | None:
    """(B, 1, 1, K): the valid keys. In a row without a valid key, all keys, so that attention stays finite."""
    if key_mask is None:
        return None
    return (key_mask | ~key_mask.any(dim=-1, keepdim=True))[:, None, None, :]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    skip: Tensor | None = None,
) -> Tensor:
    """softmax(query keyᵀ / √D) value over the valid keys, plus the skip, without storing the scores.

    Args:
        query: (B, H, N, D). key, value: (B, H, K, D). key_mask: (B, K) bool or None for all valid.
        dropout_p: probability of dropping an attention weight.
        skip: (B, H, N, D), added to the result. On a CPU without gradients it is overwritten by the result.

    Returns: (B, H, N, D). A row without a valid key attends to all of them, so that it stays finite.
    """
    mask = visible_keys(key_mask)
    # Dropout drawn in blocks would differ when a checkpointed layer is recomputed.
    if skip is not None and dropout_p == 0 and _may_be_overwritten(skip, query, key, value, mask):
        return add_attention(F.scaled_dot_product_attention, query, key, value, mask, skip)
    if dropout_p > 0 and query.device.type == "cpu" and _is_plain(query, key, value):
        context = attention_with_dropout(query, key, value, mask, dropout_p)
    else:
        context = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout_p)
    return context if skip is None else context + skip


def _may_be_overwritten(skip: Tensor, *others: Tensor | None) -> bool:
    """Whether a skip may take the result: on a CPU without gradients, if no number of it stands for several, and it
    shares no memory with the others, which are read while it is written."""
    if skip.device.type != "cpu" or torch.is_grad_enabled():
        return False
    known = all(can_read_values(tensor) for tensor in (skip, *others) if tensor is not None)
    if not known or 0 in skip.stride():
        return False
    return not any(torch._C._is_alias_of(skip, tensor) for tensor in others if tensor is not None)  # type: ignore[attr-defined]


def _is_plain(*tensors: Tensor) -> bool:
    """Whether values may be read, and no derivative is carried forward with them."""
    return all(can_read_values(tensor) and not has_tangent(tensor) for tensor in tensors)


def attend_causally(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, eager: bool = False
) -> Tensor:
    """softmax(query keyᵀ / √D) value over the keys up to each query itself, (B, H, N, D).

    mask: (B, N) bool or None for all valid. Padding must come last. eager: in plain operations.
    """
    attend = _attend_to_earlier_plainly if eager else _attend_to_earlier
    return attend_within_rows(query, key, value, mask, attend=attend)


def _attend_to_earlier(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _attend_to_earlier_plainly(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Tensor:
    return softmax_attention_map(query, key, causal=True) @ value


def attend_within_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    skip: Tensor | None = None,
    attend: Attend = attend,
) -> Tensor:
    """`attend` of the tokens of each row to each other (N = K), for which padded tokens need no result.

    On a CPU, rows of unequal lengths are computed one by one, each at its own length, where this takes less time.

    Returns: (B, H, N, D). Values at invalid tokens are finite, but meaningless.
    """
    known = can_read_values(key) and can_read_values(value)
    lengths = _unequal_lengths(query, mask) if known else None
    if lengths is None:
        return attend(query, key, value, mask, dropout_p, skip)
    rows = zip(*(states.split(1) for states in (query, key, value)), lengths, strict=True)
    contexts = (
        attend(*(part.narrow(2, 0, length) for part in row), None, dropout_p)  # shape (1, H, length, D)
        for *row, length in rows
    )
    if skip is not None and _may_be_overwritten(skip):
        for sums, context, length in zip(skip, contexts, lengths, strict=True):
            sums[:, :length] += context[0]
        return skip
    width = query.shape[2]
    context = torch.cat([F.pad(context, (0, 0, 0, width - context.shape[2])) for context in contexts])
    return context if skip is None else context + skip


def _unequal_lengths(query: Tensor, mask: Tensor | None) -> list[int] | None:
    """The lengths of the rows, at least 1, if it takes less time to compute them one by one; otherwise None.

    query: (B, H, N, D). mask: (B, N) bool or None. Valid tokens must come first in each row.
    """
    if mask is None or query.device.type != "cpu" or not can_read_values(query) or not can_read_values(mask):
        return None
    batch, heads, width = query.shape[:3]
    if heads * width**2 < LEAST_SPARED_SCORES:
        return None
    valid = mask.sum(dim=-1, keepdim=True)
    if not (mask == (torch.arange(width, device=mask.device) < valid)).all():
        return None
    lengths: list[int] = valid.flatten().clamp_min(1).tolist()
    spared = heads * (batch * width**2 - sum(length**2 for length in lengths))
    return lengths if spared > batch * LEAST_SPARED_SCORES else None


def attention_weights(query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None = None) -> Tensor:
    """softmax(query keyᵀ · scaling), (B, H, N, K), in float32 at least inside; scaling is 1 / √D by default.

    mask: broadcast to the weights; bool, True where a query sees a key, or numbers that are added to the scores; None
        for all.
    """
    dtype = torch.promote_types(query.dtype, torch.float32)
    # Scores in half precision would keep two or three digits, and their errors become those of the weights, times the
    # scores. Before scaling they may also leave float16's range. So autocast is switched off.
    with maybe_autocast(device_type=query.device.type, enabled=False):
        scores = query.to(dtype) @ key.to(dtype).transpose(-2, -1)
        scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if mask is not None:
            hidden = torch.finfo(dtype).min
            scores = scores.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores + mask
        return torch.softmax(scores, dim=-1).to(query.dtype)


def softmax_attention_map(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None = None,
    *,
    causal: bool = False,
    rows: Tensor | None = None,
    scaling: float | None = None,
) -> Tensor:
    """The weights of exact attention, (B, H, R or N, N), zero in the columns of invalid tokens.

    Args:
        query, key: (B, H, N, D). key_mask: (B, N) bool or None for all valid.
        causal: whether a token attends only to tokens up to itself. rows: (R,) or (B, R) int64, the tokens whose rows
            are returned; None for all. scaling: factor of the scores, 1 / √D by default.
    """
    visible = visible_keys(key_mask)
    query = query if rows is None else take_tokens(query, rows)
    if causal:
        tokens = torch.arange(key.shape[2], device=key.device) if rows is None else rows
        earlier = torch.arange(key.shape[2], device=key.device) <= tokens[..., None]
        earlier = earlier[:, None] if tokens.dim() == 2 else earlier
        visible = earlier if visible is None else visible & earlier
    weights = attention_weights(query, key, visible, scaling)
    return weights if key_mask is None else weights.masked_fill(~key_mask[:, None, None], 0)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """`attend` in plain operations, with the signature of Transformers' `AttentionInterface`.

    attention_mask: (B, 1, 1, K) bool, or None. Returns: context (B, N, H, D) and weights (B, H, N, K).
    """
    weights = attention_weights(query, key, attention_mask, scaling)
    weights = F.dropout(weights, dropout, training=dropout > 0)
    return (weights @ value).transpose(1, 2), weights


def attend_by_name(module: nn.Module, implementation: str) -> Attend:
    """A function like `attend`, for an `attn_implementation`: any function in Transformers' `AttentionInterface`.

    module: the attention layer, which is passed to that function.
    """
    if implementation == "sdpa":
        return attend
    function = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)

    def attend_through_interface(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        skip: Tensor | None = None,
    ) -> Tensor:
        scaling = query.shape[-1] ** -0.5
        context, _ = function(
            module, query, key, value, visible_keys(key_mask), scaling=scaling, dropout=dropout_p, is_causal=False
        )
        context = context.transpose(1, 2)
        return context if skip is None else context + skip

    return attend_through_interface
