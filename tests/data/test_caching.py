# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from nystrom_models.data import (
    caching,
    causal_dataset,
    causal_tokenizer,
    classification_dataset,
    load_conll_files,
    load_files,
    pretraining_dataset,
)
from nystrom_models.data.lra import expression, generate
from nystrom_models.data.lra.listops import DIGITS


@pytest.fixture(scope="module")
def corpus(documents, tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "label": 0}) + "\n" for text in documents["text"][:50]))
    return path


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "words.conll"
    path.write_text("The O\nmean B-X\n\n")
    return path


def read(path, cache_dir):
    return load_files(path, cache_dir=cache_dir)


CASES = {
    "pretraining": lambda path, words, tokenizer, cache: pretraining_dataset(read(path, cache), tokenizer, 48),
    "causal": lambda path, words, tokenizer, cache: causal_dataset(read(path, cache), causal_tokenizer(tokenizer), 48),
    "classification": lambda path, words, tokenizer, cache: classification_dataset(read(path, cache), tokenizer, 48),
    "words": lambda path, words, tokenizer, cache: load_conll_files("tokens", "tags", words, cache_dir=cache),
    "generated": lambda path, words, tokenizer, cache: generate(
        expression, {"train": 3}, seed=0, label_names=DIGITS, min_length=8, max_length=40, cache_dir=cache
    )["train"],
}


@pytest.mark.parametrize("name", CASES)
def test_rows_made_by_other_code_are_not_reused(name, corpus, words, tokenizer, tmp_path, monkeypatch):
    """datasets hashes the functions of a package by name, so that a newer version would go on with old rows."""

    def files():
        return {file["filename"] for file in CASES[name](corpus, words, tokenizer, str(tmp_path)).cache_files}

    first = files()
    assert first and files() == first
    monkeypatch.setattr(caching, "code_digest", lambda folder: "another version")
    assert not files() & first


def test_the_digest_is_that_of_all_code_in_the_folder(tmp_path):
    def digest():
        caching.code_digest.cache_clear()
        return caching.code_digest(tmp_path)

    (tmp_path / "below").mkdir()
    digests = [digest()]
    for name, text in {"one.py": "", "below/two.py": "", "below/three.py": "x = 1"}.items():
        (tmp_path / name).write_text(text)
        digests.append(digest())
    (tmp_path / "one.py").rename(tmp_path / "four.py")
    digests.append(digest())
    assert len(set(digests)) == 5
    (tmp_path / "notes.txt").write_text("not code")
    assert digest() == digests[-1]
