# SPDX-License-Identifier: Apache-2.0
import json
from pathlib import Path

import export_onnx
import onnxruntime
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMultipleChoice,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from nystrom_models import LinearTransformerConfig


@pytest.fixture(scope="module")
def classifier(checkpoint, tmp_path_factory):
    """A classifier of the checkpoint, not trained, with names for its classes."""
    folder = tmp_path_factory.mktemp("classifier")
    torch.manual_seed(0)
    names = {"bad": 0, "good": 1}
    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoint, label2id=names, id2label={i: name for name, i in names.items()}
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_a_classifier_is_exported_quantized_and_evaluated(classifier, filler, write_rows, tmp_path, capsys):
    texts = [filler(5 + i, i) for i in range(20)]
    model = AutoModelForSequenceClassification.from_pretrained(classifier).eval()
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits
    # Labels that the model predicts correctly, except five.
    labels = [["bad", "good"][(i < 5) ^ answer] for i, answer in enumerate(logits.argmax(-1).tolist())]
    file = write_rows([{"verdict": label, "review": text} for label, text in zip(labels, texts, strict=True)])

    folder = tmp_path / "output"
    options = ["--quantize", "--lengths", "6", "40", "--batch_size", "3", "--repeats", "1"]
    columns = ["--text_column_names", "review", "--label_column_name", "verdict", "--cache_dir", str(tmp_path)]
    results = export_onnx.main(
        [
            "--model_name_or_path",
            classifier,
            "--output_dir",
            str(folder),
            "--validation_file",
            file,
            *options,
            *columns,
        ]
    )
    assert list(results) == ["PyTorch", "ONNX Runtime", "ONNX Runtime, int8"]
    assert results["PyTorch"]["accuracy"] == results["ONNX Runtime"]["accuracy"] == 0.75
    assert results["ONNX Runtime"]["difference"] < 1e-5 < results["ONNX Runtime, int8"]["difference"] < 0.1
    assert results["ONNX Runtime, int8"]["megabytes"] < results["ONNX Runtime"]["megabytes"]
    assert json.loads((folder / "all_results.json").read_text())["results"] == results
    table = capsys.readouterr().out
    assert "ms at 6" in table and "ms at 40" in table and "75.0%" in table

    # The folder is enough, and takes the inputs that the tokenizer returns.
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    arrays = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="np")
    assert torch.allclose(torch.from_numpy(session.run(["logits"], dict(arrays))[0]), logits, atol=1e-5)
    assert json.loads((folder / "config.json").read_text())["label2id"] == {"bad": 0, "good": 1}


def test_a_classifier_with_two_towers_is_timed_and_evaluated_on_pairs(checkpoint, filler, write_rows, tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(checkpoint, dual_encoder=True)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    pairs = [(filler(5 + i, i), filler(12 - i, 100 + i)) for i in range(8)]
    inputs = tokenizer([text for pair in pairs for text in pair], padding=True, return_tensors="pt")
    with torch.no_grad():
        answers = model(**{name: tensor.unflatten(0, (-1, 2)) for name, tensor in inputs.items()}).logits.argmax(-1)
    labels = [int((i < 2) ^ bool(answer)) for i, answer in enumerate(answers)]
    rows = [{"a": a, "b": b, "label": label} for (a, b), label in zip(pairs, labels, strict=True)]
    folder, out, file = str(tmp_path / "model"), str(tmp_path / "output"), write_rows(rows)
    options = ["--lengths", "16", "--repeats", "1", "--text_column_names", "a", "b", "--cache_dir", str(tmp_path)]
    results = export_onnx.main(
        ["--model_name_or_path", folder, "--output_dir", out, "--validation_file", file, *options]
    )
    assert results["PyTorch"]["accuracy"] == results["ONNX Runtime"]["accuracy"] == 0.75
    assert results["ONNX Runtime"]["difference"] < 1e-5


def test_a_classifier_of_ends_is_evaluated_on_ends_and_one_of_several_labels_is_refused(classifier, write_rows):
    model = AutoModelForSequenceClassification.from_pretrained(classifier)
    tokenizer = AutoTokenizer.from_pretrained(classifier, truncation_side="left")
    file = write_rows([{"text": "the film was good " * 9 + "that bad old town", "label": "bad"}])
    args = export_onnx.ExportArguments(model_name_or_path=classifier, output_dir="none", validation_file=[file])
    _, [batch] = export_onnx.evaluation_batches(args, model, tokenizer, 6)
    assert batch["input_ids"].tolist() == tokenizer(["that bad old town"])["input_ids"]
    for kind in ("multi_label_classification", "regression"):
        model.config.problem_type = kind
        with pytest.raises(ValueError, match="this model gives several: leave it out"):
            export_onnx.evaluation_batches(args, model, tokenizer, 6)


@pytest.mark.parametrize(
    ("names", "labels", "ids"),
    [
        (["-1", "0", "1"], [0, 1, 0], [1, 2, 1]),
        (["10", "20"], [20, 10], [1, 0]),
        (["bad", "good"], [1, 0], [1, 0]),
        (["1", "2", "none"], [1, 2], [0, 1]),
    ],
    ids=["negative", "numbers", "places", "numbers-and-words"],
)
def test_labels_that_are_numbers_are_names_of_classes_or_places(names, labels, ids, checkpoint, write_rows):
    config = AutoConfig.from_pretrained(checkpoint, id2label=dict(enumerate(names)))
    config.label2id = {name: i for i, name in enumerate(names)}
    model = AutoModelForSequenceClassification.from_config(config)
    file = write_rows([{"text": "the film was good", "label": label} for label in labels])
    args = export_onnx.ExportArguments(model_name_or_path=checkpoint, output_dir="none", validation_file=[file])
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    _, [batch] = export_onnx.evaluation_batches(args, model, tokenizer, 16)
    assert batch["labels"].tolist() == ids


@pytest.mark.slow
def test_a_model_for_multiple_choice_is_timed(checkpoint, tmp_path):
    torch.manual_seed(0)
    AutoModelForMultipleChoice.from_config(AutoConfig.from_pretrained(checkpoint)).save_pretrained(tmp_path / "model")
    options = ["--tokenizer_name", checkpoint, "--lengths", "16", "--repeats", "1"]
    results = export_onnx.main(
        ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / "output"), *options]
    )
    assert results["ONNX Runtime"]["difference"] < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--task", "translation"], "--task must be one of feature-extraction"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--lengths", "8", "65"], "--lengths must lie between 1 and 64"),
        (["--validation_file", "rows.jsonl"], "--task text-classification"),
    ],
)
def test_flags_that_cannot_be_followed(options, message, checkpoint, tmp_path):
    with pytest.raises(ValueError, match=message):
        export_onnx.main(["--model_name_or_path", checkpoint, "--output_dir", str(tmp_path / "output"), *options])
    assert not Path(tmp_path, "output").exists()


def test_the_results_of_a_training_are_not_replaced(checkpoint, tmp_path):
    Path(tmp_path, "all_results.json").write_text('{"results": {"accuracy": 1.0}, "arguments": {"seed": 0}}')
    with pytest.raises(ValueError, match=r"has the all_results\.json of another run, .* give a new folder"):
        export_onnx.main(["--model_name_or_path", checkpoint, "--output_dir", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["all_results.json"]


def test_a_model_without_a_longest_row_needs_lengths(checkpoint, tmp_path):
    config = LinearTransformerConfig(
        vocab_size=1000,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        position_embedding_type="sinusoidal",
        max_position_embeddings=None,
    )
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, model_max_length=None)
    tokenizer.save_pretrained(tmp_path / "model")
    flags = ["--model_name_or_path", str(tmp_path / "model"), "--output_dir", str(tmp_path / "output")]
    with pytest.raises(ValueError, match="rows of any length: give the --lengths to time"):
        export_onnx.main(flags)
    assert not Path(tmp_path, "output").exists()
