# SPDX-License-Identifier: Apache-2.0
"""The training core that the example scripts share."""

from .checkpoints import CheckpointArguments, find_checkpoint, list_checkpoints
from .loop import TrainingState, create_accelerator, evaluate, num_training_steps, save_pretrained, train
from .objectives import ClassificationObjective, Objective, PretrainingObjective
from .optimization import OptimizationArguments, create_optimizer, create_scheduler

__all__ = [
    "CheckpointArguments",
    "ClassificationObjective",
    "Objective",
    "OptimizationArguments",
    "PretrainingObjective",
    "TrainingState",
    "create_accelerator",
    "create_optimizer",
    "create_scheduler",
    "evaluate",
    "find_checkpoint",
    "list_checkpoints",
    "num_training_steps",
    "save_pretrained",
    "train",
]
