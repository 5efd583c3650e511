# SPDX-License-Identifier: Apache-2.0
"""Kernels are compared with PyTorch's operations, once in a process, before a model relies on them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# Largest difference over largest value, of outputs and gradients. Rounding errors are far smaller, faults larger.
TOLERANCES = {torch.float32: 1e-2, torch.bfloat16: 1e-1, torch.float16: 5e-2}

# The fault found (None: no fault), for each family's first try and the facts that its compiled kernels depend on.
_faults: dict[tuple[Any, ...], str | None] = {}


# A constant in graphs: torch.compile calls it while it traces, with plain arguments only.
@torch.compiler.assume_constant_result
def find_fault(attempt: Callable[..., str | None], device: torch.device, *facts: Any) -> str | None:
    """What the first call of attempt(device, *facts) returned or raised.

    Raises RuntimeError if the first call happens during the capture of a CUDA graph.
    """
    key = (attempt, device, *facts)
    if key not in _faults:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("Run the model once before its CUDA graph is captured: the kernels are compiled then.")
        no_autocast = torch.autocast(device.type, enabled=False)
        # What the attempt draws must not change the dropout of the model's first step.
        same_random_numbers = torch.random.fork_rng([device] if device.type == "cuda" else [])
        try:
            with torch.inference_mode(False), no_autocast, same_random_numbers:
                _faults[key] = attempt(device, *facts)
        except torch.OutOfMemoryError:
            return f"there is no memory on {device} for a first try of them"  # not kept: memory may be free later
        except Exception as error:  # compilers and drivers raise errors of many types
            _faults[key] = f"a first try on {device} failed ({type(error).__name__}: {str(error)[:200]})"
    return _faults[key]


def difference(
    device: torch.device, ours: Iterable[Tensor], theirs: Iterable[Tensor], dtype: torch.dtype
) -> str | None:
    """How our results differ from those of PyTorch's operations; None if they agree."""
    for mine, expected in zip(ours, theirs, strict=True):
        mine, expected = mine.detach().float(), expected.detach().float()
        found = float((mine - expected).abs().max() / expected.abs().max())
        if not found <= TOLERANCES[dtype]:
            return f"a first try on {device} differs from PyTorch's operations by {found:.1%}"
    return None
