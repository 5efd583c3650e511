# SPDX-License-Identifier: Apache-2.0
"""Corpora, tokenizers and examples to train on."""

from .causal import CausalCollator, causal_dataset, causal_stream, causal_tokenizer
from .classification import ClassificationCollator, TextTask, classification_dataset
from .docstrings import load_docstrings
from .files import load_files
from .glue import GLUE_TASKS, load_glue
from .loading import RowLoader, Step, TrainingLoader, eval_dataloader
from .masking import PretrainingCollator
from .pretraining import pretraining_dataset
from .streams import StreamLoader, pretraining_stream
from .tokenization import TextBatches, train_byte_level_tokenizer, train_tokenizer

__all__ = [
    "GLUE_TASKS",
    "CausalCollator",
    "ClassificationCollator",
    "PretrainingCollator",
    "RowLoader",
    "Step",
    "StreamLoader",
    "TextBatches",
    "TextTask",
    "TrainingLoader",
    "causal_dataset",
    "causal_stream",
    "causal_tokenizer",
    "classification_dataset",
    "eval_dataloader",
    "load_docstrings",
    "load_files",
    "load_glue",
    "pretraining_dataset",
    "pretraining_stream",
    "train_byte_level_tokenizer",
    "train_tokenizer",
]
