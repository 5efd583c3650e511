# SPDX-License-Identifier: Apache-2.0
"""Rows for causal language modeling: documents one after another, packed into rows of one length, and their collator.

A document is tokenized as a prompt is, and ended by an end-of-sequence token (eos). A row stores where documents begin
in it, so that no state crosses from one document to the next (the models' `seq_idx`), and the first token of a
document is not predicted from another document.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Features, IterableDataset, Value
from datasets import Sequence as Column
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..models.losses import IGNORED
from .caching import with_code
from .encoding import encode_texts
from .pretraining import MAX_ROWS_OF_A_DOCUMENT, texts_of
from .rows import documents_of_a_batch
from .special_tokens import Template
from .streams import StreamLoader, stream_columns
from .unknown_text import check_known_documents

# This many documents are packed together; only their last row may be short.
DOCUMENTS_OF_A_BATCH = 1000

TOKENS = Features(
    {"input_ids": Column(Value("int32")), "token_bytes": Column(Value("int32")), "number": Value("int64")}
)
ROWS = Features(
    {
        "input_ids": Column(Value("int32")),
        "document_starts": Column(Value("int32")),
        "length": Value("int32"),
        "num_bytes": Value("int64"),
        "index": Value("int64"),
    }
)


def causal_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of a tokenizer that does not end a prompt: special tokens stand only before the text.

    BERT's tokenizer turns a text into `[CLS] text [SEP]`. A trained model would generate nothing after `[SEP]`. The
    copy of such a tokenizer gives `[CLS] text`, with `[CLS]` as bos and `[SEP]` as eos token if it has no others.
    Other tokenizers are copied unchanged. The copy pads on the left, as generation needs.

    Raises:
        ValueError: if it is not a fast tokenizer, or has no token that can be eos.
    """
    if not tokenizer.is_fast:
        raise ValueError("tokenizer must be a fast tokenizer, as AutoTokenizer loads it: its offsets are needed.")
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = "left"
    for name, other in (("bos_token", "cls_token"), ("eos_token", "sep_token")):
        if getattr(tokenizer, name) is None and getattr(tokenizer, other) is not None:
            setattr(tokenizer, name, getattr(tokenizer, other))
    if tokenizer.eos_token is None:
        raise ValueError(
            "The tokenizer has no token that ends a document: set its eos_token, as in "
            'tokenizer.add_special_tokens({"eos_token": "</s>"}), and save it.'
        )
    before, after = Template(tokenizer, 1).special
    if not after:
        return tokenizer
    names = tokenizer.convert_ids_to_tokens(before)
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single=[*names, "$A"], pair=[*names, "$A", "$B:1"], special_tokens=list(zip(names, before, strict=True))
    )
    # The general class: BERT's own class, for example, would add its special tokens again when it is loaded.
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=tokenizer.model_max_length,
        model_input_names=["input_ids", "attention_mask"],
        padding_side="left",
        extra_special_tokens=list(tokenizer.extra_special_tokens),
        **tokenizer.special_tokens_map,
    )


def _token_bytes(text: str, ends: np.ndarray) -> np.ndarray:
    """The number of UTF-8 bytes of the text that each token stands for, int64 of shape (tokens,). They are counted
    from the end of the previous token to its own end, so that spaces count with the token after them.

    ends: the number of characters up to the end of each token, ascending.
    """
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    before = np.concatenate([[0], np.cumsum(widths)])  # of each character
    return np.diff(before[ends], prepend=0)


def encode_documents(
    documents: Mapping[str, Sequence[Any]],
    indices: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    text_column: str = "text",
) -> dict[str, list]:
    """Token ids of a batch of documents, with eos at their ends, and the number of bytes that each token stands for.

    Bytes that no token stands for, such as spaces at the end, count with eos: the bytes of a document add up to those
    of its text. `number` is the document's number in `indices`. Documents without text are left out.
    """
    texts = texts_of(documents, indices, text_column)
    before = np.array(Template(tokenizer, 1).special[0], dtype=np.int32)
    found: dict[str, list] = {name: [] for name in TOKENS}
    for number, text, (ids, ends, _) in zip(indices, texts, encode_texts(texts, tokenizer), strict=True):
        if not len(ids):
            continue
        num_bytes = _token_bytes(text, ends)
        rest = len(text.encode("utf-8", "surrogatepass")) - num_bytes.sum()
        found["input_ids"].append(np.concatenate([before, ids, [tokenizer.eos_token_id]]).astype(np.int32))
        found["token_bytes"].append(np.concatenate([0 * before, num_bytes, [rest]]).astype(np.int32))
        found["number"].append(number)
    return found


def _cut(starts: np.ndarray, num_tokens: int, block_size: int) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of rows. A row that continues a document begins with the last token of the previous row,
    which predicted nothing there. So each token of a document except the first is predicted once."""
    first = 0
    while first + 1 < num_tokens:
        end = min(first + block_size, num_tokens)
        yield first, end
        if end == num_tokens:
            return
        place = np.searchsorted(starts, end)
        first = end if place < len(starts) and starts[place] == end else end - 1


def pack_rows(documents: Mapping[str, Sequence[Any]], block_size: int) -> dict[str, list]:
    """Documents of [`encode_documents`], packed one after another into rows of `block_size` tokens; the last row may
    be shorter.

    `num_bytes` counts the bytes of the tokens that are predicted. `index` is the number of the row's first document
    times 2^24, plus the number of the row among the rows that begin in this document.
    """
    rows: dict[str, list] = {name: [] for name in ROWS}
    if len(documents["input_ids"]) == 0:
        return rows
    ids, token_bytes = (np.concatenate(list(documents[name])) for name in ("input_ids", "token_bytes"))
    lengths = [len(tokens) for tokens in documents["input_ids"]]
    starts = np.cumsum([0, *lengths[:-1]])
    begun: dict[int, int] = {}  # rows that begin in a document
    for first, end in _cut(starts, len(ids), block_size):
        inside = starts[np.searchsorted(starts, first, side="right") : np.searchsorted(starts, end)]
        number = int(documents["number"][np.searchsorted(starts, first, side="right") - 1])
        rows["input_ids"].append(ids[first:end])
        rows["document_starts"].append((inside - first).astype(np.int32))
        rows["length"].append(end - first)
        rows["num_bytes"].append(int(token_bytes[first + 1 : end].sum() - token_bytes[inside].sum()))
        rows["index"].append(number * MAX_ROWS_OF_A_DOCUMENT + begun.get(number, 0))
        begun[number] = begun.get(number, 0) + 1
    return rows


def build_causal_rows(
    documents: Mapping[str, Sequence[Any]],
    indices: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    text_column: str = "text",
) -> dict[str, list]:
    """The rows of a batch of documents, for a [`StreamLoader`]."""
    return pack_rows(encode_documents(documents, indices, tokenizer, text_column), block_size)


def _check(
    documents: Dataset | IterableDataset,
    column_names: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    text_column: str,
) -> None:
    if text_column not in column_names:
        raise ValueError(f"text_column={text_column!r} does not exist; the columns are {list(column_names)}.")
    if not 2 <= block_size <= tokenizer.model_max_length:
        raise ValueError(
            f"block_size must lie between 2 and {tokenizer.model_max_length}, the tokenizer's model_max_length, but "
            f"is {block_size}."
        )
    if tokenizer.eos_token_id is None or Template(tokenizer, 1).special[1]:
        raise ValueError(
            "tokenizer must have an eos token and must not end texts with it: use causal_tokenizer(tokenizer)."
        )
    check_known_documents(documents, [text_column], tokenizer, f"the column {text_column!r}")


def causal_dataset(
    dataset: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    text_column: str = "text",
    num_proc: int | None = None,
    load_from_cache_file: bool = True,
    desc: str = "Building rows",
) -> Dataset:
    """Rows for causal language modeling, from a data set with one document in each row.

    Each document is tokenized once, ended by eos, and packed with others into rows of `block_size` tokens. All rows
    are full, except the last of every 1,000 documents. Where a document is cut, the next row begins with the last
    token before the cut, so that each token of a document except the first is predicted once. With a tokenizer that
    begins texts with a bos token, the bytes of all rows therefore add up to those of all texts.

    Args:
        dataset: one document in each row.
        tokenizer: one that [`causal_tokenizer`] returned.
        block_size: tokens of a row.
        text_column: the column that holds the documents.
        num_proc: number of processes that tokenize (`datasets.Dataset.map`, which also caches the result).
        load_from_cache_file: whether a cached result is used.
        desc: label of the progress bar.

    Returns:
        Columns, as NumPy arrays: `input_ids` (int32), `document_starts` (int32, where documents begin within the row,
        not counting its first token), `length`, `num_bytes` (UTF-8 bytes of the tokens that are predicted) and `index`
        (the number of the row).

    Raises:
        ValueError: if `block_size` is below 2 or exceeds the tokenizer's limit, `text_column` does not exist, the
            tokenizer was not made by [`causal_tokenizer`] or knows less than half of the text, or the documents give
            no row.
    """
    _check(dataset, dataset.column_names, tokenizer, block_size, text_column)
    options: dict[str, Any] = {"batched": True, "load_from_cache_file": load_from_cache_file}
    tokens = dataset.map(
        with_code(partial(encode_documents, tokenizer=tokenizer, text_column=text_column)),
        with_indices=True,
        batch_size=documents_of_a_batch(dataset, text_column),
        remove_columns=dataset.column_names,
        features=TOKENS,
        num_proc=num_proc,
        desc=desc,
        **options,
    )
    # In one process: several would divide the documents differently and give other rows.
    rows = tokens.with_format("numpy").map(
        with_code(partial(pack_rows, block_size=block_size)),
        batch_size=DOCUMENTS_OF_A_BATCH,
        remove_columns=tokens.column_names,
        features=ROWS,
        desc=f"{desc}: packing",
        **options,
    )
    if len(rows) == 0:
        raise ValueError(f"The column {text_column!r} of the {len(dataset)} documents contains no text.")
    rows = rows.remove_columns("index").add_column("index", np.arange(len(rows)))
    return rows.with_format("numpy")


def causal_stream(
    documents: IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    collate_fn: "CausalCollator",
    block_size: int,
    seed: int = 0,
    text_column: str = "text",
    **options: Any,
) -> StreamLoader:
    """A [`StreamLoader`] of rows as [`causal_dataset`] makes them. `options` are passed to the loader.

    Raises:
        ValueError: as [`causal_dataset`], and if the stream contains no document.
    """
    _check(documents, stream_columns(documents), tokenizer, block_size, text_column)
    build_rows = partial(build_causal_rows, tokenizer=tokenizer, block_size=block_size, text_column=text_column)
    blank = {"input_ids": [tokenizer.eos_token_id] * 2, "document_starts": [], "index": 0}
    options = {"documents_of_a_batch": DOCUMENTS_OF_A_BATCH, **options}
    return StreamLoader(documents, build_rows, collate_fn, seed=seed, blank=blank, **options)


@dataclass
class CausalCollator:
    """Makes batches of rows of [`causal_dataset`].

    Args:
        pad_token_id: fills rows that are not full, on the right.
    """

    pad_token_id: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "CausalCollator":
        """A collator with the tokenizer's padding token, or eos if it has none. The id at padding does not matter."""
        pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id
        return cls(eos if pad is None else pad)

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Returns int64 tensors of shape (batch, length): `input_ids`; `attention_mask`; `seq_idx`, the number of a
        token's document in its row; `labels`, the tokens themselves, but -100 for the first token of a row or document
        and at padding."""
        shape = (len(rows), max(len(row["input_ids"]) for row in rows))
        batch = {
            "input_ids": np.full(shape, self.pad_token_id),
            "attention_mask": np.zeros(shape, dtype=np.int64),
            "seq_idx": np.zeros(shape, dtype=np.int64),
            "labels": np.full(shape, IGNORED),
        }
        for i, row in enumerate(rows):
            ids, starts = np.asarray(row["input_ids"], dtype=np.int64), np.asarray(row["document_starts"], dtype=int)
            size = len(ids)
            batch["input_ids"][i, :size] = ids
            batch["attention_mask"][i, :size] = 1
            batch["seq_idx"][i, starts] = 1
            batch["labels"][i, 1:size] = ids[1:]
            batch["labels"][i, starts] = IGNORED
        batch["seq_idx"] = batch["seq_idx"].cumsum(axis=1)
        return {name: torch.from_numpy(array) for name, array in batch.items()}
