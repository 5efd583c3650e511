# SPDX-License-Identifier: Apache-2.0
"""The report of a conversion: the origin of each weight, how parts were started from a sample, and the differences
from the source.
"""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

REPORT_NAME = "conversion_report.json"


@dataclass(frozen=True)
class Origin:
    """Where a weight of the model comes from.

    name: its name in the model. source: its name in the source, or several with commas; None if it is new.
    how: how it was made from the source's ("copied", "40 rows repeated to 93"), or how it starts ("zero").
    """

    name: str
    source: str | None
    how: str


@dataclass(frozen=True)
class ProjectionStart:
    """The errors of two ways to start E and F, on held-out rows of the sample.

    layer: None where all layers share one projection. start: "segment_means" or "principal_directions", the one with
    the smaller error, which was taken. segment_means, principal_directions: the relative error of the attention's
    output with each, ‖approximated - exact‖ / ‖exact‖.
    """

    layer: int | None
    start: str
    segment_means: float
    principal_directions: float


@dataclass(frozen=True)
class FeatureMapStart:
    """The errors of a layer's linear attention against the source's attention, on held-out rows of the sample.

    before, after: cross entropy of the linear attention's weights relative to the source's, in nats per token, with
    the feature map of a new model and with the matched one. least: its lower bound, the entropy of the source's
    weights.
    error_before, error_after: relative error of the attention's output.
    """

    layer: int
    before: float
    after: float
    least: float
    error_before: float
    error_after: float


@dataclass(frozen=True)
class Difference:
    """The difference between the outputs of the model and of the source, on rows without padding.

    of: "logits", or "hidden states" if the head is new or the model has none. rows: number of rows. tokens: their
    length. largest: the largest absolute difference. scale: the source's largest absolute value. agreement: the share
    of predictions with the same largest logit; None for hidden states.
    """

    of: str
    rows: int
    tokens: int
    largest: float
    scale: float
    agreement: float | None


@dataclass
class ConversionReport:
    """The origin of each weight, and what was measured.

    source, model: names of the classes. head: the head that was converted. origins: one for each parameter of the
    model, in its order. left_behind: weights of the source that the model does not use. notes: other differences from
    the source. sample: what was measured on, "texts", "token ids" or "random token ids". projections, feature_maps:
    how they were started from a sample; empty if they were not. differences: from the source's outputs.
    """

    source: str
    model: str
    head: str
    origins: list[Origin]
    left_behind: list[str]
    notes: list[str]
    sample: str = "random token ids"
    projections: list[ProjectionStart] = field(default_factory=list)
    feature_maps: list[FeatureMapStart] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def new(self) -> list[str]:
        """The names of the parameters that do not come from the source."""
        return [origin.name for origin in self.origins if origin.source is None]

    def to_dict(self) -> dict[str, Any]:
        """The report as dictionaries, lists, strings and numbers, for JSON."""
        return asdict(self)

    def save(self, folder: str | os.PathLike) -> Path:
        """Writes conversion_report.json to a folder and returns its path."""
        path = Path(folder) / REPORT_NAME
        path.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    def warnings(self) -> list[str]:
        """A line for each part of the model that is not an unchanged copy, and one for dropped weights."""
        lines: dict[str, list[str]] = {}
        for origin in self.origins:
            if origin.source is None:
                lines.setdefault(origin.how, []).append(origin.name)
            elif origin.how != "copied":
                lines.setdefault(f"from the source, {origin.how}", []).append(origin.name)
        found = [f"{how}: {_summary(names)}" for how, names in lines.items()]
        if self.left_behind:
            found.append(f"left behind: {_summary(self.left_behind)}")
        return found + self.notes

    def __str__(self) -> str:
        copied = sum(origin.how == "copied" for origin in self.origins)
        lines = [f"{self.model} from {self.source}: {copied} of {len(self.origins)} parameters copied"]
        lines += [f"- {line}" for line in self.warnings()]
        if self.projections:
            lines.append("E and F, relative error of the attention's output on held-out rows:")
            lines += _table(
                ["layer", "segment means", "principal directions", "started from"],
                [
                    ["all" if start.layer is None else str(start.layer), *_numbers(start), start.start]
                    for start in self.projections
                ],
            )
        if self.feature_maps:
            matched = any(start.after < start.before for start in self.feature_maps)
            how = "matched to the source's attention" if matched else "as in a new model"
            lines.append(f"Feature maps, {how}; on held-out rows:")
            lines += _table(
                ["layer", "cross entropy before", "after", "least", "output error before", "after"],
                [
                    [str(start.layer)]
                    + [f"{value:.4f}" for value in (start.before, start.after, start.least)]
                    + [f"{value:.4f}" for value in (start.error_before, start.error_after)]
                    for start in self.feature_maps
                ],
            )
        if self.differences:
            lines.append(f"Largest difference from the source, on {self.sample}:")
            lines += _table(
                ["tokens", "rows", "of", "difference", "largest entry", "same prediction"],
                [
                    [
                        str(item.tokens),
                        str(item.rows),
                        item.of,
                        f"{item.largest:.2e}",
                        f"{item.scale:.2e}",
                        "" if item.agreement is None else f"{item.agreement:.1%}",
                    ]
                    for item in self.differences
                ],
            )
        return "\n".join(lines)


def _numbers(start: ProjectionStart) -> list[str]:
    return [f"{start.segment_means:.4f}", f"{start.principal_directions:.4f}"]


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """The lines of a table with right-aligned columns."""
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]
    ]


def _summary(names: Iterable[str]) -> str:
    """Sorted names; names that differ only in the layer are one: encoder.layer.*.attention..."""
    return ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names}))
