# SPDX-License-Identifier: Apache-2.0
"""The kernels compile to machine code, which needs no GPU; the interpreter of the other tests is more lenient."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia", reason="no Triton for NVIDIA")

# Of a thread block on any GPU of capability 8.0 or newer: 8.6 and 8.9 have the least, 9.0 has 227.
SHARED_MEMORY = 99 * 1024
# What a thread spills from its registers, in bytes: most kernels little or nothing, 2,352 the gradient of
# `token_attention` with 128 landmarks and dropout. Tiles that are far too large spill 5,000 and more.
STACK = 3072

SIZES = [
    pytest.param("80", "bfloat16", 16, 16, id="80-bfloat16-16x16"),
    *(
        pytest.param(
            architecture,
            dtype,
            count,
            dim,
            id=f"{architecture}-{dtype}-{count}x{dim}",
            marks=pytest.mark.slow,
        )
        for architecture, dtype, count, dim in (
            ("80", "float32", 64, 64),
            ("90", "bfloat16", 64, 64),
            ("80", "bfloat16", 128, 64),
            ("80", "float16", 64, 128),
        )
    ),
]


@pytest.mark.parametrize(("architecture", "dtype", "count", "dim"), SIZES)
def test_compiles_and_fits(architecture, dtype, count, dim, tmp_path):
    script = Path(__file__).with_name("cross_compile.py")
    result = subprocess.run(
        [sys.executable, script, architecture, dtype, str(count), str(dim)],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    compiled = json.loads(result.stdout)
    assert len(compiled) == 10
    for name, resources in compiled.items():
        assert resources["shared"] <= SHARED_MEMORY, name
        assert resources["stack"] <= STACK, name
