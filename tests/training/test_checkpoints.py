# SPDX-License-Identifier: Apache-2.0
import errno
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nystrom_models.data import PretrainingCollator, train_dataloader
from nystrom_models.training import (
    CheckpointArguments,
    OptimizationArguments,
    PretrainingObjective,
    create_accelerator,
    find_checkpoint,
    list_checkpoints,
    train,
)
from tests.training import stopped_run
from tests.training.models import tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def data(texts, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    tokenizer.save_pretrained(folder)
    (folder / "texts.json").write_text(json.dumps(texts))
    return folder


def run(data, folder, family, stop="", resume=""):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, stopped_run.__file__, str(data), str(folder), family, stop, resume]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)


def outcome(folder):
    result = json.loads((folder / "result.json").read_text())
    for row in result["history"]:
        del row["tokens_per_second"]
    return result, load_file(folder / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def unstopped(data, tmp_path_factory):
    """What a run of a family gives that nothing stops."""

    @functools.cache
    def results(family):
        folder = tmp_path_factory.mktemp(family)
        done = run(data, folder, family)
        assert done.returncode == 0, done.stderr[-2000:]
        return outcome(folder)

    return results


@pytest.mark.parametrize(
    ("family", "stop", "last"),
    [
        ("nystromformer", "kill-in-a-step", 8),
        ("linformer", "kill-in-a-step", 8),
        ("linformer", "kill-while-saving", 4),
        ("nystromformer", "term", 7),
    ],
)
def test_resumed_run_is_bit_for_bit_the_unstopped_one(family, stop, last, data, unstopped, tmp_path):
    stopped = run(data, tmp_path, family, stop)
    if stop == "term":
        assert stopped.returncode == 0, stopped.stderr[-2000:]
        assert outcome(tmp_path)[0]["interrupted"] and outcome(tmp_path)[0]["step"] == last
    else:
        assert stopped.returncode == -signal.SIGKILL
    assert list_checkpoints(tmp_path)[-1].name == f"checkpoint-{last}"
    resumed = run(data, tmp_path, family, resume="latest")
    assert resumed.returncode == 0, resumed.stderr[-2000:]
    assert f"Going on from {tmp_path / f'checkpoint-{last}'}" in resumed.stdout
    (result, weights), (expected, expected_weights) = outcome(tmp_path), unstopped(family)
    assert result == expected
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)


def short_run(tokenizer, examples, folder, steps=6, accelerator=None, **options):
    rate = options.pop("learning_rate", 1e-3)
    return train(
        accelerator or create_accelerator(cpu=True),
        tiny_model("linformer", tokenizer),
        PretrainingObjective(),
        train_dataloader(examples, PretrainingCollator(tokenizer), 8),
        OptimizationArguments(8, learning_rate=rate, max_train_steps=steps),
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
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="No whole checkpoint is left"):
        find_checkpoint(latest)


def test_missing_checkpoint(tmp_path):
    assert find_checkpoint(CheckpointArguments(str(tmp_path), resume_from_checkpoint="latest")) is None
    with pytest.raises(FileNotFoundError, match="checkpoints of --output_dir are: none"):
        find_checkpoint(CheckpointArguments(str(tmp_path), resume_from_checkpoint=str(tmp_path / "checkpoint-3")))


def test_run_must_go_on_as_it_began(tokenizer, examples, tmp_path):
    short_run(tokenizer, examples, tmp_path)
    with pytest.raises(ValueError, match=r"--learning_rate = 0\.001, and this run has 0\.002"):
        short_run(tokenizer, examples, tmp_path, learning_rate=2e-3, resume_from_checkpoint="latest")


def test_oldest_checkpoints_are_removed(tokenizer, examples, tmp_path):
    short_run(tokenizer, examples, tmp_path, steps=10, checkpoints_total_limit=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-8", "checkpoint-10"]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint-10", "checkpoint-8"]


def test_full_disk_leaves_the_checkpoint_before(tokenizer, examples, tmp_path, monkeypatch):
    accelerator = create_accelerator(cpu=True)
    save_state, calls = accelerator.save_state, []

    def failing_save_state(folder, **options):
        calls.append(folder)
        save_state(folder, **options)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(accelerator, "save_state", failing_save_state)
    with pytest.raises(OSError, match=r"checkpoint-4 failed: .*No space left.*checkpoint-2 is whole"):
        short_run(tokenizer, examples, tmp_path, accelerator=accelerator)
    assert os.listdir(tmp_path) == ["checkpoint-2"]


@pytest.mark.parametrize("name", ["checkpointing_steps", "checkpoints_total_limit"])
def test_numbers_must_be_positive(name):
    with pytest.raises(ValueError, match=f"--{name} must be at least 1, but is 0"):
        CheckpointArguments(**{name: 0})
