# SPDX-License-Identifier: Apache-2.0
"""Positions: where they start, and more of them."""

import pytest
import torch

import nystrom_models
from nystrom_models.models.sequence_projection import SequenceProjection
from tests.models.options import TINY, make_model, relative_error

LINEAR = (
    "nystromformer-landmarks",
    "nystromformer-pre_norm",
    "nystromformer-by_layer",
    "linformer-layerwise",
    "linformer-none",
    "linformer-by_head",
    "linear-projected",
    "linear-causal",
)


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
@pytest.mark.parametrize("option", LINEAR)
def test_more_positions_repeat_those_there_are(option, head, tmp_path):
    model = make_model(option, head, max_position_embeddings=40)
    first = model.config.first_position
    ids = torch.randint(3, 99, (2, 40))
    with torch.no_grad():
        before = model(ids)[0]
        model.resize_position_embeddings(100)
        assert relative_error(model(ids)[0], before) < 1e-6
    table = model.get_position_embeddings()
    assert table.num_embeddings == len(table.weight) == first + 100 and model.config.max_position_embeddings == 100
    assert torch.equal(table.weight[first + 40 : first + 80], table.weight[first : first + 40])
    outputs = model(torch.randint(3, 99, (2, 97)))
    outputs[0].sum().backward()
    assert table.weight.grad[first + 90].abs().sum() > 0
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert relative_error(again(ids)[0], before) < 1e-6
        again.resize_position_embeddings(20)
        assert relative_error(again(ids[:, :20])[0], make_shorter(model, ids)) < 1e-6
    with pytest.raises(ValueError, match=r"20\. *|max_position_embeddings=20"):
        again(ids)
    with pytest.raises(ValueError, match="max_position_embeddings=0 must be at least 1"):
        again.resize_position_embeddings(0)
    assert again.config.max_position_embeddings == 20


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linformer-none", "linear-projected"])
def test_what_is_frozen_stays_frozen(option):
    model = make_model(option, max_position_embeddings=40).requires_grad_(False)
    model.resize_position_embeddings(50)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_sinusoids_need_no_table():
    model = make_model("linear-causal_sinusoidal", max_position_embeddings=40)
    ids = torch.randint(3, 99, (2, 40))
    with torch.no_grad():
        before = model(ids).last_hidden_state
        model.resize_position_embeddings(50)
        assert torch.equal(model(ids).last_hidden_state, before)
        assert model(torch.randint(3, 99, (2, 50))).last_hidden_state.shape == (2, 50, 32)


def make_shorter(model, ids):
    return model(ids[:, :20])[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sinusoids_do_not_depend_on_the_default_dtype(dtype):
    positions = make_model("linear-causal_sinusoidal").embeddings.position_embeddings
    places = torch.tensor([0, 512, 513, 1_000_003])
    rates = 10_000 ** (-2 * torch.arange((positions.width + 1) // 2, dtype=torch.float64) / positions.width)
    angles = places[:, None] * rates
    exact = positions.scale * torch.cat([angles.sin(), angles.cos()], dim=-1)[:, : positions.width]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        found = positions(places, dtype)
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == dtype
    # In float32, the angle of the last place would be known only to a tenth.
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 8e-3}[dtype]
    assert relative_error(found, exact) < tolerance


@pytest.mark.parametrize(
    ("family", "fields", "std"),
    [
        ("Linformer", {"projected_dim": 60}, 300**-0.5),
        ("Linformer", {"projected_dim": [60, 40], "share_projection": "none"}, None),
        ("Linformer", {"projected_dim": [[60, 60, 20, 20]] * 2, "share_projection": "none"}, None),
        ("Linformer", {"projected_dim": 2, "projection_type": "conv", "share_projection": "none"}, 120**-0.5),
        ("LinearTransformer", {"projected_dim": 60}, 300**-0.5),
    ],
    ids=["linear", "by layer", "by head", "conv", "positive"],
)
def test_projections_start_at_their_size(family, fields, std):
    """As in the authors' code: a variance of 1 / (slots + tokens). Those of features are not negative."""
    config = getattr(nystrom_models, family + "Config")(**TINY, max_position_embeddings=240, **fields)
    model = getattr(nystrom_models, family + "Model")(config)
    found = [module for module in model.modules() if isinstance(module, SequenceProjection)]
    assert found
    for module in found:
        parts = [module.weight] if module.slots_of_heads is None else module.weight.split(module.slots_of_heads)
        for weight in parts:
            expected = (weight.shape[-2] + 240) ** -0.5 if std is None else std
            size = weight.square().mean().sqrt().item()
            assert size == pytest.approx(expected, rel=0.1)
            assert (weight.min() >= 0) == (family == "LinearTransformer")


@pytest.mark.parametrize("option", ["linformer-mean_pool", "linformer-conv"])
def test_slots_do_not_change_with_the_length_without_a_word(option):
    with pytest.raises(ValueError, match=r"projection_type=.*make a new model"):
        make_model(option).resize_position_embeddings(100)
