# SPDX-License-Identifier: Apache-2.0
"""Positions: where they start, and more of them."""

import pytest
import torch

from tests.models.options import make_model, relative_error

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
    # Angles in float32 are known to 6e-8 of their size: at a million, to a tenth.
    known = slice(None) if dtype == torch.float64 else slice(3)
    assert relative_error(found[known].double(), exact[known]) < {torch.bfloat16: 8e-3}.get(dtype, 5e-5)


@pytest.mark.parametrize("option", ["linformer-mean_pool", "linformer-conv"])
def test_slots_do_not_change_with_the_length_without_a_word(option):
    with pytest.raises(ValueError, match=r"projection_type=.*make a new model"):
        make_model(option).resize_position_embeddings(100)
