# SPDX-License-Identifier: Apache-2.0
"""Pictures of one run or several: training curves, and scores over a setting."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .checkpoints import HISTORY
from .results import read_json_lines

# What the horizontal axis can show, and its label.
AXES = {"step": "step", "num_input_tokens_seen": "million tokens"}

# Labels of the figures that are plotted. `learning_rate` and `tokens_per_second` do not measure the model.
_LABELS = {"loss": "loss", "accuracy": "accuracy", "mlm_loss": "MLM loss", "sop_loss": "SOP loss"}
_LABELS |= {"mlm_accuracy": "MLM accuracy", "sop_accuracy": "SOP accuracy", "attention_loss": "attention loss"}
_LABELS |= {"ce_loss": "teacher's predictions", "mse_loss": "states, squared error", "cos_loss": "states, 1 - cosine"}
_HELD_OUT = "eval_"


def read_history(output_dir: str | os.PathLike) -> list[dict[str, float]]:
    """The logged figures of a run, from its `--output_dir`."""
    path = Path(output_dir, HISTORY)
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: {output_dir} is not the --output_dir of a run that trained. Of a grid, give "
            "the folder of one run."
        )
    return read_json_lines(path)


def _series(history: Sequence[Mapping[str, float]], name: str, x: str) -> tuple[list[float], list[float]]:
    unit = 1 if x == "step" else 1e6
    points = [(row[x] / unit, row[name]) for row in history if row.get(name) is not None and not math.isnan(row[name])]
    return [place for place, _ in points], [value for _, value in points]


def _panels(number: int) -> tuple[Any, list[Any]]:
    """A figure and its axes, in rows of two."""
    try:
        from matplotlib.figure import Figure  # training does not need it
    except ImportError as error:
        raise ImportError("matplotlib is needed to draw: pip install matplotlib.") from error
    columns = min(2, number)
    rows = math.ceil(number / columns)
    figure = Figure(figsize=(5 * columns, 3.4 * rows), layout="constrained")
    found = [figure.add_subplot(rows, columns, place + 1) for place in range(number)]
    for axes in found:
        axes.grid(alpha=0.3)
    return figure, found


def _colors(number: int) -> list[Any]:
    """As many colors, of which up to 20 differ."""
    from matplotlib import color_sequences  # training does not need it

    colors = color_sequences["tab10" if number <= 10 else "tab20"]
    return [colors[index % len(colors)] for index in range(number)]


def _save(figure: Any, axes: Any, path: str | os.PathLike) -> None:
    """Adds the legend of these axes, and writes the picture, also into a new folder."""
    _add_legend(figure, axes)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _add_legend(figure: Any, axes: Any) -> None:
    """A legend in the first panel, or beside all panels if it would cover the lines."""
    entries = axes.get_legend_handles_labels()
    if len(entries[0]) <= 6:
        axes.legend()
    else:
        figure.legend(*entries, loc="outside right upper")


def plot_history(
    histories: Mapping[str, Sequence[Mapping[str, float]]], path: str | os.PathLike, x: str = "step"
) -> None:
    """Draws losses and accuracies over the steps or the tokens: a line for training, dots for held-out data.

    Args:
        histories: the logged figures of each run, by its label.
        path: a .png, .svg or .pdf file.
        x: `"step"`, or `"num_input_tokens_seen"` for runs whose steps differ in size.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if nothing was logged, or `x` was not.
    """
    if x not in AXES:
        raise ValueError(f"x must be one of {', '.join(AXES)}, but is {x!r}.")
    for label, history in histories.items():
        if any(x not in row for row in history):
            raise ValueError(f"The run {label} did not log {x}: draw it over the steps.")
    found = {name.removeprefix(_HELD_OUT) for history in histories.values() for row in history for name in row}
    panels = [name for name in _LABELS if name in found]
    if not panels:
        raise ValueError("The runs logged no losses: train for at least --logging_steps steps.")
    figure, panel_axes = _panels(len(panels))
    for axes, name in zip(panel_axes, panels, strict=True):
        for color, (label, history) in zip(_colors(len(histories)), histories.items(), strict=True):
            places, values = _series(history, name, x)
            held_out = _series(history, _HELD_OUT + name, x)
            # Means over few steps are noisy: they are drawn paler than held-out figures.
            alpha = 0.4 if held_out[0] else 1.0
            axes.plot(places, values, color=color, linewidth=1, alpha=alpha, label=label if places else None)
            if held_out[0]:
                label = f"{label}, held out" if len(histories) > 1 else "held out"
                axes.plot(*held_out, "o--", color=color, markersize=4, linewidth=1, label=label)
        axes.set(xlabel=AXES[x], ylabel=_LABELS[name])
    _save(figure, panel_axes[0], path)


def plot_scores(
    points: Mapping[str, Sequence[tuple[float, Mapping[str, float]]]],
    path: str | os.PathLike,
    setting: str,
    metrics: Sequence[str],
) -> None:
    """Draws a panel for each score, over a setting of the runs. The axis is logarithmic from a ratio of 8 on.

    Args:
        points: for each label the runs that a line joins: the value of the setting, and the scores by name.
        path: a .png, .svg or .pdf file.
        setting: name of the horizontal axis.
        metrics: names of the scores.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if there are no scores.
    """
    if not metrics:
        raise ValueError("The runs have no scores of validation data to draw.")
    figure, panel_axes = _panels(len(metrics))
    places = sorted({place for line in points.values() for place, _ in line})
    for axes, name in zip(panel_axes, metrics, strict=True):
        for color, (label, line) in zip(_colors(len(points)), points.items(), strict=True):
            drawn = sorted((place, scores[name]) for place, scores in line if name in scores)
            values = [score for _, score in drawn]
            axes.plot([place for place, _ in drawn], values, "o-", color=color, markersize=4, label=label)
        axes.set(xlabel=setting, ylabel=name)
        if places[0] > 0 and places[-1] >= 8 * places[0]:
            axes.set_xscale("log", base=2)
            axes.set_xticks(places, [f"{place:g}" for place in places])
            axes.minorticks_off()
    _save(figure, panel_axes[0], path)
