# SPDX-License-Identifier: Apache-2.0
"""The layers of every family and their stack: attention and feed-forward, each with its norm and residual.

Legend: B batch, N tokens, C hidden size. States are in the layout of the batch (see `Batch`). Parameters have the
names of Transformers' own Nyströmformer, so that checkpoints can be exchanged with it; those of pre-norm layers have
the names of its RobertaPreLayerNorm.
"""

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.import_utils import is_tracing

from .batch import Batch
from .configuration_base import BaseConfig
from .cpu_blocks import overwrite_in_blocks, pays_in_blocks
from .self_attention import SelfAttention


def activation(name: str) -> nn.Module:
    """The module of an activation, such as `config.hidden_act`."""
    # The same function in one operation instead of seven: in float32, a quarter of the time of a layer.
    return ACT2FN["gelu_pytorch_tanh" if name == "gelu_new" else name]


def layer_norm(config: BaseConfig) -> nn.LayerNorm:
    """A layer norm over the hidden size."""
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class SubLayerOutput(nn.Module):
    """The end of a sub-layer: x + Dropout(W h), normalised in a post-norm layer."""

    def __init__(self, config: BaseConfig, width: int):
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = layer_norm(config) if config.layer_norm_position == "post" else None
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        hidden_states = self.dropout(self.dense(hidden_states)) + residual
        return hidden_states if self.LayerNorm is None else self.LayerNorm(hidden_states)


class AttentionBlock(nn.Module):
    """The attention sub-layer."""

    def __init__(self, config: BaseConfig, layer_idx: int, self_attention_class: type[SelfAttention]):
        super().__init__()
        self.LayerNorm = layer_norm(config) if config.layer_norm_position == "pre" else None
        self.self = self_attention_class(config, layer_idx)
        self.output = SubLayerOutput(config, config.hidden_size)

    def forward(self, hidden_states: Tensor, batch: Batch) -> Tensor:
        inputs = hidden_states if self.LayerNorm is None else self.LayerNorm(hidden_states)
        context = self.self(inputs, batch)
        if pays_in_blocks(context, self) and context.dtype == hidden_states.dtype:
            return overwrite_in_blocks(self.output, context, hidden_states)
        return self.output(context, hidden_states)


class Intermediate(nn.Module):
    """The wide half of the feed-forward sub-layer."""

    def __init__(self, config: BaseConfig):
        super().__init__()
        self.LayerNorm = layer_norm(config) if config.layer_norm_position == "pre" else None
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = activation(config.hidden_act)

    def forward(self, hidden_states: Tensor) -> Tensor:
        inputs = hidden_states if self.LayerNorm is None else self.LayerNorm(hidden_states)
        return self.intermediate_act_fn(self.dense(inputs))


class TransformerLayer(GradientCheckpointingLayer):
    """Attention, then feed-forward."""

    def __init__(self, config: BaseConfig, layer_idx: int, self_attention_class: type[SelfAttention]):
        super().__init__()
        self.chunk_size_feed_forward = config.chunk_size_feed_forward
        self.attention = AttentionBlock(config, layer_idx, self_attention_class)
        self.intermediate = Intermediate(config)
        self.output = SubLayerOutput(config, config.intermediate_size)

    def forward(self, hidden_states: Tensor, batch: Batch) -> Tensor:
        hidden_states = self.attention(hidden_states, batch)
        # In a graph, the number of chunks would be fixed, and the length with it.
        if self.chunk_size_feed_forward and not is_tracing(hidden_states):
            # A chunk has as many tokens as this many columns of the batch; the last chunk may have fewer.
            size = self.chunk_size_feed_forward * (1 if batch.places is None else batch.rows[0])
            return torch.cat([self.feed_forward(chunk) for chunk in hidden_states.split(size, dim=1)], dim=1)
        if pays_in_blocks(hidden_states, self):
            return overwrite_in_blocks(self.feed_forward, hidden_states)
        return self.feed_forward(hidden_states)

    def feed_forward(self, hidden_states: Tensor) -> Tensor:
        """The feed-forward sub-layer, for any number of tokens."""
        return self.output(self.intermediate(hidden_states), hidden_states)


class LayerStack(nn.Module):
    """The layers, and the last norm of a pre-norm model. A family may compute a plan once for all layers."""

    def __init__(self, config: BaseConfig, self_attention_class: type[SelfAttention]):
        super().__init__()
        self.config = config
        self.layer = nn.ModuleList(
            [
                TransformerLayer(config, layer_idx, self_attention_class)
                for layer_idx in range(config.num_hidden_layers)
            ]
        )
        self.LayerNorm = layer_norm(config) if config.layer_norm_position == "pre" else None
        self.gradient_checkpointing = False

    def plan(self, batch: Batch) -> object:
        """What the attention of every layer needs to know about the batch: a NamedTuple, or a dict, of tensors and
        functions, or None."""
        return None

    def forward(
        self, hidden_states: Tensor, batch: Batch, output_hidden_states: bool = False
    ) -> tuple[Tensor, tuple[Tensor, ...] | None]:
        """hidden_states in the layout of the batch.

        Returns the last state (B, N, C) and, on request, all states, with tokens where they were given and zeros at
        padding.
        """
        batch.plan = self.plan(batch)
        states = []
        for layer in self.layer:
            if output_hidden_states:
                # Layers may be on several devices.
                batch = batch.to(hidden_states.device)
                states.append(batch.leave(hidden_states))
                # The next layer reads the state that is returned, so that gradients reach it.
                hidden_states = batch.enter(states[-1])
            hidden_states = layer(hidden_states, batch)
        if self.LayerNorm is not None:
            hidden_states = self.LayerNorm(hidden_states)
        states.append(batch.to(hidden_states.device).leave(hidden_states))
        return states[-1], tuple(states) if output_hidden_states else None
