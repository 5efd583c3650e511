# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning at every point of a grid of flags, such as the papers' grid for MRPC, and over several seeds."""

import itertools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from datasets import Dataset

from .checkpoints import remove_checkpoints
from .finetuning import FinetuningArguments, Task, content_digests, finetune, finetuning_identity, validation_metrics
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
        ValueError: if an item has another form, or its flag is unknown or cannot be varied by a grid.
    """
    fixed = {"output_dir", "grid", "keep_best_only", "hub_model_id"}
    known = {field.name for part in arguments for field in fields(part)} - fixed
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
    """`arguments` with new values for the fields that it has."""
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


def finetune_once(
    args: FinetuningArguments,
    optimization: OptimizationArguments,
    task: Task,
    splits: Mapping[str, Dataset],
    content: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """[`finetune`], or the saved results if `--output_dir` holds a finished run with the same flags, data and weights.
    After a signal, the results have no validation set."""
    content = content or content_digests(args, splits)
    saved = read_results(args.output_dir)
    expected = results_content({}, identity=finetuning_identity(args, optimization, content))["identity"]
    if saved is not None and saved.get("identity") == json.loads(json.dumps(expected)):
        return saved["results"]
    return finetune(args, optimization, task, splits, content)


def finetune_grid(
    args: FinetuningArguments,
    optimization: OptimizationArguments,
    task: Task,
    splits: Mapping[str, Dataset],
) -> dict[str, Any]:
    """Runs [`finetune`] at every point of `--grid`, each in its own folder in `--output_dir`.

    Finished runs with the same flags, data and weights are not repeated. `all_results.json` gets mean and standard
    deviation over the seeds of every metric of the validation set, and the best point: by the mean of
    `--metric_for_best_model`, or of the task's own metric.

    Returns:
        `grid`, a list with an object for each point; `best`, one of them; `best_run`, the folder of its best seed.
    """
    assert args.grid is not None
    values = parse_grid(args.grid, args, optimization)
    seeds = values.pop("seed", [args.seed])
    goal = args.goal(task.best_metric)
    content = content_digests(args, splits)
    points: list[dict[str, Any]] = []
    for combination in itertools.product(*values.values()):
        point = dict(zip(values, combination, strict=True))
        metrics, folders = [], []
        for seed in seeds:
            chosen = point | {"seed": seed}
            folder = Path(args.output_dir, ",".join(f"{name}={value}" for name, value in chosen.items()))
            run_args = _with(replace(args, grid=None, keep_best_only=False, output_dir=str(folder)), chosen)
            # The grid may vary the model or the data themselves.
            known = content if values.keys().isdisjoint(_CONTENT) else None
            results = finetune_once(run_args, _with(optimization, chosen), task, splits, known)
            if not any(split.startswith("validation") for split in results):
                return results  # stopped by a signal
            metrics.append(validation_metrics(results))
            folders.append(folder.name)
        scores = [{name: v for name, v in run.items() if name.split("/")[-1] != "loss"} for run in metrics]
        outcome = {**point, "seeds": list(seeds), "validation": _summary(scores), "runs": folders}
        points.append({"outcome": outcome, "values": [goal.value(run) for run in metrics]})
    best = points[goal.best(statistics.fmean(point["values"]) for point in points)]
    best_run = best["outcome"]["runs"][goal.best(best["values"])]
    found = {
        "grid": [point["outcome"] for point in points],
        "best": best["outcome"],
        "best_run": best_run,
        "metric": goal.metric,
    }
    if PartialState().is_main_process:
        write_results(args.output_dir, found, args, optimization)
        _print(found, values)
        if args.keep_best_only:
            _keep(args.output_dir, found)
    PartialState().wait_for_everyone()
    return found


_CONTENT = frozenset(("model_name_or_path", "config_name", "config_overrides", "tokenizer_name", "trust_remote_code"))


def _print(found: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Prints a line for each point; the best one is marked."""
    for point in found["grid"]:
        where = ", ".join(f"{name}={point[name]}" for name in values) or f"{len(point['seeds'])} seeds"
        shown = [
            f"{name} {s['mean']:.4g} ± {s['std']:.2g}"
            if name.split("/")[-1] == "mse"
            else f"{name} {100 * s['mean']:.1f} ± {100 * s['std']:.1f}"
            for name, s in point["validation"].items()
        ]
        print(f"{'*' if point is found['best'] else ' '} {where}: {', '.join(shown)}", flush=True)


def _keep(output_dir: str, found: Mapping[str, Any]) -> None:
    """Removes the weights of all runs but the best one."""
    for point in found["grid"]:
        for name in point["runs"]:
            folder = Path(output_dir, name)
            remove_checkpoints(folder)
            if name != found["best_run"]:
                for weights in folder.glob("*.safetensors"):
                    weights.unlink()
