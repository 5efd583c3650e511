# SPDX-License-Identifier: Apache-2.0
"""Metric modules for `evaluate` that are part of the package, so that nothing is downloaded; and whether larger values
are better.
"""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import evaluate

TEXT_CLASSIFICATION = str(Path(__file__).with_name("text_classification.py"))

# "combined_score" is the mean of the metrics of a task that has two, as in GLUE's average.
_LESS_IS_BETTER = frozenset(("loss", "mlm_loss", "sop_loss", "perplexity", "bits_per_byte", "mse"))
_MORE_IS_BETTER = frozenset(
    "accuracy best_f1 combined_score exact_match f1 has_answer_exact_match has_answer_f1 macro_f1 matthews_correlation"
    " micro_f1 mlm_accuracy no_answer_accuracy pearson precision recall sop_accuracy spearmanr".split()
)


@lru_cache
def load_metric(config_name: str) -> "evaluate.EvaluationModule":
    """The metrics of a GLUE task by its name, or of other data by `"classification"`, `"multi_label"` or
    `"regression"`.

    Raises:
        PermissionError: if `evaluate`, which copies the module to its cache, cannot write there.
    """
    import evaluate  # only fine-tuning needs it

    try:
        return evaluate.load(TEXT_CLASSIFICATION, config_name, keep_in_memory=True)
    except PermissionError as error:
        raise PermissionError(f"{error}: set HF_HOME to a folder that `evaluate` can write to.") from error


def greater_is_better(metric: str) -> bool:
    """Whether larger values of a metric are better.

    Raises:
        ValueError: for an unknown metric.
    """
    name, known = metric.split("/")[-1], _LESS_IS_BETTER | _MORE_IS_BETTER
    if name not in known:
        raise ValueError(
            f"The metric {metric!r} is unknown: use one of {', '.join(sorted(known))}, or give "
            "--greater_is_better, too."
        )
    return name in _MORE_IS_BETTER
