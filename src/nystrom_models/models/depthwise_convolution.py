# SPDX-License-Identifier: Apache-2.0
"""The skip connection of Nyströmformer: the values of each head, filtered along the tokens by the head's own kernel.

Legend: B batch, H heads, N tokens, D head size.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .product_rule import product_tangent
from .token_layout import split_heads
from .tracing import can_read_values, is_compiling, supports_autograd_functions

_HAS_ONEDNN = torch.backends.mkldnn.is_available()
# oneDNN convolves in bfloat16, summing in float32, from AVX-512 on.
_HAS_BFLOAT16 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")


class DepthwiseConvolution(nn.Conv2d):
    """The convolution as a layer, with the kernel (H, 1, kernel, 1) of published checkpoints.

    It keeps the constructor of `nn.Conv2d`, because adapters make layers of the same class with other arguments.
    """

    @classmethod
    def of_heads(cls, num_heads: int, kernel_size: int) -> "DepthwiseConvolution":
        """The layer for this many heads, with an odd kernel of this many tokens."""
        padding = (kernel_size // 2, 0)
        return cls(num_heads, num_heads, (kernel_size, 1), padding=padding, groups=num_heads, bias=False)

    def forward(self, value: Tensor, fused: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """value: (B, H, N, D), zero at padding -> the same shape.

        fused: a function of the weight that computes the convolution together with something else; its result is
            returned. During this call, offloaded or sharded weights are present, and hooks fire.
        """
        if fused is not None:
            return fused(self.weight)
        # An adapter's layer may have other numbers of channels.
        one_by_one = self.groups == self.in_channels == self.out_channels
        return depthwise_convolution(value, self.weight) if one_by_one else super().forward(value)


def depthwise_convolution(value: Tensor, weight: Tensor, mask: Tensor | None = None) -> Tensor:
    """The skip of Nyströmformer ("DConv" in figure 4 of arXiv:2102.03902): each head's V filtered along the tokens.

    Args:
        value: (B, H, N, D). weight: (H, 1, kernel, 1), kernel odd, shared by the D channels of a head.
        mask: (B, N) bool; V counts as zero at invalid tokens. The filter uses positions, not ranks.

    Returns: (B, H, N, D).
    """
    if mask is not None:
        value = value * mask[:, None, :, None].to(value.dtype)
    if can_read_values(value) and value.shape[2] == 0:  # a batch of empty texts
        return value
    if not _HAS_ONEDNN or value.device.type != "cpu" or value.dtype == torch.float64:
        return F.conv2d(value, weight, padding=(weight.shape[2] // 2, 0), groups=weight.shape[0])
    if torch.is_grad_enabled() and (value.requires_grad or weight.requires_grad) and supports_autograd_functions():
        return _differentiable_convolution(value, weight)
    return _filter_tokens(value, weight)


def _differentiable_convolution(value: Tensor, weight: Tensor) -> Tensor:
    # torch.compile refuses functions with a `jvp`.
    function = _DepthwiseConvolution if torch.compiler.is_compiling() else _WithTangents
    return function.apply(value, weight)


def _filter_tokens(value: Tensor, weight: Tensor) -> Tensor:
    """The convolution on a CPU."""
    run = _operator if is_compiling() else _filter_channels
    return split_heads(run(value, weight), value.shape[1])


def _filter_channels(value: Tensor, weight: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, H·D), the layout in which V is read, with channels last. This is several times as fast as
    head by head.

    Half precision that oneDNN lacks on this machine is converted to float32: without oneDNN it is much slower.
    """
    batch, heads, length, dim = value.shape
    dtype = value.dtype if value.dtype == torch.bfloat16 and _HAS_BFLOAT16 else torch.float32
    channels = value.to(dtype).transpose(1, 2).reshape(batch, length, heads * dim).transpose(1, 2).unsqueeze(2)
    filters = weight.to(dtype).squeeze(3).repeat_interleave(dim, dim=0).unsqueeze(1)  # (H·D, 1, 1, kernel)
    with torch.autocast("cpu", enabled=False):
        filtered = F.conv2d(channels, filters, padding=(0, weight.shape[2] // 2), groups=heads * dim)
    return filtered.squeeze(2).transpose(1, 2).to(value.dtype)


# For torch.compile, which gives tensors around a convolution on a CPU the strides of the first batch, so that a batch
# of another length fails in the backward pass (torch 2.13); it does not look into operators.
@torch.library.custom_op("nystrom_models::filter_channels", mutates_args=())
def _operator(value: Tensor, weight: Tensor) -> Tensor:
    return _filter_channels(value, weight).contiguous()


@_operator.register_fake
def _(value: Tensor, weight: Tensor) -> Tensor:
    batch, heads, length, dim = value.shape
    return value.new_empty(batch, length, heads * dim)


class _DepthwiseConvolution(torch.autograd.Function):
    """`_filter_tokens` with a gradient of its own: oneDNN's gradient for kernels of 35 tokens and more is wrong by a
    tenth (torch 2.13)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, weight: Tensor) -> Tensor:
        return _filter_tokens(value, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        value, weight = ctx.saved_tensors
        value_gradient = weight_gradient = None
        if ctx.needs_input_grad[0]:
            value_gradient = _differentiable_convolution(gradient, weight.flip(2))
        if ctx.needs_input_grad[1]:
            weight_gradient = _correlate(gradient, value, weight.shape[2]).to(weight.dtype)
        return value_gradient, weight_gradient


class _WithTangents(_DepthwiseConvolution):
    """The same, also differentiable forwards (`torch.func.jvp`)."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, value_tangent: Tensor | None, weight_tangent: Tensor | None) -> Tensor:
        value, weight = ctx.saved_tensors
        return product_tangent(_differentiable_convolution, value, weight, value_tangent, weight_tangent)


def _correlate(gradient: Tensor, value: Tensor, taps: int) -> Tensor:
    """(H, 1, taps, 1): at j the sum of gradient[n] · value[n + j - taps // 2] over the batch and all tokens n.

    A matrix product multiplies a block of S tokens of the gradient by the S + taps - 1 values around it that the
    filter saw; the sum of these products has the wanted sums along its diagonals.
    """
    size, reach = max(16, taps - 1), taps // 2
    multiply = _multiply_in_place if can_read_values(gradient) else _multiply_in_graph
    with torch.autocast("cpu", enabled=False):
        products = multiply(gradient, value, size, reach)
    # Padding the rows by one shifts each row against the one before it, so that each diagonal becomes a column.
    heads = len(products)
    skewed = F.pad(F.pad(products, (0, 1)).reshape(heads, -1), (0, size)).view(heads, size, size + taps + 1)
    return skewed[..., :taps].sum(dim=1)[:, None, :, None]


def _multiply_in_place(gradient: Tensor, value: Tensor, size: int, reach: int) -> Tensor:
    """The sum of products in `_correlate`, (H, S, S + 2 reach), without copies of the blocks."""
    batch, heads, length, _ = value.shape
    products = value.new_zeros(heads, size, size + 2 * reach, dtype=torch.float32)
    for row, start in itertools.product(range(batch), range(0, length, size)):
        stop, first = min(start + size, length), max(start - reach, 0)
        last = min(start + size + reach, length)
        seen = slice(first - start + reach, last - start + reach)
        block, window = gradient[row, :, start:stop], value[row, :, first:last]
        products[:, : stop - start, seen].baddbmm_(block.float(), window.float().mT)
    return products


def _multiply_in_graph(gradient: Tensor, value: Tensor, size: int, reach: int) -> Tensor:
    """The same for graphs: copies instead of a loop over the length."""
    # By operators that the vmap of `torch.autograd.grad(is_grads_batched=True)` has, too: not unflatten or einsum.
    heads, beyond = value.shape[1], -value.shape[2] % size
    blocks = F.pad(gradient.float(), (0, 0, 0, beyond)).unfold(2, size, size)  # (B, H, N / S, D, S)
    windows = F.pad(value.float(), (0, 0, reach, reach + beyond)).unfold(2, size + 2 * reach, size)
    blocks = blocks.permute(1, 4, 0, 2, 3).reshape(heads, size, -1)
    return blocks @ windows.permute(1, 0, 2, 3, 4).reshape(heads, -1, size + 2 * reach)
