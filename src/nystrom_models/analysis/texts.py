# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens from texts, all of exactly the same length."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.special_tokens import Template
from ..models.modeling_base import BasePreTrainedModel


def longest_row(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The greatest length that both model and tokenizer take, special tokens included."""
    limits = [tokenizer.model_max_length]
    if (length := getattr(model.config, "max_position_embeddings", None)) is not None:
        limits.append(length)
    if not isinstance(model, BasePreTrainedModel):
        for name, module in model.named_modules():
            if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
                # RoBERTa's positions start after that of padding.
                unused = 0 if module.padding_idx is None else module.padding_idx + 1
                limits.append(module.num_embeddings - unused)
    return min(limits)


def token_rows(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, length: int, count: int
) -> list[dict[str, Tensor]]:
    """Arguments of model calls: `count` rows of `length` tokens from the beginnings of texts, one row for each call.

    Texts that are long enough give a row each; shorter ones are joined with the next ones.

    Raises:
        ValueError: if the texts do not fill one row, or a row has room only for the special tokens.
    """
    room = length - tokenizer.num_special_tokens_to_add()
    if room < 1:
        raise ValueError(f"A row of {length} tokens has room only for the special tokens.")
    before, after = Template(tokenizer, num_texts=1).special
    pieces = _pieces(texts, tokenizer, room, count)
    rows = [{"input_ids": torch.tensor([[*before, *piece, *after]])} for piece in pieces]
    if not rows:
        raise ValueError(f"All texts together have fewer than {length} tokens.")
    return rows


def _pieces(texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, room: int, count: int) -> Iterator[list[int]]:
    joined: list[int] = []
    for text in texts:
        joined += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(joined) >= room:
            yield joined[:room]
            count -= 1
            if count == 0:
                return
            joined = []
