# SPDX-License-Identifier: Apache-2.0
"""Train a causal language model on documents packed into full rows.

    python examples/run_clm.py --recipe configs/recipes/clm-tiny-512.args --tokenizer_name outputs/bpe \\
        --train_file corpus.txt --output_dir outputs/causal

Documents of a row are independent: no state passes from one to the next, and none is predicted from another.
--train_file takes documents separated by empty lines (.txt), or a column of documents (.json, .jsonl, .csv, .tsv,
.parquet), or sequences (FASTA); --dataset_name takes a data set of the Hub, which --streaming reads while training.
--model_name_or_path continues the training of a model.
"""

from collections.abc import Sequence
from typing import Any

from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.causal import CausalArguments, train_causal
from nystrom_models.training.optimization import OptimizationArguments
from nystrom_models.training.signals import run_script
from nystrom_models.training.splits import load_documents


def main(args: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Runs the script with command-line arguments, and returns the figures of `all_results.json`."""
    arguments, optimization = parse_arguments((CausalArguments, OptimizationArguments), args, __doc__)
    documents = load_documents(arguments)
    return train_causal(arguments, optimization, documents)


if __name__ == "__main__":
    run_script(main)
