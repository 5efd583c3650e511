# SPDX-License-Identifier: Apache-2.0
"""Less memory traffic on a CPU, for calls without gradients. Nothing here changes a result.

Large tensors are computed in blocks of tokens, which stay in the caches and reuse each other's memory. Results
overwrite an input that is not needed any more, because the system provides new memory slowly, page by page.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from .tracing import can_read_values

BLOCK_TOKENS = 1024


def has_hooks(module: nn.Module) -> bool:
    """Whether hooks could keep tensors of this module or its parts, or Accelerate loads weights at each call."""
    return _has_any_global_hook() or any(
        part._forward_hooks or part._forward_pre_hooks or hasattr(part, "_hf_hook") for part in module.modules()
    )


def pays_in_blocks(states: Tensor, module: nn.Module) -> bool:
    """Whether `overwrite_in_blocks` is allowed for states (..., C) with a function of this module, and saves time."""
    # With dropout, a checkpointed layer must draw the same numbers when it is computed again, with gradients.
    if torch.is_grad_enabled() or module.training or states.device.type != "cpu":
        return False
    return can_read_values(states) and states.shape[:-1].numel() > BLOCK_TOKENS and not has_hooks(module)


def overwrite_in_blocks(function: Callable[..., Tensor], states: Tensor, *others: Tensor) -> Tensor:
    """function(states, *others), token by token, written over the states (B, N, C)."""
    tokens = [tensor.flatten(0, 1).split(BLOCK_TOKENS) for tensor in (states, *others)]
    for block, *rest in zip(*tokens, strict=True):
        block.copy_(function(block[None], *(part[None] for part in rest))[0])
    return states


def add_attention(
    attend: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    sums: Tensor,
) -> Tensor:
    """sums + attend(query, key, value, key_mask), written over the sums.

    query, sums: (B, H, N, D). key, value: (B, H, K, D). key_mask: (B, 1, 1, K) or None.
    """
    length = max(1, query.shape[2])
    rows, tokens = max(1, BLOCK_TOKENS // length), min(BLOCK_TOKENS, length)
    for row in range(0, query.shape[0], rows):
        part = slice(row, row + rows)
        mask = None if key_mask is None else key_mask[part]
        for queries, result in zip(query[part].split(tokens, 2), sums[part].split(tokens, 2), strict=True):
            result += attend(queries, key[part], value[part], mask)
    return sums
