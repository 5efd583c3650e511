# SPDX-License-Identifier: Apache-2.0
"""Visitors get what the model computes: maps agree with `output_attentions`. Afterwards the model is unchanged."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BartConfig,
    BartModel,
    GPT2Config,
    GPT2Model,
    ViTConfig,
    ViTModel,
)

from nystrom_models.analysis import visit_attention
from nystrom_models.analysis.measures import exact_map, nystrom_map
from nystrom_models.analysis.substitution import key_mask
from tests.analysis.models import make_model, padded_batch
from tests.models.options import LINEAR_TRANSFORMER, LINFORMER

LENGTHS = (37, 23)


def shown(model, inputs):
    layers = []
    return layers, visit_attention(model, inputs, layers.append)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("family", ["Bert", "Roberta", "DistilBert", "Albert", "Esm"])
def test_maps_of_transformers_models_are_those_that_they_return(family, side):
    model, inputs = make_model(family), padded_batch(LENGTHS, side)
    before = model(**inputs).last_hidden_state
    layers, skipped = shown(model, inputs)
    assert len(layers) == 2 and not skipped
    assert model.config._attn_implementation == "sdpa" and not model.training
    assert not any("analysis" in name for name in (*AttentionInterface(), *AttentionMaskInterface()))
    torch.testing.assert_close(model(**inputs).last_hidden_state, before)
    model.set_attn_implementation("eager")
    maps = model(**inputs, output_attentions=True).attentions
    for layer, wanted in zip(layers, maps, strict=True):
        for row in range(2):
            mask = inputs["attention_mask"][row].bool()
            assert layer.mask is None or layer.mask[row].tolist() == mask.tolist()
            found = exact_map(layer.query[row][:, mask], layer.key[row][:, mask], layer.scaling)
            torch.testing.assert_close(found, wanted[row][:, mask][:, :, mask], rtol=1e-4, atol=1e-5)


def test_layers_with_local_windows_are_left_out_by_name():
    layers, skipped = shown(make_model("ModernBert"), padded_batch(LENGTHS))
    assert [layer.name for layer in layers] == ["layers.0.attn"]
    assert skipped == {"layers.1.attn": "it sees a local window, which is linear already"}


def test_images_are_shown_too():
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32)
    layers, skipped = shown(ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)})
    assert [layer.query.shape for layer in layers] == [(2, 4, 5, 8)] * 2 and not skipped


def test_decoders_and_what_they_see_of_the_encoder_are_left_out():
    """The model has its own implementation of attention again, whichever it was."""
    parts = {f"{side}_{name}": 16 for side in ("encoder", "decoder") for name in ("ffn_dim", "attention_heads")}
    layers = {"encoder_layers": 1, "decoder_layers": 1}
    model = BartModel(BartConfig(vocab_size=99, d_model=16, max_position_embeddings=64, **parts, **layers))
    model.set_attn_implementation("eager")
    ids = torch.randint(3, 99, (1, 12))
    found, skipped = shown(model, {"input_ids": ids, "decoder_input_ids": ids[:, :5]})
    assert [layer.name for layer in found] == ["encoder.layers.0.self_attn"]
    assert skipped == {
        "decoder.layers.0.self_attn": "it is causal",
        "decoder.layers.0.encoder_attn": "it attends to other tokens than its own (cross-attention)",
    }
    assert model.config._attn_implementation == "eager"


def test_causal_attention_is_refused():
    model = GPT2Model(GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4))
    with pytest.raises(ValueError, match=r"GPT2Model can be inspected: .*it is causal"):
        shown(model, {"input_ids": torch.randint(99, (1, 9))})


@pytest.mark.parametrize(
    ("mask", "options", "found"),
    [
        (None, {"is_causal": False}, (None, None)),
        (torch.tensor([0.0, 0.0, -10_000.0]).expand(1, 1, 3, 3), {}, ([[True, True, False]], None)),
        (torch.tensor([0.0, -0.5, -10_000.0]).expand(1, 1, 3, 3), {}, (None, "a bias is added to its scores")),
        (torch.ones(1, 1, 3, 3).tril().bool(), {}, (None, "its mask differs between tokens or heads")),
        (None, {"is_causal": True}, (None, "it is causal")),
        (None, {"is_causal": False, "softcap": 5.0}, (None, "it is given softcap, a cap on the scores")),
    ],
    ids=["none", "added", "bias", "pairs", "causal", "softcap"],
)
def test_masks_that_are_not_of_keys_are_told_apart(mask, options, found):
    states = torch.randn(1, 2, 3, 4)
    keys, reason = key_mask(torch.nn.Identity(), states, states, mask, options)
    assert (None if keys is None else keys.tolist(), reason) == found


def test_a_visitor_that_fails_leaves_the_model_as_it_was():
    def fail(layer):
        raise KeyError(layer.name)

    for family, fields in (("Bert", {}), ("Linformer", {"projected_dim": 8})):
        model = make_model(family, **fields).train()
        with pytest.raises(KeyError):
            visit_attention(model, padded_batch(LENGTHS), fail)
        assert model.training and model.config._attn_implementation == "sdpa"
        assert getattr(model.config, "unpad_inputs", True)
        assert not any(module._forward_pre_hooks for module in model.modules())
        assert not any("analysis" in name for name in AttentionInterface())


OWN = {f"linformer-{name}": ("Linformer", {"projected_dim": 8} | fields) for name, fields in LINFORMER.items()}
OWN |= {f"linear-{name}": ("LinearTransformer", fields) for name, fields in LINEAR_TRANSFORMER.items()}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("family", "fields"), OWN.values(), ids=OWN)
def test_own_attention_is_what_the_layer_computes(family, fields, side):
    model, inputs = make_model(family, **fields), padded_batch(LENGTHS, side)
    found = []

    def visit(layer):
        # An encoder with softmax attention is measured with landmarks, like a model of Transformers.
        is_control = fields.get("feature_map", "") is None and not model.config.is_decoder
        assert (layer.own is None) == is_control == (layer.method == "softmax")
        if not is_control:
            found.append((layer, *layer.own(torch.arange(20))))

    visit_attention(model, inputs, visit)
    outputs = model(**inputs, output_attentions=True)
    for (layer, own_map, output), wanted in zip(found, outputs.attentions, strict=bool(found)):
        assert layer.is_causal == model.config.is_decoder
        for row in range(2):
            mask = inputs["attention_mask"][row].bool()
            number = int(mask.sum())
            by_rank = wanted[row][:, mask][:, :20, mask]
            torch.testing.assert_close(own_map[row, :, :, :number], by_rank, rtol=1e-4, atol=1e-5)
            assert not own_map[row, :, :, number:].any()
            if family == "LinearTransformer":
                value = layer.value[row, :, :number]
                torch.testing.assert_close(output[row], by_rank @ value, rtol=1e-3, atol=1e-4)


def test_a_linformers_output_has_its_bias_after_the_projection():
    model, inputs = make_model("Linformer", projected_dim=8, conv_kernel_size=5), padded_batch([23])
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.value.bias.normal_()
    found = []
    visit_attention(model, inputs, lambda layer: found.append((layer, *layer.own(torch.arange(23)))))
    for (layer, own_map, output), module in zip(found, model.encoder.layer, strict=True):
        bias = module.attention.self.value.bias.view(4, 1, 8)
        torch.testing.assert_close(output[0], own_map[0] @ (layer.value[0] - bias) + bias, rtol=1e-4, atol=1e-4)


def test_a_large_convolution_leaves_no_rounding_errors_in_the_output_without_it():
    model, inputs = make_model("LinearTransformer", conv_kernel_size=5), padded_batch([23])
    modules = [layer.attention.self for layer in model.encoder.layer]
    convolutions = [module.conv for module in modules]
    with torch.no_grad():
        for convolution in convolutions:
            convolution.weight.mul_(1e5)
    found = []
    visit_attention(model, inputs, lambda layer: found.append((layer, *layer.own(torch.arange(23)))))
    for layer, own_map, output in found:
        torch.testing.assert_close(output, own_map @ layer.value, rtol=1e-3, atol=1e-5)
    assert [module.conv for module in modules] == convolutions


@pytest.mark.parametrize("side", ["right", "left"])
def test_a_nystromformers_map_is_that_of_the_measure(side):
    model, inputs = make_model("Nystromformer", num_landmarks=8), padded_batch(LENGTHS, side)
    layers, _ = shown(model, inputs)
    maps = model(**inputs, output_attentions=True).attentions
    for layer, wanted in zip(layers, maps, strict=True):
        assert layer.method == "nystrom" and layer.own is None
        for row, number in enumerate(LENGTHS):
            mask = inputs["attention_mask"][row].bool()
            found = nystrom_map(layer.query[row, :, :number], layer.key[row, :, :number], 8, 6, layer.scaling)
            torch.testing.assert_close(found, wanted[row][:, mask][:, :, mask], rtol=1e-3, atol=1e-4)
