# SPDX-License-Identifier: Apache-2.0
"""Train on a task of the Long Range Arena: ListOps, Text, Retrieval, Image or Pathfinder.

    python examples/run_lra.py --recipe configs/recipes/lra-listops.args --attention nystrom --output_dir outputs/lra

trains a new model of 2 layers on expressions that are generated here, as are Pathfinder's pictures. Text loads IMDB
from the Hub, or reads --train_file and --test_file; Image loads CIFAR-10, or reads its binary files from --data_dir;
Retrieval reads the Long Range Arena's files from --data_dir. --pretrain_on_task first pretrains with masked tokens on
the task's own inputs. --grid seed=0,1,2 trains with several seeds.
"""

from collections.abc import Sequence
from typing import Any

from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.long_range_arena import ArenaArguments, train_arena
from nystrom_models.training.optimization import OptimizationArguments
from nystrom_models.training.signals import run_script


def main(args: Sequence[str] | None = None) -> dict[str, Any]:
    """Runs the script with command-line arguments, and returns the figures of `all_results.json`."""
    arguments, optimization = parse_arguments((ArenaArguments, OptimizationArguments), args, __doc__)
    return train_arena(arguments, optimization)


if __name__ == "__main__":
    run_script(main)
