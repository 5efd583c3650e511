# SPDX-License-Identifier: Apache-2.0
"""The table of docs/long-range-arena.md: accuracies on the test sets, published ones and those of finished runs.

    python examples/lra_report.py --runs outputs/lra/*
    python examples/lra_report.py --draw_pathfinder docs/images/pathfinder.png

The first command reads the all_results.json of examples/run_lra.py in each folder, of one run or of a grid over seeds,
and prints two tables in Markdown: accuracies, with empty cells for tasks that were not run, and the recipes of our
runs with their cost. Of several recipes for one cell, the first table has the one that is best on the validation set.
Runs with the same settings but different seeds are one recipe. Folders without a finished run, or without a trained
model's scores on a test set, are named and left out.
A run that started from the model of another run of the same task, as on shorter expressions, counts with it, as long
as that folder still has this model.
The second command draws pictures of Pathfinder; it needs matplotlib.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from nystrom_models.data.lra import ARENA_TASKS
from nystrom_models.training.identity import DIVISION, HOUSEKEEPING, NOT_OF_THE_MODEL, PLACES, weights_digest
from nystrom_models.training.results import read_json, read_results

TASKS = tuple(ARENA_TASKS)
# Accuracies in per cent, in the order of TASKS.
PUBLISHED = {
    "softmax (Xiong et al. 2021)": (37.10, 65.02, 79.35, 38.20, 74.16),
    "Nyström (Xiong et al. 2021)": (37.15, 65.52, 79.56, 41.58, 70.94),
    "Linformer (Xiong et al. 2021)": (37.25, 55.91, 79.37, 37.84, 67.60),
    "softmax (Tay et al. 2021)": (36.37, 64.27, 57.46, 42.44, 71.40),
    "Linformer (Tay et al. 2021)": (35.70, 53.94, 52.27, 38.56, 76.34),
    "linear (Tay et al. 2021)": (16.13, 65.90, 53.09, 42.34, 75.30),
}


def runs_in(folder: Path) -> Iterator[tuple[dict[str, Any], dict[str, Any], Path]]:
    """What all_results.json and config.json hold of each finished run in a folder: the run itself, or its grid's."""
    path, content = folder / "all_results.json", read_results(folder)
    if content is None:
        print(f"Left out: {path} does not exist.", file=sys.stderr)
        return
    arguments = content.get("arguments", {})
    if "mlm_probability" in arguments:  # the folder of --pretrain_on_task, which a pattern of folders also gives
        print(f"Left out: {folder} is a pretraining, which has no accuracy on a task.", file=sys.stderr)
        return
    if arguments.get("task") not in TASKS:
        raise ValueError(f"{path} was not written by run_lra.py: it names no task of the Long Range Arena.")
    if "grid" not in content["results"]:
        if "test" not in content["results"] or "train" not in content["results"]:
            print(f"Left out: {folder} has no scores of a trained model on a test set.", file=sys.stderr)
        elif (config := read_json(folder / "config.json")) is None:
            print(f"Left out: {folder} has no config.json.", file=sys.stderr)
        else:
            yield content, config, folder
        return
    for point in content["results"]["grid"]:
        for name in point["runs"]:
            yield from runs_in(folder / name)


def attention_of(config: Mapping[str, Any]) -> str:
    """The attention of a saved configuration, with the settings for which it has its own row in the table."""
    standard = None
    if config["model_type"] == "linformer":
        name = f"Linformer-{config['projected_dim']}"
    elif config["model_type"] == "linear_transformer":
        name = "linear" if config["feature_map"] == "elu" else f"linear ({config['feature_map']})"
    elif config["num_landmarks"] is None:
        name = "softmax"
    else:
        name, standard = f"Nyström-{config['num_landmarks']}", 35
    if config["conv_kernel_size"] != standard:
        name += f", convolution {config['conv_kernel_size'] or 'none'}"
    return name


def _was_replaced(start: str, content: Mapping[str, Any]) -> bool:
    """Whether a folder has other weights than those that a run began with. Removed weights tell nothing."""
    began_with = (content.get("identity") or {}).get("model")
    has_weights = any(Path(start).glob("*.safetensors"))
    return began_with is not None and has_weights and weights_digest(start, PretrainedConfig()) != began_with


def stages_of(content: Mapping[str, Any], place: Path) -> tuple[list[Mapping[str, Any]], str]:
    """A run and those that trained its model on the same task before, the first one first; and what the first one
    started from, unless that was a new model."""
    stages, places = [content], [place.resolve()]
    while (start := (first := stages[0]["arguments"])["model_name_or_path"]) is not None:
        if first["pretrain_on_task"]:
            return stages, "pretrained on the task"
        before = read_results(Path(start)) or {"arguments": {}, "results": {}}
        same_task = before["arguments"].get("task") == first["task"]
        # A run that wrote over its own start left no figures of it; nor did a start that another run replaced.
        known = same_task and "train" in before["results"] and Path(start).resolve() not in places
        if not known or _was_replaced(start, stages[0]):
            return stages, f"from {start}"
        stages.insert(0, before)
        places.append(Path(start).resolve())
    return stages, ""


def settings_of(content: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """All that runs which differ only in their seed share: flags, configuration, data and the size of a step."""
    left_out = HOUSEKEEPING | PLACES | {"seed", "config_overrides", *DIVISION}
    arguments, identity = content["arguments"], content.get("identity") or {}
    rows = math.prod(arguments[name] for name in DIVISION) * identity.get("processes", 1)
    settings = {
        **{name: value for name, value in config.items() if name not in NOT_OF_THE_MODEL},
        **{name: value for name, value in arguments.items() if name not in left_out},
        **{f"data of {split}": digest[:12] for split, digest in (identity.get("data") or {}).items()},
        "rows": None if arguments["tokens_per_step"] else rows,
    }
    # Earlier runs lack flags that were added later.
    return {name: value for name, value in settings.items() if value is not None}


def collect(folders: Sequence[str]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Figures of each run, by row and task."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    places: set[Path] = set()
    for folder in folders:
        for content, config, place in runs_in(Path(folder)):
            if place.resolve() in places:
                continue
            places.add(place.resolve())
            arguments, results = content["arguments"], content["results"]
            stages, start = stages_of(content, place)
            settings = settings_of(content, config)
            row = attention_of(config)
            if len(stages) > 1:
                row += ", in stages"
            if start:
                row += f", {start}"
            before = [
                f"{stage['results']['train']['steps']:,} of length {stage['arguments']['max_length']}"
                for stage in stages[:-1]
            ]
            if (first := stages[0]["arguments"])["pretrain_on_task"]:
                pretrained = f"{first['pretrain_steps']:,} at {first['pretrain_learning_rate']:g}"
                before.insert(0, f"{pretrained}, {first['pretrain_mlm_probability']:.0%} masked")
            batch = arguments["tokens_per_step"] or settings["rows"]
            figures = {
                "place": place,
                "seed": [stage["arguments"]["seed"] for stage in stages],
                "settings": settings | {"before": [settings_of(stage, {}) for stage in stages[:-1]]},
                "accuracy": 100 * results["test"]["accuracy"],
                "validation": 100 * results["validation"]["accuracy"],
                "recipe": (
                    f"{results['train']['steps']:,}",
                    f"{batch:,}{' tokens' if arguments['tokens_per_step'] else ''}",
                    arguments["optim"],
                    f"{arguments['learning_rate']:g}",
                    f"{config['hidden_dropout_prob']:g}",
                    arguments["max_length"],
                    "; ".join(before),
                ),
                "tokens": sum(stage["results"]["train"]["num_input_tokens_seen"] for stage in stages),
                "hours": sum(stage["results"]["train"]["seconds"] for stage in stages) / 3600,
            }
            found.setdefault((row, arguments["task"]), []).append(figures)
    if folders and not found:
        raise FileNotFoundError("--runs takes folders of finished runs of run_lra.py, but none of these has one.")
    return found


def by_recipe(runs: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Groups of runs that differ only in their seed; the recipe that is best on the validation set first.

    Raises:
        ValueError: if two runs of a recipe have the same seeds, those of stages before included.
    """
    recipes: dict[str, dict[str, Mapping[str, Any]]] = {}
    for run in runs:
        recipe = recipes.setdefault(json.dumps(run["settings"], sort_keys=True), {})
        if (other := recipe.setdefault(str(run["seed"]), run)) is not run:
            raise ValueError(
                f"{other['place']} and {run['place']} have the same settings and seeds, so they are no two samples: "
                "give one of them."
            )
    groups = [list(recipe.values()) for recipe in recipes.values()]
    return sorted(groups, key=lambda group: mean_of(group, "validation"), reverse=True)


# Settings that are in the columns of the second table.
SHOWN = frozenset(
    "max_train_steps num_train_epochs tokens_per_step rows optim learning_rate hidden_dropout_prob max_length before"
    " pretrain_on_task pretrain_steps pretrain_learning_rate pretrain_mlm_probability".split()
)


def other_settings(groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[str]:
    """For each recipe of a cell, in what else it differs from the others."""
    settings = [group[0]["settings"] for group in groups]
    names = sorted({name for recipe in settings for name in recipe if name not in SHOWN})
    names = [name for name in names if len({json.dumps(recipe.get(name)) for recipe in settings}) > 1]
    shown = [[f"{name} {recipe.get(name)}" for name in names] for recipe in settings]
    return [", ".join(parts) for parts in shown]


def mean_of(runs: Sequence[Mapping[str, Any]], name: str) -> float:
    return statistics.fmean(run[name] for run in runs)


def cell(runs: Sequence[Mapping[str, Any]], name: str = "accuracy") -> str:
    """Mean over seeds, with the standard deviation of several."""
    values = [run[name] for run in runs]
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.2f}{deviation}"


def accuracy_table(found: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> str:
    """Published accuracies and ours, in Markdown; our average only if all five tasks were run.

    Ours are those of the recipe with the best accuracy on the validation set.
    """
    lines = ["| attention | ListOps | Text | Retrieval | Image | Pathfinder | average |", "| --- |" + " ---: |" * 6]
    for name, values in PUBLISHED.items():
        cells = [f"{value:.2f}" for value in (*values, statistics.fmean(values))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for row in dict.fromkeys(name for name, _ in found):
        runs = [by_recipe(found[row, task])[0] if (row, task) in found else None for task in TASKS]
        means = [mean_of(some, "accuracy") for some in runs if some]
        average = f"{statistics.fmean(means):.2f}" if len(means) == len(TASKS) else ""
        lines.append(f"| ours: {row} | {' | '.join([*(cell(some) if some else '' for some in runs), average])} |")
    return "\n".join(lines)


def recipe_table(found: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> str:
    """Cost and accuracy of each of our cells, in Markdown: a line for each recipe of a cell, the best first."""
    head = (
        "attention",
        "task",
        "seeds",
        "steps",
        "batch",
        "optimizer",
        "learning rate",
        "dropout",
        "length",
        "steps before",
        "tokens",
        "hours",
        "validation",
        "test",
    )
    rows, others = [], []
    for (row, task), runs in found.items():
        groups = by_recipe(runs)
        others += other_settings(groups)
        for some in groups:
            tokens, hours = f"{mean_of(some, 'tokens') / 1e6:.1f} M", f"{mean_of(some, 'hours'):.2f}"
            recipe = some[0]["recipe"]
            rows.append((row, task, len(some), *recipe, tokens, hours, cell(some, "validation"), cell(some)))
    if any(others):
        head, rows = (*head, "other settings"), [(*row, other) for row, other in zip(rows, others, strict=True)]
    lines = [f"| {' | '.join(head)} |", "| --- | --- |" + " ---: |" * (len(head) - 2)]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, cells))} |" for cells in rows)])


def draw_pathfinder(path: str, seed: int = 0) -> None:
    """Draws the first training examples of Pathfinder: above, dots on two curves; below, dots on one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from nystrom_models.data.lra.pathfinder import picture

    found: dict[int, list[Any]] = {0: [], 1: []}
    number = 0
    while min(map(len, found.values())) < 6:
        pixels, label = picture(f"train-{seed}-{number}")
        found[label].append(pixels)
        number += 1
    figure, rows = pyplot.subplots(2, 6, figsize=(6, 2.1), layout="constrained")
    for axes, label in zip(rows, found, strict=True):
        for place, pixels in zip(axes, found[label], strict=False):
            place.imshow(pixels, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
            place.set_axis_off()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=128, pil_kwargs={"optimize": True})
    pyplot.close(figure)


def main(args: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--runs", nargs="*", default=[], help="Folders of finished runs; none for the published table."
    )
    parser.add_argument("--draw_pathfinder", metavar="FILE", help="Draw examples of Pathfinder instead of the tables.")
    chosen = parser.parse_args(args)
    if chosen.draw_pathfinder is not None:
        draw_pathfinder(chosen.draw_pathfinder)
        return
    found = collect(chosen.runs)
    print(accuracy_table(found))
    if found:
        print("\nTokens and hours are means over runs. They count all training on labels, and not pretraining.\n")
        print(recipe_table(found))


if __name__ == "__main__":
    main()
