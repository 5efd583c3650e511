# SPDX-License-Identifier: Apache-2.0
"""A card of every model that configs/ describes: `python -m model_cards` writes them, `--check` compares.

What a card says is read from the configuration, from the model that it gives (on the meta device, without memory),
from the recipes that name it and from the results that the README reports. The card of a trained model is another:
`nystrom_models.training.model_card`.
"""

import argparse
import functools
import json
import sys
from pathlib import Path

import torch
from huggingface_hub import ModelCard, ModelCardData
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModel, AutoModelForPreTraining

from nystrom_models import NystromformerConfig
from nystrom_models.models.configuration_base import BaseConfig
from nystrom_models.training.model_card import FAMILIES, limits_of

CARDS = Path(__file__).parent
ROOT = CARDS.parent
CONFIGS = ROOT / "configs"
RESULTS = ROOT / "benchmarks" / "results" / "2026-11-20-cpu-comparison-tiny-256.json"

PAPERS = {
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

# The arms of the comparison in RESULTS: the configuration of each, and how the card of that configuration calls it.
ARMS = {
    "softmax": ("nystromformer/tiny-256-softmax", "as configured"),
    "nystrom": ("nystromformer/tiny-256", "as configured"),
    "softmax with the convolution": ("nystromformer/tiny-256", "softmax (`--config_overrides num_landmarks=256`)"),
    "linformer": ("linformer/tiny-256-k32-layerwise", "as configured"),
}

# Column, task and metric of a table of results.
COLUMNS = (
    ("MLM accuracy", "pretraining", "mlm_accuracy"),
    ("SOP accuracy", "pretraining", "sop_accuracy"),
    ("SST-2, accuracy", "sst2", "accuracy"),
    ("MRPC, F1", "mrpc", "f1"),
    ("IMDB, accuracy", "imdb", "accuracy"),
)


def names() -> list[str]:
    """Family and file of every configuration of a model, such as "linformer/base-512-k256-layerwise"."""
    return sorted(
        str(path.relative_to(CONFIGS).with_suffix(""))
        for family in FAMILIES
        for path in (CONFIGS / family).glob("*.json")
    )


def _attention(config: BaseConfig) -> str:
    if isinstance(config, NystromformerConfig):
        if config.num_landmarks is None:
            return "softmax, exact: the control of the Nyström models"
        return f"Nyström, {config.num_landmarks} landmarks, {config.pinv_iterations} iterations of the pseudo-inverse"
    shared = {
        "none": "not shared",
        "headwise": "shared by the heads of a layer",
        "key_value": "shared by the heads, keys and values of a layer",
        "layerwise": "shared by all heads, keys, values and layers",
    }
    projections = f"{config.projection_type} projections {shared[config.share_projection]}"
    return f"Linformer, k = {config.projected_dim}, {projections}"


def _summary(config: BaseConfig) -> str:
    linear = not (isinstance(config, NystromformerConfig) and config.num_landmarks is None)
    return (
        f"A {FAMILIES[config.model_type]} of {config.num_hidden_layers} layers for up to "
        f"{config.max_position_embeddings} tokens, whose attention takes time and memory "
        f"{'linear' if linear else 'quadratic'} in their number."
    )


def _facts(config: BaseConfig) -> list[tuple[str, str]]:
    with torch.device("meta"):
        model = AutoModelForPreTraining.from_config(config)
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
        ("Longest input", f"{config.max_position_embeddings} tokens"),
        ("Vocabulary", f"{config.vocab_size:,}"),
        ("Parameters, with the MLM and SOP heads", f"{total:,}, of which {encoder:,} in the layers"),
    ]


def _operations(config: BaseConfig) -> list[tuple[str, str, str]]:
    """Tokens, operations with this attention, with softmax attention: at a quarter of the longest length and at it."""
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "max_position_embeddings")
    softmax = NystromformerConfig(
        **{name: getattr(config, name) for name in sizes}, num_landmarks=None, conv_kernel_size=None
    )
    return [
        (f"{length:,}", f"{_millions_a_token(config, length):.3g}", f"{_millions_a_token(softmax, length):.3g}")
        for length in (config.max_position_embeddings // 4, config.max_position_embeddings)
    ]


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


def _percent(value: float | dict[str, float]) -> str:
    if isinstance(value, dict):
        return f"{100 * value['mean']:.1f} ± {100 * value['std']:.1f}"
    return f"{100 * value:.1f}"


def _results(name: str, runs: dict) -> list[tuple[str, list[str]]]:
    return [
        (label, [_percent(runs[arm][task][metric]) for _, task, metric in COLUMNS])
        for arm, (config, label) in ARMS.items()
        if config == name
    ]


def card(name: str) -> str:
    """The text of one card: `name` is the configuration's family and file, without `.json`."""
    config = AutoConfig.from_pretrained(CONFIGS / f"{name}.json")
    comparison = json.loads(RESULTS.read_text(encoding="utf-8"))
    content = ModelCard.from_template(
        ModelCardData(
            library_name="transformers", pipeline_tag="fill-mask", tags=["nystrom_models", config.model_type]
        ),
        template_path=str(CARDS / "template.md"),
        name=name,
        summary=_summary(config),
        facts=_facts(config),
        operations=_operations(config),
        recipes=[
            path.name
            for path in sorted((CONFIGS / "recipes").glob("*.args"))
            if f"{name}.json" in path.read_text(encoding="utf-8")
        ],
        results=_results(name, comparison["results"]),
        columns=[column for column, _, _ in COLUMNS],
        created=comparison["created"],
        machine=comparison["machine"],
        versions=", ".join(f"{package} {version}" for package, version in comparison["versions"].items()),
        source=RESULTS.relative_to(ROOT).as_posix(),
        limits=limits_of(config),
        paper=PAPERS[config.model_type],
    )
    return str(content).rstrip() + "\n"


def outdated() -> list[str]:
    """What differs between the cards in this folder and what the configurations give, a line for each card."""
    wanted = {CARDS / f"{name}.md": name for name in names()}
    left = [path for family in FAMILIES for path in sorted((CARDS / family).glob("*.md")) if path not in wanted]
    return [f"{path.relative_to(ROOT)}: no configuration has this name" for path in left] + [
        f"{path.relative_to(ROOT)}: {'not up to date' if path.is_file() else 'missing'}"
        for path, name in wanted.items()
        if not path.is_file() or path.read_text(encoding="utf-8") != card(name)
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m model_cards", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; name each card that is not up to date, and fail"
    )
    if parser.parse_args(argv).check:
        lines = outdated()
        print("\n".join(lines) if lines else f"All {len(names())} cards are up to date.")
        return 1 if lines else 0
    for name in names():
        path = CARDS / f"{name}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(card(name), encoding="utf-8")
    print(f"Wrote {len(names())} cards to {CARDS.relative_to(ROOT)}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
