# SPDX-License-Identifier: Apache-2.0
"""Checks by the number of rows and their classes that a data set is the known one."""

from collections import Counter

from datasets import Dataset


def require_counts(
    dataset: Dataset, label_column: str, count: int, what: str, where: str, balanced: bool = True
) -> None:
    """Raises ValueError unless there are `count` rows, and, if `balanced`, as many of each class.

    Args:
        what: the name of the data set in the message.
        where: a sentence on where to get it.
    """
    classes = Counter(dataset[label_column])
    if len(dataset) != count or (balanced and len(set(classes.values())) > 1):
        shares = ", ".join(f"{number:,} of class {label}" for label, number in sorted(classes.items(), key=str))
        raise ValueError(
            f"{what[0].upper()}{what[1:]} has {count:,} rows{', as many of each class' if balanced else ''}, but "
            f"these are {len(dataset):,}: {shares}. {where}. --max_train_samples trains on a part of the whole set."
        )
