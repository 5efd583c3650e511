# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nystrom_models.models.attention_linformer import (
    linformer_attention,
    linformer_attention_map,
    linformer_attention_reference,
    project,
    projection_matrix,
)
from nystrom_models.models.depthwise_convolution import depthwise_convolution
from tests.models import formulas
from tests.models.options import ATTENTION_TOLERANCE, TOLERANCE, relative_error

HEADS, DIM, LONGEST, SLOTS, KERNEL = 2, 8, 61, 9, 7
KINDS = ["linear", "linear-by-head", "conv", "conv-by-head", "mean_pool", "max_pool"]


def projection(kind, dtype):
    shape = (SLOTS, LONGEST) if kind.startswith("linear") else (KERNEL,)
    if kind.endswith("pool"):
        return None
    return torch.randn(HEADS, *shape).to(dtype) / 3 if kind.endswith("by-head") else torch.randn(shape).to(dtype) / 3


def tensors(length, kind, dtype=torch.float32, batch=3, same=False):
    """query, key and value in the layout of a model, and the options."""
    states = [torch.randn(batch, length, HEADS, DIM).to(dtype).transpose(1, 2) for _ in range(3)]
    key_projection = projection(kind, dtype)
    options = {
        "key_projection": key_projection,
        "value_projection": key_projection if same else projection(kind, dtype),
        "projection_type": kind.removesuffix("-by-head"),
        "kernel_size": None if kind.startswith("linear") else KERNEL,
    }
    return states, options


def ragged(length, batch=3):
    mask = torch.rand(batch, length) < 0.6
    mask[1, : length // 3] = False
    mask[2] = True
    mask[:, length - 1] = True
    return mask


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 7, 8, 61], ids=lambda length: f"length{length}")
def test_reference_is_the_formula(length, kind):
    (query, key, value), options = tensors(length, kind, torch.float64)
    out = linformer_attention_reference(query, key, value, **options)
    matrices = options["key_projection"], options["value_projection"]
    for row in range(3):
        for head in range(HEADS):
            keys, values = (
                formulas.project(
                    states[row, head],
                    matrix[head] if kind.endswith("by-head") else matrix,
                    options["projection_type"],
                    KERNEL,
                )
                for states, matrix in zip((key, value), matrices, strict=True)
            )
            expected = formulas.softmax(query[row, head] @ keys.T / DIM**0.5) @ values
            assert relative_error(out[row, head], expected) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize("same", [False, True], ids=["two-projections", "one-projection"])
@pytest.mark.parametrize("kind", KINDS)
def test_fast_path_is_the_reference(kind, same, masked, dtype):
    length = 23
    states, options = tensors(length, kind, dtype, same=same)
    if kind == "max_pool" and dtype in (torch.bfloat16, torch.float16):
        # Entries that are equal after rounding share a gradient in only one of the paths: there are none.
        states = [(tensor.argsort(dim=2) / 8 - 1.5).to(dtype) for tensor in states]
    mask = ragged(length) if masked else None
    valid = torch.ones(3, length, dtype=torch.bool) if mask is None else mask
    weight = torch.randn(states[0].shape).to(dtype) * valid[:, None, :, None]
    conv = torch.randn(HEADS, 1, 5, 1).to(dtype) / 5
    names = [name for name in ("key_projection", "value_projection") if options[name] is not None]
    results = []
    for function in (linformer_attention, linformer_attention_reference):
        inputs = [tensor.clone().requires_grad_() for tensor in (*states, conv)]
        projections = {name: options[name].clone().requires_grad_() for name in names}
        if same and names:
            projections["value_projection"] = projections["key_projection"]
        skip = depthwise_convolution(inputs[2], inputs[3], mask)
        out = function(*inputs[:3], mask, skip=skip, **options | projections)
        (out * weight).sum().backward()
        assert out.dtype == dtype
        gradients = [tensor.grad for tensor in (*inputs, *projections.values())]
        results.append([(out * valid[:, None, :, None]).detach(), *gradients])
    for index, (fast, reference) in enumerate(zip(*results, strict=True)):
        assert relative_error(fast, reference) < ATTENTION_TOLERANCE[dtype], index


@pytest.mark.parametrize("dtype, mean", [(torch.bfloat16, 1.0), (torch.float16, 300.0)])
def test_means_of_large_slots_in_half_precision(dtype, mean):
    """bfloat16 rounds the number of tokens, 257, to 256; the sum of these numbers is infinite in float16."""
    states = (mean * (1 + 0.1 * torch.randn(1, 2, 4 * 257, 8))).to(dtype)
    expected = states.double().unflatten(2, (4, 257)).mean(dim=3)
    means = project(states, None, "mean_pool", 257, None)
    assert means.dtype == dtype
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(means.double(), expected, rtol=1.1 * rounding, atol=0.0)
    matrix = projection_matrix(states, None, "mean_pool", 257, None)
    assert matrix.dtype == dtype
    # Just below a power of two, numbers are rounded by half as much: less than 1 / 256 differs from 1 / 257.
    torch.testing.assert_close(
        matrix.amax(dim=-1).double(), torch.full((1, 1, 4), 1 / 257).double(), rtol=0.6 * rounding, atol=0.0
    )


@given(st.data())
def test_padding_is_never_seen(data):
    """A row at any position in a batch, with random padding, gives the same as its valid tokens alone."""
    kind = data.draw(st.sampled_from(KINDS))
    length = data.draw(st.integers(1, 40))
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=3))
    )
    states, options = tensors(length, kind, torch.float64, batch=len(mask))
    for tensor in states:
        tensor.masked_fill_(~mask[:, None, :, None], 1e3)
    out = linformer_attention(*states, mask, **options)
    assert torch.isfinite(out).all()
    for row in range(len(mask)):
        valid = mask[row]
        if valid.any():
            alone = [tensor[row : row + 1][:, :, valid] for tensor in states]
            expected = linformer_attention(*alone, **options)
            assert relative_error(out[row : row + 1][:, :, valid], expected) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("kind", KINDS)
def test_map_carries_values_and_gives_single_rows(kind):
    states, options = tensors(29, kind, torch.float64)
    mask = ragged(29)
    full = linformer_attention_map(*states, mask, **options)
    assert not full.masked_select(~mask[:, None, None, :]).any()
    rows = torch.tensor([28, 3])
    by_row = torch.tensor([[28, 3], [3, 0], [1, 2]])
    assert torch.allclose(linformer_attention_map(*states, mask, rows=rows, **options), full[:, :, rows])
    some = linformer_attention_map(*states, mask, rows=by_row, **options)
    assert torch.allclose(some, torch.stack([full[row][:, by_row[row]] for row in range(3)]))
    if kind == "max_pool":
        # Max pooling is not a matrix; the mean over the channels makes the rows of the map sum to one.
        assert torch.allclose(full.sum(dim=-1), torch.ones(full.shape[:-1], dtype=torch.float64))
    else:
        assert relative_error(full @ states[2], linformer_attention(*states, mask, **options)) < 1e-12


def test_the_map_of_a_maximum_shares_a_slot_by_channels():
    """A token has the share of its slot's weight in which channels of its value are the largest."""
    (query, key, value), options = tensors(23, "max_pool", torch.float64)
    mask = ragged(23)
    found = linformer_attention_map(query, key, value, mask, **options)
    for row in range(3):
        places = mask[row].nonzero().flatten()
        for head in range(HEADS):
            slots = formulas.project(key[row, head, places], None, "max_pool", KERNEL)
            weights = formulas.softmax(query[row, head] @ slots.T / DIM**0.5)
            expected = torch.zeros(23, 23, dtype=torch.float64)
            for slot, tokens in enumerate(places.split(KERNEL)):
                for channel in range(DIM):
                    largest = tokens[value[row, head, tokens, channel].argmax()]
                    expected[:, largest] += weights[:, slot] / DIM
            assert relative_error(found[row, head], expected) < TOLERANCE[torch.float64]
