# SPDX-License-Identifier: Apache-2.0
"""What distinguishes finished runs: the flags and the fields of the model in which they differ, and their scores."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .identity import HOUSEKEEPING, NOT_OF_THE_MODEL
from .results import markdown_cell, read_json, read_results, validation_metrics

# The configuration itself is compared; when a run is evaluated, and what else it predicts, does not change it.
NOT_COMPARED = HOUSEKEEPING | frozenset(
    "config_name config_overrides eval_strategy eval_steps per_device_eval_batch_size test_file".split()
)


def read_run(output_dir: str | os.PathLike) -> dict[str, Any]:
    """`results`, `arguments` and `config` of a finished run, from its `--output_dir`.

    Raises:
        FileNotFoundError: if the run is not finished, or the folder is not that of a run.
    """
    content, config = read_results(output_dir), read_json(Path(output_dir, "config.json"))
    if content is None or config is None:
        raise FileNotFoundError(
            f"all_results.json or config.json is missing: {output_dir} is not the --output_dir of a finished run."
        )
    return {"results": content["results"], "arguments": content["arguments"], "config": config}


def labels_of(folders: Sequence[str], labels: Sequence[str] | None, what: str, repeated: bool = False) -> list[str]:
    """The `labels` of --labels; by default, the names of the folders. what: "run" or "model", for a message.

    Raises:
        ValueError: if there are not as many as folders, or two are equal and not `repeated`.
    """
    found = [Path(folder).resolve().name for folder in folders] if labels is None else list(labels)
    if len(found) != len(folders) or (not repeated and len(set(found)) != len(found)):
        names = "names" if repeated else "different names"
        raise ValueError(f"--labels must be {len(folders)} {names}, one for each {what}.")
    return found


def _varying(settings: Sequence[Mapping[str, Any]], left_out: frozenset[str]) -> list[str]:
    names = dict.fromkeys(name for each in settings for name in each if name not in left_out)
    return [name for name in names if any(each.get(name) != settings[0].get(name) for each in settings)]


def differences(runs: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The flags and the fields of the model that are not the same in all runs, by the run's label."""
    arguments = [run["arguments"] for run in runs.values()]
    configs = [run["config"] for run in runs.values()]
    flags, fields = _varying(arguments, NOT_COMPARED), _varying(configs, NOT_OF_THE_MODEL)
    return {
        label: {name: run["arguments"].get(name) for name in flags}
        | {name: run["config"].get(name) for name in fields}
        for label, run in runs.items()
    }


def scores(run: Mapping[str, Any]) -> dict[str, float]:
    """The scores of the validation sets that are numbers, by name, or by `{split}/{name}` if there are several."""
    return {name: value for name, value in validation_metrics(run["results"]).items() if _is_number(value)}


def score_names(runs: Sequence[Mapping[str, Any]], metrics: Sequence[str] | None = None) -> list[str]:
    """The names in `metrics`; by default, all scores of any run.

    Raises:
        ValueError: if no run has a score of this name.
    """
    found = list(dict.fromkeys(name for run in runs for name in scores(run)))
    if unknown := [name for name in metrics or () if name not in found]:
        raise ValueError(f"No run has a score {unknown[0]!r}; there are {', '.join(found)}.")
    return found if metrics is None else list(metrics)


def scores_over(
    runs: Sequence[Mapping[str, Any]], labels: Sequence[str], setting: str
) -> dict[str, list[tuple[float, dict[str, float]]]]:
    """The value of a setting and the scores, for each run of a label.

    Raises:
        ValueError: if the runs do not differ in this setting, or it is not a number.
    """
    settings = differences({str(number): run for number, run in enumerate(runs)})
    found: dict[str, list[tuple[float, dict[str, float]]]] = {}
    for label, run, own in zip(labels, runs, settings.values(), strict=True):
        if setting not in own:
            raise ValueError(
                f"The runs do not differ in {setting!r}, but in {', '.join(own) or 'nothing'}. For curves, give --x "
                "step or --x num_input_tokens_seen."
            )
        if not _is_number(own[setting]):
            raise ValueError(f"{setting} is {own[setting]!r} in the run {label}, which is not a number to draw over.")
        found.setdefault(label, []).append((own[setting], scores(run)))
    return found


def comparison_table(runs: Mapping[str, Mapping[str, Any]], metrics: Sequence[str] | None = None) -> str:
    """A table in Markdown: each run's settings that differ, the tokens and hours of its training, and its scores.

    Args:
        runs: results of [`read_run`] by label.
        metrics: names of scores, as of [`scores`]; by default, all that are numbers.

    Raises:
        ValueError: if no run has a score of this name.
    """
    settings = differences(runs)
    names = score_names(list(runs.values()), metrics)
    varying = list(next(iter(settings.values()), {}))
    head = ["run", *(f"`{name}`" for name in varying), "million tokens", "hours", *names]
    lines = [f"| {' | '.join(head)} |", f"| --- |{' --- |' * len(varying)}{' ---: |' * (2 + len(names))}"]
    for label, run in runs.items():
        train = run["results"].get("train", {})
        tokens, seconds = train.get("num_input_tokens_seen"), train.get("seconds")
        cells = [label, *(_cell(settings[label][name]) for name in varying)]
        cells.append("" if tokens is None else f"{tokens / 1e6:.1f}")
        cells.append("" if seconds is None else f"{seconds / 3600:.2f}")
        cells += [_number(scores(run).get(name)) for name in names]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:g}" if isinstance(value, float) else markdown_cell(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _number(value: Any) -> str:
    return f"{value:.4g}" if _is_number(value) else ""
