# SPDX-License-Identifier: Apache-2.0
"""Generated data sets: the same rows for any number of processes."""

from collections.abc import Callable, Mapping
from typing import Any

from datasets import ClassLabel, Dataset, Features, Value

_ROWS_OF_A_PART = 500


def generate(
    rows: Callable[..., Any],
    sizes: Mapping[str, int],
    seed: int,
    label_names: tuple[str, ...],
    num_proc: int | None = None,
    cache_dir: str | None = None,
    **options: Any,
) -> dict[str, Dataset]:
    """Data sets by split, which are cached on disk.

    Args:
        rows: a generator function of rows `text` and `label`, which takes `numbers`, a list of ranges, `name`, which
            with a number determines a row, and `options`.
        sizes: number of rows by split.
        seed: of all splits, which have no row in common.
        label_names: the classes.
        num_proc: processes, among which the ranges are divided.
        cache_dir: as of `datasets`.
        options: further arguments of `rows`.
    """
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(label_names))})
    found = {}
    for split, size in sizes.items():
        starts = range(0, size, _ROWS_OF_A_PART)
        parts = [range(start, min(start + _ROWS_OF_A_PART, size)) for start in starts]
        found[split] = Dataset.from_generator(
            rows,
            features=features,
            cache_dir=cache_dir,
            gen_kwargs={"numbers": parts, "name": f"{split}-{seed}", **options},
            num_proc=None if num_proc is None else min(num_proc, len(parts)),
            split=split,
        )
    return found
