# SPDX-License-Identifier: Apache-2.0
import random

import pytest
from datasets import Dataset
from transformers import CanineTokenizer

from nystrom_models.data import train_tokenizer

WORDS = (
    "array axis batch buffer cache column compute data default dtype element error file filter frame function index"
    " input label layer length list loss mask matrix mean model module name number object output parameter path"
    " pattern process range result return row sample score sequence shape size slice string tensor token value vector"
).split()


@pytest.fixture(scope="session")
def documents():
    """600 documents of 1 to 9 sentences; sentence i of a document begins with its number, spelled "Sentence i"."""
    rng = random.Random(0)

    def sentence(number):
        length = 200 if rng.random() < 0.02 else rng.randint(1, 12)
        return f"Sentence {number} " + " ".join(rng.choices(WORDS, k=length)) + "."

    texts = [" ".join(sentence(i) for i in range(rng.randint(1, 9))) for _ in range(600)]
    return Dataset.from_dict({"text": texts})


@pytest.fixture(scope="session")
def tokenizer(documents):
    return train_tokenizer(documents["text"], vocab_size=300, model_max_length=512, show_progress=False)


@pytest.fixture(scope="session")
def slow_tokenizer():
    """One of those that are written in Python and give no offsets."""
    return CanineTokenizer()
