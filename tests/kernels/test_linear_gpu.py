# SPDX-License-Identifier: Apache-2.0
"""The kernels for causal linear attention on a CUDA device. Those of test_linear.py run there as well, compiled."""

import pytest
import torch

import nystrom_models
from nystrom_models.kernels.interface import LinearTriton
from nystrom_models.kernels.linear import dispatch
from nystrom_models.models.attention_linear import (
    causal_linear_attention,
    causal_linear_attention_reference,
    elu_features,
)
from tests.kernels.helpers import DEVICE
from tests.kernels.test_gpu import capture, padded
from tests.kernels.test_linear import KERNEL_TOLERANCE
from tests.models.options import TINY, TOLERANCE, relative_error

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

SIZES = [(16, 16), (64, 64), (32, 128)]  # features and channels of a head


def draw_layer(length, features=64, dim=64, dtype=torch.bfloat16, batch=3, count=2):
    """φ(q), φ(k) and v of two heads in a model's layout, with gradients."""
    states = [torch.randn(batch, length, count, size, device=DEVICE) for size in (features, features, dim)]
    states = [elu_features(states[0]), elu_features(states[1]), states[2]]
    return [tensor.to(dtype).transpose(1, 2).detach().requires_grad_() for tensor in states]


def by_kernels(*tensors):
    """As in a model: the attention and the last state, by the kernels where they apply."""
    found = dispatch.causal_linear_attention_if_possible(*tensors)
    return causal_linear_attention(*tensors) if found is None else found


def gradients(function, inputs, mask, weight, cast=None):
    leaves = [tensor.detach().to(cast or tensor.dtype).requires_grad_() for tensor in inputs]
    out, state = function(*leaves, mask)
    return [out.detach(), state.detach(), *torch.autograd.grad((out * weight.to(out)).sum(), leaves)]


@pytest.mark.parametrize(
    ("dtype", "features", "dim"),
    # In float32, half as much fits.
    [
        (dtype, *size)
        for dtype in KERNEL_TOLERANCE
        for size in SIZES + ([(48, 64)] if dtype == torch.float32 else [(48, 80), (128, 64)])
    ],
    ids=str,
)
@pytest.mark.parametrize("length", [129, 513, 4096])
def test_sizes_of_real_models(length, features, dim, dtype):
    """No further from the reference in float64 than PyTorch's operations are."""
    inputs, mask = draw_layer(length, features, dim, dtype), padded(length)
    assert dispatch.why_not(*inputs, mask) is None
    weight = torch.randn(3, 2, length, dim, device=DEVICE)
    results = [
        gradients(function, inputs, mask, weight, cast)
        for function, cast in (
            (lambda *tensors: dispatch.compute(dispatch.CausalInputs(*tensors)), None),
            (causal_linear_attention, None),
            (causal_linear_attention_reference, torch.float64),
        )
    ]
    for ours, theirs, expected in zip(*results, strict=True):
        assert relative_error(ours, expected) < 2 * relative_error(theirs, expected) + KERNEL_TOLERANCE[dtype]


def test_a_row_of_65536_tokens():
    inputs = draw_layer(65536, batch=1, count=1)
    weight = torch.randn(1, 1, 65536, 64, device=DEVICE)
    ours = gradients(by_kernels, inputs, None, weight)
    expected = gradients(causal_linear_attention, inputs, None, weight, torch.float32)
    for actual, wanted in zip(ours, expected, strict=True):
        assert relative_error(actual, wanted) < KERNEL_TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", KERNEL_TOLERANCE, ids=str)
def test_runs_repeat_bit_for_bit(dtype):
    inputs, mask = draw_layer(1000, dtype=dtype), padded(1000)
    weight = torch.randn(3, 2, 1000, 64, device=DEVICE)
    first, second = (gradients(by_kernels, inputs, mask, weight) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("masked", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize("how", ["inductor", "reduce-overhead", "cuda graph"])
def test_graphs(how, masked):
    """Compiled and captured, forward and backward, it is what runs without a graph."""
    inputs = draw_layer(600)
    mask = padded(600) if masked else None

    def step(attend):
        out, state = attend(*inputs, mask)
        return [out.detach(), state.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    expected = step(by_kernels)
    if how == "cuda graph":
        actual, graph = capture(lambda: step(by_kernels))
        graph.replay()
    else:
        compiled = torch.compile(by_kernels, fullgraph=True, mode=None if how == "inductor" else how)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            actual = [tensor.clone() for tensor in step(compiled)]
    torch.cuda.synchronize()
    for ours, eager in zip(actual, expected, strict=True):
        assert relative_error(ours, eager) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_causal_model_trains_and_generates_as_without_them(dtype):
    config = nystrom_models.LinearTransformerConfig(
        **TINY | {"hidden_dropout_prob": 0.0}, is_decoder=True, max_position_embeddings=800
    )
    model = nystrom_models.LinearTransformerForCausalLM(config).to(DEVICE, dtype).eval()
    ids, mask = torch.randint(3, 99, (3, 700), device=DEVICE), padded(700)
    assert model.config._attn_implementation == LinearTriton.name
    results = []
    for implementation in (LinearTriton.name, "sdpa"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        outputs = model(ids, attention_mask=mask, labels=ids.where(mask, -100))
        outputs.loss.backward()
        results.append([outputs.logits[mask].detach(), *(parameter.grad for parameter in model.parameters())])
    # In the interpreter 1.2e-5 and 0.057, both of gradients of queries and keys, which are small.
    tolerance = {torch.float32: 5e-5, torch.bfloat16: 0.2}[dtype]
    for ours, theirs in zip(*results, strict=True):
        assert relative_error(ours, theirs) < tolerance
    if dtype == torch.float32:
        texts, mask = [], torch.arange(700, device=DEVICE) >= torch.tensor([[0], [5], [300]], device=DEVICE)
        for implementation in (LinearTriton.name, "sdpa"):
            model.set_attn_implementation(implementation)
            texts.append(model.generate(ids, attention_mask=mask.long(), max_new_tokens=20, do_sample=False))
        assert torch.equal(*texts)
