# SPDX-License-Identifier: Apache-2.0
"""Softmax attention in half precision: scores are float32, whoever computes them."""

import contextlib

import pytest
import torch

from nystrom_models.models.attention_nystrom import nystrom_attention_map, nystrom_attention_reference
from nystrom_models.models.masked_attention import attend_by_name, softmax_attention_map
from tests.models.options import ATTENTION_TOLERANCE, relative_error

HALF = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
# Weights in half precision, or float32 under autocast.
MODES = pytest.mark.parametrize("autocast", [False, True], ids=["half", "autocast"])


def states(dtype, length=70, offset=8.0):
    """Queries and keys with a common part, as trained models have it. It moves all scores of a query, which has no
    effect, but rounded scores are as large as it."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, length, 16, generator=generator) for _ in range(3))
    return [tensor.to(dtype) for tensor in (query + offset, key + offset, value)]


def mode(dtype, autocast):
    return torch.autocast("cpu", dtype) if autocast else contextlib.nullcontext()


@HALF
@MODES
def test_large_scores_keep_their_digits(dtype, autocast):
    """In plain operations as in PyTorch's function, forwards and backwards. Rounded scores had errors of a half."""
    inputs = states(dtype)
    exact = [tensor.double().requires_grad_() for tensor in inputs]
    inputs = [(tensor.float() if autocast else tensor).requires_grad_() for tensor in inputs]
    with mode(dtype, autocast):
        context = attend_by_name(None, "eager")(*inputs)
    expected = attend_by_name(None, "sdpa")(*exact)
    assert relative_error(context, expected) < ATTENTION_TOLERANCE[dtype]
    gradient = torch.randn(context.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = torch.autograd.grad(context, inputs, gradient.to(context))
    wanted = torch.autograd.grad(expected, exact, gradient.double())
    for one, other in zip(found, wanted, strict=True):
        # Gradients of queries are products of keys, common part included, with changes that add up to zero.
        assert relative_error(one, other) < 2 * ATTENTION_TOLERANCE[dtype]


@HALF
@MODES
def test_maps_of_large_scores_keep_their_digits(dtype, autocast):
    query, key, value = states(dtype)
    inputs = [tensor.float() if autocast else tensor for tensor in (query, key)]
    expected = nystrom_attention_reference(query.double(), key.double(), value.double(), num_landmarks=8)
    with mode(dtype, autocast):
        found = nystrom_attention_map(*inputs, num_landmarks=8)
    assert relative_error(found.double() @ value.double(), expected) < 2 * ATTENTION_TOLERANCE[dtype]


def test_scores_beyond_the_range_of_float16_before_scaling():
    """Products of 64 · 40² = 102,400 are scores of 12,800."""
    generator = torch.Generator().manual_seed(0)
    query, key = (40 + torch.randn(1, 1, 9, 64, generator=generator).half() for _ in range(2))
    expected = softmax_attention_map(query.double(), key.double())
    assert relative_error(softmax_attention_map(query, key), expected) < ATTENTION_TOLERANCE[torch.float16]
