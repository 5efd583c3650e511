# SPDX-License-Identifier: Apache-2.0
"""One ONNX file for all shapes and masks, run by ONNX Runtime; and what 8-bit weights cost."""

import copy
import math
import os
import types

import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import quantize_dynamic
from transformers.utils import ModelOutput

from nystrom_models.deployment import compare_onnx, export_onnx
from nystrom_models.deployment import onnx as deployment
from tests.deployment.in_openvino import check_logits
from tests.models.options import make_model, relative_error

# Only one family is exported in each test run, because an export takes ten seconds.
FAMILIES = (
    "nystromformer-landmarks",
    pytest.param("linformer-layerwise", marks=pytest.mark.slow),
    pytest.param("linear-causal", marks=pytest.mark.slow),
)
INPUT_NAMES = ("input_ids", "attention_mask", "token_type_ids")


def small(option, head, **fields):
    """One layer and two steps of the pseudo-inverse are enough: an export takes seconds."""
    return make_model(
        option, head, num_hidden_layers=1, **({"pinv_iterations": 2} if "landmarks" in option else {}), **fields
    )


def run(path, inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {name: tensor.numpy() for name, tensor in inputs.items()})
    return torch.from_numpy(logits)


@pytest.fixture(scope="module", params=FAMILIES)
def exported(request, tmp_path_factory):
    """A masked language model and its file."""
    torch.manual_seed(0)
    model = small(request.param, "ForMaskedLM")
    path = tmp_path_factory.mktemp("onnx") / "new" / "model.onnx"
    return model, export_onnx(model, path, input_names=INPUT_NAMES)


@torch.no_grad()
def test_the_same_logits_at_any_shape_and_mask(exported):
    model, path = exported
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for length in (1, 2, 9, 16, 17, 33, 64):
        for batch in (1, 3):
            masks = {name: torch.ones(batch, length, dtype=torch.long) for name in ("none", "right", "left", "holes")}
            masks["right"][0, (length + 1) // 2 :] = 0
            masks["left"][0, : length // 2] = 0
            masks["holes"][0, 1:-1:3] = 0
            for kind, mask in masks.items():
                inputs = {
                    "input_ids": torch.randint(3, 99, (batch, length)),
                    "attention_mask": mask,
                    "token_type_ids": torch.randint(2, (batch, length)),
                }
                expected = model(**inputs).logits
                (actual,) = session.run(["logits"], {name: tensor.numpy() for name, tensor in inputs.items()})
                actual, valid = torch.from_numpy(actual), mask.bool()
                assert actual.shape == expected.shape
                assert relative_error(actual[valid], expected[valid]) < 1e-5, (length, batch, kind)
    # A row of only padding gives finite values, and a row that is too long is refused.
    ids = torch.randint(3, 99, (2, 20))
    assert run(path, {"input_ids": ids, "attention_mask": 0 * ids, "token_type_ids": 0 * ids}).isfinite().all()
    ids = torch.ones(1, 65, dtype=torch.long)
    with pytest.raises(onnxruntime.capi.onnxruntime_pybind11_state.InvalidArgument, match="out of data bounds"):
        run(path, {"input_ids": ids, "attention_mask": ids, "token_type_ids": 0 * ids})


@torch.no_grad()
def test_openvino_reads_the_file(exported):
    model, path = exported
    check_logits(path, model)


def test_the_file_has_the_usual_names_and_no_paths(exported):
    _, path = exported
    graph = onnx.load(path).graph
    axes = {
        value.name: [axis.dim_param or axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }
    rows = ["batch_size", "sequence_length"]
    assert axes == dict.fromkeys(INPUT_NAMES, rows) | {"logits": [*rows, 99]}
    onnx.checker.check_model(path, full_check=True)
    assert b"encoder.py" not in path.read_bytes()


def test_comparison_sees_what_differs(exported):
    model, path = exported
    assert compare_onnx(model, path) < 1e-5
    other = copy.deepcopy(model)
    with torch.no_grad():
        # Code that only long rows reach.
        other.base_model.embeddings.position_embeddings.weight[42:].mul_(-1)
    assert compare_onnx(other, path, lengths=[37]) < 1e-5
    assert compare_onnx(other, path) > 1e-2


@pytest.mark.parametrize("difference", [2e-3, float("nan")])
def test_a_file_with_other_results_is_refused(exported, difference, tmp_path, monkeypatch):
    model, path = exported
    program = types.SimpleNamespace(model=onnx_ir.load(path), save=lambda path: None)
    monkeypatch.setattr(torch.onnx, "export", lambda *arguments, **options: program)
    monkeypatch.setattr(deployment, "compare_onnx", lambda model, path: difference)
    export_onnx(model, tmp_path / "model.onnx")
    with pytest.raises(RuntimeError, match=r"differ from the model's by .* more than 0\.001"):
        export_onnx(model, tmp_path / "model.onnx", verify=True)


def test_rows_of_every_kind_are_compared():
    inputs = deployment._inputs(small("linear-elu", "Model"), INPUT_NAMES, batch=4, length=9)
    assert set(inputs["token_type_ids"].flatten().tolist()) == {0, 1}
    assert inputs["attention_mask"].tolist() == [
        [1, 1, 1, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1, 1],
        [1, 0, 1, 1, 0, 1, 1, 0, 1],
    ]


def test_rows_alone_and_padded_rows_are_compared_at_each_length(tmp_path):
    """A file that ignores the mask of its padded rows has the right results only for full ones."""
    tokens, number = ["batch_size", "sequence_length"], onnx.TensorProto.FLOAT
    inputs = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.INT64, tokens)
        for name in ("input_ids", "attention_mask")
    ]
    node = onnx.helper.make_node("Cast", ["input_ids"], ["logits"], to=number)
    outputs = [onnx.helper.make_tensor_value_info("logits", number, tokens)]
    graph = onnx.helper.make_graph([node], "graph", inputs, outputs)
    opset = [onnx.helper.make_opsetid("", 20)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "model.onnx")
    shapes, sees_padding = [], False

    def model(input_ids, attention_mask, return_dict):
        shapes.append(tuple(input_ids.shape))
        scale = attention_mask.double().mean(dim=1, keepdim=True) if sees_padding else 1
        return ModelOutput(logits=input_ids * scale)

    model.config = types.SimpleNamespace(vocab_size=99, type_vocab_size=2, max_position_embeddings=64)
    model.device = torch.device("cpu")
    assert compare_onnx(model, tmp_path / "model.onnx") == 0
    assert shapes == [(batch, length) for length in (1, 37, 64) for batch in (1, 4)]
    sees_padding = True
    assert compare_onnx(model, tmp_path / "model.onnx") > 0.1


def test_one_output_that_is_not_a_number_is_enough(tmp_path):
    """Also where other outputs, which are compared later, are right."""
    tokens, number = ["batch_size", "sequence_length"], onnx.TensorProto.FLOAT
    values = {
        name: onnx.helper.make_tensor_value_info(name, number, tokens) for name in ("start_logits", "end_logits")
    }
    ids = onnx.helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, tokens)
    nodes = [
        onnx.helper.make_node("Cast", ["input_ids"], ["end_logits"], to=number),
        onnx.helper.make_node("Add", ["end_logits", "nan"], ["start_logits"]),
    ]
    nan = onnx.helper.make_tensor("nan", number, [1], [float("nan")])
    graph = onnx.helper.make_graph(nodes, "graph", [ids], list(values.values()), [nan])
    opset = [onnx.helper.make_opsetid("", 20)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=10), tmp_path / "model.onnx")

    def model(input_ids, return_dict):
        return ModelOutput(start_logits=input_ids.float(), end_logits=input_ids.float())

    model.config = types.SimpleNamespace(vocab_size=99, type_vocab_size=2, max_position_embeddings=64)
    model.device = torch.device("cpu")
    assert math.isnan(compare_onnx(model, tmp_path / "model.onnx"))


@pytest.mark.slow
def test_multiple_choice_has_a_third_axis_and_hidden_states_their_names(tmp_path):
    model = small("linformer-max_pool", "ForMultipleChoice")
    model.config.output_hidden_states = True
    path = export_onnx(model, tmp_path / "model.onnx", verify=True)
    outputs = [value.name for value in onnxruntime.InferenceSession(path).get_outputs()]
    assert outputs == ["logits", "hidden_states.0", "hidden_states.1"]
    ids = torch.randint(3, 99, (3, 5, 40))
    assert run(path, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).shape == (3, 5)


def test_a_model_of_one_token_has_no_axis_of_length(tmp_path):
    model = small("linear-elu", "Model", max_position_embeddings=1)
    path = export_onnx(model, tmp_path / "model.onnx", verify=True)
    (ids, _) = onnxruntime.InferenceSession(path).get_inputs()
    assert ids.shape == ["batch_size", 1]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"dual_encoder": True}, {}], ids=["pairs", "rows"])
def test_means_and_pairs_at_any_length(fields, tmp_path):
    model = small("linformer-layerwise", "ForSequenceClassification", classifier_pooling="mean", **fields)
    path = export_onnx(model, tmp_path / "model.onnx", verify=True)
    ids = torch.randint(3, 99, (3, 2, 40) if fields else (3, 40))
    assert run(path, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}).shape == (3, 2)


@pytest.mark.slow
def test_a_causal_model_without_its_states(tmp_path):
    model = small("linear-causal", "ForCausalLM")
    path = export_onnx(model, tmp_path / "model.onnx", verify=True)
    assert [value.name for value in onnxruntime.InferenceSession(path).get_outputs()] == ["logits"]
    assert model.config.use_cache is True


@pytest.mark.parametrize(
    ("change", "arguments", "message"),
    [
        (lambda model: model.train(), {}, r"model.eval\(\)"),
        (lambda model: model.config.__dict__.update(_output_attentions=True), {}, "output_attentions = False"),
        (lambda model: model.bfloat16(), {}, r"model.float\(\)"),
        (lambda model: None, {"opset_version": 23}, "18 to 22"),
        (lambda model: None, {"input_names": ["input_ids", "labels"]}, "labels"),
        (lambda model: None, {"input_names": ["attention_mask"]}, "input_names must be input_ids and some of"),
    ],
    ids=["training", "attentions", "bfloat16", "opset", "inputs", "no ids"],
)
def test_what_cannot_be_exported_is_refused(change, arguments, message, tmp_path):
    model = small("linformer-layerwise", "Model")
    model.config._attn_implementation = "sdpa"
    change(model)
    with pytest.raises(ValueError, match=message):
        export_onnx(model, tmp_path / "model.onnx", **arguments)


def rows_to_count(count, seed):
    """Rows of 10 to 32 tokens, padded on the left; the class is whether more of them are odd than even.

    In many rows the counts are about equal, so that a small error can change the predicted class.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 11, (count, 32), generator=generator)
    lengths = torch.randint(10, 33, (count, 1), generator=generator)
    mask = (torch.arange(32) >= 32 - lengths).long()
    odd = ((ids % 2) * mask).sum(dim=1)
    return {"input_ids": ids, "attention_mask": mask}, (2 * odd > lengths.squeeze(1)).long()


@pytest.mark.parametrize("option", FAMILIES)
@pytest.mark.slow
def test_int8_accuracy_is_within_two_points_of_float32(option, tmp_path):
    model = small(option, "ForSequenceClassification", num_labels=2).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(3 if parameter.dim() > 1 else 1)  # back to the size for training
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3)
    inputs, labels = rows_to_count(60 * 32, seed=0)
    for step in range(60):
        batch = slice(32 * step, 32 * step + 32)
        loss = model(**{name: tensor[batch] for name, tensor in inputs.items()}, labels=labels[batch]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    path, quantized_path = tmp_path / "model.onnx", tmp_path / "model_quantized.onnx"
    export_onnx(model.eval(), path)
    quantize_dynamic(path, quantized_path, per_channel=True, reduce_range=True)  # the README's call
    # The graph itself is a large part of the file.
    assert os.path.getsize(quantized_path) < 0.75 * os.path.getsize(path)

    inputs, labels = rows_to_count(1000, seed=1)
    with torch.no_grad():
        expected = model(**inputs).logits
    exact, quantized = run(path, inputs), run(quantized_path, inputs)
    assert relative_error(exact, expected) < 1e-5
    accuracy, int8_accuracy = ((logits.argmax(-1) == labels).float().mean().item() for logits in (exact, quantized))
    assert accuracy > 0.85  # a constant prediction has an accuracy of about 0.5
    assert abs(int8_accuracy - accuracy) <= 0.02
    assert relative_error(quantized, expected) < 0.1
