# SPDX-License-Identifier: Apache-2.0
"""The kernels as attention functions that models choose by name, with `attn_implementation`.

Legend: B batch, H heads, N tokens, D head size.
"""

from typing import Any

import torch
from torch import Tensor

from ..models.attention_linear import causal_linear_attention
from ..models.attention_nystrom import nystrom_attention
from ..models.depthwise_convolution import depthwise_convolution
from . import causal_linear_attention_if_possible, nystrom_attention_if_possible, why_not_on


class TritonAttention:
    """The attention function of a family, which calls its kernels."""

    name: str

    def why_not_here(self) -> str | None:
        """Why the kernels cannot run on this machine; None if they can."""
        if not torch.cuda.is_available():
            return "there is no CUDA device"
        return why_not_on(torch.device("cuda", torch.cuda.current_device()))


class NystromTriton(TritonAttention):
    """`attn_implementation="nystrom_triton"`: the attention of a Nyströmformer with its convolution, by the kernels.

    It is the default on a GPU that the kernels run on. Inputs that they do not take (see `kernels.why_not`) are
    computed by PyTorch's operations; on a GPU, the reason is logged once.
    """

    name = "nystrom_triton"

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        dropout_p: float = 0.0,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """With the signature of Transformers' `AttentionInterface`, only for the attention layer of a Nyströmformer.

        Args:
            module: the layer; its convolution `conv` is added if there is one.
            query, key, value: (B, H, N, D), the value zero at padding.
            mask: (B, N) bool, True at valid tokens, or None.
            options: further arguments of `nystrom_attention`.

        Returns: context (B, N, H, D), and None for the weights, which are not computed.
        """
        if "num_landmarks" not in options:
            raise ValueError(
                f'attn_implementation="{self.name}" works only with Nyströmformers of nystrom_models, not with '
                f"{type(module).__name__}: choose another attn_implementation."
            )

        def attend(conv_weight: Tensor | None = None) -> Tensor:
            context = nystrom_attention_if_possible(
                query, key, value, mask, conv_weight=conv_weight, dropout_p=dropout_p, **options
            )
            if context is None:
                skip = None if conv_weight is None else depthwise_convolution(value, conv_weight)
                context = nystrom_attention(query, key, value, mask, dropout_p=dropout_p, skip=skip, **options)
            return context

        context = attend() if module.conv is None else module.conv(value, fused=attend)
        return context.transpose(1, 2), None


class LinearTriton(TritonAttention):
    """`attn_implementation="linear_triton"`: the attention of a causal linear transformer, by the kernels.

    It is the default on a GPU that the kernels run on. PyTorch's operations compute encoders (their attention is two
    matrix products), single tokens, and inputs that the kernels do not take. For the last, the reason is logged once
    on a GPU.
    """

    name = "linear_triton"

    def __call__(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        state: Tensor | None = None,
        causal: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """Only for the attention layer of a causal linear transformer.

        Args:
            module: the layer.
            query, key: φ(q), φ(k), (B, H, N, F). value: (B, H, N, D). mask: (B, N) bool, or None.
            state: (B, H, F, D + 1) float32, after the previous tokens. causal: must be True.

        Returns: context (B, N, H, D), and the state after these tokens.
        """
        if not causal or options:
            raise ValueError(
                f'attn_implementation="{self.name}" works only with causal linear transformers of nystrom_models, not '
                f"with {type(module).__name__}: choose another attn_implementation."
            )
        found = causal_linear_attention_if_possible(query, key, value, mask, state)
        context, state = causal_linear_attention(query, key, value, mask, state) if found is None else found
        return context.transpose(1, 2), state
