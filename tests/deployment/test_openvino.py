# SPDX-License-Identifier: Apache-2.0
"""OpenVINO converts the models as it converts those of Transformers, by a trace, for all shapes and masks. That it
reads their ONNX files is in test_onnx.py."""

import openvino
import pytest
import torch

from tests.models.options import OPTIONS, TOLERANCE, make_model, relative_error

# On processors with bfloat16, OpenVINO computes in it by default.
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}
CONVERTED = (
    "nystromformer-landmarks",
    "linformer-headwise",
    "linformer-conv",
    "linear-hedgehog",
    "linear-causal",
)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("option", CONVERTED)
@torch.no_grad()
def test_the_same_logits_at_any_shape_and_mask(option):
    causal = OPTIONS[option][1].get("is_decoder", False)
    model = make_model(option, "ForCausalLM" if causal else "ForMaskedLM", num_hidden_layers=1)
    model.config.use_cache = False

    def inputs(batch, length):
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[0, (length + 1) // 2 :] = 0
        if batch > 1:
            mask[1, 1:-1:3] = 0
        ids, types = torch.randint(3, 99, (batch, length)), torch.randint(2, (batch, length))
        return {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}

    compiled = openvino.compile_model(openvino.convert_model(model, example_input=inputs(2, 40)), "CPU", FLOAT32)
    for batch, length in ((2, 40), (1, 1), (3, 17), (1, 64), (2, 64)):
        row = inputs(batch, length)
        logits = torch.from_numpy(compiled({name: tensor.numpy() for name, tensor in row.items()})[0])
        valid = row["attention_mask"].bool()
        assert relative_error(logits[valid], model(**row).logits[valid]) < TOLERANCE[torch.float32], (batch, length)
