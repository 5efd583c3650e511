# SPDX-License-Identifier: Apache-2.0
"""Pictures of an `Inspection`, by matplotlib."""

import functools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from .results import Inspection, Setting

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("matplotlib is needed to draw: pip install '.[train]' in the repository.") from error

# The color of text and lines, replaced by that of the page, which is dark on light or light on dark.
INK = "#010203"
_STYLE: dict[Any, Any] = {
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.facecolor": "none",
    "legend.framealpha": 0.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 10,
    # Text stays text: it can be searched, and takes the page's font.
    "svg.fonttype": "none",
}
# Colors of lines for layers or numbers of landmarks, readable on light and dark.
LINES = "viridis"
# Color maps of heat maps, for errors and weights from 0 up.
ERRORS = "magma"


@dataclass
class Picture:
    """A figure, with the name of its file, a heading, and a sentence that says what it shows."""

    name: str
    title: str
    caption: str
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (5.0, 3.7)

    def save(self, path: Path) -> None:
        """Writes a .png with a white background."""
        with self._figure() as figure:
            figure.savefig(path, dpi=120, facecolor="white")

    def svg(self) -> str:
        """An <svg> element for a page, without a background, as wide as its container."""
        with self._figure() as figure:
            file = StringIO()
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        svg = file.getvalue()
        svg = svg[svg.index("<svg") :].replace(INK, "currentColor")
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
        return re.sub(r'^<svg ([^>]*?)width="[^"]*" height="[^"]*"', r'<svg role="img" \1', svg.replace("\n", " "))

    @contextmanager
    def _figure(self) -> Iterator[Figure]:
        # The ids in the file then depend only on the figure, and differ between the figures of a page.
        with matplotlib.rc_context({**_STYLE, "svg.hashsalt": self.name}):
            figure = Figure(figsize=self.size, layout="constrained")
            self.draw(figure)
            yield figure


def pictures(inspection: Inspection) -> list[Picture]:
    """All pictures that can be drawn from the measurements."""
    main, found = inspection.main, []
    longest = [s for s in inspection.settings if s.length == main.length and s.pinv_iterations == main.pinv_iterations]
    found.append(
        Picture(
            "error_by_layer",
            "Error by layer",
            f"Relative error of each layer's attention output against exact attention, {main.length:,} tokens"
            + (", by the number of landmarks." if main.method == "nystrom" else ": of its own attention."),
            functools.partial(_error_by_layer, inspection, longest),
        )
    )
    if main.method == "nystrom":
        found.append(
            Picture(
                "error_by_landmarks",
                "Error by landmarks",
                "The same error, the mean over layers, by the number of landmarks: one line for each length"
                " and number of iterations of the pseudo-inverse.",
                functools.partial(_error_by_landmarks, inspection),
            )
        )
    found.append(
        Picture(
            "error_by_head",
            "Error by head",
            f"Relative error of each head's output, {describe(main)}.",
            functools.partial(
                _heads, [inspection.output_error(layer, main) for layer in inspection.layers], inspection, ERRORS
            ),
        )
    )
    if any(inspection.residual(layer, s) is not None for layer in inspection.layers for s in longest):
        found.append(
            Picture(
                "pinv_residual",
                "Residual of the pseudo-inverse",
                "‖A Z A − A‖ / ‖A‖ of the landmarks' attention A and its iterative pseudo-inverse Z: the mean over "
                "heads. Where it does not fall with more iterations, the iteration does not converge.",
                functools.partial(_residuals, inspection),
            )
        )
    spectra = [layer.spectrum for layer in inspection.layers.values() if layer.spectrum is not None]
    if len(spectra) == len(inspection.layers):
        length = spectra[0].length
        quarter = max(1, length // 4)
        shares = [spectrum.share / spectrum.texts for spectrum in spectra]
        found.append(
            Picture(
                "cumulative_singular_values",
                "Singular values",
                f"Normalised cumulative singular values of the exact maps of {length:,} tokens, the mean over heads: "
                "a line that rises early belongs to maps of low rank (Linformer, figure 1).",
                functools.partial(_cumulative, inspection, shares),
            )
        )
        found.append(
            Picture(
                "cumulative_by_head",
                "Singular values by head",
                f"The share of the {quarter:,} largest singular values, by layer and head (Linformer, figure 1, on "
                "the right).",
                functools.partial(_heads, [share[:, quarter - 1] for share in shares], inspection, LINES),
            )
        )
    if inspection.mlm is not None:
        found.append(
            Picture(
                "mlm_accuracy",
                "Masked tokens",
                f"Accuracy of masked tokens, {main.length:,} tokens a row, by landmarks and by the error "
                "of the attention's output: the mean over layers, as above. Bars are standard errors.",
                functools.partial(_masked_accuracy, inspection),
                size=(6.5, 3.7),
            )
        )
    found.extend(_map_pictures(inspection))
    return found


def describe(setting: Setting) -> str:
    """A description of a setting."""
    words = [f"{setting.length:,} tokens"]
    if setting.method == "nystrom":
        words.append(f"{setting.num_landmarks:,} landmarks")
        words.append(f"{setting.pinv_iterations} iterations")
    return ", ".join(words)


def _shades(count: int) -> list[Any]:
    """Colors of `count` lines, without the ends of the scale, which cannot be seen on light or dark."""
    scale = matplotlib.colormaps[LINES]
    return [scale(0.25 + 0.55 * place / max(1, count - 1)) for place in range(count)]


def _legend(figure: Figure) -> None:
    """Adds a legend below the plot, where it covers nothing."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small", frameon=False)


def _error_by_layer(inspection: Inspection, settings: list[Setting], figure: Figure) -> None:
    axes = figure.add_subplot()
    layers = list(inspection.layers)
    for setting, color in zip(settings, _shades(len(settings)), strict=True):
        errors = [inspection.layer_error(layer, setting) for layer in layers]
        label = f"{setting.num_landmarks} landmarks" if setting.num_landmarks else setting.method
        axes.plot(layers, errors, "o-", color=color, markersize=4, label=label)
    axes.set(xlabel="layer", ylabel="relative error of the output", ylim=(0, None))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.2)
    _legend(figure)


def _error_by_landmarks(inspection: Inspection, figure: Figure) -> None:
    axes = figure.add_subplot()
    groups = sorted({(s.length, s.pinv_iterations or 0) for s in inspection.settings})
    several = len({iterations for _, iterations in groups}) > 1
    for (length, iterations), color in zip(groups, _shades(len(groups)), strict=True):
        settings = [s for s in inspection.settings if (s.length, s.pinv_iterations) == (length, iterations)]
        label = f"{length:,} tokens" + (f", {iterations} iterations" if several else "")
        numbers = [s.num_landmarks or 0 for s in settings]
        axes.plot(numbers, [inspection.model_error(s) for s in settings], "o-", color=color, markersize=4, label=label)
    ticks = sorted({s.num_landmarks or 0 for s in inspection.settings})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set(xlabel="landmarks", ylabel="relative error of the output", ylim=(0, None))
    axes.grid(alpha=0.2)
    _legend(figure)


def _heads(values: list[torch.Tensor], inspection: Inspection, cmap: str, figure: Figure) -> None:
    """A heat map with layers as rows and heads as columns."""
    axes = figure.add_subplot()
    table = torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=float("nan"))
    least = 0 if cmap == ERRORS else None
    image = axes.imshow(table.numpy(), cmap=cmap, aspect="auto", vmin=least, interpolation="none")
    layers = list(inspection.layers)
    axes.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    axes.set(xlabel="head", ylabel="layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.colorbar(image)


def _residuals(inspection: Inspection, figure: Figure) -> None:
    axes = figure.add_subplot()
    length = inspection.main.length
    settings = [s for s in inspection.settings if s.length == length and (s.num_landmarks or length) < length]
    numbers = sorted({s.num_landmarks or 0 for s in settings})
    styles = dict(zip(sorted({s.pinv_iterations or 0 for s in settings}), ("-", "--", ":", "-.") * 9, strict=False))
    colors = dict(zip(numbers, _shades(len(numbers)), strict=True))
    layers = list(inspection.layers)
    for setting in settings:
        number, iterations = setting.num_landmarks or 0, setting.pinv_iterations or 0
        residuals = [inspection.residual(layer, setting) for layer in layers]
        label = f"{number} landmarks" + (f", {iterations} iterations" if len(styles) > 1 else "")
        means = [residual.mean().item() for residual in residuals if residual is not None]
        axes.plot(layers, means, styles[iterations], color=colors[number], marker="o", markersize=4, label=label)
    axes.set_yscale("log")
    axes.set(xlabel="layer", ylabel="residual")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.2)
    _legend(figure)


def _cumulative(inspection: Inspection, shares: list[torch.Tensor], figure: Figure) -> None:
    axes = figure.add_subplot()
    colors = _shades(len(shares))
    for layer, share, color in zip(inspection.layers, shares, colors, strict=True):
        axes.plot(
            range(1, share.shape[1] + 1), share.mean(dim=0).numpy(), color=color, linewidth=1.3, label=f"layer {layer}"
        )
    axes.set(xlabel="singular values", ylabel="share of their sum", ylim=(0, 1.02))
    axes.grid(alpha=0.2)
    _legend(figure)


def _masked_accuracy(inspection: Inspection, figure: Figure) -> None:
    by_number, by_error = figure.subplots(1, 2, sharey=True)
    main = inspection.main
    exact = [row for row in inspection.mlm or [] if row["num_landmarks"] is None]
    rows = sorted(
        (row for row in inspection.mlm or [] if row["num_landmarks"] is not None), key=lambda row: row["num_landmarks"]
    )
    color = _shades(2)[1]
    accuracies, bars = ([row[name] for row in rows] for name in ("mlm_accuracy", "standard_error"))
    numbers = [row["num_landmarks"] for row in rows]
    errors = [inspection.model_error(main._replace(num_landmarks=number)) for number in numbers]
    by_number.errorbar(numbers, accuracies, bars, fmt="o-", color=color, markersize=4, capsize=2)
    by_error.errorbar(errors, accuracies, bars, fmt="o-", color=color, markersize=4, capsize=2)
    for number, error, accuracy in zip(numbers, errors, accuracies, strict=True):
        by_error.annotate(
            f"{number:,}", (error, accuracy), xytext=(4, 4), textcoords="offset points", fontsize="small"
        )
    for row in exact:
        by_number.axhline(row["mlm_accuracy"], color=INK, linewidth=1, linestyle="--", label="exact")
        by_error.plot(0, row["mlm_accuracy"], "s", color=INK, markersize=5)
        by_number.legend(loc="lower right", fontsize="small")
    by_number.set_xscale("log", base=2)
    by_number.set_xticks(numbers, [f"{number:,}" for number in numbers])
    by_number.set(xlabel="landmarks", ylabel="accuracy of masked tokens")
    largest = max(filter(math.isfinite, errors), default=1.0)
    by_error.set(xlabel="relative error of the output", xlim=(-0.05 * largest, 1.1 * largest))
    for axes in (by_number, by_error):
        axes.grid(alpha=0.2)


def _map_pictures(inspection: Inspection) -> Iterator[Picture]:
    """For each layer the pictured text's best, middle and worst head: exact map above, approximated map below."""
    for index, layer in inspection.layers.items():
        if layer.pictures is None or layer.picture_errors is None or layer.spectrum is None:
            continue
        errors = layer.picture_errors
        order = errors.argsort().tolist()
        heads = list(dict.fromkeys([order[0], order[len(order) // 2], order[-1]]))
        yield Picture(
            f"maps_layer_{index:02}",
            f"Maps of layer {index}",
            f"Exact maps above, approximated maps below, of a text of {layer.spectrum.length:,} tokens: the heads "
            "with the smallest, the median and the largest error (Nyströmformer, figure 3). Colors show the square "
            "root of the weights, on the same scale above and below.",
            functools.partial(_maps, layer.pictures, heads, errors),
            size=(2.4 * len(heads) + 0.4, 5.0),
        )


def _maps(maps: torch.Tensor, heads: list[int], errors: torch.Tensor, figure: Figure) -> None:
    axes = figure.subplots(2, len(heads), squeeze=False)
    for column, head in enumerate(heads):
        # An approximation can have small negative weights.
        true, approximated = maps[:, head].float().clamp_min(0).sqrt()
        for row, image in enumerate((true, approximated)):
            axes[row, column].imshow(image.numpy(), cmap=ERRORS, vmin=0, vmax=true.max(), interpolation="none")
            axes[row, column].set(xticks=[], yticks=[])
        axes[0, column].set_title(f"head {head}", fontsize="medium")
        axes[1, column].set_xlabel(f"error {errors[head]:.3f}")
    axes[0, 0].set_ylabel("exact")
    axes[1, 0].set_ylabel("approximated")
