# SPDX-License-Identifier: Apache-2.0
"""Exact softmax attention: the back ends of PyTorch, the textbook form, and a float64 reference in linear memory."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from benchmarks.environment import free_memory

QUERY_CHUNK = 256


def split_heads(states: Tensor, num_heads: int) -> Tensor:
    """(B, N, H·D) -> (B, H, N, D), a view."""
    return states.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(states: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, H·D)."""
    return states.transpose(1, 2).flatten(-2)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention by its formula, which stores the N×N matrix."""
    scores = torch.matmul(query, key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    return torch.matmul(scores.softmax(dim=-1), value)


def softmax_attention_chunked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """`softmax_attention` in chunks of rows, recomputed in the backward pass: the reference for any length."""
    chunks = [
        checkpoint(softmax_attention, chunk, key, value, use_reentrant=False)
        for chunk in query.split(QUERY_CHUNK, dim=-2)
    ]
    return torch.cat(chunks, dim=-2)


def on_backend(backend: SDPBackend | None):
    """`scaled_dot_product_attention` with a back end; None for PyTorch's own choice."""
    if backend is None:
        return F.scaled_dot_product_attention

    def attention(query, key, value):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value)

    return attention


def cuda_only(setting) -> str | None:
    return None if setting.device == "cuda" else "exists on CUDA devices only"


def needs_scores(setting) -> str | None:
    """Refuses if the scores and their softmax do not fit into memory, because the process would be killed."""
    matrix = setting.batch_size * setting.num_heads * setting.length**2 * setting.dtype.itemsize
    free = free_memory(setting.device)
    if 2 * matrix < 0.9 * free:
        return None
    return f"would store {2 * matrix / 2**30:.1f} GiB of scores, but {free / 2**30:.1f} GiB are free"


AGAINST_EXACT = "against exact attention, which is what it computes"

# name, attention function, refusal
EXACT = (
    ("exact-sdpa", on_backend(None), None),
    ("exact-softmax", softmax_attention, needs_scores),
    ("exact-flash", on_backend(SDPBackend.FLASH_ATTENTION), cuda_only),
    ("exact-cudnn", on_backend(SDPBackend.CUDNN_ATTENTION), cuda_only),
    ("exact-efficient", on_backend(SDPBackend.EFFICIENT_ATTENTION), cuda_only),
)
