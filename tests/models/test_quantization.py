# SPDX-License-Identifier: Apache-2.0
"""Weights quantized by torchao and bitsandbytes, in every family, and LoRA on top of them."""

import pytest

from tests.models import apart
from tests.models.options import OPTIONS

ONE_OF_A_FAMILY = ("nystromformer-landmarks", "linformer-layerwise", "linear-elu")

TORCHAO = """
import torch
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from tests.models.options import OPTIONS, make_model, padded_inputs, relative_error, result

for option in OPTIONS:
    torch.manual_seed(0)
    model = make_model(option, "ForSequenceClassification")
    inputs = padded_inputs("ForSequenceClassification")
    exact = result(model, inputs)
    quantize_(model, Int8WeightOnlyConfig(version=2))
    assert type(model.classifier.out_proj.weight.data) is not torch.Tensor
    with torch.no_grad():
        assert 1e-6 < relative_error(result(model, inputs), exact) < 0.2, option
"""

# As Transformers' guide loads a model; it is saved with its small weights, and loaded again. In 4 bits, the result is
# that of the weights that the 4 bits stand for; in 8 bits, activations are rounded, too.
BITSANDBYTES = """
import bitsandbytes, sys, torch
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig
from tests.models.options import make_model, padded_inputs, relative_error, result

LAYERS = {
    "int8": (bitsandbytes.nn.Linear8bitLt, BitsAndBytesConfig(load_in_8bit=True)),
    "nf4": (bitsandbytes.nn.Linear4bit, BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")),
}
on_cpu = {"device_map": "cpu", "dtype": torch.float32}
for option in sys.argv[1:]:
    torch.manual_seed(0)
    model = make_model(option, "ForSequenceClassification")
    inputs = padded_inputs("ForSequenceClassification")
    exact = result(model, inputs)
    model.save_pretrained("exact")
    for name, (layer, settings) in LAYERS.items():
        load = AutoModelForSequenceClassification.from_pretrained
        quantized = load("exact", quantization_config=settings, **on_cpu)
        for path, module in quantized.named_modules():
            if isinstance(module, torch.nn.Linear):
                assert isinstance(module, layer), path
                if name == "nf4":
                    weight = module.weight
                    meant = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
                    model.get_submodule(path).weight.data = meant.to(torch.float32)
        computed = result(quantized, inputs)
        if name == "nf4":
            assert relative_error(computed, result(model, inputs)) < 1e-5, option
        assert 1e-6 < relative_error(computed, exact) < {"int8": 0.09, "nf4": 1}[name], option
        quantized.save_pretrained(name)
        assert torch.equal(result(load(name, **on_cpu), inputs), computed), option
"""

# A new head on a pretrained model, as in docs/libraries.md; the adapters are saved, and loaded on the model in 4 bits.
# Without gradients, on processors with bfloat16 in AVX-512, bitsandbytes (0.50) multiplies by weights in 4 bits
# directly, which needs layers of a multiple of 64 inputs.
QLORA = """
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForSequenceClassification, BitsAndBytesConfig
from tests.models.options import make_model, padded_inputs

settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", llm_int8_skip_modules=["classifier"])
for option in ("nystromformer-landmarks", "linformer-layerwise", "linear-elu"):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128}
    make_model(option, "ForPreTraining", **sizes).save_pretrained("pretrained")
    options = {"quantization_config": settings, "device_map": "cpu", "dtype": torch.float32}
    base = AutoModelForSequenceClassification.from_pretrained("pretrained", **options)
    targets = ["query", "key", "value", "dense"]
    lora = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=targets)
    model = get_peft_model(prepare_model_for_kbit_training(base), lora)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    inputs = padded_inputs("ForSequenceClassification", labels=True)
    losses = []
    for _ in range(8):
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, (option, losses)
    model.eval()
    model.save_pretrained("adapters")
    base = AutoModelForSequenceClassification.from_pretrained("pretrained", **options)
    again = PeftModel.from_pretrained(base, "adapters").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, model(**inputs).logits)
"""


def test_torchao(tmp_path):
    apart.run(TORCHAO, tmp_path)


@pytest.mark.parametrize("options", [ONE_OF_A_FAMILY, pytest.param(tuple(OPTIONS), marks=pytest.mark.slow)], ids=len)
def test_bitsandbytes(options, tmp_path):
    apart.run(BITSANDBYTES, tmp_path, *options)


def test_qlora(tmp_path):
    apart.run(QLORA, tmp_path)
