# SPDX-License-Identifier: Apache-2.0
import re

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from nystrom_models.data import PretrainingCollator, pretraining_dataset
from nystrom_models.data.pretraining import split_sentences

MAX_LENGTH = 48


@pytest.fixture(scope="module")
def examples(documents, tokenizer):
    return pretraining_dataset(documents, tokenizer, MAX_LENGTH, short_seq_prob=0.2)


def segments(example, tokenizer):
    """The texts of the one or two segments of an example."""
    text = tokenizer.decode(example["input_ids"])
    assert text.startswith("[CLS]") and text.endswith("[SEP]")
    return [part.strip() for part in text.removeprefix("[CLS]").removesuffix("[SEP]").split("[SEP]")]


def tokens_of(text, tokenizer):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def within(share, expected, number):
    """Whether a share of `number` draws lies within five standard deviations of what is expected."""
    return abs(share - expected) < 5 * (expected * (1 - expected) / number) ** 0.5


def test_sentences():
    text = "Return the mean, e.g. of rows. See above!\nNo end here\n\n(Or None.) It is 1.5 or 2. 3 is next."
    assert split_sentences(text) == [
        "Return the mean, e.g. of rows.",
        "See above!",
        "No end here",
        "(Or None.) It is 1.5 or 2.",
        "3 is next.",
    ]


def test_labels_say_whether_segments_were_swapped(examples, tokenizer):
    labels = np.array(examples["sentence_order_label"])
    for example in examples:
        parts = segments(example, tokenizer)
        if example["sentence_order_label"] == -100:
            assert len(parts) == 1
            continue
        first, second = ([int(n) for n in re.findall(r"sentence (\d)", part)] for part in parts)
        assert first == sorted(first) and second == sorted(second)
        # A sentence too long for a row goes on in the next one, without its number.
        if first and second:
            assert example["sentence_order_label"] == (first[0] > second[0])
    paired = labels[labels >= 0]
    assert len(paired) > 500
    assert within(paired.mean(), 0.5, len(paired))


def test_one_sentence_is_never_labelled_swapped(tokenizer):
    single = Dataset.from_dict({"text": ["Return the mean of the tensor.", "", "Compute"]})
    examples = pretraining_dataset(single, tokenizer, MAX_LENGTH)
    assert examples["sentence_order_label"] == [-100, -100]


def test_packing_respects_max_length_and_loses_nothing(documents, examples, tokenizer):
    lengths = examples["length"]
    assert lengths == [len(ids) for ids in examples["input_ids"]]
    assert max(lengths) <= MAX_LENGTH and max(lengths) > 0.9 * MAX_LENGTH
    tokens = []
    for example in examples:
        parts = segments(example, tokenizer)
        if example["sentence_order_label"] == 1:
            parts.reverse()
        for part in parts:
            tokens += tokens_of(part, tokenizer)
    expected = [token for text in documents["text"] for token in tokens_of(text, tokenizer)]
    assert tokens == expected


def test_a_character_of_many_tokens_ends():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    specials = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=specials)
    bpe.train_from_iterator(["value"], trainer)
    bpe.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=64)
    examples = pretraining_dataset(Dataset.from_dict({"text": ["\U0001f600 value \U0001f600"]}), tokenizer, 7)
    assert len(examples) > 0 and max(examples["length"]) <= 7


def test_short_sequences_have_a_probability(documents, tokenizer):
    def share_short(probability):
        lengths = np.array(pretraining_dataset(documents, tokenizer, 128, short_seq_prob=probability)["length"])
        return np.mean(lengths < 32)

    assert share_short(0.0) + 0.1 < share_short(0.9)


def test_examples_do_not_depend_on_processes(documents, examples, tokenizer):
    parallel = pretraining_dataset(documents, tokenizer, MAX_LENGTH, short_seq_prob=0.2, num_proc=2)
    assert parallel["input_ids"] == examples["input_ids"]
    assert parallel["index"] == examples["index"] == list(range(len(examples)))


def test_masking_statistics(examples, tokenizer):
    rows = [examples[i] for i in range(len(examples))]
    batch = PretrainingCollator(tokenizer)(rows)
    original = torch.full_like(batch["input_ids"], tokenizer.pad_token_id)
    for i, row in enumerate(rows):
        original[i, : row["length"]] = torch.tensor(row["input_ids"])
    predicted = batch["labels"] != -100
    ordinary = original >= len(tokenizer.all_special_ids)
    assert torch.equal(batch["labels"][predicted], original[predicted])
    assert torch.equal(batch["input_ids"][~predicted], original[~predicted])
    assert not (predicted & ~ordinary).any(), "a special token is to be predicted"
    assert predicted.any(dim=1).all(), "a row has nothing to predict"
    # Rows of a few tokens always predict one, and so predict more than their share.
    long = ordinary.sum(1) >= 30
    assert within(predicted[long].sum() / ordinary[long].sum(), 0.15, int(ordinary[long].sum()))
    replaced = batch["input_ids"][predicted]
    number = len(replaced)
    random_hits = 0.1 / len(tokenizer)
    assert within((replaced == tokenizer.mask_token_id).float().mean(), 0.8 + random_hits, number)
    assert within((replaced == original[predicted]).float().mean(), 0.1 + random_hits, number)


def test_whole_words_are_masked_together(tokenizer):
    texts = Dataset.from_dict({"text": ["Uncompute rematrixed tokenizers of subtensors. Unlabelled outputsize."] * 40})
    examples = pretraining_dataset(texts, tokenizer, MAX_LENGTH)
    rows = [examples[i] for i in range(len(examples))]
    batch = PretrainingCollator(tokenizer, whole_word_mask=True, mlm_probability=0.4)(rows)
    words_of_pieces = 0
    for row, labels in zip(rows, batch["labels"].tolist(), strict=True):
        predicted = {word for word, label in zip(row["word_ids"], labels, strict=False) if label != -100}
        for word in set(row["word_ids"]) - {-1}:
            places = [i for i, other in enumerate(row["word_ids"]) if other == word]
            assert {labels[i] != -100 for i in places} == {word in predicted}
            words_of_pieces += len(places) > 1
    assert words_of_pieces > 40


def test_a_mask_depends_on_seed_epoch_and_example_alone(examples, tokenizer):
    rows = [examples[i] for i in range(16)]

    def masked(collator, rows):
        batch = collator(rows)
        return [batch["input_ids"][i, : row["length"]].tolist() for i, row in enumerate(rows)]

    collator = PretrainingCollator(tokenizer, seed=3)
    together = masked(collator, rows)
    torch.manual_seed(99)
    alone = [masked(PretrainingCollator(tokenizer, seed=3), [row])[0] for row in reversed(rows)][::-1]
    assert alone == together
    collator.set_epoch(1)
    next_epoch = masked(collator, rows)
    assert sum(a != b for a, b in zip(next_epoch, together, strict=True)) > 8
    assert masked(PretrainingCollator(tokenizer, seed=4), rows) != together


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 4}, "max_length must lie between 5"),
        ({"max_length": 1000}, "tokenizer's model_max_length, but is 1000"),
        ({"short_seq_prob": 1.5}, "short_seq_prob must lie between 0 and 1"),
        ({"text_column": "body"}, r"text_column='body' does not exist; the columns are \['text'\]"),
    ],
    ids=["short", "long", "probability", "column"],
)
def test_bad_options_are_named(documents, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        pretraining_dataset(documents, tokenizer, **{"max_length": MAX_LENGTH, **options})


def test_no_text_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="holds no text"):
        pretraining_dataset(Dataset.from_dict({"text": ["", " \n"]}), tokenizer, MAX_LENGTH)
