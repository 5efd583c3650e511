# SPDX-License-Identifier: Apache-2.0
"""A training run that may be stopped from within; run by test_checkpoints.py as a process of its own.

Arguments: folder with texts.json and tokenizer, folder of the run, family, how to stop, --resume_from_checkpoint.
"""

import json
import os
import signal
import sys

import torch
from datasets import Dataset
from transformers import AutoTokenizer

from nystrom_models.data import PretrainingCollator, pretraining_dataset, train_dataloader
from nystrom_models.training import (
    CheckpointArguments,
    OptimizationArguments,
    PretrainingObjective,
    checkpoints,
    create_accelerator,
    save_pretrained,
    train,
)
from tests.training.models import tiny_model

STEPS, EVERY = 14, 4


class StoppingObjective(PretrainingObjective):
    """Sends this process a signal in the forward pass of a step."""

    def __init__(self, number, step):
        self.number, self.steps_left = number, step

    def losses(self, outputs):
        self.steps_left -= 1
        if self.steps_left == 0:
            os.kill(os.getpid(), self.number)
        return super().losses(outputs)


def main(data, folder, family, stop, resume):
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(data)
    with open(f"{data}/texts.json") as file:
        texts = json.load(file)
    # 5 steps an epoch: checkpoints fall within epochs and between logs, and dropout draws random numbers.
    examples = pretraining_dataset(Dataset.from_dict({"text": texts[:40]}), tokenizer, 40).select(range(40))
    model = tiny_model(family, tokenizer, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    objective = PretrainingObjective()
    if stop == "kill-in-a-step":
        objective = StoppingObjective(signal.SIGKILL, 10)
    elif stop == "term":
        objective = StoppingObjective(signal.SIGTERM, 7)
    elif stop == "kill-while-saving":
        sync, left = checkpoints._sync, [9]

        def stopping_sync(path):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            sync(path)

        checkpoints._sync = stopping_sync
    accelerator = create_accelerator(cpu=True)
    state = train(
        accelerator,
        model,
        objective,
        train_dataloader(examples, PretrainingCollator(tokenizer), 8),
        OptimizationArguments(8, learning_rate=1e-3, max_train_steps=STEPS),
        logging_steps=3,
        checkpoints=CheckpointArguments(folder, EVERY, resume_from_checkpoint=resume or None),
    )
    save_pretrained(accelerator, state.model, tokenizer, f"{folder}/final")
    with open(f"{folder}/result.json", "w") as file:
        json.dump({"history": state.history, "interrupted": state.interrupted, "step": state.step}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
