# SPDX-License-Identifier: Apache-2.0
import pytest
from datasets import Dataset

from nystrom_models.data import pretraining_dataset, train_tokenizer

# Every text is a pattern that a small model learns in seconds: the second half of a sentence follows from the first.
HALVES = {
    "return the mean of": "all values in the given array",
    "raise an error if": "no file exists at this path",
    "the number of samples": "that are drawn in every batch",
    "a list with the names": "which each column was given",
}


@pytest.fixture(scope="session")
def texts():
    halves = list(HALVES.items())
    return [
        f"First {' '.join(halves[i % 4])}. Then {' '.join(halves[(i // 4) % 4])}. Last {' '.join(halves[i % 3])}."
        for i in range(240)
    ]


@pytest.fixture(scope="session")
def tokenizer(texts):
    return train_tokenizer(texts, vocab_size=200, model_max_length=64, show_progress=False)


@pytest.fixture(scope="session")
def examples(texts, tokenizer):
    return pretraining_dataset(Dataset.from_dict({"text": texts}), tokenizer, 40, short_seq_prob=0.0)
