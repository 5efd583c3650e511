# SPDX-License-Identifier: Apache-2.0
"""On a CPU, exact attention does not compute padded tokens."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from nystrom_models import (
    LinearTransformerConfig,
    LinearTransformerForCausalLM,
    LinearTransformerModel,
    NystromformerConfig,
    NystromformerModel,
)
from nystrom_models.models import masked_attention
from nystrom_models.models.attention_nystrom import nystrom_attention, nystrom_attention_reference
from nystrom_models.models.masked_attention import attend, attend_causally, attend_within_rows
from tests.models import formulas
from tests.models.options import relative_error

HEADS, WIDTH, DIM = 2, 23, 8


@pytest.fixture(autouse=True)
def always_by_row():
    """Rows are computed one by one wherever this spares anything."""
    with mock.patch.object(masked_attention, "LEAST_SPARED_SCORES", 0):
        yield


def states_of(batch):
    shape = (batch, HEADS, WIDTH, DIM)
    return [torch.randn(shape, dtype=torch.double, requires_grad=True) for _ in range(4)]


def mask_of(lengths):
    return torch.arange(WIDTH) < torch.tensor(lengths)[:, None]


def gradients(result, mask, inputs):
    """Gradients of a sum over the valid tokens."""
    torch.manual_seed(1)
    weights = torch.randn_like(result) * mask[:, None, :, None]
    return torch.autograd.grad((result * weights).sum(), inputs)


@given(st.lists(st.integers(0, WIDTH), min_size=1, max_size=5), st.booleans())
def test_rows_one_by_one_equal_the_reference(lengths, with_skip):
    *inputs, skip = states_of(len(lengths))
    inputs = [*inputs, skip] if with_skip else inputs
    mask = mask_of(lengths)

    def compute(function, **options):
        return function(*inputs[:3], mask, num_landmarks=None, skip=skip if with_skip else None, **options)

    seen = []

    def counted(query, *others):
        seen.append(tuple(query.shape))
        return attend(query, *others)

    result = compute(nystrom_attention, attend=counted)
    unequal = any(length < WIDTH for length in lengths)
    assert seen == (
        [(1, HEADS, max(1, length), DIM) for length in lengths] if unequal else [(len(lengths), HEADS, WIDTH, DIM)]
    )
    assert result.isfinite().all()
    expected = compute(nystrom_attention_reference)
    valid = mask[:, None, :, None].expand_as(result)
    torch.testing.assert_close(result[valid], expected[valid], rtol=0, atol=6e-15)
    for ours, reference in zip(gradients(result, mask, inputs), gradients(expected, mask, inputs), strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1.4e-14)
    if with_skip:
        with torch.no_grad():
            skip = skip.clone()
            assert compute(nystrom_attention) is skip
            torch.testing.assert_close(skip[valid], expected[valid], rtol=0, atol=6e-15)


def test_causal_rows():
    query, key, value, _ = states_of(3)
    mask = mask_of([23, 4, 11])
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    with mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as computed:
        result = attend_causally(query, key, value, mask)
    assert [call.args[0].shape[2] for call in computed.call_args_list] == [23, 4, 11]
    valid = mask[:, None, :, None].expand_as(result)
    assert relative_error(result[valid], expected[valid]) < 1e-14
    for ours, reference in zip(
        gradients(result, mask, (query, key, value)), gradients(expected, mask, (query, key, value)), strict=True
    ):
        torch.testing.assert_close(ours, reference, rtol=0, atol=1.4e-14)


def test_dropout_keeps_what_it_should_on_average():
    query, key, value, _ = (states.detach() for states in states_of(2))
    mask = mask_of([23, 9])
    exact = attend_within_rows(query, key, value, mask)
    torch.manual_seed(0)
    dropped = torch.stack([attend_within_rows(query, key, value, mask, 0.3) for _ in range(2000)])
    assert not torch.equal(dropped[0], dropped[1])
    valid = mask[:, None, :, None].expand_as(exact)
    assert relative_error(dropped.mean(0)[valid], exact[valid]) < 0.03


@pytest.mark.parametrize(
    "mask",
    [None, mask_of([23, 23]), mask_of([23, 9]).flip(1)],
    ids=["full", "equal lengths", "padded on the left"],
)
def test_other_batches_are_computed_at_once(mask):
    query, key, value, _ = states_of(2)
    with mock.patch.object(masked_attention.F, "pad", side_effect=AssertionError):
        result = attend_within_rows(query, key, value, mask)
    assert torch.equal(result, attend(query, key, value, mask))


def test_few_scores_are_computed_at_once():
    query, key, value, _ = states_of(2)
    computed_at_once = mock.patch.object(masked_attention.F, "pad", side_effect=AssertionError)
    with mock.patch.object(masked_attention, "LEAST_SPARED_SCORES", 2**17), computed_at_once:
        attend_within_rows(query, key, value, mask_of([23, 9]))


def models():
    size = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "conv_kernel_size": 5,
    }
    return {
        "exact": (NystromformerModel, NystromformerConfig(num_landmarks=None, **size)),
        "last layer exact": (NystromformerModel, NystromformerConfig(num_landmarks=[4, None], **size)),
        "softmax": (LinearTransformerModel, LinearTransformerConfig(feature_map=None, **size)),
        "causal": (
            LinearTransformerForCausalLM,
            LinearTransformerConfig(feature_map=None, is_decoder=True, **size),
        ),
    }


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("unpad_inputs", [True, False])
@pytest.mark.parametrize("name", models())
def test_models(name, unpad_inputs, implementation):
    kind, config = models()[name]
    config.unpad_inputs = unpad_inputs
    torch.manual_seed(0)
    model = kind._from_config(config, attn_implementation=implementation).double().eval()
    lengths = [40, 7, 23]
    ids = torch.randint(5, 50, (3, 40))
    mask = (torch.arange(40) < torch.tensor(lengths)[:, None]).long()
    rows = mock.Mock(wraps=masked_attention._unequal_lengths)
    with mock.patch.object(masked_attention, "_unequal_lengths", rows):
        together = model(ids, attention_mask=mask)[0]
    assert rows.call_count == (1 if name == "last layer exact" else 2)
    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, :length])[0]
        assert relative_error(together[row : row + 1, :length], alone) < 1e-13
    with torch.no_grad():
        assert relative_error(model(ids, attention_mask=mask)[0], together) < 1e-13


@pytest.mark.parametrize("unpad_inputs", [True, False])
@pytest.mark.parametrize("name", ["softmax", "causal"])
@torch.no_grad()
def test_the_softmax_control_is_the_formula(name, unpad_inputs):
    """With its convolution, by every implementation that it may have."""
    kind, config = models()[name]
    config.unpad_inputs, config.hidden_act = unpad_inputs, "gelu_new"
    torch.manual_seed(0)
    model = kind(config).double().eval()
    ids, mask = torch.randint(5, 50, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    mask[1, 23:] = 0
    weights = model.base_model.state_dict()
    for implementation in ("sdpa", "eager", "linear_triton"):
        model.base_model.config._attn_implementation = implementation
        states = model.base_model(ids, attention_mask=mask).last_hidden_state
        for row, length in enumerate((40, 23)):
            expected = formulas.encode(weights, config, ids[row, :length])
            assert relative_error(states[row, :length], expected) < 1.4e-15


def test_a_causal_control_refuses_implementations_that_it_does_not_call():
    kind, config = models()["causal"]
    model = kind(config)
    model.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match='"flex_attention" is not called by a causal model: use "sdpa" or "eager"'):
        model(torch.randint(5, 50, (2, 9)))
