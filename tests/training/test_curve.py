# SPDX-License-Identifier: Apache-2.0
import json
import math

import matplotlib.image
import pytest

from nystrom_models.training.curve import plot_history, read_history

HISTORY = [
    {"step": 1, "mlm_loss": 5.0, "sop_loss": float("nan"), "learning_rate": 1.0},
    {"step": 2, "mlm_loss": 4.0, "sop_loss": None, "tokens_per_second": 9.0},
    {"step": 2, "eval_mlm_loss": 4.5, "eval_sop_loss": 0.7},
]


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")])
def test_a_panel_for_every_measure(names, tmp_path):
    """Two panels side by side are twice as wide as one."""
    plot_history(dict.fromkeys(names, HISTORY), tmp_path / "two.png")
    plot_history({name: [{"step": 1, "loss": 2.0}] for name in names}, tmp_path / "one.png")
    sizes = [matplotlib.image.imread(tmp_path / name).shape for name in ("one.png", "two.png")]
    assert sizes[1][1] == 2 * sizes[0][1] and sizes[0][0] == sizes[1][0]


def test_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="--logging_steps"):
        plot_history({"a": [{"step": 1, "learning_rate": 1.0}]}, tmp_path / "none.png")


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
