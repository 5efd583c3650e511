# SPDX-License-Identifier: Apache-2.0
"""Pictures and tables show the figures that were measured, each in its place."""

import json
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from matplotlib.figure import Figure

from nystrom_models.analysis import Inspection, Layer, Setting
from nystrom_models.analysis.drawing import pictures
from nystrom_models.analysis.page import page
from nystrom_models.analysis.report import content, write_report
from nystrom_models.analysis.results import Spectrum, Sums

MAIN = Setting(16, "nystrom", 4, 6)
COMMAND, REASON = "nystrom-models inspect 'a & b'", "it sees <local> windows"
TOKEN = {
    "index": 3,
    "token": "<mask>",
    "length": 1600,
    "layers": [
        {
            "layer": 2,
            "exact": [{"index": 7, "token": "a", "weight": 0.5}, {"index": 8, "token": "&", "weight": 0.25}],
            "approximated": [{"index": 9, "token": "c", "weight": 0.75}, {"index": 1, "token": "d", "weight": 0.125}],
        }
    ],
}


@pytest.fixture
def inspection():
    """Two layers of three heads. No two figures are the same."""
    settings = [
        Setting(length, "nystrom", number, iterations)
        for length in (8, 16)
        for number in (2, 4)
        for iterations in (4, 6)
    ]
    layers = {}
    for index in (0, 2):
        errors = {}
        for setting in settings:
            maps, outputs = (torch.stack([torch.rand(3) / 4, 1 + torch.rand(3)], dim=1).double() for _ in range(2))
            errors[setting] = Sums(maps, outputs, [torch.rand(3), torch.rand(3)])
        tails = torch.rand(3, 13).double().sort(descending=True).values
        tails[:, -1] = 0
        spectrum = Spectrum(12, 2 * torch.rand(3, 12).sort().values, tails, texts=2)
        maps = torch.rand(2, 3, 4, 4) - torch.tensor([0.0, 0.5])[:, None, None, None]
        layers[index] = Layer(f"layer.{index}", 3, errors, spectrum, maps, torch.tensor([0.3, 0.1, 0.2]))
    found = Inspection(layers, settings, MAIN, {"layer.1": REASON})
    found.mlm = [
        {"num_landmarks": number, "mlm_accuracy": accuracy, "standard_error": accuracy / 9, "mlm_loss": 1.0}
        for number, accuracy in ((None, 0.75), (4, 0.5), (2, 0.25))
    ]
    found.mlm_by_layer = [
        {
            "exact_layers": layers,
            "num_landmarks": numbers,
            "mlm_accuracy": 0.4,
            "standard_error": 0.04,
            "mlm_loss": 2.5,
        }
        for layers, numbers in (([0], [None, 4]), ([0, 1], [None, None]))
    ]
    return found


def test_figures_have_five_digits(inspection):
    parts = {"model": {}, "settings": {}, "command": "", "versions": {}}
    for row in content(inspection, error=0.1, **parts)["errors"]:
        setting = Setting(*(row[name] for name in Setting._fields))
        assert row["output_error"] == pytest.approx(inspection.layer_error(row["layer"], setting), rel=5e-5)


def test_a_pseudo_inverse_that_diverged_is_reported(inspection, tmp_path):
    """After too many iterations, its errors are NaN: never enough, null in the file, and left out of the pictures."""
    for layer in inspection.layers.values():
        for number in (2, 4):
            layer.errors[MAIN._replace(num_landmarks=number)].output[:] = math.nan
    parts = {"model": {"name": "", "model_type": ""}, "settings": {"texts": 1}, "command": "", "versions": {}}
    write_report(inspection, content(inspection, error=0.9, **parts), tmp_path)
    found = json.loads((tmp_path / "inspection.json").read_text())
    assert found["needed"]["num_landmarks"]["by_layer"] == [16, 16]
    assert {row["output_error"] for row in found["errors"] if row["length"] == 16 and row["pinv_iterations"] == 6} == {
        None
    }
    assert None not in {row["output_error"] for row in found["errors"] if row["pinv_iterations"] == 4}


def drawn(inspection):
    """The axes of each picture, by its name."""
    found = {}
    for picture in pictures(inspection):
        figure = Figure(figsize=picture.size)
        picture.draw(figure)
        found[picture.name] = figure.axes
    return found


def lines(axes):
    named = [line for line in axes.get_lines() if line.get_label()[0] != "_"]
    found = {line.get_label(): list(line.get_ydata()) for line in named}
    assert len(found) == len(named)
    return found


def test_pictures_show_what_was_measured(inspection):
    found = drawn(inspection)
    layers, settings = inspection.layers, inspection.settings
    assert lines(found["error_by_layer"][0]) == {
        f"{number} landmarks": [inspection.layer_error(layer, MAIN._replace(num_landmarks=number)) for layer in layers]
        for number in (2, 4)
    }
    assert lines(found["error_by_landmarks"][0]) == {
        f"{length} tokens, {iterations} iterations": [
            inspection.model_error(Setting(length, "nystrom", number, iterations)) for number in (2, 4)
        ]
        for length in (8, 16)
        for iterations in (4, 6)
    }
    assert lines(found["pinv_residual"][0]) == {
        f"{s.num_landmarks} landmarks, {s.pinv_iterations} iterations": [
            inspection.residual(layer, s).mean().item() for layer in layers
        ]
        for s in settings
        if s.length == 16
    }
    shares = {layer: measured.spectrum.share / 2 for layer, measured in layers.items()}
    assert lines(found["cumulative_singular_values"][0]) == {
        f"layer {layer}": share.mean(dim=0).tolist() for layer, share in shares.items()
    }
    # The share of three of twelve singular values.
    for name, wanted in (
        ("error_by_head", [inspection.output_error(layer, MAIN) for layer in layers]),
        ("cumulative_by_head", [share[:, 2] for share in shares.values()]),
    ):
        assert torch.equal(torch.as_tensor(found[name][0].images[0].get_array().data), torch.stack(wanted)), name


def test_the_accuracy_of_masked_tokens_is_drawn_by_the_error_of_the_same_landmarks(inspection):
    by_number, by_error = drawn(inspection)["mlm_accuracy"]
    errors = [inspection.model_error(MAIN._replace(num_landmarks=number)) for number in (2, 4)]
    for axes, places in ((by_number, [2, 4]), (by_error, errors)):
        (points, _, (bars,)) = axes.containers[0]
        assert list(points.get_xdata()) == places and list(points.get_ydata()) == [0.25, 0.5]
        ends = [segment[:, 1].tolist() for segment in bars.get_segments()]
        assert ends == [pytest.approx([share - share / 9, share + share / 9]) for share in (0.25, 0.5)]
    assert lines(by_number)["exact"] == [0.75, 0.75]


def test_maps_are_those_of_the_best_the_median_and_the_worst_head(inspection):
    axes = drawn(inspection)["maps_layer_02"]
    maps = inspection.layers[2].pictures
    for column, (head, error) in enumerate(((1, 0.1), (2, 0.2), (0, 0.3))):
        exact, approximated = axes[column], axes[3 + column]
        assert exact.get_title() == f"head {head}" and approximated.get_xlabel() == f"error {error:.3f}"
        for row, image in enumerate((exact.images[0], approximated.images[0])):
            # Approximated weights below zero are drawn as zero.
            wanted = maps[row, head].clamp_min(0).sqrt()
            assert torch.equal(torch.as_tensor(image.get_array().data), wanted)
            assert image.get_clim() == (0, maps[0, head].max().sqrt())


def tables(text):
    """The tables of a page by the headings before them: rows by the names of their columns."""
    found = {}
    for heading, between in re.findall(r"<h2>(.*?)</h2>(.*?)(?=<h2>|$)", text, flags=re.DOTALL):
        for table in re.findall(r"<table>.*?</table>", between, flags=re.DOTALL):
            head, *rows = ElementTree.fromstring(table).iter("tr")
            names = ["".join(cell.itertext()) for cell in head]
            assert heading not in found
            found[heading] = [
                dict(zip(names, [cell.get("data-value", cell.text) for cell in row], strict=True)) for row in rows
            ]
    return found


def test_tables_of_the_page_hold_what_was_measured(inspection):
    settings = {"texts": 5, "max_rows": 8, "seed": 11}
    model, versions = {"name": "a/<model>", "model_type": "bert"}, {"torch": "3.0"}
    parts = {"error": 0.3, "model": model, "settings": settings, "command": COMMAND, "versions": versions}
    text = page(inspection, content(inspection, **parts, token=TOKEN), 0.3)
    assert "Attention of a/&lt;model&gt;" in text and "on 5 texts" in text and "layers of a bert" in text
    assert "<pre>nystrom-models inspect &#x27;a &amp; b&#x27;</pre>" in text and "<pre>torch: 3.0</pre>" in text
    assert "What token 3, &lt;mask&gt;, attends to" in text
    found = tables(text)
    landmarks, ranks = inspection.landmarks_needed(0.3), inspection.ranks_needed(0.3)
    assert len({*landmarks["by_head"][0], *landmarks["by_head"][1]}) > 1
    assert [list(row.values()) for row in found["Layers"]] == [
        [
            str(layer),
            repr(inspection.layer_error(layer, MAIN)),
            repr(inspection.layer_error(layer, MAIN, "map")),
            repr(inspection.residual(layer, MAIN).mean().item()),
            str(landmarks["by_layer"][place]),
            str(ranks["by_layer"][place]),
            f"layer.{layer}",
        ]
        for place, layer in enumerate(inspection.layers)
    ]
    assert [list(row.values()) for row in found["Heads"]] == [
        [
            str(layer),
            str(head),
            repr(inspection.output_error(layer, MAIN)[head].item()),
            repr(inspection.map_error(layer, MAIN)[head].item()),
            str(landmarks["by_head"][place][head]),
            str(ranks["by_head"][place][head]),
        ]
        for place, layer in enumerate(inspection.layers)
        for head in range(3)
    ]
    assert [list(row.values()) for row in found["All that was measured"]] == [
        [
            *(str(part) for part in (s.length, s.num_landmarks, s.pinv_iterations)),
            repr(inspection.model_error(s)),
            repr(inspection.model_error(s, "map")),
        ]
        for s in inspection.settings
    ]
    assert [list(row.values()) for row in found["Masked tokens with exact layers"]] == [
        ["0", "0.4", "0.04", "2.5", "[None, 4]"],
        ["0, 1", "0.4", "0.04", "2.5", "[None, None]"],
    ]
    assert [list(row.values()) for row in found["What token 3, &lt;mask&gt;, attends to"]] == [
        ["2", "1", "a (7)", "0.5", "c (9)", "0.75"],
        ["2", "2", "& (8)", "0.25", "d (1)", "0.125"],
    ]
    assert found["Layers that were left out"] == [{"layer": "layer.1", "reason": REASON}]


def test_a_page_says_whose_approximation_it_shows(inspection):
    """Figures of a Linformer are not called those of Nyström attention."""
    for method, wanted in (
        ("linformer", "own projections"),
        ("linear", "own kernel"),
        ("nystrom", "Nyström attention"),
    ):
        main = Setting(16, method) if method != "nystrom" else MAIN
        layers = {0: Layer("layer", 3, {main: inspection.layers[0].errors[MAIN]})}
        found = Inspection(layers, [main], main, {})
        parts = {"model": {"name": "m", "model_type": method}, "settings": {"texts": 1}, "command": "", "versions": {}}
        text = page(found, content(found, error=0.1, **parts), 0.1)
        assert re.search(rf"<p>[^<]*{wanted} compared with exact softmax attention", text)
