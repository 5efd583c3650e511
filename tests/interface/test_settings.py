# SPDX-License-Identifier: Apache-2.0
"""`use_nystrom`: layers and numbers of landmarks, which are saved; and what it refuses."""

import copy
import json

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForSequenceClassification, BertConfig, BertModel

from nystrom_models import NystromformerConfig, NystromformerModel, use_nystrom
from nystrom_models.interface import settings
from tests.interface.models import make, tokens
from tests.models.options import relative_error


def landmarks(model):
    """The settings of each attention module, by its name; None for exact attention."""
    found = {}
    for name, module in settings._attention_modules(model).items():
        assert module.config._attn_implementation == "nystrom"
        setting = settings.settings_of(module)
        found[name] = None if setting is None else setting.num_landmarks
    return found


@torch.no_grad()
@pytest.mark.parametrize("name", ["BERT", "DistilBERT"])  # modules with and without layer_idx
def test_settings_by_layer(name, tmp_path):
    """Other layers stay exact; each layer has its number of landmarks; after saving and loading, the model is the
    same.
    """
    model, ids = make(name), tokens()
    exact = model(ids, output_hidden_states=True).hidden_states
    assert use_nystrom(model, 8, layers=[1]) is model
    assert list(landmarks(model).values()) == [None, 8]
    found = model(ids, output_hidden_states=True).hidden_states
    assert torch.equal(found[1], exact[1]) and relative_error(found[2], exact[2]) > 1e-3

    use_nystrom(model, [8, 64])
    assert list(landmarks(model).values()) == [8, 64]
    assert model.config.nystrom == {"num_landmarks": [8, 64], "pinv_iterations": 6, "layers": None}

    use_nystrom(model, [64, 4], pinv_iterations=3, layers=[1, 0])
    expected = model(ids).last_hidden_state
    assert list(landmarks(model).values()) == [4, 64]
    model.save_pretrained(tmp_path)
    copied = copy.deepcopy(model)
    assert json.loads((tmp_path / "config.json").read_text())["nystrom"]["layers"] == [1, 0]
    loaded = AutoModel.from_pretrained(tmp_path, attn_implementation="nystrom")
    if name == "DistilBERT":
        with pytest.raises(ValueError, match=r"call nystrom_models.use_nystrom\(model\) once after loading"):
            loaded(ids)
        use_nystrom(loaded)
    for same in (loaded, use_nystrom(AutoModel.from_pretrained(tmp_path)), copied):
        assert torch.equal(same(ids).last_hidden_state, expected)
    assert relative_error(AutoModel.from_pretrained(tmp_path)(ids).last_hidden_state, expected) > 1e-3


@torch.no_grad()
def test_the_configuration_says_how_many(tmp_path):
    config = copy.deepcopy(make("BERT").config)
    config.num_landmarks = 8
    config._attn_implementation = "nystrom"
    model = AutoModelForSequenceClassification.from_config(config)
    assert set(landmarks(model).values()) == {8}
    assert set(landmarks(use_nystrom(model)).values()) == {8}
    assert set(landmarks(use_nystrom(model, pinv_iterations=3)).values()) == {8}
    assert set(landmarks(use_nystrom(model, 5)).values()) == {5}
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, attn_implementation="nystrom")
    assert set(landmarks(again).values()) == {5}
    again.config.nystrom, again.config.num_landmarks = None, [3, 7]  # a list as in the report of `inspect`
    assert list(landmarks(again).values()) == [3, 7]
    again.config.num_landmarks = None
    assert set(landmarks(again).values()) == {None}
    plain = AutoModel.from_config(BertConfig(num_hidden_layers=1, attn_implementation="nystrom"))
    assert set(landmarks(plain).values()) == {64}


@torch.no_grad()
def test_a_part_of_the_settings():
    """What is not in the configuration has its default, in a call and in `use_nystrom`."""
    model, ids = make("BERT"), tokens()
    model.config.nystrom = {"num_landmarks": 4}
    model.set_attn_implementation("nystrom")
    expected = model(ids).last_hidden_state
    assert torch.equal(use_nystrom(model)(ids).last_hidden_state, expected)
    assert model.config.nystrom == {"num_landmarks": 4, "pinv_iterations": 6, "layers": None}


@torch.no_grad()
def test_back_to_exact_attention():
    model, ids = make("BERT"), tokens()
    expected = model(ids).last_hidden_state
    use_nystrom(model, 8)
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids).last_hidden_state, expected)


@torch.no_grad()
def test_one_part_of_several(tmp_path):
    """Only a CLIP's vision part, by the function or by name; the text part is unchanged."""
    model = make("CLIP, its vision part")
    inputs = {"input_ids": tokens(), "pixel_values": torch.randn(2, 3, 24, 24)}
    expected = model(**inputs)
    use_nystrom(model.vision_model, 8)
    found = model(**inputs)
    assert torch.equal(found.text_embeds, expected.text_embeds)
    assert relative_error(found.image_embeds, expected.image_embeds) > 1e-3
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation={"vision_config": "nystrom"})
    assert torch.equal(loaded(**inputs).image_embeds, found.image_embeds)
    assert loaded.config.text_config._attn_implementation == "sdpa"


@torch.no_grad()
def test_the_encoder_of_an_encoder_decoder(tmp_path):
    """The decoder, which has the same configuration, is unchanged, and generates."""
    architecture = make("BART, its encoder")
    model = transformers.BartForConditionalGeneration(architecture.config).eval()
    ids = tokens()
    states = model.get_encoder()(ids).last_hidden_state
    decoded = model(encoder_outputs=(states,), decoder_input_ids=ids).logits
    use_nystrom(model.get_encoder(), 8)
    assert relative_error(model.get_encoder()(ids).last_hidden_state, states) > 1e-3
    assert torch.equal(model(encoder_outputs=(states,), decoder_input_ids=ids).logits, decoded)
    generated = model.generate(ids, max_new_tokens=5, do_sample=False)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    use_nystrom(loaded.get_encoder())
    assert torch.equal(loaded.generate(ids, max_new_tokens=5, do_sample=False), generated)
    # Other settings later: the whole model saves the last ones.
    use_nystrom(loaded.get_encoder(), 5)
    loaded.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert set(landmarks(use_nystrom(again.get_encoder())).values()) == {5}


@torch.no_grad()
def test_the_encoder_of_a_model_that_is_composed(tmp_path):
    """Transformers copies the configurations of the parts, and leaves their layers with those from before."""
    decoder = transformers.BertLMHeadModel(
        BertConfig(**make("BERT").config.to_dict() | {"is_decoder": True, "add_cross_attention": True})
    )
    make("BERT").save_pretrained(tmp_path / "encoder")
    decoder.save_pretrained(tmp_path / "decoder")
    parts = str(tmp_path / "encoder"), str(tmp_path / "decoder")
    model = transformers.EncoderDecoderModel.from_encoder_decoder_pretrained(*parts).eval()
    ids = tokens()
    exact = model.encoder(ids).last_hidden_state
    use_nystrom(model.encoder, 8)
    assert set(landmarks(model.encoder).values()) == {8}
    states = model.encoder(ids).last_hidden_state
    assert relative_error(states, exact) > 1e-3
    assert {module.config._attn_implementation for module in model.decoder.modules() if hasattr(module, "config")} == {
        "sdpa"
    }
    model.save_pretrained(tmp_path / "saved")
    loaded = transformers.EncoderDecoderModel.from_pretrained(tmp_path / "saved").eval()
    assert torch.equal(use_nystrom(loaded.encoder)(ids).last_hidden_state, states)


def test_numbers_of_numpy_are_saved(tmp_path):
    model = transformers.BertModel(transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2))
    use_nystrom(model, np.array([8, 16]), np.int64(5), np.arange(2)).save_pretrained(tmp_path)
    field = transformers.AutoConfig.from_pretrained(tmp_path).nystrom
    assert field == {"num_landmarks": [8, 16], "pinv_iterations": 5, "layers": [0, 1]}


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("BERT", {"num_landmarks": 0}, "num_landmarks=0 must be a number of at least 1"),
        ("BERT", {"num_landmarks": 2.5}, "num_landmarks=2.5"),
        ("BERT", {"num_landmarks": True}, "num_landmarks=True must be a number"),
        ("BERT", {"num_landmarks": [8]}, "1 numbers for 2 layers"),
        ("BERT", {"num_landmarks": [8, 8], "layers": [1]}, "2 numbers for 1 layers"),
        ("BERT", {"pinv_iterations": 0}, "pinv_iterations=0"),
        ("BERT", {"layers": [0, 2]}, "has 2, but the 2 layers are 0 to 1"),
        ("BERT", {"layers": [-1]}, r"layers=\[-1\] must be a list of different layer numbers"),
        ("BERT", {"layers": [1, 1]}, "different layer numbers"),
        ("BERT", {"layers": []}, "layer numbers from 0, at least one"),
        ("ALBERT", {"layers": [0]}, "The 2 layers share 1 attention module, so their settings cannot differ"),
        ("SigLIP, both parts", {"layers": [0]}, "this model has several"),
        ("MPNet", {}, "MPNetModel computes its attention itself"),
        (
            "T5 encoder",
            {},
            'SelfAttention.relative_attention_bias of T5EncoderModel is a position bias.*keep attn_impl.*="sdpa"',
        ),
        ("BEiT with relative positions", {}, "layers.0.relative_position_bias of BeitModel is a position bias"),
        ("Swin", {}, "relative_position_bias of SwinModel is a position bias"),
        ("BART, its encoder", {}, "decoder.layers.0.self_attn of BartModel is causal"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_refused(name, arguments, says):
    model = make(name)
    before = model.config.to_dict(), model.config._attn_implementation
    with pytest.raises(ValueError, match=says):
        use_nystrom(model, **arguments)
    assert (model.config.to_dict(), model.config._attn_implementation) == before


@pytest.mark.parametrize(
    ("model_class", "fields", "says"),
    [
        ("Beit", {"use_shared_relative_position_bias": True}, "shared_position_bias of BeitModel"),
        ("LayoutLMv3", {"coordinate_size": 6, "shape_size": 4, "visual_embed": False}, "encoder.rel_pos_bias of"),
        ("Wav2Vec2Bert", {"position_embeddings_type": "relative"}, "self_attn.linear_pos of"),
        ("Wav2Vec2Bert", {"position_embeddings_type": "relative_key"}, "self_attn.distance_embedding of"),
    ],
)
def test_a_position_bias_is_refused_before_it_is_trained(model_class, fields, says):
    """At zero, as it starts in some models, it would only be refused after training."""
    fields = fields | {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = getattr(transformers, f"{model_class}Config")(**fields)
    with pytest.raises(ValueError, match=says):
        use_nystrom(getattr(transformers, f"{model_class}Model")(config))


def test_other_things_are_refused():
    with pytest.raises(ValueError, match=r"not a Linear\.$"):
        use_nystrom(torch.nn.Linear(2, 2))
    config = NystromformerConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32)
    with pytest.raises(ValueError, match="already is linear in the length"):
        use_nystrom(NystromformerModel(config))


def test_a_model_with_an_adapter():
    from peft import LoraConfig, get_peft_model

    config = BertConfig(
        hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32, vocab_size=99
    )
    model = get_peft_model(BertModel(config), LoraConfig(target_modules=["query"], init_lora_weights=False)).eval()
    ids = torch.randint(99, (1, 24))
    with pytest.raises(ValueError, match=r"not a PeftModel: .*, or with model\.get_base_model\(\)\.$"):
        use_nystrom(model)
    exact = model(ids)[0]
    use_nystrom(model.get_base_model(), num_landmarks=4)
    assert not torch.allclose(model(ids)[0], exact, atol=1e-4)
