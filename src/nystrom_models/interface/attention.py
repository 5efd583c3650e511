# SPDX-License-Identifier: Apache-2.0
"""The attention function that Transformers calls for `attn_implementation="nystrom"`.

Legend: B batch, H heads, G heads of keys and values, N queries, K keys, D head size.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import _active_collector

from ..kernels import nystrom_attention_if_possible
from ..models.attention_nystrom import (
    is_exact,
    nystrom_attention,
    nystrom_attention_map,
    nystrom_cross_attention,
    nystrom_cross_attention_map,
    scaled_query,
)
from ..models.masked_attention import attention_weights
from ..models.self_attention import SelfAttention
from .masks import key_mask_of, segments_of
from .settings import IMPLEMENTATION, settings_of

# Arguments by which models of Transformers change their attention, and their meaning.
CHANGES = {
    "position_bias": "a bias for each pair of tokens",
    "attention_bias": "a bias for each pair of tokens",
    "alibi": "a bias for each pair of tokens",
    "softcap": "a cap on the scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "head_mask": "a factor for each head",
    "indices": "a choice of keys for each query",
    "block_indices": "a choice of keys for each query",
    "cu_seq_lens_q": "several texts in one row",
    "cu_seq_lens_k": "several texts in one row",
    "cu_seqlens": "several texts in one row",
    "seq_idx": "several texts in one row",
    "cache": "a paged cache",
}
# Tensors that attention functions are given but do not use.
HARMLESS = ("position_ids", "position_embeddings", "cache_position", "num_items_in_batch", "labels", "token_type_ids")


def nystrom_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    output_attentions: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """With the signature of Transformers' `AttentionInterface`, for self- and cross-attention to the whole row.

    Rows of at most `num_landmarks` tokens get exact attention; in cross-attention, rows with at most that many queries
    or keys. Layers that the settings leave out and layers with a sliding window keep the attention of `sdpa`.

    Args:
        module: the attention layer. Its configuration has the settings, see `settings.use_nystrom`.
        query: (B, H, N, D). key, value: (B, G, K, D), with H a multiple of G.
        attention_mask: which keys are visible, see `masks.key_mask_of`. In self-attention, hidden keys are left out of
            the landmarks of queries, too.
        dropout: probability of dropping an entry of F = softmax(q k~ᵀ · scaling).
        scaling: factor of the scores, 1 / √D by default.
        is_causal: must be False for more than one query; None for the module's `is_causal`.
        sliding_window: tokens that a query sees; None for all.
        output_attentions: whether the map is returned, without dropout. Outside graphs it is also returned if the
            model collects maps without telling its layers.
        options: further arguments that Transformers passes to attention functions.

    Returns: context (B, N, H, D), and the attention map (B, H, N, K) if it is wanted.

    Raises ValueError for causal attention, biases of the scores, masks that differ between queries, and other
    arguments that change the attention.
    """
    if isinstance(module, SelfAttention):
        raise ValueError(
            f'attn_implementation="{IMPLEMENTATION}" is for other encoders: {type(module).__name__} already is linear '
            'in the length. Use "sdpa".'
        )
    output_attentions = bool(output_attentions) or _collects_maps(query)
    settings = settings_of(module)
    if settings is None or sliding_window is not None:
        exact = (attention_mask, dropout, scaling, is_causal)
        return _exact_attention(module, query, key, value, *exact, output_attentions, **options)

    _reject_changes(module, options)
    _reject_causal(module, query, attention_mask, is_causal)
    if query.shape[0] == 1 and key.shape[0] != 1:
        query = query.expand(key.shape[0], -1, -1, -1)
    query, key, value = scaled_query(query, scaling), *repeated_groups(query, key, value)
    mask = key_mask_of(attention_mask, query.shape[0], query.shape[2], key.shape[2])
    _reject_decoder(module, query, key, settings.num_landmarks)
    # With as many queries as keys, a layer may still attend to another sequence; exact attention is the same for both.
    crosses = query.shape[2] != key.shape[2] or _is_cross_attention(module)
    if not crosses and not is_exact(query, settings.num_landmarks):
        segments = None if attention_mask is None or mask is None else segments_of(attention_mask, mask, settings)
        context = _self_attention(query, key, value, mask, dropout_p=dropout, segments=segments, **settings._asdict())
        to_map: Callable[..., Tensor] = functools.partial(nystrom_attention_map, segments=segments)
    else:
        context = nystrom_cross_attention(query, key, value, mask, dropout_p=dropout, **settings._asdict())
        to_map = nystrom_cross_attention_map
    weights = to_map(query, key, mask, **settings._asdict()) if output_attentions else None
    return context.transpose(1, 2).contiguous(), weights


def _is_cross_attention(module: nn.Module) -> bool:
    """Whether a layer attends to another sequence, as its attribute or its class says. Transformers has no rule."""
    return bool(getattr(module, "is_cross_attention", False)) or "crossattention" in type(module).__name__.lower()


def repeated_groups(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values (B, G, K, D) repeated for every head of a group: (B, H, K, D)."""
    groups = query.shape[1] // key.shape[1]
    return repeat_kv(key, groups), repeat_kv(value, groups)


def _self_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """`nystrom_attention`, by the Triton kernels where they apply."""
    context = None
    if value.shape == query.shape:
        context = nystrom_attention_if_possible(query, key, value, mask, **options)
    return nystrom_attention(query, key, value, mask, **options) if context is None else context


def _collects_maps(query: Tensor) -> bool:
    """Whether a model of Transformers is collecting the attention maps of its layers in the current call."""
    if is_tracing(query):
        return False
    collected = _active_collector.get()
    return collected is not None and any(name.endswith("attentions") for name in collected)


def _reject_changes(module: nn.Module, options: dict[str, Any]) -> None:
    """Raises ValueError for arguments that change the attention, and for tensors that may."""
    for name, value in options.items():
        if value is None or value is False:
            continue
        if name in CHANGES:
            raise ValueError(
                f"{type(module).__name__} gives its attention {name}, {CHANGES[name]}, which "
                f'attn_implementation="{IMPLEMENTATION}" does not support: use "sdpa" or "eager".'
            )
        if isinstance(value, Tensor) and name not in HARMLESS:
            raise ValueError(
                f"{type(module).__name__} gives its attention the tensor {name}, which "
                f'attn_implementation="{IMPLEMENTATION}" does not know: leave it out, or use "sdpa".'
            )


def _reject_causal(module: nn.Module, query: Tensor, attention_mask: Tensor | None, is_causal: bool | None) -> None:
    """Raises ValueError for causal attention of more than one query, by the same rule as Transformers' functions."""
    if is_causal is None:
        # By convention, a module without `is_causal` is causal, unless it is given a mask.
        is_causal = getattr(module, "is_causal", attention_mask is None)
    if is_causal and query.shape[2] > 1:
        raise ValueError(
            f"{type(module).__name__} is causal, and landmarks of a whole row would show later tokens: use "
            'attn_implementation="sdpa" for it. For the encoder of an encoder-decoder call '
            "nystrom_models.use_nystrom(model.get_encoder()). For linear causal models see the LinearTransformer "
            "family."
        )


def _reject_decoder(module: nn.Module, query: Tensor, key: Tensor, num_landmarks: int) -> None:
    """Raises ValueError for a decoder's attention, as to its encoder, where its landmarks would show later tokens."""
    is_decoder = getattr(module, "is_decoder", False) or getattr(module.config, "is_decoder", False)
    if is_decoder and min(query.shape[2], key.shape[2]) > num_landmarks:
        raise ValueError(
            f"{type(module).__name__} belongs to a decoder, and landmarks of its queries would show later tokens: use "
            'attn_implementation="sdpa" for the decoder, and '
            "nystrom_models.use_nystrom(model.get_encoder())."
        )


def _exact_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    scaling: float | None,
    is_causal: bool | None,
    output_attentions: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Transformers' `sdpa`, and the attention map if it is wanted."""
    # Such as attention sinks, which `sdpa` leaves out without a message.
    _reject_changes(module, options)
    context, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **options
    )
    if not output_attentions:
        return context, None
    _reject_causal(module, query, attention_mask, is_causal)
    key = repeat_kv(key, query.shape[1] // key.shape[1])
    return context, attention_weights(query, key, attention_mask, scaling)
