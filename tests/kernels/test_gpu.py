# SPDX-License-Identifier: Apache-2.0
"""The kernels on a CUDA device. The other tests of this folder also run there, compiled instead of interpreted."""

import pytest
import torch

from nystrom_models import kernels
from tests.kernels.functions import in_pytorch, nystrom_attention, nystrom_attention_reference
from tests.kernels.helpers import KERNEL_TOLERANCE, draw
from tests.models.options import TOLERANCE, relative_error

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

NARROW, WIDE = [(16, 64), (32, 32), (64, 64)], [(128, 64), (64, 128)]


def padded(length, rows=3):
    """Rows with holes, a short one, and one padded on the left."""
    mask = torch.rand(rows, length, device="cuda") < 0.7
    mask[1, 32:] = False
    mask[2] = torch.arange(length, device="cuda") >= length // 3
    return mask


def draw_layer(length, count=2, dim=64, dtype=torch.bfloat16, batch=3, taps=65):
    """Queries, keys and values of two heads in a model's layout, and taps, with gradients."""
    inputs = [draw(batch, length, count, dim, dtype=dtype).transpose(1, 2) for _ in range(3)]
    inputs.append(draw(count, 1, taps, 1, dtype=dtype) / 8)
    return [tensor.detach().requires_grad_() for tensor in inputs]


@pytest.mark.parametrize(
    ("dtype", "count", "dim"),
    # In float32, half as much fits.
    [
        (dtype, *size)
        for dtype in KERNEL_TOLERANCE
        for size in NARROW + (WIDE if dtype != torch.float32 else [(32, 128)])
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [129, 509, 4096])
def test_sizes_of_real_models(length, count, dim, dtype):
    """With ragged rows, outputs and gradients are as close to the reference in float64 as PyTorch's operations.

    How much a pseudo-inverse amplifies the rounding of landmarks depends on the inputs, and is the same for both.
    """
    mask = padded(length)
    inputs = draw_layer(length, dim=dim, dtype=dtype)
    weight = draw(3, 2, length, dim, dtype=dtype) * mask[:, None, :, None]
    reason = kernels.why_not(*inputs[:3], mask, num_landmarks=count, conv_weight=inputs[3])
    if reason is not None:
        # Only 128 landmarks, and only on devices whose matrix products use tensor memory.
        assert count == 128 and torch.cuda.get_device_capability()[0] == 10, reason
        pytest.skip(reason)
    results = []
    for function, cast in (
        (kernels.nystrom_attention, dtype),
        (in_pytorch, dtype),
        (nystrom_attention_reference, torch.float64),
    ):
        leaves = [tensor.detach().to(cast).requires_grad_() for tensor in inputs]
        out = function(*leaves[:3], mask, num_landmarks=count, conv_weight=leaves[3])
        gradients = torch.autograd.grad((out * weight.to(cast)).sum(), leaves)
        results.append([out.detach() * mask[:, None, :, None], *gradients])
    for ours, theirs, expected in zip(*results, strict=True):
        allowed = 2 * relative_error(theirs, expected) + KERNEL_TOLERANCE[dtype]
        assert relative_error(ours, expected) < allowed


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.3), (torch.float32, 1.4e-3)], ids=str)
def test_an_offset_of_keys_and_values_cancels(dtype, tolerance):
    """On an H100, gradients of queries are off by 0.08 and 3.5e-4. PyTorch's operations on a CPU are off by 3.9 and
    4.6e-4, and in gradients of keys by 0.34 and 1.4e-4: the pseudo-inverse amplifies the rounding of landmarks. The
    values and taps do not pass it."""
    inputs = [(tensor + 2 * (index in (1, 2))).detach() for index, tensor in enumerate(draw_layer(2048, dtype=dtype))]
    weight = draw(3, 2, 2048, 64, dtype=dtype)
    results = []
    for function, cast in ((kernels.nystrom_attention, dtype), (nystrom_attention_reference, torch.float64)):
        leaves = [tensor.to(cast).requires_grad_() for tensor in inputs]
        out = function(*leaves[:3], num_landmarks=64, conv_weight=leaves[3])
        results.append(torch.autograd.grad((out * weight.to(cast)).sum(), leaves))
    allowed = (tolerance, tolerance, KERNEL_TOLERANCE[dtype], KERNEL_TOLERANCE[dtype])
    for ours, expected, most in zip(*results, allowed, strict=True):
        assert relative_error(ours, expected) < most


@pytest.mark.parametrize("dtype", KERNEL_TOLERANCE, ids=str)
def test_runs_repeat_bit_for_bit(dtype):
    inputs, mask = draw_layer(1000, dtype=dtype), padded(1000)

    def run():
        torch.manual_seed(3)
        out = kernels.nystrom_attention(*inputs[:3], mask, num_landmarks=64, conv_weight=inputs[3], dropout_p=0.1)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)


def test_a_default_device_does_not_switch_them_off():
    try:
        torch.set_default_device("cuda")
        inputs = draw_layer(300)
        assert kernels.nystrom_attention_if_possible(*inputs[:3], num_landmarks=61, conv_weight=inputs[3]) is not None
    finally:
        torch.set_default_device(None)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_may_lie_on_another_device_than_the_current_one():
    inputs, mask = draw_layer(300), padded(300)
    elsewhere = [tensor.detach().to("cuda:1").requires_grad_() for tensor in inputs]
    results = []
    for tensors, rows in ((inputs, mask), (elsewhere, mask.to("cuda:1"))):
        out = kernels.nystrom_attention(*tensors[:3], rows, num_landmarks=64, conv_weight=tensors[3])
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    for here, there in zip(*results, strict=True):
        assert there.device.index == 1 and relative_error(there.to("cuda:0"), here) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("masked", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize("how", ["inductor", "reduce-overhead", "cuda graph"])
def test_graphs(how, masked):
    """A layer's attention, compiled and captured, forward and backward, is the same as without a graph."""
    inputs = draw_layer(300)
    mask = padded(300) if masked else None
    keep = 1 if mask is None else mask[:, None, :, None]

    def step(attend):
        out = attend(*inputs[:3], mask, num_landmarks=64, conv_weight=inputs[3]) * keep
        return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    expected = step(nystrom_attention)
    if how == "cuda graph":
        captured, graph = capture(lambda: step(nystrom_attention))
        graph.replay()
        actual = captured
    else:
        mode = None if how == "inductor" else how
        compiled = torch.compile(nystrom_attention, fullgraph=True, mode=mode)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            actual = [tensor.clone() for tensor in step(compiled)]
    torch.cuda.synchronize()
    for ours, eager in zip(actual, expected, strict=True):
        assert relative_error(ours, eager) < TOLERANCE[torch.bfloat16]


def capture(step):
    """The results of a step and the CUDA graph that computes them, captured as in the documentation of the kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return results, graph


def test_a_captured_graph_draws_dropout_anew():
    inputs, mask = draw_layer(300), padded(300)

    def step():
        out = nystrom_attention(*inputs[:3], mask, num_landmarks=64, conv_weight=inputs[3], dropout_p=0.3)
        return out, *torch.autograd.grad(out.square().sum(), inputs)

    results, graph = capture(step)
    drawn = []
    for _ in range(2):
        graph.replay()
        drawn.append([tensor.clone() for tensor in results])
    for first, second in zip(*drawn, strict=True):
        assert torch.isfinite(first).all() and not torch.equal(first, second)


def test_a_capture_does_not_compile():
    """If a variant never ran, the capture raises an error that says what to do, instead of compiling."""
    inputs = draw_layer(300, taps=11)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="Run the model once"), torch.cuda.graph(graph):
        nystrom_attention(*inputs[:3], num_landmarks=37, conv_weight=inputs[3])
