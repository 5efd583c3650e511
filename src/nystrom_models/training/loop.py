# SPDX-License-Identifier: Apache-2.0
"""The training loop, one for pretraining and fine-tuning."""

import itertools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from .checkpoints import CheckpointArguments, StopSignal, find_checkpoint, load_checkpoint, save_checkpoint
from .objectives import Batch, Objective
from .optimization import OptimizationArguments, create_optimizer, create_scheduler


def create_accelerator(
    gradient_accumulation_steps: int = 1, mixed_precision: str | None = None, **kwargs: Any
) -> Accelerator:
    """An `Accelerator` as [`train`] needs it; further arguments are passed on.

    The schedule advances once an optimizer step whatever the number of processes, and a step always takes
    `gradient_accumulation_steps` micro-batches, also across the end of an epoch.
    """
    return Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=gradient_accumulation_steps, sync_with_dataloader=False
        ),
        mixed_precision=mixed_precision,
        step_scheduler_with_optimizer=False,
        **kwargs,
    )


@dataclass
class TrainingState:
    """Where a training run stands. Figures are over all processes."""

    model: nn.Module  # as prepared by Accelerate
    step: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    history: list[dict[str, float]] = field(default_factory=list)
    interrupted: bool = False  # by SIGTERM, before its last step

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained on a second, padding not counted."""
        return self.num_tokens / self.seconds if self.seconds else math.nan

    def figures(self) -> dict[str, float]:
        """What `all_results.json` says of the training."""
        return {"steps": self.step, "seconds": self.seconds, "tokens_per_second": self.tokens_per_second}


@dataclass
class _MicroBatch:
    epoch: int  # from 0
    index: int  # of the batch within the epoch, from 0
    batch: Batch


def _micro_batches(
    accelerator: Accelerator, dataloader: DataLoader, epoch: int = 0, first: int = 0
) -> Iterator[_MicroBatch]:
    """Batches without end, from the one of number `first` in `epoch`."""
    while True:
        for part in (dataloader, dataloader.collate_fn):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        batches = iter(accelerator.skip_first_batches(dataloader, first) if first else dataloader)
        for index in itertools.count(first):
            # PyTorch draws a seed when it begins an epoch: not from the state that dropout draws from, so that a run
            # resumed within the epoch goes on with the same numbers.
            with torch.random.fork_rng(devices=[], enabled=index == first):
                batch = next(batches, None)
            if batch is None:
                break
            yield _MicroBatch(epoch, index, batch)
        if index == 0:
            raise ValueError("The training set gives no batch: it has fewer rows than --per_device_train_batch_size.")
        epoch, first = epoch + 1, 0


def _num_batches(dataloader: DataLoader) -> int | None:
    """Of an epoch; None for a stream, which does not tell."""
    return None if isinstance(dataloader.dataset, torch.utils.data.IterableDataset) else len(dataloader)


def steps_per_epoch(dataloader: DataLoader, args: OptimizationArguments) -> int:
    """Optimizer steps, rounded up, of a pass over `dataloader`, which is a prepared one.

    Raises:
        ValueError: if it is a stream, whose length nobody knows.
    """
    if (num_batches := _num_batches(dataloader)) is None:
        raise ValueError("A stream does not tell its length: give --max_train_steps and --eval_strategy no or steps.")
    return max(1, math.ceil(num_batches / args.gradient_accumulation_steps))


def num_training_steps(dataloader: DataLoader, args: OptimizationArguments) -> int:
    """Optimizer steps of a run over `dataloader`, which is a prepared one."""
    if args.max_train_steps is not None:
        return args.max_train_steps
    steps_per_epoch(dataloader, args)  # refuses a stream
    return max(1, math.ceil(args.num_train_epochs * len(dataloader) / args.gradient_accumulation_steps))


def train(
    accelerator: Accelerator,
    model: nn.Module,
    objective: Objective,
    dataloader: DataLoader,
    args: OptimizationArguments,
    logging_steps: int = 10,
    desc: str = "Training",
    checkpoints: CheckpointArguments | None = None,
    evaluation: Callable[[nn.Module], Mapping[str, float]] | None = None,
    eval_every: int | Literal["epoch"] | None = None,
) -> TrainingState:
    """Trains `model`, in place.

    The loss of a step is the mean over the targets of all its micro-batches on all processes, so that it does not
    matter how a batch is divided. The main process shows a progress bar with losses, accuracies and tokens a second.

    Args:
        accelerator: made by [`create_accelerator`] with the accumulation steps of `args`.
        model: not prepared yet.
        objective: what is trained for.
        dataloader: from [`train_dataloader`], not prepared yet.
        args: optimizer, schedule and length of the run.
        logging_steps: the figures shown, and handed to the accelerator's trackers, are means over so many steps.
        desc: text beside the progress bar.
        checkpoints: where and when to save, and from where to go on. A resumed run takes the same steps as one that
            was never stopped. SIGTERM saves a checkpoint after the step under way and ends the run.
        evaluation: gives the held-out figures of the prepared model; they are logged with `eval_` before their names.
        eval_every: steps between evaluations. There is none at the end: it is for the caller, once the model is saved.

    Returns:
        The prepared model and what was done, with the logged figures in `history`; `interrupted` after a SIGTERM.

    Raises:
        ValueError: if the accelerator accumulates otherwise than `args` says, or a checkpoint was saved with other
            settings.
        FloatingPointError: if the loss is not finite; the weights are those of the step before.
        OSError: if a checkpoint cannot be written; those before it stay.
    """
    accumulation = args.gradient_accumulation_steps
    if accelerator.gradient_accumulation_steps != accumulation or accelerator.gradient_state.sync_with_dataloader:
        raise ValueError(
            f"--gradient_accumulation_steps is {accumulation}, for which the accelerator was not made: make it with "
            f"create_accelerator({accumulation})."
        )
    model, optimizer, dataloader = accelerator.prepare(model, create_optimizer(model, args), dataloader)
    total_steps = num_training_steps(dataloader, args)
    scheduler = accelerator.prepare(create_scheduler(optimizer, args, total_steps))
    if eval_every == "epoch":
        eval_every = steps_per_epoch(dataloader, args)

    state = TrainingState(model)
    window = Sums(accelerator)  # since the last log
    num_tokens = torch.zeros((), dtype=torch.int64, device=accelerator.device)
    settings = {
        **{f"--{name}": value for name, value in asdict(args).items() if name != "per_device_eval_batch_size"},
        "the number of processes": accelerator.num_processes,
        "the number of batches of an epoch": _num_batches(dataloader),
    }
    epoch = first = 0  # of the next micro-batch
    resume_from = None if checkpoints is None else find_checkpoint(checkpoints)
    if resume_from is not None:
        progress = load_checkpoint(accelerator, resume_from, settings)
        for name in ("step", "seconds", "num_tokens", "history"):
            setattr(state, name, progress[name])
        if accelerator.is_main_process:  # sums over all processes, once
            num_tokens += progress["num_tokens"]
            window.load(progress["window"])
        accelerator.print(f"Going on from {resume_from}")
        epoch, first = progress["epoch"], progress["batch"]
    stream = _micro_batches(accelerator, dataloader, epoch, first)

    save_every = None if checkpoints is None else checkpoints.checkpointing_steps

    def save() -> None:
        assert checkpoints is not None
        state.seconds = time.perf_counter() - start
        progress = {
            "settings": settings,
            "step": state.step,
            "epoch": epoch,
            "batch": first,
            "seconds": state.seconds,
            "num_tokens": int(accelerator.reduce(num_tokens, "sum")),
            "history": state.history,
            "window": window.reduced(),
        }
        save_checkpoint(accelerator, checkpoints, state.step, progress)

    bar = tqdm(
        total=total_steps, initial=state.step, desc=desc, unit=" steps", disable=not accelerator.is_main_process
    )
    model.train()
    start = time.perf_counter() - state.seconds
    # Without checkpoints there is nothing to save: SIGTERM then ends the process as usual.
    with StopSignal() if checkpoints is not None else nullcontext(StopSignal()) as stop:
        while state.step < total_steps:
            micro_batches = [next(stream) for _ in range(accumulation)]
            epoch, first = micro_batches[-1].epoch, micro_batches[-1].index + 1
            targets = [objective.num_targets(micro_batch.batch) for micro_batch in micro_batches]
            total_targets = accelerator.reduce(
                {name: torch.stack([counts[name] for counts in targets]).sum() for name in targets[0]}, "sum"
            )
            step_loss = torch.zeros((), device=accelerator.device)
            for micro_batch, counts in zip(micro_batches, targets, strict=True):
                batch = micro_batch.batch
                with accelerator.accumulate(model):
                    outputs = model(**batch)
                    # Where a loss has no target its mean is 0 / 0.
                    losses = {
                        name: torch.where(counts[name] > 0, loss, 0.0)
                        for name, loss in objective.losses(outputs).items()
                    }
                    # In float32 at least, and in float64 where the model is.
                    shares = {
                        name: counts[name].to(torch.promote_types(loss.dtype, torch.float32))
                        / total_targets[name].clamp(min=1)
                        for name, loss in losses.items()
                    }
                    loss = sum(losses[name] * shares[name] for name in losses)
                    # Accelerate divides by the number of micro-batches, and the mean over processes by theirs.
                    accelerator.backward(loss * (accumulation * accelerator.num_processes))
                    with torch.no_grad():
                        step_loss += loss.detach()
                        window.add({name: (losses[name] * counts[name], counts[name]) for name in losses})
                        window.add(objective.scores(outputs, batch, with_loss=False))
                        num_tokens += batch["attention_mask"].sum()
                    if accelerator.sync_gradients:
                        received = torch.full_like(step_loss, stop.received)
                        total_loss, signals = accelerator.reduce(torch.stack([step_loss, received]), "sum")
                        if not torch.isfinite(total_loss):
                            bar.close()
                            raise FloatingPointError(
                                f"The loss of step {state.step + 1} is not finite (epoch {micro_batch.epoch + 1}, "
                                f"batches {micro_batches[0].index + 1} to {micro_batch.index + 1}). The weights are "
                                f"those after step {state.step}. Lower --learning_rate, now {args.learning_rate:g}, "
                                f"or --max_grad_norm, now {args.max_grad_norm:g}."
                            )
                        accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                    optimizer.step()
                    if accelerator.sync_gradients and not optimizer.step_was_skipped:
                        scheduler.step()
                    optimizer.zero_grad()
            state.step += 1
            bar.update()
            if state.step % logging_steps == 0 or state.step == total_steps:
                state.seconds = time.perf_counter() - start
                state.num_tokens = int(accelerator.reduce(num_tokens, "sum"))
                figures = window.means()
                shown = [f"{name} {value:.3f}" for name, value in figures.items() if not math.isnan(value)]
                bar.set_postfix_str(", ".join([*shown, f"{state.tokens_per_second:,.0f} tokens/s"]))
                figures |= {"learning_rate": scheduler.get_last_lr()[0], "tokens_per_second": state.tokens_per_second}
                log_figures(accelerator, state, figures)
                window = Sums(accelerator)
            if evaluation is not None and eval_every and state.step % eval_every == 0 and state.step < total_steps:
                paused = time.perf_counter()
                with torch.random.fork_rng(devices=[]):  # from which a loader draws a seed
                    figures = {f"eval_{name}": value for name, value in evaluation(model).items()}
                log_figures(accelerator, state, figures)
                if accelerator.is_main_process:
                    shown = [f"{name} {value:.4g}" for name, value in figures.items()]
                    bar.write(f"Step {state.step}: {', '.join(shown)}")
                start += time.perf_counter() - paused
            if signals or (save_every is not None and state.step % save_every == 0):
                save()
            if signals:
                # All processes stop after the same step, whichever got the signal.
                state.interrupted = state.step < total_steps
                break
    bar.close()
    return state


def log_figures(accelerator: Accelerator, state: TrainingState, figures: Mapping[str, float]) -> None:
    """Hands figures of the present step to the trackers, and keeps them in the history."""
    accelerator.log(dict(figures), step=state.step)
    state.history.append({"step": state.step, **figures})


class Sums:
    """Sums and numbers of targets by name, the same on all processes once [`means`] is asked for."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.dtype = torch.float32 if accelerator.device.type == "mps" else torch.float64
        self.sums: dict[str, torch.Tensor] = {}

    def add(self, scores: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Adds (sums, numbers) of any shape."""
        for name, (total, count) in scores.items():
            pair = torch.stack([value.detach().to(self.dtype).sum() for value in (total, count)])
            self.sums[name] = self.sums[name] + pair if name in self.sums else pair

    def reduced(self) -> dict[str, list[float]]:
        """The sums and numbers over all processes, for [`load`]."""
        sums = self.accelerator.reduce(self.sums, "sum") if self.sums else {}
        return {name: pair.tolist() for name, pair in sums.items()}

    def load(self, sums: Mapping[str, list[float]]) -> None:
        """Takes over what [`reduced`] gave; on one process only."""
        device = self.accelerator.device
        self.sums = {name: torch.tensor(pair, dtype=self.dtype, device=device) for name, pair in sums.items()}

    def means(self, reduce: bool = True) -> dict[str, float]:
        """Sum over number for every name; NaN where there was no target."""
        sums = self.accelerator.reduce(self.sums, "sum") if reduce else self.sums
        return {name: float(total / count) for name, (total, count) in sums.items()}


@torch.no_grad()
def evaluate(
    accelerator: Accelerator, model: nn.Module, objective: Objective, dataloader: DataLoader, desc: str = "Evaluating"
) -> dict[str, float]:
    """Mean losses and accuracies over every target of a data set, each row counted once.

    Args:
        accelerator: gathers over the processes.
        model: [`TrainingState.model`], or a model on the accelerator's device.
        objective: names the scores.
        dataloader: from [`eval_dataloader`], not prepared yet.
        desc: text beside the progress bar.
    """
    dataloader = accelerator.prepare(dataloader)
    was_training = model.training
    model.eval()
    sums = Sums(accelerator)
    for batch in tqdm(dataloader, desc=desc, leave=False, disable=not accelerator.is_main_process):
        # Rows that fill up the last batch of the processes are dropped here.
        sums.add(accelerator.gather_for_metrics(objective.scores(model(**batch), batch)))
    model.train(was_training)
    return sums.means(reduce=False)


def save_pretrained(
    accelerator: Accelerator, model: nn.Module, tokenizer: PreTrainedTokenizerBase, output_dir: str | os.PathLike
) -> None:
    """Writes model and tokenizer for `from_pretrained`; called by all processes, written by the main one."""
    state_dict = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        output_dir, is_main_process=accelerator.is_main_process, state_dict=state_dict
    )
    if accelerator.is_main_process:
        # AutoTokenizer will load it by the general class, which must be told about BERT's token types.
        tokenizer.init_kwargs["model_input_names"] = list(tokenizer.model_input_names)
        tokenizer.save_pretrained(output_dir)
    accelerator.wait_for_everyone()
