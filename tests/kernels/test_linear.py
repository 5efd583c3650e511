# SPDX-License-Identifier: Apache-2.0
"""The kernels for causal linear attention, interpreted without a GPU, against the formula in float64."""

import pytest
import torch
from torch.autograd import forward_ad

import nystrom_models
from nystrom_models.kernels import device, first_try
from nystrom_models.kernels.interface import LinearTriton
from nystrom_models.kernels.linear import dispatch
from nystrom_models.models.attention_linear import (
    causal_linear_attention_reference,
    elu_features,
    relu_features,
)
from tests.kernels.helpers import DEVICE
from tests.models.options import TINY, TOLERANCE, relative_error

pytest.importorskip("triton")

HEADS, FEATURES, DIM = 2, 10, 12
# Largest error over largest entry, about four times the values measured in the interpreter, which truncates to
# bfloat16.
KERNEL_TOLERANCE = {torch.float32: 1.2e-5, torch.float16: 3e-3, torch.bfloat16: 7e-2}


def draw(length, dtype=torch.float32, batch=2, offset=0.0, features=elu_features):
    """φ(q), φ(k) and v in the layout of a model, and a state."""
    query, key = (features(torch.randn(batch, length, HEADS, FEATURES)) for _ in range(2))
    value = offset + torch.randn(batch, length, HEADS, DIM)
    states = [tensor.to(DEVICE, dtype).transpose(1, 2) for tensor in (query, key, value)]
    return [*states, torch.rand(batch, HEADS, FEATURES, DIM + 1).to(DEVICE)]


def ragged(length, batch=2):
    """A mask with holes, and with padding on the left."""
    mask = torch.rand(batch, length) < 0.7
    mask[1] = torch.arange(length) >= length // 3
    return mask.to(DEVICE)


def run(function, inputs, mask, weights, cast=None):
    """Outputs and gradients."""
    leaves = [None if tensor is None else tensor.detach().to(cast or tensor.dtype) for tensor in inputs]
    wanted = [tensor.requires_grad_() for tensor in leaves if tensor is not None]
    outputs = function(*leaves[:3], mask, leaves[3])
    loss = sum((output * weight.to(output)).sum() for output, weight in zip(outputs, weights, strict=True))
    return [*(output.detach() for output in outputs), *torch.autograd.grad(loss, wanted)]


def by_kernels(*tensors):
    inputs = dispatch.CausalInputs(*tensors)
    assert inputs.why_not() is None, inputs.why_not()
    return dispatch.compute(inputs)


@pytest.mark.parametrize(
    ("length", "dtype", "masked", "with_state", "offset"),
    [
        (2, torch.float32, False, False, 0.0),
        (64, torch.float32, True, True, 0.0),
        pytest.param(515, torch.float32, True, False, 3.0, marks=pytest.mark.slow),
        (600, torch.float16, True, True, 3.0),
        (70, torch.bfloat16, False, True, 3.0),
    ],
    ids=str,
)
def test_outputs_states_and_gradients(length, dtype, masked, with_state, offset):
    """A component that all values share must cancel in the gradients, also in half precision."""
    inputs = draw(length, dtype, offset=offset)
    inputs[3] = inputs[3] if with_state else None
    mask = ragged(length) if masked else None
    weights = [torch.randn(2, HEADS, length, DIM), torch.randn(2, HEADS, FEATURES, DIM + 1) / 10]
    weights = [weight.to(DEVICE) for weight in weights]
    ours = run(by_kernels, inputs, mask, weights)
    expected = run(causal_linear_attention_reference, inputs, mask, weights, torch.float64)
    for index, (actual, wanted) in enumerate(zip(ours, expected, strict=True)):
        assert relative_error(actual, wanted) < KERNEL_TOLERANCE[dtype], index


def test_what_comes_later_changes_no_bit():
    """Neither later tokens nor other rows change a result."""
    inputs = draw(530, torch.float16)
    whole, _ = by_kernels(*inputs[:3], None, inputs[3])
    for length in (65, 512):
        short = [tensor[:1, :, :length] for tensor in inputs[:3]]
        out, _ = by_kernels(*short, None, inputs[3][:1])
        assert torch.equal(out, whole[:1, :, :length])


def test_in_two_halves_it_is_the_same():
    query, key, value, _ = draw(90)
    mask = ragged(90)
    whole, final = by_kernels(query, key, value, mask)
    halves, state = [], None
    for part in (slice(0, 37), slice(37, 90)):
        out, state = by_kernels(query[:, :, part], key[:, :, part], value[:, :, part], mask[:, part], state)
        halves.append(out)
    assert relative_error(torch.cat(halves, dim=2), whole) < TOLERANCE[torch.float32]
    assert relative_error(state, final) < TOLERANCE[torch.float32]


def test_tokens_that_see_nothing_give_zero_and_finite_gradients():
    """Before the first valid token, and for a query whose features are all zero: 1 / ε exceeds float16."""
    inputs = draw(70, torch.float16, features=relu_features)
    inputs[0] = elu_features(inputs[0])
    inputs[0][:, :, 40] = 0
    mask = torch.arange(70, device=DEVICE).expand(2, -1) >= 20
    out, dq, dk, dv = run(
        lambda *tensors: by_kernels(*tensors)[:1], [*inputs[:3], None], mask, [torch.ones_like(inputs[2])]
    )
    assert not out[:, :, :20].any() and not out[:, :, 40].any()
    # The true gradient of that query exceeds float16; it must not affect others.
    dq = torch.cat([dq[:, :, :40], dq[:, :, 41:]], dim=2)
    for tensor in (out, dq, dk, dv):
        assert torch.isfinite(tensor).all()


REASONS = {
    "one token": ({}, 1, torch.float32, "recurrence"),
    "dtype": ({}, 9, torch.float64, "float16, bfloat16 or float32"),
    "mask": ({"mask": torch.ones(2, 9, dtype=torch.long)}, 9, torch.float32, "mask.bool()"),
    "state": ({"state": torch.ones(2, HEADS, FEATURES, DIM + 1).double()}, 9, torch.float32, "float32"),
}


@pytest.mark.parametrize(("options", "length", "dtype", "word"), REASONS.values(), ids=REASONS)
def test_what_does_not_apply_is_explained(options, length, dtype, word):
    tensors = draw(length, dtype)[:3]
    assert word in dispatch.why_not(*tensors, **{name: tensor.to(DEVICE) for name, tensor in options.items()})


def test_sizes_that_do_not_fit_are_explained():
    def why_not(features, dim, dtype):
        states = [torch.zeros(1, 1, 9, size, device=DEVICE, dtype=dtype) for size in (features, features, dim)]
        return dispatch.why_not(*states)

    assert why_not(128, 64, torch.bfloat16) is None and why_not(64, 64, torch.float32) is None
    assert "do not fit" in why_not(128, 128, torch.bfloat16) and "do not fit" in why_not(128, 64, torch.float32)
    assert "num_attention_heads" in why_not(160, 16, torch.bfloat16)


def test_the_operator_keeps_pytorchs_rules():
    from nystrom_models.kernels.linear import attention

    inputs = [tensor.requires_grad_() for tensor in draw(9)]
    arguments = (*inputs[:3], ragged(9), inputs[3])
    torch.library.opcheck(attention._operator, arguments, rtol=1e-4, atol=1e-4)


def test_derivatives_forwards_are_left_to_pytorch():
    query, key, value, _ = draw(9)
    along = torch.randn_like(query)
    assert dispatch.causal_linear_attention_if_possible(query, key, value) is not None
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(query, along)
        assert dispatch.causal_linear_attention_if_possible(dual, key, value) is None


def test_second_derivatives_and_masks_of_another_shape_are_refused():
    query, key, value, _ = draw(9)
    query.requires_grad_()
    out, _ = dispatch.causal_linear_attention_if_possible(query, key, value)
    with pytest.raises(RuntimeError, match=r'differentiable once.*attn_implementation="sdpa"'):
        torch.autograd.grad(out.sum(), query, create_graph=True)
    mask = torch.ones(1, 9, dtype=torch.bool, device=DEVICE)
    reason = dispatch.CausalInputs(query, key, value, mask, None).why_not()
    assert "a mask of shape (2, 9), not (1, 9): mask.expand(2, 9)" in reason


def test_an_example_of_too_many_values_is_refused():
    """Offsets are 32-bit integers, those of values, too, which may be wider than the features."""
    narrow, wide = (torch.empty(1, 32, 600_000, size, device="meta") for size in (16, 128))
    assert device.why_not_of_tensors([narrow, narrow, narrow], None) is None
    assert "2**31" in device.why_not_of_tensors([narrow, narrow, wide], None)


@pytest.mark.parametrize("fault", ["differs", "raises"])
def test_kernels_that_fail_on_a_device_are_not_used(fault, monkeypatch):
    compute, said = dispatch.compute, []

    def faulty(inputs):
        if fault == "raises":
            raise RuntimeError("out of resource: shared memory")
        out, state = compute(inputs)
        return 1.5 * out, state

    monkeypatch.setattr(dispatch, "compute", faulty)
    monkeypatch.setattr(dispatch.logger, "warning_once", said.append)
    monkeypatch.setattr(first_try, "_faults", {})
    assert dispatch.causal_linear_attention_if_possible(*draw(9)[:3]) is None
    assert len(said) == 1 and ("shared memory" if fault == "raises" else "differs") in said[0]


def test_a_causal_model_uses_them_and_generates_the_same(monkeypatch):
    ran, compute = [], dispatch.compute
    monkeypatch.setattr(dispatch, "compute", lambda inputs: ran.append(inputs) or compute(inputs))
    monkeypatch.setattr(LinearTriton, "why_not_here", lambda self: None)
    config = nystrom_models.LinearTransformerConfig(
        **TINY | {"num_hidden_layers": 1}, is_decoder=True, max_position_embeddings=64
    )
    model = nystrom_models.LinearTransformerForCausalLM(config).to(DEVICE).eval()
    assert model.config._attn_implementation == LinearTriton.name
    ids = torch.randint(3, 99, (2, 14), device=DEVICE)
    found = model.generate(ids, max_new_tokens=3, do_sample=False)
    assert len(ran) == 2  # the first try, and the prompt; later tokens are steps of the recurrence
    assert ran[1].query.shape[2] == 14
    model.set_attn_implementation("sdpa")
    assert torch.equal(model.generate(ids, max_new_tokens=3, do_sample=False), found) and len(ran) == 2


def test_a_cpu_needs_no_word(monkeypatch):
    said = []
    monkeypatch.setattr(dispatch.logger, "warning_once", said.append)
    monkeypatch.setattr(device, "DEVICE_TYPES", {"cuda"})
    assert dispatch.causal_linear_attention_if_possible(*(tensor.cpu() for tensor in draw(9)[:3])) is None and not said
