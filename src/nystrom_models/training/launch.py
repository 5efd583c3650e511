# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: all that were launched work together, or an error says what to set."""

import os
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, GradientAccumulationPlugin, InitProcessGroupKwargs, TorchDynamoPlugin

from .processor import has_fast_bfloat16

# MPI launchers on one machine do not set the address at which the processes meet: it is this machine.
_LOCAL_SIZES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")

# The variables for the number of processes of torchrun and `accelerate launch`, MPICH and Intel MPI, Open MPI, MVAPICH
# and srun.
_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")

# How long processes wait for one another. PyTorch's defaults, 10 minutes on GPUs and 30 on CPUs, are for one step: the
# others also wait while the main process tokenizes a corpus, generates a task or uploads a model.
PATIENCE = timedelta(days=1)


def launched_processes(environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """The number of processes that a launcher started, 1 without a launcher, and the variable that contains it.

    environment: the variables; None for those of this process.
    """
    # Not as a default argument: `Dataset.map` with several processes leaves another object at `os.environ`.
    environment = os.environ if environment is None else environment
    for name in _SIZES:
        if environment.get(name, "").isdecimal() and int(environment[name]) > 1:
            return int(environment[name]), name
    return 1, ""


def _dropped_processes() -> bool:
    """Whether `accelerate launch` was asked for several processes but started one, as it does on CPUs without MPI.
    Then it sets a port at which processes meet, but not their number."""
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and "MASTER_PORT" in os.environ
    return launched and not any(name in os.environ for name in _SIZES)


# Environment variables that request sharded training, and Accelerate's type for each.
_SHARDING = {"ACCELERATE_USE_DEEPSPEED": DistributedType.DEEPSPEED, "ACCELERATE_USE_FSDP": DistributedType.FSDP}


def create_accelerator(mixed_precision: str | None = None, cpu: bool = False, **options: Any) -> Accelerator:
    """An `Accelerator` for [`train`], over all processes that were launched; `options` are passed to it.

    The processes wait for one another for a day, unless `kwargs_handlers` has an `InitProcessGroupKwargs`.

    On machines without a GPU, several processes work together on the CPU, by gloo or MPI. Without this, Accelerate
    would let each of them train alone.

    Raises:
        RuntimeError: if the launched processes do not find each other, if `accelerate launch` started fewer processes
            than requested, or if sharding was requested but Accelerate would not shard.
    """
    if _dropped_processes() and not PartialState._shared_state:
        raise RuntimeError(
            "`accelerate launch` was asked for several processes, but started only this one: on CPUs it starts "
            "several only with MPI (--mpirun_hostfile). Use torchrun --nproc_per_node N, or --num_processes 1."
        )
    size, variable = launched_processes()
    sharding = [kind for name, kind in _SHARDING.items() if os.environ.get(name, "").lower() == "true"]
    if size > 1 and not sharding and not PartialState._shared_state and not torch.accelerator.is_available():
        cpu = True
        if any(os.environ.get(name) == str(size) for name in _LOCAL_SIZES):
            os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    handlers = list(options.pop("kwargs_handlers", None) or ())
    if not any(isinstance(handler, InitProcessGroupKwargs) for handler in handlers):
        handlers.append(InitProcessGroupKwargs(timeout=PATIENCE))
    accelerator = Accelerator(
        kwargs_handlers=handlers,
        # The loop counts micro-batches itself: a step may have any number of them.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        mixed_precision=mixed_precision,
        cpu=cpu,
        **options,
    )
    # Accelerate keeps what the first accelerator of a process was told, and ignores the plugins of later ones.
    accelerator.state.dynamo_plugin = options.get("dynamo_plugin") or TorchDynamoPlugin()
    by_default = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if mixed_precision is None and accelerator.mixed_precision != by_default and not sharding:
        warnings.warn(
            f"This process computes in {accelerator.mixed_precision}, because an earlier run did: Accelerate keeps "
            f"the precision. For --mixed_precision {by_default}, start a new process.",
            stacklevel=2,
        )
    if sharding and accelerator.distributed_type not in sharding:
        raise RuntimeError(
            f"{sharding[0].value} was requested, but Accelerate would train without it: it shards only on GPUs, in "
            "processes that torchrun or `accelerate launch` started. Use another file of configs/accelerate/."
        )
    if accelerator.device.type == "cpu" and accelerator.mixed_precision == "bf16" and not has_fast_bfloat16():
        warnings.warn(
            "--mixed_precision bf16 makes training slower here: this CPU has no instructions for bfloat16. Use "
            "--mixed_precision no.",
            stacklevel=2,
        )
    if size != accelerator.num_processes and (size > 1 or accelerator.num_processes > 1):
        hint = (
            "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, or start them by torchrun or `accelerate "
            "launch`, which do"
            if variable == "SLURM_STEP_NUM_TASKS"
            else "set ACCELERATE_USE_CPU=true to train on CPUs, or start them by torchrun or `accelerate launch`"
        )
        raise RuntimeError(
            f"{size} processes were launched ({variable or 'no WORLD_SIZE'}), but this one finds "
            f"{accelerator.num_processes}: each would train its own model and write to the same --output_dir. To fix "
            f"this, {hint}."
        )
    return accelerator


def all_processes(mixed_precision: str | None = None) -> PartialState:
    """The processes of a run, which find each other if no accelerator has been made yet."""
    if not PartialState._shared_state:
        create_accelerator(mixed_precision)
    return PartialState()
