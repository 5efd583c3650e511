# SPDX-License-Identifier: Apache-2.0
"""Files of CoNLL's and WNUT's shared tasks and of SQuAD, as they are given."""

import gzip
import json

import pytest
from datasets import Dataset

from nystrom_models.data.conll_files import load_conll_files
from nystrom_models.data.question_answering import answers_of
from nystrom_models.data.squad_files import load_squad_files


@pytest.fixture
def write(tmp_path):
    def written(name, text):
        path = tmp_path / name
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
        return str(path)

    return written


def conll(path, tmp_path):
    return load_conll_files("tokens", "ner_tags", [path], "--train_file", tmp_path / "cache")


def test_only_spaces_and_tabs_are_between_columns(write, tmp_path):
    words = ["1\u00a0000", "a\u2028b"]
    text = f"{words[0]}  O\n{words[1]} B-ORG \r\n"
    (row,) = conll(write("words.conll", text), tmp_path)
    assert row == {"tokens": words, "ner_tags": ["O", "B-ORG"]}


def test_lines_may_end_in_returns_alone(write, tmp_path):
    rows = [(["EU", "rejects"], ["B-ORG", "O"]), (["Peter"], ["B-PER"])]
    found = conll(write("words.conll", "EU B-ORG\rrejects O\r\rPeter B-PER\r"), tmp_path)
    assert [(row["tokens"], row["ner_tags"]) for row in found] == rows


def test_a_table_cannot_hold_words(write, tmp_path):
    with pytest.raises(ValueError, match=r"words\.csv, given by --test_file: \.csv files cannot hold lists of words"):
        load_conll_files("tokens", "ner_tags", [write("words.csv", "EU,B-ORG\nrejects,O\n")], "--test_file")


CONLL_2003 = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

Peter NNP B-NP B-PER
"""
WNUT_17 = '@paul\tO\n"\tO\nEmpire\tB-location\nState\tI-location\n\t\n\n#\tO\n\u2028\tO\r\n'


@pytest.mark.parametrize(
    ("name", "text", "rows"),
    [
        ("train.txt", CONLL_2003, [(["EU", "rejects"], ["B-ORG", "O"]), (["Peter"], ["B-PER"])]),
        (
            "wnut17train.conll.gz",
            WNUT_17,
            [
                (["@paul", '"', "Empire", "State"], ["O", "O", "B-location", "I-location"]),
                (["#", "\u2028"], ["O", "O"]),
            ],
        ),
    ],
)
def test_a_word_a_line(name, text, rows, write, tmp_path):
    found = conll(write(name, text), tmp_path)
    assert [(row["tokens"], row["ner_tags"]) for row in found] == rows


def test_a_changed_file_is_read_again(write, tmp_path):
    assert len(conll(write("a.conll", "a O\n"), tmp_path)) == 1
    assert len(conll(write("a.conll", "a O\n\nb O\n"), tmp_path)) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a O\nb\n", r"a.conll, line 2: 1 columns, but the first line has 2"),
        ("a\tO\nb\t\n", r"a.conll, line 2: the label of 'b' is empty"),
        ("a\n", r"a.conll, line 1: 1 columns, but a word and its label are needed"),
        ("\n\n", "contain no rows"),
    ],
)
def test_lines_without_a_label(text, message, write, tmp_path):
    with pytest.raises(ValueError, match=message):
        conll(write("a.conll", text), tmp_path)


def test_spaces_around_a_label_are_not_of_its_name(write, tmp_path):
    """`B-x ` would be another class than `B-x`."""
    text = "New York\tNNP\tB-x \n \tSP\tO\nTimes\tNNP\t I-x\n"
    (row,) = conll(write("words.tsv", text), tmp_path)
    assert row == {"tokens": ["New York", " ", "Times"], "ner_tags": ["B-x", "O", "I-x"]}
    with pytest.raises(ValueError, match="line 1: the label of 'New' is empty"):
        conll(write("none.tsv", "New\tNNP\t \n"), tmp_path)


def test_rows_with_lists(write, tmp_path):
    row = {"tokens": ["a", "b"], "ner_tags": ["O", "B-x"]}
    assert list(conll(write("a.jsonl.gz", json.dumps(row) + "\n"), tmp_path)) == [row]


CONTEXT = "Ünïcode is a standard."
ANSWERS = [{"text": "a standard", "answer_start": 11}]
SQUAD_2 = {
    "version": "v2.0",
    "data": [
        {
            "title": "Text",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [
                        {"id": "u", "question": "What is it?", "answers": ANSWERS, "is_impossible": False},
                        {
                            "id": "v",
                            "question": "Whose is it?",
                            "answers": [],
                            "plausible_answers": ANSWERS,
                            "is_impossible": True,
                        },
                    ],
                }
            ],
        }
    ],
}


def expected(name, question, answers):
    texts = {"text": [a["text"] for a in answers], "answer_start": [a["answer_start"] for a in answers]}
    return {"id": name, "title": "Text", "context": CONTEXT, "question": question, "answers": texts}


ROWS = [expected("u", "What is it?", ANSWERS), expected("v", "Whose is it?", [])]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dev-v2.0.json", json.dumps(SQUAD_2)),
        ("dev.json.gz", json.dumps(SQUAD_2, indent=1, ensure_ascii=False)),
        ("flat.json", json.dumps({"data": ROWS})),
        ("rows.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("list.json", json.dumps(ROWS)),
        ("lines.json", "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("several-lines.json", "".join(json.dumps(row, indent=1) + "\n" for row in ROWS)),
    ],
)
def test_squads_files_and_flat_rows(name, text, write, tmp_path):
    found = load_squad_files([write(name, text)], "--train_file", tmp_path / "cache")
    assert list(found) == ROWS


IMPOSSIBLE = [
    ROWS[0] | {"is_impossible": False},
    expected("v", "Whose is it?", ANSWERS) | {"is_impossible": True},
]


def as_parquet(path):
    Dataset.from_list(IMPOSSIBLE).to_parquet(path)


def as_lines(path):
    path.write_text("".join(json.dumps(row) + "\n" for row in IMPOSSIBLE))


def as_lines_of_objects(path):
    path.write_text("".join(json.dumps(row | {"answers": ANSWERS}) + "\n" for row in IMPOSSIBLE))


def as_data(path):
    path.write_text(json.dumps({"data": IMPOSSIBLE}))


@pytest.mark.parametrize(
    ("name", "save"),
    [("a.parquet", as_parquet), ("a.jsonl", as_lines), ("a.jsonl", as_lines_of_objects), ("a.json", as_data)],
)
def test_impossible_questions_have_no_answers_in_any_format(name, save, tmp_path):
    """Some files keep plausible answers in `answers`, which would be trained as right ones."""
    save(tmp_path / name)
    found = load_squad_files([tmp_path / name], "--train_file", tmp_path / "cache")
    assert found["id"] == ["u", "v"]
    assert [answers_of(value) for value in found["answers"]] == [[("a standard", 11)], []]


def test_an_impossibility_that_is_text_is_refused(write, tmp_path):
    """`"false"` would be true."""
    rows = [IMPOSSIBLE[0] | {"is_impossible": "false"}]
    for name, text in (("a.json", json.dumps({"data": rows})), ("a.jsonl", json.dumps(rows[0]))):
        with pytest.raises(ValueError, match="'is_impossible' must be true or false, but is 'false'"):
            load_squad_files([write(name, text)], "--train_file", tmp_path / "cache")


def test_flat_files_beside_squads_own_are_refused(write, tmp_path):
    files = [write("squad.json", json.dumps(SQUAD_2)), write("flat.json", json.dumps(ROWS))]
    with pytest.raises(ValueError, match=r"squad.json is one object with 'data', but .*flat.json is not"):
        load_squad_files(files, "--train_file", tmp_path / "cache")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": [{"paragraphs": [{"qas": []}]}]}, r"data\[0\].paragraphs\[0\] has no 'context' of the type str"),
        (
            {"data": [{"paragraphs": [{"context": "a", "qas": [{"id": "u"}]}]}]},
            r"data\[0\].paragraphs\[0\].qas\[0\] has no 'question'",
        ),
        (
            {"data": [{"context": "a", "question": "b", "answers": [{"text": "a", "answer_start": "0"}]}]},
            r"data\[0\], an answer, has no 'answer_start' of the type int",
        ),
        (
            {"data": [{"context": "a", "question": "b", "answers": {"text": ["a"]}}]},
            r"data\[0\].answers has no 'answer_start' of the type list",
        ),
        (
            {"data": [{"context": "a", "question": "b", "answers": {"text": ["a"], "answer_start": []}}]},
            r"data\[0\].answers has 1 'text', but 0 'answer_start'",
        ),
        ({"data": [{"context": "a", "question": "b", "answers": 1}]}, r"data\[0\] has no 'answers' of the type list"),
        ({"data": []}, "contain no rows"),
    ],
)
def test_fields_that_are_missing_are_named_by_their_place(content, message, write, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_squad_files([write("a.json", json.dumps(content, indent=1))], "--train_file", tmp_path / "cache")


def test_questions_without_an_id_get_their_place(write, tmp_path):
    row = {"context": "a", "question": "b", "answers": []}
    found = load_squad_files([write("a.json", json.dumps({"data": [row, row | {"id": None}]}))], cache_dir=tmp_path)
    assert [name.rpartition(", ")[2] for name in found["id"]] == ["data[0]", "data[1]"]
