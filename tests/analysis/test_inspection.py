# SPDX-License-Identifier: Apache-2.0
"""Whole models: errors against the paper's equations in float64 on the states of the model, and known answers."""

import numpy as np
import pytest
import torch

from benchmarks.architectures import pixels
from nystrom_models.analysis import Setting, inspect_attention, inspection, visit_attention
from nystrom_models.analysis.measures import exact_map, nystrom_map
from nystrom_models.analysis.report import attended
from nystrom_models.analysis.results import Inspection, Layer, Sums
from nystrom_models.models.attention_nystrom import nystrom_attention_reference
from nystrom_models.models.masked_attention import attend
from tests.analysis.models import make_model, padded_batch
from tests.interface.models import make, tokens

LENGTHS = (37, 23)


def alone(lengths):
    """The rows of `padded_batch`, each alone and without padding."""
    rows = padded_batch(lengths)["input_ids"]
    return [{"input_ids": row[None, :length]} for row, length in zip(rows, lengths, strict=True)]


def states_in_double(model, inputs):
    """q, k and v of each layer of a BERT, (H, N, D), from its hidden states."""
    hidden = model(**inputs, output_hidden_states=True).hidden_states
    for states, layer in zip(hidden, model.encoder.layer, strict=False):
        module = layer.attention.self
        yield [
            torch.nn.functional.linear(states[0].double(), part.weight.double(), part.bias.double())
            .view(-1, 4, 8)
            .transpose(0, 1)
            for part in (module.query, module.key, module.value)
        ]


def test_errors_of_a_bert_are_those_of_the_paper_in_float64():
    model, (call,) = make_model("Bert"), alone([37])
    found = inspect_attention(model, [call], num_landmarks=[4, 16, 64], pinv_iterations=[6, 12])
    assert found.main == Setting(37, "nystrom", 16, 12) and len(found.settings) == 6
    with torch.no_grad():
        for index, (query, key, value) in enumerate(states_in_double(model, call)):
            exact = attend(query[None], key[None], value[None])[0]
            for setting in found.settings:
                output = nystrom_attention_reference(
                    query[None],
                    key[None],
                    value[None],
                    num_landmarks=setting.num_landmarks,
                    pinv_iterations=setting.pinv_iterations,
                )[0]
                wanted = (output - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
                error = found.output_error(index, setting)
                torch.testing.assert_close(error, wanted, rtol=1e-3, atol=1e-6)
                together = ((output - exact).norm() / exact.norm()).item()
                assert found.layer_error(index, setting) == pytest.approx(together, rel=1e-3, abs=1e-6)
                if setting.num_landmarks == 64:
                    assert not error.any() and found.residual(index, setting) is None
                else:
                    assert error.min() > 1e-3
            values = torch.linalg.svdvals(torch.softmax(query @ key.mT * 8**-0.5, dim=-1))
            spectrum = found.layers[index].spectrum
            share = values.cumsum(-1) / values.sum(-1, keepdim=True)
            torch.testing.assert_close(spectrum.share.double(), share, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "side", "fields"),
    [
        ("Bert", "right", {}),  # with padding on the left, its positions are shifted
        ("Nystromformer", "left", {"num_landmarks": 8}),
        ("Linformer", "left", {"projected_dim": 8}),
        ("LinearTransformer", "right", {"is_decoder": True}),
    ],
)
def test_padding_changes_nothing(family, side, fields):
    model = make_model(family, **fields)
    padded = inspect_attention(model, [padded_batch(LENGTHS, side)], num_landmarks=[8])
    by_themselves = inspect_attention(model, alone(LENGTHS), num_landmarks=[8])
    assert [setting.length for setting in padded.settings] == [23, 37] and padded.settings == by_themselves.settings
    for layer in range(2):
        for setting in padded.settings:
            for measure in ("map_error", "output_error"):
                errors = [getattr(found, measure)(layer, setting) for found in (padded, by_themselves)]
                torch.testing.assert_close(*errors, rtol=1e-3, atol=1e-5)
        assert padded.layers[layer].spectrum.length == 37


def test_a_row_without_tokens_is_no_text():
    model, (call,) = make_model("Bert"), alone([37])
    # Without tokens, attention is not a number in some versions of PyTorch: only the mask tells of such rows.
    empty = {"input_ids": call["input_ids"].expand(2, -1), "attention_mask": torch.ones(2, 37, dtype=torch.long)}
    empty["attention_mask"][1] = 0
    found, wanted = (inspect_attention(model, [inputs], num_landmarks=[8]) for inputs in (empty, call))
    assert found.settings == wanted.settings
    for layer in range(2):
        torch.testing.assert_close(found.map_error(layer, found.main), wanted.map_error(layer, found.main))
        assert found.layers[layer].spectrum.texts == 1


def test_models_in_half_precision_are_measured_in_float32():
    """The error is that of the approximation and not of rounding."""
    model, (call,) = make_model("Bert").bfloat16(), alone([37])
    found = inspect_attention(model, [call], num_landmarks=[36])
    layers = []
    visit_attention(model, call, layers.append)
    for layer in layers:
        query, key = layer.query[0].double(), layer.key[0].double()
        exact = exact_map(query, key)
        wanted = (nystrom_map(query, key, 36) - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
        torch.testing.assert_close(found.map_error(layer.index, found.main), wanted, rtol=1e-3, atol=1e-6)


def test_landmarks_of_single_layers_are_measured_in_all_of_them():
    calls = []
    model = make_model("Nystromformer", num_landmarks=[7, None])
    found = inspect_attention(model, alone([37, 23]), num_landmarks=[4], on_layer=lambda: calls.append(1))
    assert {setting.num_landmarks for setting in found.layers[1].errors} == {4, 7}
    assert len(calls) == 2 * 2  # for a progress bar over layers and texts


def test_figures_of_several_texts_are_taken_over_all_of_their_entries():
    model, calls = make_model("Bert"), alone([37, 37])
    both = inspect_attention(model, calls, num_landmarks=[8])
    each = [inspect_attention(model, [call], num_landmarks=[8]) for call in calls]
    for layer in range(2):
        sums = sum(found.layers[layer].errors[found.main].map for found in each)
        torch.testing.assert_close(both.map_error(layer, both.main), (sums[:, 0] / sums[:, 1]).sqrt())
        errors = [found.layer_error(layer, found.main, "map") for found in each]
        assert min(errors) < both.layer_error(layer, both.main, "map") < max(errors)
        shares = [found.layers[layer].spectrum.share for found in each]
        spectrum = both.layers[layer].spectrum
        torch.testing.assert_close(spectrum.share / spectrum.texts, torch.stack(shares).mean(0))
        residuals = torch.stack([found.residual(layer, found.main) for found in each])
        torch.testing.assert_close(both.residual(layer, both.main), residuals.mean(0))


def test_pictures_are_the_maps_themselves_or_means_of_their_blocks(monkeypatch):
    model, (call,) = make_model("Bert"), alone([36])
    # The errors beside them are those of this text, whatever longer texts have.
    found = inspect_attention(model, [call, *alone([37])], num_landmarks=[8], max_rows=36).layers[0]
    whole, errors = found.pictures.float(), found.picture_errors
    layers = []
    visit_attention(model, call, layers.append)
    maps = [
        measured(layers[0].query[0], layers[0].key[0], *options)
        for measured, options in ((exact_map, ()), (nystrom_map, (8,)))
    ]
    torch.testing.assert_close(whole, torch.stack(maps), rtol=1e-3, atol=1e-3)
    norms = [torch.linalg.matrix_norm(tensor) for tensor in (maps[1] - maps[0], maps[0])]
    torch.testing.assert_close(errors, (norms[0] / norms[1]).to(errors.dtype), rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(inspection, "PICTURE", 9)
    small = inspect_attention(model, [call], num_landmarks=[8]).layers[0].pictures.float()
    blocks = torch.stack(maps).unflatten(3, (9, 4)).mean(4).unflatten(2, (9, 4)).mean(3)
    torch.testing.assert_close(small, blocks, rtol=1e-3, atol=1e-3)


def test_attention_that_is_the_same_everywhere_needs_one_landmark_and_rank_one():
    model = make_model("Bert")
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.query.weight.zero_()
            layer.attention.self.query.bias.zero_()
    found = inspect_attention(model, alone([37]), num_landmarks=[1, 8])
    assert found.landmarks_needed(0.01) == {"by_layer": [1, 1], "by_head": [[1] * 4] * 2}
    assert found.ranks_needed(0.01) == {"by_layer": [1, 1], "by_head": [[1] * 4] * 2}
    # An error that only exact attention reaches needs all tokens.
    found = inspect_attention(make_model("Bert"), alone([37]), num_landmarks=[2, 4])
    assert found.landmarks_needed(1e-6)["by_layer"] == [37, 37]
    assert all(30 <= rank <= 37 for rank in found.ranks_needed(1e-4)["by_layer"])


@pytest.mark.parametrize(("family", "fields"), [("Linformer", {"projected_dim": 8}), ("LinearTransformer", {})])
def test_families_without_landmarks_are_measured_by_their_own_maps(family, fields):
    model, (call,) = make_model(family, **fields), alone([37])
    found = inspect_attention(model, [call])
    method = {"Linformer": "linformer", "LinearTransformer": "linear"}[family]
    assert found.settings == [found.main] == [Setting(37, method)]
    outputs = model(**call, output_attentions=True, output_hidden_states=True)
    for index, layer in enumerate(model.encoder.layer):
        states, module = outputs.hidden_states[index], layer.attention.self
        query, key = (part(states)[0].view(37, 4, 8).transpose(0, 1).double() for part in (module.query, module.key))
        exact = torch.softmax(query @ key.mT * 8**-0.5, dim=-1)
        wanted = (outputs.attentions[index][0] - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))
        torch.testing.assert_close(found.map_error(index, found.main), wanted, rtol=1e-3, atol=1e-5)
    assert found.landmarks_needed(0.1) == {"by_layer": [], "by_head": []}
    assert len(found.ranks_needed(0.1)["by_head"][0]) == 4


def test_a_nystromformers_own_landmarks_are_measured_and_long_rows_are_drawn():
    model, (call,) = make_model("Nystromformer", num_landmarks=10, pinv_iterations=4), alone([37])
    found = inspect_attention(model, [call], num_landmarks=[4], pinv_iterations=[6], max_rows=20, token=-1)
    assert found.main == Setting(37, "nystrom", 10, 4)
    assert found.layers[0].spectrum is None and found.ranks_needed(0.1)["by_layer"] == []
    assert found.layers[0].token.shape == (2, 4, 37)
    whole = inspect_attention(model, [call], num_landmarks=[4], pinv_iterations=[6])
    for layer in range(2):
        # 20 of 37 rows were drawn: the result is close to that of all rows, but not the same.
        drawn, all_rows = (result.layer_error(layer, found.main, "map") for result in (found, whole))
        assert drawn != all_rows and drawn == pytest.approx(all_rows, rel=0.3)
    again = inspect_attention(model, [call], num_landmarks=[4], pinv_iterations=[6], max_rows=20)
    assert again.layer_error(1, found.main) == found.layer_error(1, found.main)
    maps = model(**call, output_attentions=True).attentions
    torch.testing.assert_close(found.layers[1].token[1], maps[1][0, :, -1], rtol=1e-3, atol=1e-4)


def test_a_token_is_looked_up_where_it_is_and_its_map_is_no_exact_one():
    model, calls = make_model("Bert"), [*alone([12]), *alone([37])]
    found = inspect_attention(model, calls, num_landmarks=[4, 16, 64], pinv_iterations=[6], token=20)
    assert found.layers[0].token.shape == (2, 4, 37)
    # 64 landmarks would be exact attention.
    assert found.main == Setting(37, "nystrom", 16, 6)
    assert not torch.allclose(*found.layers[0].token, atol=1e-3)
    short = inspect_attention(model, calls[:1], num_landmarks=[16, 64], pinv_iterations=[6])
    assert short.main == Setting(12, "nystrom", 64, 6)


def test_dropout_is_off_meanwhile():
    model, calls = make_model("Bert", hidden_dropout_prob=0.5).train(), alone([37])
    found = [inspect_attention(model, calls, num_landmarks=[8]) for _ in range(2)]
    assert torch.equal(*(each.output_error(1, each.main) for each in found)) and model.training


def test_figures_are_those_of_the_main_iterations_at_the_greatest_length():
    """Maps have half of the errors of outputs."""
    main = Setting(37, "nystrom", 8, 6)
    errors = {
        Setting(23, "nystrom", 4, 6): (0.01, 0.01),
        Setting(37, "nystrom", 4, 6): (0.5, 0.5),
        Setting(37, "nystrom", 8, 1): (0.5, 0.5),
        main: (0.02, 0.08),
    }
    layers = {0: Layer("first", 1), 3: Layer("second", 1)}
    for setting, by_layer in errors.items():
        for layer, error in zip(layers.values(), by_layer, strict=True):
            outputs = torch.tensor([[error**2, 1.0]], dtype=torch.float64)
            layer.errors[setting] = Sums(outputs * torch.tensor([0.25, 1.0]), outputs)
    found = Inspection(layers, list(errors), main, {})
    assert found.model_error(main) == pytest.approx(0.05)
    assert found.model_error(main, "map") == pytest.approx(0.025)
    assert found.landmarks_needed(0.1) == {"by_layer": [8, 8], "by_head": [[8], [8]]}
    assert found.landmarks_needed(0.05) == {"by_layer": [8, 37], "by_head": [[8], [37]]}
    row = next(row for row in found.to_dict(0.1)["errors"] if row["layer"] == 3 and row["num_landmarks"] == 8)
    assert (row["output_error"], row["map_error"]) == (0.5, 0.25)


def test_what_a_token_attends_to_is_the_mean_of_the_heads():
    exact = torch.tensor([[0.1, 0.6, 0.3], [0.7, 0.1, 0.2]])
    layer = Layer("layer", 2, token=torch.stack([exact, exact.flip(1)]))
    inspection = Inspection({4: layer}, [], Setting(3, "nystrom", 2, 6), {})
    found = attended(inspection, -1, torch.tensor([11, 12, 13]), str)
    assert (found["index"], found["token"], found["length"]) == (2, "13", 3)
    [row] = found["layers"]
    assert row["layer"] == 4
    assert row["exact"] == [
        {"index": place, "token": str(11 + place), "weight": weight} for place, weight in enumerate((0.4, 0.35, 0.25))
    ]
    assert [part["token"] for part in row["approximated"]] == ["13", "12", "11"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_landmarks": []}, "num_landmarks"),
        ({"pinv_iterations": [0]}, "pinv_iterations"),
        ({"max_rows": 1}, "max_rows"),
        ({"layers": [1, 2]}, r"layers names \[2\].*0 to 1"),
        ({"token": 37}, "token must lie between 0 and 36"),
        ({"layers": []}, "layers is empty"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        inspect_attention(make_model("Bert"), alone([37]), **options)
    with pytest.raises(ValueError, match="inputs is empty"):
        inspect_attention(make_model("Bert"), [])
    without_tokens = {"input_ids": torch.full((1, 5), 3), "attention_mask": torch.zeros(1, 5, dtype=torch.long)}
    with pytest.raises(ValueError, match="inputs have no valid token"):
        inspect_attention(make_model("Bert"), [without_tokens])


def test_numbers_of_numpy_are_taken():
    inputs, model = alone([37]), make_model("Bert")
    found = inspect_attention(model, inputs, num_landmarks=np.array([4, 8]), layers=np.array([1]))
    expected = inspect_attention(model, inputs, num_landmarks=[4, 8], layers=[1])
    assert found.settings == expected.settings and found.layers.keys() == expected.layers.keys() == {1}
    assert {type(setting.num_landmarks) for setting in found.settings} == {int}  # which JSON can hold


def test_layers_that_see_rows_of_different_lengths_are_inspected_one_after_the_other():
    """SigLIP's parts: layers 0 and 1 read patches, 2 and 3 tokens."""
    model, inputs = make("SigLIP, both parts"), [pixels(1) | {"input_ids": tokens(1, 30)}]
    with pytest.raises(ValueError, match=r"Layers \[0, 1\] and \[2, 3\] .* by layers=\[0, 1\] and layers=\[2, 3\]"):
        inspect_attention(model, inputs, num_landmarks=[4])
    for layers in ([0, 1], [2, 3]):
        found = inspect_attention(model, inputs, num_landmarks=[4], layers=layers)
        assert found.model_error(found.main) > 0


@pytest.mark.parametrize("model, measured", [("cpu", "cpu"), ("cuda:1", "cuda:1"), ("mps", "cpu")])
def test_apples_mps_without_float64_is_measured_on_the_cpu(model, measured):
    assert inspection.measuring_device(torch.device(model)) == torch.device(measured)
