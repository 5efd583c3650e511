# SPDX-License-Identifier: Apache-2.0
"""A causal family fits into the skeleton: a sketch of one, with a state that does not grow, in Transformers' cache."""

import pytest
import torch
from huggingface_hub.dataclasses import strict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import DynamicCache

from nystrom_models.models.configuration_base import BaseConfig
from nystrom_models.models.modeling_base import BaseModel, BasePreTrainedModel
from nystrom_models.models.recurrent_cache import recurrent_state, update_recurrent_state
from nystrom_models.models.self_attention import SelfAttention
from nystrom_models.models.task_heads import BaseForSequenceClassification
from tests.models.options import TINY, TOLERANCE, relative_error


@strict
class SketchConfig(BaseConfig):
    model_type = "sketch"
    may_be_causal = True
    is_decoder: bool = True
    layer_norm_position: str = "pre"
    classifier_pooling: str = "last"

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.layer_types = ["linear_attention"] * self.num_hidden_layers


class SketchSelfAttention(SelfAttention):
    def attend(self, hidden_states, batch):
        layers = (self.query, self.key, self.value)
        query, key, value = (self.in_heads(layer(hidden_states), batch) for layer in layers)
        query, key = F.elu(query) + 1, F.elu(key) + 1
        if batch.mask is not None:
            key = key.masked_fill(~batch.mask[:, None, :, None], 0)
        # The last column sums the keys alone, for the normaliser.
        states = (key[..., None] * F.pad(value, (0, 1), value=1.0)[..., None, :]).cumsum(dim=2)
        before = recurrent_state(batch.cache, self.layer_idx)
        states = states if before is None else states + before[:, :, None]
        update_recurrent_state(batch.cache, self.layer_idx, states[:, :, -1])
        sums = (query[..., None, :] @ states).squeeze(-2)
        return sums[..., :-1] / (sums[..., -1:] + 1e-6)


class SketchPreTrainedModel(BasePreTrainedModel):
    config: SketchConfig
    config_class = SketchConfig
    base_model_prefix = "sketch"
    self_attention_class = SketchSelfAttention


class SketchModel(BaseModel, SketchPreTrainedModel):
    """Embeddings, layers and the last norm."""


class SketchForSequenceClassification(BaseForSequenceClassification, SketchPreTrainedModel):
    """Classes by the last token, the only one that has seen all."""


LENGTH = 24


def make(model_class=SketchModel, **fields):
    torch.manual_seed(0)
    return model_class(SketchConfig(**TINY | {"max_position_embeddings": 64} | fields)).eval()


@settings(max_examples=25)
@given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=5), st.integers(0, 5))
@torch.no_grad()
def test_prefill_and_steps_are_the_whole(sizes, padding):
    """For any split into parts, single tokens among them, and with a row that is padded on the left."""
    model = make()
    ids = torch.randint(3, 99, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    whole = model(ids, attention_mask=mask).last_hidden_state
    cache, parts, start = None, [], 0
    for size in (*sizes, LENGTH):
        stop = min(start + size, LENGTH)
        if start < stop:
            part = ids[:, start:stop]
            outputs = model(part, attention_mask=mask[:, :stop], past_key_values=cache, use_cache=True)
            cache = outputs.past_key_values
            parts.append(outputs.last_hidden_state)
        start = stop
    assert isinstance(cache, DynamicCache)
    assert {state.shape for layer in cache.layers for state in layer.recurrent_states.values()} == {(2, 4, 8, 9)}
    valid = mask.bool()
    assert relative_error(torch.cat(parts, dim=1)[valid], whole[valid]) < TOLERANCE[torch.float32]


@torch.no_grad()
def test_no_token_sees_a_later_one():
    model = make()
    ids = torch.randint(3, 99, (1, LENGTH))
    changed = ids.clone()
    changed[:, 9:] = torch.randint(3, 99, (1, LENGTH - 9))
    for mask in (None, (torch.arange(LENGTH) >= 4).long()[None]):
        before, after = (model(tokens, attention_mask=mask).last_hidden_state[:, :9] for tokens in (ids, changed))
        assert torch.equal(before, after)


@torch.no_grad()
def test_classes_come_from_the_last_valid_token():
    model = make(SketchForSequenceClassification, num_labels=3)
    ids = torch.randint(3, 99, (2, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, 15:] = mask[1, :9] = 0
    logits = model(ids, attention_mask=mask).logits
    for row, valid in enumerate(mask.bool()):
        alone = model(ids[row : row + 1, valid]).logits
        assert relative_error(logits[row : row + 1], alone) < TOLERANCE[torch.float32]
        changed = ids[row : row + 1, valid].clone()
        changed[:, 0] = 3 + changed[:, 0] % 90
        assert not torch.equal(model(changed).logits, alone)


def test_a_cache_needs_to_know_the_tokens_before():
    model = make()
    ids = torch.randint(3, 99, (2, 4))
    cache = model(ids, use_cache=True).past_key_values
    with pytest.raises(ValueError, match="attention_mask of the tokens before"):
        model(ids, past_key_values=cache)
    positions = torch.arange(4, 8).expand(2, -1)
    given = model(ids, past_key_values=cache, position_ids=positions)
    assert given.past_key_values is cache
