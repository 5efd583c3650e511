# SPDX-License-Identifier: Apache-2.0
"""Nyström attention of queries to the keys of another sequence."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nystrom_models.models import attention_nystrom
from nystrom_models.models.attention_nystrom import (
    nystrom_cross_attention,
    nystrom_cross_attention_map,
    nystrom_cross_attention_reference,
)
from tests.models import formulas
from tests.models.options import ATTENTION_TOLERANCE, TOLERANCE, relative_error

M = 8
# Numbers of queries and keys: both, one or none of them above the number of landmarks.
SIZES = [(29, 61), (61, 9), (29, 8), (8, 29), (1, 29), (29, 1), (5, 3)]


def tensors(queries, keys, dtype=torch.float64, batch=2):
    states = [torch.randn(batch, length, 2, 8).to(dtype).transpose(1, 2) for length in (queries, keys, keys)]
    return [tensor.requires_grad_() for tensor in states]


@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_reference_is_the_formula(queries, keys):
    query, key, value = tensors(queries, keys)
    out = nystrom_cross_attention_reference(query, key, value, num_landmarks=M)
    for row in range(2):
        for head in range(2):
            expected = formulas.nystrom_matrix(query[row, head], key[row, head], M) @ value[row, head]
            assert relative_error(out[row, head], expected) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_fast_path_is_the_reference(queries, keys, traced, dtype, monkeypatch):
    """Full and ragged rows, outputs and gradients; also an exported graph, which must be right for all lengths."""
    if traced:
        monkeypatch.setattr(attention_nystrom, "is_tracing", lambda tensor: True)
    mask = torch.rand(2, keys) < 0.6
    mask[:, 0] = True
    for key_mask in (None, mask):
        inputs = tensors(queries, keys, dtype)
        weight = torch.randn(inputs[0].shape).to(dtype)
        results = []
        for function in (nystrom_cross_attention, nystrom_cross_attention_reference):
            out = function(*inputs, key_mask, num_landmarks=M)
            results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
        floor = (
            results[1][3].abs().max().view(1)
        )  # with a single key, those of query and key are zero except for rounding
        for name, fast, expected in zip(("out", "dq", "dk", "dv"), *results, strict=True):
            fast, expected = (torch.cat([tensor.flatten(), floor]) for tensor in (fast, expected))
            assert relative_error(fast, expected) < ATTENTION_TOLERANCE[dtype], name


@given(st.data())
def test_padding_among_the_keys_is_never_seen(data):
    queries, keys, num_landmarks = (data.draw(st.integers(1, most)) for most in (30, 30, 12))
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=keys, max_size=keys), min_size=1, max_size=3))
    )
    query, key, value = (tensor.detach() for tensor in tensors(queries, keys, batch=len(mask)))
    for tensor in (key, value):
        tensor.masked_fill_(~mask[:, None, :, None], 1e3)
    out = nystrom_cross_attention(query, key, value, mask, num_landmarks=num_landmarks)
    assert torch.isfinite(out).all()
    applied = nystrom_cross_attention_map(query, key, mask, num_landmarks=num_landmarks)
    for row, valid in enumerate(mask):
        if valid.any():
            alone = [query[row : row + 1], key[row : row + 1, :, valid], value[row : row + 1, :, valid]]
            expected = nystrom_cross_attention(*alone, num_landmarks=num_landmarks)
            assert relative_error(out[row : row + 1], expected) < TOLERANCE[torch.float64]
            assert relative_error(applied[row] @ value[row], expected[0]) < TOLERANCE[torch.float64]


def test_dropout_in_a_graph_is_of_exact_attention_too(monkeypatch):
    monkeypatch.setattr(attention_nystrom, "is_tracing", lambda tensor: True)
    for queries in (5, 29):
        query, key, value = tensors(queries, 40)
        drawn = [nystrom_cross_attention(query, key, value, num_landmarks=M, dropout_p=0.5) for _ in range(2)]
        assert not torch.allclose(*drawn)
