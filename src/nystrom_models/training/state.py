# SPDX-License-Identifier: Apache-2.0
"""The position and the figures of a training run, and their log."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator
from torch import nn

from .checkpoints import HISTORY, how_to_go_on
from .results import write_json
from .selection import Best


@dataclass
class TrainingState:
    """The position and the figures of a training run, over all processes."""

    model: nn.Module  # as prepared by Accelerate
    step: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    skipped_steps: int = 0  # steps whose loss or gradient was not finite
    history: list[dict[str, float]] = field(default_factory=list)
    best: Best = field(default_factory=Best)
    interrupted: bool = False  # by a signal, before its last step
    stopped_early: bool = False  # because evaluations no longer improved

    @property
    def is_evaluated(self) -> bool:
        """Whether the model of this step has been evaluated."""
        return any(row["step"] == self.step and any(name.startswith("eval_") for name in row) for row in self.history)

    @property
    def tokens_per_second(self) -> float:
        """Tokens trained on per second of the whole run, without padding; the logs have the rate of the last steps."""
        return self.num_tokens / self.seconds if self.seconds else math.nan

    def figures(self) -> dict[str, float]:
        """The figures of the training for `all_results.json`."""
        figures = {"steps": self.step, "num_input_tokens_seen": self.num_tokens, "seconds": self.seconds}
        figures["tokens_per_second"] = self.tokens_per_second
        if self.skipped_steps:
            figures["skipped_steps"] = self.skipped_steps
        if self.best.step is not None:
            figures["best_step"] = self.best.step
        return figures


def log_figures(
    accelerator: Accelerator,
    state: TrainingState,
    figures: Mapping[str, float],
    output_dir: str | Path | None = None,
) -> None:
    """Sends figures of the current step to the trackers, and adds them to the history, also in `output_dir`. The
    tokens trained on so far are added, by the name that Transformers' Trainer uses."""
    figures = {**figures, "num_input_tokens_seen": state.num_tokens}
    accelerator.log(figures, step=state.step)
    row = {"step": state.step, **figures}
    state.history.append(row)
    if output_dir is not None and accelerator.is_main_process:
        try:
            write_json(Path(output_dir, HISTORY), [row], lines=True, append=True)
        except OSError as error:
            raise OSError(error.errno, f"{error.strerror}. {how_to_go_on(output_dir)}") from error


def log_evaluation(
    accelerator: Accelerator, state: TrainingState, metrics: Mapping[str, float], output_dir: str | Path | None = None
) -> None:
    """Logs held-out figures of the model at the current step, as `eval_{name}`; once, if a step is evaluated again."""
    if not state.is_evaluated:
        log_figures(accelerator, state, {f"eval_{name}": value for name, value in metrics.items()}, output_dir)
