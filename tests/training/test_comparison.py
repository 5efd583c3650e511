# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from nystrom_models.training.comparison import comparison_table, differences, read_run


def run_of(folder, results=None, config=None, **arguments):
    folder.mkdir()
    results = results or {"train": {"num_input_tokens_seen": 2_500_000, "seconds": 900.0}}
    content = {"results": results, "arguments": {"output_dir": str(folder), "seed": 0, "optim": "adamw"} | arguments}
    (folder / "all_results.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(
        json.dumps({"hidden_size": 32, "transformers_version": folder.name} | (config or {}))
    )
    return read_run(folder)


def test_settings_that_differ_cost_and_scores(tmp_path):
    """Paths, versions and equal settings are left out; a setting that a run does not have is an empty cell."""
    cost = {"num_input_tokens_seen": 2_500_000, "seconds": 900.0}
    runs = {
        "plain": run_of(tmp_path / "a", {"train": cost, "validation": {"loss": 5.25, "note": "text"}}),
        "better": run_of(
            tmp_path / "b",
            {"train": cost, "validation": {"loss": 4.0, "accuracy": 0.5}},
            {"num_landmarks": 32},
            optim="muon",
            cache_dir="elsewhere",
        ),
    }
    assert differences(runs) == {
        "plain": {"optim": "adamw", "num_landmarks": None},
        "better": {"optim": "muon", "num_landmarks": 32},
    }
    assert comparison_table(runs).splitlines() == [
        "| run | `optim` | `num_landmarks` | million tokens | hours | loss | accuracy |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
        "| plain | adamw |  | 2.5 | 0.25 | 5.25 |  |",
        "| better | muon | 32 | 2.5 | 0.25 | 4 | 0.5 |",
    ]
    assert comparison_table(runs, ["accuracy"]).splitlines()[-1] == "| better | muon | 32 | 2.5 | 0.25 | 0.5 |"
    with pytest.raises(ValueError, match="No run has a score 'f1'; there are loss, accuracy"):
        comparison_table(runs, ["f1"])


def test_one_run_has_no_differences(tmp_path):
    assert differences({"alone": run_of(tmp_path / "a")}) == {"alone": {}}


def test_an_unfinished_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not the --output_dir of a finished run"):
        read_run(tmp_path)
