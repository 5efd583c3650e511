# SPDX-License-Identifier: Apache-2.0
import json
import math

import pytest

from nystrom_models.data.glue import GLUE_TASKS, load_glue
from nystrom_models.data.metrics import load_metric
from nystrom_models.training import Goal

# Class 1: 2 true positives, 1 false negative, 2 false positives; 3 true negatives.
REFERENCES, PREDICTIONS = [1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0, 0, 0]
# Deviations from the means: (-3, -1, 1, 3) / 2 and (-3, -2, -1, 6).
SCORES, PREDICTED_SCORES = [1, 2, 3, 4], [1, 2, 3, 10]
BY_HAND = {
    "cola": {"matthews_correlation": (2 * 3 - 2 * 1) / math.sqrt(4 * 3 * 5 * 4)},
    "sst2": {"accuracy": 5 / 8},
    "mrpc": {"accuracy": 5 / 8, "f1": 4 / 7, "combined_score": (5 / 8 + 4 / 7) / 2},
    "qqp": {"accuracy": 5 / 8, "f1": 4 / 7, "combined_score": (5 / 8 + 4 / 7) / 2},
    "stsb": {
        "pearson": 14 / math.sqrt(5 * 50),
        "spearmanr": 1.0,
        "combined_score": (14 / math.sqrt(5 * 50) + 1) / 2,
    },
    "mnli": {"accuracy": 5 / 8},
    "qnli": {"accuracy": 5 / 8},
    "rte": {"accuracy": 5 / 8},
    "wnli": {"accuracy": 5 / 8},
    "classification": {"accuracy": 5 / 8, "macro_f1": (4 / 7 + 6 / 9) / 2},
    "regression": {"mse": 9.0, "pearson": 14 / math.sqrt(5 * 50), "spearmanr": 1.0},
}


@pytest.mark.parametrize("name", BY_HAND)
def test_metrics_equal_those_computed_by_hand(name):
    data = (PREDICTED_SCORES, SCORES) if name in ("stsb", "regression") else (PREDICTIONS, REFERENCES)
    result = load_metric(name).compute(predictions=data[0], references=data[1])
    assert result == pytest.approx(BY_HAND[name], rel=1e-6)


def test_metrics_of_several_labels():
    """3 labels are found, 1 is missed, 1 is wrong; class 0 is all right, of class 1 one of two, of class 2 none."""
    references, predictions = [[1, 1, 0], [1, 0, 0], [0, 1, 0]], [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    result = load_metric("multi_label").compute(predictions=predictions, references=references)
    assert result == pytest.approx({"micro_f1": 6 / 8, "macro_f1": (1 + 2 / 3 + 0) / 3, "exact_match": 1 / 3})
    # A single class that few rows have and that is never found is no success.
    result = load_metric("multi_label").compute(predictions=[[0]] * 10, references=[[1], *[[0]] * 9])
    assert result == pytest.approx({"micro_f1": 0, "macro_f1": 0, "exact_match": 0.9})


@pytest.mark.parametrize("values", [([1.0], [2.0]), ([1.0, 1.0], [2.0, 3.0])], ids=["one row", "a constant"])
def test_a_correlation_that_is_not_defined(values, recwarn):
    result = load_metric("regression").compute(predictions=values[0], references=values[1])
    assert math.isnan(result["pearson"]) and math.isnan(result["spearmanr"]) and result["mse"] > 0
    assert not [warning for warning in recwarn if "constant" in str(warning.message)]


@pytest.mark.parametrize(
    ("metric", "greater"),
    [
        ("eval_mse", False),
        ("validation_matched/accuracy", True),
        ("loss", False),
        ("sop_loss", False),
        ("eval_perplexity", False),
        ("bits_per_byte", False),
        ("no_answer_accuracy", True),
    ],
)
def test_a_metric_has_a_direction(metric, greater):
    assert Goal.of(metric).greater_is_better is greater
    assert Goal.of("my_metric", False) == Goal("my_metric", False)
    with pytest.raises(ValueError, match=r"The metric 'my_metric' is unknown.*--greater_is_better"):
        Goal.of("my_metric")


@pytest.mark.parametrize("name", BY_HAND)
def test_the_metric_of_a_task_is_known(name):
    if name in GLUE_TASKS:
        goal = Goal.of(GLUE_TASKS[name].best_metric)
        assert goal.greater_is_better and goal.metric in BY_HAND[name]
        # GLUE counts the mean of two metrics.
        assert (goal.metric == "combined_score") == (len(BY_HAND[name]) > 1)


def test_unknown_metrics_are_refused():
    with pytest.raises(ValueError, match=r"must be one of .*'mrpc'.*, but is 'mrcp'"):
        load_metric("mrcp")


def test_the_nine_tasks():
    assert GLUE_TASKS.keys() == BY_HAND.keys() - {"classification", "regression"}
    files = {name for task in GLUE_TASKS.values() for name in task.prediction_files.values()}
    # The names that the benchmark's server accepts.
    assert files == {f"{name}.tsv" for name in "CoLA SST-2 MRPC QQP STS-B MNLI-m MNLI-mm QNLI RTE WNLI AX".split()}
    assert [name for name, task in GLUE_TASKS.items() if task.regression] == ["stsb"]


def test_load_glue(tmp_path, monkeypatch):
    # A folder with the repository's name is read instead.
    folder = tmp_path / "nyu-mll" / "glue"
    folder.mkdir(parents=True)
    splits = ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched")
    paths = "".join(f"\n  - split: {split}\n    path: {split}.jsonl" for split in splits)
    ax = "\n- config_name: ax\n  data_files:\n  - split: test\n    path: test_ax.jsonl"
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: mnli\n  data_files:{paths}{ax}\n---\n")
    splits = (*splits, "test_ax")
    for split in splits:
        (folder / f"{split}.jsonl").write_text(json.dumps({"premise": split, "hypothesis": "x", "label": 2}) + "\n")
    monkeypatch.chdir(tmp_path)
    loaded = load_glue("mnli", cache_dir=tmp_path / "cache")
    assert {split: data["premise"][0] for split, data in loaded.items()} == {split: split for split in splits}
