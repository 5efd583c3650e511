# SPDX-License-Identifier: Apache-2.0
import gzip
import json
from itertools import islice

import pytest
import torch
from datasets import IterableDataset

from nystrom_models.data import StreamLoader, causal_stream, causal_tokenizer, load_files, pretraining_stream, streams
from nystrom_models.data.streams import Lane

DOCUMENTS = 111


def build(documents, numbers):
    """One to four rows per document, with the long documents next to each other."""
    rows = {"input_ids": [], "index": []}
    for number in numbers:
        for part in range(1 + number % 3 + 9 * (number % 40 == 0)):
            rows["input_ids"].append([number] * (1 + part % 5))
            rows["index"].append(100 * number + part)
    return rows


def collate(rows):
    return {name: torch.tensor([row[name] for row in rows]) for name in ("index", "epoch")}


ROWS = sorted(row for number in range(DOCUMENTS) for row in build(None, [number])["index"])


@pytest.fixture(scope="module", params=[(1, "txt"), (2, "jsonl"), (5, "jsonl.gz"), (5, "csv")], ids=str)
def stream(request, tmp_path_factory):
    """The documents in files of unequal sizes."""
    num_files, ending = request.param
    folder = tmp_path_factory.mktemp("stream")
    borders = [round(DOCUMENTS * (i / num_files) ** 2) for i in range(num_files + 1)]
    paths = []
    for i in range(num_files):
        texts = [f"Document {n}." for n in range(borders[i], borders[i + 1])]
        if not texts:
            continue
        lines = {
            "txt": "".join(text + "\n\n" for text in texts),
            "jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts),
            "csv": "text\n" + "".join(text + "\n" for text in texts),
        }[ending.removesuffix(".gz")]
        path = folder / f"{i}.{ending}"
        if ending.endswith(".gz"):
            path.write_bytes(gzip.compress(lines.encode()))
        else:
            path.write_text(lines)
        paths.append(path)
    return load_files(paths, streaming=True)


@pytest.mark.parametrize(("num_lanes", "most_bytes", "most"), [(1, 2**26, 64), (3, 2**26, 37), (2, 30, 3)])
def test_lanes_share_the_documents_and_go_on_from_any_row(stream, num_lanes, most_bytes, most, monkeypatch):
    """Also if documents are so long that few are read at once."""
    monkeypatch.setattr(streams, "MOST_BYTES", most_bytes)
    numbers_read = []

    def recorded(documents, numbers):
        numbers_read.append(len(numbers))
        return build(documents, numbers)

    seen = []
    for number in range(num_lanes):
        lane = Lane(stream, recorded, number, num_lanes, 20, 0)
        whole = list(lane.rows(0))
        seen += [row["index"] for row, _ in whole]
        # Continued from a state, and from a state of a lane that was itself continued from a state.
        for first, second in ((0, 1), (7, 20), (25, 3), (len(whole) - 2, 1)):
            state = json.loads(json.dumps(whole[first][1]))
            rest = list(lane.rows(0, state))
            assert [row for row, _ in rest] == [row for row, _ in whole[first + 1 :]]
            if second < len(rest):
                again = list(lane.rows(0, json.loads(json.dumps(rest[second][1]))))
                assert [row for row, _ in again] == [row for row, _ in rest[second + 1 :]]
        assert list(lane.rows(0, whole[-1][1])) == []
        # Another order in the next epoch.
        later = [row["index"] for row, _ in lane.rows(1)]
        assert later != [row["index"] for row, _ in whole] and sorted(later) == sorted(
            row["index"] for row, _ in whole
        )
    assert sorted(seen) == ROWS and max(numbers_read) == most


def test_the_order_of_a_stream_is_that_of_its_seed(stream):
    def order(seed, epoch=0):
        return [row["index"] for row, _ in Lane(stream, build, 0, 1, 20, seed).rows(epoch)]

    assert order(0) == order(0) and sorted(order(0)) == ROWS
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_every_block_has_an_order_of_its_own(stream):
    def one(documents, numbers):
        return {"input_ids": [[number] for number in numbers], "index": list(numbers)}

    rows = [row["index"] for row, _ in Lane(stream, one, 0, 1, 20, 0, 20).rows(0)]
    blocks = [rows[begin : begin + 20] for begin in range(0, 100, 20)]
    assert [sorted(block) for block in blocks] == [list(range(begin, begin + 20)) for begin in range(0, 100, 20)]
    assert len({tuple(number % 20 for number in block) for block in blocks}) == 5


def test_going_on_builds_no_rows_of_what_was_before(stream):
    built = []

    def counting(documents, numbers):
        built.extend(numbers)
        return build(documents, numbers)

    lane = Lane(stream, counting, 0, 1, 20, 0)
    state = list(lane.rows(0))[-30][1]
    built.clear()
    next(lane.rows(0, state))
    assert min(built) > 0 and len(built) < DOCUMENTS


def one_process(stream, number, position=None, micro_batch=4, accumulation=2, **options):
    loader = StreamLoader(stream, build, collate, micro_batch, accumulation, buffer_size=20, **options)
    return loader, list(islice(loader.steps(position=position), number))


def rows_of(step):
    return [
        pair
        for batch, count in zip(step.batches, step.num_rows, strict=True)
        for pair in zip(batch["epoch"].tolist()[:count], batch["index"].tolist()[:count], strict=True)
    ]


@pytest.mark.parametrize("num_workers", [0, 2])  # one process reads, however many are given
def test_every_row_once_an_epoch_and_exactly_resumed(stream, num_workers):
    loader, steps = one_process(stream, 75, num_workers=num_workers)
    seen = [pair for step in steps for pair in rows_of(step)]
    for epoch in (0, 1):
        assert sorted(row for e, row in seen if e == epoch) == ROWS
    assert max(epoch for epoch, _ in seen) == 2
    for first in (31,) if num_workers else (0, 11, 30, 31, 32, 33, 60):
        position = json.loads(json.dumps(loader.merge([steps[first].position])))
        _, rest = one_process(stream, 74 - first, position, num_workers=num_workers)
        assert [rows_of(step) for step in rest] == [rows_of(step) for step in steps[first + 1 :]]


def test_lanes_of_two_processes_go_on_in_one(stream):
    """The steps have the same rows, also if one process reads both lanes from the beginning."""
    position = {"epoch": 0, "num_lanes": 2, "lanes": {}}
    _, steps = one_process(stream, 60, position)
    seen = [pair for step in steps for pair in rows_of(step)]
    assert sorted(row for e, row in seen if e == 0) == ROWS
    half = [
        StreamLoader(stream, build, collate, 4, 1, buffer_size=20).steps(2, rank, None, lambda flag: True)
        for rank in (0, 1)
    ]
    for step in steps[:12]:
        parts = [next(process) for process in half]
        assert sorted(rows_of(step)) == sorted(pair for part in parts for pair in rows_of(part))


def test_a_process_that_runs_out_of_rows_waits_at_its_place_for_the_others(stream):
    """It computes batches that do not count. The others have rows as long as `any_process` says so."""
    blank = {"input_ids": [0], "index": -1, "epoch": 0}
    loader = StreamLoader(stream, build, collate, 4, 2, buffer_size=20, blank=blank)
    own = [row for number in range(0, DOCUMENTS, 2) for row in build(None, [number])["index"]]
    number = -(-len(own) // 8)
    steps = list(islice(loader.steps(2, 0, None, lambda flag: True), number + 3))
    assert sorted(row for step in steps for _, row in rows_of(step)) == own
    for step in steps[number:]:
        assert step.num_rows == [0, 0] and [batch["index"].tolist() for batch in step.batches] == [[-1], [-1]]
        assert step.position == steps[number - 1].position
    [resumed] = islice(loader.steps(2, 0, json.loads(json.dumps(steps[-1].position)), lambda flag: True), 1)
    assert resumed.num_rows == [0, 0] and resumed.position == steps[-1].position


def test_a_position_that_cannot_be_shared():
    loader = StreamLoader(IterableDataset.from_generator(lambda: iter(())), build, collate, 4, 1)
    for num_processes, position, message in (
        (
            3,
            {"epoch": 0, "num_lanes": 4, "lanes": {}},
            "4 processes, whose parts cannot be divided among 3: continue on 1 or 2 or 4",
        ),
        (1, {"epoch": 0, "num_lanes": 3, "lanes": {}}, "a multiple of 3 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            next(loader.steps(num_processes, 0, position))


def test_a_stream_without_text(tmp_path):
    path = tmp_path / "blank.jsonl"
    path.write_text('{"text": " "}\n' * 3)

    def nothing(documents, numbers):
        return {"input_ids": [], "index": []}

    loader = StreamLoader(load_files(path, streaming=True), nothing, collate, 4)
    with pytest.raises(ValueError, match="contains no text"):
        next(loader.steps())
    with pytest.raises(ValueError, match="--max_train_steps"):
        loader.steps_per_epoch()


@pytest.mark.parametrize("kind", ["pretraining", "causal"])
@pytest.mark.parametrize("row", [{"text": None}, {"other": 1}], ids=["null", "no column"])
def test_a_document_without_a_text_is_named(kind, row, tokenizer, tmp_path):
    """Also if it comes after the first block of a file, from which the reader takes the columns."""
    path = tmp_path / "rows.jsonl"
    rows = [{"text": f"Sentence {i}. Another one."} for i in range(150)]
    path.write_text("".join(json.dumps(document) + "\n" for document in [*rows, row, *rows]))
    documents = load_files(path, streaming=True).skip(3)
    options = {"per_device_train_batch_size": 8, "buffer_size": 16}
    if kind == "pretraining":
        loader = pretraining_stream(documents, tokenizer, collate, 16, **options)
    else:
        loader = causal_stream(documents, causal_tokenizer(tokenizer), collate, 16, **options)
    with pytest.raises(ValueError, match=r"'text' of document 148, .* must hold text, but holds None"):
        next(islice(loader.steps(), 200, None))
