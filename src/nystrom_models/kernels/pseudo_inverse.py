# SPDX-License-Identifier: Apache-2.0
"""The pseudo-inverse of A = softmax(q~ k~ᵀ / √D) (eq. 14 of arXiv:2102.03902), all iterations in one launch, and its
product with what the landmarks see.

A program is one head. Up to 64 landmarks its m×m matrices stay in registers and shared memory over all iterations.
For 128, and for the backward pass, which has more of them, they lie in a workspace of the program's own, a few tens of
kilobytes each, which the caches hold; products read them by strips. The backward pass runs the iterations again, now
keeping each iterate, and then goes back through them. Legend as in `tiles.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tiles
from .tiles import LOG2_E, Rows, landmark_count, load_tile, on_device, row_arguments, store_tile, tile


@triton.jit
def dot(a, b):
    """a b of float32, by tensor cores: three products of TF32 keep all but its last bit or two, one would keep ten."""
    return tiles.dot(a, b, "tf32x3")


@triton.jit
def _softmax_of_landmarks(q, k, count, scale, BLOCK_M: tl.constexpr):
    """A (BLOCK_M, BLOCK_M), zero in the rows and columns of landmarks that do not exist."""
    exists = tl.arange(0, BLOCK_M) < count
    scores = dot(q, tl.trans(k)) * (scale * LOG2_E)
    scores = tl.where(exists[None, :], scores, -float("inf"))
    # Finite where no landmark exists.
    weights = tl.exp2(scores - tl.maximum(tl.max(scores, axis=1), -1e30)[:, None])
    weights = weights / tl.maximum(tl.sum(weights, axis=1), 1e-30)[:, None]
    return tl.where(exists[:, None], weights, 0.0)


@triton.jit
def _norms(a):
    """The sums of the columns, the largest of them, and the largest of a row; these are positive for zeros too."""
    columns = tl.sum(a, axis=0)
    rows = tl.sum(a, axis=1)
    return columns, tl.maximum(tl.max(columns, axis=0), 1e-15), tl.maximum(tl.max(rows, axis=0), 1e-15)


@triton.jit
def _put(matrix, content, BLOCK_M: tl.constexpr):
    """Write a matrix to the workspace, when all have read what stood there; then all see it."""
    index = tl.arange(0, BLOCK_M)
    tl.debug_barrier()
    tl.store(matrix + index[:, None] * BLOCK_M + index[None, :], content)
    tl.debug_barrier()


@triton.jit
def _get(matrix, BLOCK_M: tl.constexpr):
    index = tl.arange(0, BLOCK_M)
    return tl.load(matrix + index[:, None] * BLOCK_M + index[None, :])


@triton.jit
def _product(a, b, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, BLOCK_M: tl.constexpr):
    """a b, or their transposes', of two matrices in the workspace."""
    index = tl.arange(0, BLOCK_M)
    out = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
    for start in range(0, BLOCK_M, 16):
        strip = start + tl.arange(0, 16)
        if A_TRANSPOSED:
            left = tl.load(a + strip[None, :] * BLOCK_M + index[:, None])
        else:
            left = tl.load(a + index[:, None] * BLOCK_M + strip[None, :])
        if B_TRANSPOSED:
            right = tl.load(b + index[None, :] * BLOCK_M + strip[:, None])
        else:
            right = tl.load(b + strip[:, None] * BLOCK_M + index[None, :])
        out += dot(left, right)
    return out


@triton.jit
def _pseudo_inverse_forward(
    query_landmarks, key_landmarks, seen, inverse, landmark_values, workspace, iterates, scale, M, D, H,
    mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, ITERATIONS: tl.constexpr, ON_CHIP: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_M)
    inside = index < M
    q = load_tile(query_landmarks + program * M * D, index, D, inside, D, BLOCK_D)
    k = load_tile(key_landmarks + program * M * D, index, D, inside, D, BLOCK_D)
    diagonal = (index[:, None] == index[None, :]).to(tl.float32)
    count = landmark_count(exists, program // H, M, MASKED, BLOCK_M)
    steps = ITERATIONS
    if MASKED:
        is_exact = tl.load(exact + program // H) != 0
        steps = tl.where(is_exact, 0, ITERATIONS)
    a = _softmax_of_landmarks(q, k, count, scale, BLOCK_M)
    _, largest_column, largest_row = _norms(a)
    z = tl.trans(a) / (largest_column * largest_row)
    if ON_CHIP:
        for _ in range(steps):
            p = dot(a, z)
            p = 13.0 * diagonal - dot(p, 15.0 * diagonal - dot(p, 7.0 * diagonal - p))
            z = 0.25 * dot(z, p)
    else:
        size: tl.constexpr = BLOCK_M * BLOCK_M
        a_place = workspace + program * 4 * size
        p_place = a_place + size
        r_place = p_place + size
        z_place = r_place + size
        _put(a_place, a, BLOCK_M)
        for step in range(steps):
            if KEEP:
                z_place = iterates + (program * ITERATIONS + step) * size
            _put(z_place, z, BLOCK_M)
            p = _product(a_place, z_place, False, False, BLOCK_M)
            _put(p_place, p, BLOCK_M)
            _put(r_place, 7.0 * diagonal - p, BLOCK_M)
            _put(r_place, 15.0 * diagonal - _product(p_place, r_place, False, False, BLOCK_M), BLOCK_M)
            _put(r_place, 13.0 * diagonal - _product(p_place, r_place, False, False, BLOCK_M), BLOCK_M)
            z = 0.25 * _product(z_place, r_place, False, False, BLOCK_M)
    if MASKED:
        # Every token is its own landmark: A⁺ B selects the tokens, and B does so by itself.
        z = tl.where(is_exact, tl.where(index[None, :] < count, diagonal, 0.0), z)
    if not KEEP:
        store_tile(inverse + program * M * M, index, M, inside, z, M, BLOCK_M)
        seen += program * M * D
        if ON_CHIP:
            out = dot(z, load_tile(seen, index, D, inside, D, BLOCK_D))
        else:
            _put(z_place, z, BLOCK_M)
            out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            for start in range(0, BLOCK_M, 16):
                strip = start + tl.arange(0, 16)
                left = tl.load(z_place + index[:, None] * BLOCK_M + strip[None, :])
                out += dot(left, load_tile(seen, strip, D, strip < M, D, BLOCK_D))
        store_tile(landmark_values + program * M * D, index, D, inside, out, D, BLOCK_D)


@triton.jit
def _pseudo_inverse_backward(
    query_landmarks, key_landmarks, inverse_grad, workspace, iterates, query_grad, key_grad, scale, M, D, H,
    mask, positions, sizes, exists, exact, longest,
    MASKED: tl.constexpr, ITERATIONS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, BLOCK_M)
    inside = index < M
    q = load_tile(query_landmarks + program * M * D, index, D, inside, D, BLOCK_D)
    k = load_tile(key_landmarks + program * M * D, index, D, inside, D, BLOCK_D)
    g = load_tile(inverse_grad + program * M * M, index, M, inside, M, BLOCK_M)
    diagonal = (index[:, None] == index[None, :]).to(tl.float32)
    count = landmark_count(exists, program // H, M, MASKED, BLOCK_M)
    steps = ITERATIONS
    if MASKED:
        is_exact = tl.load(exact + program // H) != 0
        steps = tl.where(is_exact, 0, ITERATIONS)
        g = tl.where(is_exact, 0.0, g)
    size: tl.constexpr = BLOCK_M * BLOCK_M
    a = workspace + program * 8 * size
    p = a + size
    s = p + size
    t = s + size
    t_grad = t + size
    s_grad = t_grad + size
    p_grad = s_grad + size
    z_grad = p_grad + size
    _put(a, _softmax_of_landmarks(q, k, count, scale, BLOCK_M), BLOCK_M)
    a_grad = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
    for back in range(steps):
        # Forward, Z' = Z/4 (13 I - P T), T = 15 I - P S, S = 7 I - P, P = A Z; `g` is the gradient of Z'.
        z = iterates + (program * ITERATIONS + ITERATIONS - 1 - back) * size
        _put(z_grad, g, BLOCK_M)
        product = _product(a, z, False, False, BLOCK_M)
        _put(p, product, BLOCK_M)
        _put(s, 7.0 * diagonal - product, BLOCK_M)
        _put(t, 15.0 * diagonal - _product(p, s, False, False, BLOCK_M), BLOCK_M)
        # The gradients of P T, P S and P, and by them of A and Z. That of I times something is nothing.
        _put(t_grad, -0.25 * _product(z, z_grad, True, False, BLOCK_M), BLOCK_M)
        _put(s_grad, -_product(p, t_grad, True, False, BLOCK_M), BLOCK_M)
        product = _product(t_grad, t, False, True, BLOCK_M)
        product += _product(s_grad, s, False, True, BLOCK_M)
        _put(p_grad, product - _product(p, s_grad, True, False, BLOCK_M), BLOCK_M)
        a_grad += _product(p_grad, z, False, True, BLOCK_M)
        # t now takes the last factor, 13 I - P T.
        _put(t, 13.0 * diagonal - _product(p, t, False, False, BLOCK_M), BLOCK_M)
        g = 0.25 * _product(z_grad, t, False, True, BLOCK_M)
        g += _product(a, p_grad, True, False, BLOCK_M)
    # Z = Aᵀ / (largest column sum · largest row sum). Rows sum to one, whose gradient the softmax takes away.
    weights = _get(a, BLOCK_M)
    columns, largest_column, largest_row = _norms(weights)
    g = tl.trans(g) / (largest_column * largest_row)
    is_largest = ((columns == largest_column) & (index < count)).to(tl.float32)
    of_column = tl.sum(tl.sum(g * weights, axis=1), axis=0) / largest_column
    a_grad += g - (of_column / tl.maximum(tl.sum(is_largest, axis=0), 1.0)) * is_largest[None, :]
    # Of the scores, into the place of P: products of m×m with m×D by strips too.
    _put(p, weights * (a_grad - tl.sum(weights * a_grad, axis=1)[:, None]) * scale, BLOCK_M)
    of_query = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    of_key = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, BLOCK_M, 16):
        strip = start + tl.arange(0, 16)
        k_strip = load_tile(key_landmarks + program * M * D, strip, D, strip < M, D, BLOCK_D).to(tl.float32)
        of_query += dot(tl.load(p + index[:, None] * BLOCK_M + strip[None, :]), k_strip)
        q_strip = load_tile(query_landmarks + program * M * D, strip, D, strip < M, D, BLOCK_D).to(tl.float32)
        of_key += dot(tl.load(p + strip[None, :] * BLOCK_M + index[:, None]), q_strip)
    store_tile(query_grad + program * M * D, index, D, inside, of_query, D, BLOCK_D)
    store_tile(key_grad + program * M * D, index, D, inside, of_key, D, BLOCK_D)


# The most landmarks whose matrices the registers and the shared memory of a multiprocessor hold.
ON_CHIP_LANDMARKS = 64


def _sizes(num_landmarks: int, dim: int, iterations: int) -> dict[str, Any]:
    block = tile(num_landmarks)
    return {
        "ITERATIONS": iterations,
        "BLOCK_M": block,
        "BLOCK_D": tile(dim),
        "num_warps": 4 if block == 16 else 8,
        "num_stages": 1,
    }


def _workspace(landmarks: Tensor, matrices: int) -> Tensor:
    """(B·H, matrices, BLOCK_M, BLOCK_M) float32."""
    batch, heads, count, _ = landmarks.shape
    return landmarks.new_empty(batch * heads, matrices, tile(count), tile(count), dtype=torch.float32)


def _launch_forward(
    query_landmarks: Tensor,
    key_landmarks: Tensor,
    seen: Tensor | None,
    inverse: Tensor | None,
    landmark_values: Tensor | None,
    iterates: Tensor | None,
    iterations: int,
    rows: Rows | None,
) -> None:
    batch, heads, count, dim = query_landmarks.shape
    on_chip = count <= ON_CHIP_LANDMARKS and iterates is None
    workspace = None if on_chip else _workspace(query_landmarks, 4)
    with on_device(query_landmarks):
        _pseudo_inverse_forward[(batch * heads,)](
            query_landmarks, key_landmarks, seen, inverse, landmark_values, workspace, iterates,
            dim**-0.5, count, dim, heads,
            **row_arguments(rows), **_sizes(count, dim, iterations), ON_CHIP=on_chip, KEEP=iterates is not None,
        )  # fmt: skip


def run_forward(
    query_landmarks: Tensor, key_landmarks: Tensor, seen: Tensor, iterations: int = 6, rows: Rows | None = None
) -> tuple[Tensor, Tensor]:
    """A⁺ of A = softmax(q~ k~ᵀ / √D), each matrix from its own norms, as `iterative_pinv`; and A⁺ times what was seen.

    Args:
        query_landmarks, key_landmarks: (B, H, M, D), contiguous, M and D at most 128. seen: the same, float32.
        iterations: number of steps.
        rows: the ragged batch; None where every token is valid.

    Returns: (B, H, M, M) float32, zero for landmarks that do not exist; and (B, H, M, D), in the dtype of the
    landmarks. Where every token of a row is its own landmark, the matrix is the identity, not A⁺: there
    `landmark_attention` gives the values to be had.
    """
    batch, heads, count, _ = query_landmarks.shape
    inverse = query_landmarks.new_empty(batch, heads, count, count, dtype=torch.float32)
    landmark_values = torch.empty_like(query_landmarks)
    _launch_forward(query_landmarks, key_landmarks, seen, inverse, landmark_values, None, iterations, rows)
    return inverse, landmark_values


def run_backward(
    query_landmarks: Tensor, key_landmarks: Tensor, inverse_grad: Tensor, iterations: int, rows: Rows | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of the landmarks, (B, H, M, D) float32, from that of A⁺, contiguous."""
    batch, heads, count, dim = query_landmarks.shape
    iterates = _workspace(query_landmarks, iterations)
    _launch_forward(query_landmarks, key_landmarks, None, None, None, iterates, iterations, rows)
    workspace = _workspace(query_landmarks, 8)
    query_grad = torch.empty_like(query_landmarks, dtype=torch.float32)
    key_grad = torch.empty_like(query_grad)
    with on_device(query_grad):
        _pseudo_inverse_backward[(batch * heads,)](
            query_landmarks, key_landmarks, inverse_grad, workspace, iterates, query_grad, key_grad,
            dim**-0.5, count, dim, heads, **row_arguments(rows), **_sizes(count, dim, iterations),
        )  # fmt: skip
    return query_grad, key_grad
