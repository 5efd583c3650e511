# SPDX-License-Identifier: Apache-2.0
import contextlib
import dataclasses
import errno
import functools
import json
import os
import random
import shutil
import signal
import sys
import time

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMaskedLM, AutoTokenizer

from nystrom_models.data import PretrainingCollator, RowLoader
from nystrom_models.training import (
    CheckpointArguments,
    OptimizationArguments,
    PretrainingObjective,
    create_accelerator,
    find_checkpoint,
    list_checkpoints,
    loop,
    results,
    train,
)
from nystrom_models.training.arguments import RunArguments
from nystrom_models.training.checkpoints import BestModel, make_way, read_progress
from nystrom_models.training.folder_lock import folder_lock
from nystrom_models.training.loop import Evaluation
from nystrom_models.training.run import _clear_failure_of_the_end, start_run
from nystrom_models.training.saving import save_pretrained
from nystrom_models.training.selection import Goal
from nystrom_models.training.signals import Signals, no_further_run, run_script
from tests.training import processes, stopped_run
from tests.training.models import tiny_model
from tests.training.stopped_run import Run


@pytest.fixture(scope="module")
def data(texts, tokenizer, tmp_path_factory):
    """A tokenizer, and the documents in one, two and five files of unequal sizes."""
    folder = tmp_path_factory.mktemp("data")
    tokenizer.save_pretrained(folder)
    for num_files in (1, 2, 5):
        borders = [round(50 * (i / num_files) ** 2) for i in range(num_files + 1)]
        for i in range(num_files):
            part = texts[borders[i] : borders[i + 1]]
            (folder / f"stream{num_files}-{i}.txt").write_text("\n\n".join(part) + "\n")
    return str(folder)


def start(kind, data, folder, stop="", resume=None):
    arguments = (kind, data, str(folder), stop, resume)
    return processes.run(stopped_run.main, *arguments, folder=folder, num_processes=kind.num_processes)


def outcome(folder):
    result = json.loads((folder / "result.json").read_text())
    for row in result["history"]:
        del row["tokens_per_second"]
    return result, load_file(folder / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def unstopped(data, tmp_path_factory):
    """The results of a run that is not stopped."""

    @functools.cache
    def results(kind):
        folder = tmp_path_factory.mktemp("unstopped")
        codes, log = start(kind, data, folder)
        assert codes == [0] * kind.num_processes, log[-3000:]
        return outcome(folder)

    return results


def assert_equal_outcomes(folder, expected):
    (result, weights), (expected_result, expected_weights) = outcome(folder), expected
    assert result == expected_result
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)


CASES = [
    (Run("nystromformer"), "kill-in-a-step", 8),
    pytest.param(Run(), "kill-while-saving", 4, marks=pytest.mark.slow),
    (Run("nystromformer"), "term", 7),
    (Run(num_workers=2), "int", 7),
    pytest.param(Run(data="tokens"), "kill-in-a-step", 8, marks=pytest.mark.slow),
    (Run(num_processes=2), "kill-in-a-step", 8),
    pytest.param(Run(num_processes=2), "term-late", 6, marks=pytest.mark.slow),
    (Run(data="stream1"), "kill-in-a-step", 8),
    pytest.param(Run(data="stream5", num_workers=1), "term", 7, marks=pytest.mark.slow),
    (Run(data="stream1", num_processes=2), "term-other", 7),
    pytest.param(Run(data="stream2", num_processes=2), "kill-in-a-step", 8, marks=pytest.mark.slow),
    (Run("nystromformer", "stream5", 2), "kill-while-saving", 4),
]


@pytest.mark.parametrize(
    ("kind", "stop", "last"),
    CASES,
    ids=lambda value: f"{value.data}-{value.num_processes}" if isinstance(value, Run) else str(value),
)
def test_resumed_run_is_bit_for_bit_the_unstopped_one(kind, stop, last, data, unstopped, tmp_path):
    codes, log = start(kind, data, tmp_path, stop)
    if stop.startswith(("term", "int")):
        assert codes == [0] * kind.num_processes, log[-3000:]
        assert outcome(tmp_path)[0]["interrupted"] and outcome(tmp_path)[0]["step"] == last
    else:
        assert codes[0] == -signal.SIGKILL
    assert list_checkpoints(tmp_path)[-1].name == f"checkpoint-{last}"
    codes, log = start(kind, data, tmp_path, resume="latest")
    assert codes == [0] * kind.num_processes, log[-3000:]
    assert f"Resuming from {tmp_path / f'checkpoint-{last}'}" in log
    assert_equal_outcomes(tmp_path, unstopped(kind))
    # The figures logged during the run and those in the files are the same.
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 6, 9, 12, 14]


def test_a_signal_may_ask_to_save_and_go_on(data, unstopped, tmp_path):
    codes, log = start(Run("nystromformer"), data, tmp_path, "usr1")
    assert codes == [0], log[-3000:]
    assert [path.name for path in list_checkpoints(tmp_path)] == [f"checkpoint-{step}" for step in (4, 7, 8, 12)]
    assert_equal_outcomes(tmp_path, unstopped(Run("nystromformer")))


@pytest.mark.parametrize(
    ("data_kind", "before", "after"),
    [
        ("rows", 1, 2),
        *(pytest.param(kind, 2, 1, marks=pytest.mark.slow) for kind in ("tokens", "rows", "stream2")),
    ],
)
def test_a_run_goes_on_on_another_number_of_processes(data_kind, before, after, data, unstopped, tmp_path):
    """The steps have the same rows, so results differ only by rounding (and by dropout, which is off here)."""
    first, then = (Run(data=data_kind, num_processes=number, dropout=0.0) for number in (before, after))
    codes, _ = start(first, data, tmp_path, "kill-while-saving")
    assert codes[0] == -signal.SIGKILL
    codes, log = start(then, data, tmp_path, resume="latest")
    assert codes == [0] * after, log[-3000:]
    assert f"Resuming from {tmp_path / 'checkpoint-4'}" in log
    (result, weights), (expected, expected_weights) = outcome(tmp_path), unstopped(first)
    assert len(result["history"]) == len(expected["history"])
    for row, other in zip(result["history"], expected["history"], strict=True):
        assert row == pytest.approx(other, rel=1e-4)
    for name, weight in expected_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-4, msg=name)


def test_a_stream_that_cannot_go_on_leaves_later_checkpoints_and_the_history(data, tmp_path):
    """Otherwise "latest" would go back to the named one, on the number of processes that works."""
    codes, log = start(Run(data="stream1"), data, tmp_path)
    assert codes == [0], log[-3000:]
    before = (tmp_path / "history.jsonl").read_text()
    codes, log = start(Run(data="stream1", num_processes=2), data, tmp_path, resume=str(tmp_path / "checkpoint-4"))
    assert all(codes) and "cannot be divided among 2: continue on 1." in log
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-8", "checkpoint-12"]
    assert (tmp_path / "history.jsonl").read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(
    "kind", [Run(), Run(num_processes=2), Run(data="stream2"), Run(data="stream5", num_processes=2)], ids=str
)
def test_stopped_at_random_moments_again_and_again(kind, number, data, unstopped, tmp_path):
    """A run of about a second, repeated until it was stopped ten times in all."""
    expected, rng, stops, rounds = unstopped(kind), random.Random(f"{kind}{number}"), 0, 0
    while stops < 10:
        rounds, folder = rounds + 1, tmp_path / str(rounds)
        folder.mkdir()
        while True:
            started, _ = processes.start(
                stopped_run.main, (kind, data, str(folder), "", "latest"), folder, kind.num_processes
            )
            time.sleep(rng.uniform(0.2, 1.5))
            victims = started if number == signal.SIGTERM else [rng.choice(started)]
            alive = [process for process in victims if process.exitcode is None]
            for process in alive:
                with contextlib.suppress(ProcessLookupError):  # it has just ended
                    os.kill(process.pid, number)
            stops += bool(alive)
            processes.finish(started)
            if (folder / "result.json").is_file() and not outcome(folder)[0]["interrupted"]:
                break
            (folder / "result.json").unlink(missing_ok=True)
        assert_equal_outcomes(folder, expected)


def short_run(tokenizer, examples, folder, steps=6, accelerator=None, learning_rate=1e-3, micro_batch=8, **options):
    evaluation = options.pop("evaluation", None)
    optimization = {name: options.pop(name) for name in ("weight_decay", "tokens_per_step") if name in options}
    accumulation = 8 // micro_batch
    return train(
        accelerator or create_accelerator(),
        options.pop("model", None) or tiny_model("linformer", tokenizer),
        PretrainingObjective(),
        RowLoader(examples, PretrainingCollator(tokenizer), micro_batch, accumulation),
        OptimizationArguments(
            micro_batch,
            gradient_accumulation_steps=accumulation,
            learning_rate=learning_rate,
            max_train_steps=steps,
            **optimization,
        ),
        settings=options.pop("settings", None),
        logging_steps=options.pop("logging_steps", 10),
        evaluation=evaluation,
        checkpoints=CheckpointArguments(str(folder), 2, **options),
    )


def test_damaged_checkpoint_is_named_and_the_one_before_it_taken(tokenizer, examples, tmp_path):
    short_run(tokenizer, examples, tmp_path)
    weights = tmp_path / "checkpoint-6" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (tmp_path / "checkpoint-4" / "optimizer.bin").unlink()
    latest = CheckpointArguments(str(tmp_path), resume_from_checkpoint="latest")
    with pytest.warns(UserWarning) as warned:
        assert find_checkpoint(latest) == tmp_path / "checkpoint-2"
    messages = [str(warning.message) for warning in warned]
    assert str(weights) in messages[0] and "is damaged" in messages[0]
    assert "optimizer.bin is missing" in messages[1]
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        find_checkpoint(CheckpointArguments(str(tmp_path), resume_from_checkpoint=str(weights.parent)))
    (tmp_path / "checkpoint-2" / "manifest.json").write_text("{")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="No complete checkpoint is left"):
        find_checkpoint(latest)


def test_logged_speed_is_that_of_the_last_steps(tokenizer, examples, tmp_path, monkeypatch):
    """Also after resuming a run that was slow or paused, whose mean stays low."""
    short_run(tokenizer, examples, tmp_path)
    progress = read_progress(tmp_path / "checkpoint-2") | {"seconds": 1e6}
    monkeypatch.setattr(loop, "read_progress", lambda checkpoint: progress)
    state = short_run(tokenizer, examples, tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert state.tokens_per_second < 1 < state.history[-1]["tokens_per_second"]


def test_missing_checkpoint(tmp_path):
    assert find_checkpoint(CheckpointArguments(str(tmp_path), resume_from_checkpoint="latest")) is None
    with pytest.raises(FileNotFoundError, match="checkpoints of --output_dir are: none"):
        find_checkpoint(CheckpointArguments(str(tmp_path), resume_from_checkpoint=str(tmp_path / "checkpoint-3")))


def test_a_checkpoint_is_a_model(data, tmp_path):
    """`from_pretrained` loads it, with its tokenizer, and it has the logged figures."""
    codes, log = start(Run(num_processes=2), data, tmp_path)
    assert codes == [0, 0], log[-3000:]
    checkpoint = tmp_path / "checkpoint-12"
    model, info = AutoModelForMaskedLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    batch = AutoTokenizer.from_pretrained(checkpoint)("First the [MASK].", return_tensors="pt")
    assert torch.isfinite(model(**batch).logits).all()
    assert len((checkpoint / "history.jsonl").read_text().splitlines()) == 4


def test_an_earlier_run_in_the_same_folder_is_not_taken_for_this_one(tokenizer, examples, tmp_path):
    """Also not by a later --resume_from_checkpoint latest."""
    short_run(tokenizer, examples, tmp_path)
    with pytest.raises(ValueError, match=r"earlier run, checkpoint-2, .*latest.*--overwrite_output_dir"):
        short_run(tokenizer, examples, tmp_path, steps=4)
    short_run(tokenizer, examples, tmp_path, steps=4, overwrite_output_dir=True)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 1
    with pytest.raises(ValueError, match="give only one of them"):
        CheckpointArguments(str(tmp_path), resume_from_checkpoint="latest", overwrite_output_dir=True)


@pytest.mark.parametrize("name", ["model_name_or_path", "teacher_model_name_or_path", "config_name", "tokenizer_name"])
@pytest.mark.parametrize("folder", ["checkpoint-2", "superseded-checkpoint-4", "best_model"])
def test_a_model_is_not_removed_before_it_is_read(folder, name, tmp_path):
    Arguments = dataclasses.make_dataclass("Arguments", [(name, str | None, None)], bases=(CheckpointArguments,))
    model = tmp_path / folder
    model.mkdir()
    with pytest.raises(ValueError, match=f"--{name} .*{folder} is of an earlier run"):
        make_way(Arguments(str(tmp_path), overwrite_output_dir=True, **{name: str(model)}))
    assert model.is_dir()
    make_way(Arguments(str(tmp_path), overwrite_output_dir=True, **{name: "google-bert/bert"}))
    assert not model.exists()


def test_a_checkpoint_beyond_the_last_step_is_not_resumed(tokenizer, examples, tmp_path):
    short_run(tokenizer, examples, tmp_path)
    with pytest.raises(
        ValueError, match=r"checkpoint-6 has taken 6 steps, and this run has 5: give --max_train_steps 6"
    ):
        short_run(tokenizer, examples, tmp_path, steps=5, resume_from_checkpoint="latest")
    assert short_run(tokenizer, examples, tmp_path, steps=6, resume_from_checkpoint="latest").step == 6


def hold(folder, locked):
    with folder_lock(folder):
        locked.set()
        time.sleep(600)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such locks")
def test_two_runs_do_not_write_to_one_folder(tokenizer, examples, tmp_path):
    short_run(tokenizer, examples, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    locked = processes.CONTEXT.Event()
    other = processes.CONTEXT.Process(target=hold, args=(str(tmp_path), locked))
    other.start()
    try:
        assert locked.wait(timeout=240)
        for options in ({"resume_from_checkpoint": "latest"}, {"overwrite_output_dir": True}):
            with pytest.raises(ValueError, match=rf"Another run \(process {other.pid}\) is writing to --output_dir"):
                short_run(tokenizer, examples, tmp_path, **options)
            arguments = RunArguments(output_dir=str(tmp_path), **options)
            with pytest.raises(ValueError, match="Another run"):
                start_run(arguments).__enter__()
        (tmp_path / ".running").unlink()
        assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    finally:
        other.kill()  # of which no lock is left
        other.join()
    assert short_run(tokenizer, examples, tmp_path, steps=8, resume_from_checkpoint="latest").step == 8
    assert not (tmp_path / ".running").exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such locks")
def test_a_folder_is_locked_until_its_run_has_written_everything(tokenizer, examples, tmp_path):
    with start_run(RunArguments(output_dir=str(tmp_path))):
        short_run(tokenizer, examples, tmp_path, steps=1)
        assert (tmp_path / ".running").exists()  # scores and results come after training
    assert not (tmp_path / ".running").exists()


def test_parts_that_a_killed_run_left_are_removed_by_the_next(tokenizer, examples, tmp_path):
    short_run(tokenizer, examples, tmp_path, steps=2)
    left = [".checkpoint-4.partial", ".checkpoint-1.removed", ".best_model.partial", ".best_model.removed"]
    left += [".superseded-checkpoint-3.removed"]
    for options in ({"resume_from_checkpoint": "latest"}, {"overwrite_output_dir": True}):
        for name in left:
            (tmp_path / name).mkdir()
            (tmp_path / name / "modeling_bert.py").write_text("# of another model")
        short_run(tokenizer, examples, tmp_path, steps=2, **options)
        assert not [path.name for path in tmp_path.iterdir() if path.name in left]


def test_what_is_left_after_a_full_disk_is_said(tmp_path):
    def message():
        with pytest.raises(OSError) as raised, _clear_failure_of_the_end(RunArguments(output_dir=str(tmp_path))):
            raise OSError("No space left on device")
        return str(raised.value)

    assert "nothing of the training is left" in message()
    (tmp_path / "best_model").mkdir()
    assert "best_model is complete: move it" in message() and "--resume_from_checkpoint" not in message()
    (tmp_path / "checkpoint-2").mkdir()
    assert "checkpoint-2 is complete, and --resume_from_checkpoint latest continues" in message()


def test_an_earlier_run_is_removed_when_training_begins_and_not_before(tokenizer, examples, tmp_path):
    short_run(tokenizer, examples, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with start_run(RunArguments(output_dir=str(tmp_path), overwrite_output_dir=True)):
        pass
    assert before and before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    short_run(tokenizer, examples, tmp_path, steps=1, overwrite_output_dir=True)
    assert not [path.name for path in tmp_path.iterdir() if path.is_dir()]


def test_the_best_model_is_known_in_another_folder(tokenizer, examples, tmp_path, capsys):
    accelerator, losses = create_accelerator(), iter([3.0, 1.0, 2.0, 2.5, 1.5])

    def evaluation(folder):
        best = BestModel(accelerator, folder, lambda model, path: save_pretrained(accelerator, model, None, path))
        return Evaluation(lambda _: {"loss": next(losses)}, 2, Goal("loss", False), best)

    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    short_run(tokenizer, examples, one, steps=7, evaluation=evaluation(one))
    resumed = {"steps": 9, "resume_from_checkpoint": str(one / "checkpoint-6")}
    state = short_run(tokenizer, examples, two, evaluation=evaluation(two), **resumed)
    assert (state.best.value, state.best.step, state.best.evaluations_since) == (1.0, 4, 2)
    for name in ("best.json", "model.safetensors"):
        assert (two / "best_model" / name).read_bytes() == (one / "best_model" / name).read_bytes()
    assert "will be one of the later ones" not in capsys.readouterr().out
    shutil.rmtree(one / "best_model")
    state = short_run(tokenizer, examples, three, evaluation=evaluation(three), **resumed)
    assert (state.best.value, state.best.step) == (1.5, 8)
    assert "that of step 4, is not in" in capsys.readouterr().out


@pytest.mark.parametrize("best", [4, 8], ids=["of-the-same-step", "of-a-later-step"])
def test_the_best_model_of_another_run_is_not_taken_for_that_of_this_one(best, tokenizer, examples, tmp_path, capsys):
    """A checkpoint that was copied alone is resumed in a folder where another run has left its best model."""
    accelerator, one, other = create_accelerator(), tmp_path / "one", tmp_path / "other"

    def evaluation(folder, values):
        kept = BestModel(accelerator, folder, lambda model, path: save_pretrained(accelerator, model, None, path))
        losses = iter(values)
        return Evaluation(lambda _: {"loss": next(losses)}, 2, Goal("loss", False), kept)

    short_run(tokenizer, examples, one, steps=7, evaluation=evaluation(one, [3.0, 1.0, 2.0]))
    shutil.rmtree(one / "best_model")
    values = [0.1 if step == best else 9.0 for step in (2, 4, 6, 8)]
    short_run(tokenizer, examples, other, steps=9, evaluation=evaluation(other, values))
    resumed = evaluation(other, [1.5])
    state = short_run(
        tokenizer, examples, other, steps=9, evaluation=resumed, resume_from_checkpoint=str(one / "checkpoint-6")
    )
    assert (state.best.value, state.best.step, resumed.best_model.step()) == (1.5, 8, 8)
    assert "that of step 4, is not in" in capsys.readouterr().out


def test_a_checkpoint_that_was_moved_keeps_the_best_model_of_its_run(tokenizer, examples, tmp_path):
    accelerator, run = create_accelerator(), tmp_path / "run"
    kept = BestModel(accelerator, run, lambda model, path: save_pretrained(accelerator, model, None, path))
    losses = iter([3.0, 1.0, 2.0, 1.5])
    evaluation = Evaluation(lambda _: {"loss": next(losses)}, 2, Goal("loss", False), kept)
    short_run(tokenizer, examples, run, steps=7, evaluation=evaluation)
    moved = str((run / "checkpoint-6").rename(tmp_path / "checkpoint-6"))
    state = short_run(tokenizer, examples, run, steps=9, evaluation=evaluation, resume_from_checkpoint=moved)
    assert (state.best.value, state.best.step, kept.step()) == (1.0, 4, 4)


def test_patience_is_the_same_after_a_kill_between_best_model_and_checkpoint(tokenizer, examples, tmp_path):
    losses, accelerator = {2: 3.0, 4: 2.9, 6: 2.8, 8: 2.7, 10: 2.6}, create_accelerator()

    def run(first=2, killed_at=None, **options):
        def save(model, path):
            save_pretrained(accelerator, model, None, path)

        steps = iter(range(first, 12, 2))

        def evaluate(model):
            if (step := next(steps)) == killed_at:
                raise InterruptedError
            return {"loss": losses[step]}

        best = BestModel(accelerator, tmp_path, save)
        evaluation = Evaluation(evaluate, 2, Goal("loss", False), best, 3, 0.2)
        return short_run(tokenizer, examples, tmp_path, steps=10, evaluation=evaluation, **options)

    assert run().step == 8  # each loss is better by less than the threshold
    shutil.rmtree(tmp_path)
    with pytest.raises(InterruptedError):
        run(killed_at=6)
    shutil.rmtree(tmp_path / "checkpoint-4")
    state = run(first=4, resume_from_checkpoint="latest")
    assert (state.step, state.best.step, state.best.value) == (8, 8, 2.7)


@pytest.fixture
def no_signal_yet(monkeypatch):
    monkeypatch.setattr(Signals, "_ended_by", None)
    monkeypatch.setattr(Signals, "_late", None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    handler = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, handler)


def ended_by(number):
    with Signals() as signals:
        os.kill(os.getpid(), number)
    signals.end_run()


def test_a_run_that_a_signal_ended_gives_the_status_of_the_signal(no_signal_yet):
    run_script(lambda: None)
    with pytest.raises(SystemExit) as ended:
        run_script(lambda: ended_by(signal.SIGTERM))
    assert ended.value.code == 143
    with pytest.raises(KeyboardInterrupt):  # by which Python ends itself as Ctrl-C does
        run_script(lambda: ended_by(signal.SIGINT))


def test_sigusr1_outside_of_training_ends_nothing(no_signal_yet):
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    run_script(lambda: os.kill(os.getpid(), signal.SIGUSR1))
    own = lambda number, frame: None  # noqa: E731
    signal.signal(signal.SIGUSR1, own)
    run_script(lambda: None)
    assert signal.getsignal(signal.SIGUSR1) is own


def test_a_signal_in_the_last_step_is_remembered_until_the_next_run(tokenizer, examples, tmp_path, no_signal_yet):
    model = tiny_model("linformer", tokenizer)
    model.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert not short_run(tokenizer, examples, tmp_path / "one", steps=1, model=model).interrupted
    finished: dict = {"train": {}, "validation": {}}
    assert no_further_run(finished) and Signals._ended_by == signal.SIGTERM
    short_run(tokenizer, examples, tmp_path / "two", steps=1)
    assert not no_further_run(finished)


def test_oldest_checkpoints_are_removed(tokenizer, examples, tmp_path):
    short_run(tokenizer, examples, tmp_path, steps=10, checkpoints_total_limit=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-8", "checkpoint-10"]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-8", "history.jsonl"]


def test_going_on_from_an_earlier_step_begins_a_new_branch(tokenizer, examples, tmp_path):
    """Later checkpoints of the old one are neither the latest, nor counted as the newest."""
    short_run(tokenizer, examples, tmp_path, steps=10)
    earlier = str(tmp_path / "checkpoint-4")
    with pytest.warns(UserWarning, match="learning_rate was"):
        short_run(
            tokenizer,
            examples,
            tmp_path,
            steps=8,
            learning_rate=1e-4,
            resume_from_checkpoint=earlier,
            checkpoints_total_limit=2,
        )
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-6", "checkpoint-8"]
    latest = find_checkpoint(CheckpointArguments(str(tmp_path), resume_from_checkpoint="latest"))
    assert latest == tmp_path / "checkpoint-8"
    assert json.loads((latest / "progress.json").read_text())["settings"]["learning_rate"] == 1e-4
    superseded = sorted(path.name for path in tmp_path.glob("superseded-*"))
    assert superseded == [f"superseded-checkpoint-{step}" for step in (10, 6, 8)]
    # Nothing is lost: the old branch can still be taken.
    old = str(tmp_path / "superseded-checkpoint-10")
    assert short_run(tokenizer, examples, tmp_path, steps=11, resume_from_checkpoint=old).step == 11
    short_run(tokenizer, examples, tmp_path, steps=2, overwrite_output_dir=True)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-2", "history.jsonl"]


def test_full_disk_leaves_the_checkpoint_before(tokenizer, examples, tmp_path, monkeypatch):
    accelerator = create_accelerator()
    save_state, calls = accelerator.save_state, []

    def failing_save_state(folder, **options):
        calls.append(folder)
        save_state(folder, **options)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(accelerator, "save_state", failing_save_state)
    with pytest.raises(OSError, match=r"checkpoint-4 failed: .*No space left.*checkpoint-2 is complete"):
        short_run(tokenizer, examples, tmp_path, accelerator=accelerator)
    assert os.listdir(tmp_path) == ["checkpoint-2"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_at_a_log_names_the_checkpoint_before(tokenizer, examples, tmp_path, monkeypatch):
    def failing_open(file, mode="r", **options):
        """Takes no line of the history after the first checkpoint."""
        full = mode == "a" and (tmp_path / "checkpoint-2").exists()
        return open("/dev/full" if full else file, mode, **options)

    monkeypatch.setattr(results, "open", failing_open, raising=False)
    expected = r"history.jsonl cannot be written: No space left on device. .*checkpoint-2 is complete. Make room"
    with pytest.raises(OSError, match=expected):
        short_run(tokenizer, examples, tmp_path, logging_steps=1)
    monkeypatch.undo()
    assert short_run(tokenizer, examples, tmp_path, logging_steps=1, resume_from_checkpoint="latest").step == 6


@pytest.mark.parametrize("name", ["checkpointing_steps", "checkpoints_total_limit"])
def test_numbers_must_be_positive(name):
    with pytest.raises(ValueError, match=f"--{name} must be at least 1, but is 0"):
        CheckpointArguments(**{name: 0})
