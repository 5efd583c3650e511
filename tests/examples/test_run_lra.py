# SPDX-License-Identifier: Apache-2.0
"""The tasks of the Long Range Arena end to end, in small."""

import json
import re
import shutil
from pathlib import Path

import lra_report
import numpy as np
import pytest
import run_lra
import torch
from datasets import ClassLabel, Dataset, Features, Image, concatenate_datasets
from transformers import AutoModelForMaskedLM, AutoModelForSequenceClassification, pipeline

import nystrom_models  # noqa: F401 - registers the families
from nystrom_models.data.lra import ARENA_TASKS, aan, cifar
from nystrom_models.data.lra.pictures import to_text
from nystrom_models.training import long_range_arena
from tests.training.processes import finish, start


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


def run(folder, cache, *options, steps=2):
    shared = ["--output_dir", str(folder), "--cache_dir", cache, "--max_train_steps", str(steps)]
    return run_lra.main([*shared, "--per_device_train_batch_size", "8", *options])


LISTOPS = "--task listops --max_length 48 --generated_rows 120 40 40".split()


@pytest.mark.parametrize(
    "attention",
    # The other tests here have a run of each of these.
    ["nystrom", *(pytest.param(name, marks=pytest.mark.slow) for name in ("softmax", "linformer", "linear"))],
)
def test_listops(attention, cache, tmp_path):
    options = ["--attention", attention]
    if attention == "nystrom":
        options += ["--config_overrides", "num_landmarks=8", "--grid", "seed=0,1"]
    results = run(tmp_path, cache, *LISTOPS, *options)
    folder = tmp_path
    if attention == "nystrom":
        folder = tmp_path / results["best_run"]
        # Each seed draws weights of its own.
        first, second = (
            AutoModelForSequenceClassification.from_pretrained(tmp_path / f"seed={seed}") for seed in (0, 1)
        )
        weights = [model.nystromformer.embeddings.word_embeddings.weight for model in (first, second)]
        assert (weights[0] - weights[1]).abs().max() > 0.05
        results = json.loads(Path(folder, "all_results.json").read_text())["results"]
    assert results["test"].keys() == {"loss", "accuracy", "macro_f1"}
    classify = pipeline("text-classification", model=str(folder))
    config = classify.model.config
    assert classify("[MAX 2 9 [MIN 4 7 ] 0 ]")[0]["label"] in "0123456789"
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (2, 64, 128)
    assert (config.layer_norm_position, config.classifier_pooling) == ("pre", "mean")
    assert config.vocab_size == 18 and config.max_position_embeddings == 48
    expected = {"softmax": None, "nystrom": 8}.get(attention, "absent")
    assert getattr(config, "num_landmarks", "absent") == expected
    card = (folder / "README.md").read_text()
    assert "ListOps" in card and "[MAX 2 9 [MIN 4 7 ] 0 ]" in card


def test_masked_pretraining_on_the_task_comes_first_and_only_once(cache, tmp_path, capsys, monkeypatch):
    options = [*LISTOPS, "--attention", "linear", "--pretrain_on_task", "--pretrain_steps", "3"]
    run(tmp_path, cache, *options)
    folder = tmp_path / "pretraining"
    written = json.loads((folder / "all_results.json").read_text())
    assert written["results"]["train"]["steps"] == 3 and "mlm_accuracy" in written["results"]["validation"]
    assert AutoModelForMaskedLM.from_pretrained(folder).config.max_position_embeddings == 48
    # The first step of the training on labels begins with what pretraining left.
    assert "model" in json.loads((tmp_path / "all_results.json").read_text())["identity"]
    card = (tmp_path / "README.md").read_text()
    assert "fine-tuned from `pretraining`" in card

    def refuse(*_):
        raise AssertionError("pretrained again")

    with monkeypatch.context() as patches:
        patches.setattr(long_range_arena, "pretrain", refuse)
        run(tmp_path, cache, *options)
        with pytest.raises(AssertionError, match="pretrained again"):
            run(tmp_path, cache, *options, "--pretrain_mlm_probability", "0.3")
        with pytest.raises(AssertionError, match="pretrained again"):
            run(tmp_path, cache, *options, "--attention", "softmax")
        with monkeypatch.context() as others:
            others.setattr(long_range_arena, "launched_processes", lambda: (2, "WORLD_SIZE"))
            with pytest.raises(AssertionError, match="pretrained again"):
                run(tmp_path, cache, *options)
        run(tmp_path, cache, *options)  # nothing was replaced
        # As after a signal.
        patches.setattr(long_range_arena, "pretrain", lambda *_: {"train": {"steps": 1}})
        stopped = run(tmp_path / "stopped", cache, *options)
        assert stopped == {"train": {"steps": 1}} and not (tmp_path / "stopped" / "pretraining").exists()
    capsys.readouterr()
    lra_report.main(["--runs", *map(str, sorted(tmp_path.iterdir())), str(tmp_path)])
    printed, left_out = capsys.readouterr()
    assert f"Left out: {folder} is a pretraining" in left_out
    accuracy = json.loads((tmp_path / "all_results.json").read_text())["results"]["test"]["accuracy"]
    assert f"| ours: linear, pretrained on the task | {100 * accuracy:.2f} |  |  |  |  |  |" in printed
    assert (
        "| linear, pretrained on the task | listops | 1 | 2 | 8 | adamw | 0.0001 | 0.1 | 48 | 3 at 0.001, 15% masked |"
        in printed
    )


def test_a_pretraining_that_was_killed_is_not_taken_for_another(cache, tmp_path):
    """Its weights are in place of those of the finished one."""
    options = [*LISTOPS, "--attention", "linear", "--pretrain_on_task", "--pretrain_steps", "2"]
    first = run(tmp_path, cache, *options)
    weights, marker = (tmp_path / "pretraining" / name for name in ("model.safetensors", "finished.json"))
    finished, content = weights.read_bytes(), marker.read_text()
    run(tmp_path, cache, *options, "--pretrain_learning_rate", "0.3")
    assert weights.read_bytes() != finished
    marker.write_text(content)
    assert run(tmp_path, cache, *options)["validation"] == first["validation"]
    assert weights.read_bytes() == finished


def test_a_run_does_not_go_on_from_another_pretraining(cache, tmp_path):
    options = [*LISTOPS, "--attention", "linear", "--pretrain_on_task", "--checkpointing_steps", "2"]
    run(tmp_path, cache, *options, "--pretrain_steps", "2")
    finished = (tmp_path / "pretraining" / "model.safetensors").read_bytes()
    options += ["--resume_from_checkpoint", "latest"]
    with pytest.raises(ValueError, match="--pretrain_steps was 2 and is 4"):
        run(tmp_path, cache, *options, "--pretrain_steps", "4", steps=3)
    assert (tmp_path / "pretraining" / "model.safetensors").read_bytes() == finished
    with pytest.raises(ValueError, match="--seed was 0 and is 1"):
        run(tmp_path, cache, *options, "--pretrain_steps", "2", "--seed", "1", steps=3)
    assert (tmp_path / "pretraining" / "model.safetensors").read_bytes() == finished
    divided = ["--pretrain_steps", "2", "--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "4"]
    run(tmp_path, cache, *options, *divided, steps=3)
    assert (tmp_path / "pretraining" / "model.safetensors").read_bytes() == finished
    (tmp_path / "checkpoint-2").rename(tmp_path / "moved")  # the run on labels has not begun
    with pytest.raises(ValueError, match="has taken 2 steps, more than --pretrain_steps 1: give at least"):
        run(tmp_path, cache, *options, "--pretrain_steps", "1", steps=3)


def test_a_grid_after_a_pretraining_goes_on(cache, tmp_path):
    options = [*LISTOPS, "--attention", "linear", "--pretrain_on_task", "--pretrain_steps", "2", "--grid", "seed=0,1"]
    options += ["--checkpointing_steps", "2"]
    run(tmp_path, cache, *options)
    options += ["--resume_from_checkpoint", "latest"]
    with pytest.raises(ValueError, match="--pretrain_steps was 2 and is 4"):
        run(tmp_path, cache, *options, "--pretrain_steps", "4", steps=3)
    assert run(tmp_path, cache, *options, "--keep_best_only", steps=3)["best"]["seeds"] == [0, 1]


def test_another_start_is_told_on_resuming(cache, tmp_path):
    """The weights are those of the checkpoint."""
    for seed in ("0", "1"):
        run(tmp_path / seed, cache, *LISTOPS, "--attention", "linear", "--seed", seed, steps=1)
    options = [*LISTOPS, "--checkpointing_steps", "1", "--model_name_or_path"]
    run(tmp_path / "run", cache, *options, str(tmp_path / "0"), steps=1)
    options += [str(tmp_path / "1"), "--resume_from_checkpoint", "latest"]
    with pytest.warns(UserWarning, match="settings have changed: the model that it began with was"):
        run(tmp_path / "run", cache, *options, steps=2)


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        ("text", ConnectionError("No Hub"), r"No Hub\. With --train_file and --test_file, files are read"),
        ("image", ConnectionError("No Hub"), r"No Hub\. With --data_dir, files are read"),
        ("text", ConnectionResetError("gone"), "^gone$"),
        ("listops", ConnectionError("gone"), "^gone$"),
    ],
)
def test_without_the_hub_files_can_be_given(task, error, message):
    with pytest.raises(ConnectionError, match=message), long_range_arena._naming_the_flag(task):
        raise error


def test_the_model_is_compiled(cache, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch, "compile", lambda model, **options: calls.append(options) or model)
    run(tmp_path, cache, *LISTOPS, "--attention", "linear", "--torch_compile", "--torch_compile_backend", "eager")
    assert [(options["backend"], options["dynamic"]) for options in calls] == [("eager", True)]


def test_a_run_goes_on(cache, tmp_path):
    options = [*LISTOPS, "--attention", "softmax", "--checkpointing_steps", "2"]
    whole = run(tmp_path / "whole", cache, *options, steps=4)
    resume = ["--resume_from_checkpoint", str(tmp_path / "whole" / "checkpoint-2")]
    again = run(tmp_path / "again", cache, *options, *resume, steps=4)
    assert again["test"] == whole["test"]
    with pytest.raises(ValueError, match="num_attention_heads was 2 and is 4"):
        run(tmp_path / "other", cache, *options, *resume, "--config_overrides", "num_attention_heads=4", steps=4)
    with pytest.raises(ValueError, match="the training data was"):
        run(tmp_path / "other", cache, *options, *resume, "--data_seed", "1", steps=4)


@pytest.mark.slow
def test_two_processes_share_the_work(cache, tmp_path):
    """The same data, steps and scores as in one process."""
    options = [*LISTOPS, "--attention", "linear", "--pretrain_on_task", "--pretrain_steps", "2"]
    options += ["--config_overrides", "hidden_dropout_prob=0.0", "--cache_dir", cache, "--max_train_steps", "3"]
    alone, together = ["--per_device_train_batch_size", "8"], ["--per_device_train_batch_size", "4"]
    whole = run_lra.main([*options, *alone, "--output_dir", str(tmp_path / "one")])
    processes, logs = start(
        run_lra.main, ([*options, *together, "--output_dir", str(tmp_path / "two")],), tmp_path, num_processes=2
    )
    assert finish(processes) == [0, 0], logs[0].read_text()
    results = json.loads((tmp_path / "two" / "all_results.json").read_text())["results"]
    assert results["test"] == pytest.approx(whole["test"], rel=1e-4)
    assert results["train"]["steps"] == 3


@pytest.fixture
def reviews(tmp_path, monkeypatch):
    monkeypatch.setattr(long_range_arena, "IMDB_ROWS", 40)
    monkeypatch.setattr(long_range_arena, "IMDB_VALIDATION_ROWS", 8)
    path = tmp_path / "reviews.jsonl"
    rows = [{"text": f"Caf\u00e9 number {i} was {'good' if i % 2 else 'bad'}.", "label": i % 2} for i in range(40)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_text_is_read_as_bytes(reviews, cache, tmp_path):
    files = ["--train_file", reviews, "--test_file", reviews]
    options = ["--task", "text", "--attention", "nystrom", "--max_length", "24"]
    results = run(tmp_path / "output", cache, *options, *files)
    assert results["test"].keys() == {"loss", "accuracy", "macro_f1"}
    classify = pipeline("text-classification", model=str(tmp_path / "output"))
    assert len(classify.tokenizer("a [PAD]")["input_ids"]) == 7  # the bytes of a text, not a special token
    ids = classify.tokenizer("Caf\u00e9")["input_ids"]
    assert len(ids) == 5 and classify.tokenizer.decode(ids) == "Caf\u00e9" and classify.model.config.vocab_size == 259
    assert classify("x" * 10)[0]["label"] in ("neg", "pos")
    unlabelled = tmp_path / "unlabelled.jsonl"
    unlabelled.write_text('{"text": "Caf\\u00e9"}\n')
    with pytest.raises(ValueError, match=r"The test set of IMDB has no column 'label'; its columns are \['text'\]"):
        run(tmp_path / "other", cache, *options, *files[:2], "--test_file", str(unlabelled))
    with pytest.raises(
        ValueError, match=r"The train set of IMDB has 30 rows, as many of each class, but these are 40"
    ):
        long_range_arena.IMDB_ROWS = 30  # restored by the fixture
        run(tmp_path / "other", cache, *options, *files)


@pytest.fixture
def papers(tmp_path, monkeypatch):
    monkeypatch.setattr(aan, "COUNTS", dict.fromkeys(aan.COUNTS, 24))
    folder = tmp_path / "tsv_data"
    folder.mkdir()
    for name in aan.FILES.values():
        lines = [f"{i % 2}.0\t{i}\t{i + 1}\tb'a \"quoted {i}'\t{'long ' * 9}{i}" for i in range(24)]
        (folder / name).write_text("\n".join(lines) + "\n")
    return folder


def test_papers_are_read_apart(papers, cache, tmp_path):
    options = ["--task", "retrieval", "--attention", "linformer", "--max_length", "32", "--data_dir", str(papers)]
    results = run(tmp_path / "output", cache, *options, "--pretrain_on_task", "--pretrain_steps", "1")
    assert results["test"].keys() == {"loss", "accuracy", "macro_f1"}
    card = (tmp_path / "output" / "README.md").read_text()
    snippet = re.findall(r"^```python\nimport nystrom_models\n\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)[0]
    exec(snippet.replace('"output"', repr(str(tmp_path / "output"))), {})
    row = b"1\ta\tb\ttext\ttext\r\n"
    for broken, message in ((b"1\ttext\n", "line 2: expected a label of 0 or 1"), (b"\xff", "line 2: not UTF-8")):
        (papers / "new_aan_pairs.eval.tsv").write_bytes(row + broken)
        with pytest.raises(ValueError, match=rf"new_aan_pairs\.eval\.tsv, {message}"):
            run(tmp_path / "broken", cache, *options)
    (papers / "new_aan_pairs.eval.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"must hold new_aan_pairs.eval.tsv: lra_release.gz"):
        run(tmp_path / "missing", cache, *options)


def test_pictures_are_read_pixel_by_pixel(cache, tmp_path, monkeypatch):
    monkeypatch.setattr(cifar, "COUNTS", {"train": 50, "test": 10})
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    random = np.random.default_rng(0)
    colours = random.integers(256, size=(10, 3072), dtype=np.uint8)
    content = np.concatenate([np.arange(10, dtype=np.uint8)[:, None], colours], axis=1)
    for name in (name for names in cifar.FILES.values() for name in names):
        content.tofile(folder / name)
    splits = cifar.load_cifar(tmp_path, cache)
    assert [len(rows) for rows in splits.values()] == [45, 5, 10]
    red, green, blue = colours[3].reshape(3, 1024).astype(int)
    expected = np.rint(0.299 * red + 0.587 * green + 0.114 * blue).astype(np.uint8)
    assert splits["test"][3] == {"text": to_text(expected), "label": 3}
    options = ["--attention", "linformer", "--max_eval_samples", "2", "--max_predict_samples", "2"]
    options += ["--config_overrides", "num_hidden_layers=1", "--per_device_train_batch_size", "2"]
    results = run(tmp_path / "image", cache, "--task", "image", *options, "--data_dir", str(tmp_path), steps=1)
    assert "accuracy" in results["test"]
    # The same pictures as the Hub gives them.
    features = Features({"img": Image(), "label": ClassLabel(names=list(cifar.CLASSES))})
    pictures = colours.reshape(10, 3, 32, 32).transpose(0, 2, 3, 1)
    rows = Dataset.from_dict({"img": list(pictures), "label": list(range(10))}, features=features)
    monkeypatch.setattr(
        cifar, "load_dataset", lambda *_, **__: {"train": concatenate_datasets([rows] * 5), "test": rows}
    )
    assert cifar.load_cifar()["test"][:] == splits["test"][:]
    (folder / "test_batch.bin").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"lacks test_batch.bin\. https://www.cs.toronto.edu.*SHA-256 c4a38c50"
    ):
        cifar.load_cifar(tmp_path, cache)
    results = run(
        tmp_path / "pathfinder", cache, "--task", "pathfinder", *options, "--generated_rows", "4", "2", "2", steps=1
    )
    assert "accuracy" in results["test"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "listops"], "needs --attention: one of softmax"),
        (["--task", "text", "--attention", "linear", "--generated_rows", "1", "1", "1"], "for listops and pathfinder"),
        (["--task", "listops", "--attention", "linear", "--generated_rows", "1", "1"], "three numbers"),
        (["--task", "image", "--attention", "linear", "--max_length", "9"], "1024 pixels"),
        (["--task", "listops", "--attention", "linear", "--train_file", "x.csv"], "sets the data"),
        (["--task", "text", "--attention", "linear", "--validation_split", "test"], "leave out --validation_split"),
        (["--task", "listops", "--attention", "linear", "--data_dir", "x"], "files of image or retrieval"),
        (["--task", "listops", "--attention", "linear", "--grid", "task=text"], "--task applies to the whole run"),
        (["--task", "listops", "--model_name_or_path", "x", "--pretrain_on_task"], "starts from a new model"),
        (["--task", "listops", "--model_name_or_path", "x", "--attention", "linear"], "--attention is that of a new"),
        (["--task", "listops", "--config_name", "x"], "leave out --config_name"),
        (
            ["--task", "listops", "--attention", "linear", "--config_name", "other/configuration"],
            "leave out --config_name",
        ),
        (
            ["--task", "listops", "--model_name_or_path", "other/pretraining", "--pretrain_on_task"],
            "starts from a new model",
        ),
    ],
)
def test_flags_that_contradict_each_other(options, message, cache, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(tmp_path, cache, *options)


def test_the_published_table(capsys, tmp_path):
    lra_report.main([])
    printed = capsys.readouterr().out
    # The averages that the papers print.
    for name, average in (("softmax (Xiong", 58.77), ("Linformer (Xiong", 55.59), ("Nystr\u00f6m (Xiong", 58.95)):
        line = next(line for line in printed.splitlines() if name in line)
        assert float(line.split("|")[-2]) == pytest.approx(average, abs=0.011)
    page = (Path(__file__).parents[2] / "docs" / "long-range-arena.md").read_text(encoding="utf-8")
    assert printed.strip() in page
    with pytest.raises(FileNotFoundError, match="none of these has one"):
        lra_report.main(["--runs", str(tmp_path)])


def test_shorter_expressions_first(cache, tmp_path, capsys):
    """A model goes on with longer expressions, and the report counts all its training."""
    first, last = tmp_path / "48", tmp_path / "96"
    overrides = "num_landmarks=4,max_position_embeddings=96,hidden_dropout_prob=0"
    begun = run(first, cache, *LISTOPS, "--attention", "nystrom", "--config_overrides", overrides)
    options = ["--model_name_or_path", str(first), "--max_length", "96", "--config_overrides", "num_landmarks=8"]
    ended = run(last, cache, *LISTOPS, *options, steps=3)
    config = AutoModelForSequenceClassification.from_pretrained(last).config
    assert (config.num_landmarks, config.max_position_embeddings, config.hidden_dropout_prob) == (8, 96, 0)
    assert "model" in json.loads((last / "all_results.json").read_text())["identity"]
    capsys.readouterr()
    lra_report.main(["--runs", str(last)])
    printed = capsys.readouterr().out
    assert f"| ours: Nystr\u00f6m-8, in stages | {100 * ended['test']['accuracy']:.2f} |" in printed
    assert "| 3 | 8 | adamw | 0.0001 | 0 | 96 | 2 of length 48 |" in printed
    [[figures]] = lra_report.collect([str(last)]).values()
    tokens = [part["train"]["num_input_tokens_seen"] for part in (begun, ended)]
    assert figures["tokens"] == sum(tokens) > max(tokens)
    # The seeds of all stages count.
    other = tmp_path / "other"
    run(tmp_path / "48-1", cache, *LISTOPS, "--attention", "nystrom", "--config_overrides", overrides, "--seed", "1")
    run(other, cache, *LISTOPS, *options[2:], "--model_name_or_path", str(tmp_path / "48-1"), steps=3)
    [group] = lra_report.by_recipe(next(iter(lra_report.collect([str(last), str(other)]).values())))
    assert [figures["seed"] for figures in group] == [[0, 0], [1, 0]]
    # Another run in the folder of the first stage is not what the model began with.
    shutil.copytree(first, tmp_path / "kept")
    run(first, cache, *LISTOPS, "--attention", "nystrom", "--config_overrides", overrides, "--seed", "2", steps=4)
    assert list(lra_report.collect([str(last)])) == [(f"Nystr\u00f6m-8, from {first}", "listops")]
    shutil.rmtree(first)
    (tmp_path / "kept").rename(first)
    # What a model was before is said where it is not known as a run of this task.
    moved = first.rename(tmp_path / "moved")
    lra_report.main(["--runs", str(last), str(moved)])
    printed = capsys.readouterr().out
    assert f"| ours: Nystr\u00f6m-8, from {first} |" in printed and "| ours: Nystr\u00f6m-4 |" in printed
    # Written over by itself: the report ends.
    written = json.loads((last / "all_results.json").read_text())
    written["arguments"]["model_name_or_path"] = str(last)
    (last / "all_results.json").write_text(json.dumps(written))
    assert list(lra_report.collect([str(last)])) == [(f"Nystr\u00f6m-8, from {last}", "listops")]


@pytest.mark.parametrize(
    ("attention", "row", "other"),
    [
        ("softmax", "softmax", 35),
        ("nystrom", "Nystr\u00f6m-64", None),
        ("linformer", "Linformer-256", 35),
        ("linear", "linear", 35),
    ],
)
def test_a_convolution_has_its_own_row(attention, row, other):
    """On ListOps, it gives more than the kind of attention does."""
    tokenizer = ARENA_TASKS["listops"].tokenizer(2000)
    config = long_range_arena.arena_config("listops", attention, tokenizer, 2000)
    assert lra_report.attention_of(config.to_dict()) == row
    config.conv_kernel_size = other
    assert lra_report.attention_of(config.to_dict()) == f"{row}, convolution {other or 'none'}"


def test_recipes_of_one_cell_are_not_mixed(capsys, tmp_path):
    """The recipe that is best on the validation set gives the cell, whatever its accuracy on the test set."""
    config = {"model_type": "nystromformer", "num_landmarks": 64, "conv_kernel_size": 35, "hidden_dropout_prob": 0.1}
    shared = {"task": "listops", "pretrain_on_task": False, "tokens_per_step": None, "max_length": 2000}
    shared |= {"model_name_or_path": None, "per_device_train_batch_size": 32, "gradient_accumulation_steps": 1}
    train = {"steps": 5000, "num_input_tokens_seen": 1_000_000, "seconds": 3600.0}
    folders = []

    def write(name, validation, test, fields=(), identity=(), **arguments):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | dict(fields)))
        results = {"train": train, "validation": {"accuracy": validation}, "test": {"accuracy": test}}
        arguments = {**shared, "learning_rate": 1e-3, "seed": 0, "max_predict_samples": None, **arguments}
        content = {"arguments": arguments, "results": results, "identity": dict(identity)}
        (folder / "all_results.json").write_text(json.dumps(content))
        folders.append(str(folder))

    for optimizer, seed, validation, test in (("adamw", 0, 0.3, 0.5), ("muon", 0, 0.4, 0.38), ("muon", 1, 0.42, 0.4)):
        write(f"{optimizer}-{seed}", validation, test, optim=optimizer, seed=seed)
    lra_report.main(["--runs", *folders])
    printed = capsys.readouterr().out
    assert "| ours: Nystr\u00f6m-64 | 39.00 \u00b1 1.41 |  |" in printed
    muon, adamw = printed.splitlines()[-2:]
    assert (
        "| 2 | 5,000 | 32 | muon | 0.001 | 0.1 | 2000 |  | 1.0 M | 1.00 | 41.00 \u00b1 1.41 | 39.00 \u00b1 1.41 |"
        in muon
    )
    assert "| 1 | 5,000 | 32 | adamw |" in adamw and adamw.endswith("| 30.00 | 50.00 |")
    # Nor are those that the columns do not tell apart; the same folder counts once.
    write("pooling", 0.2, 0.2, optim="muon", seed=2, fields={"classifier_pooling": "first"})
    write("part", 0.2, 0.9, optim="muon", seed=3, max_predict_samples=3)
    write("processes", 0.1, 0.1, optim="muon", seed=4, identity={"processes": 2})
    write("divided", 0.41, 0.39, optim="muon", seed=5, gradient_accumulation_steps=2, per_device_train_batch_size=16)
    unfinished, untrained = tmp_path / "unfinished", tmp_path / "untrained"
    unfinished.mkdir()
    untrained.mkdir()
    content = {"arguments": shared, "results": {"test": {"accuracy": 1.0}}}
    (untrained / "all_results.json").write_text(json.dumps(content))
    lra_report.main(["--runs", *folders, folders[1], str(unfinished), str(untrained)])
    printed, left_out = capsys.readouterr()
    assert "| ours: Nystr\u00f6m-64 | 39.00 \u00b1 1.00 |  |" in printed
    _, _, pooling, part, processes = printed.splitlines()[-5:]
    assert pooling.endswith("| 20.00 | 20.00 | classifier_pooling first, max_predict_samples None |")
    assert part.endswith("| 90.00 | classifier_pooling None, max_predict_samples 3 |")
    assert "| 1 | 5,000 | 64 | muon |" in processes
    assert "unfinished/all_results.json does not exist" in left_out and "untrained has no scores of a" in left_out
    write("copy", 0.4, 0.38, optim="muon")
    with pytest.raises(ValueError, match=r"muon-0 and .*copy have the same settings and seeds"):
        lra_report.main(["--runs", *folders])
