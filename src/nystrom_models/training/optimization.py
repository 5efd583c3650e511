# SPDX-License-Identifier: Apache-2.0
"""The optimizer and learning-rate schedule of BERT-style training."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import SchedulerType, get_scheduler

from .muon import MuonAndAdamW, layer_matrices
from .objectives import Preparation

# These schedules depend on measured values, not on the step.
_UNSUPPORTED = {"reduce_lr_on_plateau", "greedy"}
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = tuple(kind.value for kind in SchedulerType if kind.value not in _UNSUPPORTED)


@dataclass
class OptimizationArguments:
    """Batch sizes, optimizer, schedule and length of a run, with the names of Transformers' example scripts."""

    per_device_train_batch_size: int = field(default=32, metadata={"help": "Rows of one micro-batch on a device."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Rows of one evaluation batch."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Micro-batches of one optimizer step."})
    tokens_per_step: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of one optimizer step over all devices, instead of a number of rows. The step takes as "
            "many micro-batches of up to --per_device_train_batch_size rows as it needs."
        },
    )
    group_by_length: bool = field(
        default=False,
        metadata={"help": "With --tokens_per_step: steps consist of rows of similar length, which saves padding."},
    )
    optim: str = field(
        default="adamw",
        metadata={
            "help": "adamw, or muon: Muon for the matrices of the layers and AdamW for all other parameters, with the "
            "same learning rate. With muon, small models need fewer tokens."
        },
    )
    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate."})
    weight_decay: float = field(default=0.01, metadata={"help": "Weight decay; biases and layer norms get none."})
    adam_beta1: float = field(default=0.9, metadata={"help": "First-moment decay of AdamW."})
    adam_beta2: float = field(default=0.999, metadata={"help": "Second-moment decay of AdamW."})
    adam_epsilon: float = field(default=1e-6, metadata={"help": "Epsilon of AdamW."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are clipped to this norm."})
    max_skipped_steps: int = field(
        default=0,
        metadata={"help": "Skip up to this many steps whose loss or gradient is not finite; one more is an error."},
    )
    num_train_epochs: float = field(default=3.0, metadata={"help": "Passes over the data."})
    max_train_steps: int | None = field(
        default=None, metadata={"help": "Number of optimizer steps; overrides --num_train_epochs."}
    )
    lr_scheduler_type: str = field(
        default="linear", metadata={"help": f"Learning-rate schedule: {', '.join(SCHEDULES)}."}
    )
    lr_scheduler_kwargs: str | None = field(
        default=None, metadata={"help": 'Arguments of the schedule as JSON, such as {"num_decay_steps": 1000}.'}
    )
    warmup_ratio: float = field(default=0.1, metadata={"help": "Share of the steps that are warm-up."})
    num_warmup_steps: int | None = field(
        default=None, metadata={"help": "Number of warm-up steps; overrides --warmup_ratio."}
    )

    def __post_init__(self):
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, but is {getattr(self, name)}.")
        for name in ("max_train_steps", "tokens_per_step"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, but is {value}.")
        if self.tokens_per_step is not None and self.gradient_accumulation_steps > 1:
            raise ValueError(
                "--tokens_per_step sets the number of micro-batches of a step: omit --gradient_accumulation_steps."
            )
        if self.group_by_length and self.tokens_per_step is None:
            raise ValueError(
                "With --group_by_length alone, steps differ in size: give their size with --tokens_per_step."
            )
        if self.max_skipped_steps < 0:
            raise ValueError(f"--max_skipped_steps must be at least 0, but is {self.max_skipped_steps}.")
        if self.optim not in OPTIMIZERS:
            raise ValueError(f"--optim must be one of {', '.join(OPTIMIZERS)}, but is {self.optim}.")
        if self.lr_scheduler_type not in SCHEDULES:
            raise ValueError(
                f"--lr_scheduler_type must be one of {', '.join(SCHEDULES)}, but is {self.lr_scheduler_type}."
            )
        if self.num_warmup_steps is not None and self.num_warmup_steps < 0:
            raise ValueError(f"--num_warmup_steps must be at least 0, but is {self.num_warmup_steps}.")
        if not 0 <= self.warmup_ratio <= 1:
            raise ValueError(f"--warmup_ratio must lie between 0 and 1, but is {self.warmup_ratio}.")
        for name in ("learning_rate", "max_grad_norm", "num_train_epochs"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name} must be positive, but is {getattr(self, name)}.")
        for name in ("weight_decay", "adam_epsilon"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"--{name} must be at least 0, but is {getattr(self, name)}.")
        for name in ("learning_rate", "num_train_epochs", "adam_epsilon", "weight_decay"):
            if math.isinf(getattr(self, name)):
                raise ValueError(f"--{name} must be finite, but is {getattr(self, name)}.")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 0 and less than 1, but is {getattr(self, name)}.")
        _schedule(torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=self.learning_rate), self, 1, 10)

    def schedule_options(self) -> dict[str, Any]:
        """`--lr_scheduler_kwargs` as a dictionary."""
        try:
            options = json.loads(self.lr_scheduler_kwargs or "{}")
        except ValueError as error:
            raise ValueError(f"--lr_scheduler_kwargs {self.lr_scheduler_kwargs!r} is not JSON: {error}.") from error
        if not isinstance(options, dict):
            raise ValueError(f"--lr_scheduler_kwargs must be a JSON object, but is {self.lr_scheduler_kwargs!r}.")
        return options


def create_optimizer(model: nn.Module, args: OptimizationArguments) -> torch.optim.Optimizer:
    """AdamW, or Muon and AdamW. Only matrices get weight decay; biases, layer norms and other vectors get none.

    Raises:
        ValueError: if the model has no matrices for Muon.
    """
    matrices = layer_matrices(model) if args.optim == "muon" else []
    if args.optim == "muon" and not matrices:
        raise ValueError(
            f"--optim muon trains the matrices of layers, but {type(model).__name__} has none: use adamw."
        )
    taken = set(map(id, matrices))
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad and id(parameter) not in taken:
            (decay if parameter.ndim > 1 else no_decay).append(parameter)
    groups = [{"params": decay, "weight_decay": args.weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    options: dict[str, Any] = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon, "fused": True}
    if args.optim == "muon":
        return MuonAndAdamW(matrices, groups, args.learning_rate, args.weight_decay, options)
    return torch.optim.AdamW(groups, lr=args.learning_rate, **options)


def _schedule(
    optimizer: torch.optim.Optimizer, args: OptimizationArguments, warmup: int, num_training_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """The schedule of `lr_scheduler_type`. Raises a ValueError if it does not take the `lr_scheduler_kwargs`."""
    options = args.schedule_options()
    try:
        if args.lr_scheduler_type.startswith("constant") and options:
            raise ValueError("it has none")  # Transformers would ignore them
        if args.lr_scheduler_type == "warmup_stable_decay" and "num_decay_steps" not in options:
            stable = options.get("num_stable_steps")
            rest = num_training_steps // 10 if stable is None else num_training_steps - warmup - stable
            options["num_decay_steps"] = max(0, rest)
        scheduler = get_scheduler(args.lr_scheduler_type, optimizer, warmup, num_training_steps, options)
        for step in (0, warmup, num_training_steps - 1):
            scheduler.lr_lambdas[0](step)  # otherwise, a text for a number would end the run after the warm-up
        return scheduler
    except (KeyError, TypeError, ValueError) as error:
        problem = (
            f"does not take --lr_scheduler_kwargs {args.lr_scheduler_kwargs}"
            if options
            else "needs --lr_scheduler_kwargs"
        )
        raise ValueError(f"--lr_scheduler_type {args.lr_scheduler_type} {problem}: {error}") from error


def _after(schedule: Callable[[int], float], before: int, factor: float, step: int) -> float:
    """A schedule that begins at the step `before`; up to then, the rate is multiplied by `factor`."""
    return factor if step < before else schedule(step - before)


def create_scheduler(
    optimizer: torch.optim.Optimizer,
    args: OptimizationArguments,
    num_training_steps: int,
    preparation: Preparation | None = None,
) -> torch.optim.lr_scheduler.LambdaLR:
    """A schedule of `transformers.get_scheduler`: warm-up over `num_warmup_steps` (or `warmup_ratio` of all steps),
    then the schedule of `lr_scheduler_type`. After a `preparation`, the schedule covers the remaining steps.

    Raises:
        ValueError: if `num_decay_steps` are more than the steps after the warm-up.
    """
    before = 0 if preparation is None else preparation.steps
    num_training_steps -= before
    warmup = args.num_warmup_steps
    if warmup is None:
        warmup = round(args.warmup_ratio * num_training_steps)
    options = args.schedule_options()
    if args.lr_scheduler_type == "warmup_stable_decay" and "num_stable_steps" not in options:
        decay, most = options.get("num_decay_steps", 0), max(0, num_training_steps - warmup)
        if decay > most:  # the rate would fall at once, from the peak to almost nothing
            raise ValueError(
                f"--lr_scheduler_kwargs has num_decay_steps {decay:,}, but after the warm-up {most:,} steps are left: "
                f"give {most:,} or fewer, or more --max_train_steps."
            )
    scheduler = _schedule(optimizer, args, warmup, num_training_steps)
    if preparation is not None:
        factor = preparation.learning_rate / args.learning_rate
        scheduler.lr_lambdas = [partial(_after, after, before, factor) for after in scheduler.lr_lambdas]
        set_schedule_step(scheduler, 0)
    return scheduler


def set_schedule_step(scheduler: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Sets the learning rates to those of a step, also after a checkpoint has set other rates."""
    # With a step count of 1, PyTorch would warn that the schedule steps before the optimizer.
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": step - 1, "_step_count": max(step, 2)})
    scheduler.step()
