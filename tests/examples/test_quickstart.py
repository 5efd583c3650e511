# SPDX-License-Identifier: Apache-2.0
import json
import signal
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    HfArgumentParser,
    pipeline,
)

from nystrom_models import LinformerForMaskedLM, NystromformerForMaskedLM
from nystrom_models.data import load_docstrings, pretraining_dataset
from nystrom_models.training import OptimizationArguments
from nystrom_models.training.causal import CausalArguments, train_causal
from nystrom_models.training.curve import read_history
from nystrom_models.training.pretraining import pretrain
from nystrom_models.training.signals import Signals

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import quickstart

PACKAGES = ("accelerate", "datasets", "huggingface_hub")
TINY = (
    f"--packages {' '.join(PACKAGES)} --max_bytes_per_package 600000 --max_train_steps 60"
    " --finetune_steps 160 --learning_rate 8e-3 --tokens_per_step 500 --max_length 48 --vocab_size 1500"
    " --causal_steps 60 --causal_vocab_size 500"
    " --hidden_size 32 --num_hidden_layers 1 --num_landmarks 8 --num_classes 3 --preprocessing_num_workers 1"
).split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    verbosity = transformers.logging.get_verbosity()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        results = quickstart.main([*TINY, "--output_dir", "output"])
        assert [path.name for path in folder.iterdir()] == ["output"], "something was written beside --output_dir"
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()
    return folder / "output", results


def test_results(run):
    folder, results = run
    assert results.keys() == {"nystromformer", "linformer"}
    for result in results.values():
        assert 0.5 <= result["sop_baseline"] < 0.7
        assert result["tokens_per_second"] > 0
    summary = json.loads((folder / "all_results.json").read_text())
    assert summary["results"] == results
    assert sorted(summary["classes"]) == summary["classes"] == list(PACKAGES)


def test_the_causal_model_writes_and_its_figure_is_that_of_the_held_out_documents(run, documents, tmp_path):
    folder, _ = run
    causal = json.loads((folder / "all_results.json").read_text())["causal"]
    written = json.loads((folder / "causal" / "trained" / "all_results.json").read_text())["results"]["validation"]
    assert causal["bits_per_byte"] == written["bits_per_byte"] < 5 and causal["tokens_per_second"] > 0
    arguments = CausalArguments(
        model_name_or_path=str(folder / "causal" / "trained"),
        output_dir=str(tmp_path),
        block_size=96,
        train_file=["x"],
        do_train=False,
    )
    scores = train_causal(arguments, OptimizationArguments(), documents)["validation"]
    assert causal["bits_per_byte"] == pytest.approx(scores["bits_per_byte"], rel=1e-5)
    write = pipeline("text-generation", model=str(folder / "causal" / "trained"))
    [answer] = write("Return a list of", max_new_tokens=4)
    assert answer["generated_text"].startswith("Return a list of")


@pytest.fixture(scope="module")
def documents(run):
    return load_docstrings(600_000, seed=0, num_proc=1, cache_dir=run[0] / "cache", packages=list(PACKAGES))


@pytest.mark.parametrize("family", ["nystromformer", "linformer"])
def test_figures_are_those_of_the_saved_models_on_the_held_out_documents(family, run, documents, tmp_path):
    folder, results = run
    [arguments] = HfArgumentParser(quickstart.QuickstartArguments).parse_args_into_dataclasses(TINY)
    arguments = quickstart.pretraining_arguments(family, replace(arguments, output_dir=str(folder)))
    arguments = replace(
        arguments,
        model_name_or_path=arguments.output_dir,
        output_dir=str(tmp_path),
        config_name=None,
        do_train=False,
    )
    scores = pretrain(arguments, OptimizationArguments(), documents)["validation"]
    for name in ("mlm_accuracy", "sop_accuracy"):
        assert results[family][name] == pytest.approx(scores[name], abs=1e-6)

    held_out = documents["validation"]
    classify = pipeline("text-classification", model=str(folder / family / "classifier"), batch_size=16)
    answers = [answer["label"] for answer in classify(list(held_out["text"]), truncation=True, max_length=48)]
    right = sum(answer == package for answer, package in zip(answers, held_out["package"], strict=True))
    assert results[family]["package_accuracy"] == pytest.approx(right / len(held_out))
    counts = Counter(held_out["package"])
    assert results[family]["package_baseline"] == pytest.approx(max(counts.values()) / len(held_out))


@pytest.mark.parametrize("family", ["nystromformer", "linformer"])
def test_models_learn(family, run):
    """Losses fall, by 1.0 and 0.6 where this was written; other versions of the packages have other docstrings.
    After so few steps, scores on held-out documents are no better than a constant prediction."""
    for part, name, fall in (("pretrained", "mlm_loss", 0.6), ("classifier", "loss", 0.3)):
        history = read_history(run[0] / family / part)
        losses = [row[name] for row in history if name in row]
        assert len(losses) >= 3 and losses[-1] < losses[0] - fall, part


@pytest.mark.parametrize(
    ("family", "model_class"), [("nystromformer", NystromformerForMaskedLM), ("linformer", LinformerForMaskedLM)]
)
def test_checkpoints_are_loaded_by_the_auto_classes(run, family, model_class):
    folder = run[0] / family
    model, info = AutoModelForMaskedLM.from_pretrained(folder / "pretrained", output_loading_info=True)
    assert type(model) is model_class and not info["missing_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "pretrained")
    batch = tokenizer("Return the mean of the [MASK].", return_tensors="pt")
    with torch.no_grad():
        assert model(**batch, labels=batch["input_ids"]).logits.shape == (
            1,
            batch["input_ids"].shape[1],
            len(tokenizer),
        )
    classifier, info = AutoModelForSequenceClassification.from_pretrained(
        folder / "classifier", output_loading_info=True
    )
    assert not info["missing_keys"]
    classify = pipeline("text-classification", model=classifier, tokenizer=tokenizer)
    assert classify("Push the model to the hub.")[0]["label"] in ("accelerate", "datasets", "huggingface_hub")


def test_rows_are_longer_than_the_landmarks(run, documents):
    """Rows are longer than the landmarks, so that the approximation is trained and not exact attention."""
    defaults = quickstart.QuickstartArguments()
    tokenizer = AutoTokenizer.from_pretrained(run[0] / "tokenizer")
    tokenizer.model_max_length = defaults.max_length
    rows = pretraining_dataset(documents["train"], tokenizer, defaults.max_length, short_seq_prob=0.2)
    tokens = sum(rows["length"])
    assert sum(length for length in rows["length"] if length > defaults.num_landmarks) > 0.6 * tokens


def test_seen_sentences_are_not_asked():
    documents = Dataset.from_dict({"text": ["It is short. return A LIST of the names of all columns, sorted."]})
    sentences = ["Return a [MASK] of the names of all columns.", "Return a [MASK] of the sizes of all rows."]
    assert quickstart.unseen(sentences, documents) == sentences[1:]


@pytest.mark.parametrize("late", [False, True], ids=["stopped", "in the last step"])
@pytest.mark.parametrize("part", ["pretrain", "finetune"])
def test_a_signal_ends_it_without_a_traceback(part, late, monkeypatch, tmp_path, capsys):
    [arguments] = HfArgumentParser(quickstart.QuickstartArguments).parse_args_into_dataclasses(TINY)
    results = {"train": {"steps": 3}} | ({"validation": {"accuracy": 0.5}} if late else {})
    monkeypatch.setattr(quickstart, part, lambda *arguments: results)
    monkeypatch.setattr(Signals, "_ended_by", None if late else signal.SIGTERM)
    monkeypatch.setattr(Signals, "_late", signal.SIGINT if late else None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    function = getattr(quickstart, f"{part}_family")
    with pytest.raises(KeyboardInterrupt if late else SystemExit) as ended:
        function("linformer", {}, replace(arguments, output_dir=str(tmp_path)))
    assert late or ended.value.code == 128 + signal.SIGTERM
    assert "The quickstart was stopped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--finetune_steps 0", "--finetune_steps must be at least 1, but is 0"),
        ("--causal_steps 0", "--causal_steps must be at least 1"),
        ("--num_classes 1", "--num_classes must be at least 2"),
        (
            "--num_landmarks 64 --max_length 32",
            "--num_landmarks must lie between 1 and 32, the --max_length, but is 64",
        ),
        ("--packages torch", "--packages needs two or more to tell apart, but is torch"),
    ],
)
def test_flags_that_would_fail_after_pretraining_are_refused_at_once(flags, message, tmp_path, monkeypatch):
    monkeypatch.setattr(quickstart, "load_docstrings", lambda *_, **__: pytest.fail("docstrings were read"))
    with pytest.raises(ValueError, match=message):
        quickstart.main([*flags.split(), "--output_dir", str(tmp_path)])


def test_classes_without_a_held_out_docstring_are_refused_before_pretraining(tmp_path, monkeypatch):
    packages = {"train": ["torch", "numpy"] * 20 + ["rare"], "validation": ["rare"]}
    rows = {split: {"package": names, "text": ["Return a list."] * len(names)} for split, names in packages.items()}
    docstrings = DatasetDict({split: Dataset.from_dict(columns) for split, columns in rows.items()})
    monkeypatch.setattr(quickstart, "load_docstrings", lambda *_, **__: docstrings)
    monkeypatch.setattr(quickstart, "pretrain", lambda *_: pytest.fail("a model was pretrained"))
    with pytest.raises(ValueError, match="No docstring of numpy, torch is held out: give a larger --max_bytes"):
        quickstart.main(["--num_classes", "2", "--output_dir", str(tmp_path)])
