# SPDX-License-Identifier: Apache-2.0
import copy
import re

import numpy as np
import pytest
import torch
from datasets import Dataset
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import OneHotEncoder
from transformers import DistilBertTokenizer

from nystrom_models.data import PretrainingCollator, pretraining_dataset
from nystrom_models.data.tokenization import train_character_tokenizer
from tests.data.test_pretraining import byte_level_tokenizer

MAX_LENGTH = 48


@pytest.fixture(scope="module")
def rows(documents, tokenizer):
    dataset = pretraining_dataset(documents, tokenizer, MAX_LENGTH, short_seq_prob=0.2, with_word_starts=True)
    return [dataset[i] for i in range(len(dataset))]


def within(share, expected, number):
    """Whether a share of `number` draws lies within five standard deviations of what is expected."""
    return abs(share - expected) < 5 * (expected * (1 - expected) / number) ** 0.5


def unmasked(batch):
    """The ids before they were masked."""
    return torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])


def segments(ids, mask, tokenizer):
    """The texts of the one or two segments of a row."""
    text = tokenizer.decode(ids[mask.bool()])
    assert text.startswith("[CLS]") and text.endswith("[SEP]")
    return [part.strip() for part in text.removeprefix("[CLS]").removesuffix("[SEP]").split("[SEP]")]


def test_labels_say_whether_segments_were_swapped(rows, tokenizer):
    batch = PretrainingCollator(tokenizer)(rows)
    labels = batch["sentence_order_label"]
    for ids, mask, kinds, label, row in zip(
        unmasked(batch), batch["attention_mask"], batch["token_type_ids"], labels.tolist(), rows, strict=True
    ):
        parts = segments(ids, mask, tokenizer)
        if label == -100:
            assert len(parts) == 1 and len(row["sentence_starts"]) == 0
            assert not kinds.any()
            continue
        in_order = parts[::-1] if label == 1 else parts
        assert " ".join(in_order) == tokenizer.decode(row["input_ids"])
        assert in_order[1].startswith("sentence")
        second = ids.tolist().index(tokenizer.sep_token_id) + 1
        assert not kinds[:second].any() and kinds[second : int(mask.sum())].all()
    paired = labels[labels >= 0]
    assert len(paired) > 300 and within(paired.float().mean(), 0.5, len(paired))


def test_every_sentence_is_split_at_in_some_epoch(tokenizer):
    text = " ".join(f"Sentence {i} here." for i in range(6))
    rows = pretraining_dataset(Dataset.from_dict({"text": [text]}), tokenizer, MAX_LENGTH, 0.0)
    collator, firsts, orders = PretrainingCollator(tokenizer), set(), set()
    for epoch in range(60):
        batch = collator([{**rows[0], "epoch": epoch}])
        parts = segments(unmasked(batch)[0], batch["attention_mask"][0], tokenizer)
        orders.add(int(batch["sentence_order_label"]))
        firsts.update(re.findall(r"^sentence (\d)", parts[0]))
    assert orders == {0, 1} and firsts == {"0", "1", "2", "3", "4", "5"}


def test_without_sentence_order_rows_are_whole(rows, tokenizer):
    batch = PretrainingCollator(tokenizer, sentence_order=False)(rows)
    assert (batch["sentence_order_label"] == -100).all() and not batch["token_type_ids"].any()


def test_masking_statistics(rows, tokenizer):
    batch = PretrainingCollator(tokenizer)(rows)
    original = unmasked(batch)
    predicted = batch["labels"] != -100
    ordinary = original >= len(tokenizer.all_special_ids)
    assert not (predicted & ~ordinary).any(), "a special token is to be predicted"
    assert predicted.any(dim=1).all(), "a row has nothing to predict"
    # Short rows always predict at least one token, which is more than the given share.
    long = ordinary.sum(1) >= 30
    assert within(predicted[long].sum() / ordinary[long].sum(), 0.15, int(ordinary[long].sum()))
    replaced = batch["input_ids"][predicted]
    number = len(replaced)
    random_hits = 0.1 / len(tokenizer)
    assert within((replaced == tokenizer.mask_token_id).float().mean(), 0.8 + random_hits, number)
    assert within((replaced == original[predicted]).float().mean(), 0.1 + random_hits, number)


def test_no_special_token_takes_a_place_at_random():
    """Of a tokenizer of characters, more than half of the tokens are special."""
    bases = train_character_tokenizer(["ACGT" * 9] * 4)
    texts = Dataset.from_dict({"text": ["ACGT" * 400]})
    rows = list(pretraining_dataset(texts, bases, MAX_LENGTH, sentence_order=False))
    batch = PretrainingCollator(bases, mask_replace_prob=0.0, random_replace_prob=1.0, sentence_order=False)(rows)
    placed = batch["input_ids"][batch["labels"] != -100]
    assert len(placed) > 100 and not set(placed.tolist()) & set(bases.all_special_ids)
    shares = torch.bincount(placed, minlength=len(bases))[-4:] / len(placed)
    assert all(within(share, 0.25, len(placed)) for share in shares)


def test_a_token_at_random_is_any_ordinary_one(rows, tokenizer):
    batch = PretrainingCollator(tokenizer, 0.5, mask_replace_prob=0.0, random_replace_prob=1.0)(rows)
    placed = batch["input_ids"][batch["labels"] != -100]
    ordinary = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
    assert set(placed.tolist()) == set(ordinary.tolist())
    for part in np.array_split(ordinary, 4):
        assert within(np.isin(placed, part).mean(), len(part) / len(ordinary), len(placed))


def test_whole_words_are_masked_together(tokenizer):
    texts = Dataset.from_dict({"text": ["Uncompute rematrixed tokenizers of subtensors. Unlabelled outputsize."] * 40})
    rows = list(pretraining_dataset(texts, tokenizer, MAX_LENGTH, with_word_starts=True))
    collator = PretrainingCollator(tokenizer, whole_word_mask=True, mlm_probability=0.4, sentence_order=False)
    batch = collator(rows)
    shares = []
    for row, labels in zip(rows, batch["labels"].tolist(), strict=True):
        predicted = np.array(labels[1 : 1 + len(row["input_ids"])]) != -100
        for word in np.split(predicted, np.flatnonzero(row["word_starts"])[1:]):
            assert word.all() or not word.any()
            shares.append((word.any(), len(word)))
    assert max(size for _, size in shares) > 2
    assert within(np.mean([masked for masked, _ in shares]), 0.4, len(shares))
    with pytest.raises(ValueError, match="with_word_starts"):
        collator([{name: value for name, value in rows[0].items() if name != "word_starts"}])


def test_a_row_with_nothing_chosen_gets_one_whole_word(tokenizer):
    """Of a share that chooses nothing. It may be any word, and any token."""
    texts = Dataset.from_dict({"text": ["Uncompute rematrixed tokenizers of subtensors."] * 20})
    rows = list(pretraining_dataset(texts, tokenizer, MAX_LENGTH, with_word_starts=True, sentence_order=False))
    batch = PretrainingCollator(tokenizer, 1e-9, whole_word_mask=True, sentence_order=False)(rows)
    sizes, words = [], set()
    for row, labels in zip(rows, batch["labels"].tolist(), strict=True):
        predicted = np.array(labels[1 : 1 + len(row["input_ids"])]) != -100
        words.add(int(row["word_starts"][: predicted.argmax() + 1].sum()))
        [word] = [word for word in np.split(predicted, np.flatnonzero(row["word_starts"])[1:]) if word.any()]
        assert word.all()
        sizes.append(len(word))
    assert max(sizes) > 2 and words >= {1, 2, 3, 4}
    batch = PretrainingCollator(tokenizer, 1e-9, sentence_order=False)(rows)
    predicted = batch["labels"] != -100
    assert predicted.sum(1).tolist() == [1] * len(rows)
    assert len(set(predicted.int().argmax(1).tolist())) > 8


def test_unknown_tokens_are_not_predicted(tokenizer):
    texts = Dataset.from_dict({"text": ["The mean of the data \u2248 the value of the default dtype."] * 9})
    rows = list(pretraining_dataset(texts, tokenizer, MAX_LENGTH, 0.0, sentence_order=False))
    batch = PretrainingCollator(tokenizer, mlm_probability=1.0, sentence_order=False)(rows)
    original = unmasked(batch)
    assert (original == tokenizer.unk_token_id).sum(1).tolist() == [1] * 9
    special = torch.isin(original, torch.tensor(tokenizer.all_special_ids))
    assert torch.equal(batch["labels"] == -100, special)


def test_everything_depends_on_seed_epoch_and_row_alone(rows, tokenizer):
    chosen = rows[:16]

    def made(collator, rows):
        batch = collator(rows)
        return [
            (ids[mask.bool()].tolist(), order)
            for ids, mask, order in zip(
                batch["input_ids"], batch["attention_mask"], batch["sentence_order_label"].tolist(), strict=True
            )
        ]

    collator = PretrainingCollator(tokenizer, seed=3)
    together = made(collator, chosen)
    torch.manual_seed(99)
    np.random.seed(99)
    alone = [made(PretrainingCollator(tokenizer, seed=3), [row])[0] for row in reversed(chosen)][::-1]
    assert alone == together
    collator.set_epoch(1)
    later = made(collator, chosen)
    assert sum(a[0] != b[0] for a, b in zip(later, together, strict=True)) > 8
    assert sum(a[1] != b[1] for a, b in zip(later, together, strict=True)) > 3
    # A row's own epoch takes precedence over that of the collator.
    assert made(collator, [{**row, "epoch": 0} for row in chosen]) == together
    assert made(PretrainingCollator(tokenizer, seed=4), chosen) != together


@pytest.mark.parametrize("short_seq_prob", [0.0, 0.3])
def test_borders_of_segments_do_not_show_their_order(short_seq_prob, tokenizer):
    """Sentences at random have no order that a model could learn; cut sentences at the borders would show one."""
    rng = np.random.default_rng(0)
    words = ("data", "mean", "sum", "axis", "model", "index", "value", "error")
    texts = [
        " ".join(f"The {' '.join(rng.choice(words, rng.integers(2, 16)))}." for _ in range(rng.integers(1, 30)))
        for _ in range(400)
    ]
    documents = Dataset.from_dict({"text": texts})
    rows = list(pretraining_dataset(documents, tokenizer, MAX_LENGTH, short_seq_prob))
    batch = PretrainingCollator(tokenizer)(rows)
    order = batch["sentence_order_label"].numpy()
    borders = []
    for ids in unmasked(batch)[torch.from_numpy(order >= 0)]:
        first, second = (ids == tokenizer.sep_token_id).nonzero()[:, 0].tolist()
        borders.append(ids[[1, first - 1, first + 1, second - 1]].tolist())
    order, features = order[order >= 0], OneHotEncoder().fit_transform(borders)
    assert len(order) > 1000
    half = len(order) // 2
    classifier = LogisticRegression().fit(features[:half], order[:half])
    assert within(classifier.score(features[half:], order[half:]), 0.5, len(order) - half)


def test_other_templates_and_padding():
    """RoBERTa's template has two tokens between segments and one token type; with padding on the left."""
    tokenizer = byte_level_tokenizer(["One sentence. Another one."])
    tokenizer.padding_side = "left"
    rows = pretraining_dataset(Dataset.from_dict({"text": ["One sentence. Another one.", "One."]}), tokenizer, 64)
    batch = PretrainingCollator(tokenizer, pad_to_multiple_of=8)(list(rows))
    assert batch["input_ids"].shape[1] % 8 == 0
    pair, single = (
        tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(unmasked(batch), batch["attention_mask"], strict=True)
    )
    assert pair in ("<s> One sentence.</s></s> Another one.</s>", "<s> Another one.</s></s> One sentence.</s>")
    assert single == "<s> One.</s>"
    assert batch["attention_mask"][1, -1] == 1 and batch["attention_mask"][1, 0] == 0
    assert not batch["token_type_ids"].any()


def test_a_tokenizer_that_gives_no_token_types(rows, tokenizer):
    """DistilBERT's has BERT's types within, but its models, and those that are converted from them, have only one."""
    other = DistilBertTokenizer(vocab=tokenizer.get_vocab())
    batch = PretrainingCollator(other)(rows)
    assert (batch["sentence_order_label"] >= 0).any() and not batch["token_type_ids"].any()


def test_padding_is_as_short_as_it_can_be(rows, tokenizer):
    longest = PretrainingCollator(tokenizer)(rows)["input_ids"].shape[1]
    for multiple, width in ((longest, longest), (longest - 1, 2 * longest - 2)):
        assert PretrainingCollator(tokenizer, pad_to_multiple_of=multiple)(rows)["input_ids"].shape[1] == width


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mlm_probability": 0.0}, "mlm_probability must lie above 0"),
        ({"mlm_probability": 1.5}, r"mlm_probability must lie .* up to 1, but is 1\.5"),
        ({"mask_replace_prob": 0.95}, "add up to 1"),
        ({"mask_replace_prob": -0.1}, r"mask_replace_prob .* must not be negative .* but are -0\.1 and"),
        ({"random_replace_prob": -0.1}, r"random_replace_prob must not be negative .* and -0\.1"),
    ],
)
def test_bad_probabilities(options, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        PretrainingCollator(tokenizer, **options)


@pytest.mark.parametrize(("token", "kind"), [("mask_token", "mask"), ("pad_token", "padding")])
def test_a_tokenizer_without_a_token_that_is_needed(token, kind, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    setattr(tokenizer, token, None)
    with pytest.raises(ValueError, match=f"tokenizer has no {kind} token: add one"):
        PretrainingCollator(tokenizer)
