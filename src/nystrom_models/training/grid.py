# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning at every point of a grid of flags, such as the papers' grid for MRPC, and over several seeds."""

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from datasets import Dataset

from ..data.classification import TextTask
from .finetuning import FinetuningArguments, finetune, validation_metrics
from .optimization import OptimizationArguments
from .results import read_results, results_content, write_results

_Arguments = TypeVar("_Arguments")


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_grid(grid: Sequence[str], *arguments: Any) -> dict[str, list[Any]]:
    """Values by flag, from `flag=value,value,...` items.

    Raises:
        ValueError: if an item is none, or names a flag that none of `arguments` has or that a grid cannot vary.
    """
    known = {field.name for part in arguments for field in fields(part)} - {"output_dir", "grid", "hub_model_id"}
    values: dict[str, list[Any]] = {}
    for item in grid:
        name, equals, listed = item.partition("=")
        if not equals or not listed or name not in known:
            raise ValueError(
                f"--grid {item!r} must be a flag with values, such as learning_rate=2e-5,3e-5 or seed=0,1,2."
            )
        values[name] = [_value(value) for value in listed.split(",")]
    return values


def _with(arguments: _Arguments, values: Mapping[str, Any]) -> _Arguments:
    """`arguments` with those of the values that it has fields for."""
    names = {field.name for field in fields(arguments)}  # type: ignore[arg-type]
    return replace(arguments, **{name: value for name, value in values.items() if name in names})  # type: ignore[type-var]


def _summary(scores: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and sample standard deviation of every metric over the seeds."""
    return {
        name: {
            "mean": statistics.fmean(run[name] for run in scores),
            "std": statistics.stdev(run[name] for run in scores) if len(scores) > 1 else 0.0,
        }
        for name in scores[0]
    }


def finetune_grid(
    args: FinetuningArguments,
    optimization: OptimizationArguments,
    task: TextTask,
    splits: Mapping[str, Dataset],
) -> dict[str, Any]:
    """Runs [`finetune`] at every point of `--grid`, each in a folder of its own in `--output_dir`.

    Runs that are finished, with the same flags, are not repeated. `all_results.json` gets mean and standard deviation
    over the seeds of every metric of the validation set, and the best point: that of the highest mean over its metrics
    (for MRPC, of accuracy and F1), losses aside.

    Returns:
        `grid`, a list with an object a point, and `best`, one of them.
    """
    assert args.grid is not None
    values = parse_grid(args.grid, args, optimization)
    seeds = values.pop("seed", [args.seed])
    validation = sorted(split for split in splits if split.startswith("validation"))
    points = []
    for combination in itertools.product(*values.values()):
        point = dict(zip(values, combination, strict=True))
        scores, folders = [], []
        for seed in seeds:
            chosen = point | {"seed": seed}
            folder = Path(args.output_dir, ",".join(f"{name}={value}" for name, value in chosen.items()))
            run_args = _with(replace(args, grid=None, output_dir=str(folder)), chosen)
            run_optimization = _with(optimization, chosen)
            results = _finished(folder, run_args, run_optimization)
            if results is None:
                results = finetune(run_args, run_optimization, task, splits)
                if any(split not in results for split in validation):
                    return results  # stopped by SIGTERM
            metrics = validation_metrics(results)
            scores.append({name: value for name, value in metrics.items() if name.split("/")[-1] != "loss"})
            folders.append(folder.name)
        points.append({**point, "seeds": list(seeds), "validation": _summary(scores), "runs": folders})
    best = max(points, key=lambda point: statistics.fmean(score["mean"] for score in point["validation"].values()))
    outcome = {"grid": points, "best": best}
    write_results(args.output_dir, outcome, args, optimization)
    for point in points:
        where = ", ".join(f"{name}={point[name]}" for name in values) or f"{len(seeds)} seeds"
        shown = [f"{name} {100 * s['mean']:.1f} ± {100 * s['std']:.1f}" for name, s in point["validation"].items()]
        print(f"{'*' if point is best else ' '} {where}: {', '.join(shown)}", flush=True)
    return outcome


def _finished(folder: Path, *arguments: Any) -> dict[str, Any] | None:
    """The results of a run that ended in `folder` with these flags."""
    saved = read_results(folder)
    if saved is None:
        return None
    expected = results_content({}, *arguments)["arguments"]
    # max_length is filled in from the model where it is not given.
    same = all(saved["arguments"].get(name) == value for name, value in expected.items() if value is not None)
    return saved["results"] if same else None
