# SPDX-License-Identifier: Apache-2.0
"""Modules with parameters are called, not read directly: hooks, adapters, offload and quantization depend on it."""

import copy

import pytest
import torch
from torch import nn

from tests.models.options import HEADS, OPTIONS, TOLERANCE, make_model, padded_inputs, relative_error, result


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_module_with_parameters_is_called(option, head):
    model = make_model(option, head)
    called = set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda module, inputs, output, name=name: called.add(name))
    model(**padded_inputs(head, labels=True))
    holders = {name for name, module in model.named_modules() if next(module.parameters(), None) is not None}
    # Containers of modules are not called.
    assert holders - called == {name for name in holders if isinstance(model.get_submodule(name), nn.ModuleList)}


@pytest.mark.parametrize("option", OPTIONS)
def test_adapters_on_any_linear_layer_are_trained(option):
    from peft import LoraConfig, get_peft_model

    model = make_model(option, "ForPreTraining")
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=2, target_modules=layers))
    inputs = padded_inputs("ForPreTraining", labels=True)
    assert relative_error(result(adapted, inputs), result(model, inputs)) < TOLERANCE[torch.float32]
    adapted(**inputs).loss.backward()
    gradients = {name: parameter.grad for name, parameter in adapted.named_parameters() if "lora_B" in name}
    assert len(gradients) == len(layers)
    for name, gradient in gradients.items():
        assert gradient is not None and gradient.abs().sum() > 0, name


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linformer-headwise"])
def test_adapters_on_the_convolution_do_not_see_padding(option):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_model(option), LoraConfig(r=4, target_modules=["conv"])).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    inputs = padded_inputs()
    states = model(**inputs).last_hidden_state
    alone = model(inputs["input_ids"][1:2, 11:]).last_hidden_state
    assert relative_error(states[1:2, 11:], alone) < TOLERANCE[torch.float32]


def test_adapters_on_the_convolution_of_one_head():
    from peft import LoraConfig, get_peft_model

    model = make_model("nystromformer-landmarks", num_attention_heads=1)
    lora = LoraConfig(r=2, target_modules=["conv"], init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(model), lora).eval()
    inputs = padded_inputs()
    states = adapted(**inputs).last_hidden_state
    assert not torch.allclose(states, model(**inputs).last_hidden_state, atol=1e-3)
    merged = adapted.merge_and_unload()
    assert relative_error(merged(**inputs).last_hidden_state, states) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("where", ["cpu", "disk"])
@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_offloaded_weights_give_the_same_numbers(option, where, tmp_path):
    from accelerate import cpu_offload, disk_offload

    model = make_model(option, "ForPreTraining")
    inputs = padded_inputs("ForPreTraining", labels=True)
    expected = result(model, inputs)
    if where == "cpu":
        cpu_offload(model, torch.device("cpu"))
    else:
        disk_offload(model, str(tmp_path), torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    assert torch.equal(result(model, inputs), expected)


class PackedLinear(nn.Linear):
    """As in bitsandbytes: the weight is bytes of another shape, which only the layer can read."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        scale = linear.weight.detach().abs().max() / 127
        packed = (linear.weight.detach() / scale).round().to(torch.int8).flatten().view(-1, 1)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = linear.bias
        self.scale = scale

    def forward(self, states):
        weight = self.weight.view(self.out_features, self.in_features).to(states.dtype) * self.scale
        return nn.functional.linear(states, weight, self.bias)


def replace_linear(module, make):
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, make(child))
        else:
            replace_linear(child, make)


@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_quantized_layers(option):
    """Dynamic int8 of torch.ao, and packed weights: close to the exact result, but not equal."""
    model = make_model(option, "ForSequenceClassification")
    inputs = padded_inputs("ForSequenceClassification")
    exact = result(model, inputs)
    dynamic = torch.ao.quantization.quantize_dynamic(copy.deepcopy(model), {nn.Linear}, dtype=torch.qint8)
    packed = copy.deepcopy(model)
    replace_linear(packed, PackedLinear)
    for quantized in (dynamic, packed):
        assert 1e-6 < relative_error(result(quantized, inputs), exact) < 0.2
