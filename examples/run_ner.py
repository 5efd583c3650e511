# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained model to label each word of a text: named entities, parts of speech.

    python examples/run_ner.py --model_name_or_path MODEL --train_file train.conll --validation_file dev.conll ...

reads one word and its label per line, as in CoNLL's and WNUT's files, or .jsonl rows with lists of words (tokens)
and labels (ner_tags, or TASK_NAME_tags); --text_column_name and --label_column_name name other columns, and
--dataset_name a data set of the Hub. Scores are those of seqeval: precision, recall and F1 of whole entities. A text
of thousands of tokens is one row if the model accepts it; one that is longer than --max_seq_length is divided
between words, and every word is predicted once.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from nystrom_models.data.conll_files import load_conll_files
from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.finetuning import FinetuningOptimizationArguments, finetune
from nystrom_models.training.grid import finetune_grid
from nystrom_models.training.signals import run_script
from nystrom_models.training.splits import load_data
from nystrom_models.training.token_classification import TokenClassificationArguments


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the script with command-line arguments, and returns the figures of `all_results.json`."""
    arguments, optimization = parse_arguments(
        (TokenClassificationArguments, FinetuningOptimizationArguments), args, __doc__
    )
    run = finetune if arguments.grid is None else finetune_grid
    task = arguments.task()
    load = partial(load_conll_files, task.text_column, task.label_column)
    splits = load_data(arguments, arguments.test_file, arguments.do_train, load)
    return run(arguments, optimization, task, splits)


if __name__ == "__main__":
    run_script(main)
