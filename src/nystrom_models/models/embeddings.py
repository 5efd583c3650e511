# SPDX-License-Identifier: Apache-2.0
"""The embeddings of every family.

Legend: B batch, N tokens, C hidden size.
"""

import torch
from torch import Tensor, nn

from .batch import Batch
from .configuration_base import BaseConfig


class Embeddings(nn.Module):
    """Sum of word, position and token type embeddings, normalised."""

    def __init__(self, config: BaseConfig):
        super().__init__()
        self.first_position = config.first_position
        positions = config.max_position_embeddings + config.first_position
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(positions, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        inputs: Tensor,
        batch: Batch,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """inputs: token ids (B, N) or word embeddings (B, N, C). Returns states in the layout of the layers.

        Where no `position_ids` are given, they count the valid tokens, so that padding on the left keeps them.
        """
        # Words are looked up before they enter: what is hooked to that module (NEFTune's noise) goes by (B, N, C).
        words = self.word_embeddings(inputs) if inputs.dim() == 2 else inputs
        embeddings = batch.enter(words)
        if position_ids is None:
            position_ids = batch.positions + self.first_position
        else:
            position_ids = batch.enter(position_ids.expand(batch.shape))
        if token_type_ids is None:
            token_type_ids = torch.zeros(embeddings.shape[:2], dtype=torch.long, device=embeddings.device)
        else:
            token_type_ids = batch.enter(token_type_ids.expand(batch.shape))
        embeddings = embeddings + self.token_type_embeddings(token_type_ids) + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


def repeat_positions(table: Tensor, first: int, length: int) -> Tensor:
    """A table of positions (P, C) with `length` rows from `first` on, repeated or cut; the rows before are kept.

    Repeated as for Longformer (Beltagy et al. 2020, arXiv:2004.05150, section 5).
    """
    used = table[first:]
    return torch.cat([table[:first], used[torch.arange(length, device=table.device) % len(used)]])
