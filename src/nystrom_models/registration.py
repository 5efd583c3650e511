# SPDX-License-Identifier: Apache-2.0
"""Registers the families with the Auto classes of Transformers, and attention functions by their names."""

import transformers
from transformers import AttentionInterface, AttentionMaskInterface, AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from .interface.attention import nystrom_attention_forward
from .interface.masks import nystrom_mask
from .interface.settings import IMPLEMENTATION
from .kernels.interface import LinearTriton, NystromTriton
from .models.modeling_base import BasePreTrainedModel
from .models.modeling_linear_transformer import LinearTransformerPreTrainedModel
from .models.modeling_linformer import LinformerPreTrainedModel
from .models.modeling_nystromformer import NystromformerPreTrainedModel

FAMILIES: tuple[type[BasePreTrainedModel], ...] = (
    NystromformerPreTrainedModel,
    LinformerPreTrainedModel,
    LinearTransformerPreTrainedModel,
)


def register() -> None:
    """Make every Auto class give this package's classes, also for the built-in `nystromformer`, process-wide.

    Importing the package does this. It also registers `attn_implementation="nystrom_triton"` and `"linear_triton"`,
    and `"nystrom"` for other encoders of Transformers.
    """
    AttentionInterface.register(IMPLEMENTATION, nystrom_attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, nystrom_mask)
    for attention in (NystromTriton(), LinearTriton()):
        AttentionInterface.register(attention.name, attention)
    for family in FAMILIES:
        config_class = family.config_class
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        config_class.register_for_auto_class()
        AutoTokenizer.register(config_class, tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
        for auto_name, model_class in family.auto_classes.items():
            getattr(transformers, auto_name).register(config_class, model_class, exist_ok=True)
            # Its saved checkpoints then contain their code; the first Auto class of a model is the general one.
            if model_class._auto_class is None:
                model_class.register_for_auto_class(auto_name)


def unregister() -> None:
    """Undo `register`: the Auto classes give Transformers' own Nyströmformer again, and no other family of ours.

    Existing models, the classes of this package by name and its kernels continue to work. `register()` undoes this.
    """
    for family in FAMILIES:
        config_class = family.config_class
        CONFIG_MAPPING._extra_content.pop(config_class.model_type, None)
        TOKENIZER_MAPPING._extra_content.pop(config_class, None)
        for auto_name in family.auto_classes:
            getattr(transformers, auto_name)._model_mapping._extra_content.pop(config_class, None)
