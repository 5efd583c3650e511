# SPDX-License-Identifier: Apache-2.0
"""Trains on any number of processes and writes what came out; run by test_loop.py through `torchrun`."""

import json
import sys

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from nystrom_models.data import PretrainingCollator, eval_dataloader, pretraining_dataset, train_dataloader
from nystrom_models.training import (
    OptimizationArguments,
    PretrainingObjective,
    create_accelerator,
    evaluate,
    save_pretrained,
    train,
)
from tests.training.models import FAMILIES, tiny_model

TOTAL_BATCH_SIZE = 8


def run(folder):
    """The history, scores and number of tokens of each family; the model is saved."""
    accelerator = create_accelerator(cpu=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with open(f"{folder}/texts.json") as file:
        texts = json.load(file)
    examples = pretraining_dataset(Dataset.from_dict({"text": texts}), tokenizer, 40, short_seq_prob=0.3)
    collator = PretrainingCollator(tokenizer)
    batch_size = TOTAL_BATCH_SIZE // accelerator.num_processes
    args = OptimizationArguments(batch_size, learning_rate=1e-3, max_train_steps=6)
    results = {}
    for family in FAMILIES:
        model = tiny_model(family, tokenizer).double()
        loader = train_dataloader(examples, collator, batch_size, TOTAL_BATCH_SIZE)
        state = train(accelerator, model, PretrainingObjective(), loader, args, logging_steps=1)
        # 37 rows: neither the batch size nor the number of processes divides it.
        loader = eval_dataloader(examples.select(range(37)), collator, 5)
        scores = evaluate(accelerator, state.model, PretrainingObjective(), loader)
        save_pretrained(accelerator, state.model, tokenizer, f"{folder}/{family}{accelerator.num_processes}")
        results[family] = {"history": state.history, "scores": scores, "num_tokens": state.num_tokens}
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = run(sys.argv[1])
    with open(f"{sys.argv[1]}/result{torch.distributed.get_rank()}.json", "w") as file:
        json.dump(results, file)
    torch.distributed.destroy_process_group()
