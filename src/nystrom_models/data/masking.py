# SPDX-License-Identifier: Apache-2.0
"""Batches for masked language modeling (MLM) and sentence-order prediction (SOP), with new masks in every epoch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from ..models.losses import IGNORED
from .special_tokens import Template


@dataclass
class PretrainingCollator:
    """Makes batches of rows of [`pretraining_dataset`].

    A row in which a sentence begins is split there, at a random one of its sentences, into the pair
    `[CLS] A [SEP] B [SEP]`. The pair is swapped with probability one half. Other rows become `[CLS] A [SEP]`, for MLM
    only. Then tokens are masked, at least one in each row.

    All of this depends only on `seed`, the epoch and the row's `index`: not on the batch, the number of processes or
    earlier random numbers.

    Args:
        tokenizer: with a mask token.
        mlm_probability: share of tokens (or words) to predict.
        whole_word_mask: whether the pieces of a word are masked together; the rows need `word_starts`.
        mask_replace_prob: share of these tokens that are replaced by the mask token.
        random_replace_prob: share of these tokens that are replaced by a random token; the rest stay unchanged.
        sentence_order: whether rows are split into pairs.
        pad_to_multiple_of: rounds the padded length up.
        seed: of splits, swaps and masks.
    """

    tokenizer: PreTrainedTokenizerBase
    mlm_probability: float = 0.15
    whole_word_mask: bool = False
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    sentence_order: bool = True
    pad_to_multiple_of: int | None = None
    seed: int = 0

    def __post_init__(self):
        if not 0 < self.mlm_probability <= 1:
            raise ValueError(f"mlm_probability must lie above 0 and up to 1, but is {self.mlm_probability}.")
        if min(self.mask_replace_prob, self.random_replace_prob) < 0 or (
            self.mask_replace_prob + self.random_replace_prob > 1
        ):
            raise ValueError(
                "mask_replace_prob and random_replace_prob must not be negative and add up to 1 at most, but are "
                f"{self.mask_replace_prob} and {self.random_replace_prob}."
            )
        if self.tokenizer.mask_token_id is None:
            raise ValueError("tokenizer has no mask token: add one, or use a tokenizer of a masked language model.")
        if self.tokenizer.pad_token_id is None:
            raise ValueError("tokenizer has no padding token: add one, such as [PAD].")
        self.epoch = 0
        self._templates = {num_texts: Template(self.tokenizer, num_texts) for num_texts in (1, 2)}
        self._ordinary = np.ones(len(self.tokenizer), dtype=bool)
        self._ordinary[self.tokenizer.all_special_ids] = False

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch of splits, swaps and masks, for rows without an `epoch` of their own."""
        self.epoch = epoch

    def _rng(self, row: Mapping[str, Any]) -> np.random.Generator:
        return np.random.default_rng((self.seed, row.get("epoch", self.epoch), row["index"]))

    def segments(self, row: Mapping[str, Any]) -> tuple[list[np.ndarray], int]:
        """What a batch shows of a row, before tokens are masked: the ids (tokens,) of its one or two segments, int64,
        in the order in which they are shown, and the label of this order."""
        parts, order = self._segments(row, self._rng(row))
        ids = np.asarray(row["input_ids"], dtype=np.int64)
        return [ids[part] for part in parts], order

    def _segments(self, row: Mapping[str, Any], rng: np.random.Generator) -> tuple[list[slice], int]:
        """The parts of a row in the order in which they are shown, and the label of that order."""
        length, starts = len(row["input_ids"]), row["sentence_starts"]
        if not self.sentence_order or len(starts) == 0:
            return [slice(0, length)], IGNORED
        at = int(starts[rng.integers(len(starts))])
        swapped = int(rng.random() < 0.5)
        parts = [slice(0, at), slice(at, length)]
        return parts[::-1] if swapped else parts, swapped

    def _predicted(self, row: Mapping[str, Any], ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Whether each token is to be predicted, bool of shape (tokens,)."""
        ordinary = self._ordinary[ids]
        if self.whole_word_mask:
            if "word_starts" not in row:
                raise ValueError("whole_word_mask needs rows of pretraining_dataset(..., with_word_starts=True).")
            # The first token of a row begins a word, or the rest of a word.
            groups = np.cumsum(np.concatenate([[0], np.asarray(row["word_starts"], dtype=bool)[1:]]))
        else:
            groups = np.arange(len(ids))
        chosen = rng.random(groups[-1] + 1) < self.mlm_probability
        predicted = chosen[groups] & ordinary
        if not predicted.any() and ordinary.any():
            one = groups[rng.choice(np.flatnonzero(ordinary))]
            predicted = (groups == one) & ordinary
        return predicted

    def _masked(self, ids: np.ndarray, predicted: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The ids, with those of predicted tokens replaced."""
        places = np.flatnonzero(predicted)
        draws = rng.random(len(places))
        replaced = ids.copy()
        replaced[places[draws < self.mask_replace_prob]] = self.tokenizer.mask_token_id
        random = places[
            (draws >= self.mask_replace_prob) & (draws < self.mask_replace_prob + self.random_replace_prob)
        ]
        drawn = rng.integers(len(self._ordinary), size=len(random))
        # Special tokens are drawn again: of a small vocabulary, they are a large part.
        special = ~self._ordinary[drawn]
        if special.any():
            drawn[special] = rng.choice(np.flatnonzero(self._ordinary), size=special.sum())
        replaced[random] = drawn
        return replaced

    def _example(self, row: Mapping[str, Any]) -> tuple[list[np.ndarray], int]:
        """Ids, token types and labels, all of the same length, and the label of the sentence order."""
        rng = self._rng(row)
        segments, order = self._segments(row, rng)
        ids = np.asarray(row["input_ids"], dtype=np.int64)
        predicted = self._predicted(row, ids, rng)
        labels = np.where(predicted, ids, IGNORED)
        ids = self._masked(ids, predicted, rng)
        template = self._templates[len(segments)]
        parts: list[tuple[Any, Any, Any]] = []
        for i, segment in enumerate(segments):
            parts.append(self._special(template, i))
            text = ids[segment]
            parts.append((text, np.full(len(text), template.text_types[i]), labels[segment]))
        parts.append(self._special(template, len(segments)))
        return [np.concatenate(column) for column in zip(*parts, strict=True)], order

    @staticmethod
    def _special(template: Template, place: int) -> tuple[list[int], list[int], list[int]]:
        """Ids, token types and labels of special tokens."""
        ids = template.special[place]
        return ids, template.special_types[place], [IGNORED] * len(ids)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Returns `input_ids`, `token_type_ids`, `attention_mask` and `labels` (-100 where nothing is predicted),
        int64 of shape (batch, length), and `sentence_order_label`, int64 of shape (batch,): 1 = swapped, 0 = in order,
        -100 = one segment."""
        examples = [self._example(row) for row in rows]
        length = max(len(columns[0]) for columns, _ in examples)
        if self.pad_to_multiple_of is not None:
            length = -(-length // self.pad_to_multiple_of) * self.pad_to_multiple_of
        shape = (len(examples), length)
        batch = {
            "input_ids": np.full(shape, self.tokenizer.pad_token_id),
            "token_type_ids": np.full(shape, self.tokenizer.pad_token_type_id),
            "labels": np.full(shape, IGNORED),
            "attention_mask": np.zeros(shape, dtype=np.int64),
        }
        left = self.tokenizer.padding_side == "left"
        for i, (columns, _) in enumerate(examples):
            size = len(columns[0])
            place = slice(length - size, length) if left else slice(0, size)
            for name, column in zip(("input_ids", "token_type_ids", "labels"), columns, strict=True):
                batch[name][i, place] = column
            batch["attention_mask"][i, place] = 1
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        return tensors | {"sentence_order_label": torch.tensor([order for _, order in examples])}
