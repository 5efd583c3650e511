# SPDX-License-Identifier: Apache-2.0
"""Corpora, tokenizers and examples to train on."""

from .classification import ClassificationCollator, TextTask, classification_dataset
from .docstrings import load_docstrings
from .files import load_files
from .glue import GLUE_TASKS, load_glue
from .loading import eval_dataloader, train_dataloader
from .pretraining import PretrainingCollator, pretraining_dataset
from .tokenization import TextBatches, train_tokenizer

__all__ = [
    "GLUE_TASKS",
    "ClassificationCollator",
    "PretrainingCollator",
    "TextBatches",
    "TextTask",
    "classification_dataset",
    "eval_dataloader",
    "load_docstrings",
    "load_files",
    "load_glue",
    "pretraining_dataset",
    "train_dataloader",
    "train_tokenizer",
]
