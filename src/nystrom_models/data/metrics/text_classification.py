# SPDX-License-Identifier: Apache-2.0
"""GLUE's official metrics, and those of other classification and regression data, as a module for `evaluate`."""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy.stats import ConstantInputWarning, pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error

_DESCRIPTION = """\
The official metrics of a GLUE task (Wang et al. 2019), named by the configuration: cola, sst2, mrpc, qqp, stsb, mnli,
qnli, rte, wnli; or those of other data: classification, multi_label, regression.
"""

_KWARGS_DESCRIPTION = """\
Args:
    predictions: class ids; numbers for stsb and regression; for multi_label, a 1 or 0 for each class.
    references: the same.
Returns:
    cola: matthews_correlation; mrpc, qqp: accuracy and f1 of class 1; stsb: pearson and spearmanr; sst2, mnli, qnli,
    rte, wnli: accuracy; classification: accuracy and macro_f1; multi_label: micro_f1, macro_f1 and exact_match, the
    share of rows with all labels right; regression: mse, pearson and spearmanr. The correlation of a constant, or of a
    single row, is NaN. Where GLUE has two metrics, combined_score is their mean, which is used in GLUE's average.
"""

_CITATION = """\
@inproceedings{wang2019glue,
  title = {{GLUE}: A Multi-Task Benchmark and Analysis Platform for Natural Language Understanding},
  author = {Wang, Alex and Singh, Amanpreet and Michael, Julian and Hill, Felix and Levy, Omer and Bowman, Samuel R.},
  booktitle = {International Conference on Learning Representations},
  year = {2019}
}
"""


def _correlation(correlate: Callable[..., Any], references: Sequence[float], predictions: Sequence[float]) -> float:
    """A correlation, as `scipy` computes it. That of fewer than two rows is NaN."""
    if len(references) < 2:
        return math.nan
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConstantInputWarning)  # that of a constant is NaN, as documented
        return correlate(references, predictions)[0]


def _f1(references: Any, predictions: Any, average: str) -> float:
    """The mean F1 of the classes, or that of all together. Rows of several classes hold a 1 or 0 for each."""
    if np.ndim(references) == 2 and np.shape(references)[1] == 1:
        # scikit-learn takes a single column for two classes, 0 and 1.
        references, predictions, average = np.ravel(references), np.ravel(predictions), "binary"
    return f1_score(references, predictions, average=average, zero_division=0)


# Scores by name, each a function of references and predictions.
_SCORES = {
    "accuracy": accuracy_score,
    "f1": f1_score,
    "exact_match": accuracy_score,
    "macro_f1": partial(_f1, average="macro"),
    "micro_f1": partial(_f1, average="micro"),
    "matthews_correlation": matthews_corrcoef,
    "mse": mean_squared_error,
    "pearson": partial(_correlation, pearsonr),
    "spearmanr": partial(_correlation, spearmanr),
}

_METRICS = {
    "cola": ("matthews_correlation",),
    "sst2": ("accuracy",),
    "mrpc": ("accuracy", "f1"),
    "qqp": ("accuracy", "f1"),
    "stsb": ("pearson", "spearmanr"),
    "mnli": ("accuracy",),
    "qnli": ("accuracy",),
    "rte": ("accuracy",),
    "wnli": ("accuracy",),
    "classification": ("accuracy", "macro_f1"),
    "multi_label": ("micro_f1", "macro_f1", "exact_match"),
    "regression": ("mse", "pearson", "spearmanr"),
}

# Of two metrics, `combined_score` is the mean.
_COMBINED = ("mrpc", "qqp", "stsb")


def metric_names(config_name: str) -> tuple[str, ...]:
    """The names of the scores of a configuration."""
    return (*_METRICS[config_name], *(("combined_score",) if config_name in _COMBINED else ()))


class TextClassification(evaluate.Metric):
    """The metrics of one configuration; `evaluate` loads this class."""

    def _info(self):
        if self.config_name not in _METRICS:
            raise ValueError(f"The configuration must be one of {sorted(_METRICS)}, but is {self.config_name!r}.")
        value: Any = datasets.Value("float32" if self.config_name in ("stsb", "regression") else "int64")
        several = self.config_name == "multi_label"
        if several:
            value = datasets.Sequence(value)
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": value, "references": value}),
            format=None if several else "numpy",  # with NumPy, `evaluate` supports no lists
        )

    def _compute(self, predictions, references):
        scores = {name: float(_SCORES[name](references, predictions)) for name in _METRICS[self.config_name]}
        if self.config_name in _COMBINED:
            scores["combined_score"] = sum(scores.values()) / len(scores)
        return scores
