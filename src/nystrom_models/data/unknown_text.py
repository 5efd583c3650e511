# SPDX-License-Identifier: Apache-2.0
"""How much of the texts a tokenizer replaces by its unknown token.

WordPiece replaces a whole word if one of its characters is not in the vocabulary, or if it is longer than 100
characters: a genome, or a sentence in a script without spaces, becomes a single unknown token.
"""

import warnings
from collections.abc import Iterable, Sequence

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

# What is looked at: documents that are spread over a data set, and of each its beginning.
NUM_DOCUMENTS = 100
NUM_CHARACTERS = 10_000

REMEDY = (
    "use a tokenizer for such texts. examples/train_tokenizer.py trains one; with --tokenizer_type character for "
    "texts without spaces, such as genomes"
)

# Shares of the characters: from the first on, a warning; above the second, an error.
SUSPICIOUS_SHARE = 0.05
LARGEST_SHARE = 0.5


def unknown_characters(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str | list[str]]) -> tuple[float, str]:
    """The share of the characters of texts, without those that no token contains, that become the unknown token.

    Args:
        tokenizer: with a slow one, which tells no offsets, or one without an unknown token, the share is 0.
        texts: each is read up to its first 10,000 characters. Some are lists of words, without the spaces between
            them: a tokenizer of characters may not know these, and reads none.

    Returns: the share, and a piece of text that becomes an unknown token, or "".
    """
    if not tokenizer.is_fast or tokenizer.unk_token_id is None:
        return 0.0, ""
    known, unknown, example = 0, 0, ""
    for text in texts:
        beginning = text[:NUM_CHARACTERS] if isinstance(text, str) else _beginning(text)
        if not beginning:
            continue
        options = {"is_split_into_words": isinstance(text, list), "add_special_tokens": False, "verbose": False}
        encoding = tokenizer(beginning, **options)[0]
        for token, word, (start, end) in zip(encoding.ids, encoding.word_ids, encoding.offsets, strict=True):
            if token == tokenizer.unk_token_id:
                unknown += end - start
                whole = text[word] if isinstance(text, list) else text
                example = example or whole[start:end]
            else:
                known += end - start
    return unknown / max(known + unknown, 1), example


def _beginning(words: Sequence[str]) -> list[str]:
    """The words of a text up to its first 10,000 characters."""
    lengths = np.cumsum([len(word) for word in words])
    number = int(np.searchsorted(lengths, NUM_CHARACTERS))
    before = int(lengths[number - 1]) if number else 0
    return [*words[:number], *(word[: NUM_CHARACTERS - before] for word in words[number : number + 1])]


def check_known(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str | list[str]], where: str, remedy: str = REMEDY
) -> None:
    """Warns if a tokenizer does not know 5 % of the characters of `texts`, or more.

    Args:
        tokenizer: the one to be used.
        texts: a sample of the texts.
        where: what the texts are, for the message.
        remedy: what to do, for the message.

    Raises:
        ValueError: if it does not know more than half of them.
    """
    share, example = unknown_characters(tokenizer, texts)
    if share < SUSPICIOUS_SHARE:
        return
    example = example if len(example) <= 30 else f"{example[:30]}…"
    message = (
        f"The tokenizer replaces {share:.0%} of the characters of {where} by {tokenizer.unk_token}, for example "
        f"{example!r}: {remedy}."
    )
    if share > LARGEST_SHARE:
        raise ValueError(message)
    warnings.warn(message, stacklevel=3)


def sample_documents(dataset: Dataset | IterableDataset, columns: Sequence[str]) -> Dataset | IterableDataset:
    """These columns of up to 100 documents: of a data set from all its parts, of a stream the first ones."""
    dataset = dataset.select_columns(list(columns))
    if isinstance(dataset, IterableDataset):
        return dataset.take(NUM_DOCUMENTS)
    spread = np.linspace(0, max(len(dataset) - 1, 0), min(len(dataset), NUM_DOCUMENTS))
    return dataset.select(spread.astype(int))


def check_known_documents(
    dataset: Dataset | IterableDataset,
    columns: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    remedy: str = REMEDY,
) -> None:
    """[`check_known`] with the documents of [`sample_documents`].

    columns: these hold texts, or lists of words; other values are left out.
    """
    values = (value for row in sample_documents(dataset, columns) for value in row.values())
    texts = (
        [word for word in value if isinstance(word, str)] if isinstance(value, list) else value
        for value in values
        if isinstance(value, str | list)
    )
    check_known(tokenizer, texts, where, remedy)
