# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels, without a GPU, and checks that they fit on one; the interpreter does not check this.

The sizes are those of published models and the largest, on the smallest GPUs. All sizes and options for all GPUs:
`python -m benchmarks kernels --compiled`, which fails with the same bounds.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compiled_kernels import STACK, TENSOR_MEMORY, Resources, faults

pytest.importorskip("triton.backends.nvidia", reason="no Triton for NVIDIA")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("case", "capability"),
    [
        pytest.param("float16-16x16-5taps", 86, marks=pytest.mark.slow),
        pytest.param("bfloat16-64x64", 86, marks=pytest.mark.slow),
        pytest.param("bfloat16-64x64", 90, marks=pytest.mark.slow),
        pytest.param("bfloat16-128x64", 120, marks=pytest.mark.slow),
        pytest.param("bfloat16-64x64", 100, marks=pytest.mark.slow),
        pytest.param("float32-32x128", 80, marks=pytest.mark.slow),
        pytest.param("linear-bfloat16-64x64", 120, marks=pytest.mark.slow),
        pytest.param("linear-float32-64x64", 80, marks=pytest.mark.slow),
    ],
)
def test_compiles_and_fits(case, capability, tmp_path):
    """With mask and dropout, forward and backward."""
    command = ["kernels", "--compiled", "--options", "masked, dropout"]
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks", *command, "--cases", case, "--capabilities", str(capability)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    stages = ["landmarks", "landmark_attention", "pseudo_inverse", "token_attention"]
    for name in [f"{stage}_{way}" for stage in (["causal"] if "linear" in case else stages) for way in ("fwd", "bwd")]:
        assert f"| {name}" in result.stdout, name


@pytest.mark.parametrize(
    ("taken", "word"),
    [
        (Resources(), "does not compile"),
        (Resources(255, 100 << 10, 0, 0, 3), "shared"),
        (Resources(255, 0, 0, STACK + 1, 3), "stack"),
        (Resources(255, 0, TENSOR_MEMORY + 1, 0, 3), "tensor_memory"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_a_fault(taken, word):
    key = ("kernel", "case", "plain")
    assert not faults({key: {86: Resources(255, 99 << 10, TENSOR_MEMORY, STACK, 9)}})
    (fault,) = faults({key: {86: taken}})
    assert word in fault and "8.6" in fault
