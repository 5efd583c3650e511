# SPDX-License-Identifier: Apache-2.0
"""Exact softmax attention: the back ends of PyTorch, the textbook form, and a float64 reference in linear memory."""

import contextlib
import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.environment import free_memory
from benchmarks.registry import Inputs, Prepared, Setting, Workload

QUERY_CHUNK = 256


def split_heads(states: Tensor, num_heads: int) -> Tensor:
    """(B, N, H·D) -> (B, H, N, D), a view."""
    return states.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(states: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, H·D)."""
    return states.transpose(1, 2).flatten(-2)


def attend_to_given(function, setting: Setting, inputs: Inputs) -> Tensor:
    """Attention from given queries, keys and values: (B, N, H·D)."""
    return merge_heads(function(*(split_heads(inputs[name], setting.num_heads) for name in ("query", "key", "value"))))


def softmax_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    """Attention by its formula, which stores the N×K matrix. If causal, the last query is that of the last key."""
    scores = torch.matmul(query, key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(later.triu(1 + key.shape[-2] - query.shape[-2]), float("-inf"))
    return torch.matmul(scores.softmax(dim=-1), value)


def softmax_attention_chunked(query: Tensor, key: Tensor, value: Tensor, causal: bool = False) -> Tensor:
    """`softmax_attention` in chunks of rows, recomputed in the backward pass: the reference for any length."""
    chunks, length = [], query.shape[-2]
    for start in range(0, length, QUERY_CHUNK):
        end = min(start + QUERY_CHUNK, length)
        seen = slice(0, end if causal else None)
        tensors = query[..., start:end, :], key[..., seen, :], value[..., seen, :]
        chunks.append(checkpoint(softmax_attention, *tensors, causal, use_reentrant=False))
    return torch.cat(chunks, dim=-2)


def on_backend(backend: SDPBackend | None, causal: bool = False):
    """`scaled_dot_product_attention` with a back end; None for PyTorch's own choice."""

    def attention(query, key, value):
        with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    return attention


def cuda_only(setting) -> str | None:
    return None if setting.device == "cuda" else "exists on CUDA devices only"


def needs_scores(setting) -> str | None:
    """Refuses if the scores, their softmax and, in the backward pass, a gradient do not fit into memory: the process
    would be killed."""
    matrix = setting.batch_size * setting.num_heads * setting.length**2 * setting.dtype.itemsize
    stored = (3 if setting.backward else 2) * matrix
    free = free_memory(setting.device)
    if stored < 0.9 * free:
        return None
    return f"would store {stored / 2**30:.1f} GiB of scores, but {free / 2**30:.1f} GiB are free"


AGAINST_EXACT = "against exact attention, which is what it computes"


def add_contenders(
    workload: Workload, attend=attend_to_given, causal: bool = False, names: Sequence[str] | None = None
) -> None:
    """Exact attention by each implementation, checked in float64.

    attend: runs an attention function of queries, keys and values on the workload's inputs. names: of the contenders;
        None for all.
    """
    implementations = {
        "exact-sdpa": (on_backend(None, causal), None),
        "exact-softmax": (functools.partial(softmax_attention, causal=causal), needs_scores),
        "exact-flash": (on_backend(SDPBackend.FLASH_ATTENTION, causal), cuda_only),
        "exact-cudnn": (on_backend(SDPBackend.CUDNN_ATTENTION, causal), cuda_only),
        "exact-efficient": (on_backend(SDPBackend.EFFICIENT_ATTENTION, causal), cuda_only),
    }

    def reference(setting: Setting, inputs: Inputs) -> Tensor:
        return attend(functools.partial(softmax_attention_chunked, causal=causal), setting, inputs)

    for name in names or implementations:
        function, refuses = implementations[name]

        @workload.contender(name, reference=reference, refuses=refuses, judged=AGAINST_EXACT)
        def exact(setting, inputs, function=function):
            return Prepared(lambda: attend(function, setting, inputs))
