# SPDX-License-Identifier: Apache-2.0
"""Losses to train on and scores to report: the only difference between pretraining and fine-tuning in the loop."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.input_checks import require

Batch = Mapping[str, Tensor]


class Preparation(NamedTuple):
    """The first steps of a run, before its schedule begins: their number, constant learning rate and objective."""

    steps: int
    learning_rate: float
    objective: "Objective"


class Objective(ABC):
    """Losses to train on, and scores to report.

    A loss is a mean over some number of targets. The number must be known before the forward pass, so that
    micro-batches and processes with different numbers of targets add up to the mean over all of them.

    weights: the weights of losses in their sum, by name; 1 if a name is missing. Losses are logged without weights.
    is_partial: whether some of the trained weights get no gradient. They then stay unchanged.
    preparation: see [`Preparation`]; None if the schedule begins with the first step.
    """

    weights: Mapping[str, float] = {}
    is_partial: bool = False
    preparation: Preparation | None = None

    def at_step(self, step: int) -> "Objective":
        """The objective of a step, counted from 0: this one, after those of the preparation."""
        first = self.preparation
        return self if first is None or step >= first.steps else first.objective

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """Runs the model, as prepared by Accelerate, and returns the argument of [`losses`] and [`scores`]."""
        return model(**batch)

    @abstractmethod
    def num_targets(self, batch: Batch) -> dict[str, Tensor]:
        """For each loss of `batch` the number of targets that it is a mean over, int64 of shape ()."""

    def losses(self, outputs: Any) -> dict[str, Tensor]:
        """The losses, of shape (), with the names of [`num_targets`]; by default the one that the model returns."""
        return {"loss": outputs.loss}

    @abstractmethod
    def scores(self, outputs: Any, batch: Batch, with_loss: bool = True) -> dict[str, tuple[Tensor, Tensor]]:
        """For each score the sums by row and the numbers of targets by row, both of shape (B,). The score of a data
        set is the total sum over the total number.

        `with_loss=False` leaves out the values that [`losses`] returns.
        """


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """Values (T,) at the T positions where the mask (B, ...) is true, and zeros at the others."""
    return torch.zeros_like(mask, dtype=values.dtype).masked_scatter(mask, values)


def _sums_by_row(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sums and counts by row, float32, of values (B, ...) that are zero where the mask is false."""
    # Not by index_add, which adds one value after the other, so that equal values are rounded in one direction.
    return values.flatten(1).sum(1).float(), mask.flatten(1).sum(1).float()


def classification_scores(
    logits: Tensor, labels: Tensor, loss: str, accuracy: str, with_loss: bool
) -> dict[str, tuple[Tensor, Tensor]]:
    """Scores of logits (B, ..., C) against labels (B, ...) that are not -100; or of logits (T, C) for these labels."""
    mask, predicted = labels != -100, logits.argmax(-1)
    everywhere = logits.shape[:-1] == labels.shape
    rows = mask if mask.ndim > 1 else mask[:, None]
    if not everywhere:
        require(
            mask.sum() == len(logits),
            f"There are {len(logits)} predictions, and another number of labels: with sparse_prediction, the model "
            "must predict each token whose label is not -100, and no other.",
        )
        predicted = _spread(predicted, mask)
    # Not by indexing with the mask: on a GPU, the host would wait for the number of labels in every step.
    right = (predicted == labels) & mask
    scores = {accuracy: _sums_by_row(right.view_as(rows), rows)}
    if with_loss:
        logits = (logits[mask] if everywhere else logits).float()
        losses = F.cross_entropy(logits, labels[mask], reduction="none")
        scores[loss] = _sums_by_row(_spread(losses, rows), rows)
    return scores


def serves_sentence_order(name: str) -> bool:
    """Whether a parameter of this name is needed only for the order of sentences."""
    return any(part in f".{name}" for part in (".pooler.", "cls.seq_relationship."))


class PretrainingObjective(Objective):
    """MLM + SOP, for a `ForPreTraining` model."""

    def num_targets(self, batch: Batch) -> dict[str, Tensor]:
        """As `Objective.num_targets`."""
        return {
            "mlm_loss": (batch["labels"] != -100).sum(),
            "sop_loss": (batch["sentence_order_label"] != -100).sum(),
        }

    def losses(self, outputs: Any) -> dict[str, Tensor]:
        """As `Objective.losses`."""
        return {"mlm_loss": outputs.mlm_loss, "sop_loss": outputs.sop_loss}

    def scores(self, outputs: Any, batch: Batch, with_loss: bool = True) -> dict[str, tuple[Tensor, Tensor]]:
        """As `Objective.scores`."""
        return {
            **classification_scores(outputs.prediction_logits, batch["labels"], "mlm_loss", "mlm_accuracy", with_loss),
            **classification_scores(
                outputs.sop_logits, batch["sentence_order_label"], "sop_loss", "sop_accuracy", with_loss
            ),
        }


class CausalObjective(Objective):
    """The next token, for a `ForCausalLM` model and batches of [`CausalCollator`]: padded on the right, with labels of
    -100 at the first token of each row and document."""

    def num_targets(self, batch: Batch) -> dict[str, Tensor]:
        """As `Objective.num_targets`."""
        return {"loss": (batch["labels"] != -100).sum()}

    def scores(self, outputs: Any, batch: Batch, with_loss: bool = True) -> dict[str, tuple[Tensor, Tensor]]:
        """As `Objective.scores`."""
        return classification_scores(outputs.logits[:, :-1], batch["labels"][:, 1:], "loss", "accuracy", with_loss)


class ClassificationObjective(Objective):
    """One class per row, for a `ForSequenceClassification` model."""

    def num_targets(self, batch: Batch) -> dict[str, Tensor]:
        """As `Objective.num_targets`."""
        return {"loss": (batch["labels"] != -100).sum()}

    def scores(self, outputs: Any, batch: Batch, with_loss: bool = True) -> dict[str, tuple[Tensor, Tensor]]:
        """As `Objective.scores`."""
        return classification_scores(outputs.logits, batch["labels"], "loss", "accuracy", with_loss)


class QuestionAnsweringObjective(Objective):
    """The first and the last token of an answer, for a `ForQuestionAnswering` model."""

    def num_targets(self, batch: Batch) -> dict[str, Tensor]:
        """As `Objective.num_targets`."""
        return {"loss": torch.tensor(len(batch["start_positions"]), device=batch["start_positions"].device)}

    def scores(self, outputs: Any, batch: Batch, with_loss: bool = True) -> dict[str, tuple[Tensor, Tensor]]:
        """As `Objective.scores`; the accuracy is that of both tokens together."""
        padding = batch["attention_mask"] == 0
        pairs = [
            (logits.float().masked_fill(padding, float("-inf")), batch[name])
            for logits, name in (
                (outputs.start_logits, "start_positions"),
                (outputs.end_logits, "end_positions"),
            )
        ]
        right = torch.stack([logits.argmax(-1) == positions for logits, positions in pairs]).all(0).float()
        scores = {"accuracy": (right, torch.ones_like(right))}
        if with_loss:
            losses = torch.stack([F.cross_entropy(*pair, reduction="none") for pair in pairs]).mean(0)
            scores["loss"] = (losses, torch.ones_like(losses))
        return scores


class MultiLabelObjective(Objective):
    """Any number of classes per row, for a `ForSequenceClassification` model; `labels` has a 1.0 or 0.0 for each."""

    def num_targets(self, batch: Batch) -> dict[str, Tensor]:
        """As `Objective.num_targets`."""
        return {"loss": torch.tensor(batch["labels"].numel(), device=batch["labels"].device)}

    def scores(self, outputs: Any, batch: Batch, with_loss: bool = True) -> dict[str, tuple[Tensor, Tensor]]:
        """As `Objective.scores`."""
        logits, labels = outputs.logits.float(), batch["labels"].float()
        right = ((logits > 0) == (labels > 0.5)).float()
        scores = {"accuracy": (right.sum(1), torch.ones_like(right).sum(1))}
        if with_loss:
            losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
            scores["loss"] = (losses.sum(1), torch.ones_like(losses).sum(1))
        return scores


class RegressionObjective(Objective):
    """One number per row, for a `ForSequenceClassification` model with one label."""

    def num_targets(self, batch: Batch) -> dict[str, Tensor]:
        """As `Objective.num_targets`."""
        return {"loss": torch.tensor(len(batch["labels"]), device=batch["labels"].device)}

    def scores(self, outputs: Any, batch: Batch, with_loss: bool = True) -> dict[str, tuple[Tensor, Tensor]]:
        """As `Objective.scores`."""
        if not with_loss:
            return {}
        errors = (outputs.logits.flatten().float() - batch["labels"].float()) ** 2
        return {"loss": (errors, torch.ones_like(errors))}
