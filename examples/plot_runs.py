# SPDX-License-Identifier: Apache-2.0
"""Draw training curves of several runs side by side, as figure 5 of the Nyströmformer paper does, and print a table.

    python examples/plot_runs.py --runs outputs/softmax outputs/nystrom outputs/linformer --output curves.png

--runs takes the --output_dir of finished runs. The table has the settings in which the runs differ, the tokens and
hours of their training, and their scores on held-out data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.comparison import comparison_table, labels_of, read_run
from nystrom_models.training.curve import plot_history, read_history


@dataclass(kw_only=True)
class PlotArguments:
    """The runs and the picture."""

    runs: list[str] = field(metadata={"help": "The --output_dir of every run."})
    labels: list[str] | None = field(default=None, metadata={"help": "Their names; by default, those of the folders."})
    output: str = field(default="training_curves.png", metadata={"help": "Picture to write: .png, .svg or .pdf."})
    x: Literal["step", "num_input_tokens_seen"] = field(
        default="step", metadata={"help": "The horizontal axis: steps, or tokens if steps differ in size."}
    )
    metrics: list[str] | None = field(default=None, metadata={"help": "Scores in the table; by default, all."})

    def __post_init__(self):
        self.labels = labels_of(self.runs, self.labels, "run")


def main(args: Sequence[str] | None = None) -> None:
    """Runs the script with command-line arguments."""
    (arguments,) = parse_arguments((PlotArguments,), args, __doc__)
    histories = {label: read_history(run) for label, run in zip(arguments.labels, arguments.runs, strict=True)}
    plot_history(histories, arguments.output, arguments.x)
    print(f"Drawn: {arguments.output}\n")
    runs = {label: read_run(run) for label, run in zip(arguments.labels, arguments.runs, strict=True)}
    print(comparison_table(runs, arguments.metrics))


if __name__ == "__main__":
    main()
