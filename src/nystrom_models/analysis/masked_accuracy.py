# SPDX-License-Identifier: Apache-2.0
"""How well a model predicts masked tokens when its attention is replaced by Nyström attention."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..interface.attention import repeated_groups
from ..models.attention_nystrom import nystrom_attention, scaled_query
from ..models.configuration_nystromformer import NystromformerConfig
from ..models.modeling_base import BasePreTrainedModel
from .capture import visit_attention
from .substitution import attending_by, key_mask

# The landmarks of all layers, or a list by layer; None is exact attention.
Landmarks = int | None | Sequence[int | None]


@contextmanager
def attending_through(model: PreTrainedModel, num_landmarks: Landmarks, pinv_iterations: int = 6) -> Iterator[None]:
    """The model with Nyström attention with `num_landmarks` landmarks, or exact attention for None, in all layers that
    can have it. A list has an entry for each of these layers, in the order of `visit_attention`.

    Raises:
        ValueError: for a model of this package that has no landmarks.
    """
    if isinstance(model, BasePreTrainedModel):
        config = model.config
        if not isinstance(config, NystromformerConfig):
            raise ValueError(
                f"{type(model).__name__} has no landmarks: give a Nyströmformer or a model of Transformers."
            )
        before = config.num_landmarks, config.pinv_iterations
        config.num_landmarks = list(num_landmarks) if isinstance(num_landmarks, Sequence) else num_landmarks
        config.pinv_iterations = pinv_iterations
        try:
            yield
        finally:
            config.num_landmarks, config.pinv_iterations = before
        return

    layer = 0

    def first_layer(*_: Any) -> None:
        nonlocal layer
        layer = 0

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        nonlocal layer
        mask, reason = key_mask(module, query, key, attention_mask, kwargs)
        number = None
        if reason is None:
            number = num_landmarks[layer] if isinstance(num_landmarks, Sequence) else num_landmarks
            layer += 1
        if number is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        context = nystrom_attention(
            scaled_query(query, kwargs.get("scaling")),
            *repeated_groups(query, key, value),
            mask,
            num_landmarks=number,
            pinv_iterations=pinv_iterations,
        )
        return context.transpose(1, 2), None

    handle = model.register_forward_pre_hook(first_layer)
    try:
        with attending_by(model, attention):
            yield
    finally:
        handle.remove()


@torch.no_grad()
def masked_accuracy(
    model: PreTrainedModel,
    rows: Sequence[Mapping[str, Tensor]],
    num_landmarks: Sequence[Landmarks],
    *,
    mask_token_id: int,
    special_ids: Sequence[int],
    pinv_iterations: int = 6,
    mlm_probability: float = 0.15,
    seed: int = 0,
    on_row: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """The accuracy of a model on masked tokens, for each number of landmarks, or list of them by layer; None is exact
    attention.

    The masks are the same for all numbers: each token except special ones is masked with `mlm_probability`.

    Args:
        model: with a masked language modelling head.
        rows: the arguments of each call, `input_ids` (1, N).
        on_row: called after each row of each number, for a progress bar.

    Returns: for each number, a dictionary of num_landmarks, mlm_accuracy, its standard_error, mlm_loss (in nats) and
    tokens, the number of masked tokens.

    Raises:
        ValueError: if no token was masked, or the model has no landmarks.
    """
    generator = torch.Generator().manual_seed(seed)
    masked = []
    for row in rows:
        ids = row["input_ids"]
        chosen = torch.rand(ids.shape, generator=generator).to(ids.device) < mlm_probability
        chosen &= ~torch.isin(ids, torch.tensor(list(special_ids), device=ids.device))
        masked.append(({**row, "input_ids": ids.masked_fill(chosen, mask_token_id)}, chosen, ids[chosen]))
    count = sum(len(labels) for _, _, labels in masked)
    if count == 0:
        raise ValueError("No token was masked: give more or longer rows.")
    was_training = model.training
    model.eval()
    results = []
    try:
        for number in num_landmarks:
            hits, loss = 0, 0.0
            with attending_through(model, number, pinv_iterations):
                for call, chosen, labels in masked:
                    logits = model(**call).logits[chosen].float()
                    hits += int((logits.argmax(dim=-1) == labels).sum())
                    loss += F.cross_entropy(logits, labels, reduction="sum").item()
                    on_row()
            accuracy = hits / count
            results.append(
                {
                    "num_landmarks": number,
                    "mlm_accuracy": accuracy,
                    "standard_error": (accuracy * (1 - accuracy) / count) ** 0.5,
                    "mlm_loss": loss / count,
                    "tokens": count,
                }
            )
    finally:
        model.train(was_training)
    return results


def count_attention_layers(model: PreTrainedModel, row: Mapping[str, Tensor]) -> int:
    """Number of attention layers that can have landmarks, in the model's order of `visit_attention`."""
    indices: list[int] = []
    visit_attention(model, row, lambda attention: indices.append(attention.index))
    return len(indices)


def masked_accuracy_by_layer(
    model: PreTrainedModel, rows: Sequence[Mapping[str, Tensor]], num_landmarks: int, **options: Any
) -> list[dict[str, Any]]:
    """The accuracy of a model on masked tokens with exact attention in some layers, `num_landmarks` in all others.

    First each layer alone is exact. Then layers are added, one at a time, in the order of their losses: the layer
    whose exact attention helps most comes first.

    Args:
        options: those of `masked_accuracy`.

    Returns: the dictionaries of `masked_accuracy`, with exact_layers, the layers that are exact; for L > 1 layers,
    2L - 2 of them.
    """
    layers = range(count_attention_layers(model, rows[0]))

    def measured(chosen: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        lists = [[None if layer in exact else num_landmarks for layer in layers] for exact in chosen]
        found = masked_accuracy(model, rows, lists, **options)
        return [{"exact_layers": sorted(exact), **row} for exact, row in zip(chosen, found, strict=True)]

    alone = measured([[layer] for layer in layers])
    order = sorted(layers, key=lambda layer: alone[layer]["mlm_loss"])
    return alone + measured([order[:count] for count in range(2, len(layers))])
