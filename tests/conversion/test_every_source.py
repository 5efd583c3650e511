# SPDX-License-Identifier: Apache-2.0
"""Every kind of source with every head: the same parameters, the same labels, the same results."""

import json

import pytest
import torch
import transformers
from transformers import AutoModel

import nystrom_models
from nystrom_models.conversion import convert, converted_config
from tests.conversion.sources import EXACT, FIELDS, KINDS_AND_HEADS, predictions, ragged_batch, save_source
from tests.models.options import HEADS, LINEAR_TRANSFORMER, OPTIONS, SHARED_HEADS, make_model, relative_error

# The largest that was measured over all kinds and heads is 2.4e-7.
TOLERANCE = 1e-6
LABELS = {"id2label": {0: "calm", 1: "storm", 2: "fog"}, "label2id": {"calm": 0, "storm": 1, "fog": 2}}


def auto_class(head):
    return AutoModel if head == "Model" else getattr(transformers, "AutoModel" + head)


def without_prefix(model):
    """Parameters by name, without the prefix of the base model."""
    prefix = model.base_model_prefix + "."
    return {name.removeprefix(prefix): tensor for name, tensor in model.state_dict().items()}


def check_report(report, model, source, new=()):
    """The report has every parameter of the model, and describes it correctly."""
    assert [origin.name for origin in report.origins] == [name for name, _ in model.named_parameters()]
    assert set(report.new) == set(new)
    ours, theirs = model.state_dict(), without_prefix(source)
    copied = [origin for origin in report.origins if origin.how == "copied"]
    for origin in copied:
        assert torch.equal(ours[origin.name], theirs[origin.source]), origin
    named = {name for origin in report.origins if origin.source for name in origin.source.split(", ")}
    tied = {name.removeprefix(source.base_model_prefix + ".") for name in source.all_tied_weights_keys}
    assert named | set(report.left_behind) | tied >= theirs.keys(), "weights of the source that are not accounted for"
    return copied


@pytest.mark.parametrize(("kind", "head"), KINDS_AND_HEADS)
@torch.no_grad()
def test_converted_saved_and_loaded_it_is_the_source(kind, head, tmp_path):
    # The number of classes of ALBERT's SOP head is the number of labels.
    fields = {} if head in ("ForPreTraining", "ForQuestionAnswering") else LABELS
    if head == "ForSequenceClassification":
        fields |= {"problem_type": "multi_label_classification"}
    source = save_source(tmp_path / "source", kind, head, **fields)
    # Longer than the source, so that the sizes differ.
    config = converted_config(tmp_path / "source", max_position_embeddings=100, **EXACT)
    model, report = convert(tmp_path / "source", config, return_report=True)
    new = []
    if kind == "DistilBert":
        new += [name for name, _ in model.named_parameters() if "token_type" in name]
    if kind in ("DistilBert", "Electra") and head == "Model":
        new += ["pooler.dense.weight", "pooler.dense.bias"]
    if (kind, head) == ("Bert", "ForPreTraining"):
        # Next-sentence prediction is a different task from sentence order.
        new += ["cls.seq_relationship.weight", "cls.seq_relationship.bias"]
    copied = check_report(report, model, source, new)
    changed = {origin.name for origin in report.origins} - {origin.name for origin in copied} - set(new)
    assert [name.rsplit(".", 2)[1] for name in changed] == ["position_embeddings"]

    model.save_pretrained(tmp_path / "converted")
    loaded, info = auto_class(head).from_pretrained(tmp_path / "converted", output_loading_info=True)
    assert type(loaded) is type(model) is getattr(nystrom_models, "Nystromformer" + head)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    for name in (*LABELS, "problem_type"):
        assert getattr(loaded.config, name) == getattr(source.config, name)
    ids, mask = ragged_batch(head=head)
    expected, actual = (predictions(one(ids, attention_mask=mask), mask) for one in (source, loaded.eval()))
    assert relative_error(actual, expected) < TOLERANCE
    # The report agrees, on rows as long as the source takes.
    assert all(found.largest <= TOLERANCE * found.scale for found in report.differences)
    assert report.differences[-1].tokens == 40


@pytest.mark.parametrize("head", [head for head in SHARED_HEADS if head != "Model"])
@pytest.mark.parametrize("kind", FIELDS)
@torch.no_grad()
def test_a_head_that_the_source_does_not_have_is_new(kind, head, tmp_path):
    other = "ForTokenClassification" if head != "ForTokenClassification" else "ForMaskedLM"
    source = save_source(tmp_path, kind, other)
    model, report = convert(tmp_path, converted_config(tmp_path, **EXACT), head=head, return_report=True)
    assert type(model) is getattr(nystrom_models, "Nystromformer" + head)
    new = [name for name in report.new if "token_type" not in name and "pooler" not in name]
    prefix = model.base_model_prefix + "."
    assert new and not any(name.startswith(prefix) for name in new)
    assert report.left_behind and not any("layer." in name for name in report.left_behind)
    assert {found.of for found in report.differences} == {"hidden states"}
    ids, mask = ragged_batch()
    states = [one.base_model(ids, attention_mask=mask).last_hidden_state[mask.bool()] for one in (source, model)]
    assert relative_error(states[1], states[0]) < TOLERANCE


OF_OURS = [
    (option, "ForMaskedLM") for option in OPTIONS if not LINEAR_TRANSFORMER.get(option[7:], {}).get("is_decoder")
]
OF_OURS += [("nystromformer-landmarks", head) for head in HEADS if head != "ForMaskedLM"]
OF_OURS += [("linear-causal", "ForCausalLM"), ("linear-causal_sinusoidal", "ForCausalLM")]


@pytest.mark.parametrize(("option", "head"), OF_OURS)
@torch.no_grad()
def test_a_model_of_ours_gets_longer_and_stays_the_same_on_short_rows(option, head, tmp_path):
    source = make_model(option, head)
    source.save_pretrained(tmp_path / "source")
    family = source.config.model_type
    # Pooling has slots of ceil(N / k) tokens, which change with the length.
    pools = getattr(source.config, "projection_type", "linear") != "linear"
    length = None if source.config.max_position_embeddings is None else 64 if pools else 100
    config = converted_config(tmp_path / "source", family, max_position_embeddings=length)
    model, report = convert(tmp_path / "source", config, return_report=True)
    check_report(report, model, source)
    model.save_pretrained(tmp_path / "converted")
    loaded, info = auto_class(head).from_pretrained(tmp_path / "converted", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for name, parameter in model.named_parameters():
        assert torch.equal(loaded.get_parameter(name), parameter), name
    ids, mask = ragged_batch(head=head)
    expected, actual = (predictions(one(ids, attention_mask=mask), mask) for one in (source, loaded.eval()))
    assert relative_error(actual, expected) < TOLERANCE
    if length == 100:
        assert (
            loaded(torch.randint(3, 99, (1, 2, 100) if head == "ForMultipleChoice" else (1, 100)))[0].isfinite().all()
        )


@pytest.mark.parametrize(
    ("option", "family", "fields", "new"),
    [
        ("nystromformer-softmax", "nystromformer", {"num_landmarks": 8, "conv_kernel_size": 3}, "conv"),
        ("nystromformer-landmarks", "linformer", {"projected_dim": 8}, "sequence_projection"),
        ("nystromformer-landmarks", "linear_transformer", {}, "_features"),
        ("linformer-headwise", "nystromformer", {"num_landmarks": 8}, None),
        ("linear-hedgehog", "nystromformer", {"num_landmarks": 8}, None),
        ("linear-relu", "linformer", {"projected_dim": 8}, "sequence_projection"),
    ],
)
@torch.no_grad()
def test_from_one_family_to_another(option, family, fields, new, tmp_path):
    source = make_model(option, "ForSequenceClassification")
    source.save_pretrained(tmp_path)
    config = converted_config(tmp_path, family, **fields)
    model, report = convert(tmp_path, config, return_report=True)
    assert model.config.model_type == family and (len(report.new) > 0) == (new is not None)
    assert all(new in name for name in report.new)
    assert not any("conv" in name for name in report.left_behind)
    for name, parameter in source.classifier.named_parameters():
        assert torch.equal(model.classifier.get_parameter(name), parameter)
    ids, mask = ragged_batch()
    assert model(ids, attention_mask=mask).logits.isfinite().all()
    if "num_landmarks" in fields:
        short = torch.randint(3, 99, (2, 8))
        exact = convert(tmp_path, converted_config(tmp_path, "nystromformer", num_landmarks=None))
        assert relative_error(model(short).logits, exact(short).logits) < TOLERANCE


def test_electras_discriminator_has_no_counterpart(tmp_path):
    source = save_source(tmp_path, "Electra", "ForPreTraining")
    model, report = convert(tmp_path, converted_config(tmp_path, **EXACT), return_report=True)
    assert type(model) is nystrom_models.NystromformerModel
    assert all("discriminator_predictions" in name for name in report.left_behind) and len(report.left_behind) == 4
    assert set(report.new) == {"pooler.dense.weight", "pooler.dense.bias"}
    ids, mask = ragged_batch()
    expected = source.electra(ids, attention_mask=mask).last_hidden_state[mask.bool()]
    assert relative_error(model(ids, attention_mask=mask).last_hidden_state[mask.bool()], expected) < TOLERANCE


@torch.no_grad()
def test_alberts_layers_come_in_their_order(tmp_path):
    """Two groups of two layers each, used three times: twelve layers."""
    source = save_source(tmp_path, "Albert", "Model", num_hidden_layers=6, inner_group_num=2)
    model = convert(tmp_path, converted_config(tmp_path, **EXACT))
    assert model.config.num_hidden_layers == 12
    ids, mask = ragged_batch()
    expected = source(ids, attention_mask=mask)
    actual = model(ids, attention_mask=mask)
    # Measured for twelve layers with large weights: 4.6e-6.
    assert relative_error(actual.last_hidden_state[mask.bool()], expected.last_hidden_state[mask.bool()]) < 1.8e-5
    assert relative_error(actual.pooler_output, expected.pooler_output) < 1.8e-5


def test_fields_that_the_source_does_not_read_are_not_read(tmp_path):
    """Of this package's own or of a user's, in config.json."""
    source = save_source(tmp_path, "Bert", "Model")
    path = tmp_path / "config.json"
    stray = {"embedding_size": source.config.hidden_size, "layer_norm_position": "pre", "classifier_pooling": "mean"}
    path.write_text(json.dumps(json.loads(path.read_text()) | stray))
    model, report = convert(tmp_path, converted_config(tmp_path, **EXACT), return_report=True)
    assert not report.new and model.config.embedding_size is None and model.config.classifier_pooling == "first"
    ids, mask = ragged_batch()
    with torch.no_grad():
        found, expected = (one.eval()(ids, attention_mask=mask).last_hidden_state for one in (model, source))
    assert relative_error(found[mask.bool()], expected[mask.bool()]) < TOLERANCE
