# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained model on IMDB's movie reviews, or on any other file of long documents with a class or number.

    python examples/run_imdb.py --model_name_or_path MODEL --truncation_strategy head_tail --output_dir outputs/imdb

loads IMDB from the Hub and evaluates on its test set, as is usual; --train_file and --validation_file read files
instead. Documents are truncated to the model's maximum length, or to --max_length.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.finetuning import FinetuningOptimizationArguments, finetune
from nystrom_models.training.grid import finetune_grid
from nystrom_models.training.signals import run_script
from nystrom_models.training.splits import load_data
from nystrom_models.training.text_classification import TextClassificationArguments


@dataclass(kw_only=True)
class ImdbArguments(TextClassificationArguments):
    """The default data set is IMDB."""

    def __post_init__(self):
        super().__post_init__()
        if self.dataset_name is None and not (self.train_file or self.validation_file or self.test_file):
            self.dataset_name, self.validation_split = "stanfordnlp/imdb", self.validation_split or "test"


def main(args: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Runs the script with command-line arguments, and returns the figures of `all_results.json`."""
    arguments, optimization = parse_arguments((ImdbArguments, FinetuningOptimizationArguments), args, __doc__)
    run = finetune if arguments.grid is None else finetune_grid
    splits = load_data(arguments, arguments.test_file, arguments.do_train)
    return run(arguments, optimization, arguments.text_task(), splits)


if __name__ == "__main__":
    run_script(main)
