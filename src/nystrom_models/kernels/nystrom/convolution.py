# SPDX-License-Identifier: Apache-2.0
"""The depthwise convolution of V along the tokens, and its gradients.

In half precision it is a matrix product: for a block of tokens, a banded matrix of the taps times the block's window
of V, which is two or three blocks long. The gradient of V is the same product with the taps reversed and the window of
the incoming gradient; the gradients of the taps are the sums along the diagonals of Σ V · windowᵀ. In float32, where
matrix products would need all registers, it is a sum over the taps. Legend as in `rows.py`; P parts, T taps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import dot, kernel, load_tile, on_device, store_tile, tile
from .launches import plan_launch
from .rows import (
    Rows,
    describe_row,
    find_segments,
    part_of,
    row_arguments,
    store_padding,
    valid_tokens,
)


@triton.constexpr_function
def window_blocks(taps, block):
    """The number of blocks that the window of a block spans: two, or three if there are more than `block` + 1 taps."""
    return 2 if taps <= block + 1 else 3


@triton.jit
def band_of_taps(taps, start, TAPS: tl.constexpr, REVERSED: tl.constexpr, BLOCK_N: tl.constexpr):
    """(BLOCK_N, BLOCK_N): the banded matrix of the taps between the tokens of a block and BLOCK_N tokens of its
    window, from position `start` of the window on.

    The window begins T // 2 tokens before the block. REVERSED: with the taps reversed, for the gradient.
    """
    place = tl.arange(0, BLOCK_N)
    tap = start + place[None, :] - place[:, None]
    inside = (tap >= 0) & (tap < TAPS)
    if REVERSED:
        tap = TAPS - 1 - tap
    return tl.load(taps + tap, mask=inside, other=0.0)


@triton.jit
def load_window(states, window, mask, row, N, H, MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The rows of states (N, D) at these tokens, (len(window), BLOCK_D), zero where there is no valid token."""
    return load_tile(states, window, H * D, valid_tokens(mask, row, window, N, N, MASKED), D, BLOCK_D)


@triton.jit
def _start(
    dv, row, mask, positions, sizes, exists, N, H, longest, MASKED: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The first token of this program's part and the one after its last. Writes zeros to dv at the padding."""
    first, last, size = find_segments(
        positions, sizes, exists, row, tl.arange(0, BLOCK_M), N, longest, M, MASKED
    )  # fmt: skip
    _, _, begin, end = describe_row(first, last, size, N, M, MASKED)
    if MASKED:
        store_padding(dv, H * D, begin, end, N, D, BLOCK_N, BLOCK_D)
    return part_of(begin, end, BLOCK_N)


@triton.jit
def convolve(
    states, taps, tokens, result, mask, row, N, H,
    MASKED: tl.constexpr, TAPS: tl.constexpr, REVERSED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """result + the convolution of states (N, D) at these tokens, tap by tap, in float32."""
    for place in range(TAPS):
        tap = TAPS - 1 - place if REVERSED else place
        window = load_window(states, tokens + (place - TAPS // 2), mask, row, N, H, MASKED, D, BLOCK_D)
        result += tl.load(taps + tap) * window
    return result


@kernel
def _convolution_bwd_kernel(
    v, do, taps, dv, products, mask, positions, sizes, exists, N, H, longest,
    MASKED: tl.constexpr, TAPS: tl.constexpr, OF_TAPS: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """products (B·H, P, BLOCK_N, WINDOW BLOCK_N): Σ over a part's blocks of V (BLOCK_N, D) · windowᵀ (D, ...)."""
    WINDOW: tl.constexpr = window_blocks(TAPS, BLOCK_N)
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    head = (row * N * H + program % H) * D
    v += head
    do += head
    dv += head
    taps += program % H * TAPS
    band = band_of_taps(taps, 0, TAPS, True, BLOCK_N)
    band_1 = band_of_taps(taps, BLOCK_N, TAPS, True, BLOCK_N)
    product = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    product_1 = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    if WINDOW > 2:
        band_2 = band_of_taps(taps, 2 * BLOCK_N, TAPS, True, BLOCK_N)
        product_2 = tl.zeros([BLOCK_N, BLOCK_N], tl.float32)
    start, stop = _start(
        dv, row, mask, positions, sizes, exists, N, H, longest, MASKED, M, D, BLOCK_M, BLOCK_N, BLOCK_D
    )
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)
        v_block = load_tile(v, tokens, H * D, valid, D, BLOCK_D)
        window = tokens - TAPS // 2
        g = load_window(do, window, mask, row, N, H, MASKED, D, BLOCK_D)
        grad = dot(band, g)
        if OF_TAPS:
            product = dot(v_block, tl.trans(g), product)
        g = load_window(do, window + BLOCK_N, mask, row, N, H, MASKED, D, BLOCK_D)
        grad = dot(band_1, g, grad)
        if OF_TAPS:
            product_1 = dot(v_block, tl.trans(g), product_1)
        if WINDOW > 2:
            g = load_window(do, window + 2 * BLOCK_N, mask, row, N, H, MASKED, D, BLOCK_D)
            grad = dot(band_2, g, grad)
            if OF_TAPS:
                product_2 = dot(v_block, tl.trans(g), product_2)
        if MASKED:
            grad = tl.where(valid[:, None], grad, 0.0)
        store_tile(dv, tokens, H * D, tokens < stop, grad, D, BLOCK_D)
    if OF_TAPS:
        place = tl.arange(0, BLOCK_N)
        products += (program * tl.num_programs(0) + tl.program_id(0)) * WINDOW * BLOCK_N * BLOCK_N
        products += place[:, None] * (WINDOW * BLOCK_N) + place[None, :]
        tl.store(products, product)
        tl.store(products + BLOCK_N, product_1)
        if WINDOW > 2:
            tl.store(products + 2 * BLOCK_N, product_2)


@kernel
def _convolution_bwd_float32_kernel(
    v, do, taps, dv, products, mask, positions, sizes, exists, N, H, longest,
    MASKED: tl.constexpr, TAPS: tl.constexpr, OF_TAPS: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """products (B·H, P, T): Σ over a part's tokens of V (D) times window of gradientᵀ (D, T)."""
    program = tl.program_id(1).to(tl.int64)
    row = program // H
    head = (row * N * H + program % H) * D
    v += head
    do += head
    dv += head
    taps += program % H * TAPS
    channels = tl.arange(0, BLOCK_D)
    places = tl.arange(0, BLOCK_T)
    product = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    start, stop = _start(
        dv, row, mask, positions, sizes, exists, N, H, longest, MASKED, M, D, BLOCK_M, BLOCK_N, BLOCK_D
    )
    for block in range(start, stop, BLOCK_N):
        tokens = block + tl.arange(0, BLOCK_N)
        valid = valid_tokens(mask, row, tokens, stop, N, MASKED)
        grad = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        grad = convolve(do, taps, tokens, grad, mask, row, N, H, MASKED, TAPS, True, D, BLOCK_D)
        if MASKED:
            grad = tl.where(valid[:, None], grad, 0.0)
        store_tile(dv, tokens, H * D, tokens < stop, grad, D, BLOCK_D)
    if OF_TAPS:
        for token in range(start, stop):
            valid = valid_tokens(mask, row, token, stop, N, MASKED)
            # Not `valid &` in the mask: Triton's interpreter (3.9) does not take a scalar condition there.
            v_token = tl.where(valid, tl.load(v + token * H * D + channels, mask=channels < D, other=0.0), 0.0)
            window = load_window(do, token - TAPS // 2 + places, mask, row, N, H, MASKED, D, BLOCK_D)
            product += v_token[None, :] * window
        products += (program * tl.num_programs(0) + tl.program_id(0)) * TAPS
        tl.store(products + places, tl.sum(product, axis=1), mask=places < TAPS)


def convolution_backward(
    v: Tensor,
    conv_weight: Tensor,
    do: Tensor,
    num_landmarks: int,
    rows: Rows | None = None,
    of_taps: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """The gradients that value and conv_weight get from the convolution; that of conv_weight if it is wanted.

    Args:
        v, conv_weight, rows: as in `token_attention_forward`. num_landmarks: M, of the ragged batch.
        do: (B, N, H, D), contiguous. What it holds at invalid tokens is ignored.
    """
    batch, length, heads, _ = v.shape
    taps = conv_weight.shape[2]
    parts, sizes = plan_launch("convolution_bwd", v, num_landmarks, taps)
    dv = torch.empty_like(v)
    launch = _convolution_bwd_kernel
    by_taps = v.dtype == torch.float32
    block = sizes["BLOCK_N"]
    width = block * window_blocks(taps, block)
    products = v.new_empty(batch, heads, parts, *((taps,) if by_taps else (block, width)), dtype=torch.float32)
    if by_taps:
        launch = _convolution_bwd_float32_kernel
        sizes["BLOCK_T"] = tile(taps)
    with on_device(v):
        launch[(parts, batch * heads)](
            v, do, conv_weight, dv, products, N=length, H=heads, TAPS=taps, OF_TAPS=of_taps,
            **row_arguments(rows), **sizes,
        )  # fmt: skip
    if not of_taps:
        return dv, None
    products = products.sum(dim=(0, 2))
    if not by_taps:
        # Tap T - 1 - (j - i) connects token i of a block with token j of its window: one diagonal for each tap.
        products = products.as_strided((heads, block, taps), (block * width, width + 1, 1)).sum(dim=1)
    return dv, products.flip(-1)[:, None, :, None].to(conv_weight.dtype)
