# SPDX-License-Identifier: Apache-2.0
"""Nyström attention from projected queries, keys and values (B, N, H·D) to the merged context (B, N, H·D).

This is the layout next to the linear layers in every encoder, so the splitting and merging of heads is timed for all.
Query, key, value and output projections are the same for all contenders and are not timed.
"""

import contextlib
import functools
import importlib
import math
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import causal_linear, exact
from benchmarks.exact import attend_to_given
from benchmarks.registry import Inputs, Prepared, Setting, Workload, register
from nystrom_models import kernels
from nystrom_models.models.attention_nystrom import nystrom_attention, nystrom_attention_reference
from nystrom_models.models.depthwise_convolution import depthwise_convolution

JUDGED_BY_HEAD = (
    "run one head at a time; timed on all heads together, where its pseudo-inverse starts from a maximum over batch "
    "and heads and so deviates"
)


def draw_inputs(setting: Setting, generator: torch.Generator) -> Inputs:
    return {name: smooth_noise(setting, generator) for name in ("query", "key", "value")}


def smooth_noise(setting: Setting, generator: torch.Generator) -> Tensor:
    """Random states (B, N, H·D) of about unit variance in which neighbouring tokens are similar, as in text.

    With independent tokens all segment means would be near zero, and attention uniform with any pseudo-inverse.
    """
    batch, length, width = setting.batch_size, setting.length, setting.hidden_size
    knots = torch.randn(batch, width, max(1, length // 32), generator=generator)
    trend = F.interpolate(knots, size=length, mode="linear").transpose(1, 2)
    return trend.contiguous() + 0.5 * torch.randn(batch, length, width, generator=generator)


def draw_inputs_with_kernel(setting: Setting, generator: torch.Generator) -> Inputs:
    return draw_inputs(setting, generator) | {"conv_weight": draw_convolution(setting, generator)}


def draw_convolution(setting: Setting, generator: torch.Generator) -> Tensor:
    size = setting.conv_kernel_size
    # the range of nn.Conv2d's default initialisation
    return torch.randn(setting.num_heads, 1, size, 1, generator=generator) / math.sqrt(3 * size)


def attend(function, setting: Setting, inputs: Inputs) -> Tensor:
    """Attention by a function that also takes the convolution's weight."""
    options = {"num_landmarks": setting.num_landmarks, "conv_weight": inputs.get("conv_weight")}
    return attend_to_given(functools.partial(function, **options), setting, inputs)


def with_convolution(function, value: Tensor, conv_weight: Tensor | None, *arguments, **options) -> Tensor:
    skip = None if conv_weight is None else depthwise_convolution(value, conv_weight)
    return function(*arguments, value, skip=skip, **options)


def in_pytorch(query: Tensor, key: Tensor, value: Tensor, conv_weight: Tensor | None = None, **options) -> Tensor:
    """Nyström attention by PyTorch's operations, also on a GPU."""
    return with_convolution(nystrom_attention, value, conv_weight, query, key, **options)


def readable(query: Tensor, key: Tensor, value: Tensor, conv_weight: Tensor | None = None, **options) -> Tensor:
    return with_convolution(nystrom_attention_reference, value, conv_weight, query, key, **options)


def as_in_a_model(*tensors: Tensor, **options) -> Tensor:
    """Nyström attention by kernels where they apply, as in a model on a GPU, otherwise by PyTorch's operations."""
    context = kernels.nystrom_attention_if_possible(*tensors, **options)
    return in_pytorch(*tensors, **options) if context is None else context


def reference(setting: Setting, inputs: Inputs) -> Tensor:
    return attend(readable, setting, inputs)


def needs_even_segments(setting: Setting) -> str | None:
    if setting.length <= setting.num_landmarks or setting.length % setting.num_landmarks:
        return f"needs more tokens than landmarks, and a multiple of them ({setting.num_landmarks})"
    return None


def needs_cuda(setting: Setting) -> str | None:
    return None if setting.device == "cuda" else "is for a GPU: --device cuda"


def needs_kernels(setting: Setting) -> str | None:
    if setting.device != "cuda":
        return needs_cuda(setting)
    states = torch.empty(
        setting.batch_size, setting.length, setting.num_heads, setting.head_dim, dtype=setting.dtype, device="cuda"
    ).transpose(1, 2)
    taps = torch.empty(setting.num_heads, 1, setting.conv_kernel_size, 1, dtype=setting.dtype, device="cuda")
    return kernels.why_not(states, states, states, num_landmarks=setting.num_landmarks, conv_weight=taps)


def needs_cuda_forward(setting: Setting) -> str | None:
    return "is a forward pass: omit --backward" if setting.backward else needs_cuda(setting)


def moved_bytes(setting: Setting, inputs: Inputs) -> Tensor:
    """Reads two tensors (B, N, H·D) and writes two: the same traffic as reading three and writing a result."""
    return torch.stack([inputs["query"], inputs["key"]])


def floor(setting: Setting, inputs: Inputs) -> tuple[int, int]:
    """The minimum: four products of each token with M landmarks, and the convolution's."""
    taps = setting.conv_kernel_size if "conv_weight" in inputs else 0
    return least(setting, inputs, 4 * setting.num_landmarks + taps)


def least(setting: Setting, inputs: Inputs, products: int) -> tuple[int, int]:
    """The bytes and operations of a minimum: queries, keys and values read once, the context written once, and
    `products` multiplications for each number of a sequence.

    Backward: those three and the context's gradient are also read once, three gradients written; twice the products.
    """
    numbers = inputs["query"].numel()
    sequences, passes = (11, 3) if setting.backward else (4, 1)
    return sequences * numbers * setting.dtype.itemsize, passes * 2 * numbers * products


class Given(nn.Module):
    """Replaces a linear layer of a module and returns the given output without computing it."""

    def __init__(self, output: Tensor):
        super().__init__()
        self.output = output

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.output


def by_head(build_one, setting: Setting, inputs: Inputs) -> Tensor:
    """The outputs of a module built for one head and one example, for all of them, joined to (B, N, H·D)."""
    examples = []
    for example in range(setting.batch_size):
        heads = []
        for head in range(setting.num_heads):
            part = {
                name: inputs[name].unflatten(-1, (setting.num_heads, -1))[example, None, :, head]
                for name in ("query", "key", "value")
            }
            if "conv_weight" in inputs:
                part["conv_weight"] = inputs["conv_weight"][head, None]
            heads.append(build_one(setting, part, num_heads=1)())
        examples.append(torch.cat(heads, dim=-1))
    return torch.cat(examples)


def builtin_modeling() -> ModuleType:
    """Transformers' own Nyströmformer, which the Auto classes no longer give."""
    # Its docstring decorator prints warnings about the configuration class that replaced its own.
    with contextlib.redirect_stdout(None):
        return importlib.import_module("transformers.models.nystromformer.modeling_nystromformer")


def builtin_module(setting: Setting, inputs: Inputs, num_heads: int):
    """Transformers' self-attention as shipped, except that its three linear layers return the benchmark's inputs."""
    modeling = builtin_modeling()
    config = modeling.NystromformerConfig(
        hidden_size=num_heads * setting.head_dim,
        num_attention_heads=num_heads,
        num_landmarks=setting.num_landmarks,
        segment_means_seq_len=setting.length,
        conv_kernel_size=setting.conv_kernel_size,
        attention_probs_dropout_prob=0.0,
    )
    module = modeling.NystromformerSelfAttention(config).to(setting.device, setting.dtype).eval()
    for name in ("query", "key", "value"):
        setattr(module, name, Given(inputs[name]))
    del module.conv.weight
    if "conv_weight" in inputs:
        module.conv.weight = inputs["conv_weight"]
    else:
        module.conv_kernel_size = None  # its configuration refuses None, its forward accepts it
    return lambda: module(inputs["query"])[0]


def package_module(setting: Setting, inputs: Inputs, num_heads: int, packed: Tensor | None = None):
    """`nystrom_attention.NystromAttention` as shipped, without its first and last linear layers.

    packed: queries, keys and values in one tensor (B, N, 3·H·D), as its first layer would return them.
    """
    from nystrom_attention import NystromAttention

    module = NystromAttention(
        dim=num_heads * setting.head_dim,
        dim_head=setting.head_dim,
        heads=num_heads,
        num_landmarks=setting.num_landmarks,
        residual="conv_weight" in inputs,
        residual_conv_kernel=setting.conv_kernel_size,
    )
    module = module.to(setting.device, setting.dtype).eval()
    module.to_qkv = Given(pack(inputs) if packed is None else packed)
    module.to_out = nn.Identity()
    if "conv_weight" in inputs:
        del module.res_conv.weight
        module.res_conv.weight = inputs["conv_weight"]
    return lambda: module(inputs["query"])


def pack(inputs: Inputs) -> Tensor:
    return torch.cat([inputs[name] for name in ("query", "key", "value")], dim=-1)


def add_contenders(workload: Workload) -> Workload:
    @workload.contender("ours", ours=True)
    def ours(setting, inputs):
        return Prepared(lambda: attend(as_in_a_model, setting, inputs))

    @workload.contender("ours-reference", ours=True)
    def ours_reference(setting, inputs):
        return Prepared(lambda: reference(setting, inputs))

    @workload.contender("ours-kernels", ours=True, refuses=needs_kernels)
    def ours_kernels(setting, inputs):
        return Prepared(lambda: attend(kernels.nystrom_attention, setting, inputs))

    @workload.contender("ours-pytorch", ours=True, refuses=needs_cuda)
    def ours_pytorch(setting, inputs):
        return Prepared(lambda: attend(in_pytorch, setting, inputs))

    @workload.contender(
        "memory-floor",
        reference=moved_bytes,
        refuses=needs_cuda_forward,
        judged="as a copy: it moves the bytes that any implementation has to move, and computes nothing",
    )
    def memory_floor(setting, inputs):
        return Prepared(lambda: moved_bytes(setting, inputs))

    @workload.contender("transformers", refuses=needs_even_segments, judged=JUDGED_BY_HEAD)
    def transformers(setting, inputs):
        return Prepared(
            builtin_module(setting, inputs, setting.num_heads), verify=lambda: by_head(builtin_module, setting, inputs)
        )

    @workload.contender(
        "nystrom-attention",
        requires=("nystrom_attention",),
        refuses=needs_even_segments,
        judged=JUDGED_BY_HEAD,
    )
    def nystrom_attention_package(setting, inputs):
        packed = pack(inputs).detach().requires_grad_(setting.backward)
        return Prepared(
            package_module(setting, inputs, setting.num_heads, packed),
            parameters=(packed,),
            verify=lambda: by_head(package_module, setting, inputs),
        )

    exact.add_contenders(workload)
    causal_linear.add_contender(workload)
    return workload


SIZES = "{num_heads} heads of {head_dim}, {num_landmarks} landmarks, batch {batch_size}"

nystrom = add_contenders(
    register(
        Workload(
            name="nystrom",
            kind="op",
            title=f"Nyström attention without convolution ({SIZES})",
            inputs=draw_inputs,
            reference=reference,
            baseline="ours",
            floor=floor,
        )
    )
)

nystrom_conv = add_contenders(
    register(
        Workload(
            name="nystrom-conv",
            kind="op",
            title=f"Nyström attention with its convolution ({SIZES}, kernel {{conv_kernel_size}})",
            inputs=draw_inputs_with_kernel,
            reference=reference,
            baseline="ours",
            floor=floor,
        )
    )
)
