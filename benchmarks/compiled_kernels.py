# SPDX-License-Identifier: Apache-2.0
"""The resources of the compiled Triton kernels, without a GPU: registers, shared memory, spills, barriers.

Nothing runs: Triton and its ptxas compile for any GPU on any machine. The host code that launches the kernels runs on
the CPU, so that each is compiled with the sizes and specialisations of a real forward and backward pass.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Bytes of shared memory that a thread block may have, by compute capability: A100; RTX 3090 (the same as RTX 4090,
# 8.9); H100; B200; RTX 5090.
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
# Columns of tensor memory of a multiprocessor of capability 10.0.
TENSOR_MEMORY = 512
# Bytes that a thread may spill from its registers: twice the maximum over all sizes, dtypes, options and capabilities.
# Tiles that are too large spill 5,000 and more.
STACK = 2048


class Case(NamedTuple):
    """Sizes and options of an attention.

    landmarks: M; 0 for causal linear attention. features: F of causal linear attention. dim: head size D. taps: T of
    the convolution, 0 for none.
    """

    dtype: str
    landmarks: int
    dim: int
    taps: int = 65
    features: int = 0

    @property
    def name(self) -> str:
        if self.features:
            return f"linear-{self.dtype}-{self.features}x{self.dim}"
        return f"{self.dtype}-{self.landmarks}x{self.dim}" + f"-{self.taps}taps" * (self.taps != 65)

    def attend(self, states: list[torch.Tensor], mask: torch.Tensor | None, weight: Any, dropout_p: float) -> Any:
        """The attention of states (B, H, N, D) by the kernels, or the reason why they do not apply."""
        from nystrom_models import kernels
        from nystrom_models.kernels.linear import dispatch

        if self.features:
            query, key = (self.with_features(tensor) for tensor in states[:2])
            inputs = dispatch.CausalInputs(query, key, states[2], mask)
            return inputs.why_not() or dispatch.compute(inputs)[0]
        options = {"num_landmarks": self.landmarks, "conv_weight": weight, "dropout_p": dropout_p}
        return kernels.why_not(*states, mask, **options) or kernels.nystrom_attention(*states, mask, **options)

    def with_features(self, states: torch.Tensor) -> torch.Tensor:
        """Positive features (B, H, N, F) in a model's layout."""
        states = torch.cat([states.exp(), (-states).exp()], dim=-1)[..., : self.features]
        return states.transpose(1, 2).contiguous().transpose(1, 2)


# Number of tokens: more than the largest number of landmarks.
LENGTH = 160

# The size of published models, the smallest tiles, and the largest of every dtype.
CASES = (
    Case("bfloat16", 64, 64),
    Case("float16", 16, 16, 5),
    Case("bfloat16", 128, 64),
    Case("float16", 64, 128),
    Case("float32", 64, 64),
    Case("float32", 128, 32),
    Case("float32", 32, 128),
    Case("bfloat16", 0, 64, 0, features=64),
    Case("float16", 0, 64, 0, features=128),
    Case("float32", 0, 64, 0, features=64),
)


OPTIONS = ("plain", "masked, dropout")


class Resources(NamedTuple):
    """The resources of a compiled kernel; all None if it does not compile.

    registers: per thread. shared: bytes of shared memory per block. tensor_memory: columns, 0 except for capability
    10.0. stack: bytes per thread, to which registers spill. barriers: in the PTX, each counted once, even in a loop.
    """

    registers: int | None = None
    shared: int | None = None
    tensor_memory: int | None = None
    stack: int | None = None
    barriers: int | None = None


class AbsentGPU:
    """The part of a Triton driver that compilation needs."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # the key under which compiled kernels are cached

    def get_current_stream(self, device: int) -> int:
        return 0


def measure_resources(kernel: Any) -> Resources:
    """The resources of a `CompiledKernel` of Triton."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    barriers = len(re.findall(r"\b(?:bar|barrier)\.sync\b", kernel.asm["ptx"]))
    return Resources(registers, kernel.metadata.shared, kernel.metadata.tmem_size or 0, stack, barriers)


def compile_case(capability: int, case: Case, options: str) -> list[tuple[str, Resources]]:
    """The kernels of a forward and a backward pass, with their resources; a kernel that is launched twice occurs
    twice.

    options: "plain", with neither mask nor dropout, or "masked, dropout", with both.
    """
    import triton
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from nystrom_models.kernels.device import DEVICE_TYPES

    if triton.knobs.runtime.interpret:
        raise RuntimeError("With TRITON_INTERPRET, kernels are not compiled: unset it.")
    compiled: list[tuple[str, Resources]] = []
    run: Callable = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **given):
        try:
            kernel = run(self, *arguments, grid=grid, warmup=True, **given)
        except Exception as error:  # compilers raise errors of many types
            print(f"{self.__name__}: {type(error).__name__}: {error}", file=sys.stderr)
            compiled.append((self.__name__, Resources()))
        else:
            compiled.append((self.__name__, measure_resources(kernel)))

    dtype = getattr(torch, case.dtype)
    states = [torch.randn(1, LENGTH, 2, case.dim).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    weight = torch.randn(2, 1, case.taps, 1).to(dtype).requires_grad_() if case.taps else None
    driver_before, on_cpu = driver._active, "cpu" in DEVICE_TYPES
    try:
        JITFunction.run = compile_only
        driver.set_active(AbsentGPU(capability))
        DEVICE_TYPES.add("cpu")
        mask, dropout_p = (None, 0.0) if options == "plain" else (torch.arange(LENGTH)[None] < LENGTH - 10, 0.1)
        case.attend(states, mask, weight, dropout_p).sum().backward()
    finally:
        JITFunction.run = run
        driver._active = driver_before
        if not on_cpu:
            DEVICE_TYPES.discard("cpu")
    return compiled


Table = dict[tuple[str, str, str], dict[int, Resources]]


def measure(capabilities: list[int], cases: list[Case], options: list[str], report: Callable[[str], None]) -> Table:
    """Resources by (kernel, case, options) and capability, without capabilities on which the case is refused.

    For a kernel that is compiled in two ways for one case, the larger of each number.
    """
    rows: Table = {}
    for case in cases:
        for capability in capabilities:
            if capability == 100 and case.landmarks > 64:
                continue  # refused, see `inputs.py`
            report(f"compiling {case.name} for capability {capability / 10}")
            for option in options:
                for kernel, found in compile_case(capability, case, option):
                    row = rows.setdefault((kernel.strip("_").removesuffix("_kernel"), case.name, option), {})
                    row[capability] = larger(row.get(capability, found), found)
    return rows


def faults(rows: Table) -> list[str]:
    """The kernels that do not compile, need more than a GPU has, or spill too much; empty if there are none."""
    found = []
    for (kernel, case, options), row in rows.items():
        for capability, taken in row.items():
            where = f"{kernel}, {case}, {options}, capability {capability / 10}"
            if taken.registers is None:
                found.append(f"{where}: does not compile")
                continue
            for name, most in (
                ("shared", SHARED_MEMORY[capability]),
                ("tensor_memory", TENSOR_MEMORY),
                ("stack", STACK),
            ):
                if getattr(taken, name) > most:
                    found.append(f"{where}: {name} {getattr(taken, name)}, above {most}")
    return found


def table(capabilities: list[int], rows: Table) -> str:
    """A Markdown table: a line for each kernel, case and options, a column for each capability."""
    heading = ["kernel", "case", "options", *(f"{capability / 10}" for capability in capabilities)]
    lines = [heading, ["---"] * 3 + ["---:"] * len(capabilities)]
    for (kernel, case_name, options), found in rows.items():
        lines.append([kernel, case_name, options, *(describe(found.get(capability)) for capability in capabilities)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def larger(first: Resources, second: Resources) -> Resources:
    if None in (first.registers, second.registers):
        return Resources()
    return Resources(*map(max, zip(first, second, strict=True)))


def describe(found: Resources | None) -> str:
    """registers / KiB of shared memory / bytes of stack / barriers, and columns of tensor memory if there are any."""
    if found is None:
        return ""
    if found.registers is None:
        return "does not compile"
    text = f"{found.registers} / {found.shared / 1024:.0f} / {found.stack} / {found.barriers}"
    return text + f" ({found.tensor_memory} columns)" * bool(found.tensor_memory)
