# SPDX-License-Identifier: Apache-2.0
"""Trains on any number of processes and writes the results, for test_loop.py."""

import json

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from nystrom_models.data import (
    ClassificationCollator,
    PretrainingCollator,
    RowLoader,
    classification_dataset,
    eval_dataloader,
    pretraining_dataset,
)
from nystrom_models.training import (
    ClassificationObjective,
    OptimizationArguments,
    PretrainingObjective,
    create_accelerator,
    evaluate,
    save_pretrained,
    train,
)
from tests.training.models import FAMILIES, tiny_model

TOTAL_BATCH_SIZE = 8
STEPS = 34  # more than an epoch of 30


def pretrain(accelerator, family, tokenizer, texts, folder):
    """History, scores and number of tokens; the model is saved."""
    examples = pretraining_dataset(Dataset.from_dict({"text": texts}), tokenizer, 40, short_seq_prob=0.3)
    collator = PretrainingCollator(tokenizer)
    batch_size = TOTAL_BATCH_SIZE // accelerator.num_processes
    args = OptimizationArguments(batch_size, learning_rate=1e-3, max_train_steps=STEPS)
    model = tiny_model(family, tokenizer).double()
    loader = RowLoader(examples, collator, batch_size)
    state = train(accelerator, model, PretrainingObjective(), loader, args, logging_steps=1)
    # 37 rows: neither the batch size nor the number of processes divides it.
    loader = eval_dataloader(examples.select(range(37)), collator, 5)
    scores = evaluate(accelerator, state.model, PretrainingObjective(), loader)
    save_pretrained(accelerator, state.model, tokenizer, f"{folder}/{family}{accelerator.num_processes}")
    return {"history": state.history, "scores": scores, "num_tokens": state.num_tokens}


def finetune(accelerator, family, tokenizer, texts):
    """History and scores of a classifier."""
    rows = Dataset.from_dict({"text": texts, "label": [i % 3 for i in range(len(texts))]})
    encoded = classification_dataset(rows, tokenizer, 40)
    batch_size = TOTAL_BATCH_SIZE // accelerator.num_processes
    args = OptimizationArguments(batch_size, learning_rate=1e-3, max_train_steps=STEPS)
    model = tiny_model(family, tokenizer, "classification", num_labels=3).double()
    collator = ClassificationCollator(tokenizer)
    loader = RowLoader(encoded, collator, batch_size)
    state = train(accelerator, model, ClassificationObjective(), loader, args, logging_steps=1)
    loader = eval_dataloader(encoded.select(range(37)), collator, 5)
    scores = evaluate(accelerator, state.model, ClassificationObjective(), loader)
    return {"history": state.history, "scores": scores}


def run(folder):
    """The results of pretraining and fine-tuning of each family."""
    accelerator = create_accelerator()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with open(f"{folder}/texts.json") as file:
        texts = json.load(file)
    results = {}
    for family in FAMILIES:
        results[f"{family} pretraining"] = pretrain(accelerator, family, tokenizer, texts, folder)
        results[f"{family} fine-tuning"] = finetune(accelerator, family, tokenizer, texts)
    return results


def main(folder):
    """Writes the results of each process to a file."""
    results = run(folder)
    with open(f"{folder}/result{torch.distributed.get_rank()}.json", "w") as file:
        json.dump(results, file)
