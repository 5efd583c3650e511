# SPDX-License-Identifier: Apache-2.0
"""`torch.func.vmap`: results and gradients of each row by itself, as differential privacy needs them; and the vmap of
`torch.autograd`."""

import pytest
import torch
from torch.autograd.functional import jacobian
from torch.func import functional_call, grad, vmap

from tests.models.options import OPTIONS, TOLERANCE, language_model, make_model, relative_error

# PyTorch has no batching rule for its own attention, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def batch():
    ids, mask = torch.randint(3, 99, (3, 40)), torch.ones(3, 40, dtype=torch.long)
    mask[1, 25:] = mask[2, :7] = 0
    return ids, mask


@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_of_each_row(option):
    model = language_model(option)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters, ids, mask):
        inputs = {"input_ids": ids[None], "attention_mask": mask[None], "labels": ids[None]}
        return functional_call(model, parameters, (), inputs).loss

    ids, mask = batch()
    found = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, ids, mask)
    for row in range(3):
        model.zero_grad()
        model(ids[row : row + 1], attention_mask=mask[row : row + 1], labels=ids[row : row + 1]).loss.backward()
        ours = torch.cat([found[name][row].flatten() for name in parameters])
        alone = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        assert relative_error(ours, alone) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linformer-layerwise", "linear-elu", "linear-causal"])
@torch.no_grad()
def test_results_of_each_row_and_dropout(option):
    has_weights = not option.startswith("linear-")
    model = make_model(option, attention_probs_dropout_prob=0.5 if has_weights else 0.0)
    ids, mask = batch()

    def states(ids, mask):
        return model(ids[None], attention_mask=mask[None]).last_hidden_state[0]

    expected = model(ids, attention_mask=mask).last_hidden_state
    assert relative_error(vmap(states)(ids, mask), expected) < TOLERANCE[torch.float32]
    # Without a mask, Transformers looks for padding in the values of the ids.
    without_mask = vmap(lambda ids: model(ids[None]).last_hidden_state[0])(ids)
    assert relative_error(without_mask, model(ids).last_hidden_state) < TOLERANCE[torch.float32]
    if has_weights:
        model.train()
        same = vmap(states, randomness="different")(ids[:1].expand(2, -1), mask[:1].expand(2, -1))
        assert not torch.equal(same[0], same[1])


@pytest.mark.parametrize("part", ["query", "key", "value"])
@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linformer-layerwise", "linear-elu", "linear-causal"])
@torch.no_grad()
def test_models_that_differ_in_some_weights(option, part):
    model = make_model(option)
    ids, mask = batch()
    names = [name for name, _ in model.named_parameters() if f".{part}." in name]
    weights = dict(model.named_parameters())
    several = {name: torch.stack([weights[name], 0.5 * weights[name]]) for name in names}

    def states(weights):
        return functional_call(model, weights, (ids, mask)).last_hidden_state

    found = vmap(states)(several)
    for i in range(2):
        expected = states({name: weight[i] for name, weight in several.items()})
        assert relative_error(found[i], expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linformer-headwise", "linear-relu", "linear-causal"])
def test_vectorized_jacobians(option):
    """`torch.autograd` computes them under an older vmap, which has fewer operators."""
    model = make_model(option)
    model.set_attn_implementation("eager")  # PyTorch's own attention has no derivatives forwards
    embeddings = torch.randn(1, 40, model.config.embedding_width)

    def state(embeddings):
        return model(inputs_embeds=embeddings).last_hidden_state[0, -1, :5]

    expected = jacobian(state, embeddings)
    for strategy in ("reverse-mode", "forward-mode"):
        found = jacobian(state, embeddings, vectorize=True, strategy=strategy)
        assert relative_error(found, expected) < TOLERANCE[torch.float32]
