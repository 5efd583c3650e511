# SPDX-License-Identifier: Apache-2.0
"""The inputs of the source's softmax attention, for as many tokens as the converted model takes.

Legend: R rows, N tokens, H heads, D head size.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..models.batch import make_batch
from ..models.configuration_nystromformer import NystromformerConfig
from ..models.self_attention import SelfAttention
from ..models.token_layout import split_heads
from .configurations import converted_config
from .reading import SourceModel
from .weights import take_over

# Rows that go through a layer at once.
ROWS_AT_ONCE = 4


class AttentionInputs(NamedTuple):
    """Query, key and value of some rows in a layer, (R, H, N, D), float32."""

    query: Tensor
    key: Tensor
    value: Tensor


def exact_model(source: SourceModel, config: Any, positions: str) -> Any:
    """The encoder of the source with softmax attention at every length, for the positions of `config`: a
    `NystromformerModel` in float32. The source must attend by softmax (`SourceKind.attends_exactly`).
    """
    exact = converted_config(
        source.config,
        NystromformerConfig.model_type,
        max_position_embeddings=config.max_position_embeddings,
        num_landmarks=None,
    )
    # No position is needed for padding, and every tensor keeps the shape of its rows.
    exact.unpad_inputs = False
    model, _ = take_over(source, exact, "Model", positions)
    return model.float()


@torch.no_grad()
def attention_inputs(model: Any, rows: Tensor) -> Iterator[list[AttentionInputs]]:
    """For each layer in turn, the inputs of its attention for rows (R, N) of token ids, in chunks of rows.

    All rows go through a layer before the next one, so that memory holds the inputs of only one layer.
    """
    chunks = rows.to(model.device).split(ROWS_AT_ONCE)
    batches = [make_batch(None, (chunk.shape[0], chunk.shape[1]), chunk.device) for chunk in chunks]
    states = [model.embeddings(chunk, batch) for chunk, batch in zip(chunks, batches, strict=True)]
    for batch in batches:
        batch.plan = model.encoder.plan(batch)
    for layer in model.encoder.layer:
        seen: list[AttentionInputs] = []
        for place, batch in enumerate(batches):
            with _caught(layer.attention.self) as inputs:
                states[place] = layer(states[place], batch)
            heads = (split_heads(inputs[name], layer.attention.self.num_heads) for name in AttentionInputs._fields)
            seen.append(AttentionInputs(*heads))
        yield seen


@contextmanager
def _caught(attention: SelfAttention) -> Iterator[dict[str, Tensor]]:
    """The outputs (R, N, H·D) of an attention layer's linear layers during its call, by their names."""
    caught: dict[str, Tensor] = {}

    def catch(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: caught.update({name: output})

    hooks = [getattr(attention, name).register_forward_hook(catch(name)) for name in AttentionInputs._fields]
    try:
        yield caught
    finally:
        for hook in hooks:
            hook.remove()
