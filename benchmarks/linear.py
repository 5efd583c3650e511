# SPDX-License-Identifier: Apache-2.0
"""Linear attention from projected queries, keys and values (B, N, H·D) to the merged context (B, N, H·D).

In both directions (`linear`) and causal (`linear-causal`), with φ = elu + 1, which is timed, too. As for Nyström
attention, the splitting and merging of heads is timed for all, and the linear layers for none.
"""

from torch import Tensor

from benchmarks import causal_linear, exact
from benchmarks.exact import attend_to_given, needs_scores
from benchmarks.nystrom import draw_inputs, least
from benchmarks.registry import Inputs, Prepared, Setting, Workload, register
from nystrom_models import kernels
from nystrom_models.models.attention_linear import (
    causal_linear_attention,
    causal_linear_attention_reference,
    elu_features,
    linear_attention,
    linear_attention_reference,
)


def attend(function, setting: Setting, inputs: Inputs) -> Tensor:
    """Attention by a function of φ(q), φ(k) and v."""
    return attend_to_given(
        lambda query, key, value: function(elu_features(query), elu_features(key), value), setting, inputs
    )


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """By kernels where they apply, as in a model on a GPU, otherwise by PyTorch's operations."""
    found = kernels.causal_linear_attention_if_possible(query, key, value)
    return (causal_linear_attention(query, key, value) if found is None else found)[0]


def causal_readable(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return causal_linear_attention_reference(query, key, value)[0]


def reference(setting: Setting, inputs: Inputs) -> Tensor:
    """In memory linear in the tokens; `ours-reference`, the paper's formula, is checked against it."""
    return attend(linear_attention, setting, inputs)


def floor(setting: Setting, inputs: Inputs) -> tuple[int, int]:
    """The minimum: each token's key times its value, and its query times the sum."""
    return least(setting, inputs, 2 * setting.head_dim)


def add_contenders(workload: Workload, ours, readable, is_causal: bool) -> Workload:
    @workload.contender("ours", ours=True)
    def by_the_package(setting, inputs):
        return Prepared(lambda: attend(ours, setting, inputs))

    @workload.contender("ours-reference", ours=True, refuses=needs_scores)
    def by_the_reference(setting, inputs):
        return Prepared(lambda: attend(readable, setting, inputs))

    exact.add_contenders(workload, causal=is_causal)
    if is_causal:
        causal_linear.add_contender(workload)
    return workload


SIZES = "{num_heads} heads of {head_dim}, batch {batch_size}"

linear = add_contenders(
    register(
        Workload(
            name="linear",
            kind="op",
            title=f"Linear attention, φ = elu + 1 ({SIZES})",
            inputs=draw_inputs,
            reference=reference,
            baseline="ours",
            floor=floor,
        )
    ),
    linear_attention,
    linear_attention_reference,
    is_causal=False,
)

linear_causal = add_contenders(
    register(
        Workload(
            name="linear-causal",
            kind="op",
            title=f"Causal linear attention, φ = elu + 1 ({SIZES})",
            inputs=draw_inputs,
            reference=causal_linear.reference,
            baseline="ours",
            floor=floor,
        )
    ),
    causal,
    causal_readable,
    is_causal=True,
)
