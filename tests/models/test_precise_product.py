# SPDX-License-Identifier: Apache-2.0
"""Products in float32 on GPUs that would multiply in TF32, which is emulated here: factors are rounded to 10 bits."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from nystrom_models.models import precise_product
from nystrom_models.models.attention_nystrom import iterative_pinv, nystrom_attention
from nystrom_models.models.precise_product import multiply
from tests.models import formulas
from tests.models.options import relative_error

PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__)


class TF32(TorchFunctionMode):
    """Rounds the factors of products to the nearest TF32 number, as tensor cores do."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in PRODUCTS:
            args = tuple(((tensor.view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32) for tensor in args)
        return function(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Makes `multiply` split factors on all devices, not only on a GPU."""
    monkeypatch.setattr(precise_product, "multiply", precise_product._WithTangents.apply)
    monkeypatch.setattr("nystrom_models.models.attention_nystrom.multiply", precise_product._WithTangents.apply)


def test_a_product_and_its_gradients(as_on_a_gpu):
    left, right = (torch.randn(3, 64, 64, requires_grad=True) for _ in range(2))
    incoming = torch.randn(3, 64, 64)
    exact = [tensor.detach().double().requires_grad_() for tensor in (left, right)]
    expected = (exact[0] @ exact[1], *torch.autograd.grad(exact[0] @ exact[1], exact, incoming.double()))
    with TF32():
        product = precise_product.multiply(left, right)
        actual = (product, *torch.autograd.grad(product, (left, right), incoming))
        rounded = left @ right
    assert relative_error(rounded, expected[0]) > 1e-4  # the emulation rounds
    for ours, reference in zip(actual, expected, strict=True):
        assert relative_error(ours, reference) < 2e-6


@pytest.mark.parametrize("of", ["left", "right", "both"])
def test_its_derivative_forwards(as_on_a_gpu, of):
    left, right, along_left, along_right = torch.randn(4, 3, 64, 64)
    expected = 0
    if of != "right":
        expected += along_left.double() @ right.double()
    if of != "left":
        expected += left.double() @ along_right.double()
    given = {"left": (left, along_left), "right": (right, along_right)}
    given = given if of == "both" else {of: given[of]}

    def product(*changed):
        return precise_product.multiply(
            *({"left": left, "right": right} | dict(zip(given, changed, strict=True))).values()
        )

    _, tangent = torch.func.jvp(product, *(tuple(pair[place] for pair in given.values()) for place in (0, 1)))
    assert relative_error(tangent, expected) < 2e-6


def test_a_pseudo_inverse(as_on_a_gpu):
    matrix = torch.softmax(torch.randn(4, 64, 64), dim=-1)
    expected = torch.stack([formulas.pseudo_inverse(one, 6) for one in matrix.double()])
    with TF32():
        assert relative_error(iterative_pinv(matrix), expected) < 1e-5


def test_landmark_values_under_autocast_are_as_precise_as_without():
    query, key, value = torch.randn(3, 1, 2, 64, 16) * 1.5
    value = 1 + value
    expected = nystrom_attention(*(t.double() for t in (query, key, value)), num_landmarks=16)
    halves = [tensor.bfloat16() for tensor in (query, key, value)]
    without = relative_error(nystrom_attention(*halves, num_landmarks=16), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = nystrom_attention(query, key, value, num_landmarks=16)
    assert relative_error(found, expected) < 1.1 * without


def test_on_a_cpu_it_is_the_product():
    left, right = torch.randn(2, 5, 7), torch.randn(2, 7, 3)
    assert torch.equal(multiply(left, right), left @ right)
