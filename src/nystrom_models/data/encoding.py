# SPDX-License-Identifier: Apache-2.0
"""The tokens of documents of any length, a book or a chromosome, in little memory."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding
from transformers import PreTrainedTokenizerBase

# The most characters that are tokenized at once. A tokenizer of characters needs about 500 bytes for each meanwhile.
# Divisible by every number up to 15: tokens of so many bases each (k-mers) keep their frame where a chromosome is cut.
NUM_CHARACTERS = 360_360

# So many characters before the end of a part are searched for a space to cut at.
LONGEST_WORD = 1000


class Tokens(NamedTuple):
    """The tokens of a text, without special tokens."""

    ids: np.ndarray  # int32 (tokens,)
    ends: np.ndarray  # int32 (tokens,), the number of characters up to the end of each token
    word_starts: np.ndarray  # bool (tokens,), whether a token begins a word


def text_parts(text: str, size: int) -> Iterator[tuple[int, str]]:
    """Parts of up to `size` characters, and where they begin. Cuts are at single spaces, which begin the next part, so
    that tokens are those of the whole text; in a text without spaces, a cut is also the border of a token."""
    start = 0
    while len(text) - start > size:
        end = start + size
        for place in range(end, max(end - LONGEST_WORD, start + 1), -1):
            if text[place] == " " and not (text[place - 1].isspace() or text[place + 1 : place + 2].isspace()):
                end = place
                break
        yield start, text[start:end]
        start = end
    yield start, text[start:]


def _tokens(encoding: Encoding, start: int) -> Tokens:
    words = np.array([-1 if word is None else word for word in encoding.word_ids], dtype=np.int32)
    begins = np.ones(len(words), dtype=bool)
    begins[1:] = (words[1:] != words[:-1]) | (words[1:] < 0)
    ends = np.array([end for _, end in encoding.offsets], dtype=np.int32)
    return Tokens(np.array(encoding.ids, dtype=np.int32), np.maximum.accumulate(ends) + np.int32(start), begins)


def _joined(parts: list[Tokens]) -> Tokens:
    """The tokens of all parts. Empties the list: each column is freed when it is joined."""
    columns = [list(column) for column in zip(*parts, strict=True)]
    parts.clear()
    return Tokens(*(np.concatenate(columns.pop(0)) for _ in range(len(columns))))


def encode_texts(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, num_characters: int = NUM_CHARACTERS
) -> list[Tokens]:
    """The tokens of each text, without special tokens.

    Args:
        texts: of any length.
        tokenizer: a fast one.
        num_characters: the most that are tokenized at once. A longer text is cut at spaces, which does not change the
            tokens of WordPiece, byte-level BPE and Unigram.
    """
    found: list[list[Tokens]] = [[] for _ in texts]
    portion: list[tuple[int, int, str]] = []  # text, beginning, part

    def encode() -> None:
        encoded = tokenizer(
            [part for _, _, part in portion],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        for i, (number, start, _) in enumerate(portion):
            found[number].append(_tokens(encoded[i], start))
        portion.clear()

    size = 0
    for number, text in enumerate(texts):
        for start, part in text_parts(text, num_characters):
            if portion and size + len(part) > num_characters:
                encode()
                size = 0
            portion.append((number, start, part))
            size += len(part)
    if portion:
        encode()
    return [_joined(parts) for parts in found]
