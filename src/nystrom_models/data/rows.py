# SPDX-License-Identifier: Apache-2.0
"""Rows for a model, made from those of a data set."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from datasets import Dataset, Features


def make_rows(
    dataset: Dataset,
    build: Callable[[Mapping[str, Sequence[Any]], Sequence[int]], Mapping[str, Sequence[Any]]],
    batch_size: int,
    num_proc: int | None,
    load_from_cache_file: bool,
    desc: str,
    features: Features | None = None,
) -> Dataset:
    """The rows that a function makes of the rows of a data set, and in the column `index` their numbers.

    Args:
        dataset: its columns are removed.
        build: the columns of new rows, any number of them, from a batch and the numbers of its rows.
        batch_size: the largest number of rows of a batch.
        num_proc: processes of `datasets.Dataset.map`.
        load_from_cache_file: whether its cached result is used.
        desc: label of the progress bar.
        features: the new columns; needed if a batch may give no row.
    """
    rows = dataset.map(
        build,
        batched=True,
        batch_size=batch_size,
        with_indices=True,
        remove_columns=dataset.column_names,
        num_proc=num_proc,
        load_from_cache_file=load_from_cache_file,
        features=features,
        desc=desc,
    )
    return rows.add_column("index", range(len(rows)))
