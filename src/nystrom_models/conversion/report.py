# SPDX-License-Identifier: Apache-2.0
"""What a conversion says of itself: where each weight comes from, what was measured on a sample, how near it is."""

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

    name: in the model. source: its name in the source, or several with commas; None if it is new.
    how: what was done with the source's ("copied", "40 rows repeated to 93"), or how it starts ("zero").
    """

    name: str
    source: str | None
    how: str


@dataclass(frozen=True)
class ProjectionStart:
    """How near the two ways to start E and F come, on rows of the sample that neither was made from.

    layer: None where all layers share one projection. start: the nearer of "segment_means" and
    "principal_directions", which was taken. segment_means, principal_directions: for each the relative error of the
    attention's output, ‖approximated - exact‖ / ‖exact‖.
    """

    layer: int | None
    start: str
    segment_means: float
    principal_directions: float


@dataclass(frozen=True)
class FeatureMapStart:
    """How near a layer's linear attention comes to the source's, on rows of the sample that were not trained on.

    before, after: cross entropy of the linear attention's weights under the source's, in nats a token, with the
    feature map of a new model and with the matched one; least: the entropy of the source's weights, below which none
    can come. error_before, error_after: relative error of the attention's output.
    """

    layer: int
    before: float
    after: float
    least: float
    error_before: float
    error_after: float


@dataclass(frozen=True)
class Difference:
    """Results of the model beside the source's, on rows without padding.

    of: "logits", or "hidden states" where the head is new or the model has none. rows, tokens: how many rows of how
    many tokens. largest: the largest difference; scale: the source's largest entry by size. agreement: the share of
    predictions with the same largest logit; None for hidden states.
    """

    of: str
    rows: int
    tokens: int
    largest: float
    scale: float
    agreement: float | None


@dataclass
class ConversionReport:
    """What came from where.

    source, model: classes. head: that was converted. origins: of each parameter of the model, in its order.
    left_behind: weights of the source without a place in the model. notes: what else is not the source's.
    sample: what the figures were measured on, "texts", "token ids" or "random token ids".
    projections, feature_maps: how they started, where they were started from a sample. differences: from the source.
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
        """The parameters that are not the source's."""
        return [origin.name for origin in self.origins if origin.source is None]

    def to_dict(self) -> dict[str, Any]:
        """All of it as dictionaries, lists, texts and numbers, which JSON takes."""
        return asdict(self)

    def save(self, folder: str | os.PathLike) -> Path:
        """Writes conversion_report.json into a folder, and returns its path."""
        path = Path(folder) / REPORT_NAME
        path.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    def warnings(self) -> list[str]:
        """A line for each thing in the model that is not the source's, or is not in it."""
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
            lines.append("Feature maps, matched to the source's attention; on held-out rows:")
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
    """Lines of columns, the numbers to the right."""
    widths = [max(len(row[place]) for row in [head, *rows]) for place in range(len(head))]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]
    ]


def _summary(names: Iterable[str]) -> str:
    """Sorted names, those of all layers as one: encoder.layer.*.attention..."""
    return ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names}))
