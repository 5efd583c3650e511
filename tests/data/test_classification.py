# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Sequence, Value

from nystrom_models.data.classification import (
    ClassificationCollator,
    class_labels,
    classification_dataset,
    require_labels,
)
from nystrom_models.data.files import load_files
from nystrom_models.training.text_classification import mean_by_document

TEXTS = ["array axis batch", "buffer cache column compute data default dtype element error file"]


def dataset(**columns):
    return Dataset.from_dict({"text": TEXTS, **columns})


@pytest.mark.parametrize(
    ("strategy", "kept"),
    [
        ("head", "buffer cache column compute data"),
        ("tail", "default dtype element error file"),
        ("head_tail", "buffer cache element error file"),
    ],
)
def test_truncation(strategy, kept, tokenizer):
    assert all(len(tokenizer.tokenize(word)) == 1 for text in TEXTS for word in text.split())
    rows = classification_dataset(dataset(label=[0, 1]), tokenizer, 7, truncation_strategy=strategy)
    assert tokenizer.batch_decode(list(rows["input_ids"])) == [f"[CLS] {TEXTS[0]} [SEP]", f"[CLS] {kept} [SEP]"]
    assert list(rows["length"]) == [5, 7]
    assert {name: [len(row) for row in rows[name]] for name in ("attention_mask", "token_type_ids")} == {
        "attention_mask": [5, 7],
        "token_type_ids": [5, 7],
    }


def test_head_is_the_head_whatever_side_the_tokenizer_cuts(tokenizer):
    left = copy.deepcopy(tokenizer)
    left.truncation_side = "left"
    cut = [classification_dataset(dataset(label=[0, 1]), each, 7)["input_ids"][:] for each in (tokenizer, left)]
    assert cut[0] == cut[1] and left.truncation_side == "left"


def test_windows_have_the_label_of_their_document(tokenizer):
    data = dataset(label=[0.5, 1.5])
    rows = classification_dataset(data, tokenizer, 6, regression=True, truncation_strategy="windows", doc_stride=1)
    assert tokenizer.batch_decode(list(rows["input_ids"]), skip_special_tokens=True) == [
        TEXTS[0],
        "buffer cache column compute",
        "compute data default dtype",
        "dtype element error file",
    ]
    assert list(rows["document"]) == [0, 1, 1, 1] and list(rows["index"]) == [0, 1, 2, 3]
    assert list(rows["labels"]) == [0.5, 1.5, 1.5, 1.5] and list(rows["truncated"]) == [False, True, True, True]
    with pytest.raises(ValueError, match="--doc_stride must be less than 4"):
        classification_dataset(data, tokenizer, 6, truncation_strategy="windows", doc_stride=4)
    logits = torch.tensor([[1.0, 2.0], [3.0, 5.0], [0.0, 1.0], [0.0, 0.0]])
    means = mean_by_document(logits, torch.tensor(list(rows["document"])))
    torch.testing.assert_close(means, torch.tensor([[1.0, 2.0], [1.0, 2.0]]))


@pytest.mark.parametrize("pair", [False, True])
def test_what_a_fast_and_a_slow_tokenizer_cut_is_known(pair, tokenizer, slow_tokenizer):
    """CanineTokenizer's tokens are characters."""
    columns = ["text", "other"] if pair else ["text"]
    for cutter, sizes in ((tokenizer, (3, 10)), (slow_tokenizer, (len(TEXTS[0]), len(TEXTS[1])))):
        data, length = dataset(other=["", ""], label=[0, 1]), sizes[1] + cutter.num_special_tokens_to_add(pair=pair)
        for longest, cut in ((length, [False, False]), (length - 1, [False, True])):
            rows = classification_dataset(data, cutter, longest, columns)
            assert list(rows["truncated"]) == cut and max(rows["length"]) == longest


def test_columns_of_the_data_may_have_the_names_of_new_ones(tokenizer):
    data = dataset(
        labels=[True, False], truncated=["no", "no"], length=[0.5, 0.5], index=["a", "b"], document=[[], []]
    )
    rows = classification_dataset(data, tokenizer, 7, label_column="labels", label_names=[False, True])
    assert rows["labels"][:] == [1, 0] and rows["truncated"][:] == [False, True]
    assert (rows["length"][:], rows["index"][:], rows["document"][:]) == ([5, 7], [0, 1], [0, 1])
    assert ClassificationCollator(tokenizer)(rows)["labels"].dtype == torch.int64


def test_pairs_and_batches(tokenizer):
    pairs = dataset(other=["error", "file"], label=["no", "yes"])
    rows = classification_dataset(pairs, tokenizer, 7, ["text", "other"], label_names=["yes", "no"])
    assert tokenizer.decode(rows[1]["input_ids"]) == "[CLS] buffer cache column [SEP] file [SEP]"
    batch = ClassificationCollator(tokenizer)(list(rows))
    assert batch.keys() == {"input_ids", "token_type_ids", "attention_mask", "labels"}
    assert batch["labels"].tolist() == [1, 0]
    assert ClassificationCollator(tokenizer, with_index=True)([rows[1]])["index"].tolist() == [1]
    with pytest.raises(ValueError, match="--truncation_strategy head"):
        classification_dataset(pairs, tokenizer, 7, ["text", "other"], truncation_strategy="tail")


def test_pairs_that_stand_apart(tokenizer):
    pairs = dataset(other=["error element", "file"], label=["no", "yes"])
    options = {"label_names": ["yes", "no"], "truncation_strategy": "tail", "apart": True}
    rows = classification_dataset(pairs, tokenizer, 5, ["text", "other"], **options)
    assert tokenizer.batch_decode(rows[1]["input_ids"]) == ["[CLS] element error file [SEP]", "[CLS] file [SEP]"]
    assert list(rows["length"]) == [5 + 4, 5 + 3]
    assert list(rows["truncated"]) == [False, True]  # of one of the two texts
    batch = ClassificationCollator(tokenizer, with_index=True)(list(rows))
    assert batch["input_ids"].shape == (2, 2, 5) and batch["attention_mask"].sum(-1).tolist() == [[5, 4], [5, 3]]
    assert tokenizer.decode(batch["input_ids"][0, 1]) == "[CLS] error element [SEP] [PAD]"
    assert batch["labels"].tolist() == [1, 0] and batch["index"].tolist() == [0, 1]
    with pytest.raises(ValueError, match="dual_encoder=True needs two text columns"):
        classification_dataset(pairs, tokenizer, 5, apart=True)


def test_labels():
    assert class_labels(dataset(label=[4, 1]), "label") == {1: 0, 4: 1}
    features = Features({"text": Value("string"), "label": ClassLabel(names=["pos", "neg"])})
    assert class_labels(dataset(label=[0, 0]).cast(features), "label") == {"pos": 0, "neg": 1}


def test_numbered_classes_are_known_by_their_names(tokenizer):
    features = Features({"text": Value("string"), "label": ClassLabel(names=["pos", "neg"])})
    rows = classification_dataset(dataset(label=[0, 1]).cast(features), tokenizer, 8, label_names=["neg", "pos"])
    assert list(rows["labels"]) == [1, 0]


LISTED = Features({"text": Value("string"), "label": Sequence(ClassLabel(names=["x", "y", "z"]))})


@pytest.mark.parametrize(
    "data",
    [
        dataset(label=[["z", "x"], []]),
        dataset(label=["z, x", ""]),
        dataset(label=[[2, 0], []]).cast(LISTED),
    ],
    ids=["lists", "texts", "numbered"],
)
def test_several_labels_a_row(data, tokenizer):
    assert list(class_labels(data, "label", ",")) in (["x", "z"], ["x", "y", "z"])
    ids = {"x": 0, "y": 1, "z": 2}
    rows = classification_dataset(data, tokenizer, 8, label_names=ids, label_delimiter=",")
    assert rows["labels"] == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert ClassificationCollator(tokenizer)(list(rows))["labels"].dtype == torch.float32
    with pytest.raises(ValueError, match=r"contains \['z'\]"):
        classification_dataset(data, tokenizer, 8, label_names={"x": 0, "y": 1}, label_delimiter=",")


@pytest.mark.parametrize("delimiter", [None, ","])
def test_a_file_may_have_only_those_labels_that_are_numbers(delimiter, tokenizer):
    """Its column holds numbers, where the other file's holds text."""
    classes = class_labels(dataset(label=["1", "none"]), "label", delimiter)
    found = classification_dataset(
        dataset(label=[1, 1]), tokenizer, 8, label_names=classes, label_delimiter=delimiter
    )["labels"]
    assert found == [0, 0] if delimiter is None else found == [[1.0, 0.0], [1.0, 0.0]]
    with pytest.raises(ValueError, match=r"contains \['none'\], not among the labels \[1, 2\]"):
        classification_dataset(
            dataset(label=["1", "none"]), tokenizer, 8, label_names={1: 0, 2: 1}, label_delimiter=delimiter
        )


@pytest.mark.parametrize(
    ("name", "rows"), [("x.csv", 'text,label\na,"z, x"\nb,\n'), ("x.tsv", "text\tlabel\na\tz,x\nb\t\n")]
)
def test_an_empty_field_of_a_table_is_a_row_without_labels(name, rows, tokenizer, tmp_path):
    (tmp_path / name).write_text(rows)
    data = load_files(tmp_path / name, cache_dir=tmp_path)
    require_labels(data, "label", True, "the train set")
    assert list(class_labels(data, "label", ",")) == ["x", "z"]
    found = classification_dataset(data, tokenizer, 8, label_names={"x": 0, "z": 1}, label_delimiter=",")
    assert found["labels"] == [[1.0, 1.0], [0.0, 0.0]]
    with pytest.raises(ValueError, match="'label' of the train set has no value in row 2"):
        require_labels(data, "label", False, "the train set")


def test_an_empty_text_of_a_table_is_refused_and_one_of_a_jsonl_file_is_a_text(tokenizer, tmp_path):
    (tmp_path / "x.csv").write_text("text,pair,label\narray,axis,0\nbatch,,1\n")
    (tmp_path / "x.jsonl").write_text('{"text": "batch", "pair": "", "label": 1}\n')
    table, lines = (load_files(tmp_path / name, cache_dir=tmp_path) for name in ("x.csv", "x.jsonl"))
    options = {"text_column": ("text", "pair")}
    with pytest.raises(ValueError, match=r"'pair' .* no value in row 2\. An empty field .* in \.jsonl files, \"\" is"):
        classification_dataset(table, tokenizer, 8, **options)
    found = classification_dataset(lines, tokenizer, 8, **options)
    assert tokenizer.decode(found["input_ids"][0]) == "[CLS] batch [SEP] [SEP]"


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([["x"], ["x", None]], "'label' of the train set has a list without a value in row 2"),
        ([["x"], None], "'label' of the train set has no value in row 2"),
        (["x", None], "'label' of the train set has no value in row 2"),  # only tables cannot write an empty text
    ],
)
def test_missing_labels_of_several_are_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        require_labels(dataset(label=labels), "label", True, "the train set")


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"label": [0, 1]}, {"text_column": "body"}, r"no column 'body'; its columns are \['text', 'label'\]"),
        ({"label": [0, None]}, {}, "'label' of the data set has no value in row 2"),
        (
            {"label": [["a"], ["a", None]]},
            {"label_names": ["a"], "label_delimiter": ","},
            "'label' of the data set has a list without a value in row 2",
        ),
        (
            {"label": ["a", "c"]},
            {"label_names": ["a", "b"]},
            r"contains \['c'\], not among the labels \['a', 'b'\]",
        ),
        ({"label": ["a", "b"]}, {"regression": True}, "must hold numbers"),
        ({"label": [[1.0], [2.0]]}, {"regression": True}, "holds lists, but each row needs one label"),
        ({"label": [["a"], ["b"]]}, {"label_names": ["a", "b"]}, "holds lists, .* only --multi_label takes several"),
        ({"label": [[["a"]], [["b"]]]}, {"label_names": ["a", "b"], "label_delimiter": ","}, r"but holds List\(List"),
        ({"label": [0.0, 2.0]}, {"label_names": {0: 0, 1: 1}}, r"contains \[2\.0\], not among the labels \[0, 1\]\.$"),
        (
            {"label": [0, 2]},
            {"label_names": {0: 0, 1: 1}, "where": "the test mismatched set"},
            r"labels \[0, 1\]\. If its labels are hidden, remove their column\.$",
        ),
        ({"label": [{"0": 1}, {"0": 2}]}, {}, r"holds objects\. .*orient=\"records\", lines=True"),
        (
            {"label": [1.1, 1.1]},
            {"label_names": ["1.1", "1.10"]},
            r"decimal numbers, and the labels are .*must be text",
        ),
        (
            {"label": [1.1, 1.1]},
            {"label_names": ["1.1", "1.10"], "label_delimiter": ","},
            "decimal numbers, and the labels are",
        ),
        ({"label": [0.5, float("nan")]}, {"regression": True}, "not finite"),
        ({"label": [0, 1]}, {"text_column": "label"}, "'label' .* must hold text, but holds int64"),
        (
            {"label": [0, 1], "many": [["a"], ["b"]]},
            {"text_column": "many"},
            "'many' .* must hold text, but holds List",
        ),
        ({"label": [0, 1]}, {"max_length": 2}, "--max_length"),
    ],
)
def test_bad_data(columns, options, message, tokenizer):
    with pytest.raises(ValueError, match=message):
        classification_dataset(dataset(**columns), tokenizer, **{"max_length": 8, **options})
