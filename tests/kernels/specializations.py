# SPDX-License-Identifier: Apache-2.0
"""Prints, as JSON, how many compiled variants each kernel needs for batches of many sizes, without compiling any.

Triton compiles a kernel anew for each specialization of its arguments. Run without TRITON_INTERPRET.
"""

import json
from collections import defaultdict

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.compiled_kernels import AbsentGPU
from nystrom_models import kernels
from nystrom_models.kernels.device import DEVICE_TYPES
from nystrom_models.kernels.linear import dispatch as linear
from nystrom_models.kernels.nystrom import dispatch, first_try
from nystrom_models.kernels.nystrom.inputs import AttentionInputs

HEADS, DIM, LANDMARKS, TAPS = 12, 64, 64, 65
# 1 and multiples of 16 are what Triton specializes by default.
SIZES = [(1, 65), (1, 128), (2, 97), (16, 256), (3, 2049)]


def attend(batch: int, length: int, dtype: torch.dtype, masked: bool, iterations: int) -> AttentionInputs:
    states = [torch.zeros(batch, length, HEADS, DIM, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    return AttentionInputs(
        *states,
        torch.arange(length).expand(batch, -1) < length - 1 if masked else None,
        num_landmarks=LANDMARKS,
        pinv_iterations=iterations,
        conv_weight=torch.zeros(HEADS, 1, TAPS, 1, dtype=dtype, requires_grad=True),
        dropout_p=0.1 + 0.01 * batch if masked else 0.0,
    )


def attend_linearly(batch: int, length: int, dtype: torch.dtype, masked: bool, first: bool) -> linear.CausalInputs:
    """first: whether without a state of tokens before."""
    states = [torch.zeros(batch, length, HEADS, DIM, dtype=dtype).transpose(1, 2).requires_grad_() for _ in range(3)]
    return linear.CausalInputs(
        *states,
        torch.arange(length).expand(batch, -1) < length - 1 if masked else None,
        None if first else torch.zeros(batch, HEADS, DIM, DIM + 1),
    )


def main() -> None:
    found = defaultdict(set)
    run = JITFunction.run

    def remember(self, key, *_):
        found[self.__name__].add(key)
        return self

    JITFunction._do_compile = remember
    JITFunction.run = lambda self, *arguments, grid, warmup, **options: run(
        self, *arguments, grid=grid, warmup=True, **options
    )
    driver.set_active(AbsentGPU(80))
    DEVICE_TYPES.add("cpu")
    counts = {}
    for dtype in (torch.bfloat16, torch.float32):
        for masked in (False, True):
            found.clear()
            for batch, length in SIZES:
                for iterations in (1, 6):
                    inputs = attend(batch, length, dtype, masked, iterations)
                    assert inputs.why_not() is None, inputs.why_not()
                    dispatch.compute(inputs).sum().backward()
            name = f"{dtype}, {'masked, dropout' if masked else 'plain'}"
            before = {kernel: len(keys) for kernel, keys in found.items()}
            # The first try runs the same kernels as the model; its results are undefined, because nothing was
            # compiled.
            first_try.fault(inputs, dispatch.compute)
            counts[name] = {kernel: [before.get(kernel, 0), len(keys)] for kernel, keys in found.items()}
            found.clear()
            for batch, length in SIZES:
                for first in (False, True):
                    given = attend_linearly(batch, length, dtype, masked, first)
                    assert given.why_not() is None, given.why_not()
                    linear.compute(given)[0].sum().backward()
            before = {kernel: len(keys) for kernel, keys in found.items()}
            linear._try(torch.device("cpu"), dtype, DIM, DIM, masked, backward=True)
            counts[f"linear, {name}"] = {kernel: [before.get(kernel, 0), len(keys)] for kernel, keys in found.items()}
    assert kernels.why_not_on(torch.device("cpu")) is None
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
