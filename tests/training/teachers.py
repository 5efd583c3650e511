# SPDX-License-Identifier: Apache-2.0
"""Small teachers of Transformers' own classes, each with its tokenizer, and models made of them."""

import torch
import transformers

from nystrom_models.conversion import convert_checkpoint, converted_config
from tests.models.options import TINY, enlarge

LENGTH = 30  # the longest row of the teachers
EXACT = {"num_landmarks": None, "conv_kernel_size": None}


def save_teacher(folder, kind, tokenizer, head="ForMaskedLM", **fields):
    """A model with weights large enough that attention matters, saved with the tokenizer."""
    torch.manual_seed(0)
    pad = tokenizer.pad_token_id
    common = TINY | {"vocab_size": len(tokenizer), "pad_token_id": pad, "max_position_embeddings": LENGTH}
    special = {
        "Roberta": {"max_position_embeddings": LENGTH + pad + 1, "type_vocab_size": 1},
        "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "dropout": 0.0},
        "Electra": {"embedding_size": 12},
        "Albert": {"embedding_size": 12, "num_hidden_groups": 2},
        "Linformer": {"projected_dim": 8},
    }.get(kind, {})
    if kind == "DistilBert":
        common = {name: common[name] for name in ("vocab_size", "pad_token_id", "max_position_embeddings")}
        common["attention_dropout"] = 0.0
    config = getattr(transformers, f"{kind}Config", None) or getattr(__import__("nystrom_models"), f"{kind}Config")
    classes = transformers if hasattr(transformers, kind + head) else __import__("nystrom_models")
    model = enlarge(enlarge(getattr(classes, kind + head)(config(**common | special | fields))))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def save_student(folder, source, family="nystromformer", **fields):
    """A model that is converted from a source, with its tokenizer."""
    config = converted_config(source, family, **fields)
    return convert_checkpoint(source, folder, config, head="ForPreTraining")
