# SPDX-License-Identifier: Apache-2.0
"""Models on a CUDA device, as users run them there: they compute what they compute on a CPU."""

import copy

import pytest
import torch
from transformers import AutoModelForMaskedLM, BertConfig, BertModel, pipeline

import nystrom_models
from nystrom_models.interface import use_nystrom
from tests.models.conftest import WORDS
from tests.models.options import (
    NYSTROM,
    OPTIONS,
    TINY,
    language_model,
    make_model,
    padded_inputs,
    relative_error,
)

pytestmark = pytest.mark.gpu

FAMILIES = ("nystromformer-landmarks", "linformer-layerwise", "linear-elu", "linear-causal")
HALVES = [torch.bfloat16, torch.float16]


def on_gpu(inputs):
    return {name: tensor.cuda() for name, tensor in inputs.items()}


def step(model, inputs):
    """Loss, logits of valid tokens and gradients of a training step, on the CPU."""
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    valid = inputs["attention_mask"].bool()
    found = {"loss": output.loss.detach(), "logits": output.logits[valid].detach()}
    found |= {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    # Copies: `model.cuda()` moves gradients in place.
    return {name: tensor.to("cpu", torch.float32, copy=True) for name, tensor in found.items()}


def compare(ours, expected, of_outputs, of_gradients):
    assert ours.keys() == expected.keys()
    # Gradients that are small beside others, as of biases of keys, are rounding errors.
    largest = max(tensor.abs().max() for name, tensor in expected.items() if name not in ("loss", "logits"))
    for name, tensor in expected.items():
        if name in ("loss", "logits"):
            assert relative_error(ours[name], tensor) < of_outputs, name
        else:
            difference = (ours[name] - tensor).abs().max() / max(tensor.abs().max(), 1e-3 * largest)
            assert difference < of_gradients, name


@pytest.mark.parametrize("option", OPTIONS)
def test_a_training_step_is_that_of_a_cpu(option):
    model, inputs = language_model(option), padded_inputs("ForMaskedLM", labels=True)
    inputs["labels"][inputs["attention_mask"] == 0] = -100
    expected = step(model, inputs)
    compare(step(model.cuda(), on_gpu(inputs)), expected, 1e-4, 1e-3)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("autocast", [False, True], ids=["weights", "autocast"])
@pytest.mark.parametrize("option", FAMILIES)
def test_a_step_in_half_precision(option, autocast, dtype):
    model, inputs = language_model(option), padded_inputs("ForMaskedLM", labels=True)
    inputs["labels"][inputs["attention_mask"] == 0] = -100
    expected = step(model, inputs)
    model = model.cuda() if autocast else model.to("cuda", dtype)
    with torch.autocast("cuda", dtype, enabled=autocast):
        found = step(model, on_gpu(inputs))
    compare(found, expected, 0.1, 0.3)


@pytest.mark.parametrize("option", FAMILIES)
def test_gradient_checkpointing_changes_nothing(option):
    inputs = on_gpu(padded_inputs("ForMaskedLM", labels=True))
    dropout = {"hidden_dropout_prob": 0.1}
    if "linear-" not in option:
        dropout["attention_probs_dropout_prob"] = 0.1
    model = language_model(option, **dropout).cuda().train()
    results = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        results.append(step(model, inputs))
    compare(*results, 1e-5, 1e-4)


@pytest.mark.parametrize("dynamic", [None, True], ids=["lengths", "dynamic"])
@pytest.mark.parametrize("option", FAMILIES)
def test_a_compiled_model_trains_at_several_lengths(option, dynamic):
    model = language_model(option).cuda()
    compiled = torch.compile(model, dynamic=dynamic)
    for length in (40, 56, 64):
        inputs = on_gpu(padded_inputs("ForMaskedLM", labels=True, length=length))
        expected = step(model, inputs)
        found = {name.removeprefix("_orig_mod."): tensor for name, tensor in step(compiled, inputs).items()}
        compare(found, expected, 1e-4, 1e-3)


@pytest.mark.parametrize("option", [name for name in FAMILIES if name != "linear-causal"])
def test_a_pipeline_in_bfloat16_fills_masks(option, tmp_path, tokenizer):
    make_model(option, "ForMaskedLM", vocab_size=len(tokenizer), pad_token_id=0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    texts = [" ".join([*(WORDS[index % len(WORDS)] for index in range(length)), "<mask>"]) for length in (1, 20, 58)]
    on_cpu = pipeline("fill-mask", model=str(tmp_path), device="cpu")(texts)
    on_device = pipeline("fill-mask", model=str(tmp_path), device=0, dtype=torch.bfloat16)(texts, batch_size=3)
    for ours, expected in zip(on_device, on_cpu, strict=True):
        assert ours[0]["score"] == pytest.approx(expected[0]["score"], rel=0.1)


@pytest.mark.parametrize("option", ["linear-causal", "linear-causal_sinusoidal"])
def test_it_generates_what_a_cpu_generates(option):
    model = make_model(option, "ForCausalLM")
    inputs = {"input_ids": torch.randint(3, 99, (3, 20)), "attention_mask": torch.ones(3, 20, dtype=torch.long)}
    inputs["attention_mask"][1, :7] = 0
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**inputs, **options)
    assert torch.equal(model.cuda().generate(**on_gpu(inputs), **options).cpu(), expected)
    static = model.generate(**on_gpu(inputs), **options, cache_implementation="static")
    assert torch.equal(static.cpu(), expected)


def test_a_layer_on_the_cpu(tmp_path):
    """`device_map` with a layer that is loaded to the GPU only while it computes."""
    model, inputs = make_model("nystromformer-landmarks", "ForMaskedLM"), padded_inputs()
    model.save_pretrained(tmp_path)
    places = {"nystromformer.embeddings": 0, "nystromformer.encoder.layer.0": 0, "cls": 0}
    places["nystromformer.encoder.layer.1"] = "cpu"
    split = AutoModelForMaskedLM.from_pretrained(tmp_path, device_map=places)
    with torch.no_grad():
        assert relative_error(split(**inputs).logits.cpu(), model(**inputs).logits) < 1e-4


def test_a_bert_with_nystrom_attention():
    config = BertConfig(**TINY | {"max_position_embeddings": 64})
    model, inputs = BertModel(config).eval(), padded_inputs()
    use_nystrom(model, num_landmarks=16)
    with torch.no_grad():
        expected = model(**inputs).last_hidden_state
        found = copy.deepcopy(model).cuda()(**on_gpu(inputs)).last_hidden_state.cpu()
    valid = inputs["attention_mask"].bool()
    assert relative_error(found[valid], expected[valid]) < 1e-4


def test_the_kernels_run_in_models():
    """Those of the family are the default on a GPU, and no first try of them failed."""
    from nystrom_models.kernels import first_try

    for option in [f"nystromformer-{name}" for name in NYSTROM] + ["linear-causal"]:
        model, inputs = language_model(option).cuda(), on_gpu(padded_inputs("ForMaskedLM", labels=True))
        assert model.config._attn_implementation == ("linear" if "linear" in option else "nystrom") + "_triton"
        model(**inputs).loss.backward()
    assert first_try._faults and not any(first_try._faults.values()), first_try._faults


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "training"])
def test_memory_is_linear_in_the_length(backward):
    config = nystrom_models.NystromformerConfig(
        **TINY | {"hidden_size": 128}, num_landmarks=32, max_position_embeddings=16384
    )
    model = nystrom_models.NystromformerForMaskedLM(config).cuda().train(backward)
    peaks = []
    for length in (2048, 16384):
        ids = torch.randint(3, 99, (1, length), device="cuda")
        for _ in range(2):  # the first compiles kernels
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            with torch.set_grad_enabled(backward):
                output = model(ids, labels=ids)
                if backward:
                    output.loss.backward()
            peaks.append(torch.cuda.max_memory_allocated() - start)
            del output
            model.zero_grad()
    assert peaks[3] < 9 * peaks[1]
