# SPDX-License-Identifier: Apache-2.0
"""Data sets of generated rows, the same for any number of processes, and of rows read from files."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, Features, Value

_ROWS_OF_A_PART = 500
# Part of the names of cached rows: increase it when the rows of a seed change.
_VERSION = 1


def _rows(rows: Callable[..., Iterator[Any]], version: Any, **options: Any) -> Iterator[Any]:
    """For `datasets`, which identifies cached data by the arguments of the function that made them."""
    return rows(**options)


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
        rows: a generator function of rows `text` and `label`, with the arguments `numbers`, a list of ranges, `name`,
            and `options`. A row depends only on its number, `name` and `options`.
        sizes: number of rows by split.
        seed: of all splits; each split is drawn independently.
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
            _rows,
            features=features,
            cache_dir=cache_dir,
            gen_kwargs={
                "rows": rows,
                "version": _VERSION,
                "numbers": parts,
                "name": f"{split}-{seed}",
                **options,
            },
            num_proc=None if num_proc is None else min(num_proc, len(parts)),
            split=split,
        )
    return found


def read_files(
    rows: Callable[..., Any],
    paths: Sequence[Path],
    features: Features,
    split: str,
    cache_dir: str | None = None,
    **options: Any,
) -> Dataset:
    """A data set of the rows that a generator function reads from files, cached until one of these changes.

    Args:
        rows: takes `paths`, a list of names, and `options`.
        paths: existing files.
        features, split, cache_dir: as of `datasets`.
        options: further arguments of `rows`.
    """
    stamps = " ".join(f"{path.stat().st_size}-{path.stat().st_mtime_ns}" for path in paths)
    return Dataset.from_generator(
        _rows,
        features=features,
        cache_dir=cache_dir,
        gen_kwargs={
            "rows": rows,
            "version": f"{_VERSION} {stamps}",
            "paths": [str(path.resolve()) for path in paths],
            **options,
        },
        split=split,
    )
