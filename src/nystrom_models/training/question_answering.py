# SPDX-License-Identifier: Apache-2.0
"""Extractive question answering."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForQuestionAnswering

from ..data.metrics.squad import best_threshold, squad_scores
from ..data.question_answering import (
    QuestionAnsweringCollator,
    QuestionTask,
    answers_of,
    is_answered,
    question_answering_dataset,
    require_answers,
    require_questions,
    usual_stride,
)
from .answer_spans import Answers, best_spans, collect_answers
from .finetuning import FinetuningArguments, FinetuningRun
from .objectives import Batch, Objective, QuestionAnsweringObjective
from .results import write_json


@dataclass(kw_only=True)
class QuestionAnsweringArguments(FinetuningArguments):
    """The flags of Transformers' run_qa.py."""

    not_in_a_grid: ClassVar[frozenset[str]] = FinetuningArguments.not_in_a_grid | {"version_2_with_negative"}

    version_2_with_negative: bool = field(default=False, metadata={"help": "Some questions have no answer."})
    max_seq_length: int | None = field(
        default=None,
        metadata={"help": "Largest number of tokens of question and context; the model's maximum by default."},
    )
    doc_stride: int | None = field(
        default=None,
        metadata={
            "help": "Tokens that neighbouring windows share, if a context is longer than a row; by default a third of "
            "--max_seq_length, and at most 128."
        },
    )
    n_best_size: int = field(
        default=20,
        metadata={
            "help": "Number of answers to each question in the n-best file. With --version_2_with_negative, no answer "
            "is one of them, or comes last in addition."
        },
    )
    max_answer_length: int = field(default=30, metadata={"help": "Largest number of tokens of an answer."})
    null_score_diff_threshold: float = field(
        default=0.0,
        metadata={
            "help": "With --version_2_with_negative: predict no answer where the null score exceeds the best answer's "
            "score by more than this."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("max_seq_length", "n_best_size", "max_answer_length"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, but is {value}.")
        if self.doc_stride is not None and self.doc_stride < 0:
            raise ValueError(f"--doc_stride must be at least 0, but is {self.doc_stride}.")

    def run_class(self) -> type[FinetuningRun]:
        """As `FinetuningArguments.run_class`."""
        return QuestionAnsweringRun

    def task(self) -> QuestionTask:
        """The task that the flags describe."""
        return QuestionTask(self.version_2_with_negative)


class QuestionAnsweringRun(FinetuningRun):
    """A run of a [`QuestionTask`]."""

    auto_class = AutoModelForQuestionAnswering
    length_flag = "max_seq_length"
    args: QuestionAnsweringArguments
    task: QuestionTask

    def check_columns(self, split: str, dataset: Dataset) -> None:
        """As `FinetuningRun.check_columns`."""
        require_questions(dataset, self.where[split])
        if self._has_answers(split, dataset):
            require_answers(dataset, self.task.version_2, self.where[split])

    def _has_answers(self, split: str, dataset: Dataset) -> bool:
        """Whether the answers of a split are known. A hidden test set has no such column, or only empty lists."""
        if not split.startswith("test"):
            return True
        return "answers" in dataset.column_names and any(map(is_answered, dataset["answers"]))

    def tokenized(self, split: str, dataset: Dataset) -> Dataset:
        """As `FinetuningRun.tokenized`."""
        has_answers = self._has_answers(split, dataset)
        length, stride = self._windows()
        return question_answering_dataset(
            dataset, self.tokenizer, length, has_answers, stride, **self.row_options(split)
        )

    def _windows(self) -> tuple[int, int]:
        """The largest number of tokens of a row, and those that neighbouring windows share."""
        length, stride = int(self.args.max_seq_length or 0), self.args.doc_stride
        return length, usual_stride(length) if stride is None else stride

    def notes(self, split: str, rows: Dataset) -> list[str]:
        """As `FinetuningRun.notes`."""
        examples, found = self.examples[split], []
        documents = torch.tensor(list(rows["document"]))
        windows = documents.bincount()
        if number := int((windows > 1).sum()):
            found.append(
                f"{number:,} of {len(examples):,} questions have a context that does not fit into "
                f"{self.args.max_seq_length} tokens; it is read in {int(windows[windows > 1].sum()):,} windows."
            )
        if "start_positions" in rows.column_names:
            answered = torch.tensor([bool(answers_of(answers)) for answers in examples["answers"]])
            starts, nulls = (torch.tensor(list(rows[name])) for name in ("start_positions", "null_position"))
            seen = torch.zeros(len(examples), dtype=torch.bool)
            seen[documents[starts != nulls]] = True
            if number := int((answered & ~seen).sum()):
                found.append(
                    f"{number:,} of {int(answered.sum()):,} answers are not complete in any of their windows: a "
                    "larger --doc_stride would help."
                )
        return found

    def _sample(self, split: str, dataset: Dataset) -> Dataset:
        """As `FinetuningRun._sample`. Questions without ids get the numbers of their rows: a sample has others."""
        if split != "train" and "id" not in dataset.column_names:
            dataset = dataset.add_column("id", range(len(dataset)))
        return super()._sample(split, dataset)

    def collator(self, with_index: bool = False) -> QuestionAnsweringCollator:
        """As `FinetuningRun.collator`."""
        return QuestionAnsweringCollator(self.tokenizer, with_index=with_index)

    def objective(self) -> Objective:
        """As `FinetuningRun.objective`."""
        return QuestionAnsweringObjective()

    def _outputs(self, outputs: Any, batch: Batch) -> dict[str, Tensor]:
        """The best spans of each row with their logits, the score of no answer, and the loss."""
        start, end = outputs.start_logits.float(), outputs.end_logits.float()
        first, last = best_spans(start, end, batch["context_mask"], self.args.n_best_size, self.args.max_answer_length)
        null = batch["null_position"][:, None]
        found = {
            "first": first,
            "last": last,
            "first_logits": start.gather(1, first.clamp(min=0)),
            "last_logits": end.gather(1, last.clamp(min=0)),
            "null": (start.gather(1, null) + end.gather(1, null))[:, 0],
        }
        if "start_positions" in batch:
            padding = batch["attention_mask"] == 0
            losses = [
                F.cross_entropy(logits.masked_fill(padding, float("-inf")), batch[name], reduction="none")
                for logits, name in ((start, "start_positions"), (end, "end_positions"))
            ]
            found["loss"] = (losses[0] + losses[1]) / 2
        return found

    def metrics(self) -> Iterable[str]:
        """As `FinetuningRun.metrics`."""
        return (*squad_scores([], [], self.task.version_2), *(("best_f1",) if self.task.version_2 else ()))

    def score(self, model: nn.Module, split: str, batch_size: int) -> tuple[Answers, dict[str, float]]:
        """The answers to the questions of a split and, if the right ones are known, loss and metrics."""
        args, examples = self.args, self.examples[split]
        found = self.predict(model, split, batch_size, self._outputs)
        rows = self.rows[split].select_columns(["document", "context_start", "char_starts", "char_ends"])
        threshold = args.null_score_diff_threshold if self.task.version_2 else None
        answers = collect_answers(examples["context"], rows, found, args.n_best_size, threshold)
        if "loss" not in found:
            return answers, {}
        right = [[text for text, _ in answers_of(value)] for value in examples["answers"]]
        scores = squad_scores(answers.texts, right, self.task.version_2)
        if self.task.version_2:
            scores["best_f1"], threshold = best_threshold(answers.best_texts, right, answers.differences)
            if scores["best_f1"] - scores["f1"] > 1e-9:  # not by rounding: their sums are in different orders
                self.accelerator.print(
                    f"F1 of {self.where[split]} is {scores['f1']:.4g}, and would be {scores['best_f1']:.4g} with "
                    f"--null_score_diff_threshold={threshold}."
                )
        if split.startswith("validation") and self.accelerator.is_main_process:
            # SQuAD's test set is hidden: validation answers are written, too. Each evaluation replaces the last files.
            self.write(split, answers)
        return answers, {"loss": float(torch.stack(found["loss"]).double().mean()), **scores}

    def write(self, split: str, predictions: Answers) -> None:
        """Writes JSON objects by the id of the question, or by the number of its row, from 0, if there are no ids:
        `{split}_predictions.json` with the text, as SQuAD's scripts read it, `{split}_nbest_predictions.json`, and
        with --version_2_with_negative `{split}_null_odds.json`."""
        names, folder = list(map(str, self.examples[split]["id"])), Path(self.args.output_dir)
        files: dict[str, list[Any]] = {"predictions": predictions.texts, "nbest_predictions": predictions.n_best}
        if self.task.version_2:
            # A context without text has no other answer, and JSON has no infinity.
            files["null_odds"] = [min(difference, sys.float_info.max) for difference in predictions.differences]
        for name, values in files.items():
            write_json(folder / f"{split}_{name}.json", dict(zip(names, values, strict=True)))

    def card(self) -> dict[str, Any]:
        """As `FinetuningRun.card`."""
        args = self.args
        threshold = args.null_score_diff_threshold if self.task.version_2 else None
        own = {"windows": self._windows(), "max_answer_length": args.max_answer_length, "null_threshold": threshold}
        return super().card() | own
