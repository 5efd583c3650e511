# SPDX-License-Identifier: Apache-2.0
"""Values of `--grid`, and what is made of the results of its runs."""

import json
import math
import signal
from pathlib import Path

import pytest
import torch
from datasets import Dataset

from nystrom_models.data.classification import TextTask
from nystrom_models.training import grid
from nystrom_models.training.finetuning import FinetuningOptimizationArguments, finetuning_identity
from nystrom_models.training.grid import finetune_grid, parse_grid
from nystrom_models.training.long_range_arena import ArenaArguments
from nystrom_models.training.question_answering import QuestionAnsweringArguments
from nystrom_models.training.results import write_results
from nystrom_models.training.signals import Signals
from nystrom_models.training.text_classification import TextClassificationArguments
from nystrom_models.training.token_classification import TokenClassificationArguments
from tests.training import processes

OPTIMIZATION = FinetuningOptimizationArguments()


def arguments(folder="x", kind=TextClassificationArguments, **options):
    return kind(output_dir=str(folder), model_name_or_path="x", **options)


def test_values_are_those_of_the_command_line():
    items = ["group_by_length=True,False", "warmup_ratio=.1,0.2", "seed=0,1", "truncation_strategy=tail,head"]
    assert parse_grid(items, arguments(), OPTIMIZATION) == {
        "group_by_length": [True, False],
        "warmup_ratio": [0.1, 0.2],
        "seed": [0, 1],
        "truncation_strategy": ["tail", "head"],
    }
    arena = arguments(kind=ArenaArguments, task="listops")
    assert parse_grid(["num_train_epochs=3,4.5"], arena, OPTIMIZATION) == {"num_train_epochs": [3.0, 4.5]}


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (["truncation_strategy=tail,banana"], "invalid choice: 'banana'"),
        (["group_by_length=maybe"], "'group_by_length=maybe'.*Truthy value expected"),
        (["seed=0,1.5"], "invalid int value: '1.5'"),
        (["learning_rate=1e-5,"], "invalid float value: ''"),
        (["warmup_ratio=.1,0.1"], "the value 0.1 is repeated"),
        (["group_by_length=True,true"], "the value True is repeated"),
        (["seed=0", "seed=1"], "all values of seed in one item"),
    ],
)
def test_wrong_values_are_refused(items, message):
    with pytest.raises(ValueError, match=message):
        parse_grid(items, arguments(), OPTIMIZATION)


@pytest.mark.parametrize(
    ("kind", "item"),
    [
        (TextClassificationArguments, "train_file=a.csv,b.csv"),
        (TextClassificationArguments, "mixed_precision=no,bf16"),
        (TextClassificationArguments, "label_column_name=a,b"),
        (TextClassificationArguments, "do_regression=true,false"),
        (TokenClassificationArguments, "label_all_tokens=true,false"),
        (QuestionAnsweringArguments, "version_2_with_negative=true,false"),
        (ArenaArguments, "data_seed=0,1"),
        (ArenaArguments, "max_length=40,80"),
    ],
)
def test_what_all_runs_share_is_no_part_of_a_grid(kind, item):
    """Data and tasks are read once: each run would have those of the first."""
    options = {"task": "listops"} if kind is ArenaArguments else {}
    with pytest.raises(ValueError, match=rf"--grid '{item}': --{item.split('=')[0]} applies to the whole run"):
        arguments(kind=kind, grid=[item], **options)


def run(folder, monkeypatch, scores, items, **options):
    """A grid whose runs are not trained, but write `scores`, in turn; and the folders that they were given."""
    given, left = [], iter(scores)

    def finetune(args, optimization, task, splits, content):
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        given.append(Path(args.output_dir).name)
        results = {"train": {}, "validation": next(left)}
        write_results(args.output_dir, results, identity=finetuning_identity(args, optimization, content))
        Path(args.output_dir, "model.safetensors").touch()
        return results

    monkeypatch.setattr(grid, "content_digests", lambda args, _: {"model": args.model_name_or_path})
    monkeypatch.setattr(grid, "finetune", finetune)
    task, splits = TextTask(("text",), best_metric="pearson"), {"train": Dataset.from_dict({"text": ["a"]})}
    return finetune_grid(arguments(folder, grid=items, **options), OPTIMIZATION, task, splits), given


def test_no_run_begins_after_a_signal_at_the_end_of_one(monkeypatch, tmp_path):
    monkeypatch.setattr(Signals, "_ended_by", None)
    monkeypatch.setattr(Signals, "_late", signal.SIGTERM)
    found, given = run(tmp_path, monkeypatch, [{"pearson": 0.5}] * 2, ["seed=0,1"])
    assert given == ["seed=0"] and "grid" not in found and Signals._ended_by == signal.SIGTERM
    assert not (tmp_path / "all_results.json").exists()


def test_an_undefined_score_is_never_best_and_is_read_again(monkeypatch, tmp_path):
    """The correlation with a constant is NaN, and null in the file."""
    scores = [{"pearson": value, "loss": 1.0} for value in (math.nan, 0.5, 0.25, 0.75)]
    items = ["learning_rate=1e-3,1e-4", "seed=0,1"]
    for expected in (4, 0):  # again: nothing is repeated
        found, given = run(tmp_path, monkeypatch, scores, items)
        assert len(given) == expected
        poor, good = found["grid"]
        assert found["best"] is good and found["best_run"] == "learning_rate=0.0001,seed=1"
        assert good["validation"]["pearson"] == {"mean": 0.5, "std": pytest.approx(0.5 / 2**0.5)}
        assert all(map(math.isnan, poor["validation"]["pearson"].values()))
    written = json.loads((tmp_path / "all_results.json").read_text())["results"]
    assert written["grid"][0]["validation"]["pearson"] == {"mean": None, "std": None}


def test_undefined_scores_alone(monkeypatch, tmp_path):
    found, _ = run(tmp_path, monkeypatch, [{"pearson": math.nan}] * 2, ["seed=0,1"])
    assert found["best_run"] == "seed=0" and math.isnan(found["best"]["validation"]["pearson"]["std"])


def test_paths_have_a_folder_each(monkeypatch, tmp_path):
    scores = [{"pearson": value} for value in (0.1, 0.3, 0.2)]
    items = ["model_name_or_path=model,a/model,a%2Fmodel"]
    found, given = run(tmp_path, monkeypatch, scores, items, keep_best_only=True)
    assert given == [f"model_name_or_path={name},seed=0" for name in ("model", "a%2Fmodel", "a%252Fmodel")]
    assert found["best_run"] == given[1]
    assert [path.parent.name for path in tmp_path.rglob("*.safetensors")] == [given[1]]
    # The content of each model is that of its run.
    identities = [json.loads((tmp_path / name / "all_results.json").read_text())["identity"] for name in given]
    assert [identity["model"] for identity in identities] == ["model", "a/model", "a%2Fmodel"]


def test_values_that_are_too_long_for_a_folder_are_refused_before_the_first_run(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match=r"--grid: the folder of a run.* 32. bytes.* 255: give shorter values"):
        run(tmp_path, monkeypatch, [], [f"model_name_or_path=model,{'a' * 300}"])
    assert not list(tmp_path.iterdir())


def test_a_grid_without_seeds_has_that_of_the_flags(monkeypatch, tmp_path):
    scores = [{"pearson": value, "loss": 1.0} for value in (0.5, 0.25)]
    found, given = run(tmp_path, monkeypatch, scores, ["learning_rate=1e-3,1e-4"], seed=5)
    assert given == ["learning_rate=0.001,seed=5", "learning_rate=0.0001,seed=5"]
    assert [point["seeds"] for point in found["grid"]] == [[5], [5]] and found["best_run"] == given[0]
    # A loss is no score.
    assert found["best"]["validation"] == {"pearson": {"mean": 0.5, "std": 0.0}}


def test_a_best_run_without_weights_is_trained_again(monkeypatch, tmp_path):
    """An earlier call removed them, for another run was the best one."""
    items = ["learning_rate=1e-3,1e-4", "seed=0"]
    found, _ = run(tmp_path, monkeypatch, [{"pearson": 0.5}, {"pearson": 0.4}], items, keep_best_only=True)
    assert found["best_run"] == "learning_rate=0.001,seed=0"
    scores = [{"pearson": value} for value in (0.1, 0.35, 0.4)]
    found, given = run(tmp_path, monkeypatch, scores, [items[0], "seed=0,1"], keep_best_only=True)
    assert found["best_run"] == given[-1] == "learning_rate=0.0001,seed=0" and len(given) == 3
    assert [path.parent.name for path in tmp_path.rglob("*.safetensors")] == [given[-1]]


def test_all_values_are_checked_before_the_first_run(monkeypatch, tmp_path):
    with pytest.raises(ValueError, match="--learning_rate must be positive"):
        run(tmp_path, monkeypatch, [], ["learning_rate=1e-3,-1"])
    assert not list(tmp_path.iterdir())


def test_steps_of_more_processes_are_another_run(monkeypatch, tmp_path):
    scores = [{"pearson": 0.5, "loss": 1.0}] * 3
    assert run(tmp_path, monkeypatch, scores, ["seed=0"])[1] == ["seed=0"]
    assert run(tmp_path, monkeypatch, scores, ["seed=0"])[1] == []
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(tmp_path, monkeypatch, scores, ["seed=0"])[1] == ["seed=0"]


def finished_grid(folder):
    """A grid whose runs were finished before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "content_digests", lambda *_: {})
        patch.setattr(grid, "finetune_once", lambda *_: {"train": {}, "validation": {"pearson": 0.5}})
        finetune_grid(
            arguments(folder, grid=["seed=0,1"]), OPTIMIZATION, TextTask(("text",), best_metric="pearson"), {}
        )


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_one_of_several_processes_writes_the_results_of_finished_runs(tmp_path):
    """No run has started them: with only Accelerate, each would write the same file, or fail in it."""
    (tmp_path / "seed=0").mkdir()
    (tmp_path / "seed=0" / "model.safetensors").touch()
    codes, log = processes.run(finished_grid, str(tmp_path), folder=tmp_path, num_processes=2)
    assert codes == [0, 0], log[-3000:]
    assert log.count("2 seeds: pearson 50.0") == 1 and (tmp_path / "all_results.json").exists()
