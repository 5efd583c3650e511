# SPDX-License-Identifier: Apache-2.0
"""Classification and regression of texts and pairs of texts."""

import csv
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from ..data.classification import (
    ClassificationCollator,
    TextTask,
    TruncationStrategy,
    class_labels,
    classification_dataset,
    has_decimals,
    has_integers,
    has_lists,
    require_column,
    require_kind_of_labels,
    require_labels,
)
from ..data.loading import eval_dataloader
from ..data.metrics import load_metric
from .finetuning import FinetuningArguments, FinetuningRun, class_names, in_own_order, unnamed_classes
from .objectives import ClassificationObjective, MultiLabelObjective, Objective, RegressionObjective
from .scores import predict


@dataclass(kw_only=True)
class TextColumnArguments:
    """The columns of texts and labels."""

    text_column_names: list[str] | None = field(
        default=None, metadata={"help": "Column of the text, or the two columns of a pair."}
    )
    label_column_name: str = field(default="label", metadata={"help": "Column of the label."})
    do_regression: bool = field(default=False, metadata={"help": "The label is a number, not a class."})

    def text_task(self) -> TextTask:
        """The task of data that are not a known benchmark."""
        metric, best = ("regression", "mse") if self.do_regression else ("classification", "accuracy")
        columns = tuple(self.text_column_names or ("text",))
        if len({*columns, self.label_column_name}) <= len(columns):
            raise ValueError(
                f"The columns of --text_column_names, {', '.join(columns)}, and of --label_column_name, "
                f"{self.label_column_name}, must all differ; if there are no labels, give the latter another name."
            )
        return TextTask(
            columns, self.label_column_name, regression=self.do_regression, metric=metric, best_metric=best
        )


@dataclass(kw_only=True)
class TextClassificationArguments(FinetuningArguments, TextColumnArguments):
    """The meaning of labels, and the part of a long text that is read."""

    not_in_a_grid: ClassVar[frozenset[str]] = FinetuningArguments.not_in_a_grid | frozenset(
        "text_column_names label_column_name do_regression label_delimiter multi_label".split()
    )

    label_delimiter: str = field(
        default=",", metadata={"help": "With --multi_label: separator of the labels, if they are given as one text."}
    )
    multi_label: bool = field(
        default=False, metadata={"help": "A row has any number of labels: a list, or a text with a separator."}
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Largest number of tokens of a row; the model's maximum by default."}
    )
    truncation_strategy: TruncationStrategy = field(
        default="head",
        metadata={
            "help": "Part of a text that is read if it is too long: its head, its tail, half of each, or all of it "
            "in windows, whose logits are averaged."
        },
    )
    doc_stride: int = field(
        default=0, metadata={"help": "With --truncation_strategy windows: tokens that neighbouring windows share."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"--max_length must be at least 1, but is {self.max_length}.")
        if not self.label_delimiter:
            raise ValueError("--label_delimiter must not be empty: it separates the labels of a text, such as ','.")
        if self.do_regression and self.multi_label:
            raise ValueError("A label is a number (--do_regression) or several classes (--multi_label), not both.")
        if self.doc_stride < 0:
            raise ValueError(f"--doc_stride must be at least 0, but is {self.doc_stride}.")
        if self.doc_stride and self.truncation_strategy != "windows":
            raise ValueError("--doc_stride is for windows only: give --truncation_strategy windows, too.")

    def run_class(self) -> type[FinetuningRun]:
        """As `FinetuningArguments.run_class`."""
        return TextClassificationRun

    def text_task(self) -> TextTask:
        """As `TextColumnArguments.text_task`; a row may have several labels."""
        task = super().text_task()
        if not self.multi_label:
            return task
        return replace(
            task, metric="multi_label", best_metric="micro_f1", multi_label=True, label_delimiter=self.label_delimiter
        )


def task_classes(task: TextTask, train_set: Dataset) -> tuple[dict[Any, int], list[str]]:
    """Ids by label, as labels occur in the data, and the names of the labels in the order of their ids.

    Raises:
        ValueError: if the training set has fewer than two classes, or floating-point numbers, or if white space alone
            tells two classes apart.
    """
    if task.label_names is not None:
        return _named(list(task.label_names))
    if has_decimals(train_set, task.label_column):
        remedy = "--do_regression predicts them"
        if task.multi_label:
            remedy = (
                "write the names or the numbers of a row's classes, such as [0, 2], not a 0.0 or 1.0 for each class"
            )
        raise ValueError(
            f"The column {task.label_column!r} of the train set holds decimal numbers: {remedy}. "
            "If they are names of classes, such as 1.10, write them as text in a .jsonl or .parquet file."
        )
    ids = class_labels(train_set, task.label_column, task.label_delimiter if task.multi_label else None)
    names = [str(label) for label in ids]
    _require_distinct(names, task.label_column)
    if len(names) < 2 and not task.multi_label:
        raise ValueError(f"The train set has only one label, {names}: there is nothing to learn.")
    if not names:
        raise ValueError("The train set has no label at all.")
    return ids, names


def _require_distinct(names: Sequence[str], column: str) -> None:
    seen: dict[str, str] = {}
    for name in names:
        bare = name.strip()
        if bare and seen.setdefault(bare, name) == name:
            continue
        fault = f"the labels {seen[bare]!r} and {name!r}" if bare else f"a label that is blank, {name!r}"
        raise ValueError(
            f"The column {column!r} of the train set has {fault}: without the white space around them, labels must "
            "differ, and must not be empty. Correct them."
        )


def _has_numbers(names: Sequence[str]) -> bool:
    """Whether names of classes are numbers. Numbers in the data are then names, not places."""
    return any(re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", name) for name in names)


def _named(names: list[str]) -> tuple[dict[Any, int], list[str]]:
    """Ids of named classes, by name and by number."""
    return {name: i for i, name in enumerate(names)} | {i: i for i in range(len(names))}, names


def ids_of_classes(names: list[str]) -> dict[Any, int]:
    """Ids of a finished model's classes by label: a name; or a number, which is a name if any name is one, else the
    class's place."""
    if not _has_numbers(names):
        return _named(names)[0]
    ids: dict[Any, int] = {name: i for i, name in enumerate(names)}
    if all(name.lstrip("-").isdecimal() for name in names):
        ids |= {int(name): i for i, name in enumerate(names)}
    return ids


def _has_labels(dataset: Dataset, task: TextTask, ids: Mapping[Any, int] | None) -> bool:
    """Whether a test set has labels. If benchmarks hide them, they are -1, which is none of the classes (`ids` by
    label), or lists without any, or there is no such column."""
    if task.label_column not in dataset.column_names:
        return False
    if has_lists(dataset, task.label_column):
        return any(map(bool, dataset[task.label_column]))
    hidden = {None} if ids is not None and {-1, "-1"} & set(ids) else {-1, None}
    return not set(dataset.unique(task.label_column)) <= hidden


def evaluate_predictions(task: TextTask, logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Loss and metrics of a task, from logits (rows, classes) and labels (rows,), or (rows, classes) if a row has
    several labels."""
    if task.regression:
        predictions = logits[:, 0]
        loss = F.mse_loss(predictions, labels)
    elif task.multi_label:
        predictions = (logits > 0).long()
        loss = F.binary_cross_entropy_with_logits(logits, labels.float())
        labels = labels.long()
    else:
        predictions = logits.argmax(-1)
        loss = F.cross_entropy(logits, labels)
    metric = load_metric(task.metric)
    return {"loss": float(loss), **metric.compute(predictions=predictions.numpy(), references=labels.numpy())}


def mean_by_document(logits: Tensor, documents: Tensor) -> Tensor:
    """The mean logits of each document's windows.

    Args:
        logits: (windows, classes), float.
        documents: (windows,), int64, the document of each window: numbers from 0, each at least once.

    Returns:
        (documents, classes).
    """
    number = int(documents[-1]) + 1
    sums = torch.zeros(number, logits.shape[1], dtype=logits.dtype).index_add(0, documents, logits)
    return sums / documents.bincount(minlength=number)[:, None]


def write_predictions(path: str | os.PathLike, task: TextTask, logits: Tensor, label_names: Sequence[str]) -> None:
    """Writes a line for each row: its number from 0, a tab, the prediction. This is GLUE's format for submission. The
    name of a class that has a tab, a line break or a quote stands in quotes.

    Args:
        path: the file.
        task: has the names of classes for prediction files. Predictions of STS-B are clipped to its scale, 0 to 5;
            several labels are separated by the task's delimiter.
        logits: (rows, classes), or (rows, 1) for regression.
        label_names: the classes, if the task does not name them.
    """
    names = task.prediction_names or label_names
    if task.regression:
        values = logits[:, 0].clamp(0, 5) if task.metric == "stsb" else logits[:, 0]
        # The fewest digits that give the same number again.
        predictions = [np.format_float_positional(value, trim="-") for value in values.float().numpy()]
    elif task.multi_label:
        chosen = (logits > 0).tolist()
        predictions = [
            task.label_delimiter.join(name for name, there in zip(names, row, strict=True) if there) for row in chosen
        ]
    else:
        predictions = [names[i] for i in logits.argmax(-1).tolist()]
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, "excel-tab", lineterminator="\n")
        writer.writerows([("index", "prediction"), *enumerate(predictions)])


# What a model predicts, as its configuration names it, and the flag for it.
_KINDS = {
    "regression": "--do_regression",
    "multi_label_classification": "--multi_label",
    "single_label_classification": None,
}


def check_kind(task: TextTask, problem_type: str | None, num_labels: int) -> None:
    """Raises a ValueError unless a finished model predicts what the task asks for."""
    several = "multi_label_classification"
    wanted = "regression" if task.regression else several if task.multi_label else "single_label_classification"
    if num_labels == 1 and several not in (wanted, problem_type):
        problem_type = "regression"  # as in Transformers, also if the configuration names nothing
    own = problem_type or ("single_label_classification" if task.regression else wanted)
    if own != wanted or (task.regression and num_labels != 1):
        changes = [f"leave out {_KINDS[wanted]}"] if _KINDS[wanted] else []
        changes += [f"give {_KINDS[own]}"] if _KINDS.get(own) and own != wanted else []
        raise ValueError(
            f"The model was fine-tuned for {own}, with {num_labels} label{'s' if num_labels > 1 else ''}, and cannot "
            f"be used for {wanted}: {' and '.join(changes)}, or give another --model_name_or_path."
        )


class TextClassificationRun(FinetuningRun):
    """A run of a [`TextTask`]."""

    auto_class = AutoModelForSequenceClassification
    length_flag = "max_length"
    args: TextClassificationArguments
    task: TextTask

    def check_columns(self, split: str, dataset: Dataset) -> None:
        """As `FinetuningRun.check_columns`."""
        # The columns of a benchmark have no flags.
        own = self.task == self.args.text_task()
        for column in self.task.text_columns:
            require_column(dataset, column, self.where[split], flag="--text_column_names" if own else None)
        if not split.startswith("test"):
            flag = "--label_column_name" if own else None
            require_labels(dataset, self.task.label_column, self.task.multi_label, self.where[split], flag)
        elif self.task.label_column in dataset.column_names:  # hidden labels may be missing
            require_kind_of_labels(dataset, self.task.label_column, self.task.multi_label, self.where[split])

    def prepare_tokenizer(self) -> None:
        """Lets it read and cut texts as in training, for pipelines."""
        side = "left" if self.args.truncation_strategy == "tail" else "right"
        if self.tokenizer.truncation_side != side:
            self.tokenizer.truncation_side = self.tokenizer.init_kwargs["truncation_side"] = side
        if self.task.split_special_tokens:
            self.tokenizer.split_special_tokens = self.tokenizer.init_kwargs["split_special_tokens"] = True

    def set_classes(self, splits: Mapping[str, Dataset]) -> None:
        """As `FinetuningRun.set_classes`."""
        if self.accelerator.is_main_process:
            load_metric(self.task.metric)  # now, because its cache may not be writable
        self.order: list[int] | None = None  # for each class of the task, that of the model, if they differ
        self.ids, self.label_names = self._head(splits["train"]) if self.args.do_train else self._own_head()
        if self.task.multi_label and any(split.startswith("test") for split in splits):
            delimiter = self.args.label_delimiter
            if torn := [name for name in self.label_names if delimiter in name]:
                raise ValueError(
                    f"The class {torn[0]!r} contains {delimiter!r}, which separates the classes of a row in the file "
                    "of predictions: give another --label_delimiter, such as '|'."
                )
        self.labelled = {
            split
            for split in splits
            if not split.startswith("test") or _has_labels(splits[split], self.task, self.ids)
        }

    def _head(self, train_set: Dataset) -> tuple[dict[Any, int] | None, list[str]]:
        """The model's ids by label, and the names of the logits that `score` returns. The configuration gets the
        model's classes."""
        task, config = self.task, self.config
        if task.regression:
            config.num_labels, config.problem_type = 1, "regression"
            return None, []
        ids, names = task_classes(task, train_set)
        own = self.own_order(names)
        config.id2label = dict(enumerate(own))
        config.label2id = {name: i for i, name in enumerate(own)}
        config.problem_type = "multi_label_classification" if task.multi_label else "single_label_classification"
        return self._ordered(ids, names, own)

    def _ordered(
        self, ids: Mapping[Any, int], names: list[str], own: list[str]
    ) -> tuple[dict[Any, int] | None, list[str]]:
        """The same, for ids in the order of `names` and a model whose classes are in the order `own`. The classes of a
        task that names them stay in its order for metrics and predictions."""
        ids = {label: own.index(names[i]) for label, i in ids.items()}
        if self.task.label_names is None:
            return ids, own
        if own != names:
            self.order = [own.index(name) for name in names]
        return ids, names

    def _own_head(self) -> tuple[dict[Any, int] | None, list[str]]:
        """The same for a finished model. Its classes may be in another order than the task's."""
        names = class_names(self.config)
        check_kind(self.task, self.config.problem_type, len(names))
        if self.task.regression:
            return None, []
        if self.task.label_names is None:
            return ids_of_classes(names), names
        wanted = list(self.task.label_names)
        own = in_own_order(self.config, wanted)
        if names not in (own, unnamed_classes(len(wanted))):
            raise ValueError(f"The model has the classes {names}, but the task has {wanted}.")
        return self._ordered(*_named(wanted), own)

    def tokenized(self, split: str, dataset: Dataset) -> Dataset:
        """As `FinetuningRun.tokenized`."""
        args, task = self.args, self.task
        return classification_dataset(
            dataset,
            self.tokenizer,
            int(args.max_length or 0),
            task.text_columns,
            task.label_column if split in self.labelled else None,
            self.ids,
            task.regression,
            args.truncation_strategy,
            task.label_delimiter if task.multi_label else None,
            doc_stride=args.doc_stride,
            apart=getattr(self.config, "dual_encoder", False),
            **self.row_options(split),
        )

    def notes(self, split: str, rows: Dataset) -> list[str]:
        """As `FinetuningRun.notes`."""
        return self._numbers_for_names(split) + self._lengths(split, rows)

    def _numbers_for_names(self, split: str) -> list[str]:
        """Says which classes of a finished model labels without names are."""
        task, names = self.task, self.label_names
        if self.args.do_train or task.regression or task.label_names is not None or split not in self.labelled:
            return []
        if _has_numbers(names) or names == unnamed_classes(len(names)):
            return []
        if not has_integers(self.examples[split], task.label_column):
            return []
        first = ", ".join(f"{i} is {name!r}" for i, name in enumerate(names[:3]))
        return [f"labels that are numbers count the model's classes from 0: {first}{', …' if len(names) > 3 else '.'}"]

    def _lengths(self, split: str, rows: Dataset) -> list[str]:
        """Says which part of long documents is read."""
        number, strategy = len(self.examples[split]), self.args.truncation_strategy
        documents, truncated = (torch.tensor(list(rows[name])) for name in ("document", "truncated"))
        cut = len(documents[truncated].unique())
        if not cut:
            return []
        longer = f"{cut:,} of {number:,} documents are longer than {self.args.max_length} tokens"
        if strategy == "windows":
            return [f"{longer}; all of them make {len(rows):,} windows, {len(rows) / number:.1f} per document."]
        kept = {"head": "only their head is read", "tail": "only their tail is read"}
        return [f"{longer}: {kept.get(strategy, 'only their head and their tail are read')}."]

    def collator(self, with_index: bool = False) -> ClassificationCollator:
        """As `FinetuningRun.collator`."""
        return ClassificationCollator(self.tokenizer, with_index=with_index)

    def objective(self) -> Objective:
        """As `FinetuningRun.objective`."""
        if self.task.regression:
            return RegressionObjective()
        return MultiLabelObjective() if self.task.multi_label else ClassificationObjective()

    def metrics(self) -> Iterable[str]:
        """As `FinetuningRun.metrics`."""
        from ..data.metrics.text_classification import metric_names  # slow, with evaluate, SciPy and scikit-learn

        return metric_names(self.task.metric)

    def score(self, model: nn.Module, split: str, batch_size: int) -> tuple[Tensor, dict[str, float]]:
        """The logits of a split's documents and, if labels are known, loss and metrics."""
        rows = self.rows[split]
        loader = eval_dataloader(rows, self.collator(with_index=True), batch_size, **self.args.loader_options())
        logits = predict(self.accelerator, model, loader, desc=f"Predicting {self.where[split]}")
        documents = torch.tensor(list(rows["document"]))
        logits = mean_by_document(logits, documents)
        if self.order is not None:
            logits = logits[:, self.order]
        if split not in self.labelled:
            return logits, {}
        # All windows of a document have its label.
        first = torch.cat([torch.ones(1, dtype=torch.bool), documents[1:] != documents[:-1]])
        labels = torch.tensor(list(rows["labels"]))[first]
        if self.order is not None:
            labels = torch.tensor(self.order).argsort()[labels]
        with self.accelerator.main_process_first():
            return logits, evaluate_predictions(self.task, logits, labels)

    def write(self, split: str, predictions: Tensor) -> None:
        """As `FinetuningRun.write`."""
        name = self.task.prediction_files.get(split, f"{split}_predictions.tsv")
        write_predictions(Path(self.args.output_dir, name), self.task, predictions, self.label_names)

    def card(self) -> dict[str, Any]:
        """As `FinetuningRun.card`."""
        strategy, length = self.args.truncation_strategy, self.args.max_length
        own: dict[str, Any] = {}
        if strategy == "windows" and len(self.task.text_columns) == 1:
            own["windows"] = (length, self.args.doc_stride)
        elif strategy == "tail":
            own["limits"] = [
                f"Of texts of more than {length} tokens, it was trained on the last ones, and its tokenizer cuts the "
                'beginning: `truncation_side="left"`.'
            ]
        elif strategy == "head_tail":
            own["limits"] = [
                f"Of texts of more than {length} tokens, it was trained on the first and the last ones, half of each; "
                "a tokenizer can only cut one end: leave out the middle of a longer text before."
            ]
        return super().card() | own

    def example(self) -> tuple[str, str] | str | None:
        """As `FinetuningRun.example`."""
        if len(self.task.text_columns) > 1:
            return "Replace this text by your own.", "And this one, too."
        return self.task.example
