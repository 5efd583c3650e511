# SPDX-License-Identifier: Apache-2.0
"""Compiles, for a GPU that need not be there, all kernels that a forward and a backward pass launch, and runs none.

    python tests/kernels/cross_compile.py ARCHITECTURE DTYPE LANDMARKS HEAD_SIZE

prints {kernel: {"shared": bytes of shared memory, "stack": bytes a thread spills}} as JSON. ARCHITECTURE: 80, 90, ...
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from nystrom_models import kernels


class AbsentGPU:
    """As much of a driver as compilation asks for."""

    def __init__(self, architecture: int):
        self.architecture = architecture

    def get_current_target(self):
        return GPUTarget("cuda", self.architecture, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def stack(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage)[1])


def main(architecture: str, dtype: str, landmarks: str, dim: str) -> None:
    compiled = {}
    run = JITFunction.run

    def compile_only(self, *arguments, grid, warmup, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        resources = compiled.setdefault(self.__name__, {"shared": 0, "stack": 0})
        resources["shared"] = max(resources["shared"], kernel.metadata.shared)
        resources["stack"] = max(resources["stack"], stack(kernel.asm["cubin"]))

    JITFunction.run = compile_only
    driver.set_active(AbsentGPU(int(architecture)))
    kernels._devices.add("cpu")
    states = [torch.randn(1, 160, 2, int(dim)).to(getattr(torch, dtype)).transpose(1, 2) for _ in range(3)]
    states.append(torch.randn(2, 1, 65, 1).to(states[0].dtype))
    states = [tensor.requires_grad_() for tensor in states]
    for mask, dropout_p in ((None, 0.0), (torch.arange(160)[None] < 150, 0.1)):
        *heads, weight = states
        options = {"num_landmarks": int(landmarks), "conv_weight": weight, "dropout_p": dropout_p}
        kernels.nystrom_attention(*heads, mask, **options).sum().backward()
    print(json.dumps(compiled))


if __name__ == "__main__":
    main(*sys.argv[1:])
