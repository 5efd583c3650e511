# SPDX-License-Identifier: Apache-2.0
"""The state of a recurrent layer in Transformers' own cache, for causal families.

A configuration with `layer_types = ["linear_attention"] * num_hidden_layers` makes `DynamicCache(config=config)` hold
such states.
"""

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache


def _layer(cache: Cache, layer_idx: int) -> Any:
    return cache.layers[layer_idx]


def has_seen_tokens(cache: Cache | None) -> bool:
    """Whether there is a state in the cache."""
    return cache is not None and any(_layer(cache, index).has_previous_state[0] for index in range(len(cache)))


def recurrent_state(cache: Cache | None, layer_idx: int) -> Tensor | None:
    """The state that a layer has left in the cache; None if it has seen no token."""
    if cache is None or not _layer(cache, layer_idx).has_previous_state[0]:
        return None
    return _layer(cache, layer_idx).recurrent_states[0]


def update_recurrent_state(cache: Cache | None, layer_idx: int, state: Tensor) -> None:
    """Keep a layer's state in the cache, if there is one."""
    if cache is not None:
        cache.update_recurrent_state(state, layer_idx)
        # Transformers says so for states of convolutions alone.
        _layer(cache, layer_idx).has_previous_state[0] = True
