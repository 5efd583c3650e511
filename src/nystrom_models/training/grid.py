# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning at every point of a grid of flags, such as the papers' grid for MRPC, and over several seeds."""

import itertools
import json
import math
import os
import statistics
import sys
from argparse import ArgumentError
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from datasets import Dataset
from transformers import HfArgumentParser

from .checkpoints import remove_checkpoints
from .finetuning import FinetuningArguments, Task, content_digests, finetune, finetuning_identity
from .launch import all_processes
from .optimization import OptimizationArguments
from .results import read_results, results_content, validation_metrics, write_results
from .signals import no_further_run

_Arguments = TypeVar("_Arguments")

# Bytes of a file's name, on the usual file systems.
LONGEST_NAME = 255


def parse_grid(grid: Sequence[str], *arguments: Any) -> dict[str, list[Any]]:
    """Values by flag, from `flag=value,value,...` items, read as the command line reads them.

    Raises:
        ValueError: if an item has another form, its flag is unknown or was given before, or a value is not one of the
            flag's or is repeated.
    """
    known = {field.name for part in arguments for field in fields(part)}
    types: list[Any] = [type(part) for part in arguments]
    parser = HfArgumentParser(types, exit_on_error=False)
    required = [
        f"--{field.name}={getattr(part, field.name)}"
        for part in arguments
        for field in fields(part)
        if field.default is field.default_factory is MISSING
    ]
    values: dict[str, list[Any]] = {}
    for item in grid:
        name, equals, listed = item.partition("=")
        if not equals or not listed or name not in known:
            raise ValueError(
                f"--grid {item!r} must be a flag with values, such as learning_rate=2e-5,3e-5 or seed=0,1,2."
            )
        if name in values:
            raise ValueError(f"--grid {item!r}: give all values of {name} in one item, {name}=...,...")
        values[name] = []
        for text in listed.split(","):
            try:
                value = getattr(parser.parse_args([*required, f"--{name}={text}"]), name)
            except ArgumentError as error:
                raise ValueError(f"--grid {item!r}: {error.message}.") from None
            if value in values[name]:
                raise ValueError(f"--grid {item!r}: the value {value} is repeated, give it once.")
            values[name].append(value)
    return values


def _with(arguments: _Arguments, values: Mapping[str, Any]) -> _Arguments:
    """`arguments` with new values for the fields that it has."""
    names = {field.name for field in fields(arguments)}  # type: ignore[arg-type]
    return replace(arguments, **{name: value for name, value in values.items() if name in names})  # type: ignore[type-var]


def _summary(scores: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and sample standard deviation of every metric over the seeds."""
    columns = {name: [run[name] for run in scores] for name in scores[0]}
    return {name: {"mean": statistics.fmean(values), "std": _deviation(values)} for name, values in columns.items()}


def _deviation(values: Sequence[float]) -> float:
    if not all(map(math.isfinite, values)):  # such as the correlation with a constant
        return math.nan
    return statistics.stdev(values) if len(values) > 1 else 0.0


def _folder(values: Mapping[str, Any]) -> str:
    """The name of a run's folder. Values with / are escaped, so that it is one folder, and of this run only."""
    name = ",".join(f"{name}={value}" for name, value in values.items()).replace("%", "%25").replace("/", "%2F")
    if len(os.fsencode(name)) > LONGEST_NAME:
        raise ValueError(
            f"--grid: the folder of a run would be called {name[:60]}…, in {len(os.fsencode(name))} bytes. A name can "
            f"have {LONGEST_NAME}: give shorter values, such as relative paths."
        )
    return name


def _run_arguments(
    args: FinetuningArguments, optimization: OptimizationArguments, values: Mapping[str, Any]
) -> tuple[FinetuningArguments, OptimizationArguments]:
    """The arguments of one run of a grid."""
    folder = str(Path(args.output_dir, _folder(values)))
    run_args = replace(args, grid=None, keep_best_only=False, output_dir=folder)
    return _with(run_args, values), _with(optimization, values)


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
    # All arguments are made first: a wrong value is refused before anything is trained.
    runs = []
    for combination in itertools.product(*values.values()):
        point = dict(zip(values, combination, strict=True))
        runs.append((point, [_run_arguments(args, optimization, point | {"seed": seed}) for seed in seeds]))
    # The grid may vary the model itself.
    known = content if values.keys().isdisjoint(_CONTENT) else None
    points: list[dict[str, Any]] = []
    for point, arguments in runs:
        metrics, folders = [], []
        for run_args, run_optimization in arguments:
            results = finetune_once(run_args, run_optimization, task, splits, known)
            if no_further_run(results):
                return {"train": results["train"]}
            metrics.append(validation_metrics(results))
            folders.append(Path(run_args.output_dir).name)
        scores = [{name: v for name, v in run.items() if name.split("/")[-1] != "loss"} for run in metrics]
        outcome = {**point, "seeds": list(seeds), "validation": _summary(scores), "runs": folders}
        points.append({"outcome": outcome, "values": [goal.value(run) for run in metrics]})
    best = points[goal.best(statistics.fmean(point["values"]) for point in points)]
    best_run = best["outcome"]["runs"][goal.best(best["values"])]
    if not any(Path(args.output_dir, best_run).glob("*.safetensors")):
        # An earlier call with --keep_best_only kept another run's weights. The same flags give the same ones again.
        all_runs = {Path(each[0].output_dir).name: each for _, seeds_of_point in runs for each in seeds_of_point}
        results = finetune(*all_runs[best_run], task, splits, known)
        if no_further_run(results):
            return {"train": results["train"]}
    found = {
        "grid": [point["outcome"] for point in points],
        "best": best["outcome"],
        "best_run": best_run,
        "metric": goal.metric,
    }
    processes = all_processes(args.mixed_precision)  # if all runs were finished, they have not met yet
    if processes.is_main_process:
        write_results(args.output_dir, found, args, optimization)
        if args.keep_best_only:
            _keep(args.output_dir, found)
        _print(found, values)
    processes.wait_for_everyone()
    return found


_CONTENT = frozenset(("model_name_or_path", "config_name", "config_overrides", "tokenizer_name", "trust_remote_code"))


def _print(found: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Prints a line for each point; the best one is marked."""
    try:
        sign = "±"
        sign.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        sign = "+-"
    for point in found["grid"]:
        seeds = len(point["seeds"])
        where = ", ".join(f"{name}={point[name]}" for name in values) or f"{seeds} seed{'s' * (seeds > 1)}"
        shown = [
            f"{name} {s['mean']:.4g} {sign} {s['std']:.2g}"
            if name.split("/")[-1] == "mse"
            else f"{name} {100 * s['mean']:.1f} {sign} {100 * s['std']:.1f}"
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
