# SPDX-License-Identifier: Apache-2.0
"""E and F: segment means, principal directions, and those of a Linformer with other sizes or sharing."""

import pytest
import torch

from nystrom_models.conversion import convert, converted_config
from nystrom_models.conversion.exact_attention import AttentionInputs
from nystrom_models.conversion.principal_directions import gram_matrices, principal_groups
from nystrom_models.conversion.projections import group_means
from nystrom_models.models.attention_linformer import linformer_attention
from nystrom_models.models.masked_attention import attend
from tests.conversion.sources import LENGTH, save_source
from tests.models.options import make_model, relative_error

SHARING = ("none", "headwise", "key_value", "layerwise")


@pytest.mark.parametrize("share", SHARING)
@pytest.mark.parametrize("projection_type", ["linear", "conv"])
def test_without_a_sample_slots_are_means_of_segments(share, projection_type, tmp_path):
    save_source(tmp_path, "Bert", "Model")
    fields = {"projected_dim": 8, "share_projection": share, "projection_type": projection_type}
    model, report = convert(
        tmp_path, converted_config(tmp_path, "linformer", **fields), return_report=True, compare=False
    )
    weights = [parameter for name, parameter in model.named_parameters() if "projection" in name]
    assert len(weights) == {"none": 4, "headwise": 4, "key_value": 2, "layerwise": 1}[share]
    states = torch.randn(LENGTH, 5)
    means = states.unflatten(0, (8, 5)).mean(dim=1)
    for weight in weights:
        if projection_type == "conv":
            assert torch.equal(weight, torch.full_like(weight, 1 / 5))
        else:
            assert relative_error(weight @ states, means.expand(*weight.shape[:-2], 8, 5)) < 1e-6
    assert [origin.how for origin in report.origins if "projection" in origin.name] == [
        "segment means, to be trained"
    ] * len(weights)


def of_rank_two(count, alternating=True):
    """Queries, keys and values (R, H, N, D) of two kinds of tokens, which alternate."""
    kinds = torch.arange(24) % 2 if alternating else torch.arange(24) // 12
    states = [torch.randn(count, 2, 2, 6)[:, :, kinds] for _ in range(2)]
    return torch.randn(count, 2, 24, 6), *states


@torch.no_grad()
def test_positions_of_two_kinds_are_told_apart_and_attention_is_exact():
    for slots in (2, 4, 6):
        query, key, value = of_rank_two(5)
        gram = torch.einsum("rhnd,rhmd->nm", key, key) + torch.einsum("rhnd,rhmd->nm", value, value)
        groups = principal_groups(gram, slots)
        assert (groups.bincount() == 24 // slots).all()
        # Each group has tokens of only one kind.
        assert all(
            (positions % 2).unique().numel() == 1
            for positions in map(groups.eq, range(slots))
            for positions in [positions.nonzero()]
        )
        weight = group_means(groups, slots)
        query, key, value = of_rank_two(2)
        near = linformer_attention(query, key, value, key_projection=weight, value_projection=weight)
        assert relative_error(near, attend(query, key, value)) < 4e-6  # 1e-6
    # Equal positions keep their order; and the number of slots need not divide that of positions.
    assert principal_groups(torch.ones(6, 6), 3).tolist() == [0, 0, 1, 1, 2, 2]
    assert sorted(principal_groups(torch.randn(11, 4).cov(), 4).bincount().tolist()) == [2, 3, 3, 3]


def test_each_head_has_its_own_gram_matrix():
    """Normalised products of keys, and of values, summed over rows and channels, in two parts of the rows."""
    keys, values = torch.randn(2, 3, 2, 7, 4)
    expected = torch.zeros(2, 7, 7)
    for states in (keys, values):
        for head in range(2):
            products = sum(row[head] @ row[head].T for row in states)
            expected[head] += products / products.trace()
    parts = [AttentionInputs(keys[part], keys[part], values[part]) for part in (slice(0, 1), slice(1, None))]
    assert relative_error(gram_matrices(parts, by_head=True), expected) < 1e-6
    assert relative_error(gram_matrices(parts, by_head=False), expected.sum(0, keepdim=True)) < 1e-6


def two_kinds_of_positions(tmp_path, alternating):
    """A BERT whose keys and values depend only on the position, with two kinds of positions; and a sample."""
    source = save_source(tmp_path, "Bert", "Model")
    with torch.no_grad():
        embeddings = source.embeddings
        embeddings.word_embeddings.weight.mul_(1e-3)
        kinds = torch.arange(LENGTH) % 2 if alternating else torch.arange(LENGTH) // (LENGTH // 2)
        embeddings.position_embeddings.weight.copy_(torch.randn(2, 32)[kinds])
    source.save_pretrained(tmp_path)
    return torch.randint(3, 99, (8, LENGTH))


@pytest.mark.parametrize("share", SHARING)
@pytest.mark.parametrize(("alternating", "expected"), [(True, "principal_directions"), (False, "segment_means")])
@torch.no_grad()
def test_the_nearer_start_is_taken(share, alternating, expected, tmp_path):
    sample = two_kinds_of_positions(tmp_path, alternating)
    config = converted_config(tmp_path, "linformer", projected_dim=4, share_projection=share)
    model, report = convert(tmp_path, config, sample=sample, return_report=True)
    assert len(report.projections) == (1 if share == "layerwise" else 2)
    for start in report.projections:
        errors = {"segment_means": start.segment_means, "principal_directions": start.principal_directions}
        assert start.start == min(errors, key=errors.get)
    if alternating:
        assert all(start.start == expected for start in report.projections)
        assert all(start.principal_directions < 0.1 * start.segment_means for start in report.projections)
    else:
        # Both separate the two halves.
        assert all(start.segment_means < 0.02 for start in report.projections)
    how = {origin.how for origin in report.origins if "projection" in origin.name}
    if alternating:
        assert how == {"principal directions of keys and values, to be trained"}
    # The measured errors are those of the model, which is closer to the source than without the sample.
    plain = convert(tmp_path, config)
    exact = convert(tmp_path, converted_config(tmp_path, num_landmarks=None, conv_kernel_size=None))
    rows = torch.randint(3, 99, (2, LENGTH))
    errors = [relative_error(one(rows)[0], exact(rows)[0]) for one in (model, plain)]
    assert errors[0] < 0.2 * errors[1] if alternating else max(errors) < 0.02


def linformer(tmp_path, **fields):
    source = make_model("linformer-layerwise", "ForMaskedLM", **fields)
    source.save_pretrained(tmp_path)
    return source


@pytest.mark.parametrize("share", SHARING[:3])
@torch.no_grad()
def test_what_was_shared_may_part(share, tmp_path):
    """From one shared projection to several, and to twice as many slots, the function stays the same."""
    source = linformer(tmp_path)
    config = converted_config(tmp_path, share_projection=share, projected_dim=16, family="linformer")
    model, report = convert(tmp_path, config, return_report=True)
    assert not report.new and not report.left_behind
    ids, mask = torch.randint(3, 99, (2, 40)), torch.ones(2, 40)
    mask[0, 29:] = 0
    actual, expected = (one(ids, attention_mask=mask).logits for one in (model, source))
    assert relative_error(actual, expected) < 1e-6
    how = next(origin.how for origin in report.origins if "key_projection" in origin.name)
    assert "8 slots made 16" in how and ("one for all heads" in how) == (share == "none")


@torch.no_grad()
def test_what_falls_together_is_the_mean(tmp_path):
    source = linformer(tmp_path / "none", share_projection="none")
    parts = {
        which: torch.stack(
            [getattr(layer.attention.self, f"{which}_projection").weight for layer in source.base_model.encoder.layer]
        )
        for which in ("key", "value")
    }
    for share in ("headwise", "key_value", "layerwise"):
        config = converted_config(tmp_path / "none", "linformer", share_projection=share, projected_dim=4)
        model = convert(tmp_path / "none", config)
        if share == "headwise":
            expected, actual = (
                parts["value"][1].mean(0),
                model.base_model.encoder.layer[1].attention.self.value_projection,
            )
        elif share == "key_value":
            expected = (parts["key"][1] + parts["value"][1]).mean(0) / 2
            actual = model.base_model.encoder.layer[1].attention.self.key_projection
        else:
            expected = (parts["key"] + parts["value"]).mean((0, 1)) / 2
            actual = model.base_model.encoder.sequence_projection
        # Neighbouring slots are averaged.
        assert relative_error(actual.weight, expected.unflatten(0, (4, 2)).mean(1)) < 1e-6


@torch.no_grad()
def test_heads_may_differ_in_their_slots(tmp_path):
    """From one number of slots to twice as many in some heads or layers, and back, the function stays the same."""
    source = linformer(tmp_path / "plain", share_projection="none")
    sizes = [[8, 16, 8, 24], [16, 8, 8, 8]]
    config = converted_config(tmp_path / "plain", "linformer", projected_dim=sizes)
    model, report = convert(tmp_path / "plain", config, return_report=True)
    assert not report.new and any("8 slots made 8, 16, 24" in origin.how for origin in report.origins)
    ids = torch.randint(3, 99, (2, 40))
    assert relative_error(model(ids).logits, source(ids).logits) < 1e-6
    model.save_pretrained(tmp_path / "by_head")
    config = converted_config(tmp_path / "by_head", "linformer", projected_dim=8)
    assert relative_error(convert(tmp_path / "by_head", config)(ids).logits, source(ids).logits) < 1e-6
    # Also as a start: the measured errors are those of the model.
    sample = two_kinds_of_positions(tmp_path / "bert", alternating=True)
    sizes = [[4, 2, 6, 4], [2, 2, 2, 2]]
    config = converted_config(tmp_path / "bert", "linformer", projected_dim=sizes, share_projection="none")
    model, report = convert(tmp_path / "bert", config, sample=sample, return_report=True)
    assert {start.start for start in report.projections} == {"principal_directions"}
    weight = model.encoder.layer[0].attention.self.key_projection.weight
    assert weight.shape == (16, LENGTH) and relative_error(weight.sum(1), torch.ones(16)) < 1e-6
    exact = convert(tmp_path / "bert", converted_config(tmp_path / "bert", num_landmarks=None, conv_kernel_size=None))
    rows = torch.randint(3, 99, (2, LENGTH))
    assert relative_error(model(rows)[0], exact(rows)[0]) < 0.05


def test_taps_of_another_number_are_not_carried(tmp_path):
    """They begin as means of segments, as without a source."""
    linformer(tmp_path, projection_type="conv")
    model = convert(tmp_path, converted_config(tmp_path, "linformer", projected_dim=4), compare=False)
    weight = model.base_model.encoder.sequence_projection.weight
    assert torch.equal(weight, torch.full_like(weight, 1 / 16))


@torch.no_grad()
def test_interpolated_columns_keep_their_sums(tmp_path):
    source = linformer(tmp_path, share_projection="key_value")
    with torch.no_grad():
        for layer in source.base_model.encoder.layer:
            layer.attention.self.key_projection.weight.copy_(group_means(torch.arange(64) * 8 // 64, 8))
    source.save_pretrained(tmp_path)
    config = converted_config(tmp_path, "linformer", max_position_embeddings=127)
    weight = (
        convert(tmp_path, config, positions="interpolate")
        .base_model.encoder.layer[0]
        .attention.self.key_projection.weight
    )
    assert weight.shape == (8, 127)
    # The columns are integrals of an interpolated function, whose ends lack half a step.
    assert (weight.sum(dim=1) - 1).abs().max() < 0.05


def test_too_small_a_sample_is_refused_with_what_it_takes(tmp_path):
    save_source(tmp_path, "Bert", "Model")
    config = converted_config(tmp_path, "linformer", projected_dim=4)
    with pytest.raises(ValueError, match="sample has 79 tokens, but 2 rows of 40 tokens need 80"):
        convert(tmp_path, config, sample=torch.randint(3, 99, (1, 79)))
    with pytest.raises(ValueError, match="vocab_size - 1 = 98"):
        convert(tmp_path, config, sample=torch.full((2, 40), 99))
    with pytest.raises(ValueError, match="token ids"):
        convert(tmp_path, config, sample=torch.ones(2, 40))
    with pytest.raises(TypeError, match="a list of texts"):
        convert(tmp_path, config, sample="one text")
