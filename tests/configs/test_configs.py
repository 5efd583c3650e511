# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForPreTraining

import nystrom_models

FOLDER = Path(nystrom_models.__file__).parents[2] / "configs"
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.glob("*former/*.json"))


@pytest.mark.parametrize("name", FILES)
def test_configuration_gives_the_model_its_name_says(name):
    config = AutoConfig.from_pretrained(FOLDER / name)
    family, stem = name.removesuffix(".json").split("/")
    size, length, *options = stem.split("-")
    assert type(config).__module__.startswith("nystrom_models.") and config.model_type == family
    assert (config.hidden_size, config.num_hidden_layers) == {"base": (768, 12), "small": (512, 4)}[size]
    # Positions are counted as in the published Nyströmformers (n - 2), or as in the Linformer paper (n).
    assert config.max_position_embeddings in (int(length) - 2, int(length))
    if family == "nystromformer":
        assert config.num_landmarks == (None if options == ["softmax"] else 64)
    else:
        assert config.projected_dim == int(options[0].removeprefix("k"))
        assert config.share_projection == "_".join(options[1:])
    with torch.device("meta"):
        model = AutoModelForPreTraining.from_config(config)
    assert (model.num_parameters() > 100e6) == (size == "base")


def projections(name):
    with torch.device("meta"):
        model = AutoModelForPreTraining.from_config(AutoConfig.from_pretrained(FOLDER / "linformer" / name))
    shapes = [weight.shape for parameter, weight in model.named_parameters() if "projection" in parameter]
    return sum(shape[0] if len(shape) == 3 else 1 for shape in shapes)


def test_sharing_modes_have_the_number_of_projections_of_the_paper():
    """288, 24, 12 and 1 for 12 layers of 12 heads (section 4 of arXiv:2006.04768)."""
    names = [f"base-512-k256-{mode}.json" for mode in ("none", "headwise", "key-value", "layerwise")]
    assert [projections(name) for name in names] == [288, 24, 12, 1]
