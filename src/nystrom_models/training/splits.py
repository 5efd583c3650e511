# SPDX-License-Identifier: Apache-2.0
"""The data sets of a run, by split, from the files or the Hub data set that its flags name."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, IterableDataset

from ..data.file_rows import decoded_lines
from ..data.files import file_ending, load_files
from ..data.pretraining import texts_of
from .arguments import DataArguments
from .language_modeling import LanguageModelingArguments

Files = Mapping[str, Sequence[str] | None]


def load_splits(
    files: Files, cache_dir: str | None = None, load: Callable[..., Dataset] = load_files
) -> dict[str, Dataset]:
    """Data sets by split, for the splits with files. The flag of a split is `--{split}_file`; for MNLI's matched sets,
    without the word "matched"."""
    return {
        split: load(paths, f"--{split.removesuffix('_matched')}_file", cache_dir)
        for split, paths in files.items()
        if paths is not None
    }


def load_data(
    args: DataArguments,
    test_file: Sequence[str] | None = None,
    train: bool = True,
    load: Callable[..., Dataset] = load_files,
) -> dict[str, Dataset]:
    """The splits `train`, `validation` and `test` from files, or else from `--dataset_name`.

    Args:
        args: the flags.
        test_file: files to predict.
        train: whether training rows are needed; if not, the data set may lack this split.
        load: reads the files of a split.

    Raises:
        ValueError: if both are given, or the data set has no such splits.
        PermissionError: if the cache is not writable.
    """
    check_cache(args.cache_dir)
    files = {"train": args.train_file, "validation": args.validation_file, "test": test_file}
    if args.dataset_name is None:
        _refuse_split(args)
        splits = load_splits(files, args.cache_dir, load)
        if load is load_files:
            _warn_of_lines(test_file or ())
        return splits
    _refuse_both(files)
    found = _load_hub(args)
    wanted = {"train": "train", "validation": args.validation_split or "validation"}
    for split, name in wanted.items():
        if name not in found and (train or split == "validation"):
            raise ValueError(
                f"{args.dataset_name} has no split {name!r}, but {list(found)}: --validation_split names the one to "
                "evaluate on."
            )
    splits = {split: found[name] for split, name in wanted.items() if name in found}
    return splits | ({"test": found["test"]} if "test" in found and wanted["validation"] != "test" else {})


def _refuse_split(args: DataArguments) -> None:
    """Raises a ValueError if files are given with a flag that is for data sets of the Hub."""
    if args.validation_split is not None:
        raise ValueError("--validation_split names a split of --dataset_name: for files, give --validation_file.")


def _warn_of_lines(test_file: Sequence[str]) -> None:
    """Warns of .txt files that were probably meant to have a text in each line."""
    for path in test_file:
        if file_ending(path) == ".txt":
            lines = "".join(decoded_lines(path)).strip().splitlines()
            if len(lines) > 1 and all(map(str.strip, lines)):
                warnings.warn(
                    f"--test_file {path} has {len(lines)} lines and no empty line, so that all of it is one text with "
                    "one prediction: put an empty line between texts, or write them into a .csv file with the header "
                    "text.",
                    stacklevel=3,
                )


def _load_hub(args: DataArguments, **options: Any) -> Any:
    return datasets.load_dataset(args.dataset_name, args.dataset_config_name, cache_dir=args.cache_dir, **options)


def _refuse_both(files: Files) -> None:
    if given := [f"--{split}_file" for split, paths in files.items() if paths is not None]:
        raise ValueError(f"Give either --dataset_name or files, but not both: {', '.join(given)}.")


def sample(dataset: Dataset, size: int | None, seed: int) -> Dataset:
    """A random sample of `size` rows; all rows if `size` is None or larger than the data set."""
    return dataset if size is None or size >= len(dataset) else dataset.shuffle(seed).select(range(size))


def check_cache(cache_dir: str | None) -> None:
    """Raises a PermissionError if `datasets` could not write to its cache, such as that of another user."""
    folder = Path(cache_dir or datasets.config.HF_DATASETS_CACHE).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not os.access(existing, os.W_OK):
        given = f"--cache_dir {cache_dir}" if cache_dir else f"The cache of `datasets`, {folder},"
        raise PermissionError(f"{given} is not writable: give {'another' if cache_dir else '--cache_dir'}.")


def load_documents(args: LanguageModelingArguments) -> dict[str, Dataset | IterableDataset]:
    """Documents for pretraining: `train`, which is a stream with `--streaming`, and `validation`.

    If no validation data are given, documents of `train` are held out: a random `--validation_split_percentage` of
    them, or the first `--max_eval_samples` of a stream. `--max_train_samples` and `--max_eval_samples` limit both.
    With `--no_do_train`, validation data alone are enough.

    Raises:
        ValueError: if the flags give no data or both a data set and files, if there are too few documents, or if the
            split of `--validation_split` does not exist.
    """
    check_cache(args.cache_dir)
    train, validation = _load_documents(args)
    if args.streaming:
        return _stream(args, train, validation)
    if validation is None:
        percentage = args.validation_split_percentage
        held_out = round(len(train) * percentage / 100)
        if not 0 < held_out < len(train):
            raise ValueError(
                f"--validation_split_percentage {percentage:g} of {len(train)} documents holds out "
                f"{held_out}: give --validation_file, or a percentage that leaves documents on both sides."
            )
        # Held out before sampling, so that no sample for training contains held-out documents.
        parts = train.train_test_split(test_size=held_out, seed=args.seed)
        train, validation = parts["train"], parts["test"]
    held = {"validation": sample(validation, args.max_eval_samples, args.seed)}
    return held if train is None else {"train": sample(train, args.max_train_samples, args.seed), **held}


def _load_documents(args: LanguageModelingArguments) -> tuple[Any, Any]:
    """Documents for training and for validation; one of them can be None, training only with `--no_do_train`."""
    if args.dataset_name is None:
        _refuse_split(args)
        train = validation = None
        if args.do_train or args.validation_file is None:
            if args.train_file is None:
                what = "train on are needed:" if args.do_train else "evaluate on are needed: --validation_file FILE,"
                raise ValueError(f"Documents to {what} --train_file FILE, or --dataset_name NAME.")
            train = load_files(args.train_file, "--train_file", args.cache_dir, args.streaming)
        if args.validation_file is not None:
            validation = load_files(args.validation_file, "--validation_file", args.cache_dir)
        return train, validation
    _refuse_both({"train": args.train_file, "validation": args.validation_file})
    found = _load_hub(args, streaming=args.streaming)
    validation_split = args.validation_split or "validation"
    train_split = "train" if args.do_train or validation_split not in found else None
    # Documents are held out only if no split was named: a misspelt name is an error.
    for split in (train_split, args.validation_split):
        if split is not None and split not in found:
            raise ValueError(f"--dataset_name {args.dataset_name} has no split {split!r}, but {list(found)}.")
    return found[train_split] if train_split else None, found.get(validation_split)


def first_documents(documents: IterableDataset, number: int, text_column: str, **counted: str) -> Dataset:
    """The texts of the first documents of a stream. Other columns are left out, unless there are no texts: the types
    of their values may differ.

    Args:
        counted: of [`texts_of`].

    Raises:
        ValueError: if one of them is not a text.
    """
    rows = list(documents.take(number))
    if not any(text_column in row for row in rows):
        return Dataset.from_list(rows, split=documents.split)
    texts = {text_column: [row.get(text_column) for row in rows]}
    column = texts_of(texts, range(len(rows)), text_column, **counted)
    return Dataset.from_dict({text_column: column}, split=documents.split)


def _stream(
    args: LanguageModelingArguments, train: IterableDataset | None, validation: Dataset | IterableDataset | None
) -> dict[str, Dataset | IterableDataset]:
    if not isinstance(validation, Dataset):
        if args.max_eval_samples is None:
            raise ValueError(
                "With --streaming, the number of documents to evaluate on must be given: for example "
                "--max_eval_samples 500, or --validation_file."
            )
        held_out = validation is None
        if validation is None:
            assert train is not None
            validation, train = train.take(args.max_eval_samples), train.skip(args.max_eval_samples)
        counted = "counted among the held-out ones"
        validation = first_documents(validation, args.max_eval_samples, args.text_column_name, counted=counted)
        if held_out and args.do_train and train is not None and next(iter(train), None) is None:
            raise ValueError(
                f"--max_eval_samples {args.max_eval_samples} holds out all documents of the stream: give fewer, or "
                "--validation_file."
            )
    elif args.max_eval_samples is not None:
        validation = sample(validation, args.max_eval_samples, args.seed)
    if train is None:
        return {"validation": validation}
    if args.max_train_samples is not None:
        train = train.take(args.max_train_samples)
    return {"train": train, "validation": validation}
