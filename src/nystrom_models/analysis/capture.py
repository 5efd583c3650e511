# SPDX-License-Identifier: Apache-2.0
"""The inputs of a model's attention layers, layer by layer while the model runs. No class is changed.

Legend: B batch, H heads, N tokens, D head size, R chosen rows.

Models of this package get hooks on their attention layers. Others run with an attention function that passes its
inputs to the visitor and then computes exact attention; during the call it is registered with Transformers'
`AttentionInterface`, under a unique name.
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

# A function from chosen rows (R,) to the map (B, H, R, N) and the context (B, H, R, D) that the layer computes.
OwnAttention = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass
class LayerAttention:
    """One attention layer in one call of the model.

    name: the name of its module. index: its number among the attention layers, in the order of their calls.
    query, key, value: (B, H, N, D). mask: (B, N) bool, True at valid tokens, or None for all valid.
    scaling: the factor of the scores. is_causal: whether a token sees only itself and previous tokens.
    method: how the layer attends: "softmax", or in the families of this package "nystrom", "linformer" or "linear".
    own: for "linformer" and "linear", what the layer computes, without its convolution. Its argument is the rows that
        are wanted, (R,) int64; the columns of a map are the tokens in the order of `mask` and `key`.
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
    """Runs the model, and calls `visit` with each attention layer when it is called.

    `visit` can measure a layer at once, so that memory holds the tensors of only one layer.

    Args:
        model: one of this package, or one of Transformers whose self-attention goes through `AttentionInterface`.
        inputs: arguments of the model.
        visit: called with a `LayerAttention`.

    Returns: the layers that were left out, by name, with the reason: cross-attention, causal attention of another
    package's model, local windows, biases that are added to the scores.

    Raises:
        ValueError: if all layers were left out, with the reasons.
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
    # Unpadded tokens would have to be padded again for every map.
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
    """A hook that passes a layer of this package to `visit`."""

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
            # Without the order of the batch as given, so that tokens stay in the order of `query`, by rank.
            by_rank = replace(batch, maps=AttentionMaps(rows), order=None, ranks=None, given_mask=batch.mask)
            # Subtracting the convolution from the result would leave the rounding errors of both.
            convolution, module.conv = module.conv, None  # type: ignore[assignment]
            try:
                context = module.attend(hidden_states, by_rank)
            finally:
                module.conv = convolution
            return by_rank.maps.collected[0], context[:, :, rows]

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
