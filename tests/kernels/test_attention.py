# SPDX-License-Identifier: Apache-2.0
"""The whole attention of the kernels, interpreted without a GPU."""

import pytest
import torch

from nystrom_models import kernels
from tests.kernels.functions import nystrom_attention_reference
from tests.kernels.helpers import DEVICE, DIM, HEADS, M, check, draw, draw_heads, ragged
from tests.models.options import TOLERANCE, relative_error

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("length", "masked", "dtype"),
    [
        (6, False, torch.float32),
        (37, True, torch.float32),
        (37, True, torch.bfloat16),
        pytest.param(37, True, torch.float16, marks=pytest.mark.slow),
        (150, True, torch.float16),
    ],
    ids=str,
)
def test_the_whole_is_the_reference(length, masked, dtype):
    mask = ragged(length) if masked else None
    inputs = [*draw_heads(length, 3, dtype=dtype), (draw(HEADS, 1, 5, 1) / 5).to(dtype)]
    keep = torch.ones(4, length) if mask is None else mask.cpu().float()

    def run(function, mask, q, k, v, weight):
        return function(q, k, v, mask, num_landmarks=M, pinv_iterations=2, conv_weight=weight)

    check(
        lambda *inputs: run(kernels.nystrom_attention, mask, *inputs),
        lambda *inputs: run(nystrom_attention_reference, None if mask is None else mask.cpu(), *inputs),
        inputs,
        keep=keep[:, None, :, None],
        dtype=dtype,
    )


def test_padding_is_never_read_and_gets_zeros():
    """Neither the values at padding nor the incoming gradients there have an effect, even if they are NaN."""
    mask = ragged(37)
    at_padding = ~mask[:, None, :, None]
    clean = [tensor.masked_fill(at_padding, 0.0) for tensor in draw_heads(37, 3)]
    weight = draw(4, HEADS, 37, DIM).masked_fill(at_padding, 0.0)
    results = []
    for content in (0.0, torch.nan):
        inputs = [tensor.masked_fill(at_padding, content).requires_grad_() for tensor in clean]
        taps = torch.ones(HEADS, 1, 3, 1, device=DEVICE, requires_grad=True)
        out = kernels.nystrom_attention(*inputs, mask, num_landmarks=M, pinv_iterations=1, conv_weight=taps)
        gradient = weight.masked_fill(at_padding, content)
        results.append([out.detach(), *torch.autograd.grad(out, [*inputs, taps], gradient)])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty) and torch.isfinite(dirty).all()
    for states in results[1][:4]:
        assert not states.masked_select(at_padding).any()


def test_layouts_do_not_matter():
    """Tensors with strides other than those of linear layers, and a gradient that is one expanded number."""
    inputs = [tensor.requires_grad_() for tensor in draw_heads(19, 3, batch=2)]
    options = {"num_landmarks": M, "pinv_iterations": 1}
    results = []
    for layout in (
        lambda tensor: tensor,
        lambda tensor: tensor.contiguous(),
        lambda tensor: tensor.mT.contiguous().mT,
    ):
        out = kernels.nystrom_attention(*map(layout, inputs), **options)
        results.append([out, *torch.autograd.grad(out.sum(), inputs)])
    for found in results[1:]:
        for ours, theirs in zip(results[0], found, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_dropout_is_drawn_from_the_generator_and_its_mean_is_the_attention():
    inputs = draw_heads(13, 3, batch=1)
    options = {"num_landmarks": M, "pinv_iterations": 1}
    plain = kernels.nystrom_attention(*inputs, **options)
    torch.manual_seed(0)
    drawn = [kernels.nystrom_attention(*inputs, **options, dropout_p=0.2) for _ in range(40)]
    torch.manual_seed(0)
    again = kernels.nystrom_attention(*inputs, **options, dropout_p=0.2)
    assert torch.equal(again, drawn[0]) and not torch.equal(drawn[0], drawn[1])
    drawn = torch.stack(drawn)
    error = (drawn.mean(dim=0) - plain).abs() / (drawn.std(dim=0) / 40**0.5)
    assert error.mean() < 1.2 and error.max() < 6


def test_autocast_decides_the_dtype():
    inputs = draw_heads(12, 3, batch=1)
    weight = draw(HEADS, 1, 3, 1)
    options = {"num_landmarks": M, "conv_weight": weight, "pinv_iterations": 2}
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert kernels.why_not(inputs[0].bfloat16(), *inputs[1:], **options) is None
        out = kernels.nystrom_attention(*inputs, **options)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, nystrom_attention_reference(*inputs, **options)) < TOLERANCE[torch.bfloat16]


def test_gradients_that_nobody_wants_are_not_computed():
    """Frozen taps get no gradient, and saved tensors, the mask among them, may be offloaded."""
    mask = ragged(19)
    inputs = [tensor.requires_grad_() for tensor in draw_heads(19, 3)]
    weight = draw(HEADS, 1, 3, 1)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        out = kernels.nystrom_attention(*inputs, mask, num_landmarks=M, pinv_iterations=1, conv_weight=weight)
    assert any(tensor.shape == mask.shape and torch.equal(tensor.bool(), mask) for tensor in saved)
    assert out.grad_fn is not None and weight.grad is None
    torch.autograd.grad(out.sum(), inputs)
