# SPDX-License-Identifier: Apache-2.0
"""A minimal causal family, with a state of fixed size in Transformers' cache, built on the base classes."""

import torch
from huggingface_hub.dataclasses import strict
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from transformers import DynamicCache

from nystrom_models.models.configuration_base import BaseConfig
from nystrom_models.models.modeling_base import BaseModel, BasePreTrainedModel
from nystrom_models.models.recurrent_cache import CACHE, State, read_state, write_state
from nystrom_models.models.self_attention import SelfAttention
from tests.models.options import TINY, TOLERANCE, relative_error


@strict
class SketchConfig(BaseConfig):
    model_type = "sketch"
    may_be_causal = True
    is_decoder: bool = True
    layer_norm_position: str = "pre"
    classifier_pooling: str = "last"


class SketchSelfAttention(SelfAttention):
    def attend(self, hidden_states, batch):
        layers = (self.query, self.key, self.value)
        query, key, value = (self.in_heads(layer(hidden_states), batch) for layer in layers)
        query, key = F.elu(query) + 1, F.elu(key) + 1
        if batch.mask is not None:
            key = key.masked_fill(~batch.mask[:, None, :, None], 0)
        # The last column is the sum of the keys, for the normaliser.
        states = (key[..., None] * F.pad(value, (0, 1), value=1.0)[..., None, :]).cumsum(dim=2)
        before = read_state(batch.cache, self.layer_idx, State.ATTENTION)
        states = states if before is None else states + before[:, :, None]
        write_state(batch.cache, self.layer_idx, State.ATTENTION, states[:, :, -1])
        sums = (query[..., None, :] @ states).squeeze(-2)
        return sums[..., :-1] / (sums[..., -1:] + 1e-6)


class SketchPreTrainedModel(BasePreTrainedModel):
    config: SketchConfig
    config_class = SketchConfig
    base_model_prefix = "sketch"
    self_attention_class = SketchSelfAttention


class SketchModel(BaseModel, SketchPreTrainedModel):
    """Embeddings, layers and the last norm."""


LENGTH = 24


def make():
    torch.manual_seed(0)
    return SketchModel(SketchConfig(**TINY | {"max_position_embeddings": 64})).eval()


@settings(max_examples=25)
@given(st.lists(st.integers(1, LENGTH), min_size=1, max_size=5), st.integers(0, 5))
@torch.no_grad()
def test_prefill_and_steps_are_the_whole(sizes, padding):
    """For any split into parts, also into single tokens, and with a row that is padded on the left."""
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
            outputs = model(part, attention_mask=mask[:, :stop], cache=cache, use_cache=True)
            cache = getattr(outputs, CACHE)
            parts.append(outputs.last_hidden_state)
        start = stop
    assert isinstance(cache, DynamicCache)
    # The sums of each layer and, in the first, the number of tokens.
    shapes = [
        {state.shape for state in layer.recurrent_states.values() if state is not None} for layer in cache.layers
    ]
    assert shapes == [{(2, 4, 8, 9), (2, 2)}] + [{(2, 4, 8, 9)}] * (len(shapes) - 1)
    valid = mask.bool()
    assert relative_error(torch.cat(parts, dim=1)[valid], whole[valid]) < TOLERANCE[torch.float32]
