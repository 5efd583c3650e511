# SPDX-License-Identifier: Apache-2.0
"""Draw training curves of several runs side by side, as figure 5 of the Nyströmformer paper does, and print a table.

    python examples/plot_runs.py --runs outputs/softmax outputs/nystrom outputs/linformer --output curves.png

--runs takes the --output_dir of runs. The table has the settings in which the finished ones differ, the tokens and
hours of their training, and their scores on held-out data.

    python examples/plot_runs.py --runs outputs/k32 outputs/k64 outputs/softmax --labels nystrom nystrom softmax \\
        --x num_landmarks --metrics accuracy --output accuracy.png

draws the scores of finished runs over a setting in which they differ. A line joins the runs with the same label.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.comparison import comparison_table, labels_of, read_run, score_names, scores_over
from nystrom_models.training.curve import AXES, plot_history, plot_scores, read_history
from nystrom_models.training.results import read_results


@dataclass(kw_only=True)
class PlotArguments:
    """The runs and the picture."""

    runs: list[str] = field(metadata={"help": "The --output_dir of every run."})
    labels: list[str] | None = field(default=None, metadata={"help": "Their names; by default, those of the folders."})
    output: str = field(default="training_curves.png", metadata={"help": "Picture to write: .png, .svg or .pdf."})
    x: str = field(
        default="step",
        metadata={
            "help": "The horizontal axis: step; num_input_tokens_seen if steps differ in size; or, for scores, a flag "
            "or a field of the configuration in which the runs differ, such as max_position_embeddings."
        },
    )
    metrics: list[str] | None = field(
        default=None, metadata={"help": "Scores in the table, and in a picture of scores; by default, all."}
    )

    def __post_init__(self):
        self.labels = labels_of(self.runs, self.labels, "run", repeated=self.x not in AXES)


def main(args: Sequence[str] | None = None) -> None:
    """Runs the script with command-line arguments."""
    (arguments,) = parse_arguments((PlotArguments,), args, __doc__)
    labels = arguments.labels
    if arguments.x in AXES:
        folders = dict(zip(labels, arguments.runs, strict=True))
        plot_history({label: read_history(run) for label, run in folders.items()}, arguments.output, arguments.x)
        finished = {label: read_run(run) for label, run in folders.items() if read_results(run) is not None}
        if unfinished := [label for label in labels if label not in finished]:
            print(f"Not finished, and therefore not in the table: {', '.join(unfinished)}.")
    else:
        runs = [read_run(run) for run in arguments.runs]
        points = scores_over(runs, labels, arguments.x)
        plot_scores(points, arguments.output, arguments.x, score_names(runs, arguments.metrics))
        names = [f"{label}, {run}" for label, run in zip(labels, arguments.runs, strict=True)]
        finished = dict(zip(names, runs, strict=True))
    print(f"Drawn: {arguments.output}")
    if finished:
        print(f"\n{comparison_table(finished, arguments.metrics)}")


if __name__ == "__main__":
    main()
