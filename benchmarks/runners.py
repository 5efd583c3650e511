# SPDX-License-Identifier: Apache-2.0
"""Runs a contender to check and time it: in this process, or in a process of its own.

Memory that one contender leaves to the allocator changes the time of the next one's allocations. In a process of its
own, each contender has a fresh allocator; all have the same kind of allocator with the same settings.
"""

import importlib
import io
import json
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.registry import WORKLOADS, Contender, Inputs, Setting, Workload

# Processes are forked from a server that has only imported the libraries: it has no threads and has not started CUDA.
CONTEXT = multiprocessing.get_context("forkserver")
LIBRARIES = "benchmarks.cli"
CONTEXT.set_forkserver_preload([LIBRARIES])


def prepare_inputs(workload: Workload, setting: Setting) -> Inputs:
    """The inputs of a workload, the same in every process."""
    generator = torch.Generator().manual_seed(setting.seed)
    inputs = {}
    for name, tensor in workload.inputs(setting, generator).items():
        if tensor.is_floating_point():
            tensor = tensor.to(setting.device, setting.dtype).requires_grad_(setting.backward)
        else:
            tensor = tensor.to(setting.device)
        inputs[name] = tensor
    return inputs


def gradient_like(output: Tensor, seed: int) -> Tensor:
    """The incoming gradient of the backward pass, the same for every contender and its reference."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(output.shape, generator=generator).to(output.device, output.dtype)


def outputs_and_gradients(call: Callable[[], Tensor], inputs: Inputs, setting: Setting) -> dict[str, Tensor]:
    """The output and, with `setting.backward`, the gradient of each input that the call depends on."""
    if not setting.backward:
        with torch.no_grad():
            return {"output": call()}
    output = call()
    leaves = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    if not leaves:
        return {"output": output.detach()}
    gradients = torch.autograd.grad(
        output, list(leaves.values()), gradient_like(output, setting.seed), allow_unused=True
    )
    found = {f"gradient of {name}": grad for name, grad in zip(leaves, gradients, strict=True) if grad is not None}
    return {"output": output.detach(), **found}


def synchronize(device: str) -> None:
    """Waits for the device, if it is a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_a_call(call: Callable[[], object], calls: int, device: str) -> float:
    """The mean time of `calls` consecutive calls."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def peak_memory(call: Callable[[], object], device: str) -> int:
    """The most bytes that one call held at once, beyond those allocated before, according to PyTorch's allocator."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("name") == "[memory]"]
    held = peak = 0
    alive: set[int] = set()
    for event in sorted(events, key=lambda event: (event["ts"], event["args"]["Ev Idx"])):
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        if size > 0:
            alive.add(address)
        elif address in alive:
            alive.remove(address)
        else:
            continue  # allocated before this call
        held += size
        peak = max(peak, held)
    return peak


def cpu_seconds() -> float:
    """CPU time that this process has used so far, over all cores."""
    used = os.times()
    return used.user + used.system


class Runner:
    """Builds and calls a contender in this process."""

    def __init__(self, workload: Workload, contender: Contender, setting: Setting):
        self.setting, self.inputs = setting, prepare_inputs(workload, setting)
        self.prepared = contender.build(setting, self.inputs)
        self._call: Callable[[], object] | None = None

    def outputs(self) -> dict[str, Tensor]:
        """Output and gradients of the timed function."""
        return outputs_and_gradients(self.prepared.call, self.inputs, self.setting)

    def verified(self) -> dict[str, Tensor] | None:
        """Output and gradients of the function that is compared with the reference, if it is not the timed one."""
        if self.prepared.verify is None:
            return None
        return outputs_and_gradients(self.prepared.verify, self.inputs, self.setting)

    def call(self) -> object:
        """Runs what is measured: the forward pass, or forward and backward to every input and parameter."""
        if self._call is None:
            self._call = self._timed_call()
        return self._call()

    def _timed_call(self) -> Callable[[], object]:
        if not self.setting.backward:
            return torch.no_grad()(self.prepared.call)
        leaves = [tensor for tensor in (*self.inputs.values(), *self.prepared.parameters) if tensor.requires_grad]
        incoming = gradient_like(self.prepared.call(), self.setting.seed)
        return lambda: torch.autograd.grad(self.prepared.call(), leaves, incoming, allow_unused=True)

    def peak_bytes(self) -> int:
        """The most bytes that one call holds at once."""
        self.call()
        return peak_memory(self.call, self.setting.device)

    def seconds(self, calls: int) -> float:
        """The mean time of `calls` calls."""
        return seconds_a_call(self.call, calls, self.setting.device)

    def cpu_seconds(self) -> float:
        """CPU time that the contender has used in another process."""
        return 0.0

    def close(self) -> None:
        """Ends the contender's own process, if it has one."""


class ContenderFailed(Exception):
    """An error in the process of a contender.

    Args:
        reason: the error in one line.
        details: the traceback.
    """

    def __init__(self, reason: str, details: str = ""):
        super().__init__(f"{reason}\n{details}" if details else reason)
        self.reason = reason


def reason(error: Exception) -> str:
    """An error in one line."""
    if isinstance(error, ContenderFailed):
        return error.reason
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _serve(connection: Connection, workload: str, contender: str, setting: Setting, threads: int) -> None:
    """Answers the calls of a [`RemoteRunner`] until it closes the connection."""
    # Registers the workloads, if the server was started without this package.
    importlib.import_module(LIBRARIES)
    torch.set_num_threads(threads)
    runner = None
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            if runner is None:
                runner = Runner(WORKLOADS[workload], WORKLOADS[workload].contenders[contender], setting)
            answer = cpu_seconds() if name == "cpu_seconds" else getattr(runner, name)(*arguments)
            packed = io.BytesIO()
            torch.save(answer, packed)
            connection.send((packed.getvalue(), None, None))
        except Exception as error:
            connection.send((None, reason(error), traceback.format_exc()))


class RemoteRunner:
    """Builds and calls a contender in a process of its own; the workload must be a registered one."""

    def __init__(self, workload: Workload, contender: Contender, setting: Setting):
        self.connection, theirs = CONTEXT.Pipe()
        arguments = (theirs, workload.name, contender.name, setting, torch.get_num_threads())
        self.process = CONTEXT.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            self.connection.send((name, arguments))
            packed, why, details = self.connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self.process.join()
            raise ContenderFailed(f"its process ended with exit code {self.process.exitcode}") from error
        if why is not None:
            raise ContenderFailed(why, details)
        return torch.load(io.BytesIO(packed), weights_only=True)

    def outputs(self) -> dict[str, Tensor]:
        return self._ask("outputs")

    def verified(self) -> dict[str, Tensor] | None:
        return self._ask("verified")

    def peak_bytes(self) -> int:
        return self._ask("peak_bytes")

    def seconds(self, calls: int) -> float:
        return self._ask("seconds", calls)

    def cpu_seconds(self) -> float:
        return self._ask("cpu_seconds")

    def close(self) -> None:
        self.connection.close()
        self.process.join(10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


AnyRunner = Runner | RemoteRunner
