# SPDX-License-Identifier: Apache-2.0
"""Registers the families with the Auto classes of Transformers, and the kernels with the attention they compute."""

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from .kernels import nystrom_attention_if_possible
from .models import attention_nystrom, modeling_linformer, modeling_nystromformer
from .models.configuration_linformer import LinformerConfig
from .models.configuration_nystromformer import NystromformerConfig
from .models.encoder import AUTO_CLASSES

FAMILIES = (
    (NystromformerConfig, modeling_nystromformer),
    (LinformerConfig, modeling_linformer),
)


def register() -> None:
    """Make every Auto class give this package's classes, also for the built-in `nystromformer`, process-wide.

    Nyström attention then uses the Triton kernels where they apply.
    """
    attention_nystrom.fast_kernels = nystrom_attention_if_possible
    for config_class, module in FAMILIES:
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        config_class.register_for_auto_class()
        AutoTokenizer.register(config_class, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)
        family = config_class.__name__.removesuffix("Config")
        for auto_name, ending in AUTO_CLASSES.items():
            model_class = getattr(module, family + ending)
            getattr(transformers, auto_name).register(config_class, model_class, exist_ok=True)
            # Its saved checkpoints then carry their code; the first Auto class of a model is the general one.
            if model_class._auto_class is None:
                model_class.register_for_auto_class(auto_name)
