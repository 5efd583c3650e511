# SPDX-License-Identifier: Apache-2.0
import datetime
import json
from itertools import pairwise

import cut_documents
import pytest
import run_imdb
from datasets import Dataset, load_dataset
from hypothesis import given
from hypothesis import strategies as st


@given(st.integers(0, 60), st.integers(1, 12), st.integers(0, 20), st.none() | st.integers(1, 6))
def test_pieces(length, num_words, skip_words, max_pieces):
    """Pieces follow each other, do not overlap, and have the size asked for; the first and the last third are read."""
    found = [
        piece.split(" ")
        for piece in cut_documents.pieces(" \n".join(map(str, range(length))), num_words, skip_words, max_pieces)
    ]
    words = [int(word) for piece in found for word in piece]
    assert words == sorted(set(words)) and all(skip_words <= word < length for word in words)
    left = max(length - skip_words, 0)
    whole = left // num_words
    assert len(found) == (min(whole, max_pieces or whole) if whole else bool(left))
    assert all(len(piece) == (num_words if whole else left) for piece in found)
    if found:
        assert words[0] == skip_words
        # Evenly spread: what is left out between two pieces, or at the end, differs by at most a piece.
        starts = [(int(piece[0]) - skip_words) // num_words for piece in found] + [max(whole, 1)]
        steps = [b - a for a, b in pairwise(starts)]
        assert max(steps) - min(steps) <= 1


@pytest.fixture
def books(write_rows, filler):
    """Two books by each of two authors, one of them short, and one whose author is not known."""
    rows = [
        {"author": author, "label": label, "text": f"by {author}\n\n{filler(200, label)} {word} " * times}
        for author, label, word in (("Ann", 0, "good"), ("Ben", 1, "bad"))
        for times in (1, 5)
    ]
    unknown = [{"author": "unknown", "label": label, "text": filler(500, 9)} for label in (-1, None)]
    return write_rows([*rows, *unknown])


def test_books(books, tmp_path, capsys):
    """Pieces have their book's columns; an unlabelled book is left out and counted; a script trains on the file."""
    path = tmp_path / "pieces.jsonl"
    flags = ["--input_file", books, "--num_words", "50", "--skip_words", "2", "--label_column_name", "label"]
    flags += ["--cache_dir", str(tmp_path / "cache")]
    cut_documents.main([*flags, "--max_pieces", "8", "--output_file", str(path)])
    assert f"24 pieces of 4 documents in {path}; 2 documents left out." in capsys.readouterr().out
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["document"] for row in rows] == [0] * 4 + [1] * 8 + [2] * 4 + [3] * 8
    assert {(row["author"], row["label"], row["document"] > 1) for row in rows} == {
        ("Ann", 0, False),
        ("Ben", 1, True),
    }
    assert all(len(row["text"].split(" ")) == 50 and "\n" not in row["text"] for row in rows)

    zipped = str(tmp_path / "pieces.jsonl.gz")
    found = cut_documents.main([*flags, "--output_file", zipped])
    again = load_dataset("json", data_files=zipped, split="train", cache_dir=str(tmp_path / "cache"))
    assert again.to_list() == found.to_list() and len(found) > len(rows)


def test_train_on_pieces(books, checkpoint, tmp_path):
    path = str(tmp_path / "pieces.jsonl")
    cut_documents.main(
        ["--input_file", books, "--num_words", "50", "--label_column_name", "label", "--output_file", path]
    )
    run = [
        "--model_name_or_path",
        checkpoint,
        "--train_file",
        path,
        "--validation_file",
        path,
        "--max_train_steps",
        "2",
    ]
    assert "accuracy" in run_imdb.main([*run, "--output_dir", str(tmp_path / "run")])["validation"]


def test_wrong_input_is_refused(books, write_rows, tmp_path):
    def cut(file, *flags, output="pieces.jsonl"):
        cut_documents.main(["--input_file", file, "--output_file", str(tmp_path / output), *flags])

    for flag, value in (("num_words", "0"), ("skip_words", "-1"), ("max_pieces", "0")):
        with pytest.raises(ValueError, match=f"--{flag} must be at least"):
            cut(books, "--num_words", "5", f"--{flag}", value)
    with pytest.raises(ValueError, match=r"must end in .jsonl or .jsonl.gz, but is .*pieces.csv"):
        cut(books, "--num_words", "5", output="pieces.csv")
    with pytest.raises(ValueError, match=r"--input_file book.txt.gz: an empty line ends a document"):
        cut("book.txt.gz", "--num_words", "5")
    with pytest.raises(ValueError, match="--input_file has no column 'body'"):
        cut(books, "--num_words", "5", "--text_column_name", "body")
    with pytest.raises(ValueError, match="No document has more than --skip_words 10000 words"):
        cut(books, "--num_words", "5", "--skip_words", "10000")
    with pytest.raises(ValueError, match="must name a column of texts, but it holds int64"):
        cut(write_rows([{"text": 7}]), "--num_words", "5")
    with pytest.raises(ValueError, match="is one of --input_file, whose texts would be lost"):
        cut(books, "--num_words", "5", output=books)
    with pytest.raises(ValueError, match="a column 'document'"):
        cut(write_rows([{"text": "a", "document": 7}]), "--num_words", "5")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("text", "warns"), [("春天来了，山上的花都开了。" * 20, True), ("spring came. " * 20, False)])
def test_texts_without_spaces_are_warned_of(text, warns, write_rows, tmp_path, recwarn):
    """Such a document is one word, and stays whole."""
    flags = ["--input_file", write_rows([{"text": text, "label": 0}]), "--num_words", "10"]
    found = cut_documents.main([*flags, "--output_file", str(tmp_path / "pieces.jsonl")])
    assert len(found) == (1 if warns else 4)
    said = [str(warning.message) for warning in recwarn if "Put spaces between words" in str(warning.message)]
    assert len(said) == warns


def test_other_columns_stay_as_they_are(tmp_path):
    day = datetime.datetime(2024, 1, 31, 10)
    columns = {"text": ["a b", "c"], "label": [2e-11, 0.12345678901234], "when": [day, None], "big": [2**60, 1]}
    Dataset.from_dict(columns).to_parquet(tmp_path / "rows.parquet")
    path = tmp_path / "new" / "pieces.jsonl"
    flags = ["--num_words", "2", "--cache_dir", str(tmp_path / "cache"), "--output_file", str(path)]
    cut_documents.main(["--input_file", str(tmp_path / "rows.parquet"), *flags])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["label"] for row in rows] == columns["label"] and [row["big"] for row in rows] == columns["big"]
    assert [row["when"] for row in rows] == ["2024-01-31T10:00:00", None]
    Dataset.from_dict({"text": ["a b"], "bytes": [b"\xff"]}).to_parquet(tmp_path / "bytes.parquet")
    with pytest.raises(ValueError, match="which JSON cannot hold: leave it out"):
        cut_documents.main(["--input_file", str(tmp_path / "bytes.parquet"), *flags])
    assert len(path.read_text().splitlines()) == 2 and len(list(path.parent.iterdir())) == 1


def test_classes_of_a_table_with_a_missing_one_stay_numbers(tmp_path):
    (tmp_path / "rows.csv").write_text("text,label\na b,1\nc d,\ne f,0\n")
    flags = ["--input_file", str(tmp_path / "rows.csv"), "--num_words", "2", "--label_column_name", "label"]
    cut_documents.main([*flags, "--cache_dir", str(tmp_path), "--output_file", str(tmp_path / "pieces.jsonl")])
    assert [json.loads(line)["label"] for line in (tmp_path / "pieces.jsonl").open()] == [1, 0]
    assert '"label": 1,' in (tmp_path / "pieces.jsonl").read_text()


def test_documents_with_several_labels(write_rows, tmp_path):
    rows = [{"text": "a b c", "label": ["x", "y"]}, {"text": "d e", "label": []}, {"text": "f", "label": None}]
    options = ["--input_file", write_rows(rows), "--num_words", "2", "--label_column_name", "label"]
    found = cut_documents.main([*options, "--output_file", str(tmp_path / "pieces.jsonl")])
    assert found["text"][:] == ["a b", "d e"] and found["label"][:] == [["x", "y"], []]
