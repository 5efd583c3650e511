# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained model on GLUE, or on any file of texts or pairs of texts with classes or a number.

    python examples/run_glue.py --model_name_or_path MODEL --task_name mrpc --output_dir outputs/mrpc

loads the task from the Hub; --data_dir GLUE reads it from the unpacked folder of GLUE's download, and --train_file,
--validation_file and --test_file from files with its columns. --task_name all trains every task, and prints the
average. Without --task_name the columns are those of --text_column_names and --label_column_name. --grid runs with
several values of flags, such as learning_rate=2e-5,3e-5 seed=0,1,2, and prints mean and standard deviation.
--no_do_train evaluates and predicts with a model that was fine-tuned before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from datasets import Dataset

from nystrom_models.data.glue import GLUE_REPOSITORY, GLUE_TASKS, load_glue
from nystrom_models.data.glue_files import find_glue_files, load_glue_files
from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.finetuning import FinetuningOptimizationArguments, finetune
from nystrom_models.training.glue import finetune_glue
from nystrom_models.training.grid import finetune_grid
from nystrom_models.training.signals import run_script
from nystrom_models.training.splits import check_cache, load_data, load_splits
from nystrom_models.training.text_classification import TextClassificationArguments


@dataclass(kw_only=True)
class GlueArguments(TextClassificationArguments):
    """The additional flags of GLUE."""

    not_in_a_grid: ClassVar[frozenset[str]] = TextClassificationArguments.not_in_a_grid | frozenset(
        "task_name data_dir validation_mismatched_file test_mismatched_file test_ax_file start_from_mnli".split()
    )

    task_name: str | None = field(
        default=None, metadata={"help": f"GLUE task: {', '.join(GLUE_TASKS)}; or all, one after the other."}
    )
    data_dir: str | None = field(
        default=None,
        metadata={"help": "Folder with a folder for each task, such as CoLA, with train.tsv and dev.tsv."},
    )
    validation_mismatched_file: list[str] | None = field(
        default=None, metadata={"help": "MNLI's second validation set; --validation_file is the matched one."}
    )
    test_mismatched_file: list[str] | None = field(
        default=None, metadata={"help": "MNLI's second test set; --test_file is the matched one."}
    )
    test_ax_file: list[str] | None = field(
        default=None, metadata={"help": "GLUE's diagnostic set, predicted by the model of MNLI."}
    )
    start_from_mnli: bool = field(
        default=False, metadata={"help": "With --task_name all: RTE, MRPC and STS-B start from the model of MNLI."}
    )
    max_length: int | None = field(
        default=None,
        metadata={"help": "Largest number of tokens of a row; by default 128, or the model's maximum if it is less."},
    )
    usual_length: ClassVar[int | None] = 128

    def __post_init__(self):
        super().__post_init__()
        if self.task_name is not None:
            self.task_name = self.task_name.lower()
            if self.task_name not in (*GLUE_TASKS, "all"):
                raise ValueError(
                    f"--task_name must be one of {', '.join(GLUE_TASKS)}, or all, but is {self.task_name}."
                )
            if (
                self.text_column_names is not None
                or self.label_column_name != "label"
                or self.do_regression
                or self.multi_label
                or self.dataset_name is not None
                or self.dataset_config_name is not None
                or self.validation_split is not None
            ):
                raise ValueError(
                    f"--task_name {self.task_name} sets the data: leave out --dataset_name, --dataset_config_name, "
                    "--validation_split, --text_column_names, --label_column_name, --do_regression and --multi_label."
                )
        if self.task_name != "mnli" and any(self.files("mnli")[split] for split in _OF_MNLI):
            raise ValueError("Only MNLI has mismatched sets and a diagnostic set: --task_name mnli.")
        if self.data_dir is not None and self.task_name is None:
            raise ValueError("--data_dir is the folder of GLUE's tasks: give --task_name, too.")
        given = any(self.files("mnli").values())
        if given and (self.data_dir is not None or self.task_name == "all"):
            raise ValueError(
                "Give either the files of one task or --data_dir, in which the files are found, not both."
            )
        if self.task_name == "all" and (self.push_to_hub or not self.do_train):
            raise ValueError("--task_name all trains many models: leave out --push_to_hub and --no_do_train.")
        if self.start_from_mnli and self.task_name != "all":
            raise ValueError("--start_from_mnli is for --task_name all.")
        for item in self.grid or ():
            name = item.partition("=")[0]
            # The values of a grid would replace the model of MNLI.
            if self.start_from_mnli and name in ("model_name_or_path", "config_name", "tokenizer_name"):
                raise ValueError(
                    f"--grid {item!r}: with --start_from_mnli, RTE, MRPC and STS-B start from the model of MNLI. "
                    f"Leave out --start_from_mnli, or give one --{name} outside of --grid."
                )

    def files(self, task_name: str) -> dict[str, list[str] | None]:
        """The files that flags name, by split."""
        matched = "_matched" if task_name == "mnli" else ""
        return {
            "train": self.train_file,
            f"validation{matched}": self.validation_file,
            f"test{matched}": self.test_file,
            "validation_mismatched": self.validation_mismatched_file,
            "test_mismatched": self.test_mismatched_file,
            "test_ax": self.test_ax_file,
        }

    def hub_dataset(self) -> tuple[str | None, str | None]:
        if self.task_name is not None and not self.train_file and self.data_dir is None:
            return GLUE_REPOSITORY, self.task_name
        return super().hub_dataset()

    def data_source(self) -> str:
        return f"GLUE's {self.task_name}" if self.data_dir is not None else super().data_source()


_OF_MNLI = ("validation_mismatched", "test_mismatched", "test_ax")


def load_glue_splits(args: GlueArguments, task_name: str) -> Mapping[str, Dataset]:
    """The splits of a GLUE task, from the Hub, from files, or from a folder of all tasks."""
    check_cache(args.cache_dir)
    files = args.files(task_name)
    if args.data_dir is not None:
        files = dict(find_glue_files(args.data_dir, task_name))
    if not any(files.values()):
        return load_glue(task_name, args.cache_dir)
    return load_splits(files, args.cache_dir, partial(load_glue_files, task_name))


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the script with command-line arguments, and returns the figures of `all_results.json`."""
    arguments, optimization = parse_arguments((GlueArguments, FinetuningOptimizationArguments), args, __doc__)
    if arguments.task_name == "all":
        load = partial(load_glue_splits, arguments)
        return finetune_glue(arguments, optimization, load, arguments.start_from_mnli)
    run = finetune if arguments.grid is None else finetune_grid
    if arguments.task_name is None:
        splits = load_data(arguments, arguments.test_file, arguments.do_train)
        return run(arguments, optimization, arguments.text_task(), splits)
    return run(
        arguments, optimization, GLUE_TASKS[arguments.task_name], load_glue_splits(arguments, arguments.task_name)
    )


if __name__ == "__main__":
    run_script(main)
