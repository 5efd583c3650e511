# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nystrom_models.models.attention_linformer import (
    linformer_attention,
    linformer_attention_map,
    linformer_attention_reference,
)
from nystrom_models.models.attention_ops import depthwise_convolution, split_heads
from tests.models import formulas
from tests.models.options import TOLERANCE, relative_error

HEADS, DIM, LONGEST, SLOTS, KERNEL = 2, 8, 61, 9, 7
KINDS = ["linear", "linear-by-head", "conv", "conv-by-head", "mean_pool", "max_pool"]


def projection(kind, dtype):
    shape = (SLOTS, LONGEST) if kind.startswith("linear") else (KERNEL,)
    if kind.endswith("pool"):
        return None
    return torch.randn(HEADS, *shape).to(dtype) / 3 if kind.endswith("by-head") else torch.randn(shape).to(dtype) / 3


def tensors(length, kind, dtype=torch.float32, batch=3, same=False):
    """The positional arguments but the mask, and the options."""
    width = HEADS * DIM
    query = torch.randn(batch, length, HEADS, DIM).to(dtype).transpose(1, 2)
    weights = [torch.randn(width, width).to(dtype) / 4 for _ in range(2)]
    biases = [torch.randn(width).to(dtype) for _ in range(2)]
    key_projection = projection(kind, dtype)
    value_projection = key_projection if same else projection(kind, dtype)
    projection_type = kind.removesuffix("-by-head")
    options = {"projection_type": projection_type, "kernel_size": None if projection_type == "linear" else KERNEL}
    states = torch.randn(batch, length, width).to(dtype)
    return [query, states, *weights, *biases, key_projection, value_projection], options


def ragged(length, batch=3):
    mask = torch.rand(batch, length) < 0.6
    mask[1, : length // 3] = False
    mask[2] = True
    mask[:, length - 1] = True
    return mask


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 7, 8, 61], ids=lambda length: f"length{length}")
def test_reference_is_the_formula(length, kind):
    arguments, options = tensors(length, kind, torch.float64)
    query, states, key_weight, value_weight, key_bias, value_bias, *projections = arguments
    out = linformer_attention_reference(*arguments, **options)
    for row in range(3):
        for head in range(HEADS):
            part = slice(head * DIM, (head + 1) * DIM)
            keys, values = (
                formulas.project(
                    states[row] @ weight[part].T,
                    matrix[head] if kind.endswith("by-head") else matrix,
                    options["projection_type"],
                    KERNEL,
                )
                + bias[part]
                for weight, bias, matrix in zip(
                    (key_weight, value_weight), (key_bias, value_bias), projections, strict=True
                )
            )
            expected = formulas.softmax(query[row, head] @ keys.T / DIM**0.5) @ values
            assert relative_error(out[row, head], expected) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize("same", [False, True], ids=["two-projections", "one-projection"])
@pytest.mark.parametrize("kind", KINDS)
def test_fast_path_is_the_reference(kind, same, masked, dtype):
    length = 23
    arguments, options = tensors(length, kind, dtype, same=same)
    if kind == "max_pool" and dtype in (torch.bfloat16, torch.float16):
        # Entries that rounding makes equal share a gradient in one path and not in the other: keep them apart.
        arguments[1] = arguments[1] * 4
    mask = ragged(length) if masked else None
    valid = torch.ones(3, length, dtype=torch.bool) if mask is None else mask
    weight = torch.randn(arguments[0].shape).to(dtype) * valid[:, None, :, None]
    conv = torch.randn(HEADS, 1, 5, 1).to(dtype) / 5
    results = []
    for function in (linformer_attention, linformer_attention_reference):
        inputs = [None if tensor is None else tensor.clone().requires_grad_() for tensor in [*arguments, conv]]
        if same:
            inputs[7] = inputs[6]
        out = function(*inputs[:8], mask, conv_weight=inputs[8], **options)
        (out * weight).sum().backward()
        assert out.dtype == dtype
        gradients = [tensor.grad for tensor in inputs if tensor is not None]
        results.append([(out * valid[:, None, :, None]).detach(), *gradients])
    for index, (fast, reference) in enumerate(zip(*results, strict=True)):
        # The bias of the keys shifts all scores of a query alike, so its gradient is zero but for rounding.
        floor = reference.new_full((1,), results[1][0].abs().max().item())
        fast, reference = (torch.cat([tensor.flatten(), floor]) for tensor in (fast, reference))
        assert relative_error(fast, reference) < 20 * TOLERANCE[dtype], index


@given(st.data())
def test_padding_is_never_seen(data):
    """A row anywhere in a batch, padding full of rubbish, equals its valid tokens alone."""
    kind = data.draw(st.sampled_from(KINDS))
    length = data.draw(st.integers(1, 40))
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=3))
    )
    arguments, options = tensors(length, kind, torch.float64, batch=len(mask))
    arguments[1].masked_fill_(~mask[..., None], 1e3)
    out = linformer_attention(*arguments, mask, **options)
    assert torch.isfinite(out).all()
    for row in range(len(mask)):
        valid = mask[row]
        if valid.any():
            alone = [arguments[0][row : row + 1][:, :, valid], arguments[1][row : row + 1][:, valid], *arguments[2:]]
            expected = linformer_attention(*alone, **options)
            assert relative_error(out[row : row + 1][:, :, valid], expected) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("kind", KINDS)
def test_map_carries_values_and_gives_single_rows(kind):
    arguments, options = tensors(29, kind, torch.float64)
    mask = ragged(29)
    full = linformer_attention_map(*arguments, mask, **options)
    assert not full.masked_select(~mask[:, None, None, :]).any()
    rows = torch.tensor([28, 3])
    assert torch.allclose(linformer_attention_map(*arguments, mask, rows=rows, **options), full[:, :, rows])
    if kind == "max_pool":
        # A maximum is no matrix; the shares of the channels make its rows sum to one.
        assert torch.allclose(full.sum(dim=-1), torch.ones(full.shape[:-1], dtype=torch.float64))
    else:
        values = split_heads(arguments[1] @ arguments[3].T, HEADS)
        out = linformer_attention(*arguments, mask, **options)
        assert relative_error(full @ values + arguments[5].view(HEADS, 1, DIM), out) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [1, 4, 50])
def test_convolution_is_the_formula(length, dtype):
    value = torch.randn(2, length, 3, 4).to(dtype).transpose(1, 2)
    weight = torch.randn(3, 1, 7, 1).to(dtype)
    out = depthwise_convolution(value, weight)
    for row in range(2):
        for head in range(3):
            expected = formulas.convolution(value[row, head].double(), weight[head, 0, :, 0].double())
            assert relative_error(out[row, head], expected) < TOLERANCE[dtype]
