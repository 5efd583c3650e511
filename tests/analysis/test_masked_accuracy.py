# SPDX-License-Identifier: Apache-2.0
"""The accuracy of masked tokens with landmarks, against models that have such attention themselves."""

import copy

import pytest
import torch

from nystrom_models.analysis.masked_accuracy import attending_through, masked_accuracy, masked_accuracy_by_layer
from nystrom_models.models.attention_nystrom import nystrom_attention_reference
from tests.analysis.models import make_model, padded_batch

ROW = {"input_ids": padded_batch([37])["input_ids"]}
OPTIONS = {"mask_token_id": 2, "special_ids": [0, 1, 2]}


def test_accuracy_and_loss_are_those_of_the_models_logits():
    model = make_model("Nystromformer", "ForMaskedLM", num_landmarks=8, max_position_embeddings=64)
    rows = [ROW, {"input_ids": ROW["input_ids"].flip(1)}]
    exact, few = masked_accuracy(model, rows, [None, 4], **OPTIONS, mlm_probability=0.5)
    assert model.config.num_landmarks == 8 and exact["tokens"] == few["tokens"] > 20
    generator = torch.Generator().manual_seed(0)
    other = copy.deepcopy(model)
    other.config.num_landmarks = 4
    logits, labels = [], []
    for row in rows:
        ids = row["input_ids"]
        chosen = torch.rand(ids.shape, generator=generator) < 0.5
        with torch.no_grad():
            logits.append(other(ids.masked_fill(chosen, 2)).logits[chosen])
        labels.append(ids[chosen])
    logits, labels = torch.cat(logits), torch.cat(labels)
    assert few["mlm_accuracy"] == pytest.approx((logits.argmax(-1) == labels).double().mean().item())
    assert few["mlm_loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-4)
    assert few["mlm_loss"] != exact["mlm_loss"]


def test_a_share_has_its_standard_error_and_special_tokens_do_not_count():
    """A model that always predicts token 7."""
    model = make_model("Bert", "ForMaskedLM")
    with torch.no_grad():
        model.cls.predictions.decoder.bias[7] = 1e4
    row = {"input_ids": torch.tensor([[0] + [7] * 9 + [8] * 27 + [1]])}
    [found] = masked_accuracy(model, [row], [None], **OPTIONS, mlm_probability=1.0)
    assert (found["mlm_accuracy"], found["tokens"]) == (0.25, 36)
    assert found["standard_error"] == pytest.approx((0.25 * 0.75 / 36) ** 0.5)


def test_dropout_is_off_meanwhile():
    model = make_model("Bert", "ForMaskedLM", hidden_dropout_prob=0.5).train()
    found = [masked_accuracy(model, [ROW], [None, 4], **OPTIONS, mlm_probability=0.5) for _ in range(2)]
    assert found[0] == found[1] and model.training


@torch.no_grad()
def test_a_bert_attends_through_landmarks_for_the_time_being():
    model = make_model("Bert")
    inputs = padded_batch([37, 23])
    exact = model(**inputs).last_hidden_state
    outputs = []
    handle = model.encoder.layer[0].attention.self.register_forward_hook(lambda *args: outputs.append(args[2][0]))
    with attending_through(model, 5, pinv_iterations=4):
        approximated = model(**inputs).last_hidden_state
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(model(**inputs).last_hidden_state, exact)
    valid = inputs["attention_mask"].bool()
    assert (approximated - exact)[valid].norm() / exact[valid].norm() > 1e-2
    module = model.encoder.layer[0].attention.self
    states = model.embeddings(inputs["input_ids"])
    query, key, value = (
        part(states).view(2, 37, 4, 8).transpose(1, 2) for part in (module.query, module.key, module.value)
    )
    wanted = nystrom_attention_reference(query, key, value, valid, num_landmarks=5, pinv_iterations=4)
    wanted = wanted.transpose(1, 2).flatten(2)
    torch.testing.assert_close(outputs[0][valid], wanted[valid], rtol=1e-3, atol=1e-4)
    with attending_through(model, 37):
        torch.testing.assert_close(model(**inputs).last_hidden_state[valid], exact[valid], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_scores_have_the_factor_of_the_model():
    """ESM's is 1, because its queries are scaled before. As many landmarks as tokens are exact attention."""
    model, inputs = make_model("Esm"), padded_batch([37, 23])
    valid = inputs["attention_mask"].bool()
    exact = model(**inputs).last_hidden_state
    with attending_through(model, 37):
        torch.testing.assert_close(model(**inputs).last_hidden_state[valid], exact[valid], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["Nystromformer", "Bert", "Albert"])
def test_layers_that_stay_exact(family):
    """In a model whose layers share their weights, too. Losses as of models with lists, and the best layers first."""
    model = make_model(family, "ForMaskedLM", num_hidden_layers=3, max_position_embeddings=64)
    rows = [ROW, {"input_ids": ROW["input_ids"].flip(1)}]
    found = masked_accuracy_by_layer(model, rows, 3, **OPTIONS, mlm_probability=0.5)
    assert [row["exact_layers"] for row in found[:3]] == [[0], [1], [2]] and len(found) == 4
    losses = [row["mlm_loss"] for row in found]
    assert found[3]["exact_layers"] == sorted(sorted(range(3), key=losses[:3].__getitem__)[:2])
    assert [row["num_landmarks"] for row in found[:3]] == [[None, 3, 3], [3, None, 3], [3, 3, None]]
    none, exact, lists = masked_accuracy(model, rows, [3, None, [None] * 3], **OPTIONS, mlm_probability=0.5)
    assert exact["mlm_loss"] == lists["mlm_loss"] and len({*losses, none["mlm_loss"], exact["mlm_loss"]}) == 6
    if family == "Nystromformer":
        model.config.num_landmarks = [3, None, 3]
        own = masked_accuracy(model, rows, [model.config.num_landmarks], **OPTIONS, mlm_probability=0.5)
        assert own[0]["mlm_loss"] == losses[1]


@torch.no_grad()
def test_a_bert_has_landmarks_in_the_layers_of_the_list():
    """The first layer's output is exact, and the second's is not; also in the second call."""
    model = make_model("Bert")
    inputs = padded_batch([37, 23])
    outputs = {layer: [] for layer in range(2)}
    for layer, found in outputs.items():
        model.encoder.layer[layer].register_forward_hook(lambda *args, found=found: found.append(args[2]))
    model(**inputs)
    with attending_through(model, [None, 5]):
        model(**inputs), model(**inputs)
    valid = inputs["attention_mask"].bool()
    for other in (1, 2):
        torch.testing.assert_close(outputs[0][other][valid], outputs[0][0][valid])
        assert (outputs[1][other] - outputs[1][0])[valid].norm() / outputs[1][0][valid].norm() > 1e-3
    model(**inputs)
    torch.testing.assert_close(outputs[1][3], outputs[1][0])


def test_what_has_no_landmarks_is_refused():
    with (
        pytest.raises(ValueError, match="has no landmarks"),
        attending_through(make_model("Linformer", projected_dim=8), 4),
    ):
        pass
    model = make_model("Bert", "ForMaskedLM")
    with pytest.raises(ValueError, match="No token was masked"):
        masked_accuracy(model, [{"input_ids": torch.zeros(1, 9, dtype=torch.long)}], [4], **OPTIONS)
