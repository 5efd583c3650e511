# SPDX-License-Identifier: Apache-2.0
"""A checkpoint as a folder for ONNX Runtime: the model in float32 and in 8 bits, configuration and tokenizer."""

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME

from ..checkpoint import load_complete, load_config, save_tokenizer
from ..complete_folder import moved_when_complete
from ..models.configuration_base import BaseConfig
from .onnx import INPUT_NAMES, export_onnx, require_packages

# Transformers' names of the tasks, with the Auto class of each.
TASKS = {
    "feature-extraction": "AutoModel",
    "fill-mask": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
}


def load_for_export(name: str | os.PathLike, task: str | None = None) -> PreTrainedModel:
    """The model of a folder or Hub name, in float32 and in evaluation mode.

    task: one of `TASKS`, which chooses the head; None for the head that the model was saved with.

    Raises:
        ValueError: for an unknown task, an adapter of PEFT or a model of another package, or if weights of the head
            are missing.
    """
    if task is not None and task not in TASKS:
        raise ValueError(f"task (--task) must be one of {', '.join(TASKS)}, but is {task}.")
    config = load_config(name)
    if not isinstance(config, BaseConfig):
        raise ValueError(
            f"{name} is a {config.model_type!r}, and only models of this package are exported: convert it, or use "
            "Hugging Face Optimum."
        )
    import nystrom_models

    model_class: Any = AutoModel
    if task is not None:
        model_class = getattr(transformers, TASKS[task])
    elif config.architectures:
        model_class = getattr(nystrom_models, config.architectures[0], None)
        if model_class is None:
            raise ValueError(
                f"{name} was saved as {config.architectures[0]}, which is not a class of this package: choose the "
                f"head by the task ({', '.join(TASKS)})."
            )
    return load_complete(model_class, name, "choose a task that the checkpoint was trained for.")


def model_inputs(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The inputs that the tokenizer returns and the model takes."""
    return [name for name in tokenizer.model_input_names if name in INPUT_NAMES]


def _save_config(model: PreTrainedModel, partial: Path, folder: Path) -> None:
    """Writes the configuration of the exported model, with references only to code that `folder` has or will have."""
    model.config.save_pretrained(partial)
    path = partial / CONFIG_NAME
    fields = json.loads(path.read_text(encoding="utf-8")) | {"architectures": [type(model).__name__]}
    if "auto_map" in fields:
        files = {name: f"{code.split('.')[0]}.py" for name, code in fields["auto_map"].items()}
        fields["auto_map"] = {
            name: fields["auto_map"][name]
            for name, file in files.items()
            if (partial / file).is_file() or (folder / file).is_file()
        }
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _quantize(path: Path, target: Path) -> None:
    """Writes an ONNX file with 8-bit weights."""
    from onnxruntime.quantization import quantize_dynamic

    logging.disable(logging.WARNING)  # it recommends preprocessing, which changes nothing here
    try:
        quantize_dynamic(path, target, per_channel=True, reduce_range=True)
    except Exception as error:
        # protobuf's error for a file that ONNX Runtime itself has written, without noticing a full disk
        if type(error).__name__ != "DecodeError":
            raise
        raise OSError(f"{target.name} cannot be written, maybe because the disk is full: {error}") from error
    finally:
        logging.disable(logging.NOTSET)


def export_folder(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | os.PathLike,
    *,
    opset_version: int = 20,
    quantize: bool = False,
    input_names: Sequence[str] | None = None,
) -> dict[str, Path]:
    """Writes model.onnx, verified against the model, with `config.json` and the tokenizer.

    Args:
        model: see `export_onnx`.
        tokenizer: the tokenizer of the model.
        folder: created if it does not exist.
        opset_version: see `export_onnx`.
        quantize: also write model_quantized.onnx, with 8-bit weights.
        input_names: inputs of the file; None for those that the tokenizer returns.

    Returns: the files, by the names "onnx" and "int8". All are written, or none is changed.
    """
    require_packages("onnx", "onnxscript", "onnxruntime")
    folder = Path(folder)
    names = model_inputs(tokenizer) if input_names is None else input_names
    with moved_when_complete(folder) as partial:
        path = export_onnx(model, partial / "model.onnx", input_names=names, opset_version=opset_version, verify=True)
        _save_config(model, partial, folder)
        save_tokenizer(tokenizer, partial)
        if quantize:
            _quantize(path, partial / "model_quantized.onnx")
        written = {file.name for file in partial.iterdir()}
    # What only an earlier export wrote, maybe of another model: 8-bit weights, and the weights of a large model.
    for name in {"model_quantized.onnx", "model.onnx.data"} - written:
        (folder / name).unlink(missing_ok=True)
    files = {"onnx": folder / path.name}
    if quantize:
        files["int8"] = folder / "model_quantized.onnx"
    return files
