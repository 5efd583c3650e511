# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained model on a GLUE task, or on any file of texts or pairs of texts with a class or a number.

    python examples/run_glue.py --model_name_or_path MODEL --task_name mrpc --output_dir outputs/mrpc

loads the task from the Hub; --train_file, --validation_file and --test_file read it from files with GLUE's columns
instead. Without --task_name the columns are those of --text_column_names and --label_column_name. --grid runs at
several values of flags, such as learning_rate=2e-5,3e-5 seed=0,1,2, and prints mean and standard deviation.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nystrom_models.data.glue import GLUE_REPOSITORY, GLUE_TASKS, load_glue
from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.finetuning import FinetuningArguments, FinetuningOptimizationArguments, finetune
from nystrom_models.training.grid import finetune_grid
from nystrom_models.training.splits import load_data, load_splits


@dataclass(kw_only=True)
class GlueArguments(FinetuningArguments):
    """What GLUE needs besides."""

    task_name: str | None = field(default=None, metadata={"help": f"GLUE task: {', '.join(GLUE_TASKS)}."})
    validation_mismatched_file: list[str] | None = field(
        default=None, metadata={"help": "MNLI's second validation set; --validation_file is the matched one."}
    )
    test_mismatched_file: list[str] | None = field(
        default=None, metadata={"help": "MNLI's second test set; --test_file is the matched one."}
    )
    max_length: int | None = field(default=128, metadata={"help": "Tokens of a row, at most."})

    def __post_init__(self):
        super().__post_init__()
        if self.task_name is not None:
            self.task_name = self.task_name.lower()
            if self.task_name not in GLUE_TASKS:
                raise ValueError(f"--task_name must be one of {', '.join(GLUE_TASKS)}, but is {self.task_name}.")
            if (
                self.text_column_names is not None
                or self.label_column_name != "label"
                or self.do_regression
                or self.dataset_name is not None
            ):
                raise ValueError(
                    f"--task_name {self.task_name} says what is read: leave out --dataset_name, --text_column_names, "
                    "--label_column_name and --do_regression."
                )
        if self.task_name != "mnli" and (self.validation_mismatched_file or self.test_mismatched_file):
            raise ValueError("Mismatched sets are MNLI's alone: --task_name mnli.")

    def hub_dataset(self) -> tuple[str | None, str | None]:
        if self.task_name is not None and not self.train_file:
            return GLUE_REPOSITORY, self.task_name
        return super().hub_dataset()


def load_glue_splits(args: GlueArguments):
    """The splits of a GLUE task, from the Hub or from files."""
    matched = "_matched" if args.task_name == "mnli" else ""
    files = {
        "train": args.train_file,
        f"validation{matched}": args.validation_file,
        f"test{matched}": args.test_file,
        "validation_mismatched": args.validation_mismatched_file,
        "test_mismatched": args.test_mismatched_file,
    }
    if not any(files.values()):
        return load_glue(args.task_name, args.cache_dir)
    return load_splits(files, args.cache_dir)


def main(args: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Runs the script with command-line arguments, and returns the figures of `all_results.json`."""
    arguments, optimization = parse_arguments((GlueArguments, FinetuningOptimizationArguments), args, __doc__)
    run = finetune if arguments.grid is None else finetune_grid
    if arguments.task_name is None:
        return run(arguments, optimization, arguments.task(), load_data(arguments, arguments.test_file))
    return run(arguments, optimization, GLUE_TASKS[arguments.task_name], load_glue_splits(arguments))


if __name__ == "__main__":
    main()
