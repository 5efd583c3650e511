# SPDX-License-Identifier: Apache-2.0
"""Which keys an encoder of Transformers may see, as one mask of keys for all queries.

Nyström attention uses landmarks of a whole row, so a key is visible to all queries or to none. A mask of Transformers,
or one that a model builds itself, is converted to this form or refused.

Legend: B batch, H heads, N queries, K keys, M landmarks.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
from transformers.utils.import_utils import is_tracing

from ..models.attention_nystrom import Segments, landmark_segments
from ..models.input_checks import require
from ..models.tracing import can_read_values
from .settings import LayerSettings

# Masks add the dtype's minimum, -10000 or -inf to the scores of invisible keys; e to the power of -1000 is 0, too.
INVISIBLE = -1e3

BY_PAIR = (
    'attn_implementation="nystrom" takes no mask that differs between queries, as for causal, packed or local '
    'attention: give attention_mask (batch, length) with 1 at tokens and 0 at padding, or use "sdpa".'
)
ADDED_SCORES = (
    'attn_implementation="nystrom" takes no bias of the scores, such as a position bias: attention_mask must be 0 '
    'where a key is visible and at most -1000 where it is not. Use "sdpa" for this model.'
)

# For masks that `nystrom_mask` made: the landmarks' segments, by the number of landmarks, computed once for all
# layers. These masks are never changed, and an entry is removed with its mask.
_segments: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def nystrom_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_bidirectional_skip: bool | None = None,
    use_vmap: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """With the signature of Transformers' `AttentionMaskInterface`: the mask of an encoder's attention.

    Args:
        mask_function: which pairs of tokens see each other: all pairs, those of an encoder's sliding windows, or pairs
            that a mask of keys describes.
        attention_mask: (B, K) bool, True at tokens; None for all valid.
        local_size: tokens of a sliding window. Its layers keep exact attention, with the mask of `sdpa`.
        allow_is_bidirectional_skip: whether None may be returned if every key is visible. Transformers sets it only
            for bidirectional attention.
        use_vmap: whether the model adds conditions of its own, which may turn a causal mask into a mask of keys.
        The others: as for `transformers.masking_utils.sdpa_mask`.

    Returns: (B, 1, 1, K) bool, True at visible keys, or None if all are visible, which is checked only outside graphs.
    If None is not allowed, (B, 1, N, K). For sliding windows the result of `sdpa_mask`.

    Raises ValueError for causal masks and other masks that differ between queries.
    """
    sizes: dict[str, Any] = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
    options |= {
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "use_vmap": use_vmap,
        "device": device,
    }
    options |= {"q_offset": q_offset, "kv_offset": kv_offset}
    if allow_is_bidirectional_skip is None and not use_vmap:
        model = "this model" if config is None else f"model_type={config.model_type!r}"
        raise ValueError(
            f'attn_implementation="nystrom" is for attention to the whole row, but {model} needs a causal mask: '
            'use "sdpa" for it. For the encoder of an encoder-decoder call '
            "nystrom_models.use_nystrom(model.get_encoder()), for one part of a model give "
            'attn_implementation={"vision_config": "nystrom"}.'
        )
    if local_size is not None:
        skip = bool(allow_is_bidirectional_skip)
        return sdpa_mask(**sizes, **options, local_size=local_size, allow_is_bidirectional_skip=skip)
    if mask_function is not bidirectional_mask_function:
        # The model's own conditions may amount to a mask of keys, so the mask is computed and checked.
        keys = key_mask_of(sdpa_mask(**sizes, **options), batch_size, q_length, kv_length)
        return None if keys is None else keys[:, None, None, :]
    if attention_mask is None:
        if allow_is_bidirectional_skip:
            return None
        return torch.ones(batch_size, 1, 1, kv_length, dtype=torch.bool, device=device).expand(-1, -1, q_length, -1)
    mask = attention_mask[:, kv_offset : kv_offset + kv_length].to(device=device, dtype=torch.bool)
    if mask.shape[1] != kv_length:
        mask = torch.nn.functional.pad(mask, (0, kv_length - mask.shape[1]))
    if not allow_is_bidirectional_skip:
        return mask[:, None, None, :].expand(-1, -1, q_length, -1)
    if can_read_values(mask) and bool(mask.all()):
        return None
    made = mask[:, None, None, :]
    if not is_tracing(mask):
        _segments[made] = {}
    return made


def segments_of(attention_mask: Tensor, key_mask: Tensor, settings: LayerSettings) -> Segments | None:
    """`landmark_segments` of the key mask (B, K), if `nystrom_mask` made the attention mask; None otherwise."""
    num_landmarks = settings.num_landmarks
    # In this order: comparing the length first would bind an exported graph to lengths beyond M.
    if is_tracing(attention_mask) or key_mask.shape[1] <= num_landmarks:
        return None
    known = _segments.get(attention_mask)
    if known is None:
        return None
    if num_landmarks not in known:
        known[num_landmarks] = landmark_segments(key_mask, num_landmarks)
    return known[num_landmarks]


def key_mask_of(attention_mask: Tensor | None, batch: int, length: int, keys: int) -> Tensor | None:
    """The visible keys (B, K), bool, of the mask that an attention function is given; None for None.

    Args:
        attention_mask: (B or 1, H or 1, N or 1, K), bool with True at visible keys, or added to the scores: 0 at
            visible keys and at most -1000 at others. Also (B, K) bool, or integers that are not 0 at visible keys.
            Queries that see no key, such as padding, are ignored.
        batch, length, keys: B, N, K.

    Raises ValueError for masks that differ between queries or heads, for biases of the scores, and for other shapes.
    On a GPU and in graphs, the conditions on values are assertions instead.
    """
    if attention_mask is None:
        return None
    if not isinstance(attention_mask, Tensor):
        raise ValueError(f"{BY_PAIR} It is a {type(attention_mask).__name__}.")
    given = attention_mask
    if given.dim() == 2 and not given.is_floating_point():
        attention_mask = (given != 0)[:, None, None]
    shape = attention_mask.shape
    fits = (
        len(shape) == 4
        and (shape[0] == 1 or shape[0] == batch)
        and (shape[2] == 1 or shape[2] == length)
        and shape[3] == keys
    )
    if not fits:
        raise ValueError(
            f"attention_mask has shape {tuple(given.shape)}, but attention needs (batch, 1, 1, keys) = "
            f"{(batch, 1, 1, keys)}."
        )
    # A mask that was expanded along queries and heads is the same for all of them.
    for dim in (1, 2):
        if attention_mask.shape[dim] > 1 and attention_mask.stride(dim) == 0:
            attention_mask = attention_mask.narrow(dim, 0, 1)
    if attention_mask.is_floating_point():
        if attention_mask.requires_grad:  # learned, even where it is zero
            raise ValueError(ADDED_SCORES)
        visible = attention_mask == 0
        _require_in_any_case((visible | (attention_mask <= INVISIBLE)).all(), ADDED_SCORES)
    elif attention_mask.dtype == torch.bool:
        visible = attention_mask
    else:
        raise ValueError(f"attention_mask has dtype {attention_mask.dtype}, neither bool nor floating: {BY_PAIR}")
    if visible.shape[1] > 1 or visible.shape[2] > 1:
        seen = visible.any(dim=(1, 2), keepdim=True)
        same = (visible == seen) | ~visible.any(dim=3, keepdim=True)
        _require_in_any_case(same.all(), BY_PAIR)
        visible = seen
    return visible[:, 0, 0].expand(batch, keys)


def _require_in_any_case(condition: Tensor, message: str) -> None:
    """`require`; on a GPU and in a graph, an assertion."""
    if can_read_values(condition):
        require(condition, message)
    elif not condition.is_meta:
        # Inductor writes the message between double quotes into C++ code, without escaping it.
        torch._assert_async(condition, message.replace('"', "'"))
