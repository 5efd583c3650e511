# SPDX-License-Identifier: Apache-2.0
"""Training curves of one run, or of several runs in one picture."""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

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
    path = Path(output_dir, "history.jsonl")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {output_dir} is not the --output_dir of a run.")
    return read_json_lines(path)


def _series(history: Sequence[Mapping[str, float]], name: str, x: str) -> tuple[list[float], list[float]]:
    unit = 1 if x == "step" else 1e6
    points = [(row[x] / unit, row[name]) for row in history if row.get(name) is not None and not math.isnan(row[name])]
    return [place for place, _ in points], [value for _, value in points]


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
    try:
        from matplotlib.figure import Figure  # training does not need it
    except ImportError as error:
        raise ImportError("matplotlib is needed to draw: pip install matplotlib.") from error
    found = {name.removeprefix(_HELD_OUT) for history in histories.values() for row in history for name in row}
    panels = [name for name in _LABELS if name in found]
    if not panels:
        raise ValueError("The runs logged no losses: train for at least --logging_steps steps.")
    columns = min(2, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5 * columns, 3.4 * rows), layout="constrained")
    for number, name in enumerate(panels):
        axes = figure.add_subplot(rows, columns, number + 1)
        for color, (label, history) in enumerate(histories.items()):
            places, values = _series(history, name, x)
            held_out = _series(history, _HELD_OUT + name, x)
            # Means over few steps are noisy: they are drawn paler than held-out figures.
            alpha = 0.4 if held_out[0] else 1.0
            axes.plot(places, values, color=f"C{color}", linewidth=1, alpha=alpha, label=label if places else None)
            if held_out[0]:
                label = f"{label}, held out" if len(histories) > 1 else "held out"
                axes.plot(*held_out, "o--", color=f"C{color}", markersize=4, linewidth=1, label=label)
        axes.set(xlabel=AXES[x], ylabel=_LABELS[name])
        axes.grid(alpha=0.3)
        if number == 0:
            axes.legend()
    figure.savefig(path, dpi=100)
