# SPDX-License-Identifier: Apache-2.0
import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from datasets import Dataset, IterableDataset
from huggingface_hub import EvalResult, ModelCard, metadata_load

import nystrom_models
from nystrom_models.data import train_tokenizer
from nystrom_models.training.arguments import DataArguments
from nystrom_models.training.language_modeling import data_card
from nystrom_models.training.model_card import TEMPLATE, _hardware, model_card, write_model_card
from nystrom_models.training.pretraining import PretrainingArguments
from nystrom_models.training.splits import first_documents
from nystrom_models.training.token_classification import TokenClassificationArguments, TokenClassificationRun
from tests.models.options import make_model

ROOT = Path(__file__).parents[2]


def test_metadata_are_what_the_hub_reads(classifier):
    card = ModelCard.load(classifier / "README.md")
    metadata = metadata_load(classifier / "README.md")
    assert metadata["pipeline_tag"] == "text-classification" and metadata["library_name"] == "transformers"
    assert metadata["tags"] == ["nystrom_models", "linformer"] and metadata["language"] == "en"
    [result] = card.data.eval_results
    assert isinstance(result, EvalResult) and result.metric_type == "accuracy"
    assert 0.9 < result.metric_value <= 1  # it was trained
    assert f"| accuracy | {round(result.metric_value, 4)} |" in card.text
    # The secret hyper-parameter and those that are None are left out.
    assert "| `learning_rate` | 0.01 |" in card.text and "secret" not in card.content and "None" not in card.text
    parameters = sum(
        p.numel() for p in nystrom_models.LinformerForSequenceClassification.from_pretrained(classifier).parameters()
    )
    assert f"It has {parameters:,} parameters, takes up to 64 tokens" in card.text
    assert f"torch {torch.__version__}" in card.text


def printed(output):
    """The answers of pipelines, without other output of libraries."""
    return [line for line in output.splitlines() if line.startswith("[{")]


def test_the_usage_snippets_run(classifier, fill_mask, tmp_path, clean_python, monkeypatch, capsys):
    """From the parent of the saved folders, named like the repositories: first with the package, then without."""
    (tmp_path / "ada").mkdir()
    with_package, without = [], []
    for folder in (classifier, fill_mask):
        (tmp_path / "ada" / folder.name).symlink_to(folder)
        text = ModelCard.load(folder / "README.md").text
        first, second = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
        with_package.append(first)
        without.append(second)
    monkeypatch.chdir(tmp_path)
    for snippet in with_package:
        exec(snippet, {})
    label, masks = printed(capsys.readouterr().out)
    assert "'label': 'weather'" in label and masks.count("'token_str'") == 5
    environment = os.environ | {"HOME": str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
    environment.pop("PYTHONPATH", None)  # so that this package is found in only one way
    done = subprocess.run(
        [clean_python, "-c", "\n".join(without)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert printed(done.stdout) == [label, masks]


def test_every_field_finds_its_place(tmp_path):
    make_model("nystromformer-softmax", "ForSequenceClassification").save_pretrained(tmp_path / "run")
    card = model_card(
        tmp_path / "run",
        data="The MRPC pairs.",
        hub_model_id="ada/mrpc",
        base_model="ada/masks",
        dataset_name="nyu-mll/glue",
        dataset_config_name="mrpc",
        metrics={"accuracy": 0.8, "f1": 0.876543},
        hyperparameters={"report_to": "a|b"},
        hardware="2 × a GPU",
        limits=["English alone."],
        example=("One text", 'The "other" text'),
        license="apache-2.0",
    )
    data = card.data.to_dict()
    assert data["base_model"] == "ada/masks" and data["datasets"] == "nyu-mll/glue" and data["license"] == "apache-2.0"
    [index] = data["model-index"]
    assert index["name"] == "mrpc"
    [result] = index["results"]
    assert result["dataset"] == {
        "name": "nyu-mll/glue (mrpc)",
        "type": "nyu-mll/glue",
        "config": "mrpc",
        "split": "validation",
    }
    assert [(metric["type"], metric["value"]) for metric in result["metrics"]] == [("accuracy", 0.8), ("f1", 0.876543)]
    for part in (
        "A Nyströmformer (NystromformerForSequenceClassification) that classifies texts, fine-tuned from [ada/masks]",
        "its attention takes time quadratic, and memory linear, in their number.",
        "The MRPC pairs.",
        "Measured on nyu-mll/glue (mrpc), split validation.",
        "| f1 | 0.8765 |",
        r"| `report_to` | a\|b |",
        "Hardware: 2 × a GPU.",
        "- English alone.",
        r'model({"text": "One text", "text_pair": "The \"other\" text"})',
    ):
        assert part in card.text, part


@pytest.mark.parametrize("problem_type", ["regression", "multi_label_classification"])
def test_a_model_that_reads_pairs_apart_gives_its_numbers(problem_type, tmp_path, capsys):
    tokenizer = train_tokenizer(["one two three"] * 4, model_max_length=16, show_progress=False)
    labels = {"num_labels": 1} if problem_type == "regression" else {"num_labels": 3}
    model = make_model(
        "linear-elu",
        "ForSequenceClassification",
        dual_encoder=True,
        problem_type=problem_type,
        vocab_size=len(tokenizer),
        **labels,
    )
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = model_card(tmp_path, data="Pairs.", example=("one two", "three"), hub_model_id=str(tmp_path)).text
    exec(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0], {})
    pair = tokenizer(["one two", "three"], padding=True, return_tensors="pt")
    logits = model(**{name: tensor[None] for name, tensor in pair.items()}).logits[0].tolist()
    printed = ast.literal_eval(capsys.readouterr().out)
    assert printed == pytest.approx(dict(zip(model.config.id2label.values(), logits, strict=True)), abs=1e-6)


def test_a_model_of_several_labels_gives_all_of_them(tmp_path, capsys):
    tokenizer = train_tokenizer(["one two three"] * 4, model_max_length=16, show_progress=False)
    options = {"problem_type": "multi_label_classification", "vocab_size": len(tokenizer), "num_labels": 3}
    model = make_model("linear-elu", "ForSequenceClassification", **options)
    folder = tmp_path / "modèle 🙂"  # written as such in Python, where JSON's escapes are two characters
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for example in ("one two", ("one two", "three")):
        text = model_card(folder, data="Texts.", example=example, hub_model_id=str(folder)).text
        exec(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0], {})
        found = {row["label"]: row["score"] for row in ast.literal_eval(capsys.readouterr().out)}
        texts = [example] if isinstance(example, str) else example
        probabilities = model(**tokenizer(*texts, return_tensors="pt")).logits[0].sigmoid().tolist()
        assert found == pytest.approx(dict(zip(model.config.id2label.values(), probabilities, strict=True)), abs=1e-6)


def test_a_question_of_ones_own_to_a_model_of_any_length(tmp_path, capsys):
    tokenizer = train_tokenizer(["who is one two three"] * 4, model_max_length=16, show_progress=False)
    lengths = {"position_embedding_type": "sinusoidal", "max_position_embeddings": None}
    model = make_model("linear-elu", "ForQuestionAnswering", vocab_size=len(tokenizer), **lengths)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    question = ("who is", "one two three " * 300)
    text = model_card(tmp_path, data="Questions.", example=question, hub_model_id=str(tmp_path)).text
    snippet = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0]
    assert "max_length=512,\n    stride=128,\n" in snippet
    exec(snippet, {})
    answer = capsys.readouterr().out.strip()
    assert answer in question[1] and 0 < len(answer.split()) <= 30


def test_a_causal_model_of_any_length(tmp_path):
    model = make_model(
        "linear-causal", "ForCausalLM", position_embedding_type="sinusoidal", max_position_embeddings=None
    )
    model.save_pretrained(tmp_path / "run")
    card = model_card(tmp_path / "run", data="Docstrings.", metrics={"perplexity": 9.5})
    assert card.data.pipeline_tag == "text-generation"
    for part in (
        "A linear transformer (LinearTransformerForCausalLM) that continues texts.",
        "takes any number of tokens",
        'pipeline("text-generation"',
        "single distant tokens",
    ):
        assert part in card.text, part
    assert "are refused" not in card.text


def test_the_current_folder_has_a_name(tmp_path, monkeypatch):
    make_model("linformer-layerwise").save_pretrained(tmp_path / "run")
    (tmp_path / "texts").mkdir()
    monkeypatch.chdir(tmp_path / "texts")
    for folder in (".", "../texts/"):
        assert DataArguments(dataset_name=folder).data_source() == "texts"
        assert "fine-tuned from `texts`" in model_card(tmp_path / "run", data="", base_model=folder).text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"train_file": ["tags.csv"], "validation_file": ["more.csv"]},
            "of tags.csv, and evaluated on 5 rows of its v",
        ),
        (
            {"dataset_name": "ada/tags", "validation_split": "test"},
            "of ada/tags, and evaluated on 5 rows of its test split.",
        ),
    ],
    ids=["files", "split"],
)
def test_a_card_names_the_rows_that_were_evaluated(options, told):
    run = object.__new__(TokenClassificationRun)
    run.args = TokenClassificationArguments(output_dir="x", model_name_or_path="x", **options)
    run.rows = run.examples = {"train": range(9), "validation": range(5)}
    card = run.card()
    assert told in card["data"] and card["dataset_split"] == options.get("validation_split", "validation")


def test_results_of_held_out_documents_are_of_their_split():
    """Which is that of the training documents, if the data set has no other."""
    texts = {"text": ["One.", "Two.", "Three."]}
    train, test = (Dataset.from_dict(texts, split=split) for split in ("train", "test"))
    stream = IterableDataset.from_generator(lambda: ({"text": text} for text in texts["text"]), split="train")
    held_out = train.train_test_split(test_size=1, seed=0)["test"]
    hub, files = {"dataset_name": "ada/texts"}, {"train_file": ["texts.txt"]}
    for flags, validation, split in (
        (hub, held_out, "train"),
        (hub, first_documents(stream.take(2), 2, "text"), "train"),
        (hub | {"validation_split": "test"}, test, "test"),
        (files, held_out, "validation"),
    ):
        args = PretrainingArguments(output_dir="x", model_name_or_path="x", **flags)
        assert data_card(args, {"train": train, "validation": validation}, "words")["dataset_split"] == split


def test_another_device_than_that_of_cuda_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert _hardware().startswith("1 × MPS, ") and "CPU cores" in _hardware()


def test_what_a_card_cannot_say_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        write_model_card(tmp_path, data="")
    make_model("linformer-layerwise", "ForMultipleChoice").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="LinformerForMultipleChoice"):
        write_model_card(tmp_path, data="")
    make_model("linformer-layerwise").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="perplexity"):
        write_model_card(tmp_path, data="", metrics={"perplexity": float("inf")})
    assert not (tmp_path / "README.md").exists()


def test_the_template_is_in_the_wheel(tmp_path):
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "."]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        assert files.read(str(TEMPLATE.relative_to(TEMPLATE.parents[2]))) == TEMPLATE.read_bytes()
