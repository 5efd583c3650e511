# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from nystrom_models.training.comparison import comparison_table, differences, labels_of, read_run, scores_over


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
            test_file=["more.jsonl"],
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


def test_scores_over_a_flag_or_a_field_of_the_model(tmp_path):
    scored = [{"validation": {"accuracy": value, "note": "text"}} for value in (0.5, 0.6, 0.7)]
    runs = [
        run_of(tmp_path / str(number), result, {"num_landmarks": landmarks}, learning_rate=rate, optim=optim)
        for number, (result, landmarks, rate, optim) in enumerate(
            zip(scored, (16, 32, 32), (0.1, 0.1, 0.2), ("adamw", "muon", "muon"), strict=True)
        )
    ]
    labels = ["a", "b", "a"]
    found = scores_over(runs, labels, "num_landmarks")
    assert found == {"a": [(16, {"accuracy": 0.5}), (32, {"accuracy": 0.7})], "b": [(32, {"accuracy": 0.6})]}
    assert [value for line in scores_over(runs, labels, "learning_rate").values() for value, _ in line] == [
        0.1,
        0.2,
        0.1,
    ]
    with pytest.raises(ValueError, match="do not differ in 'hidden_size', but in optim, learning_rate, num_landmarks"):
        scores_over(runs, labels, "hidden_size")
    with pytest.raises(ValueError, match="optim is 'adamw' in the run a, which is not a number"):
        scores_over(runs, labels, "optim")
    assert labels_of(["x", "y", "z"], labels, "run", repeated=True) == labels
    for repeated, given, names in ((False, labels, "different names"), (True, labels[:2], "names")):
        with pytest.raises(ValueError, match=f"--labels must be 3 {names}, one for each run"):
            labels_of(["x", "y", "z"], given, "run", repeated)


def test_one_run_has_no_differences(tmp_path):
    assert differences({"alone": run_of(tmp_path / "a")}) == {"alone": {}}


def test_an_unfinished_run_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not the --output_dir of a finished run"):
        read_run(tmp_path)
