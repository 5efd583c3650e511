# SPDX-License-Identifier: Apache-2.0
"""`nystrom-models export` from a checkpoint to a folder that ONNX Runtime reads."""

import json
import logging
import shutil
import subprocess
import sys
from contextlib import nullcontext

import onnxruntime
import onnxruntime.quantization
import pytest
import torch
import transformers
from google.protobuf.message import DecodeError
from onnxruntime import quantization
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer, BertTokenizer

from nystrom_models.command_line.main import main
from nystrom_models.data import train_tokenizer
from nystrom_models.deployment import folder as deployment
from nystrom_models.deployment.folder import load_for_export
from tests.analysis.models import make_model

TEXT = "Return a list of the names of all columns . Raise an error if the file does not exist . "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    tokenizer = train_tokenizer([TEXT] * 4, vocab_size=99, model_max_length=64, show_progress=False)
    fields = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, "num_hidden_layers": 1}
    for name, family, own in (("model", "Linformer", {"projected_dim": 8}), ("bert", "Bert", {})):
        make_model(family, "ForMaskedLM", **fields, **own).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.mark.slow
def test_a_model_is_exported_by_a_process_of_its_own(folder):
    command = [sys.executable, "-m", "nystrom_models", "export", folder / "model", folder / "onnx", "--quantize"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "LinformerForMaskedLM" in done.stdout and "model_quantized.onnx: " in done.stdout
    # The folder contains all files that are needed to use it.
    inputs = AutoTokenizer.from_pretrained(folder / "onnx")([TEXT, TEXT[:20]], padding=True, return_tensors="pt")
    session = onnxruntime.InferenceSession(folder / "onnx" / "model.onnx", providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    (logits,) = session.run(["logits"], {name: inputs[name].numpy() for name in names})
    with torch.no_grad():
        expected = AutoModelForMaskedLM.from_pretrained(folder / "model")(**inputs).logits
    valid = inputs["attention_mask"].bool()
    torch.testing.assert_close(torch.from_numpy(logits)[valid], expected[valid], rtol=1e-4, atol=1e-4)


def test_what_only_an_earlier_export_wrote_does_not_stay(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(deployment, "export_onnx", lambda model, path, **options: path)
    for name in ("model_quantized.onnx", "model.onnx.data"):
        (tmp_path / name).touch()
    model, tokenizer = load_for_export(folder / "model", None), AutoTokenizer.from_pretrained(folder / "model")
    assert deployment.export_folder(model, tokenizer, tmp_path) == {"onnx": tmp_path / "model.onnx"}
    assert not [path.name for path in tmp_path.iterdir() if "quantized" in path.name or path.suffix == ".data"]


def test_a_full_disk_leaves_an_earlier_export_as_it_was(folder, tmp_path, capsys, monkeypatch):
    def write(model, path, **options):
        path.write_text("new")
        return path

    def fail(path, target, **options):
        target.with_name("model-inferred.onnx").touch()
        raise DecodeError("Wire format was corrupt")  # of ONNX Runtime's file, which was cut off

    monkeypatch.setattr(deployment, "export_onnx", write)
    monkeypatch.setattr(quantization, "quantize_dynamic", fail)
    earlier = dict.fromkeys(("config.json", "model.onnx", "model_quantized.onnx"), "earlier")
    for name, content in earlier.items():
        (tmp_path / name).write_text(content)
    command = ["export", str(folder / "model"), str(tmp_path), "--quantize", "--overwrite_output_dir"]
    assert main(command) == 1
    assert "maybe because the disk is full" in capsys.readouterr().err.splitlines()[-1]
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == earlier


def test_a_failure_leaves_no_new_folder(folder, tmp_path):
    model, tokenizer = load_for_export(folder / "model"), AutoTokenizer.from_pretrained(folder / "model")
    with pytest.raises(ValueError, match="training mode"):
        deployment.export_folder(model.train(), tokenizer, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_folders_of_an_earlier_export_are_filled_anew(folder, tmp_path, monkeypatch):
    """As that of the chat templates of a tokenizer that has several."""
    monkeypatch.setattr(deployment, "export_onnx", lambda model, path, **options: path)
    model, tokenizer = load_for_export(folder / "model", None), AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.chat_template = {"default": "new", "tool_use": "new"}
    templates = tmp_path / "additional_chat_templates"
    templates.mkdir()
    for name in ("tool_use", "mine"):
        (templates / f"{name}.jinja").write_text("earlier")
    deployment.export_folder(model, tokenizer, tmp_path)
    assert {path.stem: path.read_text() for path in templates.iterdir()} == {"tool_use": "new", "mine": "earlier"}
    assert (tmp_path / "config.json").is_file() and not (tmp_path / ".partial").exists()


@pytest.mark.parametrize("given", [None, ["input_ids"]])
def test_the_file_is_verified_and_has_the_inputs_of_the_tokenizer(given, folder, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(deployment, "export_onnx", lambda model, path, **options: calls.append(options) or path)
    model, tokenizer = load_for_export(folder / "model", None), AutoTokenizer.from_pretrained(folder / "model")
    deployment.export_folder(model, tokenizer, tmp_path, opset_version=19, input_names=given)
    names = deployment.model_inputs(tokenizer) if given is None else given
    assert calls == [{"input_names": names, "opset_version": 19, "verify": True}]


def test_flags_reach_the_export(folder, tmp_path, monkeypatch, capsys):
    calls = []

    def export(model, tokenizer, output_dir, **options):
        calls.append((type(model).__name__, len(tokenizer), output_dir, options))
        return {"onnx": tmp_path / "model.onnx"}

    monkeypatch.setattr(deployment, "export_folder", export)
    train_tokenizer([TEXT], vocab_size=40, model_max_length=64, show_progress=False).save_pretrained(
        tmp_path / "other"
    )
    (tmp_path / "model.onnx").write_bytes(b"x" * 250_000)  # of an earlier export
    flags = ["--opset_version", "19", "--quantize", "--task", "feature-extraction", "--overwrite_output_dir"]
    arguments = ["export", str(folder / "model"), str(tmp_path), *flags, "--tokenizer_name", str(tmp_path / "other")]
    assert main(arguments) == 0
    size = len(AutoTokenizer.from_pretrained(tmp_path / "other"))
    assert calls == [("LinformerModel", size, str(tmp_path), {"opset_version": 19, "quantize": True})]
    assert capsys.readouterr().out.splitlines()[-1] == f"{tmp_path / 'model.onnx'}: 0.2 MB"


@pytest.mark.parametrize("error", [None, MemoryError])
def test_warnings_are_on_again_after_the_quantization(error, folder, tmp_path, monkeypatch):
    calls = []

    def quantize(path, target, **options):
        calls.append((path.name, target.name, options, logging.root.manager.disable))
        if error is not None:
            raise error

    monkeypatch.setattr(deployment, "export_onnx", lambda model, path, **options: path)
    monkeypatch.setattr(onnxruntime.quantization, "quantize_dynamic", quantize)
    model, tokenizer = load_for_export(folder / "model"), AutoTokenizer.from_pretrained(folder / "model")
    with nullcontext() if error is None else pytest.raises(error):
        deployment.export_folder(model, tokenizer, tmp_path, quantize=True)
    # As in the README.
    options = {"per_channel": True, "reduce_range": True}
    assert calls == [("model.onnx", "model_quantized.onnx", options, logging.WARNING)]
    assert logging.root.manager.disable == logging.NOTSET


def test_each_task_has_the_head_that_it_is_named_for(folder):
    config = AutoConfig.from_pretrained(folder / "model")
    found = {
        task: type(getattr(transformers, name).from_config(config)).__name__ for task, name in deployment.TASKS.items()
    }
    assert found == {
        "feature-extraction": "LinformerModel",
        "fill-mask": "LinformerForMaskedLM",
        "text-classification": "LinformerForSequenceClassification",
        "token-classification": "LinformerForTokenClassification",
        "question-answering": "LinformerForQuestionAnswering",
    }


def test_a_class_of_another_package_is_named(folder, tmp_path):
    checkpoint = shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((checkpoint / "config.json").read_text()) | {"architectures": ["MyModel"]}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="was saved as MyModel, which is not a class of this package"):
        load_for_export(checkpoint)
    with pytest.raises(ValueError, match=r"task \(--task\) must be one of .*fill-mask.*, but is translation"):
        load_for_export(checkpoint, "translation")
    assert type(load_for_export(checkpoint, "fill-mask")).__name__ == "LinformerForMaskedLM"


def test_configuration_and_tokenizer_are_those_of_the_exported_model(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(deployment, "export_onnx", lambda model, path, **options: path)
    model = load_for_export(folder / "model", "fill-mask")
    model.config.architectures = ["LinformerForPreTraining"]  # as the checkpoint was saved
    tokenizer = BertTokenizer.from_pretrained(folder / "model")
    tokenizer.backend_tokenizer.enable_truncation(8)
    deployment.export_folder(model, tokenizer, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LinformerForMaskedLM"]
    # Of the code of the checkpoint, only that of the configuration is there.
    assert config["auto_map"] == {"AutoConfig": "configuration_linformer.LinformerConfig"}
    assert (tmp_path / "configuration_linformer.py").is_file()
    encoded = AutoTokenizer.from_pretrained(tmp_path)(TEXT)
    assert set(encoded) == set(deployment.model_inputs(tokenizer)) and len(encoded["input_ids"]) > 8


def test_beside_a_checkpoint_its_configuration_keeps_all_of_its_code(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(deployment, "export_onnx", lambda model, path, **options: path)
    checkpoint = shutil.copytree(folder / "model", tmp_path / "model")
    before = json.loads((checkpoint / "config.json").read_text())["auto_map"]
    assert len(before) > 1
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    deployment.export_folder(load_for_export(checkpoint), tokenizer, checkpoint)
    assert json.loads((checkpoint / "config.json").read_text())["auto_map"] == before


@torch.no_grad()
def test_states_are_exported_without_a_pooler_that_was_not_saved(folder):
    """Its weights would be random."""
    outputs = load_for_export(folder / "model", "feature-extraction")(torch.tensor([[5, 6, 7]]))
    assert outputs.pooler_output is None
    expected = AutoModelForMaskedLM.from_pretrained(folder / "model").base_model(torch.tensor([[5, 6, 7]]))
    assert torch.equal(outputs.last_hidden_state, expected.last_hidden_state)


def test_damaged_weights_are_named(folder, tmp_path, capsys):
    checkpoint = shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(
        json.dumps(config | {"intermediate_size": config["intermediate_size"] + 1})
    )
    assert main(["export", str(checkpoint), str(tmp_path / "new")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{checkpoint} has" in error and "of other shapes than its config.json asks for, such as" in error
    (checkpoint / "config.json").write_text(json.dumps(config))
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    # `inspect` loads in the same way.
    for command in (["export", checkpoint, tmp_path / "new"], ["convert", checkpoint, tmp_path / "new"]):
        assert main([str(word) for word in command]) == 1
        assert f"The weights of {checkpoint} are damaged (" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bert", "new"], "is a 'bert'"),
        (["model", "new", "--task", "text-classification"], "lacks 4 weights of LinformerForSequenceClassification"),
        (["model", "new", "--task", "translation"], "task (--task) must be one of feature-extraction"),
        (["model", "model"], "--overwrite_output_dir"),
    ],
)
def test_what_cannot_be_exported_is_said_in_a_line(arguments, message, folder, capsys):
    (folder / "model" / "model.onnx").touch()
    checkpoint, output, *flags = arguments
    assert main(["export", str(folder / checkpoint), str(folder / output), *flags]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("nystrom-models export: ") and message in error
    assert not (folder / "new" / "model.onnx").exists()
