# SPDX-License-Identifier: Apache-2.0
"""GLUE's own .tsv files, in a different layout for each task; these files are invented, with the same layouts."""

import json

import pytest

from nystrom_models.data.glue import GLUE_TASKS
from nystrom_models.data.glue_files import find_glue_files, load_glue_files

PARSES = ["sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse", "sentence2_parse"]
MNLI = ["index", "promptID", "pairID", "genre", *PARSES, "sentence1", "sentence2"]
STSB = ["index", "genre", "filename", "year", "old_index", "source1", "source2", "sentence1", "sentence2"]
# Headers of the labelled files and of the test files; CoLA's labelled files have none.
HEADERS = {
    "cola": (None, ["index", "sentence"]),
    "sst2": (["sentence", "label"], ["index", "sentence"]),
    "mrpc": (
        ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"],
        ["index", "#1 ID", "#2 ID", "#1 String", "#2 String"],
    ),
    "qqp": (["id", "qid1", "qid2", "question1", "question2", "is_duplicate"], ["id", "question1", "question2"]),
    "stsb": ([*STSB, "score"], STSB),
    "mnli": ([*MNLI, "label1", "gold_label"], MNLI),
    "qnli": (["index", "question", "sentence", "label"], ["index", "question", "sentence"]),
    "rte": (["index", "sentence1", "sentence2", "label"], ["index", "sentence1", "sentence2"]),
    "wnli": (["index", "sentence1", "sentence2", "label"], ["index", "sentence1", "sentence2"]),
}
FOLDERS = {"cola": "CoLA", "sst2": "SST-2", "mrpc": "MRPC", "qqp": "QQP", "stsb": "STS-B", "mnli": "MNLI"}
FOLDERS |= {"qnli": "QNLI", "rte": "RTE", "wnli": "WNLI"}
# Texts that a reader of CSV files would change.
FIRST = ['He said "no.', '"Yes" and', "NA", 'a "', "12"]
SECOND = ["the end", 'of it"', "null", "", "3.5"]
TEXTS = {"sentence": FIRST, "sentence1": FIRST, "#1 String": FIRST, "question1": FIRST, "question": FIRST}
TEXTS |= {"sentence2": SECOND, "#2 String": SECOND, "question2": SECOND}


def labels(task):
    if task == "stsb":
        return ["5.000", "0.2", "3.75", "1.0", "4"]
    if task in ("mnli", "qnli", "rte"):
        names = GLUE_TASKS[task].label_names
        return [names[i % len(names)] for i in range(5)]
    return ["1", "0", "0", "1", "1"]


def lines(task, test):
    if task == "cola" and not test:
        return [
            ["gj04", label, "" if label == "1" else "*", text] for label, text in zip(labels(task), FIRST, strict=True)
        ]
    header = HEADERS[task][test]
    label_columns = ("label", "Quality", "is_duplicate", "score", "gold_label")

    def cell(column, i):
        if column in label_columns:
            return labels(task)[i]
        # QNLI's second column is called sentence.
        return SECOND[i] if (task, column) == ("qnli", "sentence") else TEXTS.get(column, [str(i)] * 5)[i]

    return [header, *([cell(column, i) for column in header] for i in range(5))]


def write(path, rows, bom=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join("\t".join(row) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8-sig" if bom else "utf-8")
    return str(path)


@pytest.fixture(scope="session")
def glue(tmp_path_factory):
    """A folder in GLUE's own layout."""
    root = tmp_path_factory.mktemp("glue_data")
    for task, folder in FOLDERS.items():
        for name, test in (("train", False), ("dev", False), ("test", True)):
            for kind in ("_matched", "_mismatched") if task == "mnli" and name != "train" else ("",):
                write(root / folder / f"{name}{kind}.tsv", lines(task, test))
    write(root / "diagnostic" / "diagnostic.tsv", lines("rte", True))
    return root


@pytest.mark.parametrize("task", FOLDERS)
def test_the_files_of_a_task(task, glue):
    files = find_glue_files(glue, task)
    expected = ["train", "validation", "test"]
    if task == "mnli":
        kinds = ("_matched", "_mismatched")
        expected = ["train", *(f"validation{k}" for k in kinds), *(f"test{k}" for k in kinds), "test_ax"]
    assert list(files) == expected
    columns = GLUE_TASKS[task].text_columns
    for split, paths in files.items():
        rows = load_glue_files(task, paths)
        assert len(rows) == 5
        for column, texts in zip(columns, (FIRST, SECOND), strict=False):
            assert list(rows[column]) == texts
        if split.startswith("test"):
            assert "label" not in rows.column_names
        elif task == "stsb":
            assert list(rows["label"]) == [5.0, 0.2, 3.75, 1.0, 4.0]
        else:
            assert [str(label) for label in rows["label"]] == labels(task)


def test_other_formats_and_names_are_found_and_read(tmp_path):
    """Like data sets saved from the Hub: with the task's name and the usual columns."""
    folder = tmp_path / "stsb"
    folder.mkdir()
    rows = [{"sentence1": "a", "sentence2": "b", "label": 3, "idx": 0}]
    for name in ("train.json", "validation.json"):
        (folder / name).write_text(json.dumps(rows))
    files = find_glue_files(tmp_path, "stsb")
    assert list(files) == ["train", "validation"]
    read = load_glue_files("stsb", files["train"], cache_dir=tmp_path / "cache")
    assert read.to_list() == [rows[0] | {"label": 3.0}]
    rows.append(rows[0] | {"label": None})  # named by its row later
    (folder / "train.json").write_text(json.dumps(rows))
    assert load_glue_files("stsb", files["train"], cache_dir=tmp_path / "cache")["label"][:] == [3.0, None]


def test_a_byte_order_mark_and_torn_lines(tmp_path):
    rows = lines("mrpc", False)
    assert list(load_glue_files("mrpc", [write(tmp_path / "mrpc.tsv", rows, bom=True)])["sentence1"]) == FIRST
    torn = lines("qqp", False)
    torn[3:4] = [torn[3][:4], [*torn[3][4:]]]
    with pytest.warns(UserWarning, match=r"qqp\.tsv: 2 broken lines were left out, the first is line 4"):
        rows = load_glue_files("qqp", [write(tmp_path / "qqp.tsv", torn)])
    assert list(rows["question1"]) == [*FIRST[:2], *FIRST[3:]]
    # The predictions of all rows that follow would have the numbers of others.
    with pytest.raises(ValueError, match=r"qqp\.tsv, line 4: 4 fields.* Predictions are numbered by row"):
        load_glue_files("qqp", [str(tmp_path / "qqp.tsv")], "--test_file")


def test_faults_are_named(glue, tmp_path):
    with pytest.raises(ValueError, match=r"rte\.tsv, line 3: 2 fields, but the columns are 4"):
        rows = lines("rte", False)
        load_glue_files("rte", [write(tmp_path / "rte.tsv", [*rows[:2], rows[2][:2], *rows[3:]])])
    with pytest.raises(ValueError, match=r"empty\.tsv contains no rows"):
        load_glue_files("sst2", [write(tmp_path / "empty.tsv", lines("sst2", False)[:1])])
    with pytest.raises(ValueError, match=r"mixed\.tsv: some labels are numbers .* such as 1 and 'entailment'"):
        load_glue_files("rte", [write(tmp_path / "mixed.tsv", [*rows[:2], [*rows[2][:-1], "1"], *rows[3:]])])
    with pytest.raises(FileNotFoundError, match=r"--test_file nowhere\.tsv is not a file"):
        load_glue_files("sst2", ["nowhere.tsv"], "--test_file")
    with pytest.raises(FileNotFoundError, match="not a folder"):
        find_glue_files(tmp_path / "nowhere", "sst2")
    with pytest.raises(FileNotFoundError, match="no folder for sst2; it has"):
        find_glue_files(tmp_path, "sst2")
    (tmp_path / "RTE").mkdir()
    with pytest.raises(FileNotFoundError, match=r"RTE has no train\.tsv and no dev\.tsv"):
        find_glue_files(tmp_path, "rte")
