# SPDX-License-Identifier: Apache-2.0
"""The depthwise convolution and its gradients against PyTorch's convolution in float64, a different code path."""

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from nystrom_models.models.depthwise_convolution import depthwise_convolution
from tests.compiler import needs_compiler
from tests.models import formulas
from tests.models.options import relative_error

# B, H, N, D, kernel. oneDNN's gradient for a kernel of 35 taps and more is wrong on long sequences.
SHAPES = {
    "one": (1, 1, 1, 1, 1),
    "shorter-than-kernel": (2, 2, 5, 3, 33),
    "long-35": (2, 3, 509, 8, 35),
    "long-65": (1, 4, 512, 16, 65),
}
# Relative to the largest element: float32 sums of a few thousand terms; for the others one rounding of the result.
TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
# Measured for outputs of at most 50 tokens: 0, 9.3e-8 and 2.9e-3.
FORMULA_TOLERANCE = {torch.float64: 1e-15, torch.float32: 3.6e-7, torch.bfloat16: 1.1e-2}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_equals_float64_with_every_gradient(shape, dtype, masked):
    batch, heads, length, dim, kernel = shape
    value = torch.randn(batch, length, heads, dim).to(dtype).transpose(1, 2).requires_grad_()
    weight = (torch.randn(heads, 1, kernel, 1) / kernel**0.5).to(dtype).requires_grad_()
    mask = torch.rand(batch, length) > 0.3 if masked else None
    incoming = torch.randn(batch, heads, length, dim).to(dtype)

    exact_value, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (value, weight))
    kept = exact_value if mask is None else exact_value * mask[:, None, :, None]
    exact = torch.nn.functional.conv2d(kept, exact_weight, padding=(kernel // 2, 0), groups=heads)
    expected = (exact, *torch.autograd.grad(exact, (exact_value, exact_weight), incoming.double()))

    output = depthwise_convolution(value, weight, mask)
    results = (output, *torch.autograd.grad(output, (value, weight), incoming))
    with torch.no_grad():
        torch.testing.assert_close(depthwise_convolution(value, weight, mask), output, rtol=0, atol=0)
    for result, reference in zip(results, expected, strict=True):
        assert result.dtype == dtype
        scale = reference.abs().max().item()
        torch.testing.assert_close(result.double(), reference, rtol=0, atol=TOLERANCES[dtype] * scale)


def test_autocast_changes_nothing():
    """Neither the result nor gradients whose backward pass is called under autocast."""
    value = torch.randn(2, 40, 3, 8).transpose(1, 2).requires_grad_()
    weight = torch.randn(3, 1, 5, 1).requires_grad_()
    incoming = torch.randn(2, 3, 40, 8)
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            output = depthwise_convolution(value, weight)
            found.append((output, *torch.autograd.grad(output, (value, weight), incoming)))
    for one, other in zip(*found, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_autocast_changes_no_gradients_of_single_rows():
    """Under vmap, they are products of copied blocks, which autocast would round to bfloat16."""
    value, weight = torch.randn(3, 1, 2, 40, 8), torch.randn(2, 1, 5, 1)

    def gradient(row):
        return torch.func.grad(lambda taps: depthwise_convolution(row, taps).square().sum())(weight)

    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found.append(torch.func.vmap(gradient)(value))
    assert torch.equal(*found)


@pytest.mark.slow
def test_compiles_with_its_gradient():
    compiled = torch.compile(depthwise_convolution, fullgraph=True, dynamic=True, backend="aot_eager")
    weight = torch.randn(2, 1, 5, 1, requires_grad=True)
    for length in (40, 7, 61):
        value = torch.randn(2, 2, length, 3, requires_grad=True)
        results = [
            torch.autograd.grad(function(value, weight).square().sum(), (value, weight))
            for function in (depthwise_convolution, compiled)
        ]
        torch.testing.assert_close(*results)


def filter_and_gradients(filter_tokens, length):
    value = torch.randn(2, length, 4, 8, generator=torch.manual_seed(length)).transpose(1, 2).requires_grad_()
    weight = torch.randn(4, 1, 5, 1).requires_grad_()
    output = filter_tokens(value * 2, weight)
    return output, *torch.autograd.grad(output.square().sum(), (value, weight))


def test_no_compiled_graph_has_a_convolution():
    """Around a convolution on a CPU, TorchInductor lays out all tensors as those of the first batch."""
    operators = set()

    def keep(graph, _):
        operators.update(node.target for node in graph.graph.nodes)
        return make_boxed_func(graph)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep)
    compiled = torch.compile(depthwise_convolution, fullgraph=True, dynamic=True, backend=backend)
    torch.testing.assert_close(filter_and_gradients(compiled, 20), filter_and_gradients(depthwise_convolution, 20))
    assert torch.ops.nystrom_models.filter_channels.default in operators
    assert torch.ops.aten.convolution.default not in operators


@needs_compiler
@pytest.mark.slow  # half a minute
def test_compiled_gradients_of_every_length():
    torch._dynamo.reset()
    compiled = torch.compile(depthwise_convolution, dynamic=True)
    for length in (40, 39, 61):
        torch.testing.assert_close(
            filter_and_gradients(compiled, length), filter_and_gradients(depthwise_convolution, length)
        )


@pytest.mark.parametrize("dtype", FORMULA_TOLERANCE, ids=str)
@pytest.mark.parametrize("length", [1, 4, 50])
def test_convolution_is_the_formula(length, dtype):
    value = torch.randn(2, length, 3, 4).to(dtype).transpose(1, 2)
    weight = torch.randn(3, 1, 7, 1).to(dtype)
    out = depthwise_convolution(value, weight)
    for row in range(2):
        for head in range(3):
            expected = formulas.convolution(value[row, head].double(), weight[head, 0, :, 0].double())
            assert relative_error(out[row, head], expected) < FORMULA_TOLERANCE[dtype]
