# SPDX-License-Identifier: Apache-2.0
"""The measures against their formulas in float64, and where the answer is known."""

import pytest
import torch

from nystrom_models.analysis.measures import (
    cumulative_share,
    exact_map,
    landmark_matrix,
    nystrom_map,
    pinv_residual,
    relative_error,
    singular_values,
    smallest_rank,
    smallest_sufficient,
    squared_sums,
    squared_tails,
)

HEADS, LENGTH, DIM = 3, 29, 8
SCALING = 0.7


@pytest.fixture
def states():
    return torch.randn(2, HEADS, LENGTH, DIM, dtype=torch.float64) * 2


def by_hand(query, key, number):
    """Nyström attention of one head by the paper's formula, with an exact pseudo-inverse."""
    sizes = [LENGTH // number + (place >= number - LENGTH % number) for place in range(number)]
    landmarks = [torch.stack([part.mean(0) for part in states.split(sizes)]) for states in (query, key)]
    f, a, b = (
        torch.softmax(left @ right.T * SCALING, dim=-1)
        for left, right in ((query, landmarks[1]), landmarks, (landmarks[0], key))
    )
    return f @ torch.linalg.pinv(a) @ b, a


@pytest.mark.parametrize("number", [1, 7, 28])
def test_the_error_of_nystrom_attention_is_that_of_the_formulas(states, number):
    query, key = states
    exact = exact_map(query, key, SCALING)
    found = nystrom_map(query, key, number, pinv_iterations=40, scaling=SCALING)
    for head in range(HEADS):
        true = torch.softmax(query[head] @ key[head].T * SCALING, dim=-1)
        approximated, a = by_hand(query[head], key[head], number)
        wanted = torch.linalg.matrix_norm(approximated - true) / torch.linalg.matrix_norm(true)
        error = relative_error(squared_sums(found, exact))[head]
        torch.testing.assert_close(error, wanted, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(landmark_matrix(query, key, number, SCALING)[head], a)
    # In float32, as models are measured, with the paper's iterations.
    double, single = (nystrom_map(*states.to(dtype), number, 6, SCALING) for dtype in (torch.float64, torch.float32))
    assert (single - double).norm() / double.norm() < 1e-4


def test_rows_that_are_chosen_are_those_of_the_whole(states):
    query, key = states
    rows = torch.tensor([0, 5, 28])
    torch.testing.assert_close(exact_map(query, key, rows=rows), exact_map(query, key)[:, rows])
    torch.testing.assert_close(nystrom_map(query, key, 7, rows=rows), nystrom_map(query, key, 7)[:, rows])
    causal = exact_map(query, key, is_causal=True)
    torch.testing.assert_close(causal, causal.tril())
    torch.testing.assert_close(causal.sum(-1), torch.ones(HEADS, LENGTH, dtype=torch.float64))
    torch.testing.assert_close(exact_map(query, key, rows=rows, is_causal=True), causal[:, rows])


@pytest.mark.parametrize("number", [LENGTH, LENGTH + 5, None])
def test_as_many_landmarks_as_tokens_make_no_error(states, number):
    query, key = states.float()
    assert relative_error(squared_sums(nystrom_map(query, key, number), exact_map(query, key))).tolist() == [0] * HEADS


def test_tokens_of_r_kinds_need_r_landmarks(states):
    """If queries and keys are equal within each of six segments, six landmarks are exact, and five are not."""
    query, key = (part[:, :6].repeat_interleave(4, dim=1) for part in states)
    exact = exact_map(query, key)
    errors = [
        relative_error(squared_sums(nystrom_map(query, key, number, pinv_iterations=40), exact))
        for number in (5, 6, 12)
    ]
    assert errors[0].min() > 1e-3
    assert errors[1].max() < 1e-9 and errors[2].max() < 1e-9
    values = singular_values(exact)
    assert [smallest_rank(tails, 1e-9) for tails in squared_tails(values)] == [6] * HEADS
    assert (cumulative_share(values)[:, 5] > 1 - 1e-9).all() and (cumulative_share(values)[:, 4] < 1 - 1e-3).all()


def test_the_rank_that_an_error_needs_is_that_of_the_truncated_map(states):
    exact = exact_map(*states)
    u, values, v = torch.linalg.svd(exact)
    torch.testing.assert_close(singular_values(exact), values)
    for head, tails in enumerate(squared_tails(values)):
        errors = [
            torch.linalg.matrix_norm(u[head, :, :k] * values[head, :k] @ v[head, :k] - exact[head])
            / torch.linalg.matrix_norm(exact[head])
            for k in range(1, LENGTH + 1)
        ]
        assert smallest_rank(tails, 0.1) == next(k for k, error in enumerate(errors, start=1) if error <= 0.1)


def test_the_residual_is_that_of_the_iteration_and_falls():
    assert pinv_residual(torch.eye(5)[None], 6).item() < 1e-6
    matrix = torch.softmax(3 * torch.randn(2, 9, 9, dtype=torch.float64), dim=-1)
    residuals = torch.stack([pinv_residual(matrix, iterations) for iterations in (1, 3, 6, 20)])
    assert (residuals.diff(dim=0) < 0).all() and residuals[-1].max() < 1e-9
    z = matrix[0].T / (matrix[0].abs().sum(0).max() * matrix[0].abs().sum(1).max())
    identity = torch.eye(9, dtype=torch.float64)
    product = matrix[0] @ z
    z = z / 4 @ (13 * identity - product @ (15 * identity - product @ (7 * identity - product)))
    wanted = torch.linalg.matrix_norm(matrix[0] @ z @ matrix[0] - matrix[0]) / torch.linalg.matrix_norm(matrix[0])
    torch.testing.assert_close(residuals[0, 0], wanted)


def test_errors_of_parts_are_added_as_squares():
    parts = [(torch.randn(1, 4, 5), torch.randn(1, 4, 5)) for _ in range(2)]
    together = relative_error(sum(squared_sums(*part) for part in parts))
    whole = [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
    torch.testing.assert_close(together.item(), ((whole[0] - whole[1]).norm() / whole[1].norm()).item())
    assert relative_error(squared_sums(torch.zeros(1, 3), torch.zeros(1, 3))).item() == 0


@pytest.mark.parametrize(
    ("errors", "needed"),
    [
        ([(16, 0.3), (32, 0.1), (64, 0.05)], 32),
        ([(16, 0.05), (32, 0.2), (64, 0.05)], 64),  # 16 is not enough, because 32 is not
        ([(16, 0.3), (64, 0.2)], 100),
        ([(64, 0.01), (16, 0.02)], 16),
        ([(128, 0.0), (16, 0.5)], 100),
        ([(16, 0.05), (32, float("nan")), (64, 0.05)], 64),  # NaN is never enough
    ],
)
def test_the_landmarks_that_an_error_needs(errors, needed):
    assert smallest_sufficient(errors, 0.1, exact=100) == needed
