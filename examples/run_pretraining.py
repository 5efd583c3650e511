# SPDX-License-Identifier: Apache-2.0
"""Pretrain an encoder of any family with masked tokens (MLM) and sentence order (SOP).

    python examples/run_pretraining.py --recipe configs/recipes/pretraining-base-512.args \\
        --tokenizer_name outputs/tokenizer --train_file corpus.txt --output_dir outputs/base-512

--train_file takes documents separated by empty lines (.txt), or a column of documents (.json, .jsonl, .csv, .tsv,
.parquet), or sequences (FASTA); --dataset_name takes a data set of the Hub, which --streaming reads while training.
--model_name_or_path continues the training of a model, or starts from the weights of a BERT or another encoder that
can be converted. --teacher_model_name_or_path names a teacher.
"""

from collections.abc import Sequence
from typing import Any

from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.optimization import OptimizationArguments
from nystrom_models.training.pretraining import PretrainingArguments, pretrain
from nystrom_models.training.signals import run_script
from nystrom_models.training.splits import load_documents


def main(args: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Runs the script with command-line arguments, and returns the figures of `all_results.json`."""
    arguments, optimization = parse_arguments((PretrainingArguments, OptimizationArguments), args, __doc__)
    documents = load_documents(arguments)
    return pretrain(arguments, optimization, documents)


if __name__ == "__main__":
    run_script(main)
