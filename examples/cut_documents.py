# SPDX-License-Identifier: Apache-2.0
"""Cut long documents, such as books, into pieces with the document's label, to train and evaluate classifiers.

    python examples/cut_documents.py --input_file novels.jsonl --num_words 5000 --skip_words 300 --max_pieces 20 \\
        --output_file pieces.jsonl

writes a row for each piece: its text on one line, all other columns of its document, and the document's number from 0
in the column document. Cut training and test documents separately, so that no document is in both.
"""

import datetime
import gzip
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value

from nystrom_models.data import load_files
from nystrom_models.data.classification import require_column
from nystrom_models.data.files import file_ending
from nystrom_models.training.arguments import parse_arguments

# Characters of a word on average; in no language that separates words by spaces are there half as many.
LONGEST_WORDS = 50


@dataclass(kw_only=True)
class CutArguments:
    """Documents, and the size and number of their pieces."""

    input_file: list[str] = field(
        metadata={"help": "Files with a document in each row: .json, .jsonl, .csv, .tsv or .parquet, each also .gz."}
    )
    output_file: str = field(metadata={"help": "File for the pieces: .jsonl or .jsonl.gz."})
    num_words: int = field(metadata={"help": "Words of a piece, as separated by white space."})
    text_column_name: str = field(default="text", metadata={"help": "Column of the documents' texts."})
    label_column_name: str | None = field(
        default=None, metadata={"help": "Column of the label: documents without one (-1 or null) are left out."}
    )
    skip_words: int = field(default=0, metadata={"help": "Leave out the first words of each document, this many."})
    max_pieces: int | None = field(
        default=None,
        metadata={"help": "Largest number of pieces of a document, spread evenly over it; by default all."},
    )
    cache_dir: str | None = field(default=None, metadata={"help": "Folder where prepared data are cached."})

    def __post_init__(self):
        for name, least in (("num_words", 1), ("skip_words", 0), ("max_pieces", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"--{name} must be at least {least}, but is {value}.")
        for path in self.input_file:
            if file_ending(path) == ".txt":
                raise ValueError(
                    f"--input_file {path}: an empty line ends a document of a .txt file, and it has no label. Give a "
                    ".jsonl file with a whole document in each row."
                )
        if not self.output_file.endswith((".jsonl", ".jsonl.gz")):
            raise ValueError(f"--output_file must end in .jsonl or .jsonl.gz, but is {self.output_file}.")
        if Path(self.output_file).resolve() in (Path(path).resolve() for path in self.input_file):
            raise ValueError(f"--output_file {self.output_file} is one of --input_file, whose texts would be lost.")


def pieces(text: str, num_words: int, skip_words: int = 0, max_pieces: int | None = None) -> Iterator[str]:
    """Pieces of exactly `num_words` words, without overlap; words after the last whole piece are left out. A document
    with fewer words after `skip_words` is one piece, unless none is left."""
    words = text.split()[skip_words:]
    number = len(words) // num_words or min(len(words), 1)
    chosen = number if max_pieces is None else min(number, max_pieces)
    for i in range(chosen):
        start = i * number // chosen * num_words
        yield " ".join(words[start : start + num_words])


def warn_of_long_words(texts: Iterable[str]) -> None:
    """Warns if words are too long to be words, as in Chinese: a whole document is one of them, and one piece."""
    characters, words = np.sum([(len(text), text.count(" ") + 1) for text in texts], axis=0)
    if characters > LONGEST_WORDS * words:
        warnings.warn(
            f"The words of these texts, as separated by white space, have {characters / words:.0f} characters on "
            "average, so pieces of --num_words are too long, or not cut at all. Put spaces between words or characters"
            " first.",
            stacklevel=2,
        )


def as_json(value: Any) -> str:
    """For values of other formats that JSON has not: dates are texts."""
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    raise ValueError(f"--input_file has a column with {str(value)[:40]!r}, which JSON cannot hold: leave it out.")


def write_lines(rows: Dataset, path: str) -> None:
    """Writes a JSON object a line, with all digits of numbers."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    # An error leaves an older file as it is.
    part = Path(f"{path}.part")
    try:
        with (gzip.open if path.endswith(".gz") else open)(part, "wt", encoding="utf-8") as out:
            out.writelines(json.dumps(row, ensure_ascii=False, default=as_json) + "\n" for row in rows)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def whole_labels(documents: Dataset, label: str) -> Dataset:
    """The numbers of classes as integers: a missing one makes a column of a table floating-point."""
    given = [value for value in documents[label] if value is not None]
    feature = documents.features[label]  # lists, of several labels, are no Value
    is_float = isinstance(feature, Value) and feature.dtype.startswith("float")
    if is_float and all(value.is_integer() for value in given):
        return documents.cast_column(label, Value("int64"))
    return documents


def main(args: Sequence[str] | None = None) -> Dataset:
    """Runs the script with command-line arguments, and returns the pieces that it wrote."""
    (arguments,) = parse_arguments((CutArguments,), args, __doc__)
    text, label = arguments.text_column_name, arguments.label_column_name
    size = (arguments.num_words, arguments.skip_words, arguments.max_pieces)
    documents = load_files(arguments.input_file, "--input_file", arguments.cache_dir)
    require_column(documents, text, "--input_file")
    if (kind := getattr(documents.features[text], "dtype", "lists")) not in ("string", "large_string"):
        raise ValueError(f"--text_column_name {text} must name a column of texts, but it holds {kind}.")
    if label is not None:
        require_column(documents, label, "--input_file", values=False)
        documents = whole_labels(documents, label)
    if "document" in documents.column_names:
        raise ValueError("--input_file has a column 'document', where the documents' numbers go: rename it.")

    def rows() -> Iterator[dict[str, Any]]:
        for number, document in enumerate(documents):
            if label is None or document[label] not in (-1, None):
                for piece in pieces(document[text] or "", *size):
                    yield {**document, text: piece, "document": number}

    if next(rows(), None) is None:
        labelled = "" if label is None else f"a label in {label!r} and "
        raise ValueError(f"No document has {labelled}more than --skip_words {arguments.skip_words} words.")
    features = Features({**documents.features, "document": Value("int64")})
    found = Dataset.from_generator(rows, features, cache_dir=arguments.cache_dir)
    write_lines(found, arguments.output_file)
    warn_of_long_words(found[text])
    used = len(found.unique("document"))
    print(f"{len(found):,} pieces of {used:,} documents in {arguments.output_file}", end="")
    left = len(documents) - used
    print(f"; {left:,} document{'s' * (left > 1)} left out." if left else ".")
    return found


if __name__ == "__main__":
    main()
