# SPDX-License-Identifier: Apache-2.0
"""The embeddings of every family.

Legend: B batch, N tokens, C hidden size, E width of the embeddings, which is C where `embedding_size` is None.
"""

import math

import torch
from torch import Tensor, nn

from .batch import Batch
from .configuration_base import BaseConfig


class Embeddings(nn.Module):
    """Sum of word, position and token type embeddings, normalised; projected to C if `embedding_size` is given."""

    def __init__(self, config: BaseConfig):
        super().__init__()
        self.first_position = config.first_position
        width = config.embedding_width
        self.word_embeddings = nn.Embedding(config.vocab_size, width, padding_idx=config.pad_token_id)
        self.position_embeddings = position_embeddings(config)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.projection = None if config.embedding_size is None else nn.Linear(width, config.hidden_size)

    def forward(
        self,
        inputs: Tensor,
        batch: Batch,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """inputs: token ids (B, N) or word embeddings (B, N, E). Returns states in the layout of the layers.

        If `position_ids` are not given, the valid tokens are counted, so that padding on the left changes no position.
        """
        # Words are looked up in the shape as given: hooks on that module (NEFTune's noise) expect (B, N, E).
        if inputs.dim() == 2:
            words = self.word_embeddings(inputs)
        elif batch.given_mask is None:
            words = inputs
        else:  # padding may hold anything, also NaN, which no later zero of a mask removes
            words = inputs.masked_fill(~batch.given_mask[..., None], 0)
        embeddings = batch.enter(words)
        if position_ids is None:
            position_ids = batch.positions + self.first_position
        else:
            position_ids = batch.enter(position_ids.expand(batch.shape))
        if token_type_ids is None:
            token_type_ids = torch.zeros(embeddings.shape[:2], dtype=torch.long, device=embeddings.device)
        else:
            token_type_ids = batch.enter(token_type_ids.expand(batch.shape))
        embeddings = embeddings + self.token_type_embeddings(token_type_ids)
        if isinstance(self.position_embeddings, SinusoidalPositions):
            embeddings = embeddings + self.position_embeddings(position_ids, embeddings.dtype)
        else:
            embeddings = embeddings + self.position_embeddings(position_ids)
        embeddings = self.dropout(self.LayerNorm(embeddings))
        return embeddings if self.projection is None else self.projection(embeddings)


class SinusoidalPositions(nn.Module):
    """Sines and cosines of the position, without parameters and without a limit of the length (Vaswani et al. 2017,
    arXiv:1706.03762, section 3.5), scaled to the size that learned positions have at the start of training.
    """

    def __init__(self, config: BaseConfig):
        super().__init__()
        self.width = config.embedding_width
        self.scale = math.sqrt(2) * config.initializer_range

    def forward(self, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """position_ids: (...) int64 -> (..., E) of this dtype."""
        device = position_ids.device
        # In float32, an angle is off by 6e-8 of its size: that of token 100,000 by 4e-3. MPS has no float64.
        precise = torch.float32 if device.type == "mps" else torch.float64
        pair = torch.arange((self.width + 1) // 2, dtype=precise, device=device)
        angles = position_ids[..., None].to(precise) * torch.exp(pair * (-2 * math.log(10_000) / self.width))
        turns = angles / (2 * math.pi)
        angles = (2 * math.pi * (turns - turns.floor())).to(torch.promote_types(dtype, torch.float32))
        waves = torch.cat([angles.sin(), angles.cos()], dim=-1)[..., : self.width]
        return (self.scale * waves).to(dtype)


def is_sinusoidal(config: BaseConfig) -> bool:
    """Whether positions are sines and cosines instead of a learned table."""
    return getattr(config, "position_embedding_type", "learned") == "sinusoidal"


def position_embeddings(config: BaseConfig) -> nn.Module:
    """The module for the family's `position_embedding_type`; a learned table if the family has no such field."""
    if is_sinusoidal(config):
        return SinusoidalPositions(config)
    return nn.Embedding(config.max_position_embeddings + config.first_position, config.embedding_width)


def repeat_positions(table: Tensor, first: int, length: int) -> Tensor:
    """A table of positions (P, E) with `length` rows from `first` on, repeated or cut; the rows before are kept.

    Repeated as for Longformer (Beltagy et al. 2020, arXiv:2004.05150, section 5).
    """
    used = table[first:]
    return torch.cat([table[:first], used[torch.arange(length, device=table.device) % len(used)]])
