# SPDX-License-Identifier: Apache-2.0
import json
import random
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from nystrom_models import NystromformerConfig, NystromformerForPreTraining
from nystrom_models.data import train_tokenizer

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

WORDS = "a the film that was seen by many people in some old town where it had first been shown last year".split()


@pytest.fixture(scope="session")
def write_rows(tmp_path_factory):
    """Writes rows as a .jsonl file and returns its path."""

    def write(rows):
        path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def launched_with_fsdp2(monkeypatch):
    """Accelerate's processes refuse what they refuse with FSDP2, which needs GPUs."""
    monkeypatch.setattr(AcceleratorState, "is_fsdp2", property(lambda state: True))


@pytest.fixture(scope="session")
def filler():
    """A function that returns random text with a given number of words, different for each seed."""
    return lambda length, number: " ".join(random.Random(number).choices(WORDS, k=length))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A small model as pretraining saves it, whose tokens are whole words."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = train_tokenizer([" ".join(WORDS), "good bad"] * 9, 300, model_max_length=64, show_progress=False)
    config = NystromformerConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        num_landmarks=8,
        conv_kernel_size=3,
        max_position_embeddings=64,
        initializer_range=0.1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        bos_token_id=tokenizer.bos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    NystromformerForPreTraining(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
