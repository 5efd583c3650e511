# SPDX-License-Identifier: Apache-2.0
"""Masks of keys in every form that Transformers and its models have, and those that are not masks of keys."""

import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_causal_mask,
    sdpa_mask,
)

from nystrom_models import use_nystrom
from nystrom_models.interface.attention import nystrom_attention_forward
from nystrom_models.interface.masks import key_mask_of, nystrom_mask
from tests.interface.models import make, tokens

CONFIG = BertConfig(attn_implementation="nystrom")

# The forms in which a model may pass a mask (B, K), with N queries.
FORMS = {
    "bool": lambda mask, n: mask[:, None, None],
    "rows": lambda mask, n: mask[:, None, None].expand(-1, 1, n, -1),
    "rows stored": lambda mask, n: mask[:, None, None].repeat(1, 1, n, 1),
    "heads stored": lambda mask, n: mask[:, None, None].repeat(1, 2, 1, 1),
    "integers": lambda mask, n: mask.long(),
    "minimum": lambda mask, n: (~mask)[:, None, None].float() * torch.finfo(torch.float32).min,
    "-10000": lambda mask, n: (1.0 - mask[:, None, None].bfloat16()) * -10000.0,
    "-inf": lambda mask, n: torch.zeros(len(mask), 1, n, mask.shape[1]).masked_fill(~mask[:, None, None], -torch.inf),
    "queries, too": lambda mask, n: mask[:, None, None] & (torch.arange(n) < n - 1)[:, None],
}


@pytest.mark.parametrize("form", FORMS)
@given(data=st.data())
def test_every_form_is_the_same_mask(form, data):
    rows, keys, queries = (data.draw(st.integers(1, most)) for most in (3, 12, 12))
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=keys, max_size=keys), min_size=rows, max_size=rows))
    )
    queries = max(queries, 2)
    assert torch.equal(key_mask_of(FORMS[form](mask, queries), rows, queries, keys), mask)


def test_one_row_is_for_all():
    mask = torch.tensor([True, False, True])
    assert torch.equal(key_mask_of(mask.view(1, 1, 1, 3), 4, 5, 3), mask.expand(4, 3))
    assert key_mask_of(None, 4, 5, 3) is None


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (torch.ones(5, 5, dtype=torch.bool).tril()[None, None], "differs between queries"),
        (torch.block_diag(torch.ones(2, 2), torch.ones(3, 3)).bool()[None, None], "differs between queries"),
        (
            torch.zeros(1, 1, 5, 5).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf),
            "differs between queries",
        ),
        (torch.tensor([[True] * 5, [True] * 4 + [False]]).view(1, 2, 1, 5), "differs between queries"),
        (torch.randn(1, 2, 5, 5), "no bias of the scores"),
        (torch.ones(1, 1, 1, 5), "no bias of the scores"),
        (torch.full((1, 1, 1, 5), torch.nan), "no bias of the scores"),
        (torch.tensor([0.0, 0, -2, -999, 0]).view(1, 1, 1, 5), "no bias of the scores"),
        (torch.ones(1, 1, 1, 5, dtype=torch.long), "neither bool nor floating"),
        (torch.ones(1, 5), "has shape"),
        (torch.ones(1, 1, 1, 4, dtype=torch.bool), "has shape"),
        (torch.ones(1, 1, 4, 5, dtype=torch.bool), "has shape"),
        (torch.ones(2, 1, 1, 5, dtype=torch.bool), "has shape"),
        ("blocks", "mask that differs between queries.*It is a str"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_is_no_mask_of_keys_is_refused(mask, says):
    with pytest.raises(ValueError, match=says):
        key_mask_of(mask, 1, 5, 5)


@given(st.data())
def test_the_mask_that_transformers_asks_for(data):
    rows, keys = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=keys, max_size=keys), min_size=rows, max_size=rows))
    )
    found = create_bidirectional_mask(CONFIG, torch.zeros(rows, keys, 4), mask.long())
    assert found is None if mask.all() else torch.equal(found, mask[:, None, None])
    whole = create_bidirectional_mask(
        CONFIG, torch.zeros(rows, keys, 4), mask.long(), allow_is_bidirectional_skip=False
    )
    expected = sdpa_mask(
        rows, keys, keys, attention_mask=mask, mask_function=bidirectional_mask_function, allow_is_causal_skip=False
    )
    assert torch.equal(whole, expected) and torch.equal(key_mask_of(whole, rows, keys, keys), mask)


def test_a_mask_is_not_needed():
    states = torch.zeros(2, 5, 4)
    assert create_bidirectional_mask(CONFIG, states, None) is None
    assert create_bidirectional_mask(CONFIG, states, None, allow_is_bidirectional_skip=False).shape == (2, 1, 5, 5)
    shorter = nystrom_mask(
        2, 5, 7, mask_function=bidirectional_mask_function, attention_mask=torch.ones(2, 5, dtype=torch.bool),
        allow_is_bidirectional_skip=True,
    )  # fmt: skip
    assert shorter[:, 0, 0].tolist() == [[True] * 5 + [False] * 2] * 2


def test_a_mask_may_begin_before_the_keys():
    mask = torch.tensor([[True, False, True, True, False, True, True]])
    given = {"attention_mask": mask, "mask_function": bidirectional_mask_function, "allow_is_bidirectional_skip": True}
    assert torch.equal(nystrom_mask(1, 5, 5, kv_offset=2, **given)[:, 0, 0], mask[:, 2:])


def test_a_models_own_mask_may_change_between_calls():
    """Segments are remembered only for masks that Transformers asks for."""
    query, key, value = torch.randn(3, 1, 2, 29, 8)
    module = types.SimpleNamespace(config=types.SimpleNamespace(num_landmarks=8), is_causal=False)
    mask = torch.ones(1, 1, 1, 29, dtype=torch.bool)
    for stop in (29, 20, 13):
        mask[..., stop:] = False
        found, _ = nystrom_attention_forward(module, query, key, value, mask)
        expected, _ = nystrom_attention_forward(module, query, key, value, mask.clone())
        assert torch.equal(found[:, :stop], expected[:, :stop])


def test_masks_of_other_attention_are_refused():
    states = torch.zeros(2, 5, 4)
    with pytest.raises(ValueError, match="model_type='bert' needs a causal mask"):
        create_causal_mask(CONFIG, states, None, None)
    with pytest.raises(ValueError, match="causal mask"):
        nystrom_mask(2, 5, 5, mask_function=causal_mask_function)
    documents = torch.tensor([0, 0, 1, 1, 1])
    with pytest.raises(ValueError, match="differs between queries"):
        create_bidirectional_mask(
            CONFIG, states, None, and_mask_function=lambda b, h, q, k: documents[q] == documents[k]
        )
    # Conditions that amount to a mask of keys are accepted.
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    expected = mask.bool() & (documents == 1)
    found = create_bidirectional_mask(CONFIG, states, mask, and_mask_function=lambda b, h, q, k: documents[k] == 1)
    assert torch.equal(found, expected[:, None, None])
    found = create_causal_mask(CONFIG, states, mask, None, or_mask_function=lambda *_: torch.tensor(True))
    assert torch.equal(found, mask.bool()[:, None, None])


def test_sliding_windows_are_those_of_sdpa():
    config = make("ModernBERT").config
    states, mask = torch.zeros(2, 20, 4), torch.ones(2, 20)
    mask[0, 15:] = 0
    found = {}
    for name in ("sdpa", "nystrom"):
        config._attn_implementation = name
        found[name] = create_bidirectional_sliding_window_mask(config, states, mask)
    assert found["sdpa"].shape == (2, 1, 20, 20) and torch.equal(found["sdpa"], found["nystrom"])


@torch.no_grad()
@pytest.mark.parametrize("padding", ["left", "right", "holes", "a whole row"])
def test_padding_is_never_seen(padding):
    """The states of a BERT do not depend on the content of padding or on the form of the mask."""
    model = use_nystrom(make("BERT"), 8)
    ids, mask = tokens(3), torch.ones(3, 40, dtype=torch.long)
    if padding == "holes":
        mask = (torch.rand(3, 40) < 0.7).long()
    else:
        mask[1, {"left": slice(0, 17), "right": slice(25, 40), "a whole row": slice(0, 40)}[padding]] = 0
    expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert expected.isfinite().all()
    other = torch.where(mask.bool(), ids, tokens(3))
    added = torch.zeros(3, 1, 40, 40).masked_fill(~mask.bool()[:, None, None], torch.finfo(torch.float32).min)
    for given_ids, given_mask in ((other, mask), (ids, added), (ids, mask.bool()[:, None, None])):
        found = model(input_ids=given_ids, attention_mask=given_mask).last_hidden_state
        valid = mask.bool()
        assert (found[valid] - expected[valid]).abs().max() < 4e-6
