# SPDX-License-Identifier: Apache-2.0
"""Examples for masked language modeling (MLM) and sentence-order prediction (SOP)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from tokenizers import Encoding
from transformers import DataCollatorForLanguageModeling, DataCollatorForTokenClassification, PreTrainedTokenizerBase

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[\"'(\[]?[A-Z0-9])|\s*\n\s*")


EXAMPLE_COLUMNS = ("input_ids", "token_type_ids", "word_ids", "sentence_order_label", "length")


def split_sentences(text: str) -> list[str]:
    """Sentences of a text: split at line ends, and after `.`, `!` or `?` where a capital or a digit follows."""
    return [sentence for sentence in (part.strip() for part in _SENTENCE_END.split(text)) if sentence]


class _Sentence(NamedTuple):
    text: str
    encoding: Encoding  # without special tokens

    @property
    def num_tokens(self) -> int:
        return len(self.encoding.ids)

    def head_end(self, max_tokens: int) -> int:
        """The character that ends the longest head of at most `max_tokens` tokens, between words where possible."""
        words, offsets = self.encoding.word_ids, self.encoding.offsets
        for token in range(max_tokens, 0, -1):
            if words[token] != words[token - 1]:
                return offsets[token][0]
        return offsets[max_tokens][0]


def _chunks(
    text: str, max_tokens: int, short_seq_prob: float, tokenizer: PreTrainedTokenizerBase, rng: np.random.Generator
) -> Iterator[list[str]]:
    """Groups of consecutive sentences of at most `max_tokens` tokens; no text is lost, a longer sentence is cut."""

    def encode(sentences: list[str]) -> list[_Sentence]:
        encoding = tokenizer(sentences, add_special_tokens=False, verbose=False)
        return [_Sentence(sentence, encoding[i]) for i, sentence in enumerate(sentences) if encoding[i].ids]

    def draw_target() -> int:
        # A short target still takes its first sentence whole: fragments teach less than short sentences.
        return int(rng.integers(1, max_tokens + 1)) if rng.random() < short_seq_prob else max_tokens

    sentences = split_sentences(text)
    queue = encode(sentences)[::-1] if sentences else []
    chunk: list[str] = []
    size, target = 0, draw_target()
    while queue:
        sentence = queue.pop()
        end = sentence.head_end(max_tokens) if sentence.num_tokens > max_tokens else 0
        if end > 0:  # 0 if one character makes more tokens than fit; the row is then truncated
            queue += encode([sentence.text[:end], sentence.text[end:]])[::-1]
            continue
        if chunk and size + sentence.num_tokens > target:
            yield chunk
            chunk, size, target = [], 0, draw_target()
        chunk.append(sentence.text)
        size += sentence.num_tokens
    if chunk:
        yield chunk


def build_pretraining_examples(
    documents: Mapping[str, Sequence[Any]],
    indices: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    short_seq_prob: float,
    seed: int,
    text_column: str = "text",
) -> dict[str, list]:
    """Examples of a batch of documents: the function that [`pretraining_dataset`] maps.

    Every document draws from a generator of its own, seeded with its index, so that neither batches nor processes
    change the outcome.
    """
    max_tokens = max_length - tokenizer.num_special_tokens_to_add(pair=True)
    pairs: list[tuple[str, str]] = []
    singles: list[str] = []
    order: list[int] = []  # the label of every chunk: 0, 1, or -100 for a chunk of one sentence, which has no order
    for index, text in zip(indices, documents[text_column], strict=True):
        rng = np.random.default_rng((seed, index))
        for chunk in _chunks(text, max_tokens, short_seq_prob, tokenizer, rng):
            if len(chunk) == 1:
                singles.append(chunk[0])
                order.append(-100)
                continue
            at = int(rng.integers(1, len(chunk)))
            first, second = " ".join(chunk[:at]), " ".join(chunk[at:])
            swapped = int(rng.random() < 0.5)
            pairs.append((second, first) if swapped else (first, second))
            order.append(swapped)
    options = {"max_length": max_length, "truncation": True, "return_token_type_ids": True}
    encoded_pairs = tokenizer([a for a, _ in pairs], [b for _, b in pairs], **options) if pairs else None
    encoded_singles = tokenizer(singles, **options) if singles else None

    rows: dict[str, list] = {name: [] for name in EXAMPLE_COLUMNS}
    next_pair = next_single = 0
    for label in order:
        if label == -100:
            encoded, position = encoded_singles, next_single
            next_single += 1
        else:
            encoded, position = encoded_pairs, next_pair
            next_pair += 1
        encoding = encoded[position]  # type: ignore[index]
        # Words are counted from 0 in either segment; keep those of the second apart from those of the first.
        words = [
            -1 if word is None else 2 * word + sequence
            for word, sequence in zip(encoding.word_ids, encoding.sequence_ids, strict=True)
        ]
        rows["input_ids"].append(encoding.ids)
        rows["token_type_ids"].append(encoding.type_ids)
        rows["word_ids"].append(words)
        rows["sentence_order_label"].append(label)
        rows["length"].append(len(encoding.ids))
    return rows


def _check_options(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    short_seq_prob: float,
    text_column: str,
    column_names: Sequence[str],
) -> None:
    if text_column not in column_names:
        raise ValueError(f"text_column={text_column!r} does not exist; the columns are {list(column_names)}.")
    if not tokenizer.is_fast:
        raise ValueError("tokenizer must be a fast tokenizer, as AutoTokenizer loads it, because words are counted.")
    num_special = tokenizer.num_special_tokens_to_add(pair=True)
    if not num_special + 2 <= max_length <= tokenizer.model_max_length:
        raise ValueError(
            f"max_length must lie between {num_special + 2}, the shortest pair, and {tokenizer.model_max_length}, the "
            f"tokenizer's model_max_length, but is {max_length}."
        )
    if not 0 <= short_seq_prob <= 1:
        raise ValueError(f"short_seq_prob must lie between 0 and 1, for example 0.1, but is {short_seq_prob}.")


def pretraining_dataset(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    short_seq_prob: float = 0.1,
    seed: int = 0,
    text_column: str = "text",
    num_proc: int | None = None,
    desc: str = "Building MLM + SOP examples",
) -> Dataset:
    """MLM + SOP examples of a data set with one document a row.

    Consecutive sentences of one document are packed into chunks that fit `max_length`; a chunk of two sentences or
    more is split at random into the pair `[CLS] A [SEP] B [SEP]`, which is swapped with probability one half. A chunk
    of one sentence has no order to predict: it becomes `[CLS] A [SEP]`, for MLM alone.

    Args:
        dataset: one document a row.
        tokenizer: a fast tokenizer.
        max_length: the longest example, special tokens included.
        short_seq_prob: probability that a chunk aims at a length drawn uniformly up to `max_length`.
        seed: of lengths, splits and swaps.
        text_column: the column that holds the documents.
        num_proc: processes of `datasets.Dataset.map`, which also caches the result.
        desc: text beside the progress bar.

    Returns:
        Columns `input_ids`, `token_type_ids`, `word_ids` (-1 at special tokens), `sentence_order_label` (1 = swapped,
        0 = in order, -100 = one sentence), `length` and `index`, the number of the row. Masks are drawn later, by
        [`PretrainingCollator`].

    Raises:
        ValueError: if `max_length` leaves no room for a pair or exceeds the tokenizer's limit, `short_seq_prob` is no
            probability, `text_column` does not exist, the tokenizer is not a fast one, or no example comes out.
    """
    _check_options(tokenizer, max_length, short_seq_prob, text_column, dataset.column_names)
    examples = dataset.map(
        partial(
            build_pretraining_examples,
            tokenizer=tokenizer,
            max_length=max_length,
            short_seq_prob=short_seq_prob,
            seed=seed,
            text_column=text_column,
        ),
        with_indices=True,
        batched=True,
        remove_columns=dataset.column_names,
        num_proc=num_proc,
        desc=desc,
    )
    if len(examples) == 0:
        raise ValueError(f"The column {text_column!r} of the {len(dataset)} documents holds no text.")
    return examples.add_column("index", np.arange(len(examples)))


def pretraining_stream(
    dataset: IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    short_seq_prob: float = 0.1,
    seed: int = 0,
    text_column: str = "text",
    buffer_size: int = 10_000,
) -> IterableDataset:
    """[`pretraining_dataset`] of a stream: examples are built while it is read, and drawn from a buffer of
    `buffer_size`, in another order in every epoch.

    Raises:
        ValueError: as [`pretraining_dataset`] does, and if the stream holds no document.
    """
    first = next(iter(dataset), None)
    if first is None:
        raise ValueError("The stream of documents is empty.")
    columns = list(first)
    _check_options(tokenizer, max_length, short_seq_prob, text_column, columns)
    examples = dataset.map(
        build_pretraining_examples,
        with_indices=True,
        batched=True,
        batch_size=100,
        remove_columns=columns,
        fn_kwargs={
            "tokenizer": tokenizer,
            "max_length": max_length,
            "short_seq_prob": short_seq_prob,
            "seed": seed,
            "text_column": text_column,
        },
    )
    examples = examples.map(
        lambda rows, indices: {**rows, "index": list(indices)}, with_indices=True, batched=True, batch_size=100
    )
    return examples.shuffle(seed, buffer_size=buffer_size)


@dataclass
class PretrainingCollator:
    """Pads examples of [`pretraining_dataset`] to the longest of a batch and masks them anew in every epoch.

    The mask of an example depends on `seed`, the epoch and its column `index`, and on nothing else: not on its batch,
    the number of processes, or what was drawn before. At least one token of an example is always masked.

    Args:
        tokenizer: with a mask token.
        mlm_probability: share of tokens (or words) to predict.
        whole_word_mask: whether the pieces of a word are masked together.
        mask_replace_prob: share of those that become the mask token.
        random_replace_prob: share that become a random token; the rest stay.
        pad_to_multiple_of: rounds the padded length up.
        seed: of the masks.
    """

    tokenizer: PreTrainedTokenizerBase
    mlm_probability: float = 0.15
    whole_word_mask: bool = False
    mask_replace_prob: float = 0.8
    random_replace_prob: float = 0.1
    pad_to_multiple_of: int | None = None
    seed: int = 0

    def __post_init__(self):
        if not 0 < self.mlm_probability <= 1:
            raise ValueError(f"mlm_probability must lie above 0 and up to 1, but is {self.mlm_probability}.")
        self.epoch = 0
        # The tokens to predict are chosen here; what replaces them is Transformers' own code.
        self._replace = DataCollatorForLanguageModeling(
            self.tokenizer,
            mlm_probability=1.0,
            mask_replace_prob=self.mask_replace_prob,
            random_replace_prob=self.random_replace_prob,
        )
        self._generator = torch.Generator()
        self._replace.generator = self._generator
        self._pad = DataCollatorForTokenClassification(self.tokenizer, pad_to_multiple_of=self.pad_to_multiple_of)

    def set_epoch(self, epoch: int) -> None:
        """Draws other masks from now on."""
        self.epoch = epoch

    def _mask(self, example: Mapping[str, Any]) -> dict[str, Any]:
        words = np.asarray(example["word_ids"])
        rng = np.random.default_rng((self.seed, self.epoch, example["index"]))
        candidates = np.unique(words[words >= 0]) if self.whole_word_mask else np.flatnonzero(words >= 0)
        chosen = candidates[rng.random(len(candidates)) < self.mlm_probability]
        if len(chosen) == 0 and len(candidates):
            chosen = rng.choice(candidates, 1)
        if self.whole_word_mask:
            predicted = np.isin(words, chosen)
        else:
            predicted = np.zeros(len(words), dtype=bool)
            predicted[chosen] = True
        self._generator.manual_seed(int(rng.integers(2**63)))
        input_ids, labels = self._replace.torch_mask_tokens(
            torch.tensor(example["input_ids"])[None], special_tokens_mask=torch.from_numpy(~predicted)[None]
        )
        return {
            "input_ids": input_ids[0].tolist(),
            "token_type_ids": example["token_type_ids"],
            "labels": labels[0].tolist(),
            "sentence_order_label": example["sentence_order_label"],
        }

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Returns `input_ids`, `token_type_ids`, `attention_mask` and `labels` (-100 where nothing is predicted),
        int64 of shape (batch, length), and `sentence_order_label`, int64 of shape (batch,)."""
        return dict(self._pad([self._mask(example) for example in examples]))
