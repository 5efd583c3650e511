# SPDX-License-Identifier: Apache-2.0
"""Products in float32 on GPUs that would multiply in TF32, which is emulated here: factors are rounded to 10 bits."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from nystrom_models.models import precise_product
from nystrom_models.models.attention_nystrom import iterative_pinv
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
    monkeypatch.setattr(precise_product, "multiply", precise_product._SplitProduct.apply)
    monkeypatch.setattr("nystrom_models.models.attention_nystrom.multiply", precise_product._SplitProduct.apply)


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


def test_a_pseudo_inverse(as_on_a_gpu):
    matrix = torch.softmax(torch.randn(4, 64, 64), dim=-1)
    expected = torch.stack([formulas.pseudo_inverse(one, 6) for one in matrix.double()])
    with TF32():
        assert relative_error(iterative_pinv(matrix), expected) < 1e-5


def test_on_a_cpu_it_is_the_product():
    left, right = torch.randn(2, 5, 7), torch.randn(2, 7, 3)
    assert torch.equal(multiply(left, right), left @ right)
