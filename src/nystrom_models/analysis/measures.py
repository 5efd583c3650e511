# SPDX-License-Identifier: Apache-2.0
"""The error of an approximation of attention: tensors in, tensors out.

Legend: H heads, N tokens, R chosen rows, D head size, M landmarks, m = min(M, N). All tokens are valid.

The relative error of an approximation X̂ of X, a map or an output, is that of the Frobenius norm,

    ‖X̂ - X‖ / ‖X‖ = √(Σ (x̂ - x)² / Σ x²),

0 if both are equal, 1 for X̂ = 0. Over several heads, rows or texts, both sums are taken over all of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.attention_nystrom import iterative_pinv, nystrom_attention_map, scaled_query, segment_means
from ..models.masked_attention import attention_weights, softmax_attention_map


def exact_map(
    query: Tensor, key: Tensor, scaling: float | None = None, rows: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """softmax(q kᵀ · scaling), (H, R, N), of the queries of `rows` (R,) int64, or of all.

    query, key: (H, N, D). scaling: 1 / √D by default. is_causal: whether a query sees only itself and previous tokens.
    """
    return softmax_attention_map(query[None], key[None], causal=is_causal, rows=rows, scaling=scaling)[0]


def nystrom_map(
    query: Tensor,
    key: Tensor,
    num_landmarks: int | None,
    pinv_iterations: int = 6,
    scaling: float | None = None,
    rows: Tensor | None = None,
) -> Tensor:
    """F A⁺ B (eq. 15 of arXiv:2102.03902), (H, R, N), in memory linear in N.

    num_landmarks: M; exact attention for M >= N, and for None. pinv_iterations: steps of `iterative_pinv`. The others:
    see `exact_map`.
    """
    query = scaled_query(query, scaling)[None]
    return nystrom_attention_map(
        query, key[None], num_landmarks=num_landmarks, pinv_iterations=pinv_iterations, rows=rows
    )[0]


def squared_sums(approximation: Tensor, exact: Tensor) -> Tensor:
    """(H, 2) float64: Σ (x̂ - x)² and Σ x² of each head, of tensors (H, ...). `relative_error` takes their totals."""
    parts = (approximation - exact, exact)
    return torch.stack([part.square().flatten(1).sum(1, dtype=torch.float64) for part in parts], dim=-1)


def relative_error(sums: Tensor) -> Tensor:
    """√(Σ (x̂ - x)² / Σ x²) from sums (..., 2)."""
    return (sums[..., 0] / sums[..., 1].clamp_min(torch.finfo(sums.dtype).tiny)).sqrt()


def landmark_matrix(query: Tensor, key: Tensor, num_landmarks: int, scaling: float | None = None) -> Tensor:
    """A = softmax(q~ k~ᵀ · scaling), (H, m, m), in float32 at least; q~ and k~ are the means of segments (eq. 16)."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    query_means, key_means = (segment_means(states.to(dtype), num_landmarks) for states in (query, key))
    return attention_weights(query_means, key_means, None, scaling)


def pinv_residual(matrix: Tensor, iterations: int) -> Tensor:
    """‖A Z A - A‖ / ‖A‖ of A (..., m, m) and Z = `iterative_pinv(A)`: 0 for a pseudo-inverse that has converged."""
    difference = matrix @ iterative_pinv(matrix, iterations) @ matrix - matrix
    return torch.linalg.matrix_norm(difference) / torch.linalg.matrix_norm(matrix)


def singular_values(attention_map: Tensor) -> Tensor:
    """(..., min(R, N)) of maps (..., R, N), the largest first."""
    return torch.linalg.svdvals(attention_map.to(torch.promote_types(attention_map.dtype, torch.float32)))


def cumulative_share(values: Tensor) -> Tensor:
    """Σ_(i <= k) σ_i / Σ_i σ_i for k = 1, 2, ..., as in figure 1 of arXiv:2006.04768. (..., n) -> (..., n)."""
    return values.cumsum(dim=-1) / values.sum(dim=-1, keepdim=True)


def squared_tails(values: Tensor) -> Tensor:
    """Σ_(i > k) σ_i² for k = 0 to n, (..., n) -> (..., n + 1) float64.

    √(tail_k / tail_0) is the relative error of the best map of rank k (Eckart and Young 1936). No projection to k
    slots has a smaller error.
    """
    squares = values.double().square()
    tails = squares.flip(-1).cumsum(-1).flip(-1)
    return torch.nn.functional.pad(tails, (0, 1))


def smallest_rank(tails: Tensor, error: float) -> int:
    """The smallest k >= 1 with √(tail_k / tail_0) <= error, from tails (n + 1,)."""
    enough = (tails <= error**2 * tails[0]).nonzero()
    return max(1, int(enough[0]))


def smallest_sufficient(errors: Sequence[tuple[int, float]], error: float, exact: int) -> int:
    """The smallest number such that it and all larger ones that were tried stay within the error; `exact`, whose error
    is 0, if there is none.

    errors: pairs of a number, for instance of landmarks, and its error, in any order.
    """
    found = exact
    for number, measured in sorted(errors, reverse=True):
        if number >= exact:
            continue
        if not measured <= error:  # also NaN, after too many iterations of the pseudo-inverse
            break
        found = number
    return found
