# SPDX-License-Identifier: Apache-2.0
import copy
import json
from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom_models.data import CausalCollator, causal_dataset, causal_stream, causal_tokenizer, load_files
from nystrom_models.data.causal import DOCUMENTS_OF_A_BATCH, pack_rows
from tests.data.test_pretraining import byte_level_tokenizer

BLOCK = 32
TEXTS = ["  Röhre auf, \U0001f600 zu.  \n", "", "x", "Die Röhre ist zu. " * 30, " \n ", "Ende!"]


@pytest.fixture(scope="module")
def causal(tokenizer):
    return causal_tokenizer(tokenizer)


@pytest.fixture(scope="module")
def rows(documents, causal):
    return causal_dataset(documents, causal, BLOCK)


def encoded(text, tokenizer):
    """The expected tokens of a document in rows."""
    return [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


def predictions(row):
    """Pairs of a token and the next one of the same document."""
    ids, starts = row["input_ids"].tolist(), set(row["document_starts"].tolist())
    return [(ids[i - 1], ids[i]) for i in range(1, len(ids)) if i not in starts]


def test_a_prompt_is_not_ended(tokenizer, causal, tmp_path):
    """Also after saving and loading; otherwise, text and special tokens are the same."""
    causal.save_pretrained(tmp_path)
    loaded = type(tokenizer).from_pretrained(tmp_path)
    expected = tokenizer("the mean value")["input_ids"][:-1]
    for each in (causal, loaded):
        assert each("the mean value")["input_ids"] == expected and expected[0] == tokenizer.cls_token_id
        assert set(each("the mean value")) == {"input_ids", "attention_mask"}
        assert each.padding_side == "left" and each.all_special_tokens == tokenizer.all_special_tokens
    assert tokenizer("x")["input_ids"][-1] == tokenizer.sep_token_id and tokenizer.padding_side == "right"


def test_special_tokens_of_ones_own_are_kept(tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<turn>"]})
    causal = causal_tokenizer(tokenizer)
    ids = causal("the <turn> mean")["input_ids"]
    assert ids == tokenizer("the <turn> mean")["input_ids"][:-1] and "<turn>" in causal.all_special_tokens
    assert causal.decode(ids, skip_special_tokens=True) == "the mean"


def test_tokenizers_that_end_no_text_are_kept():
    tokenizer = byte_level_tokenizer(["the mean"])
    with pytest.raises(ValueError, match="no token that ends a document"):
        causal_tokenizer(tokenizer)
    tokenizer.eos_token = "</s>"
    without_end = causal_tokenizer(tokenizer)
    assert without_end("the")["input_ids"] == tokenizer("the")["input_ids"][:-1]
    assert causal_tokenizer(without_end)("the")["input_ids"] == without_end("the")["input_ids"]


def test_each_token_but_the_first_of_a_document_is_predicted_once(documents, rows, causal):
    expected = []
    for text in documents["text"]:
        expected += pairwise(encoded(text, causal))
    assert [pair for row in rows for pair in predictions(row)] == expected
    assert list(rows["index"]) == list(range(len(rows)))


def test_rows_are_full(rows):
    """All except the last row of these few documents."""
    lengths = list(rows["length"])
    assert lengths == [len(row["input_ids"]) for row in rows]
    assert set(lengths[:-1]) == {BLOCK} and len(lengths) > 100


@settings(max_examples=60)
@given(st.lists(st.integers(2, 40), min_size=1, max_size=12), st.integers(2, 20))
def test_cuts_at_any_place(lengths, block_size):
    first = np.cumsum([0, *lengths])
    documents = {
        "input_ids": [np.arange(a, b) for a, b in pairwise(first)],
        "token_bytes": [np.ones(length, dtype=int) for length in lengths],
        "number": list(range(len(lengths))),
    }
    rows = pack_rows(documents, block_size)
    pairs = []
    for ids, starts, num_bytes in zip(rows["input_ids"], rows["document_starts"], rows["num_bytes"], strict=True):
        assert set(ids[starts]) <= set(first[1:]) and num_bytes == len(ids) - 1 - len(starts)
        pairs += predictions({"input_ids": ids, "document_starts": starts})
    inside = [n for n in range(1, first[-1]) if n not in first]
    assert pairs == [(n - 1, n) for n in inside]
    assert all(len(ids) == block_size for ids in rows["input_ids"][:-1])
    assert len(set(rows["index"])) == len(rows["index"]) and rows["index"] == sorted(rows["index"])


def test_bytes_are_those_of_the_texts(tokenizer):
    """With characters of several tokens, tokens of several characters, and spaces around them."""
    byte_level = byte_level_tokenizer(TEXTS)
    byte_level.eos_token = "</s>"
    for each in (tokenizer, byte_level):
        each = causal_tokenizer(each)
        rows = causal_dataset(Dataset.from_dict({"text": TEXTS}), each, 8)
        kept = [text for text in TEXTS if each(text, add_special_tokens=False)["input_ids"]]
        assert sum(rows["num_bytes"]) == sum(len(text.encode()) for text in kept)
        assert (np.array(rows["num_bytes"]) >= 0).all()


def test_bytes_of_rows_within_a_text():
    """Characters of four tokens each: two characters per row, and only eos in the last."""
    tokenizer = byte_level_tokenizer(["a"])
    tokenizer.eos_token = "</s>"
    rows = causal_dataset(Dataset.from_dict({"text": ["\U0001f600" * 20]}), causal_tokenizer(tokenizer), 9)
    assert list(rows["num_bytes"]) == [8] * 10 + [0] and list(rows["length"]) == [9] * 10 + [2]


def test_rows_do_not_depend_on_processes(documents, rows, causal):
    parallel = causal_dataset(documents, causal, BLOCK, num_proc=2)
    assert parallel.with_format(None).to_list() == rows.with_format(None).to_list()


def test_the_collator_keeps_documents_apart(rows, causal):
    some = [rows[len(rows) - 1], *[row for row in rows if len(row["document_starts"]) > 1][:2]]
    batch = CausalCollator.of(causal)(some)
    assert {tensor.shape for tensor in batch.values()} == {(3, BLOCK)}
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    short = len(some[0]["input_ids"])
    assert batch["attention_mask"].sum(1).tolist() == [short, BLOCK, BLOCK] and short < BLOCK
    assert (batch["input_ids"][0, short:] == causal.pad_token_id).all() and (batch["labels"][0, short:] == -100).all()
    for i, row in enumerate(some):
        size, starts = len(row["input_ids"]), row["document_starts"].tolist()
        assert batch["input_ids"][i, :size].tolist() == row["input_ids"].tolist()
        assert batch["seq_idx"][i, :size].tolist() == [sum(start <= n for start in starts) for n in range(size)]
        for n in range(size):
            expected = -100 if n == 0 or n in starts else row["input_ids"][n]
            assert batch["labels"][i, n] == expected


def test_a_tokenizer_without_padding(causal):
    batch = CausalCollator(causal.eos_token_id)([{"input_ids": [5], "document_starts": []}])
    assert batch["labels"].tolist() == [[-100]]


@pytest.fixture(scope="module")
def stream(documents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stream")
    texts = documents["text"]
    for number, part in enumerate((texts[:250], texts[250:])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in part)
        (folder / f"{number}.jsonl").write_text(lines)
    return load_files([folder / "0.jsonl", folder / "1.jsonl"], streaming=True)


def make_stream(stream, tokenizer, **options):
    options = {"per_device_train_batch_size": 4, "buffer_size": 50, "documents_of_a_batch": 64, **options}
    return causal_stream(stream, tokenizer, CausalCollator.of(tokenizer), BLOCK, **options)


def test_documents_of_another_column(documents, causal):
    some = documents.select(range(40))
    body = some.rename_column("text", "body")
    expected, rows = causal_dataset(some, causal, BLOCK), causal_dataset(body, causal, BLOCK, text_column="body")
    assert rows.with_format(None).to_list() == expected.with_format(None).to_list()
    streams = (
        make_stream(some.to_iterable_dataset(), causal),
        make_stream(body.to_iterable_dataset(), causal, text_column="body"),
    )
    [expected], [found] = (next(iter(stream.steps())).batches for stream in streams)
    assert torch.equal(found["input_ids"], expected["input_ids"])


def test_a_stream_gives_the_rows_of_the_data_set(documents, stream, causal):
    """The rows of an epoch are the same, in another order."""
    options = {"documents_of_a_batch": DOCUMENTS_OF_A_BATCH}
    loader = make_stream(stream, causal, **options)
    expected = sorted(row["input_ids"].tolist() for row in causal_dataset(documents, causal, BLOCK))
    found = []
    for step in loader.steps():
        if step.position["epoch"] > 0:
            break
        [batch] = step.batches
        found += [
            ids[mask == 1].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
    assert found != expected and sorted(found) == expected


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_stream_goes_on_where_it_was_left(stream, causal, num_processes):
    """Also past the end of an epoch."""
    for index in range(num_processes):
        loader = make_stream(stream, causal)
        whole = list(islice(loader.steps(num_processes, index), 400))
        assert whole[-1].position["epoch"] > 0
        for done in (1, 37, 390):
            position = json.loads(json.dumps(loader.merge([whole[done - 1].position])))
            rest = list(islice(make_stream(stream, causal).steps(num_processes, index, position), 10))
            for step, expected in zip(rest, whole[done : done + 10], strict=True):
                for name, tensor in expected.batches[0].items():
                    assert torch.equal(step.batches[0][name], tensor)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 1}, "block_size must lie between 2"),
        ({"block_size": 1000}, "tokenizer's model_max_length, but is 1000"),
        ({"text_column": "body"}, r"text_column='body' does not exist; the columns are \['text'\]"),
    ],
    ids=["short", "long", "column"],
)
def test_bad_options_are_named(documents, stream, causal, options, message):
    options = {"block_size": BLOCK, **options}
    with pytest.raises(ValueError, match=message):
        causal_dataset(documents, causal, **options)
    with pytest.raises(ValueError, match=message):
        causal_stream(stream, causal, CausalCollator.of(causal), **options, per_device_train_batch_size=4)


def test_a_tokenizer_that_ends_texts_is_refused(documents, tokenizer):
    with pytest.raises(ValueError, match=r"causal_tokenizer\(tokenizer\)"):
        causal_dataset(documents, tokenizer, BLOCK)


def test_no_text_is_an_error(causal):
    with pytest.raises(ValueError, match="contains no text"):
        causal_dataset(Dataset.from_dict({"text": ["", " \n"]}), causal, BLOCK)
