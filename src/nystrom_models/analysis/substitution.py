# SPDX-License-Identifier: Apache-2.0
"""Temporarily replaces the attention of a model of Transformers by another function.

Legend: B batch, H heads, N tokens, D head size.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.masking_utils import sdpa_mask

from ..interface.attention import CHANGES
from ..interface.masks import ADDED_SCORES, BY_PAIR, key_mask_of

_numbers = itertools.count()
# Errors whose advice does not apply here, and the reasons that are given instead.
_REASONS = {
    BY_PAIR: "its mask differs between tokens or heads",
    ADDED_SCORES: "a bias is added to its scores",
}


@contextmanager
def attending_by(model: PreTrainedModel, attention: Callable[..., Any]) -> Iterator[None]:
    """Within the context, all attention of the model that goes through `AttentionInterface` is computed by
    `attention`.

    The function is registered under a unique name, with the masks of "sdpa", and all parts of the model get this name.
    Afterwards all is restored.

    attention: a function with the arguments of `sdpa_attention_forward`.
    """
    name = f"nystrom_models_analysis_{next(_numbers)}"
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(config): config for config in found if isinstance(config, PreTrainedConfig)}
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, sdpa_mask)
    try:
        for config, _ in before:
            # The setter of a configuration would also set the name of its parts, which another model may share.
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(name)


def key_mask(
    module: nn.Module, query: Tensor, key: Tensor, mask: Tensor | None, options: Mapping[str, Any]
) -> tuple[Tensor | None, str | None]:
    """The valid keys, (B, N) bool or None for all; and why the layer has no such mask, if it has none."""
    if query.shape[2] != key.shape[2]:
        return None, "it attends to other tokens than its own (cross-attention)"
    causal = options.get("is_causal")
    # The same rule as in "sdpa".
    if (getattr(module, "is_causal", mask is None) if causal is None else causal) and query.shape[2] > 1:
        return None, "it is causal"
    if options.get("sliding_window") is not None:
        return None, "it sees a local window, which is linear already"
    for name, what in CHANGES.items():
        if options.get(name) is not None and options[name] is not False:
            return None, f"it is given {name}, {what}"
    if mask is None:
        return None, None
    try:
        # On the CPU, because on a GPU a failed check of the mask would end the program.
        keys = key_mask_of(mask.cpu(), query.shape[0], query.shape[2], key.shape[2])
    except ValueError as error:
        return None, _REASONS.get(str(error), str(error))
    assert keys is not None
    return keys.to(query.device), None
