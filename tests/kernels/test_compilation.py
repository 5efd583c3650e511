# SPDX-License-Identifier: Apache-2.0
"""The kernels compile to machine code that fits on a GPU, which needs no GPU; the interpreter is more lenient."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compiled_kernels import CASES, SHARED_MEMORY, TENSOR_MEMORY

pytest.importorskip("triton.backends.nvidia", reason="no Triton for NVIDIA")

# Bytes that a thread may spill from its registers, by stage: about four times the most that any size, dtype, option and
# capability was seen to spill. Tiles that are too large spill 5,000 and more.
STACK = {"pseudo_inverse_fwd": 2048, "pseudo_inverse_bwd": 4096}
STACK_OF_OTHERS = 1024
