# SPDX-License-Identifier: Apache-2.0
import json
import math

import matplotlib.figure
import pytest

from nystrom_models.training.curve import plot_history, plot_scores, read_history

HISTORY = [
    {"step": 1, "mlm_loss": 5.0, "sop_loss": float("nan"), "learning_rate": 1.0},
    {"step": 2, "mlm_loss": 4.0, "sop_loss": None, "tokens_per_second": 9.0},
    {"step": 2, "eval_mlm_loss": 4.5, "eval_sop_loss": 0.7},
]


@pytest.fixture
def drawn(monkeypatch):
    """The panels of the last figure that was saved, by the label of their y axis."""
    panels = {}
    save = matplotlib.figure.Figure.savefig

    def keep(figure, path, **options):
        panels.clear()
        panels.update({axes.get_ylabel(): axes for axes in figure.axes})
        save(figure, path, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return panels


def lines(axes):
    """Steps and values of the lines of a panel, by the name in its legend; some have none."""
    return [(line.get_label(), line.get_xdata().tolist(), line.get_ydata().tolist()) for line in axes.lines]


def test_a_panel_for_every_measure(drawn, tmp_path):
    """Figures that are missing or NaN are left out, and figures that do not measure the model have no panel."""
    plot_history({"a": HISTORY}, tmp_path / "curve.png")
    assert list(drawn) == ["MLM loss", "SOP loss"]
    assert lines(drawn["MLM loss"]) == [("a", [1, 2], [5.0, 4.0]), ("held out", [2], [4.5])]
    assert [line[1:] for line in lines(drawn["SOP loss"])] == [([], []), ([2], [0.7])]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_several_runs_share_the_panels(drawn, tmp_path):
    runs = {"a": HISTORY, "b": [{"step": 3, "loss": 2.0, "mlm_loss": 1.0}]}
    plot_history(runs, tmp_path / "curves.svg")
    assert list(drawn) == ["loss", "MLM loss", "SOP loss"]
    assert lines(drawn["MLM loss"])[1:] == [("a, held out", [2], [4.5]), ("b", [3], [1.0])]
    assert len({line.get_color() for line in drawn["MLM loss"].lines}) == 2
    [legend] = [axes.get_legend() for axes in drawn.values() if axes.get_legend() is not None]
    assert [text.get_text() for text in legend.get_texts()] == ["b"]  # in the first panel, for its lines


def test_curves_over_tokens(drawn, tmp_path):
    """Two runs of the same tokens end at the same place, whatever the size of their steps."""
    runs = {
        name: [
            {"step": step, "num_input_tokens_seen": 1_000_000 * i, "loss": 1.0 / i}
            for i, step in ((1, size), (2, 2 * size))
        ]
        for name, size in (("small steps", 100), ("large steps", 10))
    }
    plot_history(runs, tmp_path / "curves.png", "num_input_tokens_seen")
    assert [places for _, places, _ in lines(drawn["loss"])] == [[1.0, 2.0], [1.0, 2.0]]
    assert drawn["loss"].get_xlabel() == "million tokens"
    with pytest.raises(ValueError, match="The run a did not log num_input_tokens_seen"):
        plot_history({"a": HISTORY}, tmp_path / "none.png", "num_input_tokens_seen")
    with pytest.raises(ValueError, match="x must be one of step"):
        plot_history(runs, tmp_path / "none.png", "tokens")


def test_many_runs_differ_in_color_and_their_legend_covers_no_line(drawn, tmp_path):
    plot_history({f"run {number}": HISTORY for number in range(12)}, tmp_path / "curves.png")
    axes = drawn["MLM loss"]
    assert len({line.get_color() for line in axes.lines}) == 12
    [legend] = axes.figure.legends
    assert axes.get_legend() is None and len(legend.get_texts()) == 24
    axes.figure.draw_without_rendering()
    assert not any(panel.bbox.overlaps(legend.get_window_extent()) for panel in axes.figure.axes)


def test_scores_over_a_setting(drawn, tmp_path):
    """A line for each label, in the order of the setting; a run without a score is left out of its panel."""
    points = {
        "nystrom": [(64, {"accuracy": 0.7, "loss": 1.0}), (16, {"accuracy": 0.6}), (256, {"accuracy": 0.9})],
        "softmax": [(256, {"accuracy": 0.8})],
    }
    plot_scores(points, tmp_path / "scores.png", "num_landmarks", ["accuracy", "loss"])
    assert lines(drawn["accuracy"]) == [("nystrom", [16, 64, 256], [0.6, 0.7, 0.9]), ("softmax", [256], [0.8])]
    assert lines(drawn["loss"]) == [("nystrom", [64], [1.0]), ("softmax", [], [])]
    assert drawn["accuracy"].get_xscale() == "log" and drawn["accuracy"].get_xticks().tolist() == [16, 64, 256]
    assert drawn["accuracy"].get_xlabel() == "num_landmarks" and (tmp_path / "scores.png").stat().st_size

    plot_scores({"a": [(0, {"accuracy": 0.7}), (9, {"accuracy": 0.6})]}, tmp_path / "scores.svg", "seed", ["accuracy"])
    assert drawn["accuracy"].get_xscale() == "linear"


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="--logging_steps"):
        plot_history({"a": [{"step": 1, "learning_rate": 1.0}]}, tmp_path / "none.png")
    with pytest.raises(ValueError, match="no scores of validation data"):
        plot_scores({"a": [(1, {})]}, tmp_path / "scores.png", "seed", [])


def test_histories_are_read_from_finished_runs(tmp_path):
    with pytest.raises(FileNotFoundError, match="--output_dir of a run"):
        read_history(tmp_path)
    (tmp_path / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in HISTORY[1:]))
    # A last line that was cut off by a crash is left out.
    with open(tmp_path / "history.jsonl", "a") as file:
        file.write('{"step": 3, "los')
    rows = read_history(tmp_path)
    assert [row["step"] for row in rows] == [2, 2] and math.isnan(rows[0]["sop_loss"])
    assert rows[1] == HISTORY[2]
