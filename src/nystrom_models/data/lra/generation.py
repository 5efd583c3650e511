# SPDX-License-Identifier: Apache-2.0
"""Data sets of generated rows, the same for any number of processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from datasets import ClassLabel, Dataset, Features, Value

from ..caching import with_code

_ROWS_OF_A_PART = 500


def _drawn(
    draw: Callable[..., tuple[str, int]], numbers: Sequence[range], name: str, **options: Any
) -> Iterator[dict[str, Any]]:
    """A row for each number. `datasets` identifies cached data by these arguments."""
    for part in numbers:
        for number in part:
            text, label = draw(f"{name}-{number}", **options)
            yield {"text": text, "label": label}


def generate(
    draw: Callable[..., tuple[str, int]],
    sizes: Mapping[str, int],
    seed: int,
    label_names: tuple[str, ...],
    num_proc: int | None = None,
    cache_dir: str | None = None,
    **options: Any,
) -> dict[str, Dataset]:
    """Data sets by split, which are cached on disk.

    Args:
        draw: returns the text and the label that belong to a seed, a string, and `options`.
        sizes: number of rows by split.
        seed: of all splits; each split is drawn independently.
        label_names: the classes.
        num_proc: processes, among which the ranges are divided.
        cache_dir: as of `datasets`.
        options: further arguments of `draw`.
    """
    features = Features({"text": Value("string"), "label": ClassLabel(names=list(label_names))})
    found = {}
    for split, size in sizes.items():
        starts = range(0, size, _ROWS_OF_A_PART)
        parts = [range(start, min(start + _ROWS_OF_A_PART, size)) for start in starts]
        found[split] = Dataset.from_generator(
            with_code(_drawn),
            features=features,
            cache_dir=cache_dir,
            gen_kwargs={
                "draw": draw,
                "numbers": parts,
                "name": f"{split}-{seed}",
                **options,
            },
            num_proc=None if num_proc is None else min(num_proc, len(parts)),
            split=split,
        )
    return found
