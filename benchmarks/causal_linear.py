# SPDX-License-Identifier: Apache-2.0
"""Causal linear attention by `flash-linear-attention`, whose Triton kernels are the fastest of that kind on a GPU.

It is a different function from ours: each token sees only itself and previous tokens, through the feature map
φ(x) = elu(x) + 1 of Katharopoulos et al. 2020 (arXiv:2006.16236, eq. 7 and 8). It is timed because many use it for
long sequences.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.exact import QUERY_CHUNK, cuda_only
from benchmarks.registry import Inputs, Prepared, Setting, Workload

JUDGED = "against causal linear attention with elu(x) + 1, which is what it computes"


def causal_linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Σ φ(q)·φ(k) v / Σ φ(q)·φ(k), (B, N, H, D), over the tokens up to each one, in chunks of queries."""
    query, key = F.elu(query) + 1, F.elu(key) + 1
    state = torch.zeros_like(torch.einsum("bnhd,bnhe->bhde", key[:, :1], value[:, :1]))
    total = torch.zeros_like(key[:, 0])
    chunks = []
    for q, k, v in zip(
        query.split(QUERY_CHUNK, 1), key.split(QUERY_CHUNK, 1), value.split(QUERY_CHUNK, 1), strict=True
    ):
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k).tril()
        numerator = torch.einsum("bhnm,bmhd->bnhd", scores, v) + torch.einsum("bnhd,bhde->bnhe", q, state)
        denominator = scores.sum(dim=-1).transpose(1, 2) + torch.einsum("bnhd,bhd->bnh", q, total)
        chunks.append(numerator / denominator[..., None])
        state = state + torch.einsum("bnhd,bnhe->bhde", k, v)
        total = total + k.sum(dim=1)
    return torch.cat(chunks, dim=1)


def heads(setting: Setting, inputs: Inputs) -> list[Tensor]:
    """Queries, keys and values as (B, N, H, D)."""
    return [inputs[name].unflatten(-1, (setting.num_heads, -1)) for name in ("query", "key", "value")]


def reference(setting: Setting, inputs: Inputs) -> Tensor:
    return causal_linear_attention(*heads(setting, inputs)).flatten(-2)


def add_contender(workload: Workload) -> None:
    @workload.contender(
        "flash-linear-attention",
        requires=("fla",),
        install="pip install flash-linear-attention",
        reference=reference,
        refuses=cuda_only,
        judged=JUDGED,
    )
    def flash_linear_attention(setting, inputs):
        from fla.ops.linear_attn import chunk_linear_attn

        def call():
            query, key, value = heads(setting, inputs)
            return chunk_linear_attn(F.elu(query) + 1, F.elu(key) + 1, value, normalize=True)[0].flatten(-2)

        return Prepared(call)
