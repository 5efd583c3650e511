# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens to start from and to measure on: from texts, from given token ids, or random.

Legend: R rows, N tokens of a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

# The most tokens that are read of a sample: they take about the time of a few hundred training steps, and no more
# memory.
MOST_TOKENS = 32_768
# One row in this many is held out to measure on.
HELD_OUT = 4


class Sample:
    """A sequence of tokens, which is cut into rows of any length.

    tokens: (T,) int64. before, after: special tokens at the beginning and at the end of each row.
    kind: the name of this kind of sample in the report.
    """

    def __init__(self, tokens: Tensor, kind: str, before: Sequence[int] = (), after: Sequence[int] = ()):
        self.tokens = tokens
        self.kind = kind
        self.before, self.after = torch.tensor(list(before)), torch.tensor(list(after))

    @classmethod
    def of_texts(
        cls, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, most_tokens: int | None = None
    ) -> "Sample":
        """The concatenated texts, between the tokenizer's special tokens; only the first ones, as soon as they have
        `most_tokens`."""
        stream: list[int] = []
        for text in texts:
            # No warning about texts longer than the model: they are cut into rows.
            stream += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if most_tokens is not None and len(stream) >= most_tokens:
                break
        if not stream:
            raise ValueError("sample has no tokens: give texts that are not empty.")
        unknown = stream.count(tokenizer.unk_token_id) / len(stream)
        if unknown > 0.5:  # rows of equal tokens would say nothing about texts
            raise ValueError(
                f"{unknown:.0%} of the tokens of sample (--sample_file) are {tokenizer.unk_token}: give texts in the "
                "language of the source's tokenizer."
            )
        around = tokenizer("", add_special_tokens=True)["input_ids"]
        first = tokenizer.cls_token_id if tokenizer.cls_token_id is not None else tokenizer.bos_token_id
        before = around[:1] if around and around[0] == first else []
        return cls(torch.tensor(stream), "texts", before, around[len(before) :])

    @classmethod
    def of_rows(cls, rows: Tensor, vocab_size: int) -> "Sample":
        """The token ids (R, N) int64, without padding."""
        if rows.dim() != 2 or rows.is_floating_point() or not rows.numel():
            raise ValueError(f"sample has shape {tuple(rows.shape)}, but must be token ids (rows, length), or texts.")
        if rows.min() < 0 or rows.max() >= vocab_size:
            raise ValueError(
                f"sample holds ids from {int(rows.min())} to {int(rows.max())}, which must lie between 0 and "
                f"vocab_size - 1 = {vocab_size - 1}."
            )
        return cls(rows.flatten().long().cpu(), "token ids")

    @classmethod
    def random(cls, vocab_size: int, count: int, pad_token_id: int | None) -> "Sample":
        """Random ids, always the same. None is padding, because some models compute positions from the padding ids."""
        tokens = torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(0))
        if pad_token_id is not None:
            tokens = tokens.masked_fill(tokens == pad_token_id, (pad_token_id + 1) % vocab_size)
        return cls(tokens, "random token ids")

    def rows(self, length: int, most_tokens: int = MOST_TOKENS, least: int = 1) -> Tensor:
        """Full rows (R, length) int64, as many as there are tokens for, and at least `least`.

        Raises:
            ValueError: if there are too few tokens.
        """
        inner = length - len(self.before) - len(self.after)
        if inner < 1:
            raise ValueError(f"A row of {length} tokens has room only for the special tokens: use longer rows.")
        count = len(self.tokens) // inner
        if count < least:
            raise ValueError(
                f"sample has {len(self.tokens):,} tokens, but {least} rows of {length} tokens need {least * inner:,}: "
                "give more text."
            )
        count = max(least, min(count, most_tokens // length))
        rows = self.tokens[: count * inner].view(count, inner)
        return torch.cat([self.before.expand(count, -1), rows, self.after.expand(count, -1)], dim=1).long()

    def split(self, length: int) -> tuple[Tensor, Tensor]:
        """Rows to start from and held-out rows to measure on, (R, length) each; raises the errors of `rows`."""
        rows = self.rows(length, least=2)
        held_out = torch.arange(len(rows)) % HELD_OUT == min(HELD_OUT, len(rows)) - 1
        return rows[~held_out], rows[held_out]
