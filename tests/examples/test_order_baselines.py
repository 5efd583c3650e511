# SPDX-License-Identifier: Apache-2.0
import json
import random

import numpy as np
import order_baselines
import pytest
from transformers import AutoTokenizer

from nystrom_models.data import train_tokenizer
from nystrom_models.data.masking import IGNORED, PretrainingCollator

WORDS = [f"w{number}" for number in range(40)]


def sentence(rng, length, first=None):
    words = rng.choices(WORDS, k=length)
    if first is not None:
        words[0] = first
    return f"{' '.join(words).capitalize()}."


@pytest.fixture(scope="module")
def order_scores(tmp_path_factory):
    """Scores on documents of two sentences, made by a function of a random generator."""
    tokenizer, words = tmp_path_factory.mktemp("tokenizer"), ["opening", "closing", *WORDS]
    texts = [" ".join([*words, ". !"])] * 9
    train_tokenizer(texts, 300, model_max_length=64, show_progress=False).save_pretrained(tokenizer)

    def scores(document, *flags):
        rng, folder = random.Random(0), tmp_path_factory.mktemp("documents")
        for name, number in (("train", 400), ("validation", 200)):
            texts = "".join(json.dumps({"text": document(rng)}) + "\n" for _ in range(number))
            (folder / f"{name}.jsonl").write_text(texts)
        output = folder / "output"
        found = order_baselines.main(
            [
                *("--config_name", "configs/nystromformer/mini-256.json", "--tokenizer_name", str(tokenizer)),
                *("--config_overrides", "max_position_embeddings=64", "--short_seq_prob", "0"),
                *("--train_file", f"{folder}/train.jsonl", "--validation_file", f"{folder}/validation.jsonl"),
                *("--cache_dir", f"{folder}/cache", "--output_dir", str(output), *flags),
            ]
        )
        assert json.loads((output / "order_baselines.json").read_text()) == {"pairs": 200, "accuracy": found}
        return found

    return scores


# Of 200 pairs, a guess has a standard error of 3.5 points.
CHANCE = pytest.approx(0.5, abs=0.11)


def test_nothing_is_found_in_random_sentences(order_scores):
    scores = order_scores(lambda rng: f"{sentence(rng, 6)} {sentence(rng, 6)}")
    assert scores == dict.fromkeys(order_baselines.FEATURES, CHANCE)


def test_each_feature_finds_what_it_is_for(order_scores):
    """Longer first sentences, a word at a place, and a word anywhere; each alone, and noticed by all together."""
    scores = order_scores(lambda rng: f"{sentence(rng, rng.randint(9, 12))} {sentence(rng, rng.randint(3, 6))}")
    assert scores["lengths"] == scores["all of these"] == 1
    assert scores["first tokens"] == CHANCE

    scores = order_scores(lambda rng: f"{sentence(rng, 6, 'opening')} {sentence(rng, 6)}")
    assert scores["first tokens"] == scores["first and last tokens"] == scores["counts of all tokens"] == 1
    assert scores["lengths"] == CHANCE

    def inside(rng, word):
        words = sentence(rng, 8).removesuffix(".").split()
        words[rng.randint(2, 5)] = word
        return f"{' '.join(words)}."

    scores = order_scores(lambda rng: f"{inside(rng, 'opening')} {inside(rng, 'closing')}")
    assert scores["counts of all tokens"] == scores["all of these"] == 1
    assert [scores["lengths"], scores["first tokens"]] == [CHANCE, CHANCE]


def test_the_last_token_of_a_segment(order_scores):
    """The first sentence of a document ends with another mark than the second."""
    scores = order_scores(lambda rng: f"{sentence(rng, 6)[:-1]}! {sentence(rng, 6)}")
    assert scores["first and last tokens"] == 1
    assert scores["first tokens"] == CHANCE


def test_pairs_are_those_of_a_batch(checkpoint):
    """Segments before masking are what a batch holds, where masked tokens are put back, in every epoch."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    collator = PretrainingCollator(tokenizer, mlm_probability=0.5, seed=3)
    rng = np.random.default_rng(0)
    ids = [rng.integers(10, len(tokenizer), size=12).astype(np.int32) for _ in range(8)]
    starts = [np.array([3, 7], dtype=np.int32)] * 7 + [np.array([], dtype=np.int32)]
    rows = [
        {"input_ids": i, "sentence_starts": s, "index": n} for n, (i, s) in enumerate(zip(ids, starts, strict=True))
    ]
    orders = []
    for epoch in range(3):
        collator.set_epoch(epoch)
        batch = collator(rows)
        shown = np.where(batch["labels"] != IGNORED, batch["labels"], batch["input_ids"])
        for number, row in enumerate(rows):
            segments, order = collator.segments(row)
            expected = [tokenizer.cls_token_id]
            for segment in segments:
                expected += [*segment.tolist(), tokenizer.sep_token_id]
            assert shown[number][: len(expected)].tolist() == expected
            assert order == batch["sentence_order_label"][number]
            orders.append(int(order))
    assert set(orders) == {0, 1, IGNORED}


@pytest.mark.parametrize("flag", ["--no_sentence_order", "--streaming"])
def test_flags_without_pairs_are_refused(order_scores, flag):
    with pytest.raises(ValueError, match=f"omit .*{flag}"):
        order_scores(lambda rng: sentence(rng, 4), flag)


def test_documents_of_one_sentence_are_refused(order_scores):
    with pytest.raises(ValueError, match="training documents give 0 pairs of segments"):
        order_scores(lambda rng: sentence(rng, 4))
