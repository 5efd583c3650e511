# SPDX-License-Identifier: Apache-2.0
"""What the attention layers of a model get, layer by layer while the model runs. No class is changed.

Legend: B batch, H heads, N tokens, D head size, R chosen rows.

Models of this package are watched by hooks on their attention layers. Others are run with an attention function that
shows its inputs to the visitor and then computes exact attention; it is registered with Transformers'
`AttentionInterface` for the time of the call, under a name of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..interface.attention import repeated_groups
from ..models.batch import AttentionMaps
from ..models.modeling_base import BasePreTrainedModel
from ..models.self_attention import SelfAttention
from .substitution import attending_by, key_mask

# The map (B, H, R, N) and the context (B, H, R, D) that a layer itself computes for chosen rows.
OwnAttention = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass
class LayerAttention:
    """One attention layer in one call of the model.

    name: of its module. index: its place among the attention layers, in the order in which they are called.
    query, key, value: (B, H, N, D). mask: (B, N) bool, True at valid tokens, or None for all valid.
    scaling: what the scores are multiplied by. is_causal: whether a token sees those before it alone.
    method: how the layer attends: "softmax", or in the families of this package "nystrom", "linformer" or "linear".
    own: for "linformer" and "linear", what the layer computes, without its convolution. Its argument are the tokens
        whose rows are wanted, (R,) int64; a map's columns are tokens where `mask` and `key` have them.
    """

    name: str
    index: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float
    is_causal: bool = False
    method: str = "softmax"
    own: OwnAttention | None = None


Visit = Callable[[LayerAttention], None]


@torch.no_grad()
def visit_attention(model: PreTrainedModel, inputs: Mapping[str, Tensor], visit: Visit) -> dict[str, str]:
    """Runs the model, and shows each attention layer to `visit` as it is reached.

    What a layer showed may be measured at once and let go: no more than one layer's tensors are held.

    Args:
        model: one of this package's, or any of Transformers' whose self-attention goes through `AttentionInterface`.
        inputs: what it is called with.
        visit: called with a `LayerAttention`.

    Returns: the layers that were left out, by name, with the reason: cross-attention, causal attention of another
    package's model, local windows, biases that are added to the scores.

    Raises:
        ValueError: if no layer could be shown, with the reasons.
    """
    was_training = model.training
    model.eval()
    try:
        if isinstance(model, BasePreTrainedModel):
            skipped: dict[str, str] = {}
            count = _run_own(model, inputs, visit)
        else:
            count, skipped = _run_through_interface(model, inputs, visit)
    finally:
        model.train(was_training)
    if not count:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in list(skipped.items())[:3])
        raise ValueError(
            f"No attention of {type(model).__name__} can be inspected: "
            f"{reasons or 'none of it goes through the AttentionInterface of Transformers'}."
        )
    return skipped


# ---- models of this package ----

_METHODS = {"nystromformer": "nystrom", "linformer": "linformer", "linear_transformer": "linear"}


def _run_own(model: BasePreTrainedModel, inputs: Mapping[str, Tensor], visit: Visit) -> int:
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, SelfAttention)]
    # Packed tokens would have to be brought into rows for every map.
    unpad_inputs, model.config.unpad_inputs = model.config.unpad_inputs, False
    handles = [
        module.register_forward_pre_hook(_shows(name, index, visit)) for index, (name, module) in enumerate(layers)
    ]
    options = {"use_cache": False} if model.config.is_decoder else {}
    try:
        model.base_model(**inputs, **options)
    finally:
        model.config.unpad_inputs = unpad_inputs
        for handle in handles:
            handle.remove()
    return len(layers)


def _shows(name: str, index: int, visit: Visit) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    """A hook that shows a layer of this package."""

    def show(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        assert isinstance(module, SelfAttention)
        hidden_states, batch = arguments
        batch = batch.to(hidden_states.device)
        query, key, value = (
            module.in_heads(linear(hidden_states), batch) for linear in (module.query, module.key, module.value)
        )
        config = module.config
        method = _METHODS[config.model_type]
        exact = config.num_landmarks is None if method == "nystrom" else getattr(config, "feature_map", "") is None
        if exact and not config.is_decoder:
            method = "softmax"

        def own(rows: Tensor) -> tuple[Tensor, Tensor]:
            # Without the order of the batch as given, so that tokens stay by rank, as they are in `query`.
            by_rank = replace(batch, maps=AttentionMaps(rows), order=None, ranks=None, given_mask=batch.mask)
            context = module.attend(hidden_states, by_rank)
            skip = module.convolve(value, batch)
            return by_rank.maps.collected[0], (context if skip is None else context - skip)[:, :, rows]

        visit(
            LayerAttention(
                name,
                index,
                query,
                key,
                value,
                batch.mask,
                query.shape[-1] ** -0.5,
                is_causal=config.is_decoder,
                method=method,
                own=own if method in ("linformer", "linear") else None,
            )
        )

    return show


# ---- any model, through AttentionInterface ----


def _run_through_interface(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], visit: Visit
) -> tuple[int, dict[str, str]]:
    names = {id(module): name for name, module in model.named_modules()}
    skipped: dict[str, str] = {}
    count = 0

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        nonlocal count
        name = names.get(id(module), type(module).__name__)
        mask, reason = key_mask(module, query, key, attention_mask, kwargs)
        if reason is not None:
            skipped[name] = reason
        else:
            scaling = kwargs.get("scaling")
            visit(
                LayerAttention(
                    name,
                    count,
                    query,
                    *repeated_groups(query, key, value),
                    mask,
                    query.shape[-1] ** -0.5 if scaling is None else scaling,
                )
            )
            count += 1
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    with attending_by(model, attention):
        model(**inputs)
    return count, skipped
