# SPDX-License-Identifier: Apache-2.0
"""The inputs of Nyström attention, and why the kernels would not accept them. Nothing here imports Triton.

Legend: B batch, H heads, N tokens, M landmarks, D head size. A mask is (B, N), bool, True at valid tokens.
"""

import dataclasses

import torch
from torch import Tensor

from ...models.attention_nystrom import Segments
from ..device import (
    compute_capability,
    dtype_of,
    power_of_two,
    why_not_in_this_graph,
    why_not_of_tensors,
    why_not_on,
)

MAX_LANDMARKS = 128
# On compute capability 10.0, products with more landmarks would need more tensor memory than exists.
MAX_LANDMARKS_IN_TENSOR_MEMORY = 64
MAX_HEAD_SIZE = 128
# With more taps, a window of the convolution would not fit into two blocks of 64 tokens.
MAX_TAPS = 65
# The largest product of landmarks and channels, each rounded up to a power of two, that fits into 99 KiB of shared
# memory in half precision; in float32 it is half as much.
MAX_LANDMARKS_TIMES_HEAD_SIZE = 8192


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """The arguments of `attention_nystrom.nystrom_attention`, with the convolution's weight instead of `skip`.

    conv_weight: (H, 1, T, 1), T odd; None for no convolution.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    _: dataclasses.KW_ONLY
    num_landmarks: int | None
    pinv_iterations: int = 6
    conv_weight: Tensor | None = None
    dropout_p: float = 0.0
    segments: Segments | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that get gradients."""
        return [tensor for tensor in (self.query, self.key, self.value, self.conv_weight) if tensor is not None]

    @property
    def dim(self) -> int:
        return self.query.shape[-1]

    @property
    def taps(self) -> int:
        return 0 if self.conv_weight is None else self.conv_weight.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the attention is computed."""
        return dtype_of(self.query)

    def why_not(self) -> str | None:
        """Why the kernels cannot compute this, and what to change; None if they can."""
        device = self.query.device
        given = [tensor for tensor in (*self.tensors, self.mask) if tensor is not None]
        if any(tensor.device != device for tensor in given):
            return f"they need all tensors and the mask on one device, and some are not on {device}"
        return why_not_on(device) or why_not_in_this_graph(self.tensors) or self._why_not_of_this_shape()

    def _why_not_of_this_shape(self) -> str | None:
        length, dim = self.query.shape[2], self.dim
        if self.num_landmarks is None or length <= self.num_landmarks:
            return (
                f"{length} tokens with num_landmarks={self.num_landmarks} get exact attention, which PyTorch has "
                "kernels for"
            )
        tensor_memory = compute_capability(self.query.device) // 10 == 10
        limit = MAX_LANDMARKS_IN_TENSOR_MEMORY if tensor_memory else MAX_LANDMARKS
        if self.num_landmarks > limit:
            return f"num_landmarks={self.num_landmarks} does not fit: choose at most {limit}"
        heads = self.query.shape[1]
        if self.conv_weight is not None and (self.conv_weight.shape[0] != heads or self.taps % 2 == 0):
            return f"conv_weight must be ({heads}, 1, T, 1) with an odd T, not {tuple(self.conv_weight.shape)}"
        if self.taps > MAX_TAPS:
            return f"conv_kernel_size={self.taps} does not fit: choose at most {MAX_TAPS}"
        if dim > MAX_HEAD_SIZE:
            return (
                f"a head size of {dim} does not fit, the most is {MAX_HEAD_SIZE}: raise num_attention_heads with the "
                "same hidden_size"
            )
        reason = why_not_of_tensors(self.tensors, self.mask)
        if reason is not None:
            return reason
        fitting = MAX_LANDMARKS_TIMES_HEAD_SIZE // (2 if self.dtype == torch.float32 else 1)
        if power_of_two(self.num_landmarks) * power_of_two(dim) > fitting:
            most = f"choose at most {fitting // power_of_two(dim)}" + " or bfloat16" * (self.dtype == torch.float32)
            return f"num_landmarks={self.num_landmarks} and a head size of {dim} do not fit in {self.dtype}: {most}"
        if not 0 <= self.dropout_p < 1:
            return f"they take a dropout_p of at least 0 and below 1, not {self.dropout_p}"
        return None
