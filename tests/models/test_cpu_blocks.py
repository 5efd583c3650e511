# SPDX-License-Identifier: Apache-2.0
"""On a CPU, without gradients, sequences are computed in blocks of tokens, with the same results."""

from unittest import mock

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from nystrom_models.models import cpu_blocks, layers
from nystrom_models.models.attention_linformer import linformer_attention
from nystrom_models.models.attention_nystrom import nystrom_attention
from tests.models.options import OPTIONS, make_model, relative_error

BLOCK = 7
MASK = (torch.arange(40) < torch.tensor([[40], [23], [5]])).long()


@pytest.fixture(autouse=True)
def small_blocks():
    with mock.patch.object(cpu_blocks, "BLOCK_TOKENS", BLOCK):
        yield


def widths_of_calls(model, inputs):
    """The output without gradients, and the number of tokens in each call of the feed-forward layers."""
    seen = []

    class Intermediate(layers.Intermediate):
        def forward(self, hidden_states):
            seen.append(hidden_states.shape[0] * hidden_states.shape[1])
            return super().forward(hidden_states)

    for layer in model.encoder.layer:
        layer.intermediate.__class__ = Intermediate
    with torch.no_grad():
        return model(**inputs).last_hidden_state, seen


@pytest.mark.parametrize("mask", [None, MASK, MASK.flip(1)], ids=["full", "padded", "padded on the left"])
@pytest.mark.parametrize("option", OPTIONS)
def test_blocks_change_nothing(option, mask):
    model = make_model(option).double()
    inputs = {"input_ids": torch.randint(3, 99, MASK.shape), "attention_mask": mask}
    whole = model(**inputs).last_hidden_state
    assert whole.requires_grad
    blocks, seen = widths_of_calls(model, inputs)
    assert relative_error(blocks, whole) < 1e-12
    tokens = MASK.numel() if mask is None else int(mask.sum())
    assert seen == 2 * ([BLOCK] * (tokens // BLOCK) + [tokens % BLOCK] * (tokens % BLOCK > 0))
    with torch.inference_mode():
        assert torch.equal(model(**inputs).last_hidden_state, blocks)
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states
    for index, state in enumerate(model(**inputs, output_hidden_states=True).hidden_states):
        assert relative_error(states[index], state) < 1e-12


@pytest.mark.parametrize("everywhere", [False, True], ids=["one module", "all modules"])
@pytest.mark.parametrize("option", ["nystromformer-landmarks", "nystromformer-pre_norm", "linformer-headwise"])
def test_hooks_see_whole_states_that_nobody_overwrites(option, everywhere):
    model = make_model(option).double()
    ids = torch.randint(3, 99, MASK.shape)
    layer = model.encoder.layer[0]
    for name, module in layer.named_modules():
        if next(module.parameters(), None) is None:
            continue
        seen = []

        def keep(hooked, arguments, output, module=module, seen=seen):
            if hooked is module:
                seen.append(output)

        handle = register_module_forward_hook(keep) if everywhere else module.register_forward_hook(keep)
        model(ids)
        with torch.no_grad():
            model(ids)
        handle.remove()
        # A layer may be called more than once: a Linformer's values, for slots and for the convolution.
        calls = len(seen) // 2
        assert calls > 0, name
        for actual, expected in zip(seen[calls:], seen[:calls], strict=True):
            assert relative_error(actual, expected) < 1e-12, name


def test_weights_that_accelerate_loads_are_loaded_once():
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = make_model("nystromformer-landmarks")
    for layer in model.encoder.layer:
        add_hook_to_module(layer.output.dense, ModelHook())
    _, seen = widths_of_calls(model, {"input_ids": torch.randint(3, 99, MASK.shape)})
    assert seen == 2 * [MASK.numel()]


def test_dropout_is_drawn_as_with_gradients():
    model = make_model("nystromformer-landmarks", hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3).train()
    ids = torch.randint(3, 99, MASK.shape)
    torch.manual_seed(0)
    expected = model(ids).last_hidden_state
    torch.manual_seed(0)
    with torch.no_grad():
        actual = model(ids).last_hidden_state
    assert relative_error(actual, expected) < 1e-6


@torch.no_grad()
def test_arguments_are_left_as_they_were():
    query, key, value = torch.randn(3, 2, 4, 40, 8)
    projection = torch.randn(8, 40)
    arguments = (query, key, value, projection)
    before = [argument.clone() for argument in arguments]
    for landmarks in (8, 64, None):
        nystrom_attention(query, key, value, num_landmarks=landmarks, skip=torch.zeros_like(query))
        nystrom_attention(query, key, value, MASK[:2].bool(), num_landmarks=landmarks, skip=torch.zeros_like(query))
    linformer_attention(query, key, value, key_projection=projection, value_projection=projection)
    assert all(torch.equal(*pair) for pair in zip(arguments, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(dtype):
    model = make_model("nystromformer-landmarks").to(dtype)
    ids = torch.randint(3, 99, MASK.shape)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(ids).last_hidden_state
        with torch.no_grad():
            actual = model(ids).last_hidden_state
    assert actual.dtype == expected.dtype
    assert relative_error(actual, expected) < 2e-2
