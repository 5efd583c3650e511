# SPDX-License-Identifier: Apache-2.0
"""The time to make batches for pretraining: by our rows and collator, and by those of Transformers' example script."""

from collections.abc import Callable

import numpy as np
from datasets import Dataset
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from benchmarks.measure import interleave
from nystrom_models.data import PretrainingCollator, pretraining_dataset, train_tokenizer

WORDS = 4000
REPEATS = 40


def make_corpus(num_rows: int, length: int) -> tuple[Dataset, PreTrainedTokenizerBase]:
    """A document of random words in sentences, long enough for `num_rows` rows, and a tokenizer with these words."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), 7)) for _ in range(WORDS)]
    tokenizer = train_tokenizer([" ".join(words) + "."] * 2, WORDS + 100, length, show_progress=False)
    text = []
    for _ in range(num_rows * length // 15):
        sentence = " ".join(words[i] for i in rng.integers(WORDS, size=14))
        text.append(sentence.capitalize() + ".")
    return Dataset.from_dict({"text": [" ".join(text)]}), tokenizer


def as_transformers(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """The same tokens with special ones around them, and the columns that `run_mlm.py` of Transformers makes."""

    def build(row):
        ids = [tokenizer.cls_token_id, *row["input_ids"].tolist(), tokenizer.sep_token_id]
        special = [1, *[0] * (len(ids) - 2), 1]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "special_tokens_mask": special}

    return dataset.map(build, remove_columns=dataset.column_names, load_from_cache_file=False).with_format(None)


def batch_makers(batch_size: int, length: int) -> dict[str, Callable[[], dict]]:
    """Functions, by name, that read a batch of rows and collate it."""
    corpus, tokenizer = make_corpus(batch_size, length)
    ours = pretraining_dataset(corpus, tokenizer, length, short_seq_prob=0.0, load_from_cache_file=False)
    rows = list(range(batch_size))
    theirs = as_transformers(ours.select(rows), tokenizer)
    collator, their_collator = PretrainingCollator(tokenizer), DataCollatorForLanguageModeling(tokenizer)
    as_numpy = DataCollatorForLanguageModeling(tokenizer, return_tensors="np")
    formatted = theirs.with_format("numpy")
    return {
        "ours: MLM + SOP": lambda: collator(ours.__getitems__(rows)),
        "Transformers: MLM": lambda: their_collator(theirs.__getitems__(rows)),
        "Transformers: MLM, NumPy": lambda: as_numpy(formatted.__getitems__(rows)),
    }


def table(batch_size: int, length: int) -> str:
    """The minimum time of a batch, which other processes disturb least, and tokens per second of one core."""
    samples = interleave(batch_makers(batch_size, length), repeats=REPEATS, max_seconds=60, device="cpu")
    least = {name: min(seconds for seconds in times if seconds) for name, times in samples.items()}
    lines = [f"{batch_size} rows of {length} tokens, read from a data set and collated in one process"]
    lines.append(f"{'':<26}{'ms a batch':>12}{'tokens/s':>14}")
    for name, seconds in least.items():
        lines.append(f"{name:<26}{1e3 * seconds:>12.1f}{batch_size * length / seconds:>14,.0f}")
    return "\n".join(lines)
