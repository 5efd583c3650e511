# SPDX-License-Identifier: Apache-2.0
"""All tasks of GLUE from one model, and their average."""

import shutil
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from ..data.glue import GLUE_TASKS
from .grid import finetune_grid, finetune_once
from .launch import all_processes
from .optimization import OptimizationArguments
from .results import read_results, validation_metrics, write_results
from .selection import Goal
from .signals import no_further_run
from .text_classification import TextClassificationArguments

# Small tasks, for which the papers of RoBERTa and ALBERT start from their model of MNLI.
FROM_MNLI = ("rte", "mrpc", "stsb")


def finetune_glue(
    args: TextClassificationArguments,
    optimization: OptimizationArguments,
    load: Callable[[str], Mapping[str, Dataset]],
    start_from_mnli: bool = False,
) -> dict[str, Any]:
    """Fine-tunes a model on each task of GLUE, in one folder per task in `--output_dir`, and prints the average.

    Finished tasks with the same flags, data and weights are not repeated. With `--grid`, a task's score is that of the
    grid's best run. The predictions of all test sets are gathered in `submission/`.

    Args:
        args, optimization: the flags.
        load: returns the splits of a task.
        start_from_mnli: RTE, MRPC and STS-B start from the model of MNLI.

    Returns:
        `tasks` with the metrics of each, `scores` by task (the mean of its metrics), `average` over the nine, and
        `average_without_wnli`, over the eight that most papers report. After a signal, the results of the current
        task.
    """
    tasks: dict[str, Any] = {}
    scores: dict[str, float] = {}
    predicted: list[Path] = []
    for name in ("mnli", *(name for name in GLUE_TASKS if name != "mnli")):
        folder = Path(args.output_dir, name)
        changes = {"task_name": name, "start_from_mnli": False, "output_dir": str(folder)}
        run_args: Any = replace(args, **changes)  # type: ignore[arg-type]
        if start_from_mnli and name in FROM_MNLI:
            source = Path(args.output_dir, "mnli", tasks["mnli"]["run"])
            # Its classifier is for other classes.
            begin = {"model_name_or_path": str(source), "config_name": None, "config_overrides": None}
            run_args = replace(run_args, **begin, ignore_mismatched_sizes=True)
        task, splits = GLUE_TASKS[name], load(name)
        results = (finetune_once if args.grid is None else finetune_grid)(run_args, optimization, task, splits)
        run = results.get("best_run", "")
        if run:
            results = (read_results(folder / run) or {})["results"]
        if no_further_run(results):
            return {name: figures for name, figures in results.items() if not name.startswith("validation")}
        metrics = validation_metrics(results)
        scores[name] = Goal.of(task.best_metric).value(metrics)
        tasks[name] = {"run": run, "validation": metrics}
        predicted += [folder / run / file for file in task.prediction_files.values()]
    found: dict[str, Any] = {
        "tasks": tasks,
        "scores": scores,
        "average": statistics.fmean(scores.values()),
        "average_without_wnli": statistics.fmean(score for name, score in scores.items() if name != "wnli"),
    }
    processes = all_processes(args.mixed_precision)
    if processes.is_main_process:
        _gather(Path(args.output_dir, "submission"), predicted)
        write_results(args.output_dir, found, args, optimization)
        print("\nGLUE, in per cent: accuracy, Matthews correlation (CoLA), or the mean of the task's two metrics")
        for name, score in scores.items():
            print(f"  {name:<6} {100 * score:5.1f}")
        print(f"  average {100 * found['average']:.1f}; without WNLI {100 * found['average_without_wnli']:.1f}")
    processes.wait_for_everyone()
    return found


def _gather(folder: Path, files: list[Path]) -> None:
    """Copies the prediction files that exist."""
    found = [path for path in files if path.is_file()]
    if found:
        folder.mkdir(parents=True, exist_ok=True)
    for path in found:
        shutil.copyfile(path, folder / path.name)
