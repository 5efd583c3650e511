# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom_models.models.attention_linear import (
    CHUNK_TOKENS,
    causal_linear_attention,
    causal_linear_attention_reference,
    elu_features,
    hedgehog_features,
    linear_attention,
    linear_attention_map,
    linear_attention_reference,
    recurrent_linear_attention,
    relu_features,
)
from nystrom_models.models.cpu_blocks import BLOCK_TOKENS
from tests.models import formulas
from tests.models.options import ATTENTION_TOLERANCE, TOLERANCE, relative_error

HEADS, FEATURES, DIM = 2, 6, 5
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CAUSAL = [causal_linear_attention_reference, causal_linear_attention, recurrent_linear_attention]
# One token, a chunk and its neighbours, a prime, more than a block of chunks.
LENGTHS = [1, CHUNK_TOKENS - 1, CHUNK_TOKENS, CHUNK_TOKENS + 1, 131, BLOCK_TOKENS + 7]


def tensors(length, dtype=torch.float32, batch=3):
    """φ(q), φ(k) and v in the layout of a model."""
    query, key, value = (torch.randn(batch, length, HEADS, dim) for dim in (FEATURES, FEATURES, DIM))
    states = elu_features(query), elu_features(key), value
    return [tensor.to(dtype).transpose(1, 2) for tensor in states]


def ragged(length, batch=3):
    """A mask with holes, with padding on the left, and with a row without a valid token."""
    mask = torch.rand(batch, length) < 0.6
    mask[1] = torch.arange(length) >= length // 3
    mask[2] = False
    return mask


def some_state(dtype=torch.float32, batch=3):
    return torch.rand(batch, HEADS, FEATURES, DIM + 1).to(torch.promote_types(dtype, torch.float32))


each_length = pytest.mark.parametrize("length", LENGTHS, ids=lambda length: f"length{length}")
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.parametrize("length", [1, 7, 40])
@pytest.mark.parametrize("causal", [False, True])
def test_references_are_the_formula(length, causal):
    query, key, value = tensors(length, torch.float64)
    outs = [linear_attention_reference(query, key, value)]
    if causal:
        outs = [function(query, key, value)[0] for function in CAUSAL]
    for out in outs:
        for row in range(3):
            for head in range(HEADS):
                states = (tensor[row, head] for tensor in (query, key, value))
                expected = formulas.linear_attention(*states, causal=causal)
                assert relative_error(out[row, head], expected) < TOLERANCE[torch.float64]


def results(function, states, mask, state, weights):
    """The result, and all gradients as one vector: those of the queries vanish if there is only one key."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in (*states, *([] if state is None else [state]))]
    causal = function in CAUSAL
    outputs = function(*inputs[:3], mask, *inputs[3:]) if causal else (function(*inputs[:3], mask),)
    loss = sum((output * weight).sum() for output, weight in zip(outputs, weights, strict=False))
    loss.backward()
    gradients = torch.cat([tensor.grad.flatten() for tensor in inputs])
    return [*(output.detach() for output in outputs), gradients]


@each_dtype
@pytest.mark.parametrize("masked", [False, True], ids=["full", "ragged"])
@each_length
def test_fast_paths_are_the_references(length, masked, dtype):
    states, state = tensors(length, dtype), some_state(dtype)
    mask = ragged(length) if masked else None
    valid = torch.ones(3, length, dtype=torch.bool) if mask is None else mask
    weights = [torch.randn(states[2].shape).to(dtype) * valid[:, None, :, None], torch.randn(state.shape).to(state)]
    pairs = [(linear_attention, linear_attention_reference, None)]
    pairs += [(causal_linear_attention, causal_linear_attention_reference, before) for before in (None, state)]
    for fast, reference, before in pairs:
        found, expected = (results(function, states, mask, before, weights) for function in (fast, reference))
        assert found[0].dtype == dtype
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert relative_error(one, other) < ATTENTION_TOLERANCE[dtype], (fast.__name__, index)


@settings(max_examples=60)
@given(st.data())
def test_every_split_of_a_sequence_is_the_whole(data):
    """The parallel, chunked and recurrent forms agree to 1e-5, in parts of any sizes, with padding at any position."""
    length = data.draw(st.integers(1, 150))
    batch = data.draw(st.integers(1, 3))
    row = st.lists(st.booleans(), min_size=length, max_size=length)
    mask = torch.tensor(data.draw(st.lists(row, min_size=batch, max_size=batch)))
    cuts = data.draw(st.lists(st.integers(0, length), max_size=6))
    states = tensors(length, batch=batch)
    expected, last = causal_linear_attention_reference(*states, mask)
    state, parts = None, []
    for start, stop in zip([0, *sorted(cuts)], [*sorted(cuts), length], strict=True):
        if start == stop:
            continue
        function = data.draw(st.sampled_from(CAUSAL))
        part, state = function(*(tensor[:, :, start:stop] for tensor in states), mask[:, start:stop], state)
        parts.append(part)
    assert relative_error(torch.cat(parts, dim=2), expected) < TOLERANCE[torch.float32]
    assert relative_error(state, last) < TOLERANCE[torch.float32]


@given(st.data())
def test_padding_is_never_seen(data):
    length = data.draw(st.integers(1, 90))
    row = st.lists(st.booleans(), min_size=length, max_size=length)
    mask = torch.tensor(data.draw(st.lists(row, min_size=1, max_size=3)))
    states = tensors(length, torch.float64, batch=len(mask))
    for tensor in states:
        tensor.masked_fill_(~mask[:, None, :, None], 1e3)
    for function in (linear_attention, lambda *inputs: causal_linear_attention(*inputs)[0]):
        out = function(*states, mask)
        assert torch.isfinite(out).all()
        for row, valid in enumerate(mask):
            if valid.any():
                alone = function(*(tensor[row : row + 1][:, :, valid] for tensor in states))
                assert relative_error(out[row : row + 1][:, :, valid], alone) < TOLERANCE[torch.float64]


@each_length
def test_no_token_sees_a_later_one(length):
    """Outputs and gradients are bitwise equal."""
    states, changed = tensors(length), tensors(length)
    first = 2 * length // 3
    for tensor, other in zip(changed, states, strict=True):
        tensor[:, :, :first] = other[:, :, :first]
    kept = []
    for inputs in (states, changed):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
        out = causal_linear_attention(*leaves)[0][:, :, :first]
        out.square().sum().backward()
        assert not any(leaf.grad[:, :, first:].any() for leaf in leaves)
        kept.append(out.detach())
    assert torch.equal(*kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_sums_in_half_precision(dtype):
    """A sum over 40,000 tokens exceeds float16's range, and stops growing at 256 in bfloat16."""
    query, key, value = (tensor.expand(-1, -1, 40_000, -1) for tensor in tensors(1, dtype, batch=1))
    with torch.no_grad():
        for out in (linear_attention(query, key, value), causal_linear_attention(query, key, value)[0]):
            assert relative_error(out[:, :, -1:], value[:, :, :1]) < ATTENTION_TOLERANCE[dtype]
    with torch.autocast("cpu", torch.bfloat16):
        under = causal_linear_attention(query.float(), key.float(), value.float())[0]
    assert under.dtype == torch.float32
    assert relative_error(under[:, :, -1], value[:, :, 0]) < TOLERANCE[torch.float32]


def test_sums_under_autocast_are_in_float32():
    """Of the encoders' attention, of a token after others, and in a backward pass that is called under autocast."""
    states = tensors(70)
    token = *tensors(1), None, some_state()
    expected = linear_attention(*states), *causal_linear_attention(*token)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_attention(*states), *causal_linear_attention(*token)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    found = []
    for enabled in (False, True):
        torch.manual_seed(0)
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (*states, some_state())]
        context, state = causal_linear_attention(*leaves[:3], None, leaves[3])
        total = context.square().sum() + state.square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found.append(torch.autograd.grad(total, leaves))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("length", [1, 5, CHUNK_TOKENS + 1])
def test_derivatives_forwards_from_a_state(length):
    """Along all inputs and the state, of the result and of the last state: what the gradients say."""
    inputs = tuple(tensor.double() for tensor in (*tensors(length), some_state()))
    along = tuple(torch.randn_like(tensor) for tensor in inputs)

    def run(query, key, value, state):
        return causal_linear_attention(query, key, value, None, state)

    for tensor in inputs:
        tensor.requires_grad_()
    _, tangents = torch.func.jvp(run, inputs, along)
    for output, tangent in zip(run(*inputs), tangents, strict=True):
        direction = torch.randn_like(output)
        total = (output * direction).sum()
        gradients = torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True)
        expected = sum((one * part).sum() for one, part in zip(gradients, along, strict=True) if one is not None)
        assert abs((tangent * direction).sum() - expected) < 1.1e-13 * expected.abs()  # measured: 2.7e-14


def test_second_derivatives():
    inputs = [
        tensor.double().detach().clone().requires_grad_() for tensor in (*tensors(5, batch=1), some_state(batch=1))
    ]

    def run(query, key, value, state):
        return causal_linear_attention(query, key, value, None, state)

    assert torch.autograd.gradgradcheck(run, inputs)


@pytest.mark.parametrize("causal", [False, True])
def test_map_carries_values_and_gives_single_rows(causal):
    query, key, value = tensors(29, torch.float64)
    mask = ragged(29)
    full = linear_attention_map(query, key, mask, causal=causal)
    expected = (
        causal_linear_attention(query, key, value, mask)[0] if causal else linear_attention(query, key, value, mask)
    )
    assert relative_error(full @ value, expected) < 1e-12
    assert not full.masked_select(~mask[:, None, None, :]).any()
    rows, by_row = torch.tensor([28, 3]), torch.tensor([[28, 3], [3, 0], [1, 2]])
    some = linear_attention_map(query, key, mask, causal=causal, rows=rows)
    assert torch.allclose(some, full[:, :, rows])
    some = linear_attention_map(query, key, mask, causal=causal, rows=by_row)
    assert torch.allclose(some, torch.stack([full[row][:, by_row[row]] for row in range(3)]))


@pytest.mark.parametrize("causal", [False, True])
def test_map_under_autocast_is_in_float32(causal):
    """In float16, weights and their sums leave the range: all other weights of the row would be 0."""
    query, key = (torch.rand(3, HEADS, 70, 64) + 30 for _ in range(2))
    mask = ragged(70)
    expected = linear_attention_map(query, key, mask, causal=causal)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            assert torch.equal(linear_attention_map(query, key, mask, causal=causal), expected)


def test_feature_maps():
    states, weight = torch.randn(2, HEADS, 7, DIM), torch.randn(HEADS, DIM, DIM)
    assert torch.allclose(elu_features(states), torch.where(states > 0, states + 1, states.exp()))
    assert torch.equal(relu_features(states), states.clamp_min(0))
    mapped = hedgehog_features(states, weight)
    for head in range(HEADS):
        product = torch.einsum("ij,bnj->bni", weight[head], states[:, head])
        assert torch.allclose(mapped[:, head], formulas.softmax(torch.cat([product, -product], dim=-1)), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_of_negative_numbers_keep_their_digits(dtype):
    """elu(x) + 1 would be (exp(x) - 1) + 1, which for these numbers is mostly 0 in half precision."""
    query, key, value = (torch.randn(2, HEADS, 100, DIM).to(dtype) for _ in range(3))
    query, key = query - 8, key - 8
    expected = linear_attention(elu_features(query.double()), elu_features(key.double()), value.double())
    actual = linear_attention(elu_features(query), elu_features(key), value)
    assert relative_error(actual, expected) < TOLERANCE[dtype]
    # And the derivative, exp(x).
    query.requires_grad_()
    elu_features(query).sum().backward()
    assert relative_error(query.grad, query.detach().double().exp()) < TOLERANCE[dtype]


def test_features_and_their_derivatives():
    """Also at 0, of second order, forwards, and for several at once. For gradients only the result is kept."""
    states = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(elu_features, states, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(elu_features, states, check_fwd_over_rev=True)
    zero = torch.zeros(1, requires_grad=True)
    elu_features(zero).backward()
    assert zero.grad == 1
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        features = elu_features(states)
    assert [tensor.data_ptr() for tensor in kept] == [features.data_ptr()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_one_graph_for_every_length():
    compiled = torch.compile(
        lambda *states: causal_linear_attention(*states)[0], fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for length in (70, 129, 300):
        states = tensors(length)
        leaves = [[tensor.detach().clone().requires_grad_() for tensor in states] for _ in range(2)]
        for function, inputs in zip((compiled, lambda *s: causal_linear_attention(*s)[0]), leaves, strict=True):
            function(*inputs).square().sum().backward()
        for one, other in zip(*leaves, strict=True):
            assert relative_error(one.grad, other.grad) < ATTENTION_TOLERANCE[torch.float32]


PEAK = """
import resource, sys, torch
from nystrom_models.models.attention_linear import causal_linear_attention
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
length = int(sys.argv[1])
states = [torch.rand(1, length, 4, 32).transpose(1, 2).requires_grad_() for _ in range(3)]
small = [state.detach()[:, :, :64].requires_grad_() for state in states]
causal_linear_attention(*small)[0].sum().backward()
before = peak()
causal_linear_attention(*states)[0].sum().backward()
print((peak() - before) / (length * 4 * 32 * 4))
"""


@pytest.mark.slow
def test_memory_of_a_training_step():
    """In units of the values' size: values with ones, sums, output, and their gradients; not a state for each token,
    which would be 33 of them."""
    command = [sys.executable, "-c", PEAK, "65536"]
    shares = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert shares < 16
