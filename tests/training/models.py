# SPDX-License-Identifier: Apache-2.0
"""Small models, the same in every process."""

import torch

from nystrom_models import (
    LinformerConfig,
    LinformerForPreTraining,
    LinformerForSequenceClassification,
    NystromformerConfig,
    NystromformerForPreTraining,
    NystromformerForSequenceClassification,
)

FAMILIES = ("nystromformer", "linformer")


def tiny_model(family, tokenizer, task="pretraining", **options):
    """One layer of width 32 with 8 landmarks, without dropout."""
    torch.manual_seed(0)
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 64,
        "conv_kernel_size": 3,
        **options,
    }
    if family == "nystromformer":
        config = NystromformerConfig(num_landmarks=8, **common)
        classes = {
            "pretraining": NystromformerForPreTraining,
            "classification": NystromformerForSequenceClassification,
        }
    else:
        config = LinformerConfig(projected_dim=8, **common)
        classes = {"pretraining": LinformerForPreTraining, "classification": LinformerForSequenceClassification}
    return classes[task](config)
