# SPDX-License-Identifier: Apache-2.0
"""CIFAR-10 (Krizhevsky 2009) in grey, from its binary files or the Hub."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from datasets import ClassLabel, Dataset, Features, Value, load_dataset

from ..caching import with_code
from ..file_rows import rows_of_files
from .counts import require_counts
from .pictures import to_text

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
REPOSITORY = "uoft-cs/cifar10"
FILES = {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]}
COUNTS = {"train": 50_000, "test": 10_000}
_ROW = 1 + 3 * 32 * 32  # bytes: the class, then red, green and blue
_FEATURES = Features({"text": Value("string"), "label": ClassLabel(names=list(CLASSES))})
WHERE = (
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz (170,052,171 bytes, SHA-256 "
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd) holds them; the Python version, whose files "
    "are pickles that may run code, is not read"
)


def to_grey(colours: np.ndarray) -> np.ndarray:
    """Luma of ITU-R BT.601 as uint8 (B, 1024), from red, green and blue, uint8 (B, 3, 1024)."""
    return np.rint(np.array([0.299, 0.587, 0.114]) @ colours.astype(np.float64)).astype(np.uint8)


def _binary_rows(files: Sequence[tuple[str, int, int]]) -> Iterator[dict[str, str | int]]:
    for path, _, _ in files:
        content = np.fromfile(path, dtype=np.uint8)
        if len(content) % _ROW:
            raise ValueError(f"{path} is damaged: its {len(content):,} bytes are not a multiple of {_ROW}. {WHERE}.")
        rows = content.reshape(-1, _ROW)
        if len(rows) and rows[:, 0].max() >= len(CLASSES):
            raise ValueError(f"{path} is not a file of CIFAR-10: it has a class {rows[:, 0].max()}. {WHERE}.")
        for label, grey in zip(rows[:, 0], to_grey(rows[:, 1:].reshape(-1, 3, 1024)), strict=True):
            yield {"text": to_text(grey), "label": int(label)}


def _grey_texts(batch: dict[str, list]) -> dict[str, list]:
    colours = np.stack([np.asarray(picture.convert("RGB")) for picture in batch["img"]])
    grey = to_grey(colours.reshape(len(colours), 1024, 3).transpose(0, 2, 1))
    return {"text": [to_text(row) for row in grey], "label": batch["label"]}


def load_cifar(
    data_dir: str | os.PathLike | None = None, cache_dir: str | None = None, num_proc: int | None = None
) -> dict[str, Dataset]:
    """`train`, `validation` and `test`, with a picture as `text` and its class as `label`.

    Args:
        data_dir: the folder of `data_batch_1.bin` and the others, or its parent folder; None for the Hub, whose
            pictures need Pillow.
        cache_dir, num_proc: as of `datasets`.

    Raises:
        FileNotFoundError, ValueError: if a file is missing or damaged, or the rows are not those of CIFAR-10.
    """
    if data_dir is None:
        found = {
            split: rows.map(
                with_code(_grey_texts),
                batched=True,
                remove_columns=rows.column_names,
                features=_FEATURES,
                num_proc=num_proc,
            )
            for split, rows in load_dataset(REPOSITORY, cache_dir=cache_dir).items()
        }
    else:
        folder = Path(data_dir)
        if (folder / "cifar-10-batches-bin").is_dir():
            folder /= "cifar-10-batches-bin"
        missing = [name for names in FILES.values() for name in names if not (folder / name).is_file()]
        if missing:
            raise FileNotFoundError(f"--data_dir {data_dir} lacks {', '.join(missing)}. {WHERE}.")
        found = {
            split: rows_of_files(
                _binary_rows, _FEATURES, [str(folder / name) for name in names], "--data_dir", cache_dir, split
            )
            for split, names in FILES.items()
        }
    for split, rows in found.items():
        require_counts(rows, "label", COUNTS[split], f"the {split} set of CIFAR-10", WHERE)
    train = found["train"]
    first = len(train) * 9 // 10  # the last tenth is held out, as in the Long Range Arena
    return {
        "train": train.select(range(first)),
        "validation": train.select(range(first, len(train))),
        "test": found["test"],
    }
