# SPDX-License-Identifier: Apache-2.0
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import run_glue
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    pipeline,
)

from nystrom_models import NystromformerForSequenceClassification
from nystrom_models.data.glue import GLUE_TASKS
from nystrom_models.training import finetuning
from nystrom_models.training.results import write_results
from tests.data.test_glue_files import FOLDERS, glue  # noqa: F401  (a fixture)
from tests.training import processes

ROOT = Path(__file__).parents[2]
OPTIONS = "--learning_rate 4e-3 --per_device_train_batch_size 16 --max_train_steps 60 --max_length 32".split()


def run(checkpoint, folder, *options):
    paths = ["--model_name_or_path", checkpoint, "--output_dir", f"{folder}/output", "--cache_dir", f"{folder}/cache"]
    results = run_glue.main([*paths, *OPTIONS, *options])
    return results, json.loads(Path(folder, "output", "all_results.json").read_text())


@pytest.fixture(scope="module")
def pairs(filler):
    """Rows that are paraphrases if the first sentence contains "good"."""

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


@pytest.mark.slow
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
    # With only the flags of the README. On a CPU, Accelerate alone would train two models and write to one folder.
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    environment.pop("ACCELERATE_USE_CPU", None)
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
    # The limit of the rows' tokenization is none of the tokenizer's.
    raw = json.loads((mrpc[0] / "tokenizer.json").read_text())
    assert raw["truncation"] is None and raw["padding"] is None
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
    assert results["validation"]["loss"] < 2  # a constant prediction: 5.1
    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "output").config.num_labels == 1
    lines = (tmp_path / "output" / "STS-B.tsv").read_text().splitlines()[1:]
    scores = [float(line.split("\t")[1]) for line in lines]
    assert len(scores) == 120 and all(0 <= score <= 5 for score in scores)
    assert min(scores[1::2]) > max(scores[::2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--task_name mrcp", "--task_name must be one of cola, .* or all, but is mrcp"),
        ("--task_name mrpc --test_ax_file {train}", "--task_name mnli"),
        ("--task_name mrpc --data_dir {folder} --train_file {train}", "or --data_dir"),
        ("--data_dir {folder}", "--task_name, too"),
        ("--task_name mrpc --start_from_mnli", "--task_name all"),
        ("--task_name all --start_from_mnli --grid model_name_or_path=a,b", "start from the model of MNLI"),
        ("--task_name all --no_do_train", "leave out --push_to_hub and --no_do_train"),
        ("--no_do_train", "--validation_file or --test_file"),
        ("--no_do_train --push_to_hub --validation_file {train}", "uploads the model that a run trains"),
        ("--train_file {versions} --validation_file {versions}", r"text in a \.jsonl or \.parquet file"),
        # Only in the first file there is a name that is no number.
        (
            "--train_file {named} --validation_file {versions}",
            r"validation set holds decimal .* \['1.1', '1.10', 'new'\]",
        ),
        ("--train_file {named} --validation_file {named} --text_column_names text text", "must all differ"),
        ("--train_file {texts} --validation_file {texts}", r"\['sentence', 'label'\]: give --text_column_names"),
        (
            "--train_file {named} --validation_file {named} --label_column_name kind",
            r"no column 'kind'; its columns are \['text', 'label'\]: give --label_column_name",
        ),
        ("--train_file {named} --validation_file {named} --text_column_names label", "must all differ"),
        (
            "--train_file {named} --validation_file {zips}",
            r"must hold text, but holds int64\. .* write the file as \.jsonl",
        ),
        ("--train_file {spaces} --validation_file {spaces}", "has the labels ' new' and 'new'"),
        ("--train_file {blank} --validation_file {blank}", "has a label that is blank, ' '"),
        ("--torch_compile --torch_compile_backend fast", "--torch_compile_backend must be one of aot_eager, "),
        ("--multi_label --do_regression", "not both"),
        (
            "--train_file {hot} --validation_file {hot} --multi_label",
            r"decimal numbers: .* such as \[0, 2\], not a 0\.0",
        ),
        ("--train_file {named} --validation_file {named} --test_file {objects}", "the test set must hold labels, but"),
        ("--multi_label --label_delimiter=", "--label_delimiter must not be empty"),
        ("--keep_best_only", "of a --grid"),
        ("--eval_strategy no --load_best_model_at_end", "--eval_strategy epoch"),
        (
            "--task_name mrpc --train_file {train} --validation_file {train} --metric_for_best_model bleu",
            "The metric 'bleu' is unknown",
        ),
        (
            "--task_name sst2 --train_file {texts} --validation_file {texts} --metric_for_best_model f1",
            r"--metric_for_best_model f1 is not measured; use one of loss, accuracy\.$",
        ),
        ("--task_name mrpc --do_regression", "leave out"),
        (
            "--task_name mrpc --train_file {train} --validation_file {train} --validation_split test",
            "--task_name mrpc sets the data: leave out .*--validation_split",
        ),
        ("--task_name mrpc --dataset_config_name sst2", "sets the data: leave out .*--dataset_config_name"),
        ("--task_name mrpc --train_file {train}", "--validation_file"),
        ("--train_file {train} --validation_file {train} --validation_split test", "of --dataset_name: for files"),
        ("--task_name mrpc --validation_file {train}", "--train_file"),
        ("--task_name mrpc --train_file {train} --validation_mismatched_file {train}", "--task_name mnli"),
        ("--task_name mrpc --train_file {train} --validation_file {hidden}", r"validation set contains \[-1\]"),
        (
            "--task_name qqp --train_file {train} --validation_file {train}",
            r"no column 'question1'; its columns are .*\]\.$",
        ),
        (
            "--task_name mrpc --train_file {train} --validation_file {train} --max_length 65",
            "--max_length 65 is more than the 64 tokens that the model takes: give --max_length 64 or less, or make "
            "the model longer first: python -m nystrom_models convert .* OUT --family .* --max_length 65",
        ),
        (
            "--task_name mrpc --train_file {train} --validation_file {train} --max_length 65 "
            "--config_overrides max_position_embeddings=65",
            "--config_overrides max_position_embeddings=65: weights of .* have other shapes",
        ),
        (
            "--task_name mrpc --train_file {train} --validation_file {train} --max_train_samples 9",
            "9 rows, fewer than",
        ),
        ("--output_dir {folder}", "--train_file"),
    ],
)
def test_faults_are_named_before_training(options, message, checkpoint, pairs, write_rows, tmp_path):
    texts = [{"sentence": row["sentence1"], "label": row["label"]} for row in pairs(40)]
    (tmp_path / "versions.csv").write_text("text,label\na,1.1\nb,1.10\nc,1.2\n")
    (tmp_path / "named.csv").write_text("text,label\na,1.1\nb,1.10\nc,new\n")
    (tmp_path / "spaces.csv").write_text("text,label\na, new\nb,new\nc,old\n")
    (tmp_path / "blank.csv").write_text("text,label\na, \nb,new\nc,old\n")
    (tmp_path / "zips.csv").write_text("text,label\n10000,new\n10001,1.1\n")
    files = {
        **{name: tmp_path / f"{name}.csv" for name in ("versions", "named", "spaces", "blank", "zips")},
        "train": write_rows(pairs(40)),
        "texts": write_rows(texts),
        "hot": write_rows([{"text": "a", "label": [0.0, 1.0]}] * 40),
        "objects": write_rows([{"text": "a", "label": {"name": "new"}}]),
        "hidden": write_rows(pairs(8, hidden=True)),
        "folder": tmp_path,
    }
    with pytest.raises(ValueError, match=message):
        run(checkpoint, tmp_path, *(option.format(**files) for option in options.split()))
    assert not (tmp_path / "output" / "model.safetensors").exists()


@pytest.mark.parametrize("longest", [64, 256])
def test_rows_have_at_most_128_tokens_unless_a_flag_says_otherwise(longest, checkpoint, filler, write_rows, tmp_path):
    """Fewer if the model takes fewer."""
    model = checkpoint
    if longest > 64:
        model = str(tmp_path / "longer")
        resized = NystromformerForSequenceClassification.from_pretrained(
            checkpoint, max_position_embeddings=longest, ignore_mismatched_sizes=True
        )
        resized.save_pretrained(model)
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        tokenizer.model_max_length = longest
        tokenizer.save_pretrained(model)
    file = write_rows([{"text": filler(300, i), "label": i % 2} for i in range(16)])
    options = ["--train_file", file, "--validation_file", file, "--max_train_steps", "1"]
    options += ["--per_device_train_batch_size", "4", "--output_dir"]
    run_glue.main(["--model_name_or_path", model, *options, f"{tmp_path}/output", "--cache_dir", f"{tmp_path}/cache"])
    written = json.loads((tmp_path / "output" / "all_results.json").read_text())
    assert written["arguments"]["max_length"] == min(longest, 128)
    assert AutoTokenizer.from_pretrained(tmp_path / "output").model_max_length == longest


def test_a_labelled_test_set_is_scored(checkpoint, pairs, write_rows, tmp_path):
    rows = write_rows(pairs(60))
    files = ["--train_file", rows, "--validation_file", rows, "--test_file", rows]
    results, _ = run(checkpoint, tmp_path, "--task_name", "mrpc", *files, "--max_train_steps", "2")
    assert results["test"] == results["validation"]
    assert len((tmp_path / "output" / "MRPC.tsv").read_text().splitlines()) == 61


def test_minus_one_is_a_label_where_it_is_a_class(checkpoint, filler, write_rows, tmp_path):
    """Elsewhere it stands for a hidden label, and the set is not scored."""
    rows = [{"text": filler(5, i), "label": 2 * (i % 2) - 1} for i in range(20)]
    files = ["--train_file", write_rows(rows), "--validation_file", write_rows(rows)]
    results, _ = run(checkpoint, tmp_path, *files, "--test_file", write_rows(rows[::2]), "--max_train_steps", "1")
    assert "accuracy" in results["test"]


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
    assert outcome["best_run"] in good["runs"] and outcome["metric"] == "combined_score"
    # Run again with one more learning rate: finished runs are not repeated.
    finished = tmp_path / "output" / good["runs"][1] / "model.safetensors"
    before = finished.stat().st_mtime_ns
    again, _ = run(checkpoint, tmp_path, *options[:-2], "learning_rate=4e-3,1e-3", "seed=0,1")
    assert again["grid"][0] == good and finished.stat().st_mtime_ns == before
    run(checkpoint, tmp_path, *options[:-2], "learning_rate=4e-3", "seed=1", "--weight_decay", "0.5")
    assert finished.stat().st_mtime_ns != before


def test_a_grid_does_not_take_over_results_of_other_flags_or_data(checkpoint, pairs, write_rows, tmp_path, capsys):
    """Results of a smaller run, or of a file or a model that has changed since, are not reused."""
    model = shutil.copytree(checkpoint, tmp_path / "model")
    rows = write_rows(pairs(64))
    options = ["--task_name", "mrpc", "--train_file", rows, "--validation_file", rows, "--max_train_steps", "2"]
    options += ["--grid", "seed=0"]

    def scored(*more):
        run(str(model), tmp_path, *options, *more)
        return json.loads((tmp_path / "output" / "seed=0" / "all_results.json").read_text())["results"]

    smoke = scored("--max_train_samples", "16", "--max_eval_samples", "8")
    whole = scored()
    assert whole != smoke and scored() == whole
    Path(rows).write_text("".join(json.dumps(row | {"label": 1}) + "\n" for row in pairs(64)))
    changed = scored()
    assert changed["validation"] != whole["validation"] and scored() == changed
    weights = load_file(model / "model.safetensors")
    save_file({name: 2 * weight for name, weight in weights.items()}, model / "model.safetensors", {"format": "pt"})
    scaled = scored()
    assert scaled["validation"]["loss"] != changed["validation"]["loss"]
    # The same vocabulary, but capitals are unknown.
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    Path(rows).write_text(
        "".join(json.dumps(row | {"sentence1": row["sentence1"].replace("good", "GOOD")}) + "\n" for row in pairs(64))
    )
    unknown = scored()
    tokenizer["normalizer"]["lowercase"] = True
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert scored()["validation"]["loss"] != unknown["validation"]["loss"]


def test_weights_in_half_precision_are_trained_in_float32(checkpoint, pairs, write_rows, tmp_path):
    """In bfloat16, AdamW's steps at this rate would be rounded away."""
    model, rows = shutil.copytree(checkpoint, tmp_path / "model"), write_rows(pairs(64))
    before = {name: weight.bfloat16() for name, weight in load_file(model / "model.safetensors").items()}
    save_file(before, model / "model.safetensors", {"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"dtype": "bfloat16"}
    (model / "config.json").write_text(json.dumps(config))
    options = ["--task_name", "mrpc", "--train_file", rows, "--validation_file", rows, "--max_train_steps", "4"]
    run(str(model), tmp_path, *options, "--learning_rate", "1e-5")
    after = load_file(tmp_path / "output" / "model.safetensors")
    assert all(weight.dtype == torch.float32 for weight in after.values())
    changed = [(after[name] != before[name].float()).float().mean() for name in before if "encoder" in name]
    assert len(changed) > 10 and min(changed) > 0.9


def test_the_best_point_of_a_regression_is_that_of_the_least_error(checkpoint, write_rows, filler, tmp_path, capsys):
    rows = [{"text": f"{filler(3, i)} {('bad', 'good')[i % 2]}", "label": 10.0 * (i % 2)} for i in range(64)]
    file = write_rows(rows)
    options = ["--train_file", file, "--validation_file", file, "--do_regression", "--max_train_steps", "20"]
    outcome, _ = run(checkpoint, tmp_path, *options, "--grid", "learning_rate=1e-9,2e-2", "--keep_best_only")
    poor, good = outcome["grid"]
    assert good["validation"]["mse"]["mean"] < poor["validation"]["mse"]["mean"]
    assert outcome["best"] == good and outcome["metric"] == "mse"
    assert "* learning_rate=0.02: mse " in capsys.readouterr().out
    kept = [path.parent.name for path in (tmp_path / "output").glob("*/*.safetensors")]
    assert kept == [outcome["best_run"]] == good["runs"]


@pytest.mark.slow
def test_a_grid_on_two_processes(checkpoint, pairs, write_rows, tmp_path):
    """One table, one file, and a folder for each run; when resumed, finished runs are not repeated."""
    rows = write_rows(pairs(64))
    options = ["--task_name", "mrpc", "--train_file", rows, "--validation_file", rows, "--max_train_steps", "4"]
    arguments = ["--model_name_or_path", checkpoint, "--output_dir", f"{tmp_path}/two", "--cache_dir", f"{tmp_path}/c"]
    arguments += [*OPTIONS, *options, "--per_device_train_batch_size", "8", "--grid", "seed=0,1"]
    codes, log = processes.run(run_glue.main, arguments, folder=tmp_path, num_processes=2)
    assert codes == [0, 0], log[-3000:]
    assert log.count("* 2 seeds: accuracy") == 1
    one, _ = run(checkpoint, tmp_path, *options, "--grid", "seed=0,1")
    two = json.loads((tmp_path / "two" / "all_results.json").read_text())["results"]
    for name, score in one["best"]["validation"].items():
        assert two["best"]["validation"][name] == pytest.approx(score, rel=1e-3, abs=1e-6)


@pytest.mark.parametrize(
    ("grid", "message"),
    [("learning_rat=1", "learning_rat=1"), ("learning_rate", "with values"), ("output_dir=a,b", "output_dir")],
)
def test_a_wrong_grid_is_named(grid, message, checkpoint, pairs, write_rows, tmp_path):
    rows = write_rows(pairs(40))
    files = ["--task_name", "mrpc", "--train_file", rows, "--validation_file", rows]
    with pytest.raises(ValueError, match=message):
        run(checkpoint, tmp_path, *files, "--grid", grid)


def test_a_task_from_glues_own_files(checkpoint, glue, tmp_path):  # noqa: F811
    """CoLA: files without a header, in which quotes are text."""
    folder = glue / "CoLA"
    files = ["--train_file", f"{folder}/train.tsv", "--validation_file", f"{folder}/dev.tsv"]
    files += ["--test_file", f"{folder}/test.tsv"]
    options = ["--task_name", "cola", "--per_device_train_batch_size", "4", "--max_train_steps", "2"]
    results, _ = run(checkpoint, tmp_path, *options, *files)
    assert results["validation"].keys() == {"loss", "matthews_correlation"}
    assert len((tmp_path / "output" / "CoLA.tsv").read_text().splitlines()) == 6
    same, _ = run(checkpoint, tmp_path / "folder", *options, "--data_dir", str(glue))
    assert same["validation"] == results["validation"]


def test_all_tasks_and_their_average(checkpoint, glue, tmp_path, capsys):  # noqa: F811
    options = ["--task_name", "all", "--data_dir", str(glue), "--start_from_mnli", "--eval_strategy", "no"]
    small = ["--per_device_train_batch_size", "4", "--max_train_steps", "1", "--max_length", "16"]
    results, written = run(checkpoint, tmp_path, *options, *small)
    assert written["results"] == results and set(results["scores"]) == set(GLUE_TASKS) == set(FOLDERS)
    scores = results["scores"]
    stsb = results["tasks"]["stsb"]["validation"]
    assert scores["stsb"] == (stsb["pearson"] + stsb["spearmanr"]) / 2
    mnli = results["tasks"]["mnli"]["validation"]
    assert scores["mnli"] == (mnli["validation_matched/accuracy"] + mnli["validation_mismatched/accuracy"]) / 2
    assert results["average"] == pytest.approx(sum(scores.values()) / 9)
    others = [score for name, score in scores.items() if name != "wnli"]
    assert results["average_without_wnli"] == pytest.approx(sum(others) / 8)
    assert f"average {100 * results['average']:.1f}" in capsys.readouterr().out
    # All files of a submission; the model of MNLI predicts the diagnostic set.
    names = {file for task in GLUE_TASKS.values() for file in task.prediction_files.values()}
    submission = {path.name: path.read_text().splitlines() for path in (tmp_path / "output" / "submission").iterdir()}
    assert submission.keys() == names and {len(lines) for lines in submission.values()} == {6}
    assert {line.split("\t")[1] for line in submission["AX.tsv"][1:]} <= set(GLUE_TASKS["mnli"].label_names)
    begun = {
        task: json.loads((tmp_path / "output" / task / "all_results.json").read_text())["arguments"][
            "model_name_or_path"
        ]
        for task in GLUE_TASKS
    }
    assert {task for task, model in begun.items() if model.endswith("output/mnli")} == {"rte", "mrpc", "stsb"}
    # Again: nothing is repeated.
    before = (tmp_path / "output" / "qnli" / "model.safetensors").stat().st_mtime_ns
    again, _ = run(checkpoint, tmp_path, *options, *small)
    assert again == results
    assert (tmp_path / "output" / "qnli" / "model.safetensors").stat().st_mtime_ns == before


def test_a_finished_model_is_scored_and_predicts_without_training(mrpc, checkpoint, pairs, write_rows, tmp_path):
    folder, results, _, options = mrpc
    files = options[options.index("--validation_file") :]
    before = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    scored, written = run(
        str(folder), tmp_path, "--task_name", "mrpc", *files, "--no_do_train", "--max_predict_samples", "9"
    )
    assert scored == written["results"] == {"validation": pytest.approx(results["validation"], rel=1e-5)}
    lines = (tmp_path / "output" / "MRPC.tsv").read_text().splitlines()
    assert lines == (folder / "MRPC.tsv").read_text().splitlines()[:10]
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == ["MRPC.tsv", "all_results.json"]
    assert before == {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    # Classes in another order than the task's.
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        for parameter in model.classifier.out_proj.parameters():
            parameter.copy_(parameter.flip(0))
    model.config.id2label = {0: "equivalent", 1: "not_equivalent"}
    model.config.label2id = {"equivalent": 0, "not_equivalent": 1}
    model.save_pretrained(tmp_path / "turned")
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path / "turned")
    turned, _ = run(str(tmp_path / "turned"), tmp_path / "again", "--task_name", "mrpc", *files, "--no_do_train")
    assert turned["validation"] == pytest.approx(results["validation"], rel=1e-5)
    # Trained on, by a step that changes next to nothing, it keeps its order.
    step = "--max_train_steps 1 --learning_rate 1e-9 --warmup_ratio 0 --config_overrides".split()
    step.append("hidden_dropout_prob=0,attention_probs_dropout_prob=0")
    further, _ = run(str(tmp_path / "turned"), tmp_path / "further", *options, *step)
    assert further["validation"] == pytest.approx(results["validation"], rel=1e-3)
    output = tmp_path / "further" / "output"
    assert (output / "MRPC.tsv").read_text() == (folder / "MRPC.tsv").read_text()
    assert AutoConfig.from_pretrained(output).id2label == model.config.id2label
    # So it does on labels by name, which are sorted for a new model.
    named = [row | {"label": ("not_equivalent", "equivalent")[row["label"]]} for row in pairs(70)]
    named = [text for split in ("train", "validation") for text in (f"--{split}_file", write_rows(named))]
    further, _ = run(str(folder), tmp_path / "named", *named, "--text_column_names", "sentence1", "sentence2", *step)
    assert further["validation"]["accuracy"] == 1.0
    assert further["validation"]["loss"] == pytest.approx(results["validation"]["loss"], rel=1e-3)
    # A model that was not fine-tuned would predict at random.
    with pytest.raises(ValueError, match=r"--no_do_train needs a model that was fine-tuned.*classifier"):
        run(checkpoint, tmp_path, "--task_name", "mrpc", *files, "--no_do_train")


@pytest.mark.parametrize(
    ("names", "values"),
    [
        (["1", "2", "none"], {"1": 1, "2": 2}),
        (["False", "Perhaps", "True"], {"False": False, "True": True}),
    ],
    ids=["numbers", "true-and-false"],
)
def test_labels_of_another_type_are_sought_by_name(names, values, checkpoint, filler, write_rows, tmp_path):
    """A file with only some of the classes holds numbers, or true and false, where the training file has text."""
    rows = [{"text": filler(5, i), "label": names[i % 3]} for i in range(30)]
    some = [row for row in rows if row["label"] in values]
    files = ["--train_file", write_rows(rows), "--validation_file", write_rows(some)]
    trained, _ = run(checkpoint, tmp_path, *files, "--max_train_steps", "2")
    other = write_rows([row | {"label": values[row["label"]]} for row in some])
    model = str(tmp_path / "output")
    scored, _ = run(model, tmp_path / "again", "--no_do_train", "--validation_file", other)
    assert scored["validation"] == pytest.approx(trained["validation"], rel=1e-5)


def test_numbers_for_named_classes_are_said(checkpoint, filler, write_rows, tmp_path, capsys):
    """A file that counts its classes from 1 would be scored as another one."""
    rows = [{"text": filler(5, i), "label": ("bad", "good")[i % 2]} for i in range(20)]
    files = ["--train_file", write_rows(rows), "--validation_file", write_rows(rows)]
    trained, _ = run(checkpoint, tmp_path, *files, "--max_train_steps", "1")
    model, note = str(tmp_path / "output"), "The validation set: labels that are numbers count"
    assert note not in capsys.readouterr().out
    for name, labels in (("names", ("bad", "good")), ("numbers", (0, 1))):
        other = write_rows([row | {"label": labels[i % 2]} for i, row in enumerate(rows)])
        scored, _ = run(model, tmp_path / name, "--no_do_train", "--validation_file", other)
        assert scored["validation"] == pytest.approx(trained["validation"], rel=1e-5)
        said = capsys.readouterr().out
        assert (f"{note} the model's classes from 0: 0 is 'bad', 1 is 'good'." in said) == (name == "numbers")


def test_any_number_of_labels_a_row(checkpoint, filler, write_rows, tmp_path):
    words = ("good", "bad", "year")
    rows = []
    for i in range(160):
        chosen = [word for bit, word in enumerate(words) if i >> bit & 1]
        rows.append({"text": f"{filler(3, i)} {' '.join(chosen)}", "label": chosen})
    file = write_rows(rows)
    files = ["--train_file", file, "--validation_file", file, "--test_file", file, "--max_train_steps", "150"]
    results, _ = run(checkpoint, tmp_path, *files, "--multi_label", "--eval_strategy", "no")
    assert results["validation"]["micro_f1"] > 0.95 and results["validation"]["exact_match"] > 0.9
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "output")
    assert model.config.problem_type == "multi_label_classification" and model.config.label2id["year"] == 2
    lines = (tmp_path / "output" / "test_predictions.tsv").read_text().splitlines()[1:]
    right = [
        line == f"{i}\t{','.join(sorted(row['label']))}" for i, (line, row) in enumerate(zip(lines, rows, strict=True))
    ]
    assert sum(right) / len(right) == results["test"]["exact_match"]
    finished = str(tmp_path / "output")
    scored = ["--validation_file", file, "--multi_label", "--no_do_train"]
    again, _ = run(finished, tmp_path / "again", *scored)
    assert again["validation"] == pytest.approx(results["validation"], rel=1e-5)
    hidden = write_rows([row | {"label": []} for row in rows[:9]])
    blind, _ = run(finished, tmp_path / "blind", "--test_file", hidden, "--multi_label", "--no_do_train")
    assert "test" not in blind
    predicted = (tmp_path / "blind" / "output" / "test_predictions.tsv").read_text().splitlines()
    assert predicted[1:] == lines[:9]
    with pytest.raises(ValueError, match=r"The class 'bad' contains 'a', .* give another --label_delimiter"):
        run(finished, tmp_path / "again", *scored, "--test_file", file, "--label_delimiter", "a")


def test_results_never_describe_another_model(mrpc, checkpoint, tmp_path, monkeypatch):
    """A run that replaces a finished one and does not live to its own results leaves none; and says what is left."""
    shutil.copytree(mrpc[0], tmp_path / "output")
    summary = write_results(tmp_path, {"grid": [{"runs": ["output"]}]})
    options = [*mrpc[3], "--max_train_steps", "2", "--checkpointing_steps", "1"]
    monkeypatch.setattr(finetuning, "final_scores", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(checkpoint, tmp_path, *options)
    weights = (tmp_path / "output" / "model.safetensors").read_bytes()
    assert weights != (mrpc[0] / "model.safetensors").read_bytes()
    assert not (tmp_path / "output" / "all_results.json").exists() and not summary.exists()

    def full(accelerator, model, tokenizer, folder, save=finetuning.save_pretrained):
        if folder.name == "output":
            raise OSError("No space left on device")
        save(accelerator, model, tokenizer, folder)

    monkeypatch.setattr(finetuning, "save_pretrained", full)
    with pytest.raises(OSError, match=r"output failed: No space.*checkpoint-2 is complete, and --resume"):
        run(checkpoint, tmp_path, *options, "--overwrite_output_dir")
    with pytest.raises(OSError, match="nothing of the training is left"):
        run(checkpoint, tmp_path, *mrpc[3], "--max_train_steps", "2", "--overwrite_output_dir")


@pytest.mark.parametrize("early", [True, False], ids=["early", "to the end"])
def test_the_best_model_is_left(early, checkpoint, pairs, write_rows, tmp_path, capsys):
    held = [row | {"label": 1 - row["label"]} if number % 4 == 0 else row for number, row in enumerate(pairs(64))]
    rows = write_rows(held)  # a model that is sure of what it learned becomes worse on them
    options = ["--task_name", "mrpc", "--train_file", write_rows(pairs(64)), "--validation_file", rows]
    options += ["--eval_strategy", "steps", "--eval_steps", "4", "--metric_for_best_model", "loss"]
    options += ["--learning_rate", "2e-2", "--load_best_model_at_end"]
    options += ["--max_train_steps", "200", "--early_stopping_patience", "3"] if early else ["--max_train_steps", "22"]
    results, _ = run(checkpoint, tmp_path, *options, "--language", "en", "--license", "apache-2.0")
    history = [json.loads(line) for line in (tmp_path / "output" / "history.jsonl").read_text().splitlines()]
    evaluations = [(row["step"], row["eval_loss"]) for row in history if "eval_loss" in row]
    held_out, last = dict(evaluations), results["train"]["steps"]
    best = min(held_out, key=held_out.get)
    assert results["train"]["best_step"] == best < last and (last < 200 if early else last == 22)
    # One evaluation of each step, that of its own model.
    assert list(held_out) == [step for step, _ in evaluations] == [*range(4, last, 4), last]
    assert held_out[last] > held_out[best] * 1.001
    assert results["validation"]["loss"] == pytest.approx(held_out[best], rel=1e-4)
    printed = capsys.readouterr().out
    assert f"The model of step {best} is the best one, by loss" in printed
    assert "on 1 process (cpu): " in printed
    scored, _ = run(
        f"{tmp_path}/output", tmp_path / "again", "--task_name", "mrpc", "--validation_file", rows, "--no_do_train"
    )
    assert scored["validation"]["loss"] == pytest.approx(held_out[best], rel=1e-4)
    card = (tmp_path / "output" / "README.md").read_text()
    assert "language: en" in card and "license: apache-2.0" in card


@pytest.fixture
def remote_model(checkpoint, tmp_path):
    """A model whose code is in the folder of its weights."""
    folder = tmp_path / "remote"
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes)
    BertForSequenceClassification(config).save_pretrained(folder)
    (folder / "toy_code.py").write_text(
        "from transformers import BertConfig, BertForSequenceClassification\n\n\n"
        'class ToyConfig(BertConfig):\n    model_type = "toy"\n\n\n'
        "class ToyForSequenceClassification(BertForSequenceClassification):\n    config_class = ToyConfig\n"
    )
    written = json.loads((folder / "config.json").read_text())
    written["model_type"], classes = "toy", ("Config", "ForSequenceClassification")
    written["auto_map"] = {
        f"Auto{'Model' if name != 'Config' else ''}{name}": f"toy_code.Toy{name}" for name in classes
    }
    (folder / "config.json").write_text(json.dumps(written))
    return str(folder)


def test_a_model_with_code_of_its_own(remote_model, pairs, write_rows, tmp_path):
    """The code runs only if it is allowed; such a model gets no model card of this package."""
    files = ["--train_file", write_rows(pairs(32)), "--validation_file", write_rows(pairs(16))]
    options = ["--task_name", "mrpc", *files, "--max_train_steps", "2"]
    with pytest.raises(ValueError, match="trust_remote_code"):
        run(remote_model, tmp_path, *options)
    results, written = run(remote_model, tmp_path, *options, "--trust_remote_code")
    assert results["train"]["steps"] == 2 and written["results"] == results
    assert (tmp_path / "output" / "toy_code.py").is_file() and not (tmp_path / "output" / "README.md").exists()
    scored, _ = run(f"{tmp_path}/output", tmp_path / "again", *options, "--trust_remote_code", "--no_do_train")
    assert scored["validation"]["loss"] == pytest.approx(results["validation"]["loss"], rel=1e-5)


@pytest.mark.parametrize("overwrite", [False, True])
def test_prepared_data_are_used_again_unless_told_otherwise(
    overwrite, checkpoint, pairs, write_rows, tmp_path, monkeypatch
):
    used, prepare = [], Dataset.map

    def spy(dataset, *arguments, **options):
        used.append(options.get("load_from_cache_file"))
        return prepare(dataset, *arguments, **options)

    monkeypatch.setattr(Dataset, "map", spy)
    files = ["--train_file", write_rows(pairs(32)), "--validation_file", write_rows(pairs(16))]
    options = ["--task_name", "mrpc", *files, "--max_train_steps", "1", *["--overwrite_cache"] * overwrite]
    run(checkpoint, tmp_path, *options)
    assert used == [not overwrite] * 2
