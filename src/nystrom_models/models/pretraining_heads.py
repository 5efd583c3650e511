# SPDX-License-Identifier: Apache-2.0
"""The heads that models are pretrained with: masked language modelling (MLM), and with it sentence order (SOP).

Legend: B batch, N tokens, C hidden size, E width of the embeddings, V vocabulary, T valid tokens of a batch.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.modeling_outputs import MaskedLMOutput
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from .configuration_base import BaseConfig
from .input_checks import (
    reject_documents,
    require_labels,
    require_labels_of_rows,
    require_labels_of_tokens,
    require_tensors,
)
from .layers import activation
from .losses import cross_entropy, ignore_padding, mean
from .modeling_base import BaseModelOutput, BasePreTrainedModel

# ---- parts ----


class PredictionHeadTransform(nn.Module):
    """The hidden layer of the MLM head: a linear layer, an activation, a norm."""

    def __init__(self, config: BaseConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_width)
        self.transform_act_fn = activation(config.hidden_act)
        self.LayerNorm = nn.LayerNorm(config.embedding_width, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """States (..., C) -> (..., E), as wide as the embeddings, by which words are predicted."""
        return self.LayerNorm(self.transform_act_fn(self.dense(hidden_states)))


class LMPredictionHead(nn.Module):
    """From hidden states to logits over the vocabulary."""

    def __init__(self, config: BaseConfig):
        super().__init__()
        self.transform = PredictionHeadTransform(config)
        self.decoder = nn.Linear(config.embedding_width, config.vocab_size)
        # The same tensor as decoder.bias, under the name that published checkpoints use, where weights are tied.
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.tie_word_embeddings else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.transform(hidden_states))


class PretrainingHeads(nn.Module):
    """Masked language modelling and, with `sentence_order`, the order of the two segments."""

    def __init__(self, config: BaseConfig, sentence_order: bool = False):
        super().__init__()
        self.predictions = LMPredictionHead(config)
        self.seq_relationship = nn.Linear(config.hidden_size, 2) if sentence_order else None

    def forward(self, hidden_states: Tensor, pooled: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """States (..., C) of tokens and (B, C) of rows -> logits (..., V) and (B, 2), or None without that head."""
        order = None if self.seq_relationship is None else self.seq_relationship(pooled)
        return self.predictions(hidden_states), order


# ---- models ----


@dataclass
class ForPreTrainingOutput(ModelOutput):
    r"""
    In the order of ALBERT's output; the two losses come last.

    loss (`torch.Tensor`, *optional*): sum of the losses whose labels were given.
    prediction_logits (`torch.Tensor`): (batch, length, vocab_size), before the softmax; with labels and
        `config.sparse_prediction`, (number of labels that count, vocab_size).
    sop_logits (`torch.Tensor`): (batch, 2), before the softmax; class 1 = the segments are swapped.
    hidden_states, attentions: as in Transformers, on request.
    mlm_loss (`torch.Tensor`, *optional*): mean cross entropy of the masked tokens.
    sop_loss (`torch.Tensor`, *optional*): mean cross entropy of the order of the segments.
    """

    loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    sop_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    mlm_loss: Tensor | None = None
    sop_loss: Tensor | None = None


# Copying a token's logits to their place takes about as long as this many multiplications for each logit.
MULTIPLICATIONS_OF_A_COPY = 128


class BaseWithLMHead(BasePreTrainedModel):
    """The shared base of the two models that predict tokens: output embeddings, tying, logits and loss."""

    cls: PretrainingHeads
    # Without tied weights, this key in a checkpoint is a second bias that nothing uses.
    _keys_to_ignore_on_load_unexpected = [
        *BasePreTrainedModel._keys_to_ignore_on_load_unexpected,
        r"cls\.predictions\.bias",
    ]
    tied_weights = {"cls.predictions.decoder.weight": None, "cls.predictions.decoder.bias": "cls.predictions.bias"}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LMPredictionHead) and module.bias is not None:
            init.zeros_(module.bias)

    def get_output_embeddings(self) -> nn.Linear:
        """The output layer, for tying and resizing."""
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replaces the output layer, and the bias that is tied to it."""
        self.cls.predictions.decoder = new_embeddings
        if self.cls.predictions.bias is not None:
            self.cls.predictions.bias = new_embeddings.bias

    def counted_labels(self, labels: Tensor | None, attention_mask: Tensor | None) -> Tensor | None:
        """With `sparse_prediction`, the places of the labels (B, N) that count in the flattened batch, int64.

        On a GPU, the host waits for their number. Called before the base model, this does not wait for its results.
        """
        if labels is None or not self.config.sparse_prediction:
            return None
        require_tensors(labels=labels, attention_mask=attention_mask)
        if attention_mask is not None and attention_mask.shape != labels.shape:
            return None  # wrong inputs, for which the base model or `predict_tokens` has a message
        ignore = self.config.sparse_pred_ignore_index
        return _places_that_count(ignore_padding(labels, attention_mask, ignore), ignore)

    def predict_tokens(
        self,
        outputs: BaseModelOutput,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        num_items_in_batch: Tensor | int | None,
        counted: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Computes three results from the base model's outputs, labels (B, N) and the result of `counted_labels`: the
        logits of tokens (B, N, V), or (number of labels that count, V) with `sparse_prediction`; the logits of the
        sentence order; the loss of the tokens."""
        states, pooled = outputs.last_hidden_state, outputs.pooler_output
        ignore = self.config.sparse_pred_ignore_index
        if labels is not None:
            require_labels_of_tokens(labels, states)
            require_labels(labels, self.config.vocab_size, "labels", "vocab_size", ignore)
            labels = ignore_padding(labels, attention_mask, ignore).to(states.device)
        places = None
        if labels is not None and self.config.sparse_prediction:
            counted = _places_that_count(labels, ignore) if counted is None else counted.to(states.device)
            # By places and not by a mask, whose places would be read three times.
            states, labels = states.flatten(0, 1).index_select(0, counted), labels.flatten().index_select(0, counted)
        elif outputs.token_places is not None and self._pays_without_padding(outputs.token_places, states):
            shape, places = states.shape[:2], outputs.token_places.to(states.device)
            # The state of all padding is zero: one extra token gives the logits of all padding.
            states = F.pad(states.flatten(0, 1).index_select(0, places), (0, 0, 0, 1))
            labels = None if labels is None else F.pad(labels.flatten()[places], (0, 1), value=ignore)
        logits, order = self.cls(states, pooled)
        loss = None if labels is None else cross_entropy(logits, labels, num_items_in_batch, ignore)
        return logits if places is None else _at_all_places(logits, places, shape), order, loss

    def _pays_without_padding(self, places: Tensor, states: Tensor) -> bool:
        """Whether skipping the products at padding saves more time than copying all logits to their places costs."""
        padding = 1 - len(places) / states.shape[:2].numel()
        # The backward pass has two more products of the forward pass's size.
        products = 3 if torch.is_grad_enabled() else 1
        return products * self.config.embedding_width * padding > MULTIPLICATIONS_OF_A_COPY


def _places_that_count(labels: Tensor, ignore_index: int) -> Tensor:
    """The places of the labels that are not `ignore_index`, int64 of shape (number of them,)."""
    return (labels.flatten() != ignore_index).nonzero().squeeze(-1)


def _at_all_places(logits: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Logits of the T valid tokens and, last, of padding, (T + 1, V), at all places of a batch, (B, N, V)."""
    tokens = torch.arange(len(places), device=places.device)
    index = torch.full((shape.numel(),), len(places), device=places.device)
    return F.embedding(index.index_copy_(0, places, tokens).view(shape), logits)


class BaseForMaskedLM(BaseWithLMHead):
    """Predicts masked tokens (MLM)."""

    auto_names = ("AutoModelForMaskedLM",)

    def __init__(self, config: BaseConfig):
        super().__init__(config)
        self.add_base_model()
        self.cls = PretrainingHeads(config)
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
    ) -> tuple | MaskedLMOutput:
        """
        Args:
            labels: (B, N) int64, the tokens to predict; `config.sparse_pred_ignore_index` (-100) for tokens that are
                not predicted. Padding never is.
            num_items_in_batch: divisor of the sum of the loss; if None, the number of labels that count in this batch.
            The others: see the base model.

        Returns: loss, logits (B, N, V) and, on request, the base model's other outputs. With labels and
            `config.sparse_prediction`, logits are (number of labels that count, V).
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        counted = self.counted_labels(labels, attention_mask)
        outputs = self.base_model(
            *inputs, output_attentions, output_hidden_states, output_token_places=True, return_dict=True, **kwargs
        )
        logits, _, loss = self.predict_tokens(outputs, attention_mask, labels, num_items_in_batch, counted)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class BaseForPreTraining(BaseWithLMHead):
    """Predicts masked tokens (MLM) and whether the two segments of a row are swapped (SOP)."""

    auto_names = ("AutoModelForPreTraining",)

    def __init__(self, config: BaseConfig):
        super().__init__(config)
        self.add_base_model(add_pooling_layer=True)
        self.cls = PretrainingHeads(config, sentence_order=True)
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
        sentence_order_label: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> tuple | ForPreTrainingOutput:
        """
        Args:
            labels: (B, N) int64, the tokens to predict; `config.sparse_pred_ignore_index` (-100) for tokens that are
                not predicted. Padding never is.
            sentence_order_label: (B,) int64, 0 for segments in their order and 1 for swapped ones, as in ALBERT.
            num_items_in_batch: divisor of the sum of the token loss; if None, the number of labels that count in this
                batch. The sentence order loss is then weighted by this batch's share of those labels.
            The others: see the base model.

        Returns: `ForPreTrainingOutput`.
        """
        if sentence_order_label is not None:
            reject_documents(kwargs, "sentence order")
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        counted = self.counted_labels(labels, attention_mask)
        outputs = self.base_model(
            *inputs, output_attentions, output_hidden_states, output_token_places=True, return_dict=True, **kwargs
        )
        prediction_logits, sop_logits, mlm_loss = self.predict_tokens(
            outputs, attention_mask, labels, num_items_in_batch, counted
        )
        sop_loss = None
        if sentence_order_label is not None:
            require_labels_of_rows(sentence_order_label, sop_logits.shape[0], "sentence_order_label")
            require_labels(sentence_order_label, 2, "sentence_order_label")
            sop_loss = cross_entropy(sop_logits, sentence_order_label)
            if num_items_in_batch is not None and labels is not None:
                counted = ignore_padding(labels, attention_mask, self.config.sparse_pred_ignore_index)
                share = mean((counted != self.config.sparse_pred_ignore_index).sum(), 1, num_items_in_batch)
                sop_loss = sop_loss * share.to(sop_loss.device)
        losses = [loss for loss in (mlm_loss, sop_loss) if loss is not None]
        return ForPreTrainingOutput(
            loss=torch.stack(losses).sum() if losses else None,
            prediction_logits=prediction_logits,
            sop_logits=sop_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            mlm_loss=mlm_loss,
            sop_loss=sop_loss,
        )
