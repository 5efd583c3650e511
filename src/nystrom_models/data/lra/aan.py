# SPDX-License-Identifier: Apache-2.0
"""Pairs of papers of the ACL Anthology Network (Radev et al. 2013), from the files of the Long Range Arena."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from datasets import ClassLabel, Dataset, Features, Value

from ..file_rows import decoded_lines, rows_of_files
from .counts import require_counts

FILES = {
    split: f"new_aan_pairs.{name}.tsv"
    for split, name in (("train", "train"), ("validation", "eval"), ("test", "test"))
}
COUNTS = {"train": 147_086, "validation": 18_090, "test": 17_437}
WHERE = (
    "lra_release.gz, which https://github.com/google-research/long-range-arena links to, holds "
    "new_aan_pairs.train.tsv, .eval.tsv and .test.tsv in its folder tsv_data"
)
_COLUMNS = ("label", "id1", "id2", "text1", "text2")
_FEATURES = Features(
    {"text1": Value("string"), "text2": Value("string"), "label": ClassLabel(names=["unrelated", "related"])}
)


def _rows(files: Sequence[tuple[str, int, int]], max_bytes: int) -> Iterator[dict[str, str | int]]:
    for path, _, _ in files:
        for number, line in enumerate(decoded_lines(path), start=1):
            row = line.rstrip("\r\n").split("\t")
            if len(row) != len(_COLUMNS) or row[0] not in ("0", "1", "0.0", "1.0"):
                raise ValueError(
                    f"{path}, line {number}: expected a label of 0 or 1, two ids and two texts, separated by tabs. "
                    f"{WHERE}."
                )
            # The model would not read the rest, which is most of the file.
            texts = [text.encode()[:max_bytes].decode(errors="ignore") for text in row[3:]]
            yield {"text1": texts[0], "text2": texts[1], "label": int(float(row[0]))}


def load_aan(data_dir: str | os.PathLike | None, max_bytes: int, cache_dir: str | None = None) -> dict[str, Dataset]:
    """`train`, `validation` and `test`, with columns `text1`, `text2` and `label`.

    Args:
        data_dir: the folder of the three files.
        max_bytes: texts are cut to this many bytes, at the end of a character.
        cache_dir: as of `datasets`.

    Raises:
        FileNotFoundError, ValueError: if a file is missing or damaged, or has another number of rows.
    """
    missing = [name for name in FILES.values() if data_dir is None or not Path(data_dir, name).is_file()]
    if missing:
        raise FileNotFoundError(f"--data_dir {data_dir or 'FOLDER'} must hold {', '.join(missing)}: {WHERE}.")
    found = {
        split: rows_of_files(
            _rows, _FEATURES, [str(Path(str(data_dir), name))], "--data_dir", cache_dir, split, max_bytes=max_bytes
        )
        for split, name in FILES.items()
    }
    for split, rows in found.items():
        require_counts(rows, "label", COUNTS[split], f"the {split} set of AAN", WHERE, balanced=False)
    return found
