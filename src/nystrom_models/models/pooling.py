# SPDX-License-Identifier: Apache-2.0
"""One state for a row of tokens.

Legend: B batch, N tokens, C hidden size.
"""

import torch
from torch import Tensor
from transformers.utils.import_utils import is_tracing


def pool(hidden_states: Tensor, attention_mask: Tensor | None, pooling: str) -> Tensor:
    """(B, C) of states (B, N, C).

    Args:
        attention_mask: (B, N), not 0 at valid tokens, wherever they lie; None for all valid. It may begin with the
            columns of earlier tokens, which are in a cache.
        pooling: "first" or "last": the state of that valid token; "mean": the mean over the valid tokens. A row
            without a valid token gives its first or last state, or zero for the mean. A row of length 0 gives zero.
    """
    length = hidden_states.shape[1]
    if not is_tracing(hidden_states) and length == 0:
        return hidden_states.sum(dim=1)
    mask = None if attention_mask is None else (attention_mask[:, -length:] != 0).to(hidden_states.device)
    if pooling == "mean":
        # In float32 at least: a sum over thousands of tokens may leave the range of float16, and their number needs
        # more digits than bfloat16 has.
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        if mask is None:
            return hidden_states.mean(dim=1, dtype=dtype).to(hidden_states.dtype)
        total = hidden_states.masked_fill(~mask[..., None], 0).sum(dim=1, dtype=dtype)
        return (total / mask.sum(dim=1, keepdim=True).clamp_min(1)).to(hidden_states.dtype)
    if mask is None:
        return hidden_states[:, 0] if pooling == "first" else hidden_states[:, -1]
    index = mask.long().argmax(dim=-1) if pooling == "first" else length - 1 - mask.flip(1).long().argmax(dim=-1)
    # Not by indexing, whose gradient sorts the indices on a GPU.
    return hidden_states.gather(1, index[:, None, None].expand(-1, 1, hidden_states.shape[2])).squeeze(1)
