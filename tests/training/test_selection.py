# SPDX-License-Identifier: Apache-2.0
"""The best of several evaluations, by one metric and its direction."""

import errno
import json
import math
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from nystrom_models.data import PretrainingCollator, RowLoader
from nystrom_models.training import (
    CheckpointArguments,
    Evaluation,
    Goal,
    OptimizationArguments,
    PretrainingObjective,
    create_accelerator,
    save_pretrained,
    train,
)
from nystrom_models.training import run as training_run
from nystrom_models.training.arguments import RunArguments
from nystrom_models.training.checkpoints import BestModel
from nystrom_models.training.identity import EVALUATED_BY, file_digest
from nystrom_models.training.selection import Best
from nystrom_models.training.state import TrainingState
from tests.training.models import tiny_model

UP, DOWN = Goal("accuracy", True), Goal("mse", False)


def test_better_is_in_the_metrics_direction():
    assert UP.is_better(0.9, 0.8) and not UP.is_better(0.8, 0.8)
    assert DOWN.is_better(0.8, 0.9) and not DOWN.is_better(0.9, 0.8)
    assert UP.is_better(0.1, None) and UP.is_better(0.1, math.nan) and not UP.is_better(math.nan, None)
    assert not UP.is_better(0.85, 0.8, threshold=0.1)
    assert not DOWN.is_better(0.75, 0.8, threshold=0.1) and DOWN.is_better(0.65, 0.8, threshold=0.1)
    assert (UP.best([0.1, 0.3, math.nan, 0.3]), DOWN.best([0.1, 0.3, math.nan, 0.1])) == (1, 0)


def test_a_goal_is_named_with_or_without_eval():
    assert Goal.of("eval_accuracy") == Goal.of("accuracy") == UP and Goal.of("eval_mse") == DOWN
    # A given direction counts, even against the known one.
    assert Goal.of("eval_accuracy", False) == Goal("accuracy", False)


def test_the_value_of_several_validation_sets_is_their_mean():
    metrics = {"validation_matched/accuracy": 0.8, "validation_mismatched/accuracy": 0.6, "validation_matched/loss": 3}
    assert UP.value(metrics) == pytest.approx(0.7)
    assert Goal("validation_matched/accuracy", True).value(metrics) == 0.8
    # Not of metrics whose names only end so.
    several = {"a/f1": 0.5, "a/macro_f1": 0.9, "b/f1": 0.7, "b/best_f1": 1.0, "f1_of_something": 1.0}
    assert Goal("f1", True).value(several) == pytest.approx(0.6)
    with pytest.raises(ValueError, match="mse is not measured; use one of validation_matched/accuracy"):
        DOWN.value(metrics)


def test_small_gains_are_taken_and_counted_against_patience():
    best = Best()
    kept = [best.update(UP, value, step, threshold=0.1) for step, value in enumerate([0.5, 0.55, 0.4, 0.7])]
    assert kept == [True, True, False, True]
    assert (best.value, best.step, best.evaluations_since) == (0.7, 3, 0)


def test_a_small_gain_does_not_begin_the_patience_anew():
    best, since = Best(), []
    for step, value in enumerate([0.5, 0.55, 0.4, 0.57]):
        best.update(UP, value, step, threshold=0.1)
        since.append(best.evaluations_since)
    assert since == [0, 1, 2, 3] and (best.value, best.step) == (0.57, 3)


VALUES = [0.5, 0.7, 0.6, 0.6, 0.6, 0.9]


def run(examples, tokenizer, folder, patience=None, goal=UP, content=None, steps=12, every=2, rate=1e-3, **options):
    """Evaluates with figures that are given for every two steps."""
    accelerator = create_accelerator()
    figures = {2 * i + 2: value for i, value in enumerate(VALUES)}

    def save(model, path):
        save_pretrained(accelerator, model, tokenizer, path)

    step = [0]

    def evaluate(model):
        return {"accuracy": figures[step[0]], "mse": 10 * figures[step[0]]}

    class Counting(PretrainingObjective):
        def losses(self, outputs):
            step[0] += 1
            return super().losses(outputs)

    best = BestModel(accelerator, str(folder), save)
    if options.get("resume_from_checkpoint"):
        step[0] = int(options["resume_from_checkpoint"].rsplit("-", 1)[1])
    state = train(
        accelerator,
        tiny_model("linformer", tokenizer),
        Counting(),
        RowLoader(examples, PretrainingCollator(tokenizer), 8),
        OptimizationArguments(8, learning_rate=rate, max_train_steps=steps),
        checkpoints=CheckpointArguments(str(folder), 1, **options),
        evaluation=Evaluation(evaluate, every, goal, best, patience),
        save_model=save,
        settings=content,
    )
    return state, best


def weights(folder):
    return load_file(folder / "model.safetensors")


def test_a_full_disk_leaves_no_part_of_a_best_model(tmp_path):
    def fill(model, folder):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"a part")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"best_model failed: .*No space left.*There is no checkpoint"):
        BestModel(create_accelerator(), tmp_path, fill).save(torch.nn.Linear(1, 1), step=1)
    assert not os.listdir(tmp_path)


def test_the_best_model_is_kept(examples, tokenizer, tmp_path):
    state, best = run(examples, tokenizer, tmp_path)
    assert (state.best.value, state.best.step, best.step()) == (0.7, 4, 4)
    kept, then = weights(tmp_path / "best_model"), weights(tmp_path / "checkpoint-4")
    assert all(torch.equal(kept[name], weight) for name, weight in then.items())
    last = weights(tmp_path / "checkpoint-12")
    assert not all(torch.equal(kept[name], weight) for name, weight in last.items())
    best.load(state.model)
    for name, weight in state.model.state_dict().items():
        torch.testing.assert_close(weight, then.get(name, weight), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("final", "goal", "load", "left", "best"),
    [
        (0.9, UP, True, 0.9, (0.9, 6)),
        (0.7, UP, True, 0.8, (0.8, 4)),
        (0.8, UP, True, 0.8, (0.8, 4)),
        (0.7, UP, False, 0.7, (0.8, 4)),
        (0.7, DOWN, True, 0.7, (0.7, 6)),
        (math.nan, UP, True, 0.8, (0.8, 4)),
    ],
)
def test_the_final_model_is_replaced_by_a_better_one_alone(final, goal, load, left, best, tmp_path, monkeypatch):
    """The best of the earlier models, that of step 4, has the value 0.8."""
    saved = []

    class Kept:
        def __init__(self, *arguments):
            pass

        def step(self):
            return 4

        def load(self, model):
            model.value = 0.8

    monkeypatch.setattr(training_run, "BestModel", Kept)
    args = RunArguments(output_dir=str(tmp_path), load_best_model_at_end=load)
    state = TrainingState(SimpleNamespace(value=final), step=6, best=Best(0.8, 4))
    found = training_run.final_scores(
        create_accelerator(),
        state,
        args,
        lambda model: {goal.metric: model.value},
        goal,
        lambda model, folder: saved.append((model.value, folder)),
    )
    assert (found[goal.metric], state.model.value, state.best.value, state.best.step) == (left, left, *best)
    assert saved == ([(left, tmp_path)] if (load and best[1] == 4) else [])
    # The history has the figures of each step's own model.
    [row] = state.history
    assert row["step"] == 6 and row[f"eval_{goal.metric}"] == pytest.approx(final, nan_ok=True)


def test_a_run_ends_for_want_of_better_evaluations(examples, tokenizer, tmp_path):
    state, _ = run(examples, tokenizer, tmp_path, patience=2)
    assert state.stopped_early and not state.interrupted and state.step == 8  # best at 4, not better at 6 and 8
    assert [row["step"] for row in state.history if "mlm_loss" in row] == [8]  # the log of the last steps


def test_a_metric_that_is_never_a_number_ends_a_run(examples, tokenizer, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(f"{__name__}.VALUES", [math.nan] * 6)
    state, best = run(examples, tokenizer, tmp_path, patience=2)
    assert state.stopped_early and state.step == 4 and best.step() is None
    assert "Stopping after step 4: accuracy was NaN in every evaluation." in capsys.readouterr().out


def test_a_run_that_ended_early_does_not_go_on(examples, tokenizer, tmp_path):
    """Resumed, for example because it was killed while it was scored."""
    run(examples, tokenizer, tmp_path, patience=2)
    state, _ = run(examples, tokenizer, tmp_path, patience=2, resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert state.stopped_early and state.step == 8
    state, _ = run(examples, tokenizer, tmp_path, patience=3, resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert state.stopped_early and state.step == 10


def test_the_last_step_of_a_shorter_run_is_evaluated(examples, tokenizer, tmp_path):
    """It is not during the shorter run, whose caller scores the final model."""
    state, best = run(examples, tokenizer, tmp_path, steps=4)
    assert (state.best.step, best.step()) == (2, 2)
    for _ in range(2):  # the second time as if it was killed before its next checkpoint
        resumed = {"resume_from_checkpoint": str(tmp_path / "checkpoint-4")}
        state, best = run(examples, tokenizer, tmp_path, steps=9, **resumed)
        assert (state.best.value, state.best.step, best.step()) == (0.7, 4, 4)
        assert [row["step"] for row in state.history if "eval_accuracy" in row] == [2, 4, 6, 8]
    state, _ = run(
        examples, tokenizer, tmp_path, patience=2, steps=6, resume_from_checkpoint=str(tmp_path / "checkpoint-4")
    )
    assert not state.stopped_early
    state, _ = run(
        examples, tokenizer, tmp_path, patience=1, steps=8, resume_from_checkpoint=str(tmp_path / "checkpoint-6")
    )
    assert state.stopped_early and state.step == 6
    assert [row["step"] for row in state.history if "learning_rate" in row] == [4, 6]


def test_going_on_from_before_the_best_forgets_it(examples, tokenizer, tmp_path):
    """The best model must be from the resumed part of the run, not from steps that are repeated."""
    run(examples, tokenizer, tmp_path)
    state, best = run(examples, tokenizer, tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert (state.best.step, best.step()) == (4, 4)
    state, best = run(examples, tokenizer, tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert (state.best.value, state.best.step, best.step()) == (0.7, 4, 4)


@pytest.mark.parametrize(
    ("change", "best"),
    [
        ({"steps": 9}, (0.6, 8)),
        ({"every": 4}, (0.6, 8)),
        ({"every": 8, "steps": 8}, (None, None)),
        ({"rate": 5e-4}, (0.65, 10)),
    ],
    ids=["shorter", "other-evaluations", "no-evaluation", "other-rate"],
)
def test_a_best_model_that_does_not_come_again_is_forgotten(change, best, examples, tokenizer, tmp_path, monkeypatch):
    """That of step 10, which was saved after the checkpoint of step 7."""
    monkeypatch.setattr(f"{__name__}.VALUES", [0.5, 0.7, 0.6, 0.6, 0.9, 0.6])
    _, kept = run(examples, tokenizer, tmp_path)
    assert kept.step() == 10
    resume = {"resume_from_checkpoint": str(tmp_path / "checkpoint-7")}
    monkeypatch.setattr(f"{__name__}.VALUES", [0.5, 0.7, 0.6, 0.6, 0.65, 0.6])
    state, kept = run(examples, tokenizer, tmp_path, **change, **resume)
    assert (state.best.value, state.best.step) == best
    if best[1] is not None:
        assert kept.step() == best[1]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"goal": DOWN}, "the metric of the best model changed"),
        ({"content": {"the validation data": {"validation": "b"}}}, "the validation data changed"),
    ],
    ids=["metric", "data"],
)
def test_values_of_another_metric_or_other_data_are_not_compared(change, told, examples, tokenizer, tmp_path, capsys):
    first = {"content": {"the validation data": {"validation": "a"}}}
    run(examples, tokenizer, tmp_path, **first)
    resume = {"resume_from_checkpoint": str(tmp_path / "checkpoint-5")}
    state, best = run(examples, tokenizer, tmp_path, **(first | change), **resume)
    # Of steps 6, 8 and 10, which have the same value, and not step 4.
    scale = 10 if "goal" in change else 1
    assert (state.best.value, state.best.step, best.step()) == (0.6 * scale, 6, 6)
    assert told in capsys.readouterr().out
    # Older checkpoints name neither: their evaluations count.
    run(examples, tokenizer, tmp_path / "old", **first)
    checkpoint = tmp_path / "old" / "checkpoint-5"
    progress = json.loads((checkpoint / "progress.json").read_text())
    for name in EVALUATED_BY:
        progress["settings"].pop(name, None)
    (checkpoint / "progress.json").write_text(json.dumps(progress))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["progress.json"] = file_digest(checkpoint / "progress.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    state, _ = run(examples, tokenizer, tmp_path / "old", **first, resume_from_checkpoint=str(checkpoint))
    assert state.best.step == 4
