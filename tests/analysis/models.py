# SPDX-License-Identifier: Apache-2.0
"""Tiny models to inspect."""

import torch
import transformers

import nystrom_models
from tests.models.options import TINY

# Fields that an architecture needs besides TINY's; a field of None is removed.
FIELDS = {
    "Bert": {},
    "Roberta": {"pad_token_id": 1, "max_position_embeddings": 66},
    "DistilBert": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4, "vocab_size": 99, "dropout": 0.0},
    "Albert": {"embedding_size": 16},
    "Esm": {
        "position_embedding_type": "rotary",
        "pad_token_id": 1,
        "mask_token_id": 2,
        "emb_layer_norm_before": False,
    },
    "ModernBert": {"local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0},
}


def make_model(family, head="Model", **fields):
    """A model with larger weights than usual, so that its attention is not uniform."""
    torch.manual_seed(0)
    known = FIELDS.get(family, {})
    common = {} if family == "DistilBert" else TINY
    source = nystrom_models if hasattr(nystrom_models, family + "Config") else transformers
    if source is transformers:
        common = {name: value for name, value in common.items() if "dropout" not in name}
    config = getattr(source, family + "Config")(**common | known | fields)
    model = getattr(source, family + head)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    return model


def padded_batch(lengths, side="right", vocab_size=99):
    """Rows of random tokens, padded with a token that no row contains."""
    longest = max(lengths)
    ids, mask = torch.full((len(lengths), longest), 1), torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        place = slice(length) if side == "right" else slice(longest - length, None)
        ids[row, place] = torch.randint(3, vocab_size, (length,), generator=torch.Generator().manual_seed(row))
        mask[row, place] = 1
    return {"input_ids": ids, "attention_mask": mask}
