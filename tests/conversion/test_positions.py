# SPDX-License-Identifier: Apache-2.0
"""Positions for more or fewer tokens than the source takes."""

import pytest
import torch

from nystrom_models.conversion import convert, converted_config
from nystrom_models.conversion.positions import fit_positions
from nystrom_models.models.embeddings import SinusoidalPositions
from tests.conversion.sources import EXACT, LENGTH, save_source
from tests.models.options import make_model, relative_error


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
@torch.no_grad()
def test_positions_are_repeated_or_cut(kind, tmp_path):
    source = save_source(tmp_path, kind, "Model")
    ids = torch.randint(3, 99, (1, 12))
    model = convert(tmp_path, converted_config(tmp_path, max_position_embeddings=93, **EXACT)).base_model
    assert model(torch.randint(3, 99, (1, 93))).last_hidden_state.isfinite().all()
    first = torch.arange(2, 14)[None]
    for shift in (0, LENGTH, 2 * LENGTH):
        assert torch.equal(model(ids, position_ids=first + shift)[0], model(ids)[0])
    assert not torch.allclose(model(ids, position_ids=first + 1)[0], model(ids)[0], atol=1e-3)

    for positions in ("repeat", "interpolate"):
        config = converted_config(tmp_path, max_position_embeddings=12, **EXACT)
        model = convert(tmp_path, config, positions=positions).base_model
        assert relative_error(model(ids)[0], source(ids)[0]) < 1e-6
    with pytest.raises(ValueError, match="max_position_embeddings=12"):
        model(torch.randint(3, 99, (1, 13)))


@torch.no_grad()
def test_interpolated_positions_lie_between_the_sources(tmp_path):
    source = save_source(tmp_path, "Bert", "Model")
    config = converted_config(tmp_path, max_position_embeddings=2 * LENGTH - 1, **EXACT)
    model, report = convert(tmp_path, config, positions="interpolate", return_report=True, compare=False)
    table = model.get_position_embeddings().weight[2:]
    theirs = source.embeddings.position_embeddings.weight
    assert relative_error(table[::2], theirs) < 1e-6
    assert relative_error(table[1::2], (theirs[1:] + theirs[:-1]) / 2) < 1e-6
    how = {origin.name: origin.how for origin in report.origins}
    assert how["embeddings.position_embeddings.weight"] == "40 rows interpolated to 79"
    # The first and the last stay, whatever the length.
    table = torch.randn(7, 5)
    for length in (8, 20, 101):
        made, _ = fit_positions(table, 2, length, "interpolate")
        assert relative_error(made[[0, -1]], table[[2, -1]]) < 1e-6


@torch.no_grad()
def test_sinusoidal_positions_become_a_table(tmp_path):
    source = make_model("linear-hedgehog", position_embedding_type="sinusoidal", max_position_embeddings=None)
    source.save_pretrained(tmp_path)
    config = converted_config(tmp_path, "nystromformer", max_position_embeddings=50)
    model = convert(tmp_path, config)
    expected = SinusoidalPositions(source.config)(torch.arange(50), torch.float32)
    assert relative_error(model.get_position_embeddings().weight[2:], expected) < 1e-6
    # But not the reverse.
    model.save_pretrained(tmp_path / "learned")
    config = converted_config(tmp_path / "learned", "linear_transformer", position_embedding_type="sinusoidal")
    with pytest.raises(ValueError, match='position_embedding_type="learned"'):
        convert(tmp_path / "learned", config)
