# SPDX-License-Identifier: Apache-2.0
import random

import pytest
from datasets import Dataset

from nystrom_models.data import classification_dataset, eval_dataloader, train_dataloader
from nystrom_models.data.loading import LengthGroupedBatches

LENGTHS = random.Random(0).choices(range(1, 200), k=1003)


def test_batches_hold_rows_of_similar_length_in_random_order():
    order = list(LengthGroupedBatches(LENGTHS, batch_size=16, seed=0))
    assert sorted(order) == list(range(len(LENGTHS)))
    batches = [[LENGTHS[i] for i in order[start : start + 16]] for start in range(0, 992, 16)]
    assert sum(max(batch) - min(batch) for batch in batches) / len(batches) < 40  # about 176 without grouping
    longest = [max(batch) for batch in batches]
    assert longest != sorted(longest, reverse=True)


def test_the_order_is_a_function_of_seed_and_epoch():
    sampler = LengthGroupedBatches(LENGTHS, 16, seed=0)
    first = list(sampler)
    assert list(sampler) == first == list(LengthGroupedBatches(LENGTHS, 16, seed=0))
    sampler.set_epoch(1)
    assert list(sampler) != first
    assert list(LengthGroupedBatches(LENGTHS, 16, seed=1)) != first


def test_micro_batches_of_a_step_hold_the_rows_of_the_whole_batch():
    rows = Dataset.from_dict({"id": range(len(LENGTHS)), "length": LENGTHS})

    def steps(micro_batch):
        loader = train_dataloader(rows, lambda batch: [row["id"] for row in batch], micro_batch, 16, seed=0)
        order = [row for batch in loader for row in batch]
        return [order[start : start + 16] for start in range(0, 992, 16)]

    assert steps(4) == steps(16)


def test_evaluation_sees_every_row_once():
    rows = Dataset.from_dict({"id": range(len(LENGTHS)), "length": LENGTHS})
    loader = eval_dataloader(rows, lambda batch: [row["id"] for row in batch], 64)
    assert sorted(row for batch in loader for row in batch) == list(range(len(LENGTHS)))


def test_too_few_rows_for_a_step():
    with pytest.raises(ValueError, match="lower --per_device_train_batch_size"):
        train_dataloader(Dataset.from_dict({"length": [1, 2]}), list, 4)


def test_classification_rows(tokenizer):
    rows = Dataset.from_dict({"text": ["the mean", "value " * 50], "label": ["b", "a"]})
    encoded = classification_dataset(rows, tokenizer, 16, label_names=["a", "b"])
    assert encoded["labels"] == [1, 0] and encoded["length"][1] == 16
    with pytest.raises(ValueError, match=r"holds \['b'\]"):
        classification_dataset(rows, tokenizer, 16, label_names=["a"])
    with pytest.raises(ValueError, match="has no column 'category'"):
        classification_dataset(rows, tokenizer, 16, label_column="category")
