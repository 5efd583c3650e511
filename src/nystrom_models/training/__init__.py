# SPDX-License-Identifier: Apache-2.0
"""The training core that the example scripts share."""

from .arguments import DataArguments, RunArguments, parse_arguments
from .checkpoints import CheckpointArguments, find_checkpoint, list_checkpoints
from .loop import TrainingState, create_accelerator, evaluate, num_training_steps, save_pretrained, train
from .objectives import ClassificationObjective, Objective, PretrainingObjective
from .optimization import OptimizationArguments, create_optimizer, create_scheduler

__all__ = [
    "CheckpointArguments",
    "ClassificationObjective",
    "DataArguments",
    "Objective",
    "OptimizationArguments",
    "PretrainingObjective",
    "RunArguments",
    "TrainingState",
    "create_accelerator",
    "create_optimizer",
    "create_scheduler",
    "evaluate",
    "find_checkpoint",
    "list_checkpoints",
    "num_training_steps",
    "parse_arguments",
    "save_pretrained",
    "train",
]
