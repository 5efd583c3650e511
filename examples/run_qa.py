# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained model to find the answer to a question in a text, as in SQuAD.

    python examples/run_qa.py --model_name_or_path MODEL --train_file train-v1.1.json --validation_file dev.json ...

reads SQuAD's own files, flat rows with question, context and answers, or with --dataset_name a data set of the Hub;
--version_2_with_negative is for questions without an answer, as in SQuAD 2.0. A context of thousands of tokens is one
row if the model accepts it; one that is longer than --max_seq_length is read in windows that share --doc_stride
tokens. Answers are written in the format of SQuAD's scripts: texts by the ids of the questions.
"""

from collections.abc import Sequence
from typing import Any

from nystrom_models.data.question_answering import without_impossible_answers
from nystrom_models.data.squad_files import load_squad_files
from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.finetuning import FinetuningOptimizationArguments, finetune
from nystrom_models.training.grid import finetune_grid
from nystrom_models.training.question_answering import QuestionAnsweringArguments
from nystrom_models.training.signals import run_script
from nystrom_models.training.splits import load_data


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the script with command-line arguments, and returns the figures of `all_results.json`."""
    arguments, optimization = parse_arguments(
        (QuestionAnsweringArguments, FinetuningOptimizationArguments), args, __doc__
    )
    run = finetune if arguments.grid is None else finetune_grid
    splits = load_data(arguments, arguments.test_file, arguments.do_train, load_squad_files)
    if arguments.dataset_name is not None:  # files are read so already
        splits = {split: without_impossible_answers(rows, f"the {split} set") for split, rows in splits.items()}
    return run(arguments, optimization, arguments.task(), splits)


if __name__ == "__main__":
    run_script(main)
