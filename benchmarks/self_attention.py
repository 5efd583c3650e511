# SPDX-License-Identifier: Apache-2.0
"""The self-attention modules of the papers' speed tables, from hidden states (B, N, C) through all linear layers.

Nyströmformer's Table 1 (Xiong et al. 2021) compares softmax attention with Linformer-256, Longformer-257 and
Nyströmformer-64 and -32; Linformer's Table 3 (Wang et al. 2020) compares Linformers of several k with softmax
attention.
`python -m benchmarks table FILE --layout NAME` prints results in the layout of these tables.

The number in a contender's name is its number of landmarks, its k or its window. Nyströmformers have their
convolution. No contender has biases on query, key and value.
"""

import torch
from torch import Tensor

from benchmarks import exact, linformer, nystrom
from benchmarks.exact import QUERY_CHUNK, split_heads
from benchmarks.registry import Inputs, Prepared, Setting, Workload, register

LANDMARKS = (64, 32)
PROJECTED = (256, 128)
WINDOW = 257


def draw_inputs(setting: Setting, generator: torch.Generator) -> Inputs:
    inputs = linformer.draw_inputs(setting, generator)
    del inputs["key_projection"], inputs["value_projection"]
    inputs["hidden_states"] = nystrom.smooth_noise(setting, generator)
    inputs["conv_weight"] = nystrom.draw_convolution(setting, generator)
    for size in PROJECTED:
        for name in ("key", "value"):
            inputs[f"{name}_projection_{size}"] = torch.randn(size, setting.length, generator=generator) * size**-0.5
    return inputs


def nystromformer(function, setting: Setting, inputs: Inputs, landmarks: int) -> Tensor:
    query, key, value = linformer.project_tokens(setting, inputs)
    context = function(query, key, value, num_landmarks=landmarks, conv_weight=inputs["conv_weight"])
    return linformer.project_output(context, inputs)


def linformer_with(attend, setting: Setting, inputs: Inputs, size: int) -> Tensor:
    projections = {f"{name}_projection": inputs[f"{name}_projection_{size}"] for name in ("key", "value")}
    return attend(setting, inputs | projections)


def window_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Softmax attention of each token to itself and (WINDOW - 1) / 2 tokens on either side, in chunks of queries."""
    reach, length = WINDOW // 2, query.shape[-2]
    chunks = []
    for start in range(0, length, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, length)
        near = slice(max(0, start - reach), min(length, stop + reach))
        distance = torch.arange(start, stop)[:, None] - torch.arange(near.start, near.stop)
        scores = query[..., start:stop, :] @ key[..., near, :].mT * query.shape[-1] ** -0.5
        scores = scores.masked_fill((distance.abs() > reach).to(scores.device), float("-inf"))
        chunks.append(scores.softmax(dim=-1) @ value[..., near, :])
    return torch.cat(chunks, dim=-2)


def window_reference(setting: Setting, inputs: Inputs) -> Tensor:
    return linformer.attend_exactly(window_attention, setting, inputs)


self_attention = register(
    Workload(
        name="self-attention",
        kind="op",
        title="Self-attention modules ({num_heads} heads of {head_dim}, batch {batch_size}), with all linear layers",
        inputs=draw_inputs,
        reference=None,
        baseline=f"nystromformer-{LANDMARKS[0]}",
    )
)

# name, module, attention, its reference, size
OURS = (
    *((f"nystromformer-{m}", nystromformer, nystrom.as_in_a_model, nystrom.readable, m) for m in LANDMARKS),
    *((f"linformer-{k}", linformer_with, linformer.attend, linformer.reference, k) for k in PROJECTED),
)

for name, module, function, reference, size in OURS:

    def readable(setting, inputs, module=module, function=reference, size=size):
        return module(function, setting, inputs, size)

    @self_attention.contender(name, ours=True, reference=readable)
    def ours(setting, inputs, module=module, function=function, size=size):
        return Prepared(lambda: module(function, setting, inputs, size))


def needs_windows(setting: Setting) -> str | None:
    return None if setting.length % (WINDOW - 1) == 0 else f"needs a length that is a multiple of {WINDOW - 1}"


@self_attention.contender(
    f"longformer-{WINDOW}",
    reference=window_reference,
    refuses=needs_windows,
    judged="against softmax attention within its window, which is what it computes",
)
def longformer_module(setting, inputs):
    from transformers import LongformerConfig
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    config = LongformerConfig(
        hidden_size=setting.hidden_size,
        num_attention_heads=setting.num_heads,
        attention_window=[WINDOW - 1],
        attention_probs_dropout_prob=0.0,
    )
    module = LongformerSelfAttention(config, 0).to(setting.device, setting.dtype).eval()
    for name in ("query", "key", "value"):
        layer = torch.nn.Linear(setting.hidden_size, setting.hidden_size, bias=False)
        del layer.weight
        layer.weight = inputs[f"{name}_weight"]
        setattr(module, name, layer)
    everywhere = torch.zeros(setting.batch_size, setting.length, device=setting.device)

    def call():
        context = module(
            inputs["hidden_states"],
            attention_mask=everywhere,
            is_index_masked=everywhere.bool(),
            is_index_global_attn=everywhere.bool(),
            is_global_attn=False,
        )[0]
        return linformer.project_output(split_heads(context, setting.num_heads), inputs)

    return Prepared(call)


exact.add_contenders(self_attention, linformer.attend_exactly, names=("exact-softmax", "exact-sdpa"))
