# SPDX-License-Identifier: Apache-2.0
"""Linformer models (Wang et al. 2020, arXiv:2006.04768)."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from .attention_linformer import linformer_attention, linformer_attention_map, linformer_attention_reference
from .attention_ops import depthwise_convolution, split_heads
from .configuration_linformer import LinformerConfig
from .encoder import (
    EncoderForMaskedLM,
    EncoderForMultipleChoice,
    EncoderForPreTraining,
    EncoderForQuestionAnswering,
    EncoderForSequenceClassification,
    EncoderForTokenClassification,
    EncoderModel,
    EncoderPreTrainedModel,
    EncoderSelfAttention,
    EncoderStack,
)


class SequenceProjection(nn.Module):
    """E or F: a (k, N) matrix for "linear", ceil(N / k) taps for "conv"; a leading axis if each head has its own."""

    def __init__(self, config: LinformerConfig, projected_dim: int, by_head: bool):
        super().__init__()
        length = config.max_position_embeddings
        shape = (projected_dim, length) if config.projection_type == "linear" else (-(-length // projected_dim),)
        if by_head:
            shape = (config.num_attention_heads, *shape)
        self.weight = nn.Parameter(torch.empty(shape))
        # As in the authors' code (Xavier with gain 1/√2): projected tokens then have about the size of tokens.
        self.std = sum(shape[-2:]) ** -0.5 if config.projection_type == "linear" else shape[-1] ** -0.5


def _has_weights(config: LinformerConfig) -> bool:
    return config.projection_type in ("linear", "conv")


class LinformerSelfAttention(EncoderSelfAttention):
    def __init__(self, config: LinformerConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        projected_dim = config.layer_projected_dim(layer_idx)
        self.kernel_size = None
        if config.projection_type != "linear":
            self.kernel_size = -(-config.max_position_embeddings // projected_dim)
        self.key_projection = self.value_projection = None
        if _has_weights(config) and config.share_projection != "layerwise":
            by_head = config.share_projection == "none"
            self.key_projection = SequenceProjection(config, projected_dim, by_head)
            if config.share_projection != "key_value":
                self.value_projection = SequenceProjection(config, projected_dim, by_head)

    def attend(
        self,
        query: Tensor,
        hidden_states: Tensor,
        mask: Tensor | None,
        tokens: Tensor | None,
        shared: Tensor | None,
        output_attentions: bool,
        attention_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        key_projection = shared if self.key_projection is None else self.key_projection.weight
        value_projection = key_projection if self.value_projection is None else self.value_projection.weight
        if self.is_eager:
            # The reference picks the valid tokens of each row by itself.
            hidden_states, tokens = self.in_rows(hidden_states, mask, tokens), None
        arguments = (
            query,
            hidden_states,
            self.key.weight,
            self.value.weight,
            self.key.bias,
            self.value.bias,
            key_projection,
            value_projection,
            mask,
        )
        options = {"projection_type": self.config.projection_type, "kernel_size": self.kernel_size}
        attentions = None
        if output_attentions:
            dropout_p = self.dropout if self.is_eager else 0.0
            attentions = linformer_attention_map(*arguments, rows=attention_rows, dropout_p=dropout_p, **options)
        options |= {"conv_weight": self.conv_weight, "dropout_p": self.dropout}
        if not self.is_eager:
            return linformer_attention(*arguments, tokens=tokens, **options), attentions
        if attentions is None or attention_rows is not None or self.config.projection_type == "max_pool":
            return linformer_attention_reference(*arguments, **options), attentions
        # Through the map that is returned, so that gradients reach it.
        values = split_heads(F.linear(hidden_states, self.value.weight), self.num_heads)
        bias = self.value.bias.view(self.num_heads, 1, -1)
        context = attentions @ values + bias
        if self.conv_weight is not None:
            context = context + depthwise_convolution(values + bias, self.conv_weight, mask)
        return context, attentions


class LinformerStack(EncoderStack):
    def __init__(self, config: LinformerConfig, self_attention_class: type[EncoderSelfAttention]):
        super().__init__(config, self_attention_class)
        self.sequence_projection = None
        if _has_weights(config) and config.share_projection == "layerwise" and config.num_hidden_layers:
            self.sequence_projection = SequenceProjection(config, config.layer_projected_dim(0), by_head=False)

    def shared_inputs(self, mask: Tensor | None, length: int) -> Tensor | None:
        return None if self.sequence_projection is None else self.sequence_projection.weight


class LinformerPreTrainedModel(EncoderPreTrainedModel):
    config: LinformerConfig
    config_class = LinformerConfig
    base_model_prefix = "linformer"
    self_attention_class = LinformerSelfAttention
    stack_class = LinformerStack

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, SequenceProjection):
            init.normal_(module.weight, mean=0.0, std=module.std)


class LinformerModel(EncoderModel, LinformerPreTrainedModel):
    """Linformer encoder, with a pooler over its first token unless `add_pooling_layer=False`."""


LinformerPreTrainedModel.base_model_class = LinformerModel


class LinformerForPreTraining(EncoderForPreTraining, LinformerPreTrainedModel):
    """Linformer with a masked language modelling head and a sentence order head."""


class LinformerForMaskedLM(EncoderForMaskedLM, LinformerPreTrainedModel):
    """Linformer with a masked language modelling head."""


class LinformerForSequenceClassification(EncoderForSequenceClassification, LinformerPreTrainedModel):
    """Linformer with a classification or regression head over its first token."""


class LinformerForTokenClassification(EncoderForTokenClassification, LinformerPreTrainedModel):
    """Linformer with a classification head over every token."""


class LinformerForQuestionAnswering(EncoderForQuestionAnswering, LinformerPreTrainedModel):
    """Linformer with a head for the first and the last token of an answer."""


class LinformerForMultipleChoice(EncoderForMultipleChoice, LinformerPreTrainedModel):
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
