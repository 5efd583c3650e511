# SPDX-License-Identifier: Apache-2.0
"""What the attention of every family is made of: masked softmax attention, ranks of tokens, the convolution skip, and
tokens without their padding.

Legend: B batch, H heads, N tokens, K keys, D head size, T valid tokens of a batch, W width of its shortened rows. A
mask is (B, N), bool, True at valid tokens, which may lie anywhere in a row. The rank of a valid token is its number,
from 0, among the valid tokens of its row.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

_HAS_ONEDNN = torch.backends.mkldnn.is_available()
# oneDNN convolves in bfloat16, summing in float32, from AVX-512 on.
_HAS_BFLOAT16 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")

# The share of padding from which a batch is unpadded: below, bringing the tokens into rows for the attention and back
# takes about the time that the linear layers would save.
LEAST_PADDING = 1 / 16

# On a CPU, where no gradients are wanted, what is as large as a sequence or larger is computed in blocks of so many
# tokens, which stay in the caches and reuse each other's memory.
BLOCK_TOKENS = 1024


@functools.cache
def keep_freed_memory() -> None:
    """Once in a process, let glibc's malloc keep freed memory rather than return it and fetch it again page by page.

    It does so for blocks as large as the largest that it has seen freed, up to 32 MiB; so one is freed.
    """
    torch.empty(31 << 20, dtype=torch.uint8, device="cpu")


def is_tracing() -> bool:
    """Whether a graph is being recorded, so that Python must not branch on sizes or values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    skip: Tensor | None = None,
) -> Tensor:
    """softmax(query keyᵀ / √D) value over the valid keys, plus the skip, without storing the scores.

    Args:
        query: (B, H, N, D). key, value: (B, H, K, D). key_mask: (B, K) bool or None for all valid.
        dropout_p: probability of dropping an attention weight.
        skip: (B, H, N, D), the caller's no more: the result may take its place in memory.

    Returns: (B, H, N, D). A row without a valid key attends to all of them, so that it stays finite.
    """
    if key_mask is not None:
        key_mask = (key_mask | ~key_mask.any(dim=-1, keepdim=True))[:, None, None, :]
    if skip is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=key_mask, dropout_p=dropout_p)
    if skip.device.type != "cpu" or torch.is_grad_enabled() or is_tracing() or dropout_p:
        # Dropout drawn block by block would be another one when a checkpointed layer is computed again.
        return F.scaled_dot_product_attention(query, key, value, attn_mask=key_mask, dropout_p=dropout_p) + skip
    # A large result of its own costs more than the attention: the system hands its memory out page by page.
    keep_freed_memory()
    length = max(1, query.shape[2])
    rows, tokens = max(1, BLOCK_TOKENS // length), min(BLOCK_TOKENS, length)
    for row in range(0, query.shape[0], rows):
        part = slice(row, row + rows)
        arguments = (key[part], value[part], None if key_mask is None else key_mask[part])
        for queries, sums in zip(query[part].split(tokens, 2), skip[part].split(tokens, 2), strict=True):
            sums += F.scaled_dot_product_attention(queries, *arguments)
    return skip


def positions_by_rank(mask: Tensor) -> Tensor:
    """(B, N) int64: at column r the position of the valid token of rank r; 0 beyond the last one."""
    batch, length = mask.shape
    rank = mask.long().cumsum(dim=-1) - 1
    positions = torch.arange(length, device=mask.device).expand(batch, length)
    # Invalid tokens all write to one extra column, which is cut off.
    column = torch.where(mask, rank, length)
    return positions.new_zeros(batch, length + 1).scatter(1, column, positions)[:, :length]


def gather_tokens(states: Tensor, positions: Tensor) -> Tensor:
    """Rows of states (B, N, C) at positions (B, ...) int64: (B, ..., C)."""
    batch, length = states.shape[:2]
    offset = torch.arange(batch, device=states.device) * length
    flat = positions + offset.view(-1, *[1] * (positions.dim() - 1))
    # An embedding look-up copies whole rows, which a gather along an expanded index does not.
    return F.embedding(flat, states.reshape(batch * length, -1))


class Unpadding(NamedTuple):
    """Where the T valid tokens of a padded batch (B, N) lie; a function of the mask alone.

    States of the tokens alone are (1, T, C). Attention and convolution need rows: those of width W begin with their
    first valid token and keep its distance to the others, and W is the largest distance from the first to the last.
    Where no row of width W has padding, states are these rows, (B, W, C), all along.

    tokens: (T,) int64, ascending: the tokens in the batch flattened to (B·N,).
    row_tokens: (T,) int64: the same in the rows flattened to (B·W,); None where no row has padding.
    row_mask: (B, W) bool, True at the tokens; None where no row has padding.
    shape: B and N.
    """

    tokens: Tensor
    row_tokens: Tensor | None
    row_mask: Tensor | None
    shape: tuple[int, int]


def find_unpadding(mask: Tensor) -> tuple[Tensor | None, Unpadding | None]:
    """The mask (B, N) bool, or None if every token is valid; and the `Unpadding`, or None where it would not pay.

    Not for graphs, whose sizes must not depend on values. On a GPU, the host waits once, for two numbers.
    """
    batch, length = mask.shape
    if mask.numel() == 0:
        return None, None
    positions = torch.arange(length, device=mask.device)
    first = mask.long().argmax(dim=-1, keepdim=True)  # (B, 1)
    end = (mask * (positions + 1)).amax(dim=-1, keepdim=True)  # 0 in a row without a valid token
    count, width = torch.stack([mask.sum(), (end - first).amax()]).tolist()
    if count == batch * length:
        return None, None
    if count == 0 or count > (1 - LEAST_PADDING) * batch * length:
        return mask, None
    tokens = mask.flatten().nonzero_static(size=count).squeeze(-1)
    if count == batch * width:
        return mask, Unpadding(tokens, None, None, (batch, length))
    row = tokens // length
    row_tokens = tokens - row * length - first.squeeze(-1)[row] + row * width
    row_mask = mask.new_zeros(batch * width).index_fill(0, row_tokens, True).view(batch, width)
    return mask, Unpadding(tokens, row_tokens, row_mask, (batch, length))


def unpad_tokens(states: Tensor, unpadding: Unpadding) -> Tensor:
    """Of states (B, N, ...), those of the valid tokens: (1, T, ...), or (B, W, ...) where no row has padding."""
    rows = 1 if unpadding.row_mask is not None else states.shape[0]
    return states.flatten(0, 1).index_select(0, unpadding.tokens).unflatten(0, (rows, -1))


def pad_tokens(states: Tensor, tokens: Tensor, shape: Sequence[int]) -> Tensor:
    """States (..., C) of T tokens at the places `tokens`, (T,) int64, of flattened rows, zero elsewhere: (B, N, C)."""
    width = states.shape[-1]
    padded = states.new_zeros(shape[0] * shape[1], width)
    return padded.index_copy_(0, tokens, states.reshape(-1, width)).view(*shape, width)


def split_heads(states: Tensor, num_heads: int) -> Tensor:
    """(B, N, H·D) -> (B, H, N, D), a view."""
    batch, length, width = states.shape
    return states.view(batch, length, num_heads, width // num_heads).transpose(1, 2)


def merge_heads(states: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, H·D)."""
    return states.transpose(1, 2).flatten(2)


def depthwise_convolution(value: Tensor, weight: Tensor, mask: Tensor | None = None) -> Tensor:
    """The skip of Nyströmformer ("DConv" in figure 4 of arXiv:2102.03902): each head's V filtered along the tokens.

    Args:
        value: (B, H, N, D). weight: (H, 1, kernel, 1), kernel odd, shared by the D channels of a head.
        mask: (B, N) bool; V counts as zero at invalid tokens.

    Returns: (B, H, N, D).
    """
    if mask is not None:
        value = value * mask[:, None, :, None].to(value.dtype)
    if not _HAS_ONEDNN or value.device.type != "cpu" or value.dtype == torch.float64:
        return F.conv2d(value, weight, padding=(weight.shape[2] // 2, 0), groups=weight.shape[0])
    if torch.is_grad_enabled() and (value.requires_grad or weight.requires_grad):
        return _DepthwiseConvolution.apply(value, weight)
    return _filter_tokens(value, weight)


def _filter_tokens(value: Tensor, weight: Tensor) -> Tensor:
    """The convolution on a CPU: V where it lies, as (B, N, H·D) channels last, several times as fast as head by head.

    Half precision that oneDNN lacks here is brought to float32, for what replaces oneDNN is slower by far.
    """
    batch, heads, length, dim = value.shape
    dtype = value.dtype if value.dtype == torch.bfloat16 and _HAS_BFLOAT16 else torch.float32
    channels = value.to(dtype).transpose(1, 2).reshape(batch, length, heads * dim).transpose(1, 2).unsqueeze(2)
    filters = weight.to(dtype).squeeze(3).repeat_interleave(dim, dim=0).unsqueeze(1)  # (H·D, 1, 1, kernel)
    with torch.autocast("cpu", enabled=False):
        filtered = F.conv2d(channels, filters, padding=(0, weight.shape[2] // 2), groups=heads * dim)
    return split_heads(filtered.squeeze(2).transpose(1, 2).to(value.dtype), heads)


class _DepthwiseConvolution(torch.autograd.Function):
    """`_filter_tokens` with a gradient: oneDNN's for the kernel is wrong from 35 taps on, by a tenth (torch 2.13)."""

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
            value_gradient = _DepthwiseConvolution.apply(gradient, weight.flip(2))
        if ctx.needs_input_grad[1]:
            weight_gradient = _correlate(gradient, value, weight.shape[2]).to(weight.dtype)
        return value_gradient, weight_gradient


def _correlate(gradient: Tensor, value: Tensor, taps: int) -> Tensor:
    """(H, 1, taps, 1): at j the sum of gradient[n] · value[n + j - taps // 2] over the batch and all tokens n.

    A block of S tokens times the S + taps - 1 that the filter saw around it is a product of matrices; the sum of these
    products has the wanted sums along its diagonals.
    """
    size, reach = max(16, taps - 1), taps // 2
    multiply = _multiply_in_graph if is_tracing() else _multiply_in_place
    with torch.autocast("cpu", enabled=False):
        products = multiply(gradient, value, size, reach)
    # Rows one longer than the distance of the diagonal's elements put each diagonal into a column.
    skewed = F.pad(F.pad(products, (0, 1)).flatten(1), (0, size)).unflatten(1, (size, size + taps + 1))
    return skewed[..., :taps].sum(dim=1)[:, None, :, None]


def _multiply_in_place(gradient: Tensor, value: Tensor, size: int, reach: int) -> Tensor:
    """The sum of products in `_correlate`, (H, S, S + 2 reach), of blocks as they lie."""
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
    """The same for graphs: no loop over the length, but copies."""
    beyond = -value.shape[2] % size
    blocks = F.pad(gradient.float(), (0, 0, 0, beyond)).unflatten(2, (-1, size))
    windows = F.pad(value.float(), (0, 0, reach, reach + beyond)).unfold(2, size + 2 * reach, size)
    return torch.einsum("bhnsd,bhndw->hsw", blocks, windows)
