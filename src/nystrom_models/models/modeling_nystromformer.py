# SPDX-License-Identifier: Apache-2.0
"""Nyströmformer models (Xiong et al. 2021, arXiv:2102.03902)."""

from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_tracing

from .attention_nystrom import Segments, landmark_segments, nystrom_attention, nystrom_attention_map
from .batch import Batch
from .configuration_nystromformer import NystromformerConfig
from .layers import LayerStack
from .modeling_base import BaseModel, BasePreTrainedModel
from .pretraining_heads import BaseForMaskedLM, BaseForPreTraining
from .self_attention import SelfAttention
from .task_heads import (
    BaseForMultipleChoice,
    BaseForQuestionAnswering,
    BaseForSequenceClassification,
    BaseForTokenClassification,
)

# The `attn_implementation` that computes all of the attention in Triton kernels, where the package is installed.
KERNELS = "nystrom_triton"


class NystromformerSelfAttention(SelfAttention):
    """Nyström attention of a layer, with its convolution."""

    def attend(self, hidden_states: Tensor, batch: Batch) -> Tensor:
        query, key, value = (
            self.in_heads(project(hidden_states), batch) for project in (self.query, self.key, self.value)
        )
        landmarks = self.config.layer_num_landmarks(self.layer_idx)
        options = {
            "num_landmarks": landmarks,
            "pinv_iterations": self.config.pinv_iterations,
            "segments": batch.plan.get(landmarks),
        }
        if batch.maps is not None:
            dropout_p = self.dropout if self.is_eager else 0.0
            attention_map = batch.record(
                nystrom_attention_map(query, key, batch.mask, rows=batch.maps.rows, dropout_p=dropout_p, **options)
            )
            if self.is_eager and batch.maps.rows is None:
                # The context is computed from the map that is returned, so that gradients reach the map.
                skip = self.convolve(value, batch)
                return attention_map @ value if skip is None else attention_map @ value + skip
        options["dropout_p"] = self.dropout
        if self.config._attn_implementation == KERNELS:
            value = self.without_padding(value, batch)
            context, _ = ALL_ATTENTION_FUNCTIONS[KERNELS](self, query, key, value, batch.mask, **options)
            return context.transpose(1, 2)
        skip = self.convolve(value, batch)
        return nystrom_attention(query, key, value, batch.mask, skip=skip, attend=self.softmax_attention, **options)


class NystromformerStack(LayerStack):
    """Layers that share the positions of the landmarks' segments."""

    def plan(self, batch: Batch) -> dict[int, Segments]:
        """The segments of padded rows, by the number of landmarks; numbers that give exact attention are left out."""
        self.config.validate_numbers()
        if batch.mask is None:
            return {}
        numbers = {number for number in self.config.landmarks_by_layer if number is not None}
        if not is_tracing(batch.mask):
            numbers = {number for number in numbers if number < batch.rows[1]}
        return {number: landmark_segments(batch.mask, number) for number in sorted(numbers)}


class NystromformerPreTrainedModel(BasePreTrainedModel):
    """The base of all Nyströmformers: configuration, initialisation, loading and saving."""

    config: NystromformerConfig
    config_class = NystromformerConfig
    base_model_prefix = "nystromformer"
    self_attention_class = NystromformerSelfAttention
    stack_class = NystromformerStack
    kernels = KERNELS


class NystromformerModel(BaseModel, NystromformerPreTrainedModel):
    """Nyströmformer encoder, with a pooler over its first token unless `add_pooling_layer=False`."""


class NystromformerForPreTraining(BaseForPreTraining, NystromformerPreTrainedModel):
    """Nyströmformer with a masked language modelling head and a sentence order head."""


class NystromformerForMaskedLM(BaseForMaskedLM, NystromformerPreTrainedModel):
    """Nyströmformer with a masked language modelling head."""


class NystromformerForSequenceClassification(BaseForSequenceClassification, NystromformerPreTrainedModel):
    """Nyströmformer with a classification or regression head over its pooled state (`classifier_pooling`)."""


class NystromformerForTokenClassification(BaseForTokenClassification, NystromformerPreTrainedModel):
    """Nyströmformer with a classification head over every token."""


class NystromformerForQuestionAnswering(BaseForQuestionAnswering, NystromformerPreTrainedModel):
    """Nyströmformer with a head for the first and the last token of an answer."""


class NystromformerForMultipleChoice(BaseForMultipleChoice, NystromformerPreTrainedModel):
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
