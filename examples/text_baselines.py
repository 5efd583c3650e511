# SPDX-License-Identifier: Apache-2.0
"""What a classifier of texts must beat: a constant prediction, and logistic regression on tf-idf.

    python examples/text_baselines.py --task_name sst2 --train_file sst2/train.jsonl --validation_file sst2/dev.jsonl
    python examples/text_baselines.py --dataset_name stanfordnlp/imdb --validation_split test

reads the same data as run_glue.py and run_imdb.py, and prints the same metrics. The constant prediction is the most
frequent class of the training set, or its mean if the label is a number. tf-idf counts words and pairs of words, in
scripts without spaces letters and pairs of letters; two texts are compared by the difference and the product of
theirs. The strength of the regularization is the one with the highest score on a tenth of the training set, which is
then trained on, too.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from scipy import sparse
from sklearn.base import BaseEstimator
from sklearn.dummy import DummyClassifier, DummyRegressor
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, ShuffleSplit

from nystrom_models.data import TextTask
from nystrom_models.data.classification import (
    check_labels,
    encoded_labels,
    has_lists,
    require_column,
    require_kind_of_labels,
)
from nystrom_models.data.glue import GLUE_TASKS, load_glue
from nystrom_models.data.glue_files import load_glue_files
from nystrom_models.training.arguments import DataArguments, parse_arguments
from nystrom_models.training.splits import load_data, load_splits, sample
from nystrom_models.training.text_classification import TextColumnArguments, evaluate_predictions, task_classes

# Inverse strengths of the regularization; for Ridge, alpha is 1 / C.
STRENGTHS = (0.1, 1.0, 10.0, 100.0)

# Letters of scripts without spaces: Thai, Lao, Tibetan, Burmese, Khmer, and those of Japanese and Chinese.
_ALONE = r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
# Such a letter, or, as in scikit-learn, a word of at least two others.
WORD = rf"[{_ALONE}]|(?:(?![{_ALONE}])\w){{2,}}"


@dataclass(kw_only=True)
class BaselineArguments(DataArguments, TextColumnArguments):
    """The data, with the flags of run_glue.py and run_imdb.py."""

    task_name: str | None = field(default=None, metadata={"help": f"GLUE task: {', '.join(GLUE_TASKS)}."})
    seed: int = field(default=0, metadata={"help": "Seed of the samples."})
    output_file: str | None = field(default=None, metadata={"help": "JSON file for the scores."})

    def __post_init__(self):
        super().__post_init__()
        if self.task_name is not None and self.task_name not in GLUE_TASKS:
            raise ValueError(f"--task_name must be one of {', '.join(GLUE_TASKS)}, but is {self.task_name}.")
        if self.text_column_names is not None and len(self.text_column_names) > 2:
            raise ValueError(f"--text_column_names names one column or two, not {len(self.text_column_names)}.")

    def task(self) -> TextTask:
        """The GLUE task, or that of the columns."""
        return self.text_task() if self.task_name is None else GLUE_TASKS[self.task_name]

    def splits(self) -> dict[str, Dataset]:
        """The training set and the validation sets."""
        files = {"train": self.train_file, "validation": self.validation_file}
        if self.task_name is None:
            splits = load_data(self)
        elif any(files.values()):
            splits = load_splits(files, self.cache_dir, partial(load_glue_files, self.task_name))
        else:
            splits = dict(load_glue(self.task_name, self.cache_dir))
        for flag, split in (("--train_file", "train"), ("--validation_file", "validation")):
            if not any(name.startswith(split) for name in splits):
                raise ValueError(f"Give {flag}, or --dataset_name for data with such a split.")
        sizes = {"train": self.max_train_samples, "validation": self.max_eval_samples}
        return {
            name: sample(rows, sizes[name.split("_")[0]], self.seed)
            for name, rows in splits.items()
            if not name.startswith("test")
        }


class Features:
    """The tf-idf of texts, or the differences and products of two texts' tf-idf."""

    def __init__(self, columns: Sequence[str], train_set: Dataset):
        self.columns = columns
        self.tfidf = TfidfVectorizer(token_pattern=WORD, ngram_range=(1, 2), min_df=2, sublinear_tf=True)
        try:
            self.tfidf.fit([text for column in columns for text in train_set[column]])
        except ValueError as error:
            raise ValueError(
                f"No word of the columns {list(columns)} is in two texts of the train set: there is nothing to count. "
                "A word has two letters or more, but in scripts without spaces each letter is one."
            ) from error

    def __call__(self, rows: Dataset) -> sparse.csr_matrix:
        parts = [self.tfidf.transform(rows[column]) for column in self.columns]
        if len(parts) == 1:
            return parts[0]
        first, second = parts
        product = first.multiply(second)
        return sparse.hstack([abs(first - second), product, product.sum(1)]).tocsr()


def label_values(task: TextTask, ids: dict[Any, int] | None, rows: Dataset, where: str) -> np.ndarray:
    """Labels (rows,): numbers, or ids of classes."""
    check_labels(rows, task.label_column, ids, task.regression, None, where)
    labels = encoded_labels(rows, task.label_column, rows[task.label_column], ids, task.regression, None, where)
    return np.array(labels, dtype=np.float32 if task.regression else np.int64)


def scores(task: TextTask, model: BaseEstimator, features: Any, labels: np.ndarray) -> dict[str, float]:
    """The metrics that the training scripts report; without correlations of a constant, which do not exist."""
    if task.regression:
        outputs = model.predict(features)[:, None]
    else:
        # A named class without a row in the training set is never predicted.
        outputs = np.full((features.shape[0], 1 + max(labels.max(), model.classes_.max())), np.log(1e-30))
        outputs[:, model.classes_] = np.log(np.maximum(model.predict_proba(features), 1e-30))
    values = evaluate_predictions(task, torch.tensor(outputs, dtype=torch.float32), torch.from_numpy(labels))
    return {metric: value for metric, value in values.items() if math.isfinite(value)}


def fit(task: TextTask, features: sparse.csr_matrix, labels: np.ndarray, seed: int) -> BaseEstimator:
    """The linear model whose regularization is best on a tenth of the rows."""
    model: BaseEstimator = LogisticRegression(max_iter=1000)
    grid: dict[str, list[float]] = {"C": list(STRENGTHS)}
    if task.regression:
        model, grid = Ridge(), {"alpha": [1 / strength for strength in STRENGTHS]}
    split = ShuffleSplit(1, test_size=0.1, random_state=seed)
    search = GridSearchCV(model, grid, cv=split, error_score="raise").fit(features, labels)
    best = STRENGTHS[search.best_index_]
    print(f"C = {best:g} of {', '.join(f'{strength:g}' for strength in STRENGTHS)}")
    return search.best_estimator_


def main(args: Sequence[str] | None = None) -> dict[str, dict[str, dict[str, float]]]:
    """Prints and returns the scores by validation set and baseline."""
    (arguments,) = parse_arguments((BaselineArguments,), args, __doc__)
    task, splits = arguments.task(), arguments.splits()
    for name, rows in splits.items():
        for column in (*task.text_columns, task.label_column):
            require_column(rows, column, f"the {name} set")
    train_set = splits.pop("train")
    if has_lists(train_set, task.label_column):
        raise ValueError(
            f"The rows of the train set have lists of labels in the column {task.label_column!r}, for which there is "
            "no baseline: give data with one label for each row."
        )
    for name, rows in {"train": train_set, **splits}.items():
        require_kind_of_labels(rows, task.label_column, several=False, where=f"the {name} set")
    ids = None if task.regression else task_classes(task, train_set)[0]
    labels = label_values(task, ids, train_set, "the train set")
    features = Features(task.text_columns, train_set)
    inputs = features(train_set)
    constant = DummyRegressor() if task.regression else DummyClassifier(strategy="prior")
    models = {
        "constant prediction": constant.fit(inputs, labels),
        "tf-idf and a linear model": fit(task, inputs, labels, arguments.seed),
    }
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name, rows in splits.items():
        print(f"{name}: {len(rows):,} rows, trained on {len(train_set):,}")
        known, inputs = label_values(task, ids, rows, f"the {name} set"), features(rows)
        results[name] = {baseline: scores(task, model, inputs, known) for baseline, model in models.items()}
        for baseline, values in results[name].items():
            print(f"  {baseline:<26}" + ", ".join(f"{metric} {value:.4f}" for metric, value in values.items()))
    if arguments.output_file is not None:
        Path(arguments.output_file).parent.mkdir(parents=True, exist_ok=True)
        Path(arguments.output_file).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    main()
