# SPDX-License-Identifier: Apache-2.0
"""Real processes that start fast: forked from a server that has only imported the libraries."""

import contextlib
import multiprocessing
import os
import socket
import sys
import time
from multiprocessing.connection import wait
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["nystrom_models.training.finetuning", "nystrom_models.training.pretraining"])


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def _call(function, arguments, environment, log):
    multiprocessing.set_start_method("fork", force=True)  # of data loaders' workers: the default of Linux
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    import torch

    torch.set_num_threads(1)
    function(*arguments)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def start(function, arguments, folder, num_processes=1, environment=None):
    """Starts a function in processes with the environment of `torchrun`; returns them and their logs."""
    port, processes, logs = str(free_port()), [], []
    for rank in range(num_processes):
        here = dict(environment or {})
        if num_processes > 1:
            here |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_processes)}
            here |= {"LOCAL_WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        log = Path(folder, f"process{rank}.log")
        log.touch()
        process = CONTEXT.Process(target=_call, args=(function, arguments, here, str(log)))
        process.start()
        processes.append(process)
        logs.append(log)
    return processes, logs


def finish(processes, timeout=240):
    """The exit codes; if one process fails, the others are ended, as with `torchrun`."""
    left, until = list(processes), time.monotonic() + timeout
    while left:
        wait([process.sentinel for process in left], timeout=max(0, until - time.monotonic()))
        left = [process for process in left if process.exitcode is None]
        if time.monotonic() >= until or any(process.exitcode for process in processes):
            for process in left:
                process.kill()
            for process in processes:
                process.join()
            break
    return [process.exitcode for process in processes]


def run(function, *arguments, folder, num_processes=1, environment=None, timeout=240):
    """Exit codes and what the processes printed."""
    processes, logs = start(function, arguments, folder, num_processes, environment)
    try:
        codes = finish(processes, timeout)
    finally:
        for process in processes:
            with contextlib.suppress(ValueError):
                process.kill()
    return codes, "".join(log.read_text(encoding="utf-8") for log in logs)
