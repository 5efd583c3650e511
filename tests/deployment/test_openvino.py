# SPDX-License-Identifier: Apache-2.0
"""OpenVINO converts the models as it converts those of Transformers, by a trace, for all shapes and masks. That it
reads their ONNX files is in test_onnx.py."""

import openvino
import pytest
import torch

from tests.deployment.in_openvino import check_logits, draw_inputs
from tests.models.options import language_model

CONVERTED = (
    "nystromformer-landmarks",
    *(
        pytest.param(option, marks=pytest.mark.slow)
        for option in ("linear-causal", "linformer-headwise", "linformer-conv", "linear-hedgehog")
    ),
)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("option", CONVERTED)
@torch.no_grad()
def test_the_same_logits_at_any_shape_and_mask(option):
    model = language_model(option, num_hidden_layers=1)
    model.config.use_cache = False
    check_logits(openvino.convert_model(model, example_input=draw_inputs(2, 40)), model)
