# SPDX-License-Identifier: Apache-2.0
"""How well a model predicts masked tokens when its attention is replaced by Nyström attention."""

from collections.abc import Iterator, Mapping, Sequence
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
from .substitution import attending_by, key_mask


@contextmanager
def attending_through(model: PreTrainedModel, num_landmarks: int | None, pinv_iterations: int = 6) -> Iterator[None]:
    """The model with Nyström attention with `num_landmarks` landmarks, or exact attention for None, in all layers that
    can have it (see `visit_attention`).

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
        config.num_landmarks, config.pinv_iterations = num_landmarks, pinv_iterations
        try:
            yield
        finally:
            config.num_landmarks, config.pinv_iterations = before
        return

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        mask, reason = key_mask(module, query, key, attention_mask, kwargs)
        if reason is not None or num_landmarks is None:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        context = nystrom_attention(
            scaled_query(query, kwargs.get("scaling")),
            *repeated_groups(query, key, value),
            mask,
            num_landmarks=num_landmarks,
            pinv_iterations=pinv_iterations,
        )
        return context.transpose(1, 2), None

    with attending_by(model, attention):
        yield


@torch.no_grad()
def masked_accuracy(
    model: PreTrainedModel,
    rows: Sequence[Mapping[str, Tensor]],
    num_landmarks: Sequence[int | None],
    *,
    mask_token_id: int,
    special_ids: Sequence[int],
    pinv_iterations: int = 6,
    mlm_probability: float = 0.15,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """The accuracy of a model on masked tokens, for each number of landmarks; None is exact attention.

    The masks are the same for all numbers: each token except special ones is masked with `mlm_probability`.

    Args:
        model: with a masked language modelling head.
        rows: the arguments of each call, `input_ids` (1, N).

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
