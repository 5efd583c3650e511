# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ZeRO on two CPU processes, through the loop that the scripts use, against DDP.

Accelerate supports DeepSpeed only on GPUs; here it is made to use gloo. DeepSpeed is not part of the development
environment, because it compiles an operator at its first start (with a C++ compiler and ninja):

    DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed
"""

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForPreTraining

from nystrom_models.training.saving import bare_model, load_weights, save_pretrained
from tests.training import processes, stopped_run
from tests.training.stopped_run import Run
from tests.training.test_checkpoints import data  # noqa: F401  (a fixture)

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
CONFIGS = Path(__file__).parents[2] / "configs" / "accelerate"


def train(stage, folder_of_data, folder, resume=None):
    """The run that test_checkpoints.py stops and resumes, with the launch file of a ZeRO stage."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "ACCELERATE_USE_DEEPSPEED": "true"}
    import accelerate.state
    from accelerate.utils import DeepSpeedPlugin, DistributedType

    accelerate.state.PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_CPU)
    launch = yaml.safe_load((CONFIGS / f"deepspeed_zero{stage}.yaml").read_text())["deepspeed_config"]
    plugin = DeepSpeedPlugin(zero_stage=launch["zero_stage"], zero3_save_16bit_model=stage == 3)
    # Otherwise, no weight of so small a model is divided.
    plugin.deepspeed_config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    make = stopped_run.create_accelerator
    stopped_run.create_accelerator = lambda: make(deepspeed_plugin=plugin)
    accelerator, state = stopped_run.main(Run(num_processes=2), folder_of_data, folder, "", resume)
    # As a run does with its best model at the end.
    load_weights(bare_model(accelerator, state.model), f"{folder}/checkpoint-8")
    save_pretrained(accelerator, state.model, None, f"{folder}/loaded")


def history(folder):
    return json.loads((folder / "result.json").read_text())["history"]


@pytest.mark.parametrize("stage", [2, 3])
def test_zero_trains_as_ddp_and_goes_on(stage, data, tmp_path):  # noqa: F811
    folders = {name: tmp_path / name for name in ("ddp", "zero")}
    for folder in folders.values():
        folder.mkdir()
    arguments = (Run(num_processes=2), data, str(folders["ddp"]))
    codes, log = processes.run(stopped_run.main, *arguments, folder=folders["ddp"], num_processes=2)
    assert codes == [0, 0], log[-3000:]
    codes, log = processes.run(train, stage, data, str(folders["zero"]), folder=folders["zero"], num_processes=2)
    assert codes == [0, 0], log[-3000:]
    for row, other in zip(history(folders["ddp"]), history(folders["zero"]), strict=True):
        for name in ("mlm_loss", "sop_loss", "grad_norm", "learning_rate"):
            assert other[name] == pytest.approx(row[name], rel=1e-4)
    saved, loaded = (load_file(folders["zero"] / name / "model.safetensors") for name in ("checkpoint-8", "loaded"))
    assert saved.keys() == loaded.keys(), saved.keys() ^ loaded.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)
    whole = history(folders["zero"])
    for checkpoint in ("checkpoint-8", "final"):
        _, info = AutoModelForPreTraining.from_pretrained(folders["zero"] / checkpoint, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], checkpoint
    resume = str(folders["zero"] / "checkpoint-8")
    codes, log = processes.run(
        train, stage, data, str(folders["zero"]), resume, folder=folders["zero"], num_processes=2
    )
    assert codes == [0, 0], log[-3000:]
    assert [row["mlm_loss"] for row in history(folders["zero"])] == pytest.approx(
        [row["mlm_loss"] for row in whole], rel=1e-6
    )
