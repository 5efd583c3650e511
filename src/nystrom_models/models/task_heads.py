# SPDX-License-Identifier: Apache-2.0
"""Heads for fine-tuning: sequence and token classification, question answering, multiple choice.

Legend: B batch, N tokens, C hidden size.
"""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import (
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.utils.generic import can_return_tuple

from .configuration_base import POOLINGS, BaseConfig, require_one_of
from .input_checks import (
    reject_documents,
    require,
    require_choices,
    require_labels,
    require_labels_of_rows,
    require_labels_of_tokens,
    require_one_input,
    require_pairs,
    require_tensors,
)
from .layers import activation
from .losses import (
    IGNORED,
    binary_cross_entropy,
    cross_entropy,
    ignore_padding,
    int64_labels,
    squared_error,
)
from .modeling_base import BasePreTrainedModel
from .pooling import pool

ProblemType = Literal["regression", "single_label_classification", "multi_label_classification"]


# The arguments that heads for several sequences a row bring into the rows of the base model.
_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "inputs_embeds")


class ClassificationHead(nn.Module):
    """Pooled states (B, C), or of pairs (B, 2, C), -> logits (B, num_labels), through one hidden layer."""

    def __init__(self, config: BaseConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size * (4 if config.dual_encoder else 1), config.hidden_size)
        self.dropout = nn.Dropout(classifier_dropout(config))
        self.activation = activation(config.classifier_activation or config.hidden_act)
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, features: Tensor) -> Tensor:
        if features.dim() == 3:
            first, second = features.unbind(dim=1)
            features = torch.cat([first, second, first * second, first - second], dim=-1)
        hidden = self.activation(self.dense(self.dropout(features)))
        return self.out_proj(self.dropout(hidden))


def classifier_dropout(config: BaseConfig) -> float:
    """Dropout of classification heads: `classifier_dropout`, or `hidden_dropout_prob` if that is None."""
    return config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout


def classifier_pooling(config: BaseConfig) -> str:
    """How classification heads pool the states. It may have been changed after the configuration was made.

    Raises ValueError if it is unknown.
    """
    require_one_of("classifier_pooling", config.classifier_pooling, POOLINGS)
    return config.classifier_pooling


class BaseForSequenceClassification(BasePreTrainedModel):
    """One class, one number or several labels for each sequence."""

    auto_names = ("AutoModelForSequenceClassification",)

    def __init__(self, config: BaseConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.inferred_problem_type: ProblemType | None = None
        self.add_base_model()
        self.classifier = ClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> tuple | SequenceClassifierOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds: see the base model; with
                `dual_encoder`, those of both sequences, (B, 2, N) and (B, 2, N, C).
            labels: (B,) int64 classes; (B,) or (B, num_labels) floats for regression; (B, num_labels) floats of 0 and
                1 for several labels at once. `config.problem_type` says which of these it is. If it is None, the
                labels' dtype and `num_labels` decide, and what they decide is stored there, for pipelines.
            num_items_in_batch: divisor of the sum of the loss; if None, the number of labels in this batch.
            The others: see the base model.

        Returns: loss, logits (B, num_labels) and, on request, the base model's other outputs; with `dual_encoder`
            those of 2 B rows.
        """
        may_restart = self.config.is_decoder and attention_mask is None
        reject_documents(kwargs, "label", position_ids if may_restart else None)
        inputs = [input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds]
        if self.config.dual_encoder:
            require_tensors(**dict(zip(_INPUTS, inputs, strict=True)))
            require_pairs(require_one_input(input_ids, inputs_embeds), 3 if inputs_embeds is None else 4)
            inputs = [None if tensor is None else tensor.flatten(0, 1) for tensor in inputs]
        outputs = self.base_model(*inputs, output_attentions, output_hidden_states, return_dict=True, **kwargs)
        pooled = pool(outputs.last_hidden_state, inputs[1], classifier_pooling(self.config))
        if self.config.dual_encoder:
            pooled = pooled.unflatten(0, (-1, 2))
        logits = self.classifier(pooled)
        return SequenceClassifierOutput(
            loss=None if labels is None else self._loss(logits, labels, num_items_in_batch),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        require_tensors(labels=labels)
        problem_type = self._problem_type(labels)
        if problem_type == "regression":
            return squared_error(logits, labels, num_items_in_batch)
        if problem_type == "multi_label_classification":
            require(
                ((labels >= 0) & (labels <= 1)).all(),
                "labels of several classes a row must lie between 0 and 1: 1 for those that it has, 0 for all others.",
            )
            return binary_cross_entropy(logits, labels, num_items_in_batch)
        require_labels_of_rows(
            labels,
            logits.shape[0],
            "labels",
            f" For several classes a row give floats (batch, num_labels) = {tuple(logits.shape)} and "
            'problem_type="multi_label_classification".',
        )
        require_labels(labels, self.num_labels, "labels", "num_labels")
        return cross_entropy(logits, labels, num_items_in_batch)

    def _problem_type(self, labels: Tensor) -> ProblemType:
        """The configuration's, or else what follows from labels, which a later call with other labels may change."""
        given = self.config.problem_type
        if given is not None and given != self.inferred_problem_type:
            require_one_of("problem_type", given, get_args(ProblemType))
            return given
        found: ProblemType
        if self.num_labels == 1:
            found = "regression"
        elif labels.is_floating_point():
            found = "multi_label_classification"
        else:
            found = "single_label_classification"
        self.config.problem_type = self.inferred_problem_type = found
        return found


class BaseForTokenClassification(BasePreTrainedModel):
    """One class for each token."""

    auto_names = ("AutoModelForTokenClassification",)

    def __init__(self, config: BaseConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.add_base_model()
        self.dropout = nn.Dropout(classifier_dropout(config))
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> tuple | TokenClassifierOutput:
        """
        Args:
            labels: (B, N) int64, -100 where a token has none; padding has none.
            num_items_in_batch: divisor of the sum of the loss; if None, the number of labels that count in this batch.
            The others: see the base model.

        Returns: loss, logits (B, N, num_labels) and, on request, the base model's other outputs.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.base_model(*inputs, output_attentions, output_hidden_states, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            require_labels_of_tokens(labels, logits)
            require_labels(labels, self.num_labels, "labels", "num_labels")
            loss = cross_entropy(logits, ignore_padding(labels, attention_mask), num_items_in_batch)
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class BaseForQuestionAnswering(BasePreTrainedModel):
    """The first and the last token of an answer within the sequence."""

    auto_names = ("AutoModelForQuestionAnswering",)

    def __init__(self, config: BaseConfig):
        super().__init__(config)
        self.add_base_model()
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> tuple | QuestionAnsweringModelOutput:
        """
        Args:
            start_positions, end_positions: (B,) int64, the first and the last token of the answer; a position outside
                the sequence, or of padding, is ignored.
            num_items_in_batch: divisor of the sum of each of the two losses; if None, the number of answers in this
                batch.
            The others: see the base model.

        Returns: loss, start_logits and end_logits (B, N) and, on request, the base model's other outputs.

        Raises:
            ValueError: if only one of start_positions and end_positions is given, or if their number is not B.
        """
        if (start_positions is None) != (end_positions is None):
            raise ValueError("A loss needs both start_positions and end_positions: give both, or neither.")
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.base_model(*inputs, output_attentions, output_hidden_states, return_dict=True, **kwargs)
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            require_labels_of_rows(start_positions, start_logits.shape[0], "start_positions")
            require_labels_of_rows(end_positions, end_logits.shape[0], "end_positions")
            start_loss = self._loss(start_logits, start_positions, attention_mask, num_items_in_batch)
            end_loss = self._loss(end_logits, end_positions, attention_mask, num_items_in_batch)
            loss = (start_loss + end_loss) / 2
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits.contiguous(),
            end_logits=end_logits.contiguous(),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @staticmethod
    def _loss(
        logits: Tensor,
        positions: Tensor,
        attention_mask: Tensor | None,
        num_items_in_batch: Tensor | int | None,
    ) -> Tensor:
        positions = int64_labels(positions).flatten().to(logits.device)
        outside = (positions < 0) | (positions >= logits.shape[1])
        if attention_mask is not None and logits.shape[1] > 0:
            # Padding cannot be the answer: the loss must not depend on the amount of padding. A mask may begin with
            # the columns of tokens in a cache.
            padding = (attention_mask[:, -logits.shape[1] :] == 0).to(logits.device)
            logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
            outside |= padding.gather(1, positions.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
        return cross_entropy(logits, positions.masked_fill(outside, IGNORED), num_items_in_batch)


class BaseForMultipleChoice(BasePreTrainedModel):
    """A score for each of several choices; each choice is a sequence."""

    auto_names = ("AutoModelForMultipleChoice",)

    def __init__(self, config: BaseConfig):
        super().__init__(config)
        self.add_base_model()
        self.pre_classifier = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = activation(config.classifier_activation or "relu")
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> tuple | MultipleChoiceModelOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids: (B, choices, N).
            inputs_embeds: (B, choices, N, C), or (B, choices, N, embedding_size).
            labels: (B,) int64, the right choice.
            num_items_in_batch: divisor of the sum of the loss; if None, the number of labels in this batch.
            The others: see the base model.

        Returns: loss, logits (B, choices) and, on request, the base model's other outputs.
        """
        may_restart = self.config.is_decoder and attention_mask is None
        reject_documents(kwargs, "score", position_ids if may_restart else None)
        inputs = [input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds]
        require_tensors(**dict(zip(_INPUTS, inputs, strict=True)))
        given = require_one_input(input_ids, inputs_embeds)
        require_choices(given, 3 if inputs_embeds is None else 4)
        choices = given.shape[1]
        # A choice is a row of the batch.
        inputs = [None if tensor is None else tensor.flatten(0, 1) for tensor in inputs]
        outputs = self.base_model(*inputs, output_attentions, output_hidden_states, return_dict=True, **kwargs)
        pooled = pool(outputs.last_hidden_state, inputs[1], classifier_pooling(self.config))
        logits = self.classifier(self.activation(self.pre_classifier(pooled))).view(-1, choices)
        loss = None
        if labels is not None:
            require_labels_of_rows(labels, logits.shape[0], "labels")
            require_labels(labels, choices, "labels")
            loss = cross_entropy(logits, labels, num_items_in_batch)
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
