# SPDX-License-Identifier: Apache-2.0
"""With any launcher, the processes are one run, or an error says what to set."""

import copy
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin, is_compiled_module

import nystrom_models
from nystrom_models.training import create_accelerator, launch
from nystrom_models.training.launch import launched_processes
from tests.training import processes


@pytest.mark.parametrize(
    ("environment", "size"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "1"}, 1),
        ({"WORLD_SIZE": "4", "RANK": "0"}, 4),
        ({"PMI_SIZE": "2", "PMI_RANK": "1"}, 2),
        ({"OMPI_COMM_WORLD_SIZE": "3"}, 3),
        ({"MV2_COMM_WORLD_SIZE": "3"}, 3),
        ({"SLURM_STEP_NUM_TASKS": "8"}, 8),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, 1),  # a batch script, which runs once
    ],
    ids=str,
)
def test_the_number_of_launched_processes(environment, size):
    assert launched_processes(environment)[0] == size


def describe(folder):
    accelerator = create_accelerator()
    total = accelerator.reduce(torch.tensor(accelerator.process_index + 1.0), "sum")
    found = [accelerator.num_processes, accelerator.process_index, accelerator.device.type, float(total)]
    Path(folder, f"found{accelerator.process_index}.json").write_text(json.dumps(found))


def as_open_mpi(folder):
    """The variables that `mpirun -np 2` sets."""
    rank = os.environ.pop("RANK")
    for name in ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        os.environ.pop(name)
    os.environ |= {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    os.environ |= {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_LOCAL_RANK": rank}
    describe(folder)


def as_srun(folder):
    """The variables that `srun -n 2` sets, with which the processes cannot find each other."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name)
    os.environ["SLURM_STEP_NUM_TASKS"] = "2"
    describe(folder)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
@pytest.mark.parametrize("launch", [describe, as_open_mpi])
def test_processes_share_the_cpu_without_further_settings(launch, tmp_path):
    """Launched by torchrun or MPI; with only Accelerate, each would train alone."""
    codes, log = processes.run(launch, str(tmp_path), folder=tmp_path, num_processes=2)
    assert codes == [0, 0], log[-3000:]
    for rank in (0, 1):
        assert json.loads((tmp_path / f"found{rank}.json").read_text()) == [2, rank, "cpu", 3.0]


def wait_for_the_main_process(folder):
    """With PyTorch's default of 1 second instead of 10 or 30 minutes."""
    torch.distributed.distributed_c10d._get_default_timeout = lambda backend: timedelta(seconds=1)
    accelerator = create_accelerator()
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            time.sleep(4)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_processes_wait_while_the_main_one_prepares_the_data(tmp_path):
    """A corpus may take hours."""
    codes, log = processes.run(wait_for_the_main_process, str(tmp_path), folder=tmp_path, num_processes=2)
    assert codes == [0, 0], log[-3000:]


def sharded(folder):
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    describe(folder)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
def test_sharding_that_would_not_happen_is_an_error(tmp_path):
    """Accelerate does not shard on CPUs, and would use DDP instead without a message."""
    codes, log = processes.run(sharded, str(tmp_path), folder=tmp_path, num_processes=2)
    assert any(codes) and "FSDP was requested, but Accelerate would train without it" in log


def test_processes_that_do_not_find_each_other_are_an_error(tmp_path):
    codes, log = processes.run(as_srun, str(tmp_path), folder=tmp_path, num_processes=2)
    assert any(codes) and "2 processes were launched (SLURM_STEP_NUM_TASKS)" in log
    assert "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT" in log


@pytest.mark.skipif(torch.accelerator.is_available(), reason="for machines without an accelerator")
@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_accelerate_launch_starts_what_it_was_told_or_there_is_an_error(number, tmp_path):
    """On CPUs without MPI, it starts one process with any --num_processes."""
    script = tmp_path / "script.py"
    script.write_text(
        "from nystrom_models.training import create_accelerator\n"
        "print('processes:', create_accelerator().num_processes)\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_machines", "1"]
    command += ["--num_processes", str(number), "--mixed_precision", "no", str(script)]
    source = str(Path(nystrom_models.__file__).parents[1])
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER", "ACCELERATE"))}
    environment |= {"PYTHONPATH": os.pathsep.join([source, environment.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    if number == 1:
        assert done.returncode == 0 and "processes: 1" in done.stdout, done.stderr[-2000:]
    else:
        assert done.returncode != 0 and "torchrun --nproc_per_node" in done.stderr


def test_a_process_that_is_alone_already(monkeypatch, no_precision_yet):
    create_accelerator()
    # As `Dataset.map` with several processes does.
    monkeypatch.setattr(os, "environ", copy.deepcopy(os.environ))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"2 processes were launched \(WORLD_SIZE\).*ACCELERATE_USE_CPU=true"):
        create_accelerator()


@pytest.mark.filterwarnings("error:--mixed_precision")
def test_half_precision_that_is_slow_is_said(monkeypatch, no_precision_yet):
    monkeypatch.setattr(launch, "has_fast_bfloat16", lambda: False)
    with pytest.raises(UserWarning, match="this CPU has no instructions for bfloat16"):
        create_accelerator("bf16", cpu=True)
    monkeypatch.setattr(launch, "has_fast_bfloat16", lambda: True)
    create_accelerator("bf16", cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
    monkeypatch.setattr(launch, "has_fast_bfloat16", lambda: False)
    create_accelerator("no", cpu=True)


def test_a_precision_that_is_kept_is_said(monkeypatch, no_precision_yet, recwarn):
    monkeypatch.setattr(launch, "has_fast_bfloat16", lambda: True)
    create_accelerator("bf16", cpu=True)
    assert not recwarn
    with pytest.warns(
        UserWarning, match="computes in bf16, because an earlier run did.*--mixed_precision no, start a"
    ):
        create_accelerator()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    create_accelerator()
    assert not recwarn


def test_each_run_of_a_process_is_compiled_or_not(no_precision_yet):
    """As in a notebook, and in scripts that need the processes before the run."""
    plugin = TorchDynamoPlugin(backend="EAGER")
    for options, compiled in (({}, False), ({"dynamo_plugin": plugin}, True), ({}, False)):
        model = create_accelerator(cpu=True, **options).prepare(torch.nn.Linear(2, 2))
        assert is_compiled_module(model) == compiled
