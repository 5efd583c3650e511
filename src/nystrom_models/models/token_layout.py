# SPDX-License-Identifier: Apache-2.0
"""Places and ranks of the valid tokens of a padded batch, and copies of their states between the two orders.

Legend: B batch, N tokens of a row, H heads, D head size, T valid tokens of a batch. A mask is (B, N), bool, True at
valid tokens, which may lie anywhere in a row. The rank of a valid token is its number, from 0, among the valid tokens
of its row.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def token_ranks(mask: Tensor) -> Tensor:
    """(B, N) int64: for a valid token its rank; for others the rank of the last valid token before them, or 0."""
    return (mask.long().cumsum(dim=-1) - 1).clamp_min(0)


def positions_by_rank(mask: Tensor) -> Tensor:
    """(B, N) int64: at column r the position of the valid token of rank r; 0 beyond the last one."""
    batch, length = mask.shape
    positions = torch.arange(length, device=mask.device).expand(batch, length)
    # Invalid tokens all write to one extra column, which is cut off.
    column = torch.where(mask, mask.long().cumsum(dim=-1) - 1, length)
    return positions.new_zeros(batch, length + 1).scatter(1, column, positions)[:, :length]


def gather_tokens(states: Tensor, positions: Tensor) -> Tensor:
    """Rows of states (B, N, C) at positions (B, ...) int64: (B, ..., C)."""
    batch, length = states.shape[:2]
    offset = torch.arange(batch, device=states.device) * length
    flat = positions + offset.view(-1, *[1] * (positions.dim() - 1))
    # An embedding look-up copies whole rows, which a gather along an expanded index does not.
    return F.embedding(flat, states.flatten(0, 1))


def pad_tokens(states: Tensor, places: Tensor, shape: tuple[int, int]) -> Tensor:
    """States (..., C) of T tokens at their places, (T,) int64, in flattened rows, zero elsewhere: (B, N, C)."""
    width = states.shape[-1]
    padded = states.new_zeros(shape[0] * shape[1], width)
    return padded.index_copy_(0, places, states.reshape(-1, width)).view(*shape, width)


def take_tokens(states: Tensor, tokens: Tensor) -> Tensor:
    """The states (B, H, R, D) of chosen tokens, (R,) or (B, R) int64, of states (B, H, N, D)."""
    return split_heads(gather_tokens(merge_heads(states), tokens.expand(len(states), -1)), states.shape[1])


def split_heads(states: Tensor, num_heads: int) -> Tensor:
    """(B, N, H·D) -> (B, H, N, D), a view."""
    batch, length, width = states.shape
    return states.view(batch, length, num_heads, width // num_heads).transpose(1, 2)


def merge_heads(states: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, H·D)."""
    return states.transpose(1, 2).flatten(2)
