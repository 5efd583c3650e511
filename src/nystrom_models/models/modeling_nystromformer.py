# SPDX-License-Identifier: Apache-2.0
"""Nyströmformer models (Xiong et al. 2021, arXiv:2102.03902)."""

from torch import Tensor

from .attention_nystrom import (
    Segments,
    landmark_segments,
    nystrom_attention,
    nystrom_attention_map,
    nystrom_attention_reference,
)
from .attention_ops import depthwise_convolution, is_tracing, split_heads
from .configuration_nystromformer import NystromformerConfig
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


class NystromformerSelfAttention(EncoderSelfAttention):
    def attend(
        self,
        query: Tensor,
        hidden_states: Tensor,
        mask: Tensor | None,
        tokens: Tensor | None,
        shared: Segments | None,
        output_attentions: bool,
        attention_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        key = split_heads(self.in_rows(self.key(hidden_states), mask, tokens), self.num_heads)
        value = split_heads(self.in_rows(self.value(hidden_states), mask, tokens), self.num_heads)
        options = {"num_landmarks": self.config.num_landmarks, "pinv_iterations": self.config.pinv_iterations}
        attentions = None
        if output_attentions:
            dropout_p = self.dropout if self.is_eager else 0.0
            attentions = nystrom_attention_map(query, key, mask, rows=attention_rows, dropout_p=dropout_p, **options)
        options |= {"conv_weight": self.conv_weight, "dropout_p": self.dropout}
        if not self.is_eager:
            return nystrom_attention(query, key, value, mask, segments=shared, **options), attentions
        if attentions is None or attention_rows is not None:
            return nystrom_attention_reference(query, key, value, mask, **options), attentions
        # Through the map that is returned, so that gradients reach it.
        context = attentions @ value
        if self.conv_weight is not None:
            context = context + depthwise_convolution(value, self.conv_weight, mask)
        return context, attentions


class NystromformerStack(EncoderStack):
    def shared_inputs(self, mask: Tensor | None, length: int) -> Segments | None:
        landmarks = self.config.num_landmarks
        if mask is None or landmarks is None or (not is_tracing() and length <= landmarks):
            return None
        return landmark_segments(mask, landmarks)


class NystromformerPreTrainedModel(EncoderPreTrainedModel):
    config: NystromformerConfig
    config_class = NystromformerConfig
    base_model_prefix = "nystromformer"
    self_attention_class = NystromformerSelfAttention
    stack_class = NystromformerStack


class NystromformerModel(EncoderModel, NystromformerPreTrainedModel):
    """Nyströmformer encoder, with a pooler over its first token unless `add_pooling_layer=False`."""


NystromformerPreTrainedModel.base_model_class = NystromformerModel


class NystromformerForPreTraining(EncoderForPreTraining, NystromformerPreTrainedModel):
    """Nyströmformer with a masked language modelling head and a sentence order head."""


class NystromformerForMaskedLM(EncoderForMaskedLM, NystromformerPreTrainedModel):
    """Nyströmformer with a masked language modelling head."""


class NystromformerForSequenceClassification(EncoderForSequenceClassification, NystromformerPreTrainedModel):
    """Nyströmformer with a classification or regression head over its first token."""


class NystromformerForTokenClassification(EncoderForTokenClassification, NystromformerPreTrainedModel):
    """Nyströmformer with a classification head over every token."""


class NystromformerForQuestionAnswering(EncoderForQuestionAnswering, NystromformerPreTrainedModel):
    """Nyströmformer with a head for the first and the last token of an answer."""


class NystromformerForMultipleChoice(EncoderForMultipleChoice, NystromformerPreTrainedModel):
    """Nyströmformer with a head that scores each of several choices."""


__all__ = [
    "NystromformerForMaskedLM",
    "NystromformerForMultipleChoice",
    "NystromformerForPreTraining",
    "NystromformerForQuestionAnswering",
    "NystromformerForSequenceClassification",
    "NystromformerForTokenClassification",
    "NystromformerModel",
    "NystromformerPreTrainedModel",
]
