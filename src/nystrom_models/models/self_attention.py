# SPDX-License-Identifier: Apache-2.0
"""The shared base of all families' attention layers; a family adds `attend`.

Legend: B batch, N tokens of a row, C = H·D hidden size, H heads, D head size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .batch import Batch
from .configuration_base import BaseConfig
from .cpu_blocks import has_hooks
from .depthwise_convolution import DepthwiseConvolution
from .masked_attention import Attend, attend_by_name
from .recurrent_cache import State, read_state, write_state
from .token_layout import merge_heads, split_heads


class SelfAttention(nn.Module):
    """Projections to queries, keys and values, and a convolution of the values if the family's configuration has one.

    Modules with parameters are always called, and their weights are never read from outside: adapters, offloading,
    quantization, sharding and hooks all work through the call.
    """

    def __init__(self, config: BaseConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout_p = config.attention_probs_dropout_prob
        kernel_size = getattr(config, "conv_kernel_size", None)
        self.conv = None if kernel_size is None else DepthwiseConvolution.of_heads(self.num_heads, kernel_size)

    def forward(self, hidden_states: Tensor, batch: Batch) -> Tensor:
        """hidden_states, in the layout of the batch: (B, N, C) or (1, T, C) -> context, in the same layout.

        If the batch asks for attention maps, the map is recorded in the batch.
        """
        batch = batch.to(hidden_states.device)
        return batch.from_rows(merge_heads(self.attend(hidden_states, batch)))

    def attend(self, hidden_states: Tensor, batch: Batch) -> Tensor:
        """As `forward`, but -> context (B, H, N, D), in rows."""
        raise TypeError(f"{type(self).__name__} must define attend().")

    def in_heads(self, states: Tensor, batch: Batch) -> Tensor:
        """States in the layout of the batch, in rows and heads, (B, H, N, D)."""
        return split_heads(batch.to_rows(states), self.num_heads)

    def convolve(self, value: Tensor, batch: Batch) -> Tensor | None:
        """The convolution of the values (B, H, N, D), if there is one, to be added to the context."""
        if self.conv is None:
            return None
        value = self.without_padding(value, batch)
        skip = self.convolve_causally(value, batch) if self.config.is_decoder else self.conv(value)
        # The attention may overwrite it, but a hook may have kept a reference to it.
        return skip.clone() if has_hooks(self.conv) else skip

    def convolve_causally(self, value: Tensor, batch: Batch) -> Tensor:
        """The convolution of a causal family: a token sees itself and the tokens before it.

        value: (B, H, N, D), zero at padding, which comes last. The last values are kept in the batch's cache.
        """
        reach = self.config.conv_kernel_size - 1
        length = value.shape[2]
        before = read_state(batch.cache, self.layer_idx, State.CONVOLUTION)
        value = F.pad(value, (0, 0, reach, 0)) if before is None else torch.cat([before, value], dim=2)
        if batch.cache is not None:
            if batch.mask is None:
                last = value[:, :, length:]
            else:
                index = batch.mask.sum(dim=-1)[:, None] + torch.arange(reach, device=value.device)
                last = value.gather(2, index[:, None, :, None].expand(-1, value.shape[1], -1, value.shape[3]))
            write_state(batch.cache, self.layer_idx, State.CONVOLUTION, last)
        return self.conv(value).narrow(2, reach // 2, length)

    @staticmethod
    def without_padding(value: Tensor, batch: Batch) -> Tensor:
        """Values (B, H, N, D) with zeros at padding; packed values have them already."""
        if batch.mask is None or batch.places is not None:
            return value
        return value.masked_fill(~batch.mask[:, None, :, None], 0)

    @property
    def softmax_attention(self) -> Attend:
        """The function for softmax attention that `attn_implementation` names."""
        return attend_by_name(self, self.config._attn_implementation)

    @property
    def is_eager(self) -> bool:
        """Whether attention is computed in plain operations."""
        return self.config._attn_implementation == "eager"

    @property
    def dropout(self) -> float:
        """Dropout of attention weights: 0 in evaluation mode."""
        return self.dropout_p if self.training else 0.0
