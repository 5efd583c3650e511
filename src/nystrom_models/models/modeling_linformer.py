# SPDX-License-Identifier: Apache-2.0
"""Linformer models (Wang et al. 2020, arXiv:2006.04768).

The biases of keys and values come after the projection, as in the authors' code. A projection that the heads share
comes before the linear layers: E (X W) + b = (E X) W + b, so that W multiplies K rows instead of N.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention_linformer import slot_mask, slots_map
from .batch import Batch
from .configuration_linformer import LinformerConfig
from .layers import LayerStack
from .modeling_base import BaseModel, BasePreTrainedModel
from .pretraining_heads import BaseForMaskedLM, BaseForPreTraining
from .self_attention import SelfAttention
from .sequence_projection import SequenceProjection
from .task_heads import (
    BaseForMultipleChoice,
    BaseForQuestionAnswering,
    BaseForSequenceClassification,
    BaseForTokenClassification,
)
from .token_layout import split_heads


class LinformerPlan(NamedTuple):
    """lengths: (B,) int64, valid tokens of each row; None if all rows are full. projection: what all layers share."""

    lengths: Tensor | None
    projection: Callable[..., Tensor] | None


def make_projection(
    config: LinformerConfig, projected_dim: int | list[int], by_head: bool = False
) -> SequenceProjection:
    """A projection to `projected_dim` slots, one for all heads or one for each."""
    num_heads = config.num_attention_heads if by_head else None
    return SequenceProjection(config.projection_type, projected_dim, config.max_position_embeddings, num_heads)


class LinformerSelfAttention(SelfAttention):
    """Linformer attention of a layer, with the projections that it does not share with other layers."""

    def __init__(self, config: LinformerConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.key_projection = self.value_projection = self.slots_of_heads = None
        by_head = config.has_projection_weights and config.share_projection == "none"
        # A maximum does not commute with the linear layers, nor does a projection that differs between heads.
        self.projects_first = not by_head and config.projection_type != "max_pool"
        if config.shares_projection_between_layers:
            return
        projected_dim = config.layer_projected_dim(layer_idx)
        self.slots_of_heads = projected_dim if isinstance(projected_dim, list) else None
        self.key_projection = make_projection(config, projected_dim, by_head)
        if config.has_projection_weights and config.share_projection != "key_value":
            self.value_projection = make_projection(config, projected_dim, by_head)

    def attend(self, hidden_states: Tensor, batch: Batch) -> Tensor:
        lengths, shared = batch.plan
        key_projection = shared if self.key_projection is None else self.key_projection
        value_projection = key_projection if self.value_projection is None else self.value_projection
        query = self.in_heads(self.query(hidden_states), batch)
        if self.projects_first:
            rows = batch.to_clean_rows(hidden_states)
            # A shared projection may be on another device.
            slots = key_projection(rows, lengths=lengths).to(rows.device)
            keys = [split_heads(self.key(slots), self.num_heads)]
            if value_projection is not key_projection:
                slots = value_projection(rows, lengths=lengths)
            values = [split_heads(self.value(slots), self.num_heads)]
        else:
            keys = self.project_heads(self.key, key_projection, hidden_states, batch)
            values = self.project_heads(self.value, value_projection, hidden_states, batch)
        skip = None
        if self.conv is not None:
            skip = self.convolve(self.in_heads(self.value(hidden_states), batch), batch)
        mask = slot_mask(query, self.config.projection_type, self.config.slot_size(self.layer_idx), lengths)
        queries = self.in_groups(query)
        if batch.maps is not None:
            tokens, bias = without_bias(self.value, hidden_states)
            tokens = self.in_heads(tokens, batch)
            matrix = value_projection(tokens, lengths=lengths, as_matrix=True).to(tokens.device)
            matrices = [matrix] if self.slots_of_heads is None else matrix.split(self.slots_of_heads, dim=2)
            dropout_p = self.dropout if self.is_eager else 0.0
            maps = [
                slots_map(*group, mask, rows=batch.maps.rows, dropout_p=dropout_p)
                for group in zip(queries, keys, matrices, strict=True)
            ]
            attention_map = batch.record(join_groups(maps))
            if self.is_eager and batch.maps.rows is None and self.config.projection_type != "max_pool":
                # The context is computed from the map that is returned, so that gradients reach the map.
                context = attention_map @ tokens + split_heads(bias, self.num_heads)
                return context if skip is None else context + skip
        skips = [None] * len(queries) if skip is None else self.in_groups(skip)
        contexts = [
            self.softmax_attention(query, key, value, mask, self.dropout, skip)
            for query, key, value, skip in zip(queries, keys, values, skips, strict=True)
        ]
        return join_groups(contexts)

    def in_groups(self, states: Tensor) -> list[Tensor]:
        """States (B, H, ...) of heads that attend together: all, or one by one if their numbers of slots differ."""
        return [states] if self.slots_of_heads is None else list(states.split(1, dim=1))

    def project_heads(
        self, linear: nn.Module, projection: nn.Module, hidden_states: Tensor, batch: Batch
    ) -> list[Tensor]:
        """E (X W) + b, (B, H, K', D) of each group of heads, for projections after the linear layer."""
        lengths = batch.plan.lengths
        if self.config.projection_type == "max_pool":
            return [projection(self.in_heads(linear(hidden_states), batch), lengths=lengths)]
        tokens, bias = without_bias(linear, hidden_states)
        tokens = split_heads(batch.to_clean_rows(tokens), self.num_heads)
        slots, bias = projection(tokens, lengths=lengths), split_heads(bias, self.num_heads)
        if self.slots_of_heads is None:
            return [slots + bias]
        heads = slots.split(self.slots_of_heads, dim=1)
        return [head[:, None] + part for head, part in zip(heads, self.in_groups(bias), strict=True)]


def join_groups(parts: list[Tensor]) -> Tensor:
    """The reverse of `in_groups`."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def without_bias(linear: nn.Module, states: Tensor) -> tuple[Tensor, Tensor]:
    """X W, (B, N, C), and b, (B, 1, C), of a linear layer X W + b.

    The bias is computed as the layer's output for zeros. It is not read, because adapters, offloading and quantization
    change what the call computes.
    """
    outputs = linear(F.pad(states, (0, 0, 0, 1)))
    bias = outputs[:, -1:]
    return outputs[:, :-1] - bias, bias


class LinformerStack(LayerStack):
    """The layers, and their shared projection, if there is one."""

    def __init__(self, config: LinformerConfig, self_attention_class: type[SelfAttention]):
        super().__init__(config, self_attention_class)
        self.sequence_projection = None
        if config.shares_projection_between_layers and config.num_hidden_layers:
            self.sequence_projection = make_projection(config, config.layer_projected_dim(0))

    def plan(self, batch: Batch) -> LinformerPlan:
        lengths = None if batch.mask is None else batch.mask.sum(dim=-1)
        # A function: Accelerate would move a module that it finds among the arguments of a layer.
        shared = None if self.sequence_projection is None else self._project_shared
        return LinformerPlan(lengths, shared)

    def _project_shared(self, states: Tensor, lengths: Tensor | None, as_matrix: bool = False) -> Tensor:
        return self.sequence_projection(states, lengths=lengths, as_matrix=as_matrix)


class LinformerPreTrainedModel(BasePreTrainedModel):
    """The base of all Linformers: configuration, initialisation, loading and saving."""

    config: LinformerConfig
    config_class = LinformerConfig
    base_model_prefix = "linformer"
    self_attention_class = LinformerSelfAttention
    stack_class = LinformerStack

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """As in the base class. The columns of linear projections are repeated or cut in the same way.

        Raises ValueError for pooling and convolution, whose slots would cover other tokens.
        """
        if self.config.projection_type != "linear":
            raise ValueError(
                f'projection_type="{self.config.projection_type}" has slots of ceil(max_position_embeddings / '
                "projected_dim) tokens, which would change with the length: make a new model."
            )
        super().resize_position_embeddings(new_num_position_embeddings)
        for module in self.modules():
            if isinstance(module, SequenceProjection):
                module.resize(new_num_position_embeddings)


class LinformerModel(BaseModel, LinformerPreTrainedModel):
    """Linformer encoder, with a pooler over its first token unless `add_pooling_layer=False`."""


class LinformerForPreTraining(BaseForPreTraining, LinformerPreTrainedModel):
    """Linformer with a masked language modelling head and a sentence order head."""


class LinformerForMaskedLM(BaseForMaskedLM, LinformerPreTrainedModel):
    """Linformer with a masked language modelling head."""


class LinformerForSequenceClassification(BaseForSequenceClassification, LinformerPreTrainedModel):
    """Linformer with a classification or regression head over its pooled state (`classifier_pooling`)."""


class LinformerForTokenClassification(BaseForTokenClassification, LinformerPreTrainedModel):
    """Linformer with a classification head over every token."""


class LinformerForQuestionAnswering(BaseForQuestionAnswering, LinformerPreTrainedModel):
    """Linformer with a head for the first and the last token of an answer."""


class LinformerForMultipleChoice(BaseForMultipleChoice, LinformerPreTrainedModel):
    """Linformer with a head that scores each of several choices."""


__all__ = [
    "LinformerForMaskedLM",
    "LinformerForMultipleChoice",
    "LinformerForPreTraining",
    "LinformerForQuestionAnswering",
    "LinformerForSequenceClassification",
    "LinformerForTokenClassification",
    "LinformerModel",
    "LinformerPreTrainedModel",
]
