# SPDX-License-Identifier: Apache-2.0
"""Cards of configurations: their models, their cost, and measured results."""

import functools
import json
from collections.abc import Sequence

import torch
import transformers
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel

from ..models.configuration_base import BaseConfig
from ..models.configuration_linear_transformer import LinearTransformerConfig
from ..models.configuration_nystromformer import NystromformerConfig
from .model_card import FAMILIES, TEMPLATE, cost_of_attention, limits_of, longest_of, span

PAPERS = {
    "linear_transformer": (
        "Angelos Katharopoulos, Apoorv Vyas, Nikolaos Pappas and François Fleuret: Transformers are RNNs: Fast "
        "Autoregressive Transformers with Linear Attention. ICML 2020, "
        "[arXiv:2006.16236](https://arxiv.org/abs/2006.16236)."
    ),
    "nystromformer": (
        "Yunyang Xiong, Zhanpeng Zeng, Rudrasis Chakraborty, Mingxing Tan, Glenn Fung, Yin Li and Vikas Singh: "
        "Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention. AAAI 2021, "
        "[arXiv:2102.03902](https://arxiv.org/abs/2102.03902)."
    ),
    "linformer": (
        "Sinong Wang, Belinda Z. Li, Madian Khabsa, Han Fang and Hao Ma: Linformer: Self-Attention with Linear "
        "Complexity. 2020, [arXiv:2006.04768](https://arxiv.org/abs/2006.04768)."
    ),
}


def _attention(config: BaseConfig) -> str:
    if isinstance(config, NystromformerConfig):
        numbers = [number for number in config.landmarks_by_layer if number is not None]
        if not numbers:
            return "softmax, exact: the control of the Nyström models"
        exact = config.num_hidden_layers - len(numbers)
        return f"Nyström, {span(numbers)} landmarks, {config.pinv_iterations} iterations of the pseudo-inverse" + (
            f"; exact in {exact} of {config.num_hidden_layers} layers" if exact else ""
        )
    if isinstance(config, LinearTransformerConfig):
        projected = (
            "" if config.projected_dim is None else f", keys and values projected to {config.projected_dim} slots"
        )
        causal = "causal, " if config.is_decoder else ""
        if config.feature_map is None:
            return f"softmax, {causal}exact: the control of the linear models"
        return f"linear, {causal}feature map {config.feature_map}{projected}"
    shared = {
        "none": "not shared",
        "headwise": "shared by the heads of a layer",
        "key_value": "shared by the heads, keys and values of a layer",
        "layerwise": "shared by all heads, keys, values and layers",
    }
    projections = f"{config.projection_type} projections {shared[config.share_projection]}"
    return f"Linformer, k = {span(config.projected_dim)}, {projections}"


def _summary(config: BaseConfig) -> str:
    return (
        f"A {FAMILIES[config.model_type]} of {config.num_hidden_layers} layers for {longest_of(config)} tokens, whose "
        f"attention takes {cost_of_attention(config)}."
    )


def _facts(config: BaseConfig) -> list[tuple[str, str]]:
    with torch.device("meta"):
        model = getattr(transformers, _head(config)[0]).from_config(config)
    total, encoder = model.num_parameters(), sum(p.numel() for p in model.base_model.encoder.parameters())
    convolution = (
        "none" if config.conv_kernel_size is None else f"{config.conv_kernel_size} tokens wide, on each head's values"
    )
    return [
        ("Attention", _attention(config)),
        ("Depthwise convolution beside it", convolution),
        (
            "Layers, width, heads, feed-forward width",
            f"{config.num_hidden_layers}, {config.hidden_size}, "
            f"{config.num_attention_heads}, {config.intermediate_size}",
        ),
        ("Longest input", f"{config.max_position_embeddings or 'any number of'} tokens"),
        ("Vocabulary", f"{config.vocab_size:,}"),
        (f"Parameters, with {_head(config)[1]}", f"{total:,}, of which {encoder:,} in the layers"),
    ]


def _operations(config: BaseConfig) -> list[tuple[str, str, str]]:
    """Tokens, operations with this attention and with softmax attention, at a quarter of the longest length and at the
    longest length."""
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    longest = config.max_position_embeddings or 4096
    values = {name: getattr(config, name) for name in sizes} | {"num_landmarks": None, "conv_kernel_size": None}
    softmax = NystromformerConfig(**values, max_position_embeddings=longest)
    return [
        (f"{length:,}", f"{_millions_a_token(config, length):.3g}", f"{_millions_a_token(softmax, length):.3g}")
        for length in (longest // 4, longest)
    ]


def _head(config: BaseConfig) -> tuple[str, str]:
    """The Auto class of the model that is pretrained, and its heads in words."""
    if config.is_decoder:
        return "AutoModelForCausalLM", "the head that predicts the next token"
    return "AutoModelForPreTraining", "the MLM and SOP heads"


def _millions_a_token(config: BaseConfig, length: int) -> float:
    return _operations_of_a_row(config.to_json_string(), length) / length / 1e6


@functools.cache  # many models have the same softmax control
def _operations_of_a_row(config: str, length: int) -> int:
    values = json.loads(config)
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(**values)).eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(input_ids=torch.zeros(1, length, dtype=torch.long))
    return counter.get_total_flops()


def _percent(result: EvalResult) -> str:
    spread = (result.metric_args or {}).get("standard_deviation")
    return f"{100 * result.metric_value:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")


def configuration_card(
    config: BaseConfig,
    *,
    name: str,
    file: str,
    recipes: Sequence[str] = (),
    results: Sequence[tuple[str, Sequence[EvalResult]]] = (),
    measured: Sequence[str] = (),
) -> ModelCard:
    """The card of the model that a configuration describes. Attention, parameters, operations and limits are read from
    the configuration and from its model on the meta device, which takes no memory.

    Args:
        config: of one of this package's families.
        name: the card's title, and the model's name in its metadata.
        file: of the configuration, as the usage snippet loads it.
        recipes: files of flags that train it.
        results: the measured results, a label and its scores (fractions of 1) for each row of a table. All rows have
            the same columns. The first row is the model as configured, and is in the metadata for the Hub. An entry
            `standard_deviation` of `metric_args` is shown after its mean.
        measured: sentences that say when, how and on which machine the results were measured.

    Raises:
        ValueError: if rows of `results` differ in their columns.
    """
    columns = [[f"{result.dataset_name}, {result.metric_type}" for result in row] for _, row in results]
    if any(row != columns[0] for row in columns):
        raise ValueError(f"All rows of results must have the same columns in the same order, but have {columns}.")
    data = ModelCardData(
        language="en" if results else None,
        license="apache-2.0",
        library_name="transformers",
        pipeline_tag="text-generation" if config.is_decoder else "fill-mask",
        tags=["nystrom_models", config.model_type],
        model_name=name,
        eval_results=list(results[0][1]) if results else None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE.with_name("configuration.md")),
        name=name,
        file=file,
        auto_class=_head(config)[0],
        summary=_summary(config),
        facts=_facts(config),
        operations=_operations(config),
        recipes=recipes,
        columns=columns[0] if columns else [],
        results=[(label, [_percent(result) for result in row]) for label, row in results],
        measured=measured,
        limits=limits_of(config),
        paper=PAPERS[config.model_type],
    )
