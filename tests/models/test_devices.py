# SPDX-License-Identifier: Apache-2.0
"""Models whose layers are on several devices, which are emulated in a separate process.

Otherwise, PyTorch would know the emulated devices in all later tests.
"""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from unittest import mock

import pytest
import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.hooks import AlignDevicesHook, add_hook_to_module

from nystrom_models.analysis import inspect_attention, inspection
from tests.analysis.models import make_model as inspected_model
from tests.analysis.models import padded_batch
from tests.models.emulated_devices import NAME, emulated_devices, register
from tests.models.options import HEADS, TOLERANCE, make_model, padded_inputs, relative_error, result

FAMILIES = (
    "nystromformer-landmarks",
    "nystromformer-pre_norm",
    "linformer-layerwise",
    "linformer-none",
    "linear-hedgehog",
    "linear-causal",
)


@pytest.fixture(scope="module")
def elsewhere():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), register) as process:
        yield lambda function, *arguments: process.submit(function, *arguments).result(timeout=120)


def blocks_of(model):
    """The names of the parts that a device map assigns: layers and the other modules."""
    splits = (model, model.base_model, model.base_model.encoder, model.base_model.encoder.layer)
    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        if any(parent is split for split in splits) and not any(module is split for split in splits):
            yield name


@torch.no_grad()
def compare_on_two_devices(option, head):
    torch.manual_seed(0)
    model = make_model(option, head)
    inputs = padded_inputs(head, labels=True)
    wanted = {"output_attentions": True, "output_hidden_states": True}
    calls = [{}, wanted, wanted | {"attention_rows": torch.tensor([3, 0])}]
    expected = [result(model, inputs | call) for call in calls]
    # A head with tied weights must be on the device of the embeddings.
    first = ("embeddings", "encoder.layer.0", "encoder.sequence_projection", "cls")
    with emulated_devices() as devices:
        places = {name: devices[0 if name.endswith(first) else 1] for name in blocks_of(model)}
        split = dispatch_model(model, places)
        for given in (devices[0], torch.device("cpu")):
            given_inputs = {name: tensor.to(given) for name, tensor in inputs.items()}
            for call, numbers in zip(calls, expected, strict=True):
                assert relative_error(result(split, given_inputs | call), numbers) < TOLERANCE[torch.float32]


def with_gradients(option):
    """A model, its inputs, and its gradients on the CPU."""
    torch.manual_seed(0)
    model = make_model(option, "ForPreTraining")
    inputs = padded_inputs("ForPreTraining", labels=True)
    model(**inputs).loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return model, inputs, gradients


def assert_same_gradients(model, gradients):
    for name, parameter in model.named_parameters():
        assert parameter.grad.device == parameter.device, name
        if gradients[name].abs().max() > 1e-6:  # that of a key's bias is zero except for rounding
            assert relative_error(parameter.grad.cpu(), gradients[name]) < 4 * TOLERANCE[torch.float32], name


def compare_gradients(option):
    model, inputs, gradients = with_gradients(option)
    with emulated_devices() as (device, _):
        for name in blocks_of(model):
            where = device if name.endswith("encoder.layer.1") else torch.device("cpu")
            add_hook_to_module(model.get_submodule(name).to(where), AlignDevicesHook(where))
        model(**inputs).loss.backward()
        assert_same_gradients(model, gradients)


def train_without_float64(option):
    model, inputs, gradients = with_gradients(option)
    wanted = result(model, inputs)
    with emulated_devices(like_mps=True) as (device, _):
        model.to(device).tie_weights()  # moving makes new parameters here
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        assert relative_error(result(model, inputs), wanted) < TOLERANCE[torch.float32]
        model(**inputs).loss.backward()
        assert_same_gradients(model, gradients)


@torch.no_grad()
def inspect_without_float64(family):
    model, inputs = inspected_model(family), padded_batch((37, 23))
    expected = inspect_attention(model, [inputs], num_landmarks=[8])

    def on_the_cpu(device):
        return torch.device("cpu") if device.type == NAME else device

    with (
        emulated_devices(like_mps=True) as (device, _),
        mock.patch.object(inspection, "measuring_device", on_the_cpu),
    ):
        inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
        found = inspect_attention(model.to(device), [inputs], num_landmarks=[8])
    assert found.settings == expected.settings
    for index, layer in found.layers.items():
        for setting in layer.errors:
            torch.testing.assert_close(found.output_error(index, setting), expected.output_error(index, setting))
        torch.testing.assert_close(layer.spectrum.tails, expected.layers[index].spectrum.tails, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("option", FAMILIES)
def test_a_device_without_float64_such_as_apples_mps(elsewhere, option):
    elsewhere(train_without_float64, option)


@pytest.mark.parametrize("family", ["Nystromformer", "Linformer", "LinearTransformer", "Bert"])
def test_inspection_on_a_device_without_float64(elsewhere, family):
    elsewhere(inspect_without_float64, family)


@pytest.mark.parametrize("option", FAMILIES)
def test_a_device_map_divides_no_layer(option):
    model = make_model(option)
    layers = model.encoder.layer
    size = sum(parameter.numel() * parameter.element_size() for parameter in layers[0].parameters())
    for share in range(1, 12):
        memory = {0: share * size // 4, "cpu": 100 * size}
        places = infer_auto_device_map(model, memory, no_split_module_classes=model._no_split_modules)
        inside = re.compile(r".*(encoder\.layer\.\d+|embeddings)\.")
        assert not [name for name in places if inside.match(name)]


def fail_on_mixed_devices():
    with emulated_devices() as devices:
        torch.ones(2, device=devices[0]) + torch.ones(2)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("option", FAMILIES)
def test_layers_on_two_devices(elsewhere, option, head):
    """With padding and labels, with and without maps, some of their rows and states, and inputs on any device."""
    elsewhere(compare_on_two_devices, option, head)


@pytest.mark.parametrize("option", FAMILIES)
def test_gradients_come_back_from_another_device(elsewhere, option):
    elsewhere(compare_gradients, option)


def test_tensors_of_several_devices_do_not_mix(elsewhere):
    with pytest.raises(RuntimeError, match="expected all tensors on one device"):
        elsewhere(fail_on_mixed_devices)
