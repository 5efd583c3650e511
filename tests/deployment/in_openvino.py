# SPDX-License-Identifier: Apache-2.0
"""Runs a model in OpenVINO, and compares it with PyTorch."""

import openvino
import torch

from tests.models.options import TOLERANCE, relative_error

# On processors with bfloat16, OpenVINO computes in it by default.
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}


def draw_inputs(batch, length):
    """The first row is padded, and the second has holes."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, (length + 1) // 2 :] = 0
    if batch > 1:
        mask[1, 1:-1:3] = 0
    ids, types = torch.randint(3, 99, (batch, length)), torch.randint(2, (batch, length))
    return {"input_ids": ids, "token_type_ids": types, "attention_mask": mask}


def check_logits(source, model):
    """Compares the logits of all shapes. source: a converted model, or the path of an ONNX file."""
    compiled = openvino.compile_model(source, "CPU", FLOAT32)
    for batch, length in ((2, 40), (1, 1), (3, 17), (1, 64), (2, 64)):
        inputs = draw_inputs(batch, length)
        logits = torch.from_numpy(compiled({name: tensor.numpy() for name, tensor in inputs.items()})[0])
        valid = inputs["attention_mask"].bool()
        assert relative_error(logits[valid], model(**inputs).logits[valid]) < TOLERANCE[torch.float32], (batch, length)
