# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained model on a GLUE task, or on any file of texts or pairs of texts with a class or a number.

    python examples/run_glue.py --model_name_or_path MODEL --task_name mrpc --output_dir outputs/mrpc

loads the task from the Hub; --train_file, --validation_file and --test_file read it from files with GLUE's columns
instead. Without --task_name the columns are those of --text_column_names and --label_column_name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import HfArgumentParser

from nystrom_models.data.glue import GLUE_TASKS, load_glue
from nystrom_models.training.finetuning import (
    FinetuningArguments,
    FinetuningOptimizationArguments,
    finetune,
    load_data,
    load_splits,
)


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
    parser = HfArgumentParser((GlueArguments, FinetuningOptimizationArguments))  # type: ignore[arg-type]
    arguments, optimization = parser.parse_args_into_dataclasses(args)
    if arguments.task_name is None:
        return finetune(arguments, optimization, arguments.task(), load_data(arguments))
    return finetune(arguments, optimization, GLUE_TASKS[arguments.task_name], load_glue_splits(arguments))


if __name__ == "__main__":
    main()
