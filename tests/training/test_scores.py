# SPDX-License-Identifier: Apache-2.0
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from torch.utils.data import DataLoader

from nystrom_models.data import ClassificationCollator, classification_dataset
from nystrom_models.training import create_accelerator, predict
from nystrom_models.training.objectives import (
    CausalObjective,
    ClassificationObjective,
    MultiLabelObjective,
    QuestionAnsweringObjective,
    RegressionObjective,
    classification_scores,
)
from tests.training import processes
from tests.training.models import tiny_model

TEXTS = [f"Return the mean of {'all values ' * (i % 7)}{i}." for i in range(23)]


def logits(tokenizer, shuffle=False, with_index=True, batch_size=5, texts=TEXTS):
    torch.manual_seed(0)
    rows = classification_dataset(Dataset.from_dict({"text": texts}), tokenizer, 40, label_column=None)
    collator = ClassificationCollator(tokenizer, with_index=with_index)
    loader = DataLoader(rows, batch_size=batch_size, shuffle=shuffle, collate_fn=collator)
    model = tiny_model("nystromformer", tokenizer, "classification", num_labels=3)
    accelerator = create_accelerator()
    return predict(accelerator, model.to(accelerator.device), loader)


def test_predictions_are_in_the_order_of_the_rows_whatever_the_order_of_reading(tokenizer):
    expected = torch.cat([logits(tokenizer, texts=[text], batch_size=1) for text in TEXTS])
    torch.testing.assert_close(logits(tokenizer), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits(tokenizer, shuffle=True), expected, rtol=1e-5, atol=1e-6)


def in_processes(tokenizer_folder, path):
    from transformers import AutoTokenizer

    found = logits(AutoTokenizer.from_pretrained(tokenizer_folder), shuffle=False)
    if create_accelerator().is_main_process:
        torch.save(found, path)


def test_rows_that_fill_up_the_last_batch_of_two_processes_are_dropped(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    codes, log = processes.run(in_processes, str(tmp_path), f"{tmp_path}/logits.pt", folder=tmp_path, num_processes=2)
    assert codes == [0, 0], log[-3000:]
    found = torch.load(tmp_path / "logits.pt")
    torch.testing.assert_close(found, logits(tokenizer), rtol=1e-5, atol=1e-6)


def test_predictions_are_made_without_dropout(tokenizer):
    rows = classification_dataset(Dataset.from_dict({"text": TEXTS}), tokenizer, 40, label_column=None)
    loader = DataLoader(rows, batch_size=5, collate_fn=ClassificationCollator(tokenizer, with_index=True))
    model = tiny_model("nystromformer", tokenizer, "classification", num_labels=3, hidden_dropout_prob=0.5).train()
    found = predict(create_accelerator(), model, loader)
    assert model.training and torch.equal(predict(create_accelerator(), model, loader), found)
    # A model that is not trained is left so.
    assert torch.equal(predict(create_accelerator(), model.eval(), loader), found) and not model.training


def test_rows_without_numbers_are_refused(tokenizer):
    with pytest.raises(ValueError, match="no index"):
        logits(tokenizer, with_index=False)


def test_both_tokens_of_an_answer_must_be_right_and_padding_is_no_token():
    """The answer is the tokens 1 and 2; padding has the largest logits. Of the last two rows, one token is right."""
    start, end = torch.tensor([[0.0, 5, 1, 9], [5, 0, 1, 9], [0, 5, 1, 9]]), torch.tensor([[0.0, 1, 5, 9]] * 3)
    end[2] = torch.tensor([5.0, 1, 0, 9])
    batch = {"attention_mask": torch.tensor([[1, 1, 1, 0]] * 3)}
    batch |= {"start_positions": torch.tensor([1] * 3), "end_positions": torch.tensor([2] * 3)}
    scores = QuestionAnsweringObjective().scores(SimpleNamespace(start_logits=start, end_logits=end), batch)
    assert [part.tolist() for part in scores["accuracy"]] == [[1, 0, 0], [1, 1, 1]]
    losses, count = scores["loss"]
    expected = -(start[:, :3].log_softmax(1)[:, 1] + end[:, :3].log_softmax(1)[:, 2]) / 2
    torch.testing.assert_close(losses, expected)
    assert count.tolist() == [1, 1, 1]


def test_the_loss_of_rounded_logits_is_not_rounded():
    logits, labels = torch.randn(300, 500).bfloat16(), torch.randint(0, 500, (300,))
    found, _ = ClassificationObjective().scores(SimpleNamespace(logits=logits), {"labels": labels})["loss"]
    expected = F.cross_entropy(logits.double(), labels, reduction="none")
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=0)


def test_sums_over_long_rows_keep_their_digits():
    """Added one after the other, equal losses are rounded in one direction: off by 1e-4 in a row of 16,384 tokens."""
    logits, labels = torch.zeros(1, 16_385, 7), torch.zeros(1, 16_385, dtype=torch.long)
    labels[0, ::5] = -100
    sums, count = CausalObjective().scores(SimpleNamespace(logits=logits), {"labels": labels})["loss"]
    assert abs(sums.double().item() / (count.item() * math.log(7)) - 1) < 1e-6


def test_labels_of_fewer_bits_are_scored_like_others():
    labels = torch.tensor([[2, -100, 1], [-100, 0, -100]])
    sparse = F.one_hot(torch.tensor([2, 0, 0]), 3).float()
    for dtype in (torch.int64, torch.int32, torch.int16):
        right, number = classification_scores(sparse, labels.to(dtype), "loss", "accuracy", False)["accuracy"]
        assert right.tolist() == [1, 1] and number.tolist() == [2, 1]


@pytest.mark.parametrize("predictions", [2, 4])
def test_another_number_of_predictions_than_labels_is_refused(predictions):
    labels = torch.tensor([[2, -100, 1], [-100, 0, -100]])
    with pytest.raises(ValueError, match=f"There are {predictions} predictions, and another number of labels"):
        classification_scores(torch.zeros(predictions, 3), labels, "loss", "accuracy", False)


def test_each_class_of_a_row_counts_by_itself():
    logits, labels = torch.tensor([[0.2, -0.2, 3.0], [-4.0, 0.3, -0.1]]), torch.tensor([[1.0, 0, 0], [0, 0, 1]])
    scores = MultiLabelObjective().scores(SimpleNamespace(logits=logits), {"labels": labels})
    assert [part.tolist() for part in scores["accuracy"]] == [[2, 1], [3, 3]]
    right = torch.where(labels > 0, logits, -logits)
    torch.testing.assert_close(scores["loss"][0], -right.sigmoid().log().sum(1))
    assert scores["loss"][1].tolist() == [3, 3]


def test_the_error_of_a_number_is_squared():
    outputs = SimpleNamespace(logits=torch.tensor([[1.0], [-2.0]]))
    errors, count = RegressionObjective().scores(outputs, {"labels": torch.tensor([3, 1])})["loss"]
    assert (errors.tolist(), count.tolist()) == ([4, 9], [1, 1])
