# SPDX-License-Identifier: Apache-2.0
"""Token classification, such as named entities."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from datasets import Dataset
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification

from ..data.metrics.entities import entity_scores, without_scheme
from ..data.token_classification import (
    TokenClassificationCollator,
    TokenTask,
    put_spaces_before_words,
    reads_spaces,
    require_tags,
    require_words,
    tag_names,
    tag_values,
    token_classification_dataset,
)
from ..models.losses import IGNORED
from .finetuning import FinetuningArguments, FinetuningRun, class_names
from .objectives import Batch, ClassificationObjective, Objective

# Outside of all entities.
OUTSIDE = "O"


@dataclass(kw_only=True)
class TokenClassificationArguments(FinetuningArguments):
    """The flags of Transformers' run_ner.py."""

    not_in_a_grid: ClassVar[frozenset[str]] = FinetuningArguments.not_in_a_grid | frozenset(
        "task_name text_column_name label_column_name label_names label_all_tokens".split()
    )

    task_name: str = field(default="ner", metadata={"help": "Name of the task: ner, pos, ..."})
    text_column_name: str = field(default="tokens", metadata={"help": "Column of the words, a list in each row."})
    label_column_name: str | None = field(
        default=None, metadata={"help": "Column of the labels, a list in each row; by default TASK_NAME_tags."}
    )
    label_names: list[str] | None = field(
        default=None,
        metadata={"help": "Names of the labels in the order of their numbers, if the data have none."},
    )
    max_seq_length: int | None = field(
        default=None, metadata={"help": "Largest number of tokens of a row; the model's maximum by default."}
    )
    doc_stride: int = field(
        default=0,
        metadata={"help": "Tokens that neighbouring rows of one text share, if it is longer than a row."},
    )
    label_all_tokens: bool = field(
        default=False, metadata={"help": "Give all tokens of a word its label, instead of only the first one."}
    )
    return_entity_level_metrics: bool = field(
        default=False, metadata={"help": "Also give precision, recall and F1 of each type of entity."}
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_seq_length is not None and self.max_seq_length < 1:
            raise ValueError(f"--max_seq_length must be at least 1, but is {self.max_seq_length}.")
        if self.label_names is not None and len(set(self.label_names)) != len(self.label_names):
            raise ValueError(f"--label_names must all differ, but are {self.label_names}.")

    def run_class(self) -> type[FinetuningRun]:
        """As `FinetuningArguments.run_class`."""
        return TokenClassificationRun

    def task(self) -> TokenTask:
        """The task that the flags describe."""
        return TokenTask(
            self.text_column_name,
            self.label_column_name or f"{self.task_name}_tags",
            None if self.label_names is None else tuple(self.label_names),
            self.label_all_tokens,
            "accuracy" if self.task_name == "pos" else "f1",
        )


def _outputs(outputs: Any, batch: Batch) -> dict[str, Tensor]:
    """The most probable label of every token, and the sum and the number of the losses of each row."""
    logits = outputs.logits.float()
    found = {"labels": logits.argmax(-1)}
    if "labels" in batch:
        losses = F.cross_entropy(logits.transpose(1, 2), batch["labels"], reduction="none", ignore_index=IGNORED)
        found |= {"loss": losses.sum(1), "count": (batch["labels"] != IGNORED).sum(1)}
    return found


class TokenClassificationRun(FinetuningRun):
    """A run of a [`TokenTask`]."""

    auto_class = AutoModelForTokenClassification
    length_flag = "max_seq_length"
    args: TokenClassificationArguments
    task: TokenTask

    def check_columns(self, split: str, dataset: Dataset) -> None:
        """As `FinetuningRun.check_columns`."""
        text_column, label_column, where = self.task.text_column, self.task.label_column, self.where[split]
        require_words(dataset, text_column, where, "--text_column_name")
        if not split.startswith("test") or label_column in dataset.column_names:
            require_tags(dataset, text_column, label_column, where, "--label_column_name")

    def prepare_tokenizer(self) -> None:
        """Lets it read words as in texts; a finished model goes on with the tokens that it was trained on."""
        if self.args.do_train:
            put_spaces_before_words(self.tokenizer)

    def set_classes(self, splits: Mapping[str, Dataset]) -> None:
        """As `FinetuningRun.set_classes`."""
        self.labelled = [split for split in splits if self.task.label_column in splits[split].column_names]
        if self.args.do_train:
            self.names = self._names(splits)
            self.config.id2label = dict(enumerate(self.names))
            self.config.label2id = {name: i for i, name in enumerate(self.names)}
        else:
            self.names = class_names(self.config)
        other = without_scheme(self.names)
        if other and self.labelled and self.args.task_name != "pos":
            self.accelerator.print(
                f"Precision, recall and F1 are not meaningful: the labels {', '.join(other[:5])}"
                f"{', ...' if len(other) > 5 else ''} are neither O nor B-x, I-x, E-x or S-x, by which entities are "
                "found. Write the labels so; or, if they are no entities, give --task_name pos, "
                f"--label_column_name {self.task.label_column} and --metric_for_best_model accuracy."
            )

    def _names(self, splits: Mapping[str, Dataset]) -> list[str]:
        """The labels in the order of their ids: those that the flags name, or those of the data."""
        if self.task.label_names is not None:
            names = list(self.task.label_names)
        else:
            found = {
                split: tag_names(splits[split], self.task.label_column, self.where[split]) for split in self.labelled
            }
            names = found["train"]
            for split, own in found.items():
                # These labels get their own classes, so that words with them count as errors.
                if new := [name for name in own if name not in names]:
                    self.accelerator.print(
                        f"Labels of {self.where[split]} that are not in the train set, and cannot be learned: "
                        f"{', '.join(new)}."
                    )
                    names = [*names, *new]
        if len(names) < 2:
            raise ValueError(f"The train set has only one label, {names}: there is nothing to learn.")
        return self.own_order(names)

    def tokenized(self, split: str, dataset: Dataset) -> Dataset:
        """As `FinetuningRun.tokenized`."""
        args = self.args
        return token_classification_dataset(
            dataset,
            self.tokenizer,
            int(args.max_seq_length or 0),
            self.task,
            self.names if split in self.labelled else None,
            args.doc_stride,
            **self.row_options(split),
        )

    def notes(self, split: str, rows: Dataset) -> list[str]:
        """As `FinetuningRun.notes`."""
        examples, longest = self.examples[split], self.args.max_seq_length
        parts = torch.tensor(list(rows["document"]), dtype=torch.int64).bincount()
        found = []
        if number := int((parts > 1).sum()):
            found.append(
                f"{number:,} of {len(examples):,} texts are longer than {longest} tokens, and were divided between "
                f"words into {int(parts[parts > 1].sum()):,} rows."
            )
        if number := sum(rows["shortened"]):
            found.append(f"{number:,} words are longer than a row: only their first tokens are read.")
        there = sum(map(len, examples[self.task.text_column]))
        if number := there - sum(word >= 0 for row in rows["words"] for word in row):
            found.append(f"{number:,} of {there:,} words get no token from this tokenizer: {OUTSIDE} is predicted.")
        # A text whose words are single characters, such as a gene's, usually has no spaces.
        words = (word for row in examples[self.task.text_column] for word in row if len(word) > 1 and word.isalnum())
        if split == "train" and (word := next(words, None)) and reads_spaces(self.tokenizer, word):
            found.append(
                "This tokenizer has other tokens for a text with spaces than for its words, which it learns from. "
                "Give the finished model lists of words, as its model card shows; or train on "
                f"lists in which the spaces are words, too, labelled {OUTSIDE}."
            )
        return found

    def collator(self, with_index: bool = False) -> TokenClassificationCollator:
        """As `FinetuningRun.collator`."""
        return TokenClassificationCollator(self.tokenizer, with_index)

    def objective(self) -> Objective:
        """As `FinetuningRun.objective`."""
        return ClassificationObjective()

    def _entity_scores(self, references: Sequence[Sequence[str]], tags: Sequence[Sequence[str]]) -> dict[str, float]:
        kinds = sorted({name[2:] for name in self.names if name[1:2] == "-"})
        return entity_scores(references, tags, kinds if self.args.return_entity_level_metrics else ())

    def metrics(self) -> Iterable[str]:
        """As `FinetuningRun.metrics`."""
        return self._entity_scores([], [])

    def score(self, model: nn.Module, split: str, batch_size: int) -> tuple[list[list[str]], dict[str, float]]:
        """The label of every word of a split and, if labels are known, loss and metrics."""
        found = self.predict(model, split, batch_size, _outputs)
        rows, examples = self.rows[split], self.examples[split]
        tags = [[OUTSIDE] * len(words) for words in examples[self.task.text_column]]
        for document, words, labels in zip(rows["document"], rows["words"], found["labels"], strict=True):
            for word, label in zip(words, labels.tolist(), strict=False):  # without padding
                if word >= 0:
                    tags[document][word] = self.names[label]
        if split not in self.labelled:
            return tags, {}
        column, feature = examples[self.task.label_column], examples.features[self.task.label_column].feature
        references = [tag_values(feature, labels, self.task.label_names) for labels in column]
        loss = float(torch.stack(found["loss"]).double().sum() / torch.stack(found["count"]).sum())
        return tags, {"loss": loss, **self._entity_scores(references, tags)}

    def write(self, split: str, predictions: list[list[str]]) -> None:
        """Writes words and predicted labels, one JSON object per line, in the columns of the data."""
        task, words = self.task, self.examples[split][self.task.text_column]
        with open(Path(self.args.output_dir, f"{split}_predictions.jsonl"), "w", encoding="utf-8") as file:
            for row, tags in zip(words, predictions, strict=True):
                file.write(json.dumps({task.text_column: row, task.label_column: tags}, ensure_ascii=False) + "\n")
