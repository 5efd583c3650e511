# SPDX-License-Identifier: Apache-2.0
"""Triton kernels that replace PyTorch's operations on NVIDIA GPUs, one folder for each family of attention.

A model uses them with `attn_implementation="nystrom_triton"` or `"linear_triton"` (see `interface.py`), the default on
a GPU; `why_not` says when those for Nyström attention do not apply. Importing this package needs neither Triton nor a
GPU. The kernels are compiled at the first call with given options, compared with PyTorch's operations once, and not
used if they fail or differ. Sums have a fixed order: the same inputs give the same result on the same device. With
another batch size or on another device, Nyström attention may split its sums differently.

They can be captured in a CUDA graph if the same call ran once before, on a stream that the capture waits for:

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(**batch)  # compiles the kernels
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = model(**batch)
"""

from .device import why_not_on
from .linear.dispatch import causal_linear_attention_if_possible
from .nystrom.dispatch import nystrom_attention, nystrom_attention_if_possible, why_not

__all__ = [
    "causal_linear_attention_if_possible",
    "nystrom_attention",
    "nystrom_attention_if_possible",
    "why_not",
    "why_not_on",
]
