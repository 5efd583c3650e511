# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nystrom_models.models import attention_nystrom
from nystrom_models.models.attention_nystrom import (
    iterative_pinv,
    landmark_segments,
    nystrom_attention,
    nystrom_attention_map,
    nystrom_attention_reference,
    nystrom_cross_attention,
    segment_sizes,
)
from nystrom_models.models.depthwise_convolution import depthwise_convolution
from tests.models import formulas
from tests.models.options import ATTENTION_TOLERANCE, TOLERANCE, relative_error

M = 8


def tensors(length, dtype=torch.float32, batch=3, heads=2, dim=8):
    """query, key, value in the layout of a model, and a convolution."""
    states = [torch.randn(batch, length, heads, dim).to(dtype).transpose(1, 2) for _ in range(3)]
    return *states, torch.randn(heads, 1, 5, 1).to(dtype) / 5


def ragged(length, batch=3):
    """A mask with holes, a left-padded row and a full one."""
    mask = torch.rand(batch, length) < 0.6
    mask[1, : length // 3] = False
    mask[1, length // 3 :] = True
    mask[2] = True
    mask[0, length - 1] = True
    return mask


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 61], ids=lambda length: f"length{length}")
@pytest.mark.parametrize("num_landmarks", [1, M, None], ids=lambda count: f"landmarks{count}")
def test_reference_is_the_formula(length, num_landmarks):
    query, key, value, conv = tensors(length, torch.float64)
    skip = depthwise_convolution(value, conv)
    out = nystrom_attention_reference(query, key, value, num_landmarks=num_landmarks, skip=skip)
    for row in range(3):
        for head in range(2):
            q, k, v = query[row, head], key[row, head], value[row, head]
            expected = formulas.nystrom_matrix(q, k, num_landmarks) @ v + formulas.convolution(v, conv[head, 0, :, 0])
            assert relative_error(out[row, head], expected) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("masked", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize("num_landmarks", [1, M, None], ids=lambda count: f"landmarks{count}")
def test_gradients_are_those_of_the_formula(num_landmarks, masked):
    """Also through the pseudo-inverse, which the reference and the fast path share."""
    inputs = [tensor.requires_grad_() for tensor in tensors(29, torch.float64)[:3]]
    mask = ragged(29) if masked else torch.ones(3, 29, dtype=torch.bool)
    weight = torch.randn(inputs[2].shape, dtype=torch.float64) * mask[:, None, :, None]
    out = nystrom_attention(*inputs, mask if masked else None, num_landmarks=num_landmarks)
    total = 0
    for row in range(3):
        for head in range(2):
            q, k, v, w = (tensor[row, head][mask[row]] for tensor in (*inputs, weight))
            total = total + (formulas.nystrom_matrix(q, k, num_landmarks) @ v * w).sum()
    found, expected = (torch.autograd.grad(one, inputs) for one in ((out * weight).sum(), total))
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < 1.4e-14  # measured: 3.3e-15


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 61], ids=lambda length: f"length{length}")
def test_fast_path_is_the_reference(length, masked, dtype):
    query, key, value, conv = tensors(length, dtype)
    mask = ragged(length) if masked else None
    valid = torch.ones(3, length, dtype=torch.bool) if mask is None else mask
    weight = torch.randn(query.shape).to(dtype) * valid[:, None, :, None]
    results = []
    for function in (nystrom_attention, nystrom_attention_reference):
        inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value, conv)]
        skip = depthwise_convolution(inputs[2], inputs[3], mask)
        out = function(*inputs[:3], mask, num_landmarks=M, skip=skip)
        (out * weight).sum().backward()
        assert out.dtype == dtype
        results.append([(out * valid[:, None, :, None]).detach(), *(tensor.grad for tensor in inputs)])
    for name, fast, reference in zip(("out", "dq", "dk", "dv", "dconv"), *results, strict=True):
        # With a single key the gradients of query and key are zero except for rounding: compare them with the values'.
        floor = results[1][3].abs().max().view(1)
        fast, reference = (torch.cat([tensor.flatten(), floor]) for tensor in (fast, reference))
        assert relative_error(fast, reference) < ATTENTION_TOLERANCE[dtype], name


@given(st.data())
def test_padding_is_never_seen(data):
    """A row at any position in a batch, with random padding, gives the same as its valid tokens alone."""
    length = data.draw(st.integers(1, 40))
    num_landmarks = data.draw(st.integers(1, 12))
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=3))
    )
    query, key, value, _ = tensors(length, torch.float64, batch=len(mask))
    for tensor in (query, key, value):
        tensor.masked_fill_(~mask[:, None, :, None], 1e3)
    out = nystrom_attention(query, key, value, mask, num_landmarks=num_landmarks)
    assert torch.isfinite(out).all()
    for row in range(len(mask)):
        valid = mask[row]
        if valid.any():
            alone = [tensor[row : row + 1][:, :, valid] for tensor in (query, key, value)]
            expected = nystrom_attention(*alone, num_landmarks=num_landmarks)
            assert relative_error(out[row : row + 1][:, :, valid], expected) < TOLERANCE[torch.float64]


@given(st.integers(1, 200), st.integers(1, 40))
def test_segments_cover_the_tokens(length, num_landmarks):
    sizes = segment_sizes(length, num_landmarks)
    assert sum(sizes) == length and len(sizes) == min(length, num_landmarks)
    assert sizes == sorted(sizes) and sizes[-1] - sizes[0] <= 1
    segments = landmark_segments(torch.ones(1, length, dtype=torch.bool), num_landmarks)
    positions = segments[0][0][segments.inside[0]]
    assert positions.tolist() == list(range(length))
    assert segments.size[0][segments.exists[0]].tolist() == sizes


def test_pseudo_inverse_converges_to_moore_penrose():
    matrix = torch.softmax(3 * torch.randn(4, 12, 12, dtype=torch.float64), dim=-1)
    assert relative_error(iterative_pinv(matrix, 40), torch.linalg.pinv(matrix)) < 1.8e-13  # measured: 4.5e-14


def test_a_matrix_is_inverted_by_itself():
    matrix = torch.softmax(torch.randn(3, 6, 6, dtype=torch.float64), dim=-1)
    # With many iterations, the start would not matter.
    for iterations in (0, 1, 6):
        for row in range(3):
            found, expected = iterative_pinv(matrix, iterations)[row], iterative_pinv(matrix[row], iterations)
            assert relative_error(found, expected) < TOLERANCE[torch.float64]


def test_the_inverse_of_a_multiple():
    """The start is divided by both norms, so that the size of the matrix does not matter."""
    matrix = torch.softmax(3 * torch.randn(4, 12, 12, dtype=torch.float64), dim=-1)
    for factor in (0.01, 100.0):
        assert relative_error(iterative_pinv(factor * matrix) * factor, iterative_pinv(matrix)) < 2.7e-15


def test_the_inverse_is_that_of_float32_under_autocast():
    states = torch.randn(2, 3, 2, M, 8)
    expected = attention_nystrom._landmark_pinv(*states, None, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attention_nystrom._landmark_pinv(*states, None, 6)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_map_carries_values_and_gives_single_rows():
    query, key, value, _ = tensors(29, torch.float64)
    mask = ragged(29)
    full = nystrom_attention_map(query, key, mask, num_landmarks=M)
    assert relative_error(full @ value, nystrom_attention(query, key, value, mask, num_landmarks=M)) < 1e-12
    assert not full.masked_select(~mask[:, None, None, :]).any()
    rows = torch.tensor([28, 3])
    by_row = torch.tensor([[28, 3], [3, 0], [1, 2]])
    assert torch.allclose(nystrom_attention_map(query, key, mask, num_landmarks=M, rows=rows), full[:, :, rows])
    some = nystrom_attention_map(query, key, mask, num_landmarks=M, rows=by_row)
    assert torch.allclose(some, torch.stack([full[row][:, by_row[row]] for row in range(3)]))


def test_half_precision_inverts_in_float32():
    """With bfloat16 weights or autocast, the result is close to the exact one for the same inputs."""
    query, key, value, _ = tensors(64, torch.bfloat16)
    exact = nystrom_attention(query.double(), key.double(), value.double(), num_landmarks=M)
    # Measured: 6.5e-3.
    assert relative_error(nystrom_attention(query, key, value, num_landmarks=M), exact) < 2.6e-2
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = nystrom_attention(query.float(), key.float(), value.float(), num_landmarks=M)
    assert relative_error(mixed, exact) < 5.8e-2  # measured: 1.5e-2


@pytest.mark.parametrize("with_map", [False, True], ids=["attention", "map"])
def test_the_pseudo_inverse_is_applied_in_float32_under_autocast(with_map):
    """Its entries are large, and nearly cancel: applied in bfloat16, the error is 3e-2."""
    query, key = 0.3 * torch.randn(2, 1, 2, 512, 32)
    value = torch.randn(1, 2, 512, 32)
    options = {"num_landmarks": 64, "pinv_iterations": 10}
    exact = nystrom_attention(query.double(), key.double(), value.double(), **options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        if with_map:
            mixed = nystrom_attention_map(query, key, **options) @ value
        else:
            mixed = nystrom_attention(query, key, value, **options)
    assert relative_error(mixed, exact) < 1.4e-2  # measured: 3.6e-3


def test_nothing_of_size_tokens_by_landmarks_is_stored():
    """No allocation, according to PyTorch's profiler, reaches half of an N×M matrix for each head."""
    length, heads, dim, landmarks = 4096, 2, 8, 64
    query, key, value = (torch.randn(1, heads, length, dim) for _ in range(3))
    with torch.no_grad(), torch.profiler.profile(profile_memory=True) as profile:
        nystrom_attention(query, key, value, num_landmarks=landmarks)
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < heads * length * landmarks * 4 / 2


@pytest.mark.parametrize("ragged_rows", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_landmarks_in_half_precision_are_not_off_in_one_direction(dtype, ragged_rows):
    """Segments of 37 tokens: 1 / 37 in half precision has an error of 0.18 % or 0.014 %, as would every mean."""
    states = torch.randn(2, 2, 8 * 37, 16).add(1).to(dtype)
    exact = states.double().unflatten(2, (8, 37)).mean(dim=3)
    if ragged_rows:
        mask = torch.ones(2, 8 * 37, dtype=torch.bool)
        means = attention_nystrom._gathered_means(states, landmark_segments(mask, 8))
    else:
        means = attention_nystrom._unpadded_means(states, 8)
    assert ((means - exact) / exact).mean().abs() < torch.finfo(dtype).eps / 20


@pytest.mark.parametrize("function", [nystrom_attention, nystrom_cross_attention], ids=["self", "cross"])
@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_landmarks": 0}, "num_landmarks=0 must be at least 1"),
        ({"num_landmarks": -1}, "num_landmarks=-1 must be at least 1"),
        ({"num_landmarks": M, "pinv_iterations": 0}, "pinv_iterations=0 must be at least 1"),
    ],
)
def test_fewer_than_one_are_refused(function, masked, numbers, message):
    query, key, value = torch.randn(3, 1, 2, 2 * M + 1, 8)
    mask = torch.ones(1, 2 * M + 1, dtype=torch.bool) if masked else None
    with pytest.raises(ValueError, match=message):
        function(query, key, value, mask, **numbers)
