# SPDX-License-Identifier: Apache-2.0
"""Rows for masked language modeling (MLM) and sentence-order prediction (SOP), cut from documents.

A row contains token ids and the positions where sentences begin. What changes in every epoch is drawn by
[`PretrainingCollator`]: how a row is split into a pair, whether the pair is swapped, and which tokens are masked.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, Value
from datasets import Sequence as Column
from transformers import PreTrainedTokenizerBase

from .caching import with_code
from .encoding import encode_texts
from .rows import documents_of_a_batch
from .sentences import split_sentences
from .unknown_text import NUM_CHARACTERS, check_known_documents, sample_documents

FEATURES = Features(
    {
        "input_ids": Column(Value("int32")),
        "sentence_starts": Column(Value("int32")),
        "length": Value("int32"),
        "index": Value("int64"),
    }
)
WORD_FEATURES = Features({**FEATURES, "word_starts": Column(Value("bool"))})

# The most rows of a document: the number of a row is below this.
MAX_ROWS_OF_A_DOCUMENT = 2**24

# Words of more tokens, or of more than the smaller number and half of a row, are probably none: Unigram tokenizers
# take all up to the next space for a word, whole lines in Chinese or Thai, and byte-level ones all letters up to a
# sign, a whole genome.
LONGEST_WORD = 16
LONGEST_WORD_OF_SHORT_ROWS = 8

# Shares of the tokens that are in such words: above the first, a warning; above the second, an error.
SUSPICIOUS_SHARE = 0.1
LARGEST_SHARE = 0.5

# The borders above one number, up to and with another, ascending.
Borders = Callable[[int, int], np.ndarray]

# How much of a document, in full rows, is cut from one of its ends.
ROWS_OF_A_PART = 64

# If a smaller share of the rows has at least two sentences, a model learns almost nothing about sentence order.
MIN_ORDERED_SHARE = 0.03


def _with_equal_borders(text: str, language: str) -> tuple[str, list[int]]:
    """A text with one space before each of its sentences and no other white space between them, and the places of
    these spaces.

    Many tokenizers keep white space. If the first sentence of a document began without a space, or all but the last
    ended with a line break, the order of a pair could be read from that.
    """
    sentences = split_sentences(text, language)
    ends = list(accumulate(len(sentence) + 1 for sentence in sentences))
    return "".join(f" {sentence}" for sentence in sentences), [0, *ends[:-1]]


def _sentence_tokens(starts: Sequence[int], ends: np.ndarray) -> np.ndarray:
    """The tokens that sentences begin with, ascending, int64 of shape (sentences,).

    starts: the places of the spaces before the sentences.
    ends: the number of characters up to the end of each token, ascending.
    """
    # The first token that ends after the space: the space itself, or a word, which may contain it. A tokenizer may
    # count the space before the first word as none.
    tokens = np.searchsorted(ends, starts, side="right")
    tokens[:1] = 0
    return np.unique(tokens[tokens < len(ends)])


def _between(ascending: np.ndarray, after: int, up_to: int) -> np.ndarray:
    """The numbers above `after`, up to and with `up_to`."""
    first, last = np.searchsorted(ascending, (after, up_to), side="right")
    return ascending[first:last]


def _cut(
    start: int,
    stop: int,
    borders: Borders,
    word_borders: Borders,
    max_tokens: int,
    short_seq_prob: float,
    rng: np.random.Generator,
) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of the rows from the token `start` up to `stop`, a border, without gaps between them.

    A row has as many tokens as it can and ends at a border. If there is none, it ends with a word.

    borders, word_borders: return those above one number, up to and with another.
    """
    while start < stop:
        size = max_tokens
        if rng.random() < short_seq_prob:
            size = int(rng.integers(1, max_tokens + 1))
        later = borders(start, start + max_tokens)
        within = borders(start, start + size)
        if len(within):
            end = int(within[-1])
        elif len(later):
            end = int(later[0])
        else:
            before = word_borders(start, start + max_tokens)
            end = int(before[-1]) if len(before) else start + max_tokens
        yield start, end
        start = end


def _rows(
    num_tokens: int,
    sentences: np.ndarray | None,
    words: np.ndarray,
    max_tokens: int,
    short_seq_prob: float,
    rng: np.random.Generator,
) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of the rows of a document, in order and without gaps between them.

    sentences: the tokens that sentences begin with. Rows have whole sentences, except within one that is longer than a
    row. If None, rows end with any word.

    A row that is filled from its first sentence begins with the one for which the row before had no room, which is
    longer than others. This would show the order of a pair: the longer segment would more often be the first. So half
    of the parts of a document, drawn at random, are cut from their end, where the longer sentences come last.
    """
    marks = np.append(words, True)
    marks[0] = True

    def word_borders(after: int, up_to: int) -> np.ndarray:
        return after + 1 + np.flatnonzero(marks[after + 1 : up_to + 1])

    if sentences is None:
        yield from _cut(0, num_tokens, word_borders, word_borders, max_tokens, short_seq_prob, rng)
        return
    borders = np.union1d(sentences, [0, num_tokens])
    start = 0
    while start < num_tokens:
        after = int(np.searchsorted(borders, start + ROWS_OF_A_PART * max_tokens))
        stop = int(borders[min(after, len(borders) - 1)])
        inside, words_inside = _between(borders, start - 1, stop), word_borders(start - 1, stop)
        forwards = rng.random() < 0.5
        if not forwards:  # mirrored, cut from the beginning, and mirrored again
            inside, words_inside = start + stop - inside[::-1], start + stop - words_inside[::-1]
        between, words_between = partial(_between, inside), partial(_between, words_inside)
        cuts = _cut(start, stop, between, words_between, max_tokens, short_seq_prob, rng)
        yield from cuts if forwards else [(start + stop - end, start + stop - begin) for begin, end in cuts][::-1]
        start = stop


def _splits(start: int, end: int, num_tokens: int, sentences: np.ndarray | None) -> np.ndarray:
    """Where a row can be split into a pair: the sentences that begin in it, int32, counted from its first token.

    None in a row that begins or ends within a sentence: half a sentence at the end of the first segment, or at the
    beginning of the second, would show that the pair is swapped.
    """
    borders = {start, end} - {0, num_tokens}
    if sentences is None or not all(len(_between(sentences, border - 1, border)) for border in borders):
        return np.array([], dtype=np.int32)
    return (_between(sentences, start, end - 1) - start).astype(np.int32)


def texts_of(
    documents: Mapping[str, Sequence[Any]],
    indices: Sequence[int],
    column: str,
    counted: str = "counted without held-out ones",
) -> list[str]:
    """The texts of a batch of documents. Raises a ValueError with column and document if one is not a text; `counted`
    says there how documents are counted."""
    texts = list(documents.get(column, [None] * len(indices)))
    for number, text in zip(indices, texts, strict=True):
        if not isinstance(text, str):
            remedy = "correct the document, or leave it out"
            if isinstance(text, int | float):
                remedy += "; a .csv or .tsv file whose texts are all numbers must be written as .jsonl"
            raise ValueError(
                f"The column {column!r} of document {number + 1}, {counted}, must hold text, but "
                f"holds {str(text)[:40]}: {remedy}."
            )
    return texts


def build_pretraining_rows(
    documents: Mapping[str, Sequence[Any]],
    indices: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    short_seq_prob: float,
    seed: int,
    text_column: str = "text",
    language: str = "en",
    with_word_starts: bool = False,
    sentence_order: bool = True,
) -> dict[str, list]:
    """Rows of a batch of documents: the function that [`pretraining_dataset`] maps.

    Every document has its own random generator, seeded with its number in `indices`, so that batches and processes do
    not change the result. Here, `index` is the number of the document times 2^24, plus the number of the row in the
    document.
    """
    num_special = tokenizer.num_special_tokens_to_add(pair=True)
    rows: dict[str, list] = {name: [] for name in (WORD_FEATURES if with_word_starts else FEATURES)}
    texts = texts_of(documents, indices, text_column)
    starts: list[list[int] | None] = [None] * len(texts)
    if sentence_order:
        for i, text in enumerate(texts):
            texts[i], starts[i] = _with_equal_borders(text, language)
    for number, places, (ids, ends, words) in zip(indices, starts, encode_texts(texts, tokenizer), strict=True):
        if not len(ids):
            continue
        sentences = None if places is None else _sentence_tokens(places, ends)
        rng = np.random.default_rng((seed, number))
        cuts = _rows(len(ids), sentences, words, max_length - num_special, short_seq_prob, rng)
        for row, (start, end) in enumerate(cuts):
            rows["input_ids"].append(ids[start:end])
            rows["sentence_starts"].append(_splits(start, end, len(ids), sentences))
            rows["length"].append(end - start + num_special)
            rows["index"].append(number * MAX_ROWS_OF_A_DOCUMENT + row)
            if with_word_starts:
                rows["word_starts"].append(words[start:end])
    return rows


def check_options(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    short_seq_prob: float,
    text_column: str,
    column_names: Sequence[str],
) -> None:
    """Raises the errors of [`pretraining_dataset`] that are known before a document is read."""
    if text_column not in column_names:
        raise ValueError(f"text_column={text_column!r} does not exist; the columns are {list(column_names)}.")
    if not tokenizer.is_fast:
        raise ValueError("tokenizer must be a fast tokenizer, as AutoTokenizer loads it: its offsets are needed.")
    num_special = tokenizer.num_special_tokens_to_add(pair=True)
    if not num_special + 2 <= max_length <= tokenizer.model_max_length:
        raise ValueError(
            f"max_length must lie between {num_special + 2}, the shortest pair, and {tokenizer.model_max_length}, the "
            f"tokenizer's model_max_length, but is {max_length}."
        )
    if not 0 <= short_seq_prob <= 1:
        raise ValueError(f"short_seq_prob must lie between 0 and 1, but is {short_seq_prob}.")


def pretraining_dataset(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    short_seq_prob: float = 0.1,
    seed: int = 0,
    text_column: str = "text",
    language: str = "en",
    with_word_starts: bool = False,
    sentence_order: bool = True,
    num_proc: int | None = None,
    load_from_cache_file: bool = True,
    desc: str = "Building examples",
) -> Dataset:
    """Rows for MLM + SOP, from a data set with one document in each row.

    Each document is tokenized once and cut into rows of up to `max_length` tokens, special tokens included, without
    gaps between them. A row has as many whole sentences as it can. A sentence that is longer than a row is cut between
    words, and its rows are not split into pairs: half a sentence at a border of a segment would show the order. Of
    the parts of documents, of 64 rows each, half are cut from their end, so that the lengths of the segments do not
    show it, either.

    Args:
        dataset: one document in each row.
        tokenizer: a fast tokenizer.
        max_length: the longest row, special tokens included.
        short_seq_prob: probability that a row gets a shorter length, drawn uniformly up to `max_length`.
        seed: of these lengths, and of which parts of documents are cut from their end.
        text_column: the column that holds the documents.
        language: ISO 639-1 code of the texts, for abbreviations that do not end a sentence.
        with_word_starts: also store where words begin, for whole-word masking.
        sentence_order: whether rows can be split into pairs. If not, no sentences are looked for, and rows are full:
            they end with any word, and only the last of a document and the short ones have fewer tokens.
        num_proc: number of processes (`datasets.Dataset.map`, which also caches the result).
        load_from_cache_file: whether a cached result is used.
        desc: label of the progress bar.

    Returns:
        Columns, as NumPy arrays: `input_ids` (int32, without special tokens), `sentence_starts` (int32, where the row
        can be split into a pair: the sentences that begin in it, but not with its first token), `length` (with the
        special tokens of a pair), `index` (the number of the row) and, on request, `word_starts` (bool, for each
        token).

    Raises:
        ValueError: if `max_length` leaves no room for a pair or exceeds the tokenizer's limit, `short_seq_prob` is not
            a probability, `text_column` does not exist, the tokenizer is not a fast one or knows less than half of
            the text, more than half of the text is in words that are too long to be words, or the documents give no
            row.
    """
    build_rows = checked_row_builder(
        dataset,
        dataset.column_names,
        tokenizer=tokenizer,
        max_length=max_length,
        short_seq_prob=short_seq_prob,
        seed=seed,
        text_column=text_column,
        language=language,
        with_word_starts=with_word_starts,
        sentence_order=sentence_order,
    )
    rows = dataset.map(
        with_code(build_rows),
        with_indices=True,
        batched=True,
        batch_size=documents_of_a_batch(dataset, text_column),
        remove_columns=dataset.column_names,
        features=WORD_FEATURES if with_word_starts else FEATURES,
        num_proc=num_proc,
        load_from_cache_file=load_from_cache_file,
        desc=desc,
    )
    if len(rows) == 0:
        raise ValueError(f"The column {text_column!r} of the {len(dataset)} documents contains no text.")
    rows = rows.remove_columns("index").add_column("index", np.arange(len(rows)))
    return rows.with_format("numpy")


def checked_row_builder(
    documents: Dataset | IterableDataset, column_names: Sequence[str], **options: Any
) -> Callable[..., dict[str, list]]:
    """[`build_pretraining_rows`] with its options, after the checks of these and of a sample of the documents.

    Raises:
        ValueError: as [`pretraining_dataset`], but for documents that give no row.
    """
    tokenizer, text_column = options["tokenizer"], options["text_column"]
    check_options(tokenizer, options["max_length"], options["short_seq_prob"], text_column, column_names)
    check_known_documents(documents, [text_column], tokenizer, f"the column {text_column!r}")
    build_rows = partial(build_pretraining_rows, **options)
    if options["with_word_starts"]:
        check_words(documents, build_rows, text_column)
    return build_rows


def check_words(
    documents: Dataset | IterableDataset, build_rows: Callable[..., dict[str, list]], text_column: str
) -> None:
    """Warns if many tokens are in words that are too long to be words, and raises a ValueError if most are:
    whole-word masking would hide most of a row, or all of it.

    Args:
        documents: the beginnings of [`sample_documents`] are looked at; values that are no texts are left out.
        build_rows: [`build_pretraining_rows`] with `with_word_starts`, but for the documents and their numbers.
        text_column: of the documents.
    """
    values = (document[text_column] for document in sample_documents(documents, [text_column]))
    beginnings = [value[:NUM_CHARACTERS] for value in values if isinstance(value, str)]
    if not beginnings:
        return
    tokens = within = 0
    for starts in build_rows({text_column: beginnings}, range(len(beginnings)))["word_starts"]:
        sizes = np.diff(np.flatnonzero(np.append(starts, True)), prepend=0)
        longest = min(LONGEST_WORD, max(LONGEST_WORD_OF_SHORT_ROWS, len(starts) // 2))
        tokens += len(starts)
        within += int(sizes[sizes > longest].sum())
    if within <= SUSPICIOUS_SHARE * tokens:
        return
    message = (
        f"{within / tokens:.0%} of the tokens of the column {text_column!r} are in words of more than "
        f"{LONGEST_WORD} tokens, or of half a row: this tokenizer does not find the words of such texts. Leave out "
        "--whole_word_mask."
    )
    if within > LARGEST_SHARE * tokens:
        raise ValueError(message)
    warnings.warn(message, stacklevel=3)


def ordered_share(rows: Dataset) -> float:
    """The share of rows that can be split into a pair, and count for sentence order."""
    lengths = [
        len(starts)
        for batch in rows.select_columns("sentence_starts").with_format("arrow").iter(10_000)
        for starts in batch["sentence_starts"]
    ]
    return sum(length > 0 for length in lengths) / len(lengths)
