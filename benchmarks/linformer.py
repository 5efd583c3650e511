# SPDX-License-Identifier: Apache-2.0
"""Linformer self-attention from hidden states (B, N, C).

Key and value layers are always timed, because implementations project along the tokens before or after them. Query and
output layers, the same for all, are timed in `linformer` and `linformer-shared`; in `linformer-inner` the queries are
given, and the merged context is the result. No contender has biases on query, key and value, because the packages do
not support them.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import exact
from benchmarks.exact import merge_heads, split_heads
from benchmarks.nystrom import Given
from benchmarks.registry import Inputs, Prepared, Setting, Workload, register
from nystrom_models.models.attention_linformer import linformer_attention_reference, project
from nystrom_models.models.masked_attention import attend as softmax_attention


def draw_inputs(setting: Setting, generator: torch.Generator) -> Inputs:
    width, length, projected = setting.hidden_size, setting.length, setting.projected_dim

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=generator) * std

    inputs = {"hidden_states": normal(setting.batch_size, length, width)}
    for name in ("query", "key", "value", "output"):
        inputs[f"{name}_weight"] = normal(width, width, std=1 / math.sqrt(width))
    inputs["output_bias"] = normal(width)
    for name in ("key", "value"):
        inputs[f"{name}_projection"] = normal(projected, length, std=1 / math.sqrt(projected))
    return inputs


def draw_inputs_shared(setting: Setting, generator: torch.Generator) -> Inputs:
    inputs = draw_inputs(setting, generator)
    del inputs["value_projection"]
    return inputs


def draw_inputs_inner(setting: Setting, generator: torch.Generator) -> Inputs:
    inputs = draw_inputs(setting, generator)
    inputs["query"] = torch.randn(inputs["hidden_states"].shape, generator=generator)
    return {name: tensor for name, tensor in inputs.items() if not name.startswith(("query_", "output_"))}


def project_query(inputs: Inputs) -> Tensor:
    """Queries (B, N, H·D): given, or computed from the hidden states."""
    return inputs["query"] if "query" in inputs else F.linear(inputs["hidden_states"], inputs["query_weight"])


def project_output(context: Tensor, inputs: Inputs) -> Tensor:
    """The output layer, if the workload has one, applied to the context of the heads (B, H, N, D)."""
    context = merge_heads(context)
    if "output_weight" not in inputs:
        return context
    return F.linear(context, inputs["output_weight"], inputs["output_bias"])


def attend(setting: Setting, inputs: Inputs) -> Tensor:
    """As in our models: projected along the tokens first, then by the key and value layers."""
    query = split_heads(project_query(inputs), setting.num_heads)
    slots = {
        name: project(inputs["hidden_states"], inputs[name], "linear", None, None)
        for name in ("key_projection", "value_projection")
        if name in inputs
    }
    key = F.linear(slots["key_projection"], inputs["key_weight"])
    value = F.linear(slots.get("value_projection", slots["key_projection"]), inputs["value_weight"])
    context = softmax_attention(query, split_heads(key, setting.num_heads), split_heads(value, setting.num_heads))
    return project_output(context, inputs)


def reference(setting: Setting, inputs: Inputs) -> Tensor:
    """As in the paper: projected by the key and value layers first."""
    key_projection = inputs["key_projection"]
    context = linformer_attention_reference(
        *project_tokens(setting, inputs),
        key_projection=key_projection,
        value_projection=inputs.get("value_projection", key_projection),
    )
    return project_output(context, inputs)


def project_tokens(setting: Setting, inputs: Inputs) -> list[Tensor]:
    """Queries, keys and values of all tokens, each (B, H, N, D)."""
    key, value = (F.linear(inputs["hidden_states"], inputs[f"{name}_weight"]) for name in ("key", "value"))
    return [split_heads(states, setting.num_heads) for states in (project_query(inputs), key, value)]


def attend_exactly(function, setting: Setting, inputs: Inputs) -> Tensor:
    return project_output(function(*project_tokens(setting, inputs)), inputs)


def floor(setting: Setting, inputs: Inputs) -> tuple[int, int] | None:
    """The minimum of a forward pass: input and projections read once, output written once; the products, with E and F
    applied before W."""
    if setting.backward:
        return None
    width, projected = setting.hidden_size, setting.projected_dim
    tokens = setting.batch_size * setting.length
    linear_layers = 2 * sum(name in inputs for name in ("query_weight", "output_weight")) * tokens * width**2
    projections = [tensor for name, tensor in inputs.items() if name.endswith("_projection")]
    numbers = (3 if "query" in inputs else 2) * tokens * width + sum(tensor.numel() for tensor in projections)
    operations = linear_layers + 2 * tokens * width * projected * (2 + len(projections))
    operations += 4 * setting.batch_size * projected * width**2
    return numbers * setting.dtype.itemsize, operations


def adopt(setting: Setting, parameter: Tensor, values: Tensor) -> Tensor:
    """Copies `values` into a module's parameter."""
    with torch.no_grad():
        parameter.copy_(values)
    return parameter.requires_grad_(setting.backward)


def add_contenders(workload: Workload) -> Workload:
    @workload.contender("ours", ours=True)
    def ours(setting, inputs):
        return Prepared(lambda: attend(setting, inputs))

    @workload.contender("ours-reference", ours=True)
    def ours_reference(setting, inputs):
        return Prepared(lambda: reference(setting, inputs))

    @workload.contender("linformer", requires=("linformer",))
    def linformer_package(setting, inputs):
        from linformer import LinformerSelfAttention

        module = LinformerSelfAttention(
            dim=setting.hidden_size, seq_len=setting.length, k=setting.projected_dim, heads=setting.num_heads
        )
        module = module.to(setting.device, setting.dtype).eval()
        value_projection = inputs.get("value_projection", inputs["key_projection"])
        adopt(setting, module.to_k.weight, inputs["key_weight"])
        adopt(setting, module.to_v.weight, inputs["value_weight"])
        adopt(setting, module.proj_k, inputs["key_projection"].T)
        adopt(setting, module.proj_v, value_projection.T)
        if "query" in inputs:
            module.to_q, module.to_out = Given(inputs["query"]), nn.Identity()
        else:
            adopt(setting, module.to_q.weight, inputs["query_weight"])
            adopt(setting, module.to_out.weight, inputs["output_weight"])
            adopt(setting, module.to_out.bias, inputs["output_bias"])
        return Prepared(lambda: module(inputs["hidden_states"]), parameters=tuple(module.parameters()))

    @workload.contender("linformer-pytorch", requires=("linformer_pytorch",))
    def linformer_pytorch_package(setting, inputs):
        from linformer_pytorch import MHAttention, get_EF

        def projection(name):
            layer = get_EF(setting.length, setting.projected_dim, bias=False)
            adopt(setting, layer.weight, inputs[name])
            return layer

        key_projection = projection("key_projection")
        value_projection = projection("value_projection") if "value_projection" in inputs else key_projection
        module = MHAttention(
            input_size=setting.length,
            dim=setting.head_dim,
            channels=setting.hidden_size,
            dim_k=setting.projected_dim,
            nhead=setting.num_heads,
            dropout=0.0,
            checkpoint_level="C0",
            parameter_sharing="layerwise",
            E_proj=key_projection,
            F_proj=value_projection,
            full_attention=False,
            causal_mask=None,
        )
        module = module.to(setting.device, setting.dtype).eval()
        names = {"key": module.to_k, "value": module.to_v}
        if "query" in inputs:
            module.to_q = nn.ModuleList(map(Given, inputs["query"].chunk(setting.num_heads, dim=-1)))
            module.w_o = nn.Identity()
        else:
            names["query"] = module.to_q
            adopt(setting, module.w_o.weight, inputs["output_weight"])
            adopt(setting, module.w_o.bias, inputs["output_bias"])
        for name, layers in names.items():
            for layer, weight in zip(layers, inputs[f"{name}_weight"].chunk(setting.num_heads), strict=True):
                adopt(setting, layer.weight, weight)
        return Prepared(lambda: module(inputs["hidden_states"]), parameters=tuple(module.parameters()))

    exact.add_contenders(workload, attend_exactly)
    return workload


SIZES = "{num_heads} heads of {head_dim}, k = {projected_dim}, batch {batch_size}"

linformer = add_contenders(
    register(
        Workload(
            name="linformer",
            kind="op",
            title=f"Linformer attention, one projection for keys and one for values, with all linear layers ({SIZES})",
            inputs=draw_inputs,
            reference=reference,
            baseline="ours",
            floor=floor,
        )
    )
)

linformer_shared = add_contenders(
    register(
        Workload(
            name="linformer-shared",
            kind="op",
            title=f"Linformer attention, keys and values sharing one projection, with all linear layers ({SIZES})",
            inputs=draw_inputs_shared,
            reference=reference,
            baseline="ours",
            floor=floor,
        )
    )
)

linformer_inner = add_contenders(
    register(
        Workload(
            name="linformer-inner",
            kind="op",
            title=f"Linformer attention, one projection for keys and one for values, from given queries ({SIZES})",
            inputs=draw_inputs_inner,
            reference=reference,
            baseline="ours",
            floor=floor,
        )
    )
)
