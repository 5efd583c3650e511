# SPDX-License-Identifier: Apache-2.0
"""Learned feature maps that imitate the source's softmax attention."""

import pytest
import torch

from nystrom_models.conversion import Matching, convert, converted_config
from nystrom_models.conversion.exact_attention import AttentionInputs
from nystrom_models.conversion.feature_maps import cross_entropy, match_feature_maps
from tests.conversion.sources import LENGTH, save_source
from tests.models.options import make_model, relative_error

MATCHING = Matching(steps=60)


@pytest.fixture
def source(tmp_path):
    """A source whose attention is far from uniform."""
    model = save_source(tmp_path, "Bert", "ForMaskedLM")
    with torch.no_grad():
        for layer in model.bert.encoder.layer:
            layer.attention.self.query.weight.mul_(4)
    model.save_pretrained(tmp_path)
    return tmp_path


@torch.no_grad()
def test_matching_lowers_the_loss_and_brings_the_model_nearer(source):
    config = converted_config(source, "linear_transformer")
    sample = torch.randint(3, 99, (16, LENGTH))
    model, report = convert(source, config, sample=sample, matching=MATCHING, return_report=True)
    assert [start.layer for start in report.feature_maps] == [0, 1]
    for start in report.feature_maps:
        # At least half of the possible improvement, on held-out rows.
        assert start.least < start.after < (start.before + start.least) / 2
        assert start.error_after < 0.7 * start.error_before
    plain = convert(source, config)
    exact = convert(source, converted_config(source, num_landmarks=None, conv_kernel_size=None))
    rows = torch.randint(3, 99, (4, LENGTH))
    matched, before = (relative_error(one.base_model(rows)[0], exact.base_model(rows)[0]) for one in (model, plain))
    assert matched < 0.8 * before
    # The feature maps are those of a new model, and nothing else differs.
    maps = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, maps[name]) == ("_features" not in name)
    how = {origin.how for origin in report.origins if "_features" in origin.name}
    assert how == {"matched to the source's attention, to be trained"}
    again = convert(source, config, sample=sample, matching=MATCHING)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))


def test_the_cross_entropy_is_that_of_the_weights():
    """Against the paper's equation."""
    query, key = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    weights = torch.randn(2, 3, 4, 4)
    loss, entropy = cross_entropy(AttentionInputs(query, key, key), *weights, torch.arange(7))
    softmax = (query @ key.mT / 2).softmax(-1)
    features = [
        torch.cat([states @ weight.mT, -states @ weight.mT], dim=-1).softmax(-1)
        for states, weight in zip((query, key), weights, strict=True)
    ]
    linear = features[0] @ features[1].mT
    linear = linear / linear.sum(-1, keepdim=True)
    assert loss.item() == pytest.approx(-(softmax * linear.log()).sum(-1).mean().item(), rel=1e-5)
    assert entropy.item() == pytest.approx(-(softmax * softmax.log()).sum(-1).mean().item(), rel=1e-5)


def test_steps_take_all_rows():
    first, second, other = (AttentionInputs(*torch.randn(3, 2, 2, 10, 4)) for _ in range(3))
    start = torch.eye(4).expand(2, 4, 4)
    found = [match_feature_maps([first, last], start, start, Matching(steps=4)) for last in (second, other)]
    for one, another in zip(*found, strict=True):
        assert not torch.equal(one, another)


def test_without_steps_nothing_changes_and_no_start_gets_worse(source):
    config = converted_config(source, "linear_transformer")
    sample = torch.randint(3, 99, (4, LENGTH))
    for matching in (Matching(steps=0), Matching(steps=3, learning_rate=1e3)):
        model, report = convert(source, config, sample=sample, matching=matching, return_report=True)
        assert all(start.after == start.before for start in report.feature_maps)
        assert "Feature maps, as in a new model; on held-out rows:" in str(report)
        assert {o.how for o in report.origins if "_features" in o.name} == {"as in a new model, to be trained"}
        for name, parameter in model.named_parameters():
            if "_features" in name:
                assert torch.equal(parameter, torch.eye(8).expand_as(parameter))
    with pytest.raises(ValueError, match="steps=-1"):
        Matching(steps=-1)


@torch.no_grad()
def test_from_the_softmax_control_of_the_same_family(tmp_path):
    source = make_model("linear-elu", "ForMaskedLM", feature_map=None)
    source.save_pretrained(tmp_path)
    # Exact attention stays exact, also in another family.
    rows = torch.randint(3, 99, (8, LENGTH))
    exact = convert(tmp_path, converted_config(tmp_path, "nystromformer", num_landmarks=None))
    assert relative_error(exact(rows).logits, source(rows).logits) < 1e-6
    config = converted_config(tmp_path, "linear_transformer", feature_map="hedgehog")
    _, report = convert(tmp_path, config, sample=rows, matching=MATCHING, return_report=True)
    assert all(start.after < start.before for start in report.feature_maps) and len(report.feature_maps) == 2


def test_a_source_without_softmax_attention_gives_nothing_to_match(tmp_path):
    make_model("linformer-key_value", "ForMaskedLM").save_pretrained(tmp_path)
    sample = torch.randint(3, 99, (4, LENGTH))
    config = converted_config(tmp_path, "linear_transformer")
    _, report = convert(tmp_path, config, sample=sample, return_report=True)
    assert not report.feature_maps
    assert any("nothing was started from the sample" in note for note in report.notes)
    assert report.differences and report.sample == "token ids"
