# SPDX-License-Identifier: Apache-2.0
"""The nine tasks of GLUE (Wang et al. 2019): fields, labels, metrics, and files for submission."""

import os
from collections.abc import Mapping

from datasets import Dataset, load_dataset

from .classification import TextTask


def _task(
    name: str,
    text_columns: tuple[str, ...],
    file: str,
    label_names: tuple[str, ...] | None,
    by_name: bool = False,
    best_metric: str = "accuracy",
) -> TextTask:
    mnli = {"test_matched": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv", "test_ax": "AX.tsv"}
    return TextTask(
        text_columns,
        label_names=label_names,
        regression=label_names is None,
        metric=name,
        best_metric=best_metric,
        # Submissions of most tasks contain class numbers.
        prediction_names=label_names if by_name or label_names is None else ("0", "1"),
        prediction_files=mnli if name == "mnli" else {"test": file},
    )


GLUE_REPOSITORY = "nyu-mll/glue"
_TWO = "combined_score"  # the mean of a task's two metrics

GLUE_TASKS: dict[str, TextTask] = {
    task.metric: task
    for task in (
        _task("cola", ("sentence",), "CoLA.tsv", ("unacceptable", "acceptable"), best_metric="matthews_correlation"),
        _task("sst2", ("sentence",), "SST-2.tsv", ("negative", "positive")),
        _task("mrpc", ("sentence1", "sentence2"), "MRPC.tsv", ("not_equivalent", "equivalent"), best_metric=_TWO),
        _task("qqp", ("question1", "question2"), "QQP.tsv", ("not_duplicate", "duplicate"), best_metric=_TWO),
        _task("stsb", ("sentence1", "sentence2"), "STS-B.tsv", None, best_metric=_TWO),
        _task("mnli", ("premise", "hypothesis"), "", ("entailment", "neutral", "contradiction"), by_name=True),
        _task("qnli", ("question", "sentence"), "QNLI.tsv", ("entailment", "not_entailment"), by_name=True),
        _task("rte", ("sentence1", "sentence2"), "RTE.tsv", ("entailment", "not_entailment"), by_name=True),
        _task("wnli", ("sentence1", "sentence2"), "WNLI.tsv", ("not_entailment", "entailment")),
    )
}


def load_glue(task_name: str, cache_dir: str | os.PathLike | None = None) -> Mapping[str, Dataset]:
    """The splits of a GLUE task from the Hub: `train`, `validation` and `test`. For `"mnli"`, the last two are split
    in `_matched` and `_mismatched`, and `test_ax` is GLUE's diagnostic set. The labels of test sets are hidden."""
    cache = None if cache_dir is None else os.fspath(cache_dir)
    splits = dict(load_dataset(GLUE_REPOSITORY, task_name, cache_dir=cache))
    if task_name == "mnli":
        splits["test_ax"] = load_dataset(GLUE_REPOSITORY, "ax", cache_dir=cache)["test"]
    return splits
