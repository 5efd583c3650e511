# SPDX-License-Identifier: Apache-2.0
"""A training run that may be stopped, by itself or from outside; test_checkpoints.py runs it in its own processes."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer

from nystrom_models.data import PretrainingCollator, RowLoader, load_files, pretraining_dataset, pretraining_stream
from nystrom_models.training import (
    CheckpointArguments,
    OptimizationArguments,
    PretrainingObjective,
    checkpoints,
    create_accelerator,
    save_pretrained,
    train,
)
from nystrom_models.training.loop import TrainingLoop
from tests.training.models import tiny_model

STEPS, EVERY = 14, 4


@dataclass(frozen=True)
class Run:
    """The options of a run: its task and its data."""

    family: str = "linformer"
    data: str = "rows"  # rows, tokens, or a stream of 1, 2, ... files: stream1, stream2, ...
    num_processes: int = 1
    num_workers: int = 0
    dropout: float = 0.1


class StoppingObjective(PretrainingObjective):
    """Sends this process a signal in the forward pass of a step."""

    def __init__(self, number, step):
        self.number, self.steps_left = number, step

    def losses(self, outputs):
        self.steps_left -= 1
        if self.steps_left == 0:
            os.kill(os.getpid(), self.number)
        return super().losses(outputs)


def objective_that(stop, rank, data):
    """The objective of a run that stops; if there are several processes, only one gets the signal."""
    if rank != 0 and stop != "term-other":
        return PretrainingObjective()
    if stop == "kill-in-a-step":
        return StoppingObjective(signal.SIGKILL, 30 if data == "tokens" else 10)  # three micro-batches a step
    if stop == "kill-while-saving":
        sync = checkpoints._sync

        def stopping_sync(path):
            if path.parent.name == ".checkpoint-8.partial" and path.name == "optimizer.bin":
                os.kill(os.getpid(), signal.SIGKILL)
            sync(path)

        checkpoints._sync = stopping_sync
    if stop in ("term", "int", "usr1"):
        return StoppingObjective({"term": signal.SIGTERM, "int": signal.SIGINT, "usr1": signal.SIGUSR1}[stop], 7)
    if stop == "term-late":
        # After the processes have agreed on what to do, before they do it.
        log = TrainingLoop.log

        def signalled_log(loop):
            log(loop)
            if loop.state.step == 5:
                os.kill(os.getpid(), signal.SIGTERM)

        TrainingLoop.log = signalled_log
    if stop == "term-other" and rank == 1:
        return StoppingObjective(signal.SIGTERM, 7)
    return PretrainingObjective()


def make_loader(run, data, tokenizer):
    """Epochs of about 5 steps of 8 rows: checkpoints are within epochs and between logs."""
    collator = PretrainingCollator(tokenizer)
    options = {"num_workers": run.num_workers}
    micro_batch = 8 // run.num_processes
    if run.data.startswith("stream"):
        files = sorted(Path(data).glob(f"{run.data}-*.txt"))
        documents = load_files(files, streaming=True, cache_dir=f"{data}/cache")
        return pretraining_stream(
            documents, tokenizer, collator, 40, per_device_train_batch_size=micro_batch, buffer_size=12, **options
        )
    documents = load_files(f"{data}/stream1-0.txt", cache_dir=f"{data}/cache")
    rows = pretraining_dataset(documents, tokenizer, 40)
    if run.data == "tokens":
        return RowLoader(rows, collator, 3, tokens_per_step=240, **options)
    return RowLoader(rows, collator, micro_batch, **options)


def main(run, data, folder, stop="", resume=None):
    """Trains, and saves the history and the final model in `folder`; returns the accelerator and the final state."""
    tokenizer = AutoTokenizer.from_pretrained(data)
    accelerator = create_accelerator()
    model = tiny_model(
        run.family, tokenizer, hidden_dropout_prob=run.dropout, attention_probs_dropout_prob=run.dropout
    )
    state = train(
        accelerator,
        model,
        objective_that(stop, accelerator.process_index, run.data),
        make_loader(run, data, tokenizer),
        OptimizationArguments(8 // run.num_processes, learning_rate=1e-3, max_train_steps=STEPS),
        logging_steps=3,
        checkpoints=CheckpointArguments(folder, EVERY, resume_from_checkpoint=resume),
        save_model=lambda model, path: save_pretrained(accelerator, model, tokenizer, path),
    )
    save_pretrained(accelerator, state.model, tokenizer, f"{folder}/final")
    if accelerator.is_main_process:
        result = {"history": state.history, "interrupted": state.interrupted, "step": state.step}
        Path(folder, "result.json").write_text(json.dumps(result))
    assert torch.initial_seed() == accelerator.process_index  # dropout differs between processes
    return accelerator, state
