# SPDX-License-Identifier: Apache-2.0
"""The training core that the example scripts share."""

from .arguments import DataArguments, RunArguments, parse_arguments
from .checkpoints import CheckpointArguments, find_checkpoint, list_checkpoints
from .distillation import TeacherArguments, with_teacher
from .launch import create_accelerator
from .loop import Evaluation, num_training_steps, train
from .objectives import (
    CausalObjective,
    ClassificationObjective,
    MultiLabelObjective,
    Objective,
    PretrainingObjective,
    QuestionAnsweringObjective,
    RegressionObjective,
)
from .optimization import OptimizationArguments, create_optimizer, create_scheduler
from .saving import save_pretrained
from .scores import evaluate, predict, predict_rows
from .selection import Goal
from .sharding import remove_second_names
from .state import TrainingState
from .teacher import Teacher

__all__ = [
    "CausalObjective",
    "CheckpointArguments",
    "ClassificationObjective",
    "DataArguments",
    "Evaluation",
    "Goal",
    "MultiLabelObjective",
    "Objective",
    "OptimizationArguments",
    "PretrainingObjective",
    "QuestionAnsweringObjective",
    "RegressionObjective",
    "RunArguments",
    "Teacher",
    "TeacherArguments",
    "TrainingState",
    "create_accelerator",
    "create_optimizer",
    "create_scheduler",
    "evaluate",
    "find_checkpoint",
    "list_checkpoints",
    "num_training_steps",
    "parse_arguments",
    "predict",
    "predict_rows",
    "remove_second_names",
    "save_pretrained",
    "train",
    "with_teacher",
]
