# SPDX-License-Identifier: Apache-2.0
"""Invariants of every family, option and head: padding has no effect, and the result is that of the papers."""

import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tests.models import formulas
from tests.models.options import HEADS, OPTIONS, TOLERANCE, language_model, make_model, relative_error

LENGTHS = (1, 2, 7, 8, 9, 16, 17, 97, 256, 509, 1000)


def rows_of(output, head):
    """The tensors of an output, grouped by whether they have an entry for each token."""
    tensors = dict(output)
    tensors.pop("hidden_states", None)
    tokens = {"last_hidden_state", "prediction_logits", "start_logits", "end_logits"}
    if head in ("ForMaskedLM", "ForTokenClassification"):
        tokens.add("logits")
    return {name: (tensor, name in tokens) for name, tensor in tensors.items()}


def pad(ids, left, right):
    """ids (1, L) -> ids and mask (1, left + L + right), with other tokens at padding."""
    length = ids.shape[1]
    padded = torch.randint(3, 99, (1, left + length + right))
    mask = torch.zeros_like(padded)
    padded[:, left : left + length] = ids
    mask[:, left : left + length] = 1
    return padded, mask


@pytest.mark.parametrize("head", [head for head in HEADS if head != "ForMultipleChoice"])
@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_row_alone_is_row_in_a_batch(option, head):
    """Alone, padded on the right, on the left, on both sides, in a batch with longer rows and an empty one."""
    # Heads share the encoder: the long lengths are tested once for each option.
    lengths = LENGTHS if head == "Model" else (1, 9, 17)
    extra = 13
    model = make_model(option, head, max_position_embeddings=max(lengths) + extra)
    for length in lengths:
        ids = torch.randint(3, 99, (1, length))
        alone = rows_of(model(ids), head)
        layouts = [(0, extra), (extra, 0), (4, extra - 4)]
        rows = [pad(ids, *layout) for layout in layouts]
        rows += [pad(torch.randint(3, 99, (1, length + extra)), 0, 0), pad(ids[:, :0], length, extra)]
        batch = model(torch.cat([row for row, _ in rows]), attention_mask=torch.cat([mask for _, mask in rows]))
        for name, (tensor, by_token) in rows_of(batch, head).items():
            assert torch.isfinite(tensor).all(), name
            for row, (left, _) in enumerate(layouts):
                actual = tensor[row, left : left + length] if by_token else tensor[row]
                error = relative_error(actual, alone[name][0][0])
                assert error < TOLERANCE[torch.float32], (name, length, layouts[row], error)


@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_choices_and_losses_do_not_see_padding(option):
    choice = make_model(option, "ForMultipleChoice")
    question = make_model(option, "ForQuestionAnswering")
    ids = torch.randint(3, 99, (1, 2, 20))
    wide, mask = torch.randint(3, 99, (1, 2, 30)), torch.zeros(1, 2, 30, dtype=torch.long)
    wide[..., 5:25], mask[..., 5:25] = ids, 1
    assert relative_error(choice(wide, attention_mask=mask).logits, choice(ids).logits) < 1e-5
    alone = question(ids[0], start_positions=torch.tensor([3, 4]), end_positions=torch.tensor([6, 99]))
    # An end in the padding is ignored, as is one outside the sequence.
    positions = {"start_positions": torch.tensor([8, 9]), "end_positions": torch.tensor([11, 27])}
    assert relative_error(question(wide[0], attention_mask=mask[0], **positions).loss, alone.loss) < 1e-5


@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_encoder_is_the_equations_in_float64(option):
    for length in (1, 8, 16, 17, 50):
        model = make_model(option)
        ids = torch.randint(3, 99, (length,))
        expected = formulas.encode(model.state_dict(), model.config, ids)
        assert relative_error(model(ids[None]).last_hidden_state[0], expected) < TOLERANCE[torch.float32], length
        padded, mask = pad(ids[None], 3, 7)
        inside = model(padded, attention_mask=mask).last_hidden_state[0, 3 : 3 + length]
        assert relative_error(inside, expected) < TOLERANCE[torch.float32], length


@pytest.mark.parametrize("option", ["linformer-mean_pool", "linformer-max_pool", "linformer-conv_none"])
@torch.no_grad()
def test_slots_that_do_not_divide_the_longest_sequence(option):
    """61 tokens are eight slots of seven, and one of five."""
    model, ids = make_model(option, max_position_embeddings=61, projected_dim=9), torch.randint(3, 99, (61,))
    expected = formulas.encode(model.state_dict(), model.config, ids)
    for mask in (None, torch.ones(2, 61, dtype=torch.long)):
        found = model(ids.expand(2, 61), attention_mask=mask).last_hidden_state[1]
        assert relative_error(found, expected) < TOLERANCE[torch.float32]


@torch.no_grad()
def test_the_pseudo_inverse_has_the_iterations_of_the_configuration():
    model = make_model("nystromformer-landmarks", pinv_iterations=2)
    ids = torch.randint(3, 99, (50,))
    expected = formulas.encode(model.state_dict(), model.config, ids)
    for wanted in ({}, {"output_attentions": True}):
        assert relative_error(model(ids[None], **wanted).last_hidden_state[0], expected) < TOLERANCE[torch.float32]
    model.set_attn_implementation("eager")
    found = model(ids[None], output_attentions=True).last_hidden_state[0]
    assert relative_error(found, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linformer-layerwise", "linear-causal"])
@torch.no_grad()
def test_a_model_without_layers_has_only_embeddings(option):
    model, ids = make_model(option, num_hidden_layers=0), torch.randint(3, 99, (2, 20))
    assert {name.split(".")[0] for name, _ in model.named_parameters() if "LayerNorm" not in name} == {
        "embeddings",
        "pooler",
    }
    expected = formulas.encode(model.state_dict(), model.config, ids[0])
    assert relative_error(model(ids).last_hidden_state[0], expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("option", ["nystromformer-pre_norm", "linformer-pre_norm", "linear-hedgehog"])
@torch.no_grad()
def test_dropout_of_embeddings_and_sub_layers(option):
    """With a probability of 1, nothing of the embeddings and of any sub-layer reaches the residual."""
    model, ids = make_model(option, hidden_dropout_prob=1.0), torch.randint(3, 99, (2, 40))
    states = model.train()(ids, output_hidden_states=True).hidden_states
    assert not states[0].any() and not states[1].any()
    assert model.eval()(ids, output_hidden_states=True).hidden_states[0].any()
    model.embeddings.dropout.p = 0.0
    states = model.train()(ids, output_hidden_states=True).hidden_states
    assert states[0].any() and torch.equal(states[1], states[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_half_precision_weights(option, dtype):
    model = make_model(option, "ForMaskedLM")
    ids, mask = pad(torch.randint(3, 99, (1, 40)), 5, 5)
    exact = model(ids, attention_mask=mask).logits[:, 5:45]
    model.to(dtype)
    out = model(ids, attention_mask=mask, labels=ids)
    out.loss.backward()
    assert out.logits.dtype == dtype
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)
    assert relative_error(out.logits[:, 5:45], exact) < TOLERANCE[dtype]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("option", ["linear-causal_sinusoidal", "linear-elu", "linear-causal"])
def test_features_that_float16_does_not_hold(option, implementation):
    """Features of 1e-8 are 0 in float16, and the gradients of features of 1e-6 leave its range, though no output and
    no other gradient does."""
    model = language_model(option).double()
    with torch.no_grad():
        for layer in model.base_model.encoder.layer:
            attention = layer.attention.self
            if hasattr(attention.query_features, "weight"):
                attention.query_features.weight.mul_(3)
                attention.key_features.weight.mul_(3)
            else:
                attention.query.bias.sub_(18)
                attention.key.bias.add_(30)
    model.half().double()  # the same weights
    model.set_attn_implementation(implementation)
    ids, found = torch.randint(3, 99, (1, 60)), []
    for dtype in (torch.float64, torch.float16):
        model.to(dtype).zero_grad()
        out = model(ids, labels=ids, output_attentions=implementation == "eager")
        out.loss.backward()
        values = model.base_model.encoder.layer[0].attention.self.value.weight.grad
        found.append((out.logits, values, *(out.attentions or ())))
        assert all(
            torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None
        )
        assert found[-1][-1].dtype == dtype
    for one, other in zip(found[1], found[0], strict=True):
        assert relative_error(one, other) < 5e-2


@pytest.mark.parametrize("option", OPTIONS)
def test_mixed_precision_trains(option):
    """Under autocast, gradients with dropout are finite, and outputs without dropout are close to the exact result."""
    dropout = {"hidden_dropout_prob": 0.1}
    if not option.startswith("linear-"):
        dropout["attention_probs_dropout_prob"] = 0.1
    model = make_model(option, "ForPreTraining", **dropout)
    ids, mask = pad(torch.randint(3, 99, (1, 40)), 5, 5)
    exact = model(ids, attention_mask=mask).prediction_logits[:, 5:45]
    model.train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [
            model(ids, attention_mask=mask, labels=ids, sentence_order_label=torch.tensor([1])).loss for _ in range(2)
        ]
        mixed = model.eval()(ids, attention_mask=mask).prediction_logits[:, 5:45]
    assert losses[0] != losses[1]
    losses[0].backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())
    assert relative_error(mixed, exact) < 2.7e-2  # measured: 6.8e-3


@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_eager_is_sdpa_and_earlier_calls_leave_no_trace(option):
    model = make_model(option)
    ids, mask = pad(torch.randint(3, 99, (2, 40))[:1], 5, 5)
    first = model(ids, attention_mask=mask).last_hidden_state
    model(ids[:, :4])
    model.set_attn_implementation("eager")
    eager = model(ids, attention_mask=mask).last_hidden_state
    assert relative_error(eager[mask.bool()], first[mask.bool()]) < TOLERANCE[torch.float32]
    model.set_attn_implementation("sdpa")
    assert relative_error(model(ids, attention_mask=mask).last_hidden_state, first) < 1e-6


@pytest.mark.parametrize(
    "option", ["nystromformer-landmarks", "nystromformer-softmax", "linformer-layerwise", "linear-softmax"]
)
@torch.no_grad()
def test_an_encoder_sees_later_tokens_through_any_registered_function(option, monkeypatch):
    """Functions of Transformers are causal unless they are told otherwise."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "registered_by_a_user", sdpa_attention_forward)
    model, ids = make_model(option), torch.randint(3, 99, (2, 40))
    expected = model(ids).last_hidden_state
    model.set_attn_implementation("registered_by_a_user")
    assert relative_error(model(ids).last_hidden_state, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_attention_maps_and_their_rows(option, implementation):
    model = make_model(option)
    model.set_attn_implementation(implementation)
    ids, mask = pad(torch.randint(3, 99, (1, 40)), 5, 5)
    plain = model(ids, attention_mask=mask)
    full = model(ids, attention_mask=mask, output_attentions=True)
    assert relative_error(full.last_hidden_state[:, 5:45], plain.last_hidden_state[:, 5:45]) < 1e-5
    assert [tuple(map_.shape) for map_ in full.attentions] == [(1, 4, 50, 50)] * 2
    rows = torch.tensor([5, 30])
    some = model(ids, attention_mask=mask, output_attentions=True, attention_rows=rows)
    for chosen, whole in zip(some.attentions, full.attentions, strict=True):
        assert relative_error(chosen, whole[:, :, rows]) < 1e-5


@torch.no_grad()
def test_rows_of_the_map_need_linear_memory():
    length = 4096
    model = make_model("nystromformer-landmarks", max_position_embeddings=length, num_hidden_layers=1)
    ids = torch.randint(3, 99, (1, length))
    model(ids)  # memory that is allocated once in a process
    with torch.profiler.profile(profile_memory=True) as profile:
        model(ids, output_attentions=True, attention_rows=torch.tensor([0]))
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < length * length * 4 / 4


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linformer-layerwise", "linformer-none"])
def test_gradient_checkpointing_changes_nothing(option):
    """The projection that all layers share also gets its gradient, in both variants of checkpointing."""
    ids, mask = pad(torch.randint(3, 99, (1, 40)), 5, 5)
    gradients = []
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        model = make_model(option, "ForMaskedLM").train()
        if reentrant is not None:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        calls = []
        for layer in model.base_model.encoder.layer:
            layer.intermediate.register_forward_hook(lambda module, *_, calls=calls: calls.append(module))
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        # Layers are computed once more in the backward pass.
        assert len(calls) == (2 if reentrant is None else 4)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys() == gradients[2].keys()
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            assert (gradient is None) == (other[name] is None), name
            if gradient is not None:
                torch.testing.assert_close(other[name], gradient)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_parameter_is_trained(option):
    model = (
        make_model(option, "ForPreTraining", num_landmarks=8)
        if "nystrom" in option
        else make_model(option, "ForPreTraining")
    )
    ids, mask = pad(torch.randint(3, 99, (1, 40)), 5, 5)
    model(ids, attention_mask=mask, labels=ids, sentence_order_label=torch.tensor([1])).loss.backward()
    untouched = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert untouched == []


@torch.no_grad()
def test_pretraining_losses_are_told_apart():
    model = make_model("nystromformer-landmarks", "ForPreTraining")
    ids = torch.randint(3, 99, (4, 30))
    labels = ids.masked_fill(torch.rand(ids.shape) > 0.2, -100)
    order = torch.tensor([0, 1, 1, 0])
    both = model(ids, labels=labels, sentence_order_label=order)
    logits = both.prediction_logits.double().log_softmax(-1)
    expected = -logits[labels != -100].gather(1, labels[labels != -100][:, None]).mean()
    assert relative_error(both.mlm_loss, expected) < 1e-6
    expected = -both.sop_logits.double().log_softmax(-1)[torch.arange(4), order].mean()
    assert relative_error(both.sop_loss, expected) < 1e-6
    assert torch.equal(both.loss, both.mlm_loss + both.sop_loss)
    assert torch.equal(model(ids, labels=labels).loss, both.mlm_loss)
    assert torch.equal(model(ids, sentence_order_label=order).loss, both.sop_loss)
    assert model(ids).loss is None
    # A batch in which no token happens to be masked has no loss, rather than NaN.
    assert model(ids, labels=torch.full_like(ids, -100)).loss == 0


def test_sparse_prediction_is_the_same_loss_and_gradient():
    ids = torch.randint(3, 99, (4, 30))
    labels = ids.masked_fill(torch.rand(ids.shape) > 0.2, -100)
    results = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = make_model("nystromformer-landmarks", "ForMaskedLM", sparse_prediction=sparse)
        out = model(ids, labels=labels)
        out.loss.backward()
        results.append((out, model.nystromformer.embeddings.word_embeddings.weight.grad))
    (full, full_gradient), (sparse, sparse_gradient) = results
    torch.testing.assert_close(sparse.loss, full.loss)
    torch.testing.assert_close(sparse_gradient, full_gradient)
    assert sparse.logits.shape == ((labels != -100).sum(), 99)
    torch.testing.assert_close(sparse.logits, full.logits[labels != -100])


@torch.no_grad()
def test_classification_losses():
    ids = torch.randint(3, 99, (3, 20))
    model = make_model("linformer-layerwise", "ForSequenceClassification", num_labels=3)
    logits = model(ids).logits
    classes = torch.tensor([2, 0, 1])
    torch.testing.assert_close(model(ids, labels=classes).loss, torch.nn.functional.cross_entropy(logits, classes))
    several = torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1]])
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, several)
    torch.testing.assert_close(model(ids, labels=several).loss, expected)
    assert model.config.problem_type == "multi_label_classification"
    # The type of labels in one call does not change that of the next call.
    torch.testing.assert_close(model(ids, labels=classes).loss, torch.nn.functional.cross_entropy(logits, classes))
    assert model.config.problem_type == "single_label_classification"
    model.config.problem_type = "regression"
    torch.testing.assert_close(model(ids, labels=several).loss, torch.nn.functional.mse_loss(logits, several))
    single = make_model("linformer-layerwise", "ForSequenceClassification", num_labels=1)
    scores = torch.tensor([0.5, -1, 2])
    expected = torch.nn.functional.mse_loss(single(ids).logits.squeeze(-1), scores)
    torch.testing.assert_close(single(ids, labels=scores).loss, expected)
