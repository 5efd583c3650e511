# SPDX-License-Identifier: Apache-2.0
"""Corpora, tokenizers and examples to train on."""

from .causal import CausalCollator, causal_dataset, causal_stream, causal_tokenizer
from .classification import ClassificationCollator, TextTask, classification_dataset
from .conll_files import load_conll_files
from .docstrings import load_docstrings
from .files import load_files
from .glue import GLUE_TASKS, load_glue
from .loading import RowLoader, Step, TrainingLoader, eval_dataloader
from .masking import PretrainingCollator
from .pretraining import pretraining_dataset
from .question_answering import QuestionAnsweringCollator, QuestionTask, question_answering_dataset
from .squad_files import load_squad_files
from .streams import StreamLoader, pretraining_stream
from .token_classification import TokenClassificationCollator, TokenTask, token_classification_dataset
from .tokenization import TextBatches, train_byte_level_tokenizer, train_character_tokenizer, train_tokenizer

__all__ = [
    "GLUE_TASKS",
    "CausalCollator",
    "ClassificationCollator",
    "PretrainingCollator",
    "QuestionAnsweringCollator",
    "QuestionTask",
    "RowLoader",
    "Step",
    "StreamLoader",
    "TextBatches",
    "TextTask",
    "TokenClassificationCollator",
    "TokenTask",
    "TrainingLoader",
    "causal_dataset",
    "causal_stream",
    "causal_tokenizer",
    "classification_dataset",
    "eval_dataloader",
    "load_conll_files",
    "load_docstrings",
    "load_files",
    "load_glue",
    "load_squad_files",
    "pretraining_dataset",
    "pretraining_stream",
    "question_answering_dataset",
    "token_classification_dataset",
    "train_byte_level_tokenizer",
    "train_character_tokenizer",
    "train_tokenizer",
]
