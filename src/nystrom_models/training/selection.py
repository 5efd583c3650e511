# SPDX-License-Identifier: Apache-2.0
"""Comparison of models by one metric and its direction, for checkpoints, early stopping and grids."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..data.metrics import greater_is_better


@dataclass(frozen=True)
class Goal:
    """A metric, and whether larger values are better."""

    metric: str
    greater_is_better: bool

    @classmethod
    def of(cls, metric: str, greater: bool | None = None) -> "Goal":
        """The goal for the name of a metric; `greater` overrides its known direction.

        Raises:
            ValueError: if the direction is neither given nor known.
        """
        metric = metric.removeprefix("eval_")
        return cls(metric, greater_is_better(metric) if greater is None else greater)

    def value(self, metrics: Mapping[str, float]) -> float:
        """The value of the metric; the mean if there are several validation sets (`{split}/{metric}`).

        Raises:
            ValueError: if it was not measured.
        """
        values = [value for name, value in metrics.items() if self.metric in (name, name.split("/")[-1])]
        if not values:
            raise ValueError(
                f"--metric_for_best_model {self.metric} is not measured; use one of {', '.join(metrics) or 'none'}."
            )
        return sum(values) / len(values)

    def require(self, metrics: Iterable[str]) -> None:
        """Raises a ValueError if the metric is none of those that an evaluation will measure."""
        self.value(dict.fromkeys(metrics, 0.0))

    def is_better(self, value: float, than: float | None, threshold: float = 0.0) -> bool:
        """Whether a value is better by more than `threshold`. NaN never is; others are better than NaN or None."""
        if math.isnan(value):
            return False
        if than is None or math.isnan(than):
            return True
        return value > than + threshold if self.greater_is_better else value < than - threshold

    def best(self, values: Iterable[float]) -> int:
        """The index of the best value; the first one if several are equal."""
        chosen, best = 0, None
        for number, value in enumerate(values):
            if self.is_better(value, best):
                chosen, best = number, value
        return chosen


@dataclass
class Best:
    """The best evaluation of a run so far, and the number of evaluations since."""

    value: float | None = None
    step: int | None = None
    evaluations_since: int = 0

    def update(self, goal: Goal, value: float, step: int, threshold: float = 0.0) -> bool:
        """Adds an evaluation, and returns whether it is the best so far.

        An evaluation that is better by less than `threshold` becomes the best one, but does not reset the patience.
        """
        improved = goal.is_better(value, self.value, threshold)
        self.evaluations_since = 0 if improved else self.evaluations_since + 1
        if not goal.is_better(value, self.value):
            return False
        self.value, self.step = value, step
        return True
