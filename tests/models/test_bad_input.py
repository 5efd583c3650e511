# SPDX-License-Identifier: Apache-2.0
"""Wrong input is refused with an error that names what to change."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BatchEncoding, BertConfig, BertModel, DynamicCache, modeling_utils
from transformers.models.nystromformer import NystromformerConfig as BuiltInConfig

import nystrom_models
from nystrom_models import (
    LinearTransformerConfig,
    LinearTransformerForCausalLM,
    LinearTransformerModel,
    LinformerConfig,
    LinformerModel,
    NystromformerConfig,
    NystromformerModel,
)
from nystrom_models.models.layers import TransformerLayer
from nystrom_models.models.recurrent_cache import CACHE
from tests.models.options import language_model, make_model

BAD_FIELDS = {
    "hidden size": (NystromformerConfig, {"hidden_size": 100, "num_attention_heads": 12}, "hidden_size=108"),
    "even convolution": (NystromformerConfig, {"conv_kernel_size": 4}, "conv_kernel_size=4 must be odd.*use 5"),
    "negative convolution": (LinformerConfig, {"conv_kernel_size": -3}, "conv_kernel_size=-3.*use 1"),
    "no landmarks": (NystromformerConfig, {"num_landmarks": 0}, "num_landmarks=0 must be at least 1"),
    "dropout of 10": (
        LinformerConfig,
        {"attention_probs_dropout_prob": 10},
        "attention_probs_dropout_prob=10 must lie",
    ),
    "negative dropout": (
        NystromformerConfig,
        {"classifier_dropout": -0.1},
        "classifier_dropout=-0.1 must lie between 0",
    ),
    "hidden dropout of 2": (LinformerConfig, {"hidden_dropout_prob": 2}, "hidden_dropout_prob=2 must lie between 0"),
    "no iterations": (NystromformerConfig, {"pinv_iterations": 0}, "pinv_iterations=0 must be at least 1"),
    "no heads": (LinformerConfig, {"num_attention_heads": 0}, "num_attention_heads=0 must be at least 1"),
    "no words": (NystromformerConfig, {"vocab_size": 0, "pad_token_id": None}, "vocab_size=0 must be at least 1"),
    "no width": (LinformerConfig, {"hidden_size": 0}, "hidden_size=0 must be at least 1"),
    "no feed-forward": (LinformerConfig, {"intermediate_size": 0}, "intermediate_size=0 must be at least 1"),
    "no token types": (NystromformerConfig, {"type_vocab_size": 0}, "type_vocab_size=0 must be at least 1"),
    "no embeddings": (LinearTransformerConfig, {"embedding_size": 0}, "embedding_size=0 must be at least 1"),
    "fewer than no layers": (LinformerConfig, {"num_hidden_layers": -1}, "num_hidden_layers=-1 must not be negative"),
    "unknown norm": (NystromformerConfig, {"layer_norm_position": "both"}, "'both' is unknown: use one of post, pre"),
    "unknown pooling": (LinformerConfig, {"classifier_pooling": "max"}, "'max' is unknown: use one of first, mean"),
    "no slots": (LinformerConfig, {"projected_dim": 0}, "projected_dim=0 must lie between 1 and"),
    "too many slots": (LinformerConfig, {"projected_dim": 600}, "projected_dim=600.*max_position_embeddings=512"),
    "a slot list too short": (
        LinformerConfig,
        {"projected_dim": [8, 8], "share_projection": "none"},
        "projected_dim.* 2 entries for num_hidden_layers=12",
    ),
    "slots of too few heads": (
        LinformerConfig,
        {"projected_dim": [[8] * 12, [8] * 11], "num_hidden_layers": 2, "share_projection": "none"},
        "11 numbers for a layer.*num_attention_heads=12",
    ),
    "slots differ between heads that share": (
        LinformerConfig,
        {"projected_dim": [[8] * 11 + [4]], "num_hidden_layers": 1, "share_projection": "headwise"},
        'share_projection="headwise" heads share a projection',
    ),
    "slots of heads are not for pooling": (
        LinformerConfig,
        {
            "projected_dim": [[8] * 12],
            "num_hidden_layers": 1,
            "share_projection": "none",
            "projection_type": "mean_pool",
        },
        'projection_type="mean_pool": use "linear"',
    ),
    "no slots for a head": (
        LinformerConfig,
        {"projected_dim": [[8] * 11 + [0]], "num_hidden_layers": 1, "share_projection": "none"},
        "projected_dim=0 must lie between",
    ),
    "a landmark list too short": (
        NystromformerConfig,
        {"num_landmarks": [8, 8]},
        "num_landmarks.* 2 numbers for num_hidden_layers=12",
    ),
    "no landmarks in a layer": (
        NystromformerConfig,
        {"num_landmarks": [8, 0], "num_hidden_layers": 2},
        r"num_landmarks=\[8, 0\] must be at least 1",
    ),
    "slots differ but are shared": (
        LinformerConfig,
        {"projected_dim": [8, 4], "num_hidden_layers": 2},
        'share_projection="key_value"',
    ),
    "padding that is no token": (
        LinformerConfig,
        {"vocab_size": 60, "pad_token_id": 60},
        "pad_token_id=60.*vocab_size=60",
    ),
    "padding counted from the end": (NystromformerConfig, {"pad_token_id": -1}, "pad_token_id=-1 .*use one from 0 to"),
    "a norm of less than nothing": (LinformerConfig, {"layer_norm_eps": -1.0}, "layer_norm_eps=-1.0 must not be"),
    "unknown sharing": (LinformerConfig, {"share_projection": "all"}, "'all' is unknown: use one of none, headwise"),
    "unknown projection": (LinformerConfig, {"projection_type": "dct"}, "'dct' is unknown: use one of linear"),
    "decoder": (NystromformerConfig, {"is_decoder": True}, "is_decoder=False"),
    "cross attention": (LinformerConfig, {"add_cross_attention": True}, "add_cross_attention=False"),
    "causal": (LinformerConfig, {"is_causal": True}, "is_causal=False"),
    "unknown feature map": (LinearTransformerConfig, {"feature_map": "exp"}, "'exp' is unknown: use one of elu, relu"),
    "unknown positions": (
        LinearTransformerConfig,
        {"position_embedding_type": "rotary"},
        "'rotary' is unknown: use one of learned, sinusoidal",
    ),
    "even causal convolution": (LinearTransformerConfig, {"conv_kernel_size": 4}, "conv_kernel_size=4 must be odd"),
    "dropout of weights that do not exist": (
        LinearTransformerConfig,
        {"attention_probs_dropout_prob": 0.1},
        "attention_probs_dropout_prob=0.1 is not possible.*hidden_dropout_prob",
    ),
    "a projection that mixes later tokens": (
        LinearTransformerConfig,
        {"is_decoder": True, "classifier_pooling": "last", "projected_dim": 8},
        "projected_dim=8 mixes tokens with later tokens",
    ),
    "no slots of features": (LinearTransformerConfig, {"projected_dim": 0}, "projected_dim=0 must lie between 1 and"),
    "more slots of features than tokens": (
        LinearTransformerConfig,
        {"projected_dim": 9, "max_position_embeddings": 8},
        "projected_dim=9 must lie between 1 and max_position_embeddings=8",
    ),
    "slots of features without a longest sequence": (
        LinearTransformerConfig,
        {"projected_dim": 8, "position_embedding_type": "sinusoidal", "max_position_embeddings": None},
        "max_position_embeddings=None: set both",
    ),
    "causal embeddings of another width": (
        LinearTransformerConfig,
        {"is_decoder": True, "embedding_size": 12},
        "embedding_size=12 is for encoders",
    ),
    "a first token that sees no other": (
        LinearTransformerConfig,
        {"is_decoder": True, "classifier_pooling": "first"},
        'classifier_pooling="first" does not fit is_decoder=True',
    ),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_configuration_is_refused(name):
    config_class, fields, message = BAD_FIELDS[name]
    with pytest.raises(ValueError, match=message):
        config_class(**fields)
    # Also if the field is set later.
    config = config_class()
    for field, value in fields.items():
        setattr(config, field, value)
    model_class = getattr(nystrom_models, config_class.__name__.replace("Config", "Model"))
    with pytest.raises(ValueError, match=message):
        model_class(config)


def test_learned_positions_need_a_longest_sequence():
    """The constructor chooses one, but the field may be set later."""
    config = LinearTransformerConfig(max_position_embeddings=None)
    assert config.max_position_embeddings == 512
    config.max_position_embeddings = None
    with pytest.raises(ValueError, match='position_embedding_type="learned" has a table'):
        LinearTransformerModel(config)


IDS = torch.arange(3, 13).view(1, 10)
BAD_CALLS = {
    "too long": ({"input_ids": torch.full((1, 65), 5)}, "65 tokens.*max_position_embeddings=64"),
    "mask of another length": ({"input_ids": IDS, "attention_mask": torch.ones(1, 9)}, r"attention_mask.*\(1, 9\)"),
    "mask of another batch": ({"input_ids": IDS, "attention_mask": torch.ones(2, 10)}, r"attention_mask.*\(2, 10\)"),
    "mask by pair": ({"input_ids": IDS, "attention_mask": torch.ones(1, 10, 10)}, "for pairs of tokens"),
    "causal mask": ({"input_ids": IDS, "attention_mask": torch.ones(1, 1, 10, 10)}, "for pairs of tokens"),
    "added mask": ({"input_ids": IDS, "attention_mask": torch.zeros(1, 10) - 1e4}, "attention_mask must hold 1"),
    "added mask of integers": ({"input_ids": IDS, "attention_mask": IDS // 7 * -10000}, "attention_mask must hold 1"),
    "mask of documents": ({"input_ids": IDS, "attention_mask": 1 + IDS // 7}, r"numbers of documents \(seq_idx\)"),
    "embeddings of one number": ({"inputs_embeds": torch.zeros(1, 10, 1)}, r"\(1, 10, 1\).*hidden_size=32"),
    "embeddings of another width": ({"inputs_embeds": torch.zeros(1, 10, 31)}, "as wide as .*hidden_size=32"),
    "both inputs": ({"input_ids": IDS, "inputs_embeds": torch.zeros(1, 10, 32)}, "input_ids or inputs_embeds"),
    "no input": ({}, "input_ids or inputs_embeds"),
    "one row without batch": ({"input_ids": IDS[0]}, r"\(batch, length\)"),
    "ids by choice, as long as embeddings are wide": (
        {"input_ids": torch.full((1, 10, 32), 5)},
        r"input_ids must be integers \(batch, length\).* \(1, 10, 32\) .*int64",
    ),
    "embeddings without batch": (
        {"inputs_embeds": torch.full((10, 32), 0.5)},
        r"inputs_embeds .*\(batch, length, 32\).* \(10, 32\) .*float32",
    ),
    "segments of another length": (
        {"input_ids": IDS, "token_type_ids": torch.zeros_like(IDS[:, 1:])},
        r"token_type_ids has shape \(1, 9\), but must be \(batch, length\) = \(1, 10\)",
    ),
    "positions of another batch": (
        {"input_ids": IDS, "position_ids": IDS.expand(2, -1)},
        r"position_ids has shape \(2, 10\), but must be \(batch, length\) = \(1, 10\)",
    ),
    "unknown token": ({"input_ids": IDS + 90}, "vocab_size - 1 = 98.*resize_token_embeddings"),
    "unknown segment": ({"input_ids": IDS, "token_type_ids": torch.full_like(IDS, 2)}, "type_vocab_size - 1 = 1"),
    "label outside": ({"input_ids": IDS, "labels": IDS + 90}, "labels must lie.*raise vocab_size"),
    "labels of another shape": ({"input_ids": IDS, "labels": IDS[:, 1:]}, r"labels have shape \(1, 9\)"),
    "a row of the map beyond the end": (
        {"input_ids": IDS, "output_attentions": True, "attention_rows": torch.tensor([3, 10])},
        "attention_rows must lie between 0 and 9",
    ),
    "a row of the map counted from the end": (
        {"input_ids": IDS, "output_attentions": True, "attention_rows": torch.tensor([-1])},
        "attention_rows must lie between 0 and 9",
    ),
    "rows of the map of another batch": (
        {"input_ids": IDS, "output_attentions": True, "attention_rows": torch.zeros(2, 3, dtype=torch.long)},
        r"attention_rows has shape \(2, 3\)",
    ),
    "rows of no map": (
        {"input_ids": IDS, "attention_rows": torch.tensor([3])},
        "attention_rows .*add output_attentions=True",
    ),
    "two divisions into documents": (
        {"input_ids": IDS, "seq_idx": torch.zeros_like(IDS), "cu_seq_lens_q": torch.tensor([0, 3, 10])},
        "seq_idx and cu_seq_lens_q divide the rows into different documents",
    ),
    "causal call": ({"input_ids": IDS, "is_causal": True}, "is_causal is for decoders"),
    "a cache of keys": (
        {"input_ids": IDS, "past_key_values": DynamicCache()},
        rf"{CACHE} is for models with recurrent states.*PEFT's prefix tuning gives it as past_key_values",
    ),
    "cache": (
        {"input_ids": IDS, "use_cache": True},
        "use_cache is for models with recurrent states.*leave use_cache out",
    ),
    "cross attention": (
        {"input_ids": IDS, "encoder_hidden_states": torch.zeros(1, 4, 32)},
        "encoder_hidden_states is",
    ),
}


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linformer-layerwise"])
@pytest.mark.parametrize("name", BAD_CALLS)
def test_call_is_refused(option, name):
    inputs, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message):
        make_model(option, "ForMaskedLM")(**inputs)


@pytest.mark.parametrize("name", sorted(BAD_CALLS.keys() - {"causal call", "a cache of keys", "cache"}))
def test_call_of_a_causal_model_is_refused(name):
    inputs, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message):
        make_model("linear-causal", "ForCausalLM")(**inputs)


WHAT = {
    "input_ids": IDS,
    "attention_mask": torch.ones_like(IDS),
    "token_type_ids": torch.zeros_like(IDS),
    "position_ids": torch.arange(2, 12).view(1, 10),
    "inputs_embeds": torch.zeros(1, 10, 32),
    "attention_rows": torch.tensor([3]),
    "seq_idx": torch.zeros_like(IDS),
    "cu_seq_lens_q": torch.tensor([0, 10]),
    "labels": IDS,
}


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linear-causal"])
@pytest.mark.parametrize("sparse", [False, True], ids=["", "sparse"])
@pytest.mark.parametrize("name", WHAT)
def test_what_is_not_a_tensor_is_refused_by_name(name, sparse, option):
    fields = {} if option == "linear-causal" else {"sparse_prediction": sparse}
    inputs = {} if name == "inputs_embeds" else {"input_ids": IDS, "labels": IDS}
    for value in (WHAT[name].tolist(), WHAT[name].numpy()):
        with pytest.raises(TypeError, match=rf"{name} must be a tensor, but is of type {type(value).__name__}: torch"):
            language_model(option, **fields)(**inputs | {name: value})


@pytest.mark.parametrize(
    "head, fields, shape",
    [
        ("ForMultipleChoice", {}, (1, 2, 10)),
        ("ForSequenceClassification", {"dual_encoder": True}, (1, 2, 10)),
        ("ForSequenceClassification", {"problem_type": "multi_label_classification"}, (1, 10)),
        ("ForSequenceClassification", {"num_labels": 1}, (1, 10)),
        ("ForTokenClassification", {}, (1, 10)),
    ],
)
def test_what_is_not_a_tensor_is_refused_by_name_in_every_head(head, fields, shape):
    model = make_model("linformer-layerwise", head, **fields)
    inputs = {name: WHAT[name].expand(shape) for name in ("input_ids", "attention_mask", "position_ids")}
    for name, value in inputs.items():
        with pytest.raises(TypeError, match=f"{name} must be a tensor, but is of type list"):
            model(**inputs | {name: value.tolist()})
    with pytest.raises(TypeError, match="labels must be a tensor, but is of type list"):
        model(**inputs, labels=[1])


def test_positions_that_are_no_tensor_are_refused_in_a_causal_classifier():
    """It looks for several documents in a row, before the base model reads them."""
    with pytest.raises(TypeError, match="position_ids must be a tensor, but is of type list"):
        make_model("linear-causal", "ForSequenceClassification")(IDS, position_ids=WHAT["position_ids"].tolist())


def test_the_whole_result_of_a_tokenizer_is_refused_as_input_ids():
    with pytest.raises(TypeError, match=r"input_ids must be a tensor, but is of type BatchEncoding: .*model\(\*\*"):
        make_model("linear-elu")(BatchEncoding({"input_ids": IDS}))


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linear-causal"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8])
@pytest.mark.parametrize("name", ["input_ids", "token_type_ids", "position_ids", "attention_rows"])
def test_ids_of_a_dtype_that_no_table_takes_are_refused_by_name(name, dtype, option):
    inputs = {"input_ids": IDS, name: WHAT[name].to(dtype), "output_attentions": name == "attention_rows"}
    with pytest.raises(ValueError, match=rf"{name} must be .*{dtype}"):
        make_model(option)(**inputs)


@torch.no_grad()
def test_sines_take_fractions_of_positions():
    """The learned tables do not, see above."""
    model, positions = make_model("linear-causal_sinusoidal"), torch.arange(10)[None]
    plain = model(IDS, position_ids=positions).last_hidden_state
    torch.testing.assert_close(model(IDS, position_ids=positions.float()).last_hidden_state, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize(
    "head, name",
    [
        ("ForQuestionAnswering", "start_positions"),
        ("ForQuestionAnswering", "end_positions"),
        ("ForPreTraining", "sentence_order_label"),
        ("ForMultipleChoice", "labels"),
    ],
)
def test_numbers_of_places_and_classes_are_integers(head, name, dtype):
    places = {"start_positions": torch.tensor([1]), "end_positions": torch.tensor([2])}
    inputs = places if head == "ForQuestionAnswering" else {}
    ids = IDS[None] if head == "ForMultipleChoice" else IDS
    with pytest.raises(ValueError, match=rf"{name} .* must be int64, but are {dtype}"):
        make_model("linear-elu", head)(ids, **inputs | {name: torch.tensor([0], dtype=dtype)})


def test_misspelt_argument_is_refused():
    with pytest.raises(TypeError, match=r"unexpected argument 'mask'.*attention_mask"):
        make_model("linformer-layerwise")(IDS, mask=torch.ones(1, 10))
    with pytest.raises(TypeError, match=r"'next_sentence_label'; .* by sentence_order_label"):
        make_model("linformer-layerwise", "ForPreTraining")(IDS, next_sentence_label=torch.tensor([0]))


@pytest.mark.parametrize(
    "head, labels, message",
    [
        ("ForSequenceClassification", {"labels": torch.tensor([2])}, "raise num_labels"),
        ("ForTokenClassification", {"labels": torch.full((1, 10), -1)}, "labels must lie between 0"),
        ("ForTokenClassification", {"labels": torch.zeros(10, 1, dtype=torch.long)}, r"labels have shape \(10, 1\)"),
        (
            "ForSequenceClassification",
            {"labels": torch.tensor([[1.0, -100.0]])},
            "must lie between 0 and 1: 1 for those that it has",
        ),
        (
            "ForSequenceClassification",
            {"labels": torch.tensor([[1.0, 2.0]])},
            "must lie between 0 and 1: 1 for those that it has",
        ),
        ("ForTokenClassification", {"labels": torch.zeros(1, 10)}, r"must be int64, but are torch\.float32"),
        (
            "ForPreTraining",
            {"sentence_order_label": torch.tensor([2])},
            "sentence_order_label must lie between 0 and 1, .*: correct",
        ),
        (
            "ForPreTraining",
            {"sentence_order_label": torch.tensor([0, 1])},
            r"sentence_order_label have shape \(2,\), but must be \(batch,\) = \(1,\)",
        ),
        (
            "ForQuestionAnswering",
            {"start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([1])},
            r"start_positions have shape \(2,\), but must be \(batch,\) = \(1,\)",
        ),
        (
            "ForQuestionAnswering",
            {
                "start_positions": torch.tensor([0]),
                "end_positions": torch.tensor([1, 2]),
                "attention_mask": torch.ones_like(IDS),
            },
            r"end_positions have shape \(2,\), but must be \(batch,\) = \(1,\)",
        ),
        ("ForQuestionAnswering", {"start_positions": torch.tensor([0])}, "both start_positions and end_positions"),
        ("ForQuestionAnswering", {"end_positions": torch.tensor([1])}, "both start_positions and end_positions"),
        ("ForSequenceClassification", {"labels": torch.tensor([0, 1])}, r"labels have shape \(2,\).*multi_label"),
    ],
)
def test_label_outside_is_refused(head, labels, message):
    with pytest.raises(ValueError, match=message):
        make_model("nystromformer-landmarks", head)(IDS, **labels)


def test_another_number_of_right_choices_than_rows_is_refused():
    with pytest.raises(ValueError, match=r"labels have shape \(2,\), but must be \(batch,\) = \(1,\)"):
        make_model("nystromformer-landmarks", "ForMultipleChoice")(IDS.expand(1, 3, -1), labels=torch.tensor([0, 1]))


@pytest.mark.parametrize("labels", [torch.tensor([1]), torch.tensor([[0.0, 1.0]])], ids=["class", "several"])
def test_unknown_problem_type_is_refused(labels):
    """Transformers 5.17 refuses it when the configuration is made; 5.24 accepts any word."""
    ours, theirs = r"problem_type='multi_label' is unknown: .*", r"'problem_type' with value 'multi_label'[\s\S]*"
    with pytest.raises((ValueError, StrictDataclassError), match=f"({ours}|{theirs})multi_label_classification"):
        model = make_model("linear-elu", "ForSequenceClassification", problem_type="multi_label")
        model(IDS, labels=labels)


def test_unknown_attention_implementation_is_refused():
    config = make_model("nystromformer-landmarks").config
    with pytest.raises(ValueError, match=r"does not support Flash Attention|FlashAttention|flash_attention_2"):
        NystromformerModel._from_config(config, attn_implementation="flash_attention_2")


def test_checkpoint_of_another_family_is_refused(tmp_path):
    bert = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    BertModel(bert).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"model_type='bert'.*nystromformer"):
        NystromformerModel.from_pretrained(tmp_path)


def test_checkpoint_that_holds_nothing_of_the_encoder_is_refused(tmp_path):
    make_model("linformer-layerwise", "ForMaskedLM").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    heads = {name: weight for name, weight in weights.items() if name.startswith("cls.")}
    save_file(heads, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks \d+ weights of the encoder of LinformerModel"):
        LinformerModel.from_pretrained(tmp_path)


def test_checkpoint_of_another_sharing_mode_is_refused(tmp_path):
    make_model("linformer-headwise").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks 1 weights.*encoder\.sequence_projection\.weight"):
        LinformerModel.from_pretrained(tmp_path, share_projection="layerwise")


@pytest.mark.parametrize(
    "option, fields, added",
    [
        ("nystromformer-landmarks", {"num_hidden_layers": 1}, None),
        ("nystromformer-landmarks", {"num_hidden_layers": 3}, "encoder.layer.2."),
        ("linformer-layerwise", {"conv_kernel_size": 3}, ".conv.weight"),
    ],
    ids=["fewer layers", "more layers", "a convolution"],
)
def test_what_is_asked_for_besides_is_reported_and_not_refused(option, fields, added, tmp_path):
    make_model(option).save_pretrained(tmp_path)
    model, report = AutoModel.from_pretrained(tmp_path, output_loading_info=True, **fields)
    assert {name: getattr(model.config, name) for name in fields} == fields
    assert bool(report["missing_keys"]) == (added is not None)
    assert all(added in name for name in report["missing_keys"])


@pytest.mark.parametrize(
    "inputs",
    [{"input_ids": IDS}, {"inputs_embeds": torch.full((1, 10, 32), 0.5)}],
    ids=["token ids", "embeddings"],
)
def test_multiple_choice_without_choices_is_refused(inputs):
    with pytest.raises(ValueError, match=r"must be \(batch, choices, length\).*\(1, 10"):
        make_model("linformer-layerwise", "ForMultipleChoice")(**inputs)


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linformer-headwise", "linear-elu", "linear-causal"])
def test_a_direction_that_changes_after_the_model_was_made_is_refused(option):
    """Convolutions, caches and linear attention read it at every call, poolers and softmax attention do not."""
    model = make_model(option)
    model.config.is_decoder = wanted = not model.config.is_decoder
    with pytest.raises(ValueError, match=f"made with is_decoder={not wanted}: .* again with is_decoder={wanted}"):
        model(IDS)


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(("field", "value"), [("num_landmarks", 0), ("num_landmarks", [2, 0]), ("pinv_iterations", 0)])
def test_numbers_that_are_set_after_the_model_was_made_are_checked(field, value, masked):
    model = make_model("nystromformer-landmarks")
    setattr(model.config, field, value)
    with pytest.raises(ValueError, match=f"{field}=.* must be at least 1"):
        model(
            IDS,
            attention_mask=(torch.arange(IDS.shape[1]) < IDS.shape[1] - 1)[None].expand_as(IDS) if masked else None,
        )


@pytest.mark.parametrize("option", ["nystromformer-by_layer", "linformer-key_value"])
def test_a_layer_without_an_entry_in_a_list_is_named(option):
    """As when layers are added or picked by hand."""
    model = make_model(option)
    field = "num_landmarks" if option.startswith("nystromformer") else "projected_dim"
    with pytest.raises(ValueError, match=rf"{field}=\[.*\] has 2 entries, and none for layer_idx=2.*single number"):
        model.encoder.layer.append(TransformerLayer(model.config, 2, model.self_attention_class))
        model(IDS)


@pytest.mark.parametrize("model_class", [NystromformerModel, LinearTransformerForCausalLM])
def test_the_configuration_of_another_model_is_refused(model_class):
    with pytest.raises(TypeError, match=r"BertConfig: AutoModel\.from_config.*model_type='bert'") as refused:
        model_class(BertConfig())
    assert "from_dict" not in str(refused.value)  # which refuses it, too


def test_the_built_in_configuration_is_refused():
    with pytest.raises(TypeError, match=r"needs a nystrom_models.*NystromformerConfig\.from_dict\(config\.to_dict"):
        NystromformerModel(BuiltInConfig())
    # The solution that the error names.
    small = BuiltInConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=32)
    assert NystromformerModel(NystromformerConfig.from_dict(small.to_dict())).config.hidden_size == 32


@pytest.mark.parametrize("option, first", [("nystromformer-landmarks", 2), ("linformer-layerwise", 0)])
@torch.no_grad()
def test_positions_count_from_where_the_family_says(option, first):
    """Positions start at 0; those of a Nyströmformer at 2, as in the built-in class."""
    model = make_model(option)
    plain = model(IDS).last_hidden_state
    positions = torch.arange(10)[None] + first
    torch.testing.assert_close(model(IDS, position_ids=positions).last_hidden_state, plain)
    assert model.get_position_embeddings().num_embeddings == 64 + first
    with pytest.raises(ValueError, match=rf"position_ids must lie between {first} and {63 + first}.*has {first} in"):
        model(IDS, position_ids=positions - 1)
    with pytest.raises(ValueError, match="position_ids must lie between"):
        model(IDS, position_ids=positions + 60)


@torch.no_grad()
def test_positions_without_a_table_have_a_first_and_no_last():
    model, positions = make_model("linear-causal_sinusoidal", max_position_embeddings=None), torch.arange(10)[None]
    assert model(IDS, position_ids=positions + 10**4).last_hidden_state.isfinite().all()
    with pytest.raises(ValueError, match=r"position_ids must be at least 0: .* has 0 in"):
        model(IDS, position_ids=positions - 1)


@torch.no_grad()
def test_padding_without_a_mask_is_warned_of(monkeypatch):
    said = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", said.append)
    model, padded = make_model("linear-elu", pad_token_id=1), torch.tensor([[5, 6, 1]])
    model(IDS)
    model(padded, attention_mask=torch.tensor([[1, 1, 0]]))
    assert not said
    model(padded)
    assert len(said) == 1 and "`attention_mask`" in said[0]


def test_the_embedding_of_padding_is_zero_and_stays_so():
    for option in ("nystromformer-landmarks", "linear-relu"):
        model = make_model(option, pad_token_id=4)
        table = model.get_input_embeddings()
        model(torch.tensor([[5, 4, 6]])).last_hidden_state.sum().backward()
        assert not table.weight[4].any() and not table.weight.grad[4].any() and table.weight.grad[5].any()


@pytest.mark.parametrize(
    "option",
    ["nystromformer-landmarks", "linformer-headwise", "linear-relu", "linear-causal"],
)
def test_a_batch_of_empty_texts_is_no_error(option):
    """As tokenizers without special tokens make it; it has no token to compute."""
    inputs = {"input_ids": torch.zeros(2, 0, dtype=torch.long), "attention_mask": torch.zeros(2, 0)}
    model = language_model(option)
    assert model.config.pad_token_id is not None
    for given in (inputs, {"input_ids": inputs["input_ids"]}):
        logits = model(**given).logits
        assert logits.shape == (2, 0, 99)
        logits.sum().backward()
    assert make_model(option)(**inputs).pooler_output.isfinite().all()
    for pooling in ("last", "mean") if "causal" in option else ("first", "last", "mean"):
        classify = make_model(option, "ForSequenceClassification", classifier_pooling=pooling)
        for given in (inputs, {"input_ids": inputs["input_ids"]}):
            assert classify(**given).logits.isfinite().all()
    answers = dict.fromkeys(("start_positions", "end_positions"), torch.zeros(2, dtype=torch.long))
    labels = {"labels": inputs["input_ids"]}
    for given in (inputs, {"input_ids": inputs["input_ids"]}):
        assert model(**given, **labels).loss == 0
        if "causal" not in option:
            assert make_model(option, "ForQuestionAnswering")(**given, **answers).loss == 0
