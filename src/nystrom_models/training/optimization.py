# SPDX-License-Identifier: Apache-2.0
"""The optimizer and learning-rate schedule of BERT-style training."""

from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import get_linear_schedule_with_warmup


@dataclass
class OptimizationArguments:
    """How a model is trained, under the names of Transformers' example scripts."""

    per_device_train_batch_size: int = field(default=32, metadata={"help": "Rows of one micro-batch on a device."})
    per_device_eval_batch_size: int = field(default=64, metadata={"help": "Rows of one evaluation batch."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Micro-batches of one optimizer step."})
    learning_rate: float = field(default=1e-4, metadata={"help": "Peak learning rate."})
    weight_decay: float = field(default=0.01, metadata={"help": "Of AdamW; none on biases and layer norms."})
    adam_beta1: float = field(default=0.9, metadata={"help": "First-moment decay of AdamW."})
    adam_beta2: float = field(default=0.999, metadata={"help": "Second-moment decay of AdamW."})
    adam_epsilon: float = field(default=1e-6, metadata={"help": "Epsilon of AdamW."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are clipped to this norm."})
    num_train_epochs: float = field(default=3.0, metadata={"help": "Passes over the data."})
    max_train_steps: int | None = field(
        default=None, metadata={"help": "Optimizer steps; takes the place of --num_train_epochs."}
    )
    warmup_ratio: float = field(default=0.1, metadata={"help": "Share of the steps with rising learning rate."})
    num_warmup_steps: int | None = field(
        default=None, metadata={"help": "Steps with rising learning rate; takes the place of --warmup_ratio."}
    )

    def __post_init__(self):
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, but is {getattr(self, name)}.")
        if self.max_train_steps is not None and self.max_train_steps < 1:
            raise ValueError(f"--max_train_steps must be at least 1, but is {self.max_train_steps}.")
        if self.num_train_epochs <= 0:
            raise ValueError(f"--num_train_epochs must be positive, but is {self.num_train_epochs}.")
        if self.num_warmup_steps is not None and self.num_warmup_steps < 0:
            raise ValueError(f"--num_warmup_steps must be at least 0, but is {self.num_warmup_steps}.")
        if not 0 <= self.warmup_ratio <= 1:
            raise ValueError(f"--warmup_ratio must lie between 0 and 1, but is {self.warmup_ratio}.")
        for name in ("learning_rate", "max_grad_norm"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name} must be positive, but is {getattr(self, name)}.")


def create_optimizer(model: nn.Module, args: OptimizationArguments) -> torch.optim.AdamW:
    """AdamW with decay on matrices alone: biases, layer norms and other vectors get none."""
    decay: list[nn.Parameter] = []
    no_decay: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (decay if parameter.ndim > 1 else no_decay).append(parameter)
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": args.weight_decay}, {"params": no_decay, "weight_decay": 0.0}],
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        eps=args.adam_epsilon,
        fused=True,
    )


def create_scheduler(
    optimizer: torch.optim.Optimizer, args: OptimizationArguments, num_training_steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up over `num_warmup_steps`, or `warmup_ratio` of the steps, then linear decay to zero."""
    warmup = args.num_warmup_steps
    if warmup is None:
        warmup = round(args.warmup_ratio * num_training_steps)
    return get_linear_schedule_with_warmup(optimizer, warmup, num_training_steps)
