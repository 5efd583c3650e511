# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints of every kind that can be converted, with weights large enough that attention matters."""

import torch
import transformers

from tests.models.options import SHARED_HEADS, TINY, enlarge

LENGTH = 40  # the longest sequence of the sources
EXACT = {"num_landmarks": None, "conv_kernel_size": None}
_ROBERTA = {"max_position_embeddings": LENGTH + 2, "type_vocab_size": 1}
FIELDS = {
    "Bert": {"max_position_embeddings": LENGTH},
    "Roberta": _ROBERTA,
    "XLMRoberta": _ROBERTA,
    "Camembert": _ROBERTA,
    "DistilBert": {
        "max_position_embeddings": LENGTH,
        "vocab_size": 99,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 48,
        "dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "Electra": {"max_position_embeddings": LENGTH, "embedding_size": 12},
    "Albert": {
        "max_position_embeddings": LENGTH,
        "embedding_size": 12,
        "num_hidden_layers": 4,
        "num_hidden_groups": 2,
        "hidden_act": "relu",
    },
}
# For each kind, the heads that have a counterpart in this package.
KINDS_AND_HEADS = [(kind, head) for kind in FIELDS for head in SHARED_HEADS]
KINDS_AND_HEADS += [("Bert", "ForPreTraining"), ("Albert", "ForPreTraining")]


def save_source(folder, kind, head, **fields):
    """Saves a model of Transformers' own class."""
    basic = {} if kind == "DistilBert" else TINY
    config = getattr(transformers, kind + "Config")(**basic | FIELDS[kind] | fields)
    model = enlarge(getattr(transformers, kind + head)(config))
    model.save_pretrained(folder)
    return model


def ragged_batch(side="right", head="Model"):
    """Two rows of 37 and 23 tokens of type 0, padded with a token of id 1 that no row holds; and the mask. For choices
    two of them."""
    ids, mask = torch.randint(3, 99, (2, 37)), torch.ones(2, 37, dtype=torch.long)
    padding = slice(23, None) if side == "right" else slice(None, 14)
    ids[1, padding], mask[1, padding] = 1, 0
    return (ids[None], mask[None]) if head == "ForMultipleChoice" else (ids, mask)


def predictions(outputs, mask):
    """What a head returns, at valid tokens where it is by token; one tensor."""
    if "start_logits" in outputs:
        # The source's outputs are not masked at padding.
        return torch.stack([outputs["start_logits"], outputs["end_logits"]], dim=-1)[mask.bool()]
    for name in ("last_hidden_state", "prediction_logits", "logits"):
        if name in outputs:
            found = outputs[name]
            return found[mask.bool()] if found.dim() == 3 else found
    raise KeyError(list(outputs))
