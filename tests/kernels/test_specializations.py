# SPDX-License-Identifier: Apache-2.0
"""With any batch, a model needs one compiled variant of each kernel: nothing is compiled during an epoch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia", reason="no Triton for NVIDIA")


def test_batches_and_lengths_share_their_kernels_with_the_first_try():
    """For many batch sizes, lengths, iterations and probabilities of dropout, each kernel is compiled once; the first
    try compiles no other."""
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.specializations"],
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    counts = json.loads(result.stdout)
    assert len(counts) == 8
    for options, kernels in counts.items():
        if options.startswith("linear"):
            assert {"_causal_fwd_kernel", "_causal_bwd_dq_kernel", "_causal_bwd_dkv_kernel"} <= set(kernels)
        else:
            assert {"_landmarks_fwd_kernel", "_pseudo_inverse_bwd_kernel", "_merge_kernel"} <= set(kernels)
        for name, (before, after) in kernels.items():
            # The sums of the forward pass and those of the backward pass are two machine codes of one kernel.
            count = 2 if name == "_part_sums_kernel" else 1
            assert (before, after) == (count, count), (options, name)
