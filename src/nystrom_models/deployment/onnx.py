# SPDX-License-Identifier: Apache-2.0
"""Export of a model to one ONNX file for every batch size and length, with the names of Hugging Face Optimum."""

import importlib.util
import logging
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.export import Dim
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

INPUT_NAMES = ("input_ids", "attention_mask", "token_type_ids")

# From 23 on, attention is one operator, which takes no mask of keys in ONNX Runtime 1.31 on a CPU.
OPSET_VERSIONS = range(18, 23)

# The largest difference from PyTorch, relative to the largest output, that `verify` accepts. Other orders of summation
# give about 1e-6, more if a pseudo-inverse is ill-conditioned; an error in a graph changes the leading digits.
TOLERANCE = 1e-3


def require_packages(*packages: str) -> None:
    """Raises ImportError for packages of the extra `onnx` that are not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(f"{' and '.join(missing)} cannot be imported: pip install '.[onnx]' in the repository.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses harmless reports of the exporter: a missing torchvision, inputs that share an axis."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*axis name: .* will not be used", UserWarning)
            warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
            yield
    finally:
        logger.setLevel(level)


def _has_choices(model: PreTrainedModel) -> bool:
    return type(model).__name__.endswith("ForMultipleChoice")


def _reads_pairs(model: PreTrainedModel) -> bool:
    # Other models of Transformers have no such field.
    return getattr(model.config, "dual_encoder", False) and type(model).__name__.endswith("ForSequenceClassification")


def shape_of_inputs(model: PreTrainedModel, batch: int, length: int) -> tuple[int, ...]:
    """(batch, length); (batch, 2, length) for multiple choice, with two choices, and for pairs with `dual_encoder`."""
    several = _has_choices(model) or _reads_pairs(model)
    return (batch, 2, length) if several else (batch, length)


def _inputs(model: PreTrainedModel, names: Sequence[str], batch: int, length: int) -> dict[str, Tensor]:
    """Random rows: full, padded on the right, on the left, and with holes."""
    generator = torch.Generator().manual_seed(0)
    shape = shape_of_inputs(model, batch, length)
    mask = torch.ones(shape, dtype=torch.long)
    mask[1::4, ..., (length + 1) // 2 :] = 0
    mask[2::4, ..., : length // 2] = 0
    mask[3::4, ..., 1:-1:3] = 0
    types = getattr(model.config, "type_vocab_size", None) or 1
    tensors = {
        "input_ids": torch.randint(model.config.vocab_size, shape, generator=generator),
        "attention_mask": mask,
        "token_type_ids": torch.randint(types, shape, generator=generator),
    }
    return {name: tensors[name].to(model.device) for name in names}


@contextmanager
def _without_states(model: PreTrainedModel) -> Iterator[None]:
    """A causal model without the states of its cache, which are no outputs of a file."""
    if not getattr(model.config, "is_decoder", False):
        yield
        return
    before, model.config.use_cache = model.config.use_cache, False
    try:
        yield
    finally:
        model.config.use_cache = before


@torch.no_grad()
def _outputs(model: PreTrainedModel, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's outputs by name. Elements of a tuple, such as hidden states, are name.0, name.1, ..."""
    named: dict[str, Tensor] = {}
    with _without_states(model):
        outputs: ModelOutput = model(**inputs, return_dict=True)
    for name, value in outputs.items():
        if isinstance(value, Tensor):
            named[name] = value
        else:
            named |= {f"{name}.{i}": tensor for i, tensor in enumerate(value)}
    return named


@torch.no_grad()
def export_onnx(
    model: PreTrainedModel,
    path: str | os.PathLike,
    *,
    input_names: Sequence[str] = ("input_ids", "attention_mask"),
    opset_version: int = 20,
    verify: bool = False,
) -> Path:
    """Writes a model of this package, with any head, as an ONNX file.

    All inputs are int64 of shape (batch_size, sequence_length), (batch_size, num_choices, sequence_length) for
    multiple choice, (batch_size, 2, sequence_length) with `dual_encoder`, of any batch size and any length that the
    model takes, with padding at any position. Outputs have the names of the fields that the model returns (`logits`;
    `last_hidden_state`, `pooler_output`; ...), in float32; a causal model's states are left out. Values at padding are
    undefined.

    Args:
        model: in evaluation mode and in float32.
        path: the file; missing folders are created.
        input_names: the inputs of the file, some of `input_ids`, `attention_mask` and `token_type_ids`, such as
            `tokenizer.model_input_names`.
        opset_version: version of ONNX's operators, 18 to 22.
        verify: run the file in ONNX Runtime at other lengths and batch sizes, and compare the results.

    Returns: `path`.

    Raises:
        ImportError: if the packages of the extra `onnx` are missing.
        ValueError: if the model cannot be exported as it is, or an argument is not one of the above.
        RuntimeError: if the results of the file differ from those of the model (`verify`).
    """
    require_packages("onnx", "onnxscript", *(["onnxruntime"] if verify else []))
    if model.training:
        raise ValueError("A model in training mode would be exported with dropout: call model.eval() first.")
    if model.config.output_attentions:
        raise ValueError("Attention maps cannot be exported: set model.config.output_attentions = False.")
    if model.dtype != torch.float32:
        raise ValueError(f"ONNX files are written in float32, but the model is in {model.dtype}: call model.float().")
    if opset_version not in OPSET_VERSIONS:
        raise ValueError(f"opset_version must be {OPSET_VERSIONS[0]} to {OPSET_VERSIONS[-1]}, but is {opset_version}.")
    if "input_ids" not in input_names or not set(input_names) <= set(INPUT_NAMES):
        raise ValueError(f"input_names must be input_ids and some of {INPUT_NAMES[1:]}, but are {list(input_names)}.")

    limit = model.config.max_position_embeddings
    inputs = _inputs(model, input_names, batch=2, length=min(limit or 16, 16))
    axes = {0: Dim("batch_size", min=1)}
    if limit != 1:  # else the length is always 1, and no axis
        axes[inputs["input_ids"].dim() - 1] = Dim("sequence_length", min=1, max=limit)
    if _has_choices(model):
        axes[1] = Dim("num_choices", min=1)
    with _quiet(), _without_states(model):
        program = torch.onnx.export(
            model,
            kwargs=inputs,
            dynamo=True,
            dynamic_shapes=dict.fromkeys(inputs, axes),
            input_names=list(inputs),
            output_names=list(_outputs(model, inputs)),
            opset_version=opset_version,
            verbose=False,
        )
    assert program is not None  # with dynamo=True
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    # The metadata contain stack traces with paths of this machine.
    ClearMetadataAndDocStringPass()(program.model)
    for weight in program.model.graph.initializers.values():
        # The type and shape are also in the weight itself. With both, quantization fails: it transposes the weights of
        # classifiers but not these separate shapes (github.com/microsoft/onnxruntime/issues/25890).
        weight.type = weight.shape = None
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    program.save(path)
    if verify and not (difference := compare_onnx(model, path)) <= TOLERANCE:
        raise RuntimeError(
            f"ONNX Runtime's results from {path.name} differ from the model's by {difference:.1e} of the largest "
            f"value: more than {TOLERANCE}. Another opset_version may help."
        )
    return path


def compare_onnx(model: PreTrainedModel, path: str | os.PathLike, lengths: Sequence[int] = (1, 37, 512)) -> float:
    """The largest relative difference between the outputs of an ONNX file, run on a CPU, and those of its model.

    Args:
        model: in evaluation mode.
        path: the file that `export_onnx` wrote, or its quantized form.
        lengths: lengths of the rows of random tokens, cut to what the model takes. At each length, a full row by
            itself is compared, and a batch of four rows: full, padded right, padded left, and with holes.

    Returns: the largest over all outputs of the ratio of the largest difference at valid tokens to the largest value
        there; NaN if the outputs of the file contain NaN.
    """
    require_packages("onnxruntime")
    import onnxruntime

    session = onnxruntime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    # Outputs that have a value for each token.
    by_token = {value.name: "sequence_length" in value.shape[1:] for value in session.get_outputs()}
    worst = 0.0
    limit = model.config.max_position_embeddings
    for length in sorted({length if limit is None else min(length, limit) for length in lengths}):
        for batch in (1, 4):
            inputs = _inputs(model, names, batch, length)
            results = session.run(list(by_token), {name: tensor.cpu().numpy() for name, tensor in inputs.items()})
            expected = _outputs(model, inputs)
            for name, result in zip(by_token, results, strict=True):
                actual, wanted = torch.from_numpy(result).double(), expected[name].cpu().double()
                if by_token[name] and "attention_mask" in inputs:
                    valid = inputs["attention_mask"].cpu().bool().flatten(0, -2)
                    actual, wanted = actual[valid], wanted[valid]
                error = ((actual - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30)).item()
                # A NaN is larger than any number, and is kept: it is neither below nor above another error.
                worst = error if error > worst or math.isnan(error) else worst
    return worst
