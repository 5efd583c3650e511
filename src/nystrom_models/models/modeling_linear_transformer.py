# SPDX-License-Identifier: Apache-2.0
"""Linear transformers (Katharopoulos et al. 2020, arXiv:2006.16236): encoders, and causal models that generate."""

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .attention_linear import (
    causal_linear_attention,
    elu_features,
    hedgehog_features,
    linear_attention,
    linear_attention_map,
    relu_features,
)
from .batch import Batch
from .causal_head import BaseForCausalLM
from .configuration_linear_transformer import LinearTransformerConfig
from .masked_attention import attend, attend_causally, attend_within_rows, softmax_attention_map
from .modeling_base import BaseModel, BasePreTrainedModel
from .pretraining_heads import BaseForMaskedLM, BaseForPreTraining
from .recurrent_cache import State, read_state, write_state
from .self_attention import SelfAttention
from .sequence_projection import SequenceProjection
from .task_heads import (
    BaseForMultipleChoice,
    BaseForQuestionAnswering,
    BaseForSequenceClassification,
    BaseForTokenClassification,
)

# The `attn_implementation` that computes causal attention in Triton kernels, where the package is installed.
KERNELS = "linear_triton"

FEATURES = {"elu": elu_features, "relu": relu_features}


class HedgehogFeatures(nn.Module):
    """The learned feature map of each head. W starts as the identity."""

    def __init__(self, config: LinearTransformerConfig):
        super().__init__()
        dim = config.hidden_size // config.num_attention_heads
        self.weight = nn.Parameter(torch.empty(config.num_attention_heads, dim, dim))

    def initialize_parameters(self) -> None:
        """Sets W to the identity."""
        init.copy_(self.weight, torch.eye(self.weight.shape[-1]).expand_as(self.weight))

    def forward(self, states: Tensor) -> Tensor:
        """(B, H, N, D) -> (B, H, N, 2 D)."""
        return hedgehog_features(states, self.weight)


class LinearTransformerSelfAttention(SelfAttention):
    """Linear attention of a layer: over all tokens, or causal."""

    def __init__(self, config: LinearTransformerConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.query_features = self.key_features = FEATURES.get(config.feature_map)
        if config.feature_map == "hedgehog":
            self.query_features, self.key_features = HedgehogFeatures(config), HedgehogFeatures(config)
        self.projection = None
        if config.projected_dim is not None:
            length = config.max_position_embeddings
            self.projection = SequenceProjection("linear", config.projected_dim, length, positive=True)

    def attend(self, hidden_states: Tensor, batch: Batch) -> Tensor:
        query, key, value = (
            self.in_heads(linear(hidden_states), batch) for linear in (self.query, self.key, self.value)
        )
        if self.config.feature_map is None:
            return self.attend_by_softmax(query, key, value, batch)
        by_kernels = self.config.is_decoder and self.config._attn_implementation == KERNELS
        if query.dtype == torch.float16 and not by_kernels:
            # Features may be too small for float16, and their gradients too large. The sums need float32 anyway; the
            # kernels read one dtype.
            query, key = query.float(), key.float()
        query, key = self.query_features(query), self.key_features(key)
        skip, mask = self.convolve(value, batch), batch.mask
        matrix = None
        if self.projection is not None:
            lengths = None if mask is None else mask.sum(dim=-1)
            if batch.maps is not None:
                matrix = self.projection(value, lengths=lengths, as_matrix=True)
            if mask is not None:
                key = key.masked_fill(~mask[:, None, :, None], 0)
            key = self.projection(key.to(value.dtype), lengths=lengths)
            value = self.projection(self.without_padding(value, batch), lengths=lengths)
            mask = None
        if batch.maps is not None:
            rows, causal = batch.maps.rows, self.config.is_decoder
            attention_map = linear_attention_map(query, key, mask, causal=causal, rows=rows).to(value.dtype)
            attention_map = batch.record(attention_map if matrix is None else attention_map @ matrix)
            # A cache needs the state, which the map does not give.
            if rows is None and self.is_eager and matrix is None and batch.cache is None:
                # The context is computed from the map that is returned, so that gradients reach the map.
                context = attention_map @ value
                return context if skip is None else context + skip
        if self.config.is_decoder:
            before = read_state(batch.cache, self.layer_idx, State.ATTENTION)
            if by_kernels:
                attend = ALL_ATTENTION_FUNCTIONS[KERNELS]
                context, state = attend(self, query, key, value, mask, state=before, causal=True)
                context = context.transpose(1, 2)
            else:
                context, state = causal_linear_attention(query, key, value, mask, before)
            write_state(batch.cache, self.layer_idx, State.ATTENTION, state)
        else:
            context = linear_attention(query, key, value, mask)
        return context if skip is None else context + skip

    def attend_by_softmax(self, query: Tensor, key: Tensor, value: Tensor, batch: Batch) -> Tensor:
        """Exact attention (B, H, N, D) in the same model, for comparison."""
        skip, causal = self.convolve(value, batch), self.config.is_decoder
        attention_map = None
        if batch.maps is not None:
            rows = batch.maps.rows
            attention_map = batch.record(softmax_attention_map(query, key, batch.mask, causal=causal, rows=rows))
        if attention_map is not None and self.is_eager and batch.maps.rows is None:
            # The context is computed from the map that is returned, so that gradients reach the map.
            context = attention_map @ value
        elif causal:
            if self.config._attn_implementation not in ("sdpa", "eager", KERNELS):
                raise ValueError(
                    f'attn_implementation="{self.config._attn_implementation}" is not called by a causal model: use '
                    '"sdpa" or "eager".'
                )
            context = attend_causally(query, key, value, batch.mask, eager=self.is_eager)
        else:
            by_softmax = attend if self.config._attn_implementation == KERNELS else self.softmax_attention
            context = attend_within_rows(query, key, value, batch.mask, attend=by_softmax)
        return context if skip is None else context + skip


class LinearTransformerPreTrainedModel(BasePreTrainedModel):
    """The base of all linear transformers: configuration, initialisation, loading and saving."""

    config: LinearTransformerConfig
    config_class = LinearTransformerConfig
    base_model_prefix = "linear_transformer"
    self_attention_class = LinearTransformerSelfAttention
    kernels = KERNELS

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """As in the base class. The columns of projections are repeated or cut in the same way."""
        super().resize_position_embeddings(new_num_position_embeddings)
        for module in self.modules():
            if isinstance(module, SequenceProjection):
                module.resize(new_num_position_embeddings)


class LinearTransformerModel(BaseModel, LinearTransformerPreTrainedModel):
    """Linear transformer, with a pooler over its first token (causal: its last) unless `add_pooling_layer=False`."""


# Names GenerationMixin again: otherwise Transformers derives a class from this one where the file comes from a
# checkpoint, and a model of that class cannot be pickled.
class LinearTransformerForCausalLM(BaseForCausalLM, LinearTransformerPreTrainedModel, GenerationMixin):
    """Linear transformer that predicts the next token, and generates with a state of fixed size."""


# Trainer shifts the labels of these classes: without this, label smoothing would teach copying. It stands here because
# this file travels with checkpoints, and the registration with the Auto classes does not.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(LinearTransformerConfig.model_type, LinearTransformerForCausalLM.__name__)


class LinearTransformerForPreTraining(BaseForPreTraining, LinearTransformerPreTrainedModel):
    """Linear transformer with a masked language modelling head and a sentence order head."""


class LinearTransformerForMaskedLM(BaseForMaskedLM, LinearTransformerPreTrainedModel):
    """Linear transformer with a masked language modelling head."""


class LinearTransformerForSequenceClassification(BaseForSequenceClassification, LinearTransformerPreTrainedModel):
    """Linear transformer with a classification or regression head over its pooled state (`classifier_pooling`)."""


class LinearTransformerForTokenClassification(BaseForTokenClassification, LinearTransformerPreTrainedModel):
    """Linear transformer with a classification head over every token."""


class LinearTransformerForQuestionAnswering(BaseForQuestionAnswering, LinearTransformerPreTrainedModel):
    """Linear transformer with a head for the first and the last token of an answer."""


class LinearTransformerForMultipleChoice(BaseForMultipleChoice, LinearTransformerPreTrainedModel):
    """Linear transformer with a head that scores each of several choices."""


__all__ = [
    "LinearTransformerForCausalLM",
    "LinearTransformerForMaskedLM",
    "LinearTransformerForMultipleChoice",
    "LinearTransformerForPreTraining",
    "LinearTransformerForQuestionAnswering",
    "LinearTransformerForSequenceClassification",
    "LinearTransformerForTokenClassification",
    "LinearTransformerModel",
    "LinearTransformerPreTrainedModel",
]
