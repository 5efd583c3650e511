# SPDX-License-Identifier: Apache-2.0
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import run_glue
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

from nystrom_models import NystromformerForSequenceClassification

ROOT = Path(__file__).parents[2]
OPTIONS = "--learning_rate 4e-3 --per_device_train_batch_size 16 --max_train_steps 60 --max_length 32".split()


def run(checkpoint, folder, *options):
    paths = ["--model_name_or_path", checkpoint, "--output_dir", f"{folder}/output", "--cache_dir", f"{folder}/cache"]
    results = run_glue.main([*paths, *OPTIONS, *options])
    return results, json.loads(Path(folder, "output", "all_results.json").read_text())


@pytest.fixture(scope="module")
def pairs(filler):
    """Rows that are paraphrases where the first sentence is good."""

    def make(size, hidden=False):
        rows = []
        for i in range(size):
            first = f"{filler(3 + i % 7, i)} {('bad', 'good')[i % 2]}"
            rows.append(
                {"sentence1": first, "sentence2": filler(5, -i), "label": -1 if hidden else i % 2, "idx": 7 * i}
            )
        return rows

    return make


@pytest.fixture(scope="module")
def mrpc(checkpoint, pairs, write_rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mrpc")
    files = ["--train_file", write_rows(pairs(160)), "--validation_file", write_rows(pairs(70))]
    files += ["--test_file", write_rows(pairs(37, hidden=True))]
    options = ["--task_name", "MRPC", *files]
    return folder / "output", *run(checkpoint, folder, *options), options


def test_mrpc_from_files(mrpc):
    _, results, written, _ = mrpc
    assert results["validation"]["accuracy"] == results["validation"]["f1"] == 1.0
    assert results["validation"]["loss"] < 0.1
    assert written["results"] == results
    assert written["arguments"]["task_name"] == "mrpc" and written["arguments"]["learning_rate"] == 4e-3
    assert written["versions"]["torch"] == torch.__version__


def test_predictions_are_those_of_the_saved_model_in_the_order_of_the_file(mrpc):
    header, *lines = (mrpc[0] / "MRPC.tsv").read_text().splitlines()
    assert header == "index\tprediction"
    assert lines == [f"{i}\t{i % 2}" for i in range(37)]


def test_two_processes_give_what_one_gives(mrpc, checkpoint, tmp_path):
    one, results, _, options = mrpc
    paths = [
        "--model_name_or_path",
        checkpoint,
        "--output_dir",
        f"{tmp_path}/output",
        "--cache_dir",
        f"{tmp_path}/cache",
    ]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    half = ["--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "5"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    subprocess.run(
        [*launch, run_glue.__file__, *paths, *OPTIONS, *options, *half], check=True, env=environment, timeout=500
    )
    two = json.loads((tmp_path / "output" / "all_results.json").read_text())["results"]
    assert two["validation"] == pytest.approx(results["validation"], rel=1e-3)
    assert (tmp_path / "output" / "MRPC.tsv").read_text() == (one / "MRPC.tsv").read_text()


def test_a_stopped_run_goes_on(checkpoint, pairs, write_rows, tmp_path):
    rows = write_rows(pairs(160))
    options = ["--task_name", "mrpc", "--train_file", rows, "--validation_file", rows, "--checkpointing_steps", "25"]
    whole, _ = run(checkpoint, tmp_path, *options)
    (tmp_path / "output" / "all_results.json").unlink()
    resumed, _ = run(checkpoint, tmp_path, *options, "--resume_from_checkpoint", f"{tmp_path}/output/checkpoint-25")
    assert resumed["train"]["steps"] == 60
    assert resumed["validation"] == whole["validation"]


def test_the_checkpoint_is_loaded_by_the_auto_classes(mrpc):
    model, info = AutoModelForSequenceClassification.from_pretrained(mrpc[0], output_loading_info=True)
    assert type(model) is NystromformerForSequenceClassification and not info["missing_keys"]
    classify = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(mrpc[0]))
    for word, label in (("good", "equivalent"), ("bad", "not_equivalent")):
        assert classify({"text": f"the film was {word}", "text_pair": "the old town"})["label"] == label


def test_mnli_has_two_validation_and_two_test_sets(checkpoint, filler, write_rows, tmp_path):
    names = ("entailment", "neutral", "contradiction")

    def rows(size, shift=0):
        words = ("good", "year", "bad")
        return [
            {"premise": filler(4, i), "hypothesis": words[i % 3], "label": names[(i + shift) % 3]} for i in range(size)
        ]

    files = {
        "--train_file": rows(150),
        "--validation_file": rows(30),
        "--validation_mismatched_file": rows(30, shift=1),  # all labels wrong
        "--test_file": rows(6),
        "--test_mismatched_file": rows(3),
    }
    options = [part for flag, content in files.items() for part in (flag, write_rows(content))]
    results, _ = run(checkpoint, tmp_path, "--task_name", "mnli", *options)
    assert results["validation_matched"]["accuracy"] == 1.0 and results["validation_mismatched"]["accuracy"] == 0.0
    for file, size in (("MNLI-m.tsv", 6), ("MNLI-mm.tsv", 3)):
        lines = (tmp_path / "output" / file).read_text().splitlines()
        assert lines[1:] == [f"{i}\t{names[i % 3]}" for i in range(size)]


def test_stsb_is_regression(checkpoint, filler, write_rows, tmp_path):
    def rows(size):
        texts = [(f"{filler(6, i)} {'good' if i % 2 else 'bad'}", filler(4, -i)) for i in range(size)]
        return [{"sentence1": a, "sentence2": b, "label": 4.5 * (i % 2)} for i, (a, b) in enumerate(texts)]

    file = write_rows(rows(120))
    results, _ = run(
        checkpoint,
        tmp_path,
        "--task_name",
        "stsb",
        "--max_train_steps",
        "100",
        "--train_file",
        file,
        "--validation_file",
        file,
        "--test_file",
        file,
    )
    assert results["validation"]["pearson"] > 0.95
    assert results["validation"]["loss"] < 2  # of a constant: 5.1
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "output").config.num_labels == 1
    lines = (tmp_path / "output" / "STS-B.tsv").read_text().splitlines()[1:]
    scores = [float(line.split("\t")[1]) for line in lines]
    assert len(scores) == 120 and all(0 <= score <= 5 for score in scores)
    assert min(scores[1::2]) > max(scores[::2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--task_name mrcp", "--task_name must be one of cola, .* but is mrcp"),
        ("--task_name mrpc --do_regression", "leave out"),
        ("--task_name mrpc --train_file {train}", "--validation_file"),
        ("--task_name mrpc --validation_file {train}", "--train_file"),
        ("--task_name mrpc --train_file {train} --validation_mismatched_file {train}", "--task_name mnli"),
        ("--task_name mrpc --train_file {train} --validation_file {hidden}", r"validation set holds \[-1\]"),
        ("--task_name qqp --train_file {train} --validation_file {train}", "no column 'question1'; its columns are"),
        ("--task_name mrpc --train_file {train} --validation_file {train} --max_length 65", "must be at most 64"),
        (
            "--task_name mrpc --train_file {train} --validation_file {train} --max_train_samples 9",
            "9 rows, fewer than",
        ),
        ("--output_dir {folder}", "--train_file"),
    ],
)
def test_faults_are_named_before_training(options, message, checkpoint, pairs, write_rows, tmp_path):
    files = {"train": write_rows(pairs(40)), "hidden": write_rows(pairs(8, hidden=True)), "folder": tmp_path}
    with pytest.raises(ValueError, match=message):
        run(checkpoint, tmp_path, *(option.format(**files) for option in options.split()))
    assert not (tmp_path / "output" / "model.safetensors").exists()


def test_a_labelled_test_set_is_scored(checkpoint, pairs, write_rows, tmp_path):
    rows = write_rows(pairs(60))
    files = ["--train_file", rows, "--validation_file", rows, "--test_file", rows]
    results, _ = run(checkpoint, tmp_path, "--task_name", "mrpc", *files, "--max_train_steps", "2")
    assert results["test"] == results["validation"]
    assert len((tmp_path / "output" / "MRPC.tsv").read_text().splitlines()) == 61


def test_what_a_run_leaves(mrpc, checkpoint):
    history = [json.loads(line) for line in (mrpc[0] / "history.jsonl").read_text().splitlines()]
    # 160 rows are 10 steps an epoch, and the last evaluation is after the end.
    held_out = {row["step"]: row["eval_accuracy"] for row in history if "eval_accuracy" in row}
    assert list(held_out) == [10, 20, 30, 40, 50, 60] and held_out[60] == 1.0
    assert (mrpc[0] / "training_curve.png").is_file()
    card = (mrpc[0] / "README.md").read_text()
    assert "160 rows of rows.jsonl" in card and "| f1 | 1.0 |" in card and "text_pair" in card
    assert str(Path(checkpoint).parent) not in card


def test_a_grid_over_rates_and_seeds(checkpoint, pairs, write_rows, tmp_path, capsys):
    rows = write_rows(pairs(64))
    files = ["--task_name", "mrpc", "--train_file", rows, "--validation_file", rows]
    options = [*files, "--max_train_steps", "20", "--grid", "learning_rate=1e-9,4e-3", "seed=0,1"]
    outcome, written = run(checkpoint, tmp_path, *options)
    poor, good = outcome["grid"]
    assert (poor["learning_rate"], good["learning_rate"], good["seeds"]) == (1e-9, 4e-3, [0, 1])
    assert outcome["best"] == good and written["results"] == outcome
    runs = [
        json.loads((tmp_path / "output" / name / "all_results.json").read_text())["results"]["validation"]["accuracy"]
        for name in good["runs"]
    ]
    assert good["validation"]["accuracy"]["mean"] == pytest.approx(sum(runs) / 2)
    assert good["validation"]["accuracy"]["std"] == pytest.approx(abs(runs[0] - runs[1]) / 2**0.5)
    assert "* learning_rate=0.004: accuracy" in capsys.readouterr().out
    # Run again with one more rate: what is finished is not repeated.
    finished = tmp_path / "output" / good["runs"][1] / "model.safetensors"
    before = finished.stat().st_mtime_ns
    again, _ = run(checkpoint, tmp_path, *options[:-2], "learning_rate=4e-3,1e-3", "seed=0,1")
    assert again["grid"][0] == good and finished.stat().st_mtime_ns == before
    run(checkpoint, tmp_path, *options[:-2], "learning_rate=4e-3", "seed=1", "--weight_decay", "0.5")
    assert finished.stat().st_mtime_ns != before


@pytest.mark.parametrize(
    ("grid", "message"),
    [("learning_rat=1", "learning_rat=1"), ("learning_rate", "with values"), ("output_dir=a,b", "output_dir")],
)
def test_a_wrong_grid_is_named(grid, message, checkpoint, pairs, write_rows, tmp_path):
    rows = write_rows(pairs(40))
    files = ["--task_name", "mrpc", "--train_file", rows, "--validation_file", rows]
    with pytest.raises(ValueError, match=message):
        run(checkpoint, tmp_path, *files, "--grid", grid)
