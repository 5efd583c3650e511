# SPDX-License-Identifier: Apache-2.0
"""Checkpoints move both ways between this package and Transformers' own Nyströmformer."""

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM
from transformers.models.nystromformer import NystromformerConfig as BuiltInConfig

import nystrom_models
from tests.models.options import SHARED_HEADS, TINY, relative_error

# As published: the two values are equal, so the built-in class computes exact attention.
PUBLISHED = TINY | {"max_position_embeddings": 62, "num_landmarks": 64, "segment_means_seq_len": 64}


def first(outputs):
    return outputs[0]


def built_in(head, **fields):
    return getattr(transformers, "Nystromformer" + head)(
        BuiltInConfig(**PUBLISHED | {"conv_kernel_size": 5} | fields)
    ).eval()


@pytest.mark.parametrize("head", SHARED_HEADS)
@torch.no_grad()
def test_weights_and_results_move_both_ways(head, tmp_path):
    theirs = built_in(head)
    shape = (2, 3, 40) if head == "ForMultipleChoice" else (2, 40)
    ids = torch.randint(3, 99, shape)
    expected = first(theirs(ids))

    theirs.save_pretrained(tmp_path / "theirs")
    options = {"add_pooling_layer": False} if head == "Model" else {}
    auto = getattr(transformers, "AutoModel" + head.removeprefix("Model"))
    ours, report = auto.from_pretrained(tmp_path / "theirs", output_loading_info=True, **options)
    assert type(ours) is getattr(nystrom_models, "Nystromformer" + head)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert relative_error(first(ours.eval()(ids)), expected) < 1e-5

    ours.save_pretrained(tmp_path / "ours")
    back, report = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert relative_error(first(back.eval()(ids)), expected) < 1e-6


@torch.no_grad()
def test_padding_agrees_where_the_built_in_does_not_leak():
    """Without its convolution, through which padding leaks, the built-in class masks padding on the right."""
    theirs = built_in("ForMaskedLM")
    config = nystrom_models.NystromformerConfig(**PUBLISHED | {"conv_kernel_size": None})
    ours = nystrom_models.NystromformerForMaskedLM(config).eval()
    for layer in theirs.nystromformer.encoder.layer:
        layer.attention.self.conv.weight.zero_()
    ours.load_state_dict({name: weight for name, weight in theirs.state_dict().items() if "conv" not in name})
    ids, mask = torch.randint(3, 99, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    mask[0, 25:] = 0
    actual, expected = (model(ids, attention_mask=mask).logits[mask.bool()] for model in (ours, theirs))
    assert relative_error(actual, expected) < 1e-5


@torch.no_grad()
def test_nystrom_agrees_where_the_built_in_runs_it():
    """With one head and one row, the built-in pseudo-inverse starts from the matrix's own norm, as in the paper."""
    fields = {"num_attention_heads": 1, "num_landmarks": 8, "segment_means_seq_len": 56}
    theirs = built_in("Model", **fields)
    config = nystrom_models.NystromformerConfig(**PUBLISHED | {"conv_kernel_size": 5} | fields)
    ours = nystrom_models.NystromformerModel(config, add_pooling_layer=False).eval()
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(3, 99, (1, 56))
    assert relative_error(ours(ids).last_hidden_state, theirs(ids).last_hidden_state) < 1e-5


@torch.no_grad()
def test_a_published_configuration_is_linear_here_and_exact_on_request(tmp_path):
    """Above 64 tokens, the published values give Nyström attention here; `None` gives the built-in's outputs."""
    theirs = built_in("ForMaskedLM", max_position_embeddings=120)
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(3, 99, (1, 120))
    exact = AutoModelForMaskedLM.from_pretrained(tmp_path, num_landmarks=None).eval()
    assert relative_error(exact(ids).logits, theirs(ids).logits) < 1e-5
    nystrom = AutoModelForMaskedLM.from_pretrained(tmp_path).eval()
    assert not torch.allclose(nystrom(ids).logits, exact(ids).logits, atol=1e-6)


@pytest.mark.parametrize("fields", [{}, {"num_hidden_layers": 3}], ids=str)
def test_constants_in_old_checkpoints_are_ignored(fields, tmp_path):
    """Transformers saved the positions with the weights until version 4.30."""
    model = built_in("ForMaskedLM")
    constants = {
        "nystromformer.embeddings.position_ids": torch.arange(2, 66)[None],
        "nystromformer.embeddings.token_type_ids": torch.zeros(1, 64, dtype=torch.long),
    }
    model.save_pretrained(tmp_path, state_dict=model.state_dict() | constants)
    for auto_class in (AutoModel, AutoModelForMaskedLM):
        _, report = auto_class.from_pretrained(tmp_path, output_loading_info=True, **fields)
        assert not [name for name in report["unexpected_keys"] if name.endswith("_ids")]


def test_every_auto_class_of_the_built_in_gives_ours():
    config = AutoConfig.for_model("nystromformer", **TINY)
    assert type(config) is nystrom_models.NystromformerConfig
    found = 0
    # Only this name is looked up: Transformers imports a class when its name is looked up, and some need other
    # packages.
    for name in [name for name in dir(transformers) if name.startswith("AutoModel")]:
        mapping = getattr(getattr(transformers, name), "_model_mapping", None)
        if mapping is not None and BuiltInConfig in mapping:
            model = getattr(transformers, name).from_config(config)
            assert type(model).__module__.startswith("nystrom_models."), name
            found += 1
    assert found >= 7


def test_fields_are_written_back(tmp_path):
    fields = {"num_landmarks": 32, "segment_means_seq_len": 128, "inv_coeff_init_option": True, "conv_kernel_size": 33}
    nystrom_models.NystromformerConfig(**fields).save_pretrained(tmp_path)
    theirs = BuiltInConfig.from_pretrained(tmp_path)
    assert {name: getattr(theirs, name) for name in fields} == fields
    defaults = BuiltInConfig().to_dict()
    ours = nystrom_models.NystromformerConfig().to_dict()
    assert {name: ours.get(name) for name in defaults} == defaults
