# SPDX-License-Identifier: Apache-2.0
"""What importing the package changes in Transformers, what a checkpoint contains of it, and how to undo it."""

import json
import subprocess
import sys

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForMaskedLM

import nystrom_models
from nystrom_models.registration import FAMILIES
from tests.models.options import HEADS, OPTIONS, make_model

UNREGISTER = """
import transformers
import nystrom_models
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
fields = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
model = nystrom_models.NystromformerForMaskedLM(nystrom_models.NystromformerConfig(**fields))
model.save_pretrained("saved")
ours = type(AutoModel.from_pretrained("saved"))
assert ours is nystrom_models.NystromformerModel

nystrom_models.unregister()
config = AutoConfig.for_model("nystromformer", **fields)
assert type(config) is transformers.NystromformerConfig
for name in ("AutoModel", "AutoModelForMaskedLM", "AutoModelForSequenceClassification"):
    assert type(getattr(transformers, name).from_config(config)).__module__.startswith("transformers.models."), name
assert type(AutoModelForMaskedLM.from_pretrained("saved")) is transformers.NystromformerForMaskedLM
try:
    AutoConfig.for_model("linformer")
except ValueError as error:
    assert "linformer" in str(error)
else:
    raise AssertionError("a Linformer is still known")
# Existing models continue to work: Trainer shifts their labels.
assert "LinearTransformerForCausalLM" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
assert nystrom_models.LinformerConfig not in TOKENIZER_MAPPING
again = nystrom_models.NystromformerForMaskedLM.from_pretrained("saved")
again(model.dummy_inputs["input_ids"])
nystrom_models.unregister()

nystrom_models.register()
assert type(AutoModel.from_pretrained("saved")) is ours
assert "linear_transformer" in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
assert nystrom_models.LinformerConfig in TOKENIZER_MAPPING
"""


def test_unregistering_brings_the_built_in_classes_back(tmp_path):
    """In a separate process; existing models continue to work, and both functions may be called twice."""
    result = subprocess.run([sys.executable, "-c", UNREGISTER], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.base_model_prefix)
def test_a_checkpoint_advertises_the_auto_classes_that_give_its_family(family, tmp_path):
    prefix = family.__name__.removesuffix("PreTrainedModel")
    model = getattr(nystrom_models, prefix + "ForMaskedLM")
    option = next(option for option, (name, _) in OPTIONS.items() if name == prefix)
    make_model(option, "ForMaskedLM").save_pretrained(tmp_path)
    advertised = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert advertised.pop("AutoConfig").endswith(f".{prefix}Config")
    for name, reference in advertised.items():
        given = getattr(transformers, name)._model_mapping[family.config_class]
        assert reference == f"modeling_{family.base_model_prefix}.{given.__name__}"
        assert (tmp_path / f"modeling_{family.base_model_prefix}.py").is_file()
    heads = {*HEADS, "ForCausalLM"} if family.config_class.may_be_causal else {*HEADS}
    assert {given.__name__ for given in family.auto_classes.values()} == {prefix + head for head in heads}
    assert model in family.auto_classes.values()


USER_FILE = """
import torch
from nystrom_models import LinformerForMaskedLM


class LinformerWithMore(LinformerForMaskedLM):
    def __init__(self, config):
        super().__init__(config)
        self.more = torch.nn.Linear(config.hidden_size, 1)
        self.post_init()
"""


def test_a_class_in_a_users_own_file_names_no_files_that_are_not_there(tmp_path, monkeypatch):
    """Saved from a model that was loaded from a checkpoint with code, which is still in its configuration."""
    (tmp_path / "users_own_model.py").write_text(USER_FILE)
    monkeypatch.syspath_prepend(tmp_path)
    from users_own_model import LinformerWithMore

    make_model("linformer-layerwise", "ForMaskedLM").save_pretrained(tmp_path / "ours")
    model = LinformerWithMore.from_pretrained(tmp_path / "ours")
    assert "AutoModel" in model.config.auto_map
    model.save_pretrained(tmp_path / "theirs")
    saved = {path.name for path in (tmp_path / "theirs").iterdir()}
    assert "users_own_model.py" not in saved  # nobody has asked for it yet
    for reference in json.loads((tmp_path / "theirs/config.json").read_text()).get("auto_map", {}).values():
        assert reference.split(".")[0] + ".py" in saved, reference
    again, report = LinformerWithMore.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(report.values())
    assert torch.equal(again.more.weight, model.more.weight)
    assert type(AutoModelForMaskedLM.from_pretrained(tmp_path / "theirs")) is nystrom_models.LinformerForMaskedLM

    # A class registered as documented by Transformers is saved with its own file.
    LinformerWithMore.register_for_auto_class("AutoModelForMaskedLM")
    model.save_pretrained(tmp_path / "shared")
    advertised = json.loads((tmp_path / "shared/config.json").read_text())["auto_map"]
    assert advertised["AutoModelForMaskedLM"] == "users_own_model.LinformerWithMore"
    assert (tmp_path / "shared/users_own_model.py").is_file()
    assert AutoConfig.from_pretrained(tmp_path / "shared").model_type == "linformer"


class UntiedNystromformer(nystrom_models.NystromformerForMaskedLM):
    _tied_weights_keys = {}


class GrandchildNystromformer(UntiedNystromformer):
    pass


class UntiedCausal(nystrom_models.LinearTransformerForCausalLM):
    _tied_weights_keys = {}


@pytest.mark.parametrize("model_class", [UntiedNystromformer, GrandchildNystromformer, UntiedCausal])
def test_a_users_class_says_which_weights_are_tied(model_class):
    option = "linear-causal" if model_class is UntiedCausal else "nystromformer-landmarks"
    model = model_class(make_model(option).config)
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    parent = next(base for base in model_class.__mro__ if base.__module__.startswith("nystrom_models"))(model.config)
    assert parent.get_output_embeddings().weight is parent.get_input_embeddings().weight


class UsersConfig(nystrom_models.NystromformerConfig):
    model_type = "users_nystromformer"


class UsersClassifier(nystrom_models.NystromformerForSequenceClassification):
    config_class = UsersConfig


def test_a_users_class_has_a_model_type_of_its_own(tmp_path):
    """As Transformers' guide to custom models asks for."""
    config = UsersConfig(
        **make_model("nystromformer-landmarks").config.to_diff_dict() | {"model_type": "users_nystromformer"}
    )
    model = UsersClassifier(config).eval()
    ids = torch.randint(3, 99, (2, 30))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "users_nystromformer"
    again = UsersClassifier.from_pretrained(tmp_path)
    assert isinstance(again.config, UsersConfig) and torch.equal(again(ids).logits, model(ids).logits)
    with pytest.raises(TypeError, match=r"needs a .*LinformerConfig"):
        nystrom_models.LinformerForSequenceClassification(config)


def test_a_users_class_starts_from_a_checkpoint_of_its_family(tmp_path):
    trained, ids = make_model("nystromformer-landmarks", "ForSequenceClassification"), torch.randint(3, 99, (2, 30))
    trained.save_pretrained(tmp_path / "trained")
    model = UsersClassifier.from_pretrained(tmp_path / "trained")
    assert type(model.config) is UsersConfig and model.config.model_type == UsersConfig.model_type
    assert torch.equal(model(ids).logits, trained(ids).logits)
    model.save_pretrained(tmp_path / "own")
    assert json.loads((tmp_path / "own" / "config.json").read_text())["model_type"] == UsersConfig.model_type
    with pytest.raises(ValueError, match="model_type='linformer'"):
        UsersConfig.from_dict({"model_type": "linformer"})
