# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from datasets import Dataset
from torch.utils.data import DataLoader

from nystrom_models.data import ClassificationCollator, classification_dataset
from nystrom_models.training import create_accelerator, predict
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


def test_rows_without_numbers_are_refused(tokenizer):
    with pytest.raises(ValueError, match="no index"):
        logits(tokenizer, with_index=False)
