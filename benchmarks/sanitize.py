# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels under NVIDIA's compute-sanitizer, at the largest sizes. It finds accesses out of bounds, races,
barriers that not all threads reach, and memory that is read before it is written.

    python -m benchmarks sanitize                      runs all tools, and prints a table
    python -m benchmarks.sanitize DEVICE CASE...       runs these cases, under a tool or without one
"""

import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.compiled_kernels import CASES, OPTIONS, Case

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
PROGRAM = "compute-sanitizer"
# Number of tokens: several blocks and parts, the last not full. A tool makes a kernel ten to a hundred times slower.
LENGTH = 333


def attend(case: Case, device: str) -> str:
    """Runs forward and backward passes with each of `OPTIONS`; returns the gradients' sum, or why kernels refuse."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, case.dtype)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    states = [draw(2, LENGTH, 2, case.dim).transpose(1, 2).requires_grad_() for _ in range(3)]
    weight = (draw(2, 1, case.taps, 1) / case.taps**0.5).requires_grad_() if case.taps else None
    lengths = torch.tensor([[LENGTH], [LENGTH - 150]], device=device)
    total = 0.0
    for options in OPTIONS:
        masked = options != "plain"
        mask = torch.arange(LENGTH, device=device) < lengths if masked else None
        out = case.attend(states, mask, weight, 0.1 if masked else 0.0)
        if isinstance(out, str):
            return f"refused on this GPU: {out}"
        leaves = [*states, weight] if weight is not None else states
        total += sum(float(grad.float().sum()) for grad in torch.autograd.grad(out.float().square().sum(), leaves))
    if not math.isfinite(total):
        raise FloatingPointError(f"{case.name}: a gradient is not finite")
    return f"the gradients' sum is {total:.6g}"


def environment() -> dict[str, str]:
    """Variables that give each tensor its own allocation: a tool cannot check tensors in PyTorch's large blocks."""
    return os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def summary(output: str) -> str:
    """The counts in the last line of a tool's output."""
    found = re.findall(r"SUMMARY: (.*)", output)
    return found[-1].strip() if found else "no summary"


def run(cases: list[Case], device: str, seconds: float, say: Callable[[str], None]) -> int:
    """Prints a table with a line for each tool, and returns how many runs found something, failed or were not started.

    A tool checks all cases in one process, because it takes long to start. On a CPU the kernels are interpreted
    without a tool, as a test run.
    """
    program = shutil.which(PROGRAM) if device == "cuda" else None
    if device == "cuda" and program is None:
        say(f"{PROGRAM} is not on the PATH: it comes with the CUDA toolkit")
        return 1
    names = [case.name for case in cases]
    say(f"{', '.join(names)}; {LENGTH} tokens, forward and backward, {' and '.join(OPTIONS)}\n")
    say("| tool | found | s |")
    say("| --- | --- | ---: |")
    faults, start = 0, time.perf_counter()
    for tool in ("none", *(TOOLS if program else ())):  # without a tool it compiles the kernels
        before = time.perf_counter()
        command = [sys.executable, "-m", "benchmarks.sanitize", device, *names]
        if tool != "none":
            command = [program, "--tool", tool, "--error-exitcode", "99", *command]
        left = max(1.0, seconds - (before - start))
        try:
            done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            found, failed = "not finished in time: give fewer --cases", True
        else:
            failed = done.returncode != 0
            found = summary(done.stdout) if tool != "none" else "ran"
            if failed and done.returncode != 99:
                found = (done.stderr.strip().splitlines() or ["failed"])[-1]
        faults += failed
        say(f"| {tool} | {found} | {time.perf_counter() - before:.0f} |")
    return faults


def main(device: str, *names: str) -> None:
    from nystrom_models.kernels.device import DEVICE_TYPES

    DEVICE_TYPES.add(device)
    for case in CASES:
        if case.name in names:
            print(f"{case.name}: {attend(case, device)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
