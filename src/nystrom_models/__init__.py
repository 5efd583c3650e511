# SPDX-License-Identifier: Apache-2.0
"""Linear-time attention models for HuggingFace Transformers.

Importing this package registers its families with the Auto classes; `nystromformer` replaces the built-in one. It also
registers `attn_implementation="nystrom"`, for the encoders of Transformers.
"""

from .interface import use_nystrom
from .models.configuration_linear_transformer import LinearTransformerConfig
from .models.configuration_linformer import LinformerConfig
from .models.configuration_nystromformer import NystromformerConfig
from .models.modeling_linear_transformer import (
    LinearTransformerForCausalLM,
    LinearTransformerForMaskedLM,
    LinearTransformerForMultipleChoice,
    LinearTransformerForPreTraining,
    LinearTransformerForQuestionAnswering,
    LinearTransformerForSequenceClassification,
    LinearTransformerForTokenClassification,
    LinearTransformerModel,
    LinearTransformerPreTrainedModel,
)
from .models.modeling_linformer import (
    LinformerForMaskedLM,
    LinformerForMultipleChoice,
    LinformerForPreTraining,
    LinformerForQuestionAnswering,
    LinformerForSequenceClassification,
    LinformerForTokenClassification,
    LinformerModel,
    LinformerPreTrainedModel,
)
from .models.modeling_nystromformer import (
    NystromformerForMaskedLM,
    NystromformerForMultipleChoice,
    NystromformerForPreTraining,
    NystromformerForQuestionAnswering,
    NystromformerForSequenceClassification,
    NystromformerForTokenClassification,
    NystromformerModel,
    NystromformerPreTrainedModel,
)
from .registration import register, unregister

__version__ = "0.1.0"

__all__ = [
    "LinearTransformerConfig",
    "LinearTransformerForCausalLM",
    "LinearTransformerForMaskedLM",
    "LinearTransformerForMultipleChoice",
    "LinearTransformerForPreTraining",
    "LinearTransformerForQuestionAnswering",
    "LinearTransformerForSequenceClassification",
    "LinearTransformerForTokenClassification",
    "LinearTransformerModel",
    "LinearTransformerPreTrainedModel",
    "LinformerConfig",
    "LinformerForMaskedLM",
    "LinformerForMultipleChoice",
    "LinformerForPreTraining",
    "LinformerForQuestionAnswering",
    "LinformerForSequenceClassification",
    "LinformerForTokenClassification",
    "LinformerModel",
    "LinformerPreTrainedModel",
    "NystromformerConfig",
    "NystromformerForMaskedLM",
    "NystromformerForMultipleChoice",
    "NystromformerForPreTraining",
    "NystromformerForQuestionAnswering",
    "NystromformerForSequenceClassification",
    "NystromformerForTokenClassification",
    "NystromformerModel",
    "NystromformerPreTrainedModel",
    "register",
    "unregister",
    "use_nystrom",
]

register()
