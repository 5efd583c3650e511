# SPDX-License-Identifier: Apache-2.0
"""What a task asks of the data and of a finished model, before anything is trained or predicted."""

import csv
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import PretrainedConfig

from nystrom_models.data.classification import TextTask
from nystrom_models.data.glue import GLUE_TASKS
from nystrom_models.training import splits, text_classification
from nystrom_models.training.arguments import DataArguments, RunArguments
from nystrom_models.training.results import write_results
from nystrom_models.training.run import start_run
from nystrom_models.training.splits import load_data
from nystrom_models.training.text_classification import (
    TextClassificationArguments,
    TextClassificationRun,
    check_kind,
    evaluate_predictions,
    write_predictions,
)
from nystrom_models.training.token_classification import TokenClassificationArguments, TokenClassificationRun

TASKS = {
    "single": TextTask(("text",)),
    "several": TextTask(("text",), multi_label=True),
    "number": TextTask(("text",), regression=True),
}


def test_a_cache_of_another_user_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(splits.os, "access", lambda path, mode: path != tmp_path)
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n')
    folder = tmp_path / "cache" / "datasets"
    with pytest.raises(PermissionError, match=r"--cache_dir .*cache/datasets is not writable: give another"):
        load_data(DataArguments(cache_dir=str(folder)), [str(tmp_path / "x.jsonl")])
    monkeypatch.setattr(splits.datasets.config, "HF_DATASETS_CACHE", folder)
    with pytest.raises(PermissionError, match=r"The cache of `datasets`, .*is not writable: give --cache_dir"):
        load_data(DataArguments(), [str(tmp_path / "x.jsonl")])


def test_predictions_are_read_back_whatever_is_in_a_label(tmp_path):
    names = ["plain", "a\ttab", "two\nlines", 'a "quote"']
    write_predictions(tmp_path / "predictions.tsv", TASKS["single"], torch.eye(4), names)
    with (tmp_path / "predictions.tsv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, "excel-tab"))
    assert rows == [["index", "prediction"], *([str(i), name] for i, name in enumerate(names))]


def written(path):
    return [line.split("\t")[1] for line in path.read_text(encoding="utf-8").splitlines()[1:]]


def test_numbers_are_clipped_only_to_a_scale_that_is_known(tmp_path):
    numbers = torch.tensor([[-1.0], [0.25], [4.7], [1234567.75]])  # the last one needs all digits of float32
    write_predictions(tmp_path / "any.tsv", TASKS["number"], numbers, [])
    write_predictions(tmp_path / "stsb.tsv", GLUE_TASKS["stsb"], numbers, [])
    assert written(tmp_path / "any.tsv") == ["-1", "0.25", "4.7", "1234567.8"]
    assert written(tmp_path / "stsb.tsv") == ["0", "0.25", "4.7", "5"]


def test_a_class_of_several_is_predicted_from_one_half_on(tmp_path):
    logits = torch.tensor([[0.25, -0.25, 3.0], [-0.25, -3.0, -0.25]])
    task = replace(TASKS["several"], metric="multi_label")
    write_predictions(tmp_path / "predictions.tsv", task, logits, ["a", "b", "c"])
    assert written(tmp_path / "predictions.tsv") == ["a,c", ""]
    scores = evaluate_predictions(task, logits, torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]))
    assert scores["exact_match"] == scores["micro_f1"] == 1.0


def finished_run(task, folder):
    """A run whose rows and logits are given."""
    run = object.__new__(TextClassificationRun)
    run.args = TextClassificationArguments(output_dir=str(folder), model_name_or_path="x")
    run.task, run.labelled, run.where = task, {"validation"}, {"validation": "the validation set"}
    run.tokenizer, run.order = None, None
    run.accelerator = SimpleNamespace(main_process_first=nullcontext)
    return run


def score(run, monkeypatch, documents, labels, logits):
    run.rows = {"validation": {"document": documents, "labels": labels}}
    monkeypatch.setattr(text_classification, "eval_dataloader", lambda *_, **options: None)
    monkeypatch.setattr(text_classification, "predict", lambda *_, **options: logits)
    return run.score(None, "validation", 8)


def test_a_text_of_several_windows_counts_once_with_their_mean(tmp_path, monkeypatch):
    run = finished_run(replace(TASKS["number"], metric="regression"), tmp_path)
    logits = torch.tensor([[1.0], [3.0], [2.0], [0.0], [2.0], [7.0]])
    found, scores = score(run, monkeypatch, [0, 0, 1, 2, 2, 2], [1.0, 1.0, 2.0, 3.0, 3.0, 3.0], logits)
    assert found.tolist() == [[2.0], [2.0], [3.0]]
    assert scores["loss"] == scores["mse"] == pytest.approx(1 / 3)


def test_classes_in_another_order_than_the_tasks_are_scored_and_written_by_name(tmp_path, monkeypatch):
    """Three classes that are turned: if only two are exchanged, both directions between the orders are the same."""
    run = finished_run(GLUE_TASKS["mnli"], tmp_path)
    own = ["contradiction", "entailment", "neutral"]
    run.config = PretrainedConfig(id2label=dict(enumerate(own)))
    run.ids, run.label_names = run._own_head()
    right = ["entailment", "neutral", "contradiction", "contradiction"]
    labels = [run.ids[name] for name in right]
    assert [own[label] for label in labels] == right
    predicted = ["entailment", "neutral", "contradiction", "neutral"]
    logits = torch.stack([2.0 * torch.eye(3)[own.index(name)] for name in predicted])
    found, scores = score(run, monkeypatch, range(4), labels, logits)
    assert scores["accuracy"] == 0.75
    assert scores["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits, torch.tensor(labels))))
    run.write("validation", found)
    assert written(tmp_path / "validation_predictions.tsv") == predicted


def test_each_split_is_sampled_by_its_own_flag():
    run, rows = object.__new__(TokenClassificationRun), Dataset.from_dict({"number": range(100)})
    sizes = {"max_train_samples": 5, "max_eval_samples": 4, "max_predict_samples": 3}
    run.args = TokenClassificationArguments(output_dir="x", model_name_or_path="x", **sizes)
    names = {"train": 5, "validation": 4, "validation_mismatched": 4, "test": 3, "test_ax": 3}
    found = {split: list(run._sample(split, rows)["number"]) for split in names}
    assert {split: len(numbers) for split, numbers in found.items()} == names
    assert found["test"] == found["test_ax"] == [0, 1, 2]
    assert max(found["train"]) > 5 and max(found["validation"]) > 4  # drawn from all rows
    run.args = TokenClassificationArguments(output_dir="x", model_name_or_path="x")
    assert {len(run._sample(split, rows)) for split in names} == {100}


@pytest.mark.parametrize(
    ("task", "problem_type", "num_labels", "advice"),
    [
        ("single", "regression", 1, "give --do_regression"),
        ("single", None, 1, "give --do_regression"),
        ("single", "multi_label_classification", 2, "give --multi_label"),
        ("single", "multi_label_classification", 1, "give --multi_label"),
        ("several", "single_label_classification", 3, "leave out --multi_label"),
        ("several", "regression", 1, "leave out --multi_label and give --do_regression"),
        ("number", "single_label_classification", 2, "leave out --do_regression"),
        ("number", "multi_label_classification", 1, "leave out --do_regression and give --multi_label"),
        ("number", None, 3, "leave out --do_regression"),
        ("single", "single_label_classification", 3, None),
        ("single", None, 3, None),
        ("several", "multi_label_classification", 1, None),
        ("several", None, 2, None),
        ("number", "regression", 1, None),
        ("number", None, 1, None),
    ],
)
def test_a_finished_model_is_used_for_what_it_predicts(task, problem_type, num_labels, advice):
    if advice is None:
        check_kind(TASKS[task], problem_type, num_labels)
        return
    with pytest.raises(ValueError, match=f": {advice}, or give another --model_name_or_path"):
        check_kind(TASKS[task], problem_type, num_labels)


@pytest.mark.parametrize(
    ("labels", "options", "told"),
    [
        (["ORG", "O"], {}, "are not meaningful: the labels ORG are neither O nor B-x"),
        (["ORG", "O"], {"do_train": False}, "are not meaningful: the labels ORG are neither O nor B-x"),
        (list("abcdefO"), {}, "the labels a, b, c, d, e, ... are"),
        (["B-x", "O"], {}, ""),
        (["NN", "DT"], {"task_name": "pos", "label_column_name": "ner_tags"}, ""),
    ],
)
def test_labels_in_which_no_entity_can_be_found_are_told(labels, options, told, capsys):
    run = object.__new__(TokenClassificationRun)
    run.args = TokenClassificationArguments(output_dir="x", model_name_or_path="x", **options)
    run.task, run.accelerator, run.where = run.args.task(), SimpleNamespace(print=print), {"train": "the train set"}
    run.config = PretrainedConfig(id2label=dict(enumerate(labels)))
    run.set_classes({"train": Dataset.from_dict({"tokens": [labels], "ner_tags": [labels]})})
    printed = capsys.readouterr().out
    assert told in printed and bool(told) == bool(printed)


def test_words_of_several_rows_are_one_text_and_count_alike():
    """A word without a token, here the last one, is outside of all entities, whichever label comes first."""
    run = object.__new__(TokenClassificationRun)
    run.args = TokenClassificationArguments(output_dir="x", model_name_or_path="x")
    run.task, run.names, run.labelled = run.args.task(), ["B-x", "O"], ["validation"]
    examples = Dataset.from_dict({"tokens": [["a", "b", "c", "\u200b"]], "ner_tags": [["O", "B-x", "O", "O"]]})
    run.examples = {"validation": examples}
    run.rows = {"validation": {"document": [0, 0], "words": [[-1, 0, 1, -1], [-1, 2, -1]]}}
    found = {"labels": [torch.tensor([0, 1, 0, 0]), torch.tensor([0, 0, 1])]}
    found |= {"loss": [torch.tensor(3.0), torch.tensor(6.0)], "count": [torch.tensor(2), torch.tensor(1)]}
    run.predict = lambda *_: found
    tags, scores = run.score(None, "validation", 8)
    assert tags == [["O", "B-x", "B-x", "O"]] and scores["loss"] == 3.0
    assert scores["accuracy"] == pytest.approx(3 / 4)


def test_results_of_a_training_are_not_replaced_by_those_of_a_prediction(tmp_path):
    def begin(**options):
        with start_run(RunArguments(output_dir=str(tmp_path), **options)):
            pass

    write_results(tmp_path, {"train": {}}, RunArguments(output_dir="x"))
    begin()  # another training
    with pytest.raises(ValueError, match=r"give another --output_dir, or --overwrite_output_dir"):
        begin(do_train=False)
    begin(do_train=False, overwrite_output_dir=True)
    write_results(tmp_path, {"test": {}}, RunArguments(output_dir="x", do_train=False))
    begin(do_train=False)


@pytest.mark.parametrize(
    ("name", "text", "warned"),
    [
        ("x.txt", "one\ntwo\r\nthree\n", "x.txt has 3 lines and no empty line"),
        ("x.txt", "\ufeffone\n\ntwo\nand a half\n", None),
        ("x.txt", "one\n\n", None),
        ("x.csv", "text\none\ntwo\n", None),
    ],
)
def test_a_text_file_with_a_text_in_each_line(name, text, warned, tmp_path, recwarn):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    rows = load_data(DataArguments(cache_dir=str(tmp_path)), [str(path)])["test"]
    told = [str(warning.message) for warning in recwarn if "empty line" in str(warning.message)]
    if warned:
        assert len(rows) == 1 and warned in told[0]
    else:
        assert not told and not rows[0]["text"].startswith("\ufeff")


def test_the_number_of_predictions_is_told(capsys):
    run = object.__new__(TokenClassificationRun)
    run.accelerator = SimpleNamespace(print=print, is_main_process=False)
    run.rows = run.examples = {"train": [1], "test": [1] * 1234}
    run.where, run.score = {"test": "the test set"}, lambda *_: ([], {})
    assert run.write_tests(None, 8) == {}
    assert capsys.readouterr().out == "1,234 rows of the test set were predicted.\n"
