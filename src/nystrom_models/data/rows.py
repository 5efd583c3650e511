# SPDX-License-Identifier: Apache-2.0
"""Rows for a model, built from those of a data set."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset, Features, Value
from transformers import PreTrainedTokenizerBase

from .caching import with_code

# The most documents, and bytes of text, that are made into rows at once: documents may be books or chromosomes.
MOST_DOCUMENTS = 100
MOST_BYTES = 2**26


def documents_of_a_batch(dataset: Dataset, text_column: str, most: int = MOST_DOCUMENTS) -> int:
    """How many documents to read at once: `most`; fewer if they are long, but at least one. A batch of several has at
    most 67 million bytes of text, in whatever order the documents are."""
    if dataset.features[text_column] not in (Value("string"), Value("large_string")):
        return most
    lengths = pc.binary_length(dataset.data.column(text_column)).fill_null(0).to_numpy()
    longest = np.sort(lengths)[::-1][:most]
    return max(1, int(np.searchsorted(np.cumsum(longest), MOST_BYTES, side="right")))


class _Batch(Mapping[str, Sequence[Any]]):
    """A batch whose columns have a prefix, under the names without it. A column is decoded when it is read."""

    def __init__(self, batch: Mapping[str, Sequence[Any]]):
        self.batch = batch

    def __getitem__(self, name: str) -> Sequence[Any]:
        return self.batch[_PREFIX + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(_PREFIX) for name in self.batch)

    def __len__(self) -> int:
        return len(self.batch)


_PREFIX = "of the data: "


def make_rows(
    dataset: Dataset,
    build: Callable[[Mapping[str, Sequence[Any]], Sequence[int]], Mapping[str, Sequence[Any]]],
    batch_size: int,
    num_proc: int | None,
    load_from_cache_file: bool,
    desc: str,
    features: Features | None = None,
) -> Dataset:
    """The rows that a function builds from those of a data set, with their numbers in the column `index`.

    Args:
        dataset: its columns are removed.
        build: returns the columns of any number of new rows, from a batch and the numbers of its rows.
        batch_size: the largest number of rows of a batch.
        num_proc: processes of `datasets.Dataset.map`.
        load_from_cache_file: whether its cached result is used.
        desc: label of the progress bar.
        features: the new columns; needed if a batch may result in no row.
    """

    def build_rows(batch: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> Mapping[str, Sequence[Any]]:
        return build(_Batch(batch), indices)

    # Otherwise `datasets` would give a new column the type of a column of the data that has the same name.
    dataset = dataset.rename_columns({name: _PREFIX + name for name in dataset.column_names})
    rows = dataset.map(
        with_code(build_rows),
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


def cutting_on_the_right(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer that keeps the beginning of long texts, whatever side the given one cuts."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.truncation_side = "right"
    return tokenizer


def padding_on_the_right(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer for batches whose rows are read by the places of their tokens, which padding on the left
    would move. The given one, which is saved with the model, stays as it is."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.padding_side = "right"
    return tokenizer
