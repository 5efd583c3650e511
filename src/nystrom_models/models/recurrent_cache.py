# SPDX-License-Identifier: Apache-2.0
"""The states of recurrent layers in Transformers' own cache, for causal families.

`DynamicCache(config=config)` and `StaticCache` make room for such states because the configuration has `layer_types`
and `number_of_conv_states`. The size of the states does not depend on the number of tokens seen.

States carry no gradient: a backward pass ends at the tokens of its own call.

Legend: B batch, N tokens of a call.
"""

from dataclasses import fields
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin
from transformers.modeling_outputs import BaseModelOutputWithPast

# The name of the cache among arguments and outputs. Transformers 5.24 changed it from "past_key_values" to "cache".
CACHE = next(field.name for field in fields(BaseModelOutputWithPast) if field.name in ("cache", "past_key_values"))


class State(IntEnum):
    """What the cache keeps for a layer; the values are the cache's numbers for the states."""

    ATTENTION = 0  # its sums
    CONVOLUTION = 1  # the last values, which its convolution still needs
    TOKENS = 2  # (B, 2) int64, in the first layer alone: valid tokens seen, and columns of their batches


def read_state(cache: Cache | None, layer_idx: int, state: State) -> Tensor | None:
    """A layer's state in the cache; None if the layer has seen no token."""
    if cache is None:
        return None
    layer: Any = cache.layers[layer_idx]
    if not layer.has_previous_state[state]:
        return None
    kept = layer.recurrent_states[state]
    # The cache will be overwritten, but a backward pass needs the old values.
    return kept.clone() if torch.is_grad_enabled() else kept


def write_state(cache: Cache | None, layer_idx: int, state: State, value: Tensor) -> None:
    """Keep a layer's state in the cache, if there is one."""
    if cache is None:
        return
    layer: Any = cache.layers[layer_idx]
    if layer.device is None:
        # Transformers sets both only when it writes states of convolutions.
        layer.device, layer.dtype = value.device, value.dtype
    layer.has_previous_state[state] = True
    cache.update_recurrent_state(value.detach(), layer_idx, int(state))


def given_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """The cache of a call, by either of its names. Raises ValueError if both are given."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of the same argument: give one of them.")
    return past_key_values if cache is None else cache


def columns_seen(cache: Cache | None) -> int:
    """Columns of the batches that the cache has seen, padding included. On a GPU the host waits for the number."""
    tokens = read_state(cache, 0, State.TOKENS)
    return 0 if tokens is None else int(tokens[0, 1])


def add_tokens(cache: Cache, mask: Tensor | None, shape: tuple[int, int], device: torch.device) -> None:
    """Count the tokens of a call with rows of `shape`: the valid ones of a mask (B, N), or all if the mask is None."""
    batch, length = shape
    columns = torch.full((batch,), length, device=device)
    added = torch.stack([columns if mask is None else mask.sum(dim=-1), columns], dim=1)
    before = read_state(cache, 0, State.TOKENS)
    write_state(cache, 0, State.TOKENS, added if before is None else before + added)


def require_recurrent(cache: Cache, num_layers: int, name: str) -> None:
    """Raises ValueError for a cache that cannot hold the states of the model called `name`."""
    layers = getattr(cache, "layers", ())
    fits = len(layers) == num_layers and all(
        isinstance(layer, LinearAttentionCacheLayerMixin) and layer.number_of_states >= len(State) for layer in layers
    )
    if not fits:
        raise ValueError(
            f"{CACHE} cannot hold the recurrent states of {name}: leave it out with use_cache=True, or "
            "create it by DynamicCache(config=model.config). PEFT's prefix tuning gives another one: use prompt "
            "tuning or LoRA."
        )
