# SPDX-License-Identifier: Apache-2.0
"""The Python of docs/any-encoder.md runs, one block after the other, on small models under the names that it has."""

import re
from pathlib import Path

import pytest
import transformers

from nystrom_models.data import train_tokenizer
from tests.interface.models import make

DOCUMENT = Path(__file__).parents[2] / "docs" / "any-encoder.md"


@pytest.fixture
def checkpoints(tmp_path, monkeypatch):
    """Small models in folders with the names of the Hub's."""
    monkeypatch.chdir(tmp_path)
    for name, folder in (
        ("BERT", "google-bert/bert-base-uncased"),
        ("CLIP, its vision part", "openai/clip-vit-base-patch32"),
    ):
        make(name).save_pretrained(folder)
    train_tokenizer(["A text. Another, longer text."] * 4, vocab_size=60, show_progress=False).save_pretrained(
        "google-bert/bert-base-uncased"
    )
    config = make("BART, its encoder").config
    transformers.BartForConditionalGeneration(config).save_pretrained("facebook/bart-base")


def test_python_in_the_document_runs(checkpoints):
    text = DOCUMENT.read_text(encoding="utf-8")
    names = {}
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) == 5
    for block in blocks:
        line = text.count("\n", 0, block.start()) + 1
        exec(compile("\n" * line + block[1], DOCUMENT.name, "exec"), names)
    assert names["bart"].get_encoder().config.nystrom["num_landmarks"] == 32
    assert names["model"].config.nystrom["num_landmarks"] == 128
