# SPDX-License-Identifier: Apache-2.0
"""The pseudo-inverse of A = softmax(q~ k~ᵀ / √D) (eq. 14 of arXiv:2102.03902), all iterations in one launch; its
product W = A⁺ (B V) with the attention of the landmarks, B V; and the gradients of both.

A program processes one head after the other. Its M×M matrices stay on the chip where they fit: up to 64 landmarks, in
the backward pass only in half precision. Otherwise they are in a workspace of the program, small enough for the
caches, and products read them in strips. The backward pass runs the iterations again, keeps the iterates in the
workspace, and goes back through them.

For float32, matrices are multiplied in three TF32 products, as exact as float32 except for the last bit or two. For
half precision, the iterations multiply in three bfloat16 products, of which tensor cores compute twice as many: after
six iterations A⁺ has errors of 2e-6 to 5e-5. Their gradients are multiplied in one product of rounded TF32, which adds
an error of about 1e-3. Rounding q~ and k~ to bfloat16 already adds 3e-3 to 9e-2.

Legend as in `rows.py`; I iterations.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..common import (
    LOG2_E,
    capability_compiled_for,
    dot,
    kernel,
    load_tile,
    on_device,
    programs_at_once,
    store_tile,
    tile,
)
from .rows import Rows, row_arguments

# The largest number of landmarks whose matrices fit on the chip.
ON_CHIP_LANDMARKS = 64
# Matrices in a program's workspace, besides the iterates.
WORKSPACE = tl.constexpr(8)
# Up to this number of iterations, half precision multiplies in bfloat16. Each iteration makes the errors of a singular
# matrix about three times as large.
BFLOAT16_ITERATIONS = 8
# Programs that a multiprocessor runs at once. Further heads reuse these programs and their workspaces.
_RESIDENT = 2


@triton.jit
def _rounded(a):
    """float32 rounded to the nearest TF32; tensor cores would truncate it."""
    bits = (a.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _dot(a, b, PRODUCTS: tl.constexpr, acc=None):
    """a b + acc of float32. PRODUCTS: as FLOAT32 of `dot`, or "tf32", one TF32 product of rounded operands."""
    if PRODUCTS == "tf32":
        return tl.dot(_rounded(a), _rounded(b), acc, input_precision="tf32")
    else:
        return dot(a, b, acc, PRODUCTS)


@triton.jit
def _places(matrix, BLOCK_M: tl.constexpr):
    index = tl.arange(0, BLOCK_M)
    return matrix + index[:, None] * BLOCK_M + index[None, :]


@triton.jit
def _store(matrix, content, BLOCK_M: tl.constexpr):
    """Writes a matrix to the workspace, between two barriers: all threads have read the old one, all see the new."""
    tl.debug_barrier()
    tl.store(_places(matrix, BLOCK_M), content)
    tl.debug_barrier()


@triton.jit
def _hold(place, content, STRIP: tl.constexpr, BLOCK_M: tl.constexpr):
    """A matrix in the form that products take: itself if STRIP is 0 (on the chip), else its place in the workspace, to
    which it is written here.
    """
    if STRIP == 0:
        return content
    else:
        _store(place, content, BLOCK_M)
        return place


@triton.jit
def _recall(place, STRIP: tl.constexpr, BLOCK_M: tl.constexpr):
    """A matrix that was written to the workspace before, in the form that products take."""
    if STRIP == 0:
        return tl.load(_places(place, BLOCK_M))
    else:
        return place


@triton.jit
def _content(held, STRIP: tl.constexpr, BLOCK_M: tl.constexpr):
    """The elements of a matrix in the form that products take."""
    if STRIP == 0:
        return held
    else:
        return tl.load(_places(held, BLOCK_M))


@triton.jit
def _product(
    a, b, acc, A_T: tl.constexpr, B_T: tl.constexpr,
    PRODUCTS: tl.constexpr, STRIP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """a b + acc of two matrices as returned by `_hold`, or of their transposes."""
    if STRIP == 0:
        if A_T:
            a = tl.trans(a)
        if B_T:
            b = tl.trans(b)
        return _dot(a, b, PRODUCTS, acc)
    else:
        index = tl.arange(0, BLOCK_M)
        for start in range(0, BLOCK_M, STRIP):
            strip = start + tl.arange(0, STRIP)
            if A_T:
                left = tl.trans(tl.load(a + strip[:, None] * BLOCK_M + index[None, :]))
            else:
                left = tl.load(a + index[:, None] * BLOCK_M + strip[None, :])
            if B_T:
                right = tl.trans(tl.load(b + index[:, None] * BLOCK_M + strip[None, :]))
            else:
                right = tl.load(b + strip[:, None] * BLOCK_M + index[None, :])
            acc = _dot(left, right, PRODUCTS, acc)
        return acc


@triton.jit
def _times_states(
    a, states, A_T: tl.constexpr, PRODUCTS: tl.constexpr, STRIP: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The product of a matrix as returned by `_hold`, or of its transpose, with states (M, D)."""
    index = tl.arange(0, BLOCK_M)
    if STRIP == 0:
        if A_T:
            a = tl.trans(a)
        return _dot(a, load_tile(states, index, D, index < M, D, BLOCK_D).to(tl.float32), PRODUCTS)
    else:
        out = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(0, BLOCK_M, STRIP):
            strip = start + tl.arange(0, STRIP)
            if A_T:
                left = tl.trans(tl.load(a + strip[:, None] * BLOCK_M + index[None, :]))
            else:
                left = tl.load(a + index[:, None] * BLOCK_M + strip[None, :])
            right = load_tile(states, strip, D, strip < M, D, BLOCK_D).to(tl.float32)
            out = _dot(left, right, PRODUCTS, out)
        return out


@triton.jit
def _describe_landmarks(sizes, exists, row, M: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr):
    """m, and whether every token of the row is its own landmark."""
    if MASKED:
        place = row * M + tl.arange(0, BLOCK_M)
        there = tl.load(exists + place, mask=tl.arange(0, BLOCK_M) < M, other=0) != 0
        size = tl.load(sizes + place, mask=there, other=0)
        return tl.sum(there.to(tl.int32), axis=0), tl.max(size, axis=0) <= 1
    else:
        return M, False


@triton.jit
def _softmax_of_landmarks(
    q_landmarks, k_landmarks, count, scale, M: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A (BLOCK_M, BLOCK_M), zero in the rows and columns of landmarks that do not exist."""
    index = tl.arange(0, BLOCK_M)
    q = load_tile(q_landmarks, index, D, index < M, D, BLOCK_D)
    k = load_tile(k_landmarks, index, D, index < M, D, BLOCK_D).to(q.dtype)
    scores = dot(q, tl.trans(k)) * (scale * LOG2_E)
    scores = tl.where((index < count)[None, :], scores, -float("inf"))
    # Finite also where no landmark exists.
    weights = tl.exp2(scores - tl.maximum(tl.max(scores, axis=1), -1e30)[:, None])
    weights = weights / tl.maximum(tl.sum(weights, axis=1), 1e-30)[:, None]
    return tl.where((index < count)[:, None], weights, 0.0)


@triton.jit
def _norms(a):
    """The column sums (1, M), the largest column sum and the largest row sum (1, 1), both positive even for zeros."""
    # All in two dimensions: Triton 3.7 fails to reduce a vector to a scalar for capability 10.0.
    columns = tl.sum(a, axis=0, keep_dims=True)
    largest_column = tl.maximum(tl.max(columns, axis=1, keep_dims=True), 1e-15)
    rows = tl.sum(a, axis=1, keep_dims=True)
    return columns, largest_column, tl.maximum(tl.max(rows, axis=0, keep_dims=True), 1e-15)


@triton.jit
def _iterate(
    a, workspace, iterates, steps,
    PRODUCTS: tl.constexpr, KEEP: tl.constexpr, STRIP: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Z after `steps` steps from Aᵀ / (‖A‖₁ ‖A‖∞). KEEP: stores all Z before it in `iterates`.

    Z' = Z/4 (13 I - P (15 I - P (7 I - P))), P = A Z.
    """
    size: tl.constexpr = BLOCK_M * BLOCK_M
    index = tl.arange(0, BLOCK_M)
    on_diagonal = index[:, None] == index[None, :]
    nothing = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
    _, largest_column, largest_row = _norms(a)
    z = tl.trans(a) / (largest_column * largest_row)
    a_held = _hold(workspace, a, STRIP, BLOCK_M)
    z_place = workspace + 3 * size
    for step in range(steps):
        if KEEP:
            z_place = iterates + step * size
            if STRIP == 0:
                tl.store(_places(z_place, BLOCK_M), z)
        z_held = _hold(z_place, z, STRIP, BLOCK_M)
        p = _product(a_held, z_held, nothing, False, False, PRODUCTS, STRIP, BLOCK_M)
        p_held = _hold(workspace + size, p, STRIP, BLOCK_M)
        r = tl.where(on_diagonal, 7.0, 0.0) - p
        for more in range(2):
            r_held = _hold(workspace + 2 * size, r, STRIP, BLOCK_M)
            r = -_product(
                p_held, r_held, tl.where(on_diagonal, 2.0 * more - 15.0, 0.0), False, False, PRODUCTS, STRIP, BLOCK_M
            )
        r_held = _hold(workspace + 2 * size, r, STRIP, BLOCK_M)
        z = 0.25 * _product(z_held, r_held, nothing, False, False, PRODUCTS, STRIP, BLOCK_M)
    return z


@triton.jit
def _selection(z, is_exact, count, MASKED: tl.constexpr, BLOCK_M: tl.constexpr):
    """A⁺; the identity where every token is its own landmark, because B alone then selects the tokens."""
    if MASKED:
        index = tl.arange(0, BLOCK_M)
        selected = (index[:, None] == index[None, :]) & (index < count)[None, :]
        z = tl.where(is_exact, selected.to(tl.float32), z)
    return z


@triton.jit
def _pseudo_inverse_of_head(
    program, q_landmarks, k_landmarks, seen, w, workspace, scale, sizes, exists, H, iterations,
    MASKED: tl.constexpr, PRODUCTS: tl.constexpr, STRIP: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = program * M * D
    count, is_exact = _describe_landmarks(sizes, exists, program // H, M, MASKED, BLOCK_M)
    steps = iterations
    if MASKED:
        steps = tl.where(is_exact, 0, iterations)
    a = _softmax_of_landmarks(q_landmarks + head, k_landmarks + head, count, scale, M, D, BLOCK_M, BLOCK_D)
    z = _iterate(a, workspace, workspace, steps, PRODUCTS, False, STRIP, BLOCK_M)
    z_held = _hold(workspace, _selection(z, is_exact, count, MASKED, BLOCK_M), STRIP, BLOCK_M)
    out = _times_states(z_held, seen + head, False, PRODUCTS, STRIP, M, D, BLOCK_M, BLOCK_D)
    index = tl.arange(0, BLOCK_M)
    store_tile(w + head, index, D, index < M, out, D, BLOCK_D)


@kernel
def _pseudo_inverse_fwd_kernel(
    q_landmarks, k_landmarks, seen, w, workspace, scale, sizes, exists, H, iterations, programs,
    MASKED: tl.constexpr, PRODUCTS: tl.constexpr, STRIP: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if STRIP == 0:
        _pseudo_inverse_of_head(
            program, q_landmarks, k_landmarks, seen, w, workspace, scale, sizes, exists, H, iterations,
            MASKED, PRODUCTS, STRIP, M, D, BLOCK_M, BLOCK_D,
        )  # fmt: skip
    else:
        workspace += program.to(tl.int64) * WORKSPACE * BLOCK_M * BLOCK_M
        for head in range(program, programs, tl.num_programs(0)):
            _pseudo_inverse_of_head(
                head, q_landmarks, k_landmarks, seen, w, workspace, scale, sizes, exists, H, iterations,
                MASKED, PRODUCTS, STRIP, M, D, BLOCK_M, BLOCK_D,
            )  # fmt: skip


@kernel
def _pseudo_inverse_bwd_kernel(
    q_landmarks, k_landmarks, seen, dw, dk_landmarks, dq_landmarks, dk_out, dseen, workspace, iterates,
    scale, sizes, exists, H, iterations, programs,
    MASKED: tl.constexpr, PRODUCTS: tl.constexpr, OF_GRADIENTS: tl.constexpr, STRIP: tl.constexpr,
    M: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dk_out: the gradient of the keys' landmarks from A, plus dk_landmarks, their gradient from the other stages.
    OF_GRADIENTS: as PRODUCTS, after the iterations."""
    size: tl.constexpr = BLOCK_M * BLOCK_M
    workspace += tl.program_id(0).to(tl.int64) * WORKSPACE * size
    iterates += tl.program_id(0).to(tl.int64) * iterations * size
    index = tl.arange(0, BLOCK_M)
    inside = index < M
    nothing = tl.zeros([BLOCK_M, BLOCK_M], tl.float32)
    a_place = workspace + 5 * size
    h_place = workspace + 7 * size
    da_place = workspace + 6 * size
    for program in range(tl.program_id(0), programs, tl.num_programs(0)):
        head = program * M * D
        count, is_exact = _describe_landmarks(sizes, exists, program // H, M, MASKED, BLOCK_M)
        steps = iterations
        if MASKED:
            steps = tl.where(is_exact, 0, iterations)
        a = _softmax_of_landmarks(q_landmarks + head, k_landmarks + head, count, scale, M, D, BLOCK_M, BLOCK_D)
        _store(a_place, a, BLOCK_M)
        _store(da_place, tl.zeros([BLOCK_M, BLOCK_M], tl.float32), BLOCK_M)
        z = _iterate(a, workspace, iterates, steps, PRODUCTS, True, STRIP, BLOCK_M)
        z_held = _hold(workspace, _selection(z, is_exact, count, MASKED, BLOCK_M), STRIP, BLOCK_M)
        out = _times_states(z_held, dw + head, True, OF_GRADIENTS, STRIP, M, D, BLOCK_M, BLOCK_D)
        store_tile(dseen + head, index, D, inside, out, D, BLOCK_D)
        dw_block = load_tile(dw + head, index, D, inside, D, BLOCK_D)
        seen_block = load_tile(seen + head, index, D, inside, D, BLOCK_D)
        g = _dot(dw_block, tl.trans(seen_block), OF_GRADIENTS)
        if MASKED:
            g = tl.where(is_exact, 0.0, g)
        tl.debug_barrier()
        for back in range(steps):
            # Z' = Z/4 U with U = 13 I - 15 P + 7 P² - P³; g is the gradient of Z', x of U, dp of P.
            z_held = _recall(iterates + (steps - 1 - back) * size, STRIP, BLOCK_M)
            a_held = _recall(a_place, STRIP, BLOCK_M)
            g_held = _hold(workspace, g, STRIP, BLOCK_M)
            p = _product(a_held, z_held, nothing, False, False, OF_GRADIENTS, STRIP, BLOCK_M)
            p_held = _hold(workspace + size, p, STRIP, BLOCK_M)
            x = 0.25 * _product(z_held, g_held, nothing, True, False, OF_GRADIENTS, STRIP, BLOCK_M)
            x_held = _hold(workspace + 2 * size, x, STRIP, BLOCK_M)
            # g Uᵀ = 13 g - (15 g - (7 g - g Pᵀ) Pᵀ) Pᵀ
            h = -7.0 * _content(g_held, STRIP, BLOCK_M)
            h = -_product(g_held, p_held, h, False, True, OF_GRADIENTS, STRIP, BLOCK_M)
            for more in range(2):
                h_held = _hold(workspace + 3 * size, h, STRIP, BLOCK_M)
                h = (2.0 * more - 15.0) * _content(g_held, STRIP, BLOCK_M)
                h = -_product(h_held, p_held, h, False, True, OF_GRADIENTS, STRIP, BLOCK_M)
            _store(h_place, 0.25 * h, BLOCK_M)
            # dp = 7 y - 15 x + u Pᵀ - Pᵀ y with y = Pᵀ x, u = 7 x - y - x Pᵀ
            y = _product(p_held, x_held, nothing, True, False, OF_GRADIENTS, STRIP, BLOCK_M)
            y_held = _hold(workspace + 3 * size, y, STRIP, BLOCK_M)
            u = _content(y_held, STRIP, BLOCK_M) - 7.0 * _content(x_held, STRIP, BLOCK_M)
            u = -_product(x_held, p_held, u, False, True, OF_GRADIENTS, STRIP, BLOCK_M)
            u_held = _hold(workspace + 4 * size, u, STRIP, BLOCK_M)
            dp = 7.0 * _content(y_held, STRIP, BLOCK_M) - 15.0 * _content(x_held, STRIP, BLOCK_M)
            dp = _product(u_held, p_held, dp, False, True, OF_GRADIENTS, STRIP, BLOCK_M)
            dp = -_product(p_held, y_held, -dp, True, False, OF_GRADIENTS, STRIP, BLOCK_M)
            dp_held = _hold(workspace + 2 * size, dp, STRIP, BLOCK_M)
            z_held = _recall(iterates + (steps - 1 - back) * size, STRIP, BLOCK_M)
            da = tl.load(_places(da_place, BLOCK_M))
            da = _product(dp_held, z_held, da, False, True, OF_GRADIENTS, STRIP, BLOCK_M)
            _store(da_place, da, BLOCK_M)
            a_held = _recall(a_place, STRIP, BLOCK_M)
            h = tl.load(_places(h_place, BLOCK_M))
            g = _product(a_held, dp_held, h, True, False, OF_GRADIENTS, STRIP, BLOCK_M)
        # Z = Aᵀ / (largest column sum · largest row sum). Rows sum to one, so the softmax cancels the gradient of
        # their sum.
        a = tl.load(_places(a_place, BLOCK_M))
        columns, largest_column, largest_row = _norms(a)
        g = tl.trans(g) / (largest_column * largest_row)
        is_largest = ((columns == largest_column) & (index < count)[None, :]).to(tl.float32)
        of_column = tl.sum(tl.sum(g * a, axis=1, keep_dims=True), axis=0, keep_dims=True) / largest_column
        of_column = of_column / tl.maximum(tl.sum(is_largest, axis=1, keep_dims=True), 1.0)
        da = tl.load(_places(da_place, BLOCK_M)) + g - of_column * is_largest
        ds = a * (da - tl.sum(a * da, axis=1)[:, None]) * scale
        ds_held = _hold(workspace, ds, STRIP, BLOCK_M)
        of_q = _times_states(ds_held, k_landmarks + head, False, OF_GRADIENTS, STRIP, M, D, BLOCK_M, BLOCK_D)
        store_tile(dq_landmarks + head, index, D, inside, of_q, D, BLOCK_D)
        of_k = load_tile(dk_landmarks + head, index, D, inside, D, BLOCK_D)
        of_k += _times_states(ds_held, q_landmarks + head, True, OF_GRADIENTS, STRIP, M, D, BLOCK_M, BLOCK_D)
        store_tile(dk_out + head, index, D, inside, of_k, D, BLOCK_D)
        tl.debug_barrier()


def _programs(q_landmarks: Tensor) -> int:
    batch, heads = q_landmarks.shape[:2]
    return min(batch * heads, programs_at_once(q_landmarks.device, _RESIDENT))


def _arguments(q_landmarks: Tensor, iterations: int, rows: Rows | None) -> dict[str, Any]:
    batch, heads = q_landmarks.shape[:2]
    ragged = row_arguments(rows)
    chosen = {name: ragged[name] for name in ("sizes", "exists", "MASKED")}
    chosen["PRODUCTS"] = _products(q_landmarks, iterations)
    return {"H": heads, "iterations": iterations, "programs": batch * heads, **chosen}


def _sizes(q_landmarks: Tensor, on_chip: bool) -> dict[str, int]:
    count, dim = q_landmarks.shape[2:]
    block = tile(count)
    # For products of matrices in a workspace: as many columns and rows at a time as the registers hold.
    strip = 0 if on_chip else min(block, 2048 // block)
    return {
        "STRIP": strip,
        "M": count,
        "D": dim,
        "BLOCK_M": block,
        "BLOCK_D": tile(dim),
        "num_warps": 4 if block <= 64 else 8,
        "num_stages": 1,
    }


def _products(q_landmarks: Tensor, iterations: int) -> str:
    """How the iterations multiply."""
    half = q_landmarks.dtype != torch.float32
    return "bf16x3" if half and iterations <= BFLOAT16_ITERATIONS else "tf32x3"


def _workspaces(q_landmarks: Tensor, programs: int, matrices: int) -> Tensor:
    """(programs, matrices, BLOCK_M, BLOCK_M) float32."""
    block = tile(q_landmarks.shape[2])
    return q_landmarks.new_empty(programs, matrices, block, block, dtype=torch.float32)


def pseudo_inverse_forward(
    q_landmarks: Tensor, k_landmarks: Tensor, seen: Tensor, iterations: int = 6, rows: Rows | None = None
) -> Tensor:
    """W = A⁺ seen, with A = softmax(q~ k~ᵀ / √D). Each matrix is scaled by its own norms, as in `iterative_pinv`.

    Args:
        q_landmarks: (B, H, M, D), M and D at most 128. k_landmarks, seen: the same, float32. All contiguous.
        iterations: number of steps.
        rows: the ragged batch; None where every token is valid.

    Returns: (B, H, M, D), in the dtype of `q_landmarks`. Where every token of a row is its own landmark, it equals
    `seen`, which `landmark_attention_forward` then sets to the values of the tokens.
    """
    batch, heads, count, dim = q_landmarks.shape
    on_chip = count <= ON_CHIP_LANDMARKS
    programs = batch * heads if on_chip else _programs(q_landmarks)
    workspace = _workspaces(q_landmarks, programs, 0 if on_chip else WORKSPACE.value)
    w = torch.empty_like(q_landmarks)
    with on_device(q_landmarks):
        _pseudo_inverse_fwd_kernel[(programs,)](
            q_landmarks, k_landmarks, seen, w, workspace, dim**-0.5, **_arguments(q_landmarks, iterations, rows),
            **_sizes(q_landmarks, on_chip),
        )  # fmt: skip
    return w


def pseudo_inverse_backward(
    q_landmarks: Tensor,
    k_landmarks: Tensor,
    seen: Tensor,
    dw: Tensor,
    dk_landmarks: Tensor,
    iterations: int,
    rows: Rows | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q_landmarks, k_landmarks and `seen` from dw, that of W; all (B, H, M, D) float32, contiguous.

    dk_landmarks: the gradient of the keys' landmarks from the other stages, which the returned one includes.
    """
    count, dim = q_landmarks.shape[2:]
    half = q_landmarks.dtype != torch.float32
    # On the chip, the products of all steps together need more tensor memory than capability 10.0 has.
    has_room = capability_compiled_for(q_landmarks.device) // 10 != 10
    on_chip = half and has_room and count <= ON_CHIP_LANDMARKS
    programs = _programs(q_landmarks)
    workspace = _workspaces(q_landmarks, programs, WORKSPACE.value)
    iterates = _workspaces(q_landmarks, programs, iterations)
    dq_landmarks, dk_out, dseen = torch.empty_like(seen), torch.empty_like(seen), torch.empty_like(seen)
    with on_device(q_landmarks):
        _pseudo_inverse_bwd_kernel[(programs,)](
            q_landmarks, k_landmarks, seen, dw, dk_landmarks, dq_landmarks, dk_out, dseen, workspace, iterates,
            dim**-0.5, **_arguments(q_landmarks, iterations, rows), OF_GRADIENTS="tf32" if half else "tf32x3",
            **_sizes(q_landmarks, on_chip),
        )  # fmt: skip
    return dq_landmarks, dk_out, dseen
