# SPDX-License-Identifier: Apache-2.0
"""A card for every configuration in configs/: `python -m model_cards` writes them, `--check` compares them.

`nystrom_models.training.configuration_card` makes the text. This file has what that module cannot know: which recipes
name a configuration, and which results of docs/attention-compared.md belong to which model.
"""

import argparse
import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from transformers import AutoConfig

from nystrom_models.training.configuration_card import configuration_card
from nystrom_models.training.model_card import FAMILIES

CARDS = Path(__file__).parent
ROOT = CARDS.parent
CONFIGS = ROOT / "configs"
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Comparison:
    """Models that were trained alike.

    file: the file in RESULTS. arms: for each arm of it, the configuration, and its label in that configuration's card.
    """

    file: str
    arms: dict[str, tuple[str, str]]

    @property
    def path(self) -> Path:
        return RESULTS / self.file

    @functools.cached_property
    def content(self) -> dict[str, Any]:
        return json.loads(self.path.read_text(encoding="utf-8"))

    @property
    def columns(self) -> list[tuple[str, str, str]]:
        """Those of COLUMNS that were measured."""
        return [column for column in COLUMNS if all(column[0] in runs for runs in self.content["results"].values())]


# Task and metric in the files, and the name of the data in docs/attention-compared.md. Their sop_accuracy is left out:
# the rows showed the order in the lengths of the segments.
COLUMNS = (
    ("pretraining", "mlm_accuracy", "English Wikipedia, MLM"),
    ("sst2", "accuracy", "SST-2"),
    ("mrpc", "f1", "MRPC"),
    ("imdb", "accuracy", "IMDB"),
)
COMPARISONS = (
    Comparison(
        file="2026-11-20-cpu-comparison-tiny-256.json",
        arms={
            "softmax": ("nystromformer/tiny-256-softmax", "as configured"),
            "nystrom": ("nystromformer/tiny-256", "as configured"),
            "softmax with the convolution": (
                "nystromformer/tiny-256",
                "softmax (`--config_overrides num_landmarks=256`)",
            ),
            "linformer": ("linformer/tiny-256-k32-layerwise", "as configured"),
        },
    ),
    Comparison(
        file="2026-11-22-comparison-mini-256.json",
        arms={
            "nystrom": ("nystromformer/mini-256", "as configured"),
            "softmax": ("nystromformer/mini-256", "softmax (`--config_overrides num_landmarks=256`)"),
            "linformer": ("linformer/mini-256-k64-layerwise", "as configured"),
            "linear": ("linear_transformer/mini-256", "as configured"),
        },
    ),
    Comparison(
        file="2026-11-23-exact-last-layer.json",
        arms={"nystrom, the last layer exact": ("nystromformer/mini-256-exact-last", "as configured")},
    ),
)


def names() -> list[str]:
    """Family and file of every configuration of a model, such as "linformer/base-512-k256-layerwise"."""
    return sorted(
        str(path.relative_to(CONFIGS).with_suffix(""))
        for family in FAMILIES
        for path in (CONFIGS / family).glob("*.json")
    )


def comparison_of(name: str) -> Comparison | None:
    """The comparison of which a configuration is an arm."""
    return next(
        (found for found in COMPARISONS if any(config == name for config, _ in found.arms.values())),
        None,
    )


def results_of(name: str) -> list[tuple[str, list[EvalResult]]]:
    """Labels and scores of the runs of one configuration, the model as configured first."""
    comparison = comparison_of(name)
    if comparison is None:
        return []
    runs = comparison.content["results"]
    return [
        (label, [_result(task, metric, data, runs[arm][task][metric]) for task, metric, data in comparison.columns])
        for arm, (config, label) in comparison.arms.items()
        if config == name
    ]


def measured(name: str) -> list[str]:
    """Where the results of one configuration come from."""
    comparison = comparison_of(name)
    if comparison is None:
        return []
    source = comparison.content
    versions = ", ".join(f"{package} {version}" for package, version in source["versions"].items())
    return [
        f"Data, commands, and how to read it: the repository's {source['commands']}.",
        f"Source: `{comparison.path.relative_to(ROOT).as_posix()}`, {source['created']}.",
        f"Machine: {source['machine']}.",
        f"Versions: {versions}.",
    ]


def _result(task: str, metric: str, data: str, value: float | dict[str, float]) -> EvalResult:
    mean, spread = (value["mean"], value["std"]) if isinstance(value, dict) else (value, None)
    return EvalResult(
        task_type="fill-mask" if task == "pretraining" else "text-classification",
        dataset_type="wikipedia" if task == "pretraining" else task,
        dataset_name=data,
        dataset_config=metric if task == "pretraining" else None,
        metric_type=metric.rpartition("_")[2],
        metric_value=round(mean, 6),
        metric_args=None if spread is None else {"standard_deviation": round(spread, 6), "seeds": 3},
    )


def card(name: str) -> str:
    """The text of one card: `name` is the configuration's family and file, without `.json`."""
    recipes = sorted((CONFIGS / "recipes").glob("*.args"))
    content = configuration_card(
        AutoConfig.from_pretrained(CONFIGS / f"{name}.json"),
        name=name,
        file=f"configs/{name}.json",
        recipes=[
            f"configs/recipes/{path.name}" for path in recipes if f"{name}.json" in path.read_text(encoding="utf-8")
        ],
        results=results_of(name),
        measured=measured(name),
    )
    return str(content).rstrip() + "\n"


def outdated() -> list[str]:
    """A line for each card in this folder that differs from the card of its configuration."""
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
