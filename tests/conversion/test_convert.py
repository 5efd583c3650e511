# SPDX-License-Identifier: Apache-2.0
"""Checkpoints converted to models of this package, against the original models."""

import copy
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertTokenizer,
    GPT2Config,
    RobertaConfig,
    RobertaTokenizer,
    SplinterConfig,
)
from transformers.models.nystromformer import NystromformerConfig as BuiltInConfig
from transformers.models.nystromformer import NystromformerForMaskedLM as BuiltInForMaskedLM

from nystrom_models import LinformerConfig, NystromformerConfig, NystromformerForPreTraining
from nystrom_models.checkpoint import load_tokenizer
from nystrom_models.conversion import convert, convert_checkpoint, converted_config
from nystrom_models.deployment.folder import load_for_export
from tests.conversion.sources import EXACT, FIELDS, LENGTH, ragged_batch, save_source
from tests.models.options import TINY, make_model, relative_error

# The largest that was measured is 2.4e-7.
TOLERANCE = 1e-6


def edit_weights(folder, change):
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", FIELDS)
@torch.no_grad()
def test_padding_on_the_left_changes_nothing(kind, tmp_path):
    """Padding is on the right: with padding on the left, most sources would shift the positions of a row."""
    source = save_source(tmp_path, kind, "ForMaskedLM")
    model = convert(tmp_path, converted_config(tmp_path, **EXACT))
    ids, mask = ragged_batch("left")
    actual = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    for row in range(2):
        expected = source(ids[row : row + 1, mask[row].bool()], output_hidden_states=True).hidden_states
        # Before the first layer, ALBERT and ELECTRA give narrower states.
        for ours, theirs in zip(actual[1:], expected[1:], strict=True):
            assert relative_error(ours[row, mask[row].bool()], theirs[0]) < TOLERANCE


@pytest.mark.parametrize(("family", "head"), [("Bert", "ForPreTraining"), ("Roberta", "ForMaskedLM")])
def test_up_to_its_landmarks_it_is_the_source_and_then_learns(family, head, tmp_path):
    source = save_source(tmp_path, family, head)
    model = convert(tmp_path, converted_config(tmp_path, num_landmarks=16, conv_kernel_size=5), head="ForPreTraining")
    ids = torch.randint(3, 99, (2, LENGTH))
    with torch.no_grad():
        for length, same in ((16, True), (LENGTH, False)):
            error = relative_error(model(ids[:, :length]).prediction_logits, source(ids[:, :length])[0])
            assert (error < TOLERANCE) == same
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = model(ids, labels=ids, sentence_order_label=torch.tensor([0, 1])).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters() if parameter.requires_grad)
        optimizer.step()
    assert losses[1] < losses[0]


@pytest.mark.parametrize("built_in", [False, True], ids=["ours", "built-in"])
@torch.no_grad()
def test_a_nystromformer_gets_more_positions(built_in, tmp_path):
    """Also from Transformers' own class; up to `num_landmarks` tokens, or with exact attention, the outputs agree."""
    fields = TINY | {"max_position_embeddings": LENGTH, "num_landmarks": 64, "conv_kernel_size": 5}
    if built_in:
        source = BuiltInForMaskedLM(BuiltInConfig(**fields, segment_means_seq_len=64)).eval()
    else:
        source = NystromformerForPreTraining(NystromformerConfig(**fields)).eval()
    source.save_pretrained(tmp_path)
    config = converted_config(tmp_path, max_position_embeddings=100)
    assert (config.conv_kernel_size, config.num_landmarks, config.max_position_embeddings) == (5, 64, 100)
    model, report = convert(tmp_path, config, return_report=True)
    ids = torch.randint(3, 99, (2, LENGTH))
    assert relative_error(model(ids)[0], source(ids)[0]) < TOLERANCE
    assert model(torch.randint(3, 99, (1, 100)))[0].isfinite().all()
    assert report.new == report.left_behind == []
    if not built_in:
        assert relative_error(model(ids).sop_logits, source(ids).sop_logits) < TOLERANCE
    # Converted to a Linformer, whose positions start at 0.
    linformer, report = convert(
        tmp_path, converted_config(tmp_path, "linformer", projected_dim=8), return_report=True, compare=False
    )
    assert report.new == ["linformer.encoder.sequence_projection.weight"] and not report.left_behind
    table = linformer.get_position_embeddings().weight
    assert torch.equal(table, source.base_model.embeddings.position_embeddings.weight[2:])
    # Without the convolution, its kernels are dropped.
    _, report = convert(tmp_path, converted_config(tmp_path, conv_kernel_size=None), return_report=True, compare=False)
    assert len(report.left_behind) == 2 and all("conv.weight" in name for name in report.left_behind)
    with pytest.raises(ValueError, match="set conv_kernel_size=5"):
        convert(tmp_path, converted_config(tmp_path, conv_kernel_size=7))
    with pytest.raises(ValueError, match="layer_norm_position='post'"):
        convert(tmp_path, converted_config(tmp_path, layer_norm_position="pre"))


@pytest.mark.parametrize(
    "fields",
    [
        {"family": "nystromformer", "num_landmarks": 8, "conv_kernel_size": 5},
        {"family": "linformer", "projected_dim": 8, "share_projection": "none", "conv_kernel_size": 3},
    ],
    ids=lambda fields: fields["family"],
)
@torch.no_grad()
def test_saved_it_loads_in_any_auto_class_with_the_same_results(fields, tmp_path):
    save_source(tmp_path / "source", "Bert", "ForPreTraining")
    config = converted_config(tmp_path / "source", max_position_embeddings=100, **fields)
    model = convert(tmp_path / "source", config)
    model.save_pretrained(tmp_path / "long")
    ids, mask = torch.randint(3, 99, (2, 100)), torch.ones(2, 100)
    mask[0, 61:] = 0
    expected = model(ids, attention_mask=mask, output_hidden_states=True)
    for auto in (AutoModelForPreTraining, AutoModelForMaskedLM, AutoModel):
        loaded, info = auto.from_pretrained(tmp_path / "long", output_loading_info=True)
        assert not info["missing_keys"]
        actual = loaded(ids, attention_mask=mask, output_hidden_states=True)
        assert torch.equal(actual.hidden_states[-1], expected.hidden_states[-1])
        logits = actual.get("prediction_logits", actual.get("logits"))
        assert logits is None or torch.equal(logits, expected.prediction_logits)
    _, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "long", output_loading_info=True)
    assert all(name.startswith("classifier.") for name in info["missing_keys"])


@torch.no_grad()
def test_a_linformer_takes_the_weights_and_trains(tmp_path):
    source = save_source(tmp_path, "Roberta", "ForMaskedLM")
    config = converted_config(tmp_path, "linformer", projected_dim=8, max_position_embeddings=64)
    assert type(config) is LinformerConfig
    model, report = convert(tmp_path, config, return_report=True)
    assert report.new == ["linformer.encoder.sequence_projection.weight"]
    assert any("a different function from the source's" in note for note in report.notes)
    ids = torch.randint(3, 99, (2, 64))
    embedded = model(ids[:, :LENGTH], output_hidden_states=True).hidden_states[0]
    theirs = source(ids[:, :LENGTH], output_hidden_states=True).hidden_states[0]
    assert relative_error(embedded, theirs) < TOLERANCE
    with torch.enable_grad():
        model(ids, labels=ids).loss.backward()
    assert model.get_parameter(report.new[0]).grad.abs().sum() > 0


BERT_HEAD = {f"cls.predictions.transform.{name}" for name in ("dense.weight", "dense.bias")}
BERT_HEAD |= {"cls.predictions.transform.LayerNorm.weight", "cls.predictions.transform.LayerNorm.bias"}
BERT_HEAD |= {"cls.predictions.bias"}
ORDER = {"cls.seq_relationship.weight", "cls.seq_relationship.bias"}
POOLER = {"nystromformer.pooler.dense.weight", "nystromformer.pooler.dense.bias"}
CLASSIFIER = {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize(
    ("family", "head", "new", "left"),
    [
        ("Bert", "ForPreTraining", ORDER, ORDER),
        ("Bert", "ForMaskedLM", ORDER | POOLER, set()),
        ("Bert", "ForTokenClassification", ORDER | POOLER | BERT_HEAD, CLASSIFIER),
        ("Roberta", "ForMaskedLM", ORDER | POOLER, set()),
        ("Roberta", "Model", ORDER | BERT_HEAD, set()),
    ],
)
def test_what_is_new_and_what_is_left_behind_is_reported(family, head, new, left, tmp_path, caplog):
    save_source(tmp_path, family, head)
    config = converted_config(tmp_path, conv_kernel_size=3, max_position_embeddings=50)
    model, report = convert(tmp_path, config, head="ForPreTraining", return_report=True, compare=False)
    kernels = {f"nystromformer.encoder.layer.{i}.attention.self.conv.weight" for i in range(2)}
    assert set(report.new) == new | kernels
    assert set(report.left_behind) == left
    message = caplog.messages[-1]
    assert all(name in message for name in new | left)
    assert "zero, to be trained: nystromformer.encoder.layer.*.attention.self.conv.weight" in message
    assert "40 rows repeated to 50" in message
    # Every weight of the source is in the model or in the report.
    count = sum(weight.numel() for weight in load_file(tmp_path / "model.safetensors").values())
    ours = sum(parameter.numel() for name, parameter in model.named_parameters() if name not in new | kernels)
    repeated = 10 * TINY["hidden_size"] + (2 * TINY["hidden_size"] if family == "Bert" else 0)  # rows 0 and 1
    gone = sum(load_file(tmp_path / "model.safetensors")[name].numel() for name in left)
    assert ours - repeated == count - gone


def test_bert_itself_as_published(tmp_path):
    """In the format of its old checkpoints: pickled tensors, other names of layer norms, and a buffer of positions."""
    source = save_source(tmp_path, "Bert", "ForPreTraining")
    weights = load_file(tmp_path / "model.safetensors")
    weights["bert.embeddings.position_ids"] = torch.arange(LENGTH)[None]
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): weight
        for name, weight in weights.items()
    }
    (tmp_path / "model.safetensors").unlink()
    torch.save(old, tmp_path / "pytorch_model.bin")
    model, report = convert(tmp_path, converted_config(tmp_path, **EXACT), return_report=True, compare=False)
    assert set(report.new) == set(report.left_behind) == ORDER
    ids = torch.randint(3, 99, (1, LENGTH))
    assert relative_error(model(ids).prediction_logits, source(ids).prediction_logits) < TOLERANCE
    model.save_pretrained(tmp_path / "converted")
    assert {path.suffix for path in (tmp_path / "converted").iterdir()} == {".json", ".py", ".safetensors"}


class Payload:
    def __reduce__(self):
        return (print, ("a pickle ran",))


def test_a_pickle_that_runs_something_is_refused(tmp_path, capsys):
    source = save_source(tmp_path, "Bert", "ForMaskedLM")
    (tmp_path / "model.safetensors").unlink()
    torch.save(source.state_dict() | {"payload": Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights_only|unpickl"):
        convert(tmp_path, converted_config(tmp_path))
    assert "a pickle ran" not in capsys.readouterr().out


def test_an_output_layer_of_its_own(tmp_path):
    source = save_source(tmp_path, "Bert", "ForMaskedLM", tie_word_embeddings=False)
    model = convert(tmp_path, converted_config(tmp_path, **EXACT))
    ids = torch.randint(3, 99, (1, LENGTH))
    assert relative_error(model(ids).logits, source(ids).logits) < TOLERANCE
    with pytest.raises(ValueError, match="set tie_word_embeddings=False"):
        convert(tmp_path, converted_config(tmp_path, tie_word_embeddings=True))
    save_source(tmp_path / "base", "Bert", "Model", tie_word_embeddings=False)
    for tied in (True, False):
        config = converted_config(tmp_path / "base", tie_word_embeddings=tied)
        _, report = convert(tmp_path / "base", config, head="ForMaskedLM", return_report=True, compare=False)
        assert ("cls.predictions.decoder.weight" in report.new) == (not tied)


def test_another_activation_in_the_head_of_roberta_is_told(tmp_path, caplog):
    source = save_source(tmp_path, "Roberta", "ForMaskedLM", hidden_act="relu")
    model = convert(tmp_path, converted_config(tmp_path, **EXACT))
    assert "hidden_act='relu', the source's applies gelu" in caplog.messages[-1]
    ids = torch.randint(3, 99, (1, LENGTH))
    assert relative_error(model.base_model(ids)[0], source.base_model(ids)[0]) < TOLERANCE


@torch.no_grad()
def test_feed_forward_layers_in_parts_do_not_limit_the_lengths_that_are_compared(tmp_path):
    save_source(tmp_path, "Bert", "ForMaskedLM", chunk_size_feed_forward=7)
    _, report = convert(tmp_path, converted_config(tmp_path, **EXACT), return_report=True)
    assert report.differences[-1].tokens == LENGTH
    assert all(found.largest <= TOLERANCE * found.scale for found in report.differences)


@torch.no_grad()
def test_token_types_are_added_and_the_dtype_is_the_sources(tmp_path):
    source = save_source(tmp_path, "Roberta", "ForMaskedLM").to(torch.bfloat16)
    source.save_pretrained(tmp_path)
    model = convert(tmp_path, converted_config(tmp_path, type_vocab_size=2, **EXACT))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    ids = torch.randint(3, 99, (1, 9))
    assert torch.equal(model(ids, token_type_ids=torch.ones_like(ids))[0], model(ids)[0])
    assert convert(tmp_path, converted_config(tmp_path), dtype=torch.float32).dtype == torch.float32
    source = save_source(tmp_path / "bert", "Bert", "Model")
    table = convert(tmp_path / "bert", converted_config(tmp_path / "bert", type_vocab_size=4)).state_dict()
    expected = source.embeddings.token_type_embeddings.weight[[0, 1, 0, 0]]
    assert torch.equal(table["embeddings.token_type_embeddings.weight"], expected)


def test_fields_come_from_the_source(tmp_path):
    fields = {"layer_norm_eps": 1e-7, "hidden_act": "relu", "initializer_range": 0.1, "classifier_dropout": 0.3}
    ids = {"pad_token_id": 3, "bos_token_id": 4, "eos_token_id": 5}
    source = RobertaConfig(**TINY | FIELDS["Roberta"] | fields | ids)
    config = converted_config(source, num_landmarks=8)
    for name, value in (TINY | fields | ids | {"num_landmarks": 8, "type_vocab_size": 1}).items():
        assert getattr(config, name) == value, name
    assert config.max_position_embeddings == LENGTH + 2 - 4
    with pytest.raises(ValueError, match="no field num_landmark:"):
        converted_config(source, num_landmark=8)
    with pytest.raises(ValueError, match="use one of nystromformer, linformer"):
        converted_config(source, "longformer")
    # Splinter's layers are BERT's, so the error must not say that they are others.
    for other in (GPT2Config(), SplinterConfig()):
        with pytest.raises(ValueError, match=f"{other.model_type}' cannot be converted: give one of bert, roberta"):
            converted_config(other)
    with pytest.raises(ValueError, match="is_decoder=False"):
        converted_config(BertConfig(is_decoder=True))
    with pytest.raises(ValueError, match=r"pad_token_id=None, but a roberta .* usually pad_token_id=1"):
        converted_config(RobertaConfig(pad_token_id=None))


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        (
            "DistilBert",
            {"activation": "relu", "dropout": 0.2, "attention_dropout": 0.3, "seq_classif_dropout": 0.4},
            {
                "hidden_act": "relu",
                "hidden_dropout_prob": 0.2,
                "attention_probs_dropout_prob": 0.3,
                "classifier_dropout": 0.4,
                "intermediate_size": 48,
                "layer_norm_eps": 1e-12,
                "classifier_activation": "relu",
            },
        ),
        ("Electra", {"embedding_size": 32}, {"embedding_size": None, "classifier_activation": "gelu"}),
        ("Electra", {"layer_norm_eps": 1e-7}, {"embedding_size": 12, "layer_norm_eps": 1e-7}),
        (
            "Albert",
            {"embedding_size": 32, "classifier_dropout_prob": 0.4},
            {"embedding_size": 32, "classifier_dropout": 0.4, "num_hidden_layers": 4},
        ),
    ],
)
def test_fields_that_a_source_calls_otherwise(kind, fields, expected):
    basic = {} if kind == "DistilBert" else TINY
    source = getattr(transformers, kind + "Config")(**basic | FIELDS[kind] | fields)
    for family in ("nystromformer", "linformer"):
        config = converted_config(source, family, max_position_embeddings=512)
        assert {name: getattr(config, name) for name in expected} == expected
    linear = converted_config(source, "linear_transformer")
    assert (linear.feature_map, linear.attention_probs_dropout_prob) == ("hedgehog", 0.0)


@pytest.mark.parametrize(
    ("field", "value", "needed"),
    [
        ("vocab_size", 100, 99),
        ("hidden_size", 64, 32),
        ("num_hidden_layers", 1, 2),
        ("num_attention_heads", 2, 4),
        ("intermediate_size", 32, 48),
        ("hidden_act", "gelu_new", "'gelu'"),
        ("layer_norm_eps", 1e-5, 1e-12),
        ("pad_token_id", 1, 0),
        ("type_vocab_size", 1, 2),
        ("embedding_size", 32, None),
    ],
)
def test_a_field_that_does_not_fit_is_named_with_the_value_that_does(field, value, needed, tmp_path):
    source = BertConfig(**TINY | FIELDS["Bert"], architectures=["BertModel"])
    source.save_pretrained(tmp_path)
    config = copy.deepcopy(converted_config(source))
    setattr(config, field, value)
    flag = rf"\(--config_overrides {field}={str(needed).strip(chr(39))}\)"
    with pytest.raises(ValueError, match=f"set {field}={needed} {flag}, or"):
        convert(tmp_path, config)


def test_the_configuration_of_a_model_is_its_own(tmp_path):
    save_source(tmp_path, "Bert", "ForMaskedLM")
    config = converted_config(tmp_path)
    before = config.to_dict()
    model = convert(tmp_path, config, compare=False)
    model.config.num_labels = 7
    assert config.to_dict() == before


def test_a_configuration_of_transformers_is_refused(tmp_path):
    BertConfig(**TINY, architectures=["BertModel"]).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="make it with converted_config"):
        convert(tmp_path, transformers.NystromformerConfig(**TINY))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.update({"bert.encoder.layer.0.attention.self.gate.weight": torch.ones(2)}),
            "other layers than BERT",
        ),
        (lambda weights: weights.pop("bert.encoder.layer.1.output.dense.weight"), "lacks 1 weights of the encoder"),
        (
            lambda weights: weights.update({"bert.encoder.layer.2.output.dense.bias": torch.ones(32)}),
            "or another number",
        ),
        (
            lambda weights: weights.update({"bert.encoder.layer.1.output.dense.bias": torch.ones(31)}),
            "lacks 1 weights of the encoder",
        ),
    ],
    ids=["unknown", "missing", "more_layers", "other_shape"],
)
def test_an_encoder_that_is_not_its_configurations_is_refused(change, message, tmp_path):
    save_source(tmp_path, "Bert", "ForMaskedLM")
    edit_weights(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path, converted_config(tmp_path), ignore_mismatched_sizes=True)


def test_other_classes_than_the_sources():
    names, given = {0: "calm", 1: "storm", 2: "fog"}, {0: "day", 1: "night"}
    source = BertConfig(id2label=names, label2id={name: i for i, name in names.items()})
    for overrides in ({"id2label": given}, {"label2id": {"day": 0, "night": 1}}, {"id2label": given, "num_labels": 2}):
        config = converted_config(source, **overrides)
        assert (config.id2label, config.label2id, config.num_labels) == (given, {"day": 0, "night": 1}, 2)
    assert converted_config(source, num_labels=3).id2label == names
    unnamed = converted_config(source, num_labels=2)
    assert (unnamed.id2label, unnamed.label2id) == ({0: "LABEL_0", 1: "LABEL_1"}, {"LABEL_0": 0, "LABEL_1": 1})


@pytest.mark.parametrize("alone", [True, False])
def test_an_adapter_must_be_merged_first(alone, tmp_path):
    from peft import AutoPeftModelForSequenceClassification, LoraConfig, get_peft_model

    source, folder = tmp_path / "source", tmp_path / "adapter"
    save_source(source, "Bert", "ForSequenceClassification")
    if not alone:  # in the folder of its model, from which Transformers reads it, too
        shutil.copytree(source, folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source)
    config = LoraConfig(task_type="SEQ_CLS", target_modules=["query"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(folder)
    calls = [converted_config, lambda path: convert(path, converted_config(source)), load_for_export]
    # Its folder has a tokenizer only if one was saved there.
    for call in [*calls, load_tokenizer] if alone else calls:
        with pytest.raises(ValueError, match=r"holds an adapter of PEFT .*merge it first"):
            call(folder)
    merged = AutoPeftModelForSequenceClassification.from_pretrained(folder).merge_and_unload().eval()
    merged.save_pretrained(tmp_path / "merged")
    converted = convert(tmp_path / "merged", converted_config(tmp_path / "merged", num_landmarks=None)).eval()
    ids = torch.randint(5, 50, (2, 9))
    assert relative_error(converted(ids).logits, merged(ids).logits) < 1e-5
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(source).eval()
    assert relative_error(converted(ids).logits, plain(ids).logits) > 1e-3


def bert_tokenizer():
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "long", "text", "##s"]
    return BertTokenizer(vocab={word: i for i, word in enumerate(words)}, model_max_length=LENGTH)


def roberta_tokenizer():
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "l", "o", "n", "g", "t", "e", "x", "s", "Ġ"]
    return RobertaTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=LENGTH)


@pytest.mark.parametrize(
    ("family", "tokenizer"), [("Bert", bert_tokenizer), ("Roberta", roberta_tokenizer)], ids=["bert", "roberta"]
)
@torch.no_grad()
def test_model_and_tokenizer_take_the_new_length(family, tokenizer, tmp_path):
    save_source(tmp_path / "source", family, "ForMaskedLM")
    theirs = tokenizer()
    theirs.save_pretrained(tmp_path / "source")
    config = converted_config(tmp_path / "source", max_position_embeddings=93, num_landmarks=8)
    convert_checkpoint(tmp_path / "source", tmp_path / "long", config)

    ours = AutoTokenizer.from_pretrained(tmp_path / "long")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "long")
    assert ours.model_max_length == 93
    text = "a long text " * 40
    pair = ("a long text", f"A {theirs.mask_token} texts")
    assert dict(ours(*pair)) == dict(theirs(*pair))
    inputs = ours([text, "a text"], truncation=True, padding=True, return_tensors="pt")
    assert inputs["input_ids"].shape == (2, 93)
    assert model(**inputs).logits.isfinite().all()
    for folder in ("source", "long"):
        with pytest.raises(ValueError, match="not an empty folder"):
            convert_checkpoint(tmp_path / "source", tmp_path / folder, config)


@torch.no_grad()
def test_landmarks_by_layer_are_compared_up_to_the_fewest(tmp_path):
    save_source(tmp_path, "Bert", "ForMaskedLM")
    config = converted_config(tmp_path, num_landmarks=[16, 8], conv_kernel_size=None)
    _, report = convert(tmp_path, config, return_report=True)
    short, long = report.differences
    assert (short.tokens, long.tokens) == (8, LENGTH) and short.largest < TOLERANCE * short.scale < long.largest


@pytest.mark.parametrize(
    ("option", "head"),
    [("linformer-layerwise", "ForMaskedLM"), ("linear-elu", "ForMaskedLM"), ("linear-causal", "ForCausalLM")],
)
def test_a_model_of_this_package_keeps_its_family(option, head, tmp_path):
    """And its own fields, such as the feature map, so that only the length changes."""
    source = make_model(option, head)
    source.save_pretrained(tmp_path)
    config = converted_config(tmp_path, max_position_embeddings=2 * source.config.max_position_embeddings)
    assert config.model_type == source.config.model_type
    changed = {name for name, value in config.to_dict().items() if value != source.config.to_dict().get(name)}
    assert changed <= {"max_position_embeddings", "architectures", "dtype", "transformers_version"}
    with pytest.raises(ValueError, match=r"has no field num_landmarks:.*give the family that has it"):
        converted_config(tmp_path, num_landmarks=8)


@pytest.mark.parametrize("causal", ["config", "source"])
def test_causal_and_bidirectional_attention_do_not_mix(causal, tmp_path):
    """The check depends on the configurations, not on the names of the families."""
    if causal == "config":
        source = save_source(tmp_path, "Bert", "Model").config
        with pytest.raises(ValueError, match="Set is_decoder=False"):
            converted_config(source, "linear_transformer", is_decoder=True)
        config = converted_config(source, "linear_transformer")
        config.is_decoder = True
        with pytest.raises(ValueError, match="Set is_decoder=False"):
            convert(tmp_path, config)
    else:
        source = make_model("linear-causal", "ForCausalLM")
        source.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="Set is_decoder=True"):
            converted_config(source.config, "linear_transformer", is_decoder=False)
        with pytest.raises(ValueError, match="describes an encoder"):
            converted_config(source.config, "nystromformer")


@pytest.mark.parametrize("feature_map", ["elu", None])
def test_a_causal_model_generates_by_the_sources_settings(feature_map, tmp_path):
    source = make_model("linear-causal", "ForCausalLM")
    settings = source.generation_config
    settings.max_new_tokens, settings.eos_token_id, settings.repetition_penalty = 6, [2, 7], 1.5
    source.save_pretrained(tmp_path / "source")
    config = converted_config(tmp_path / "source", "linear_transformer", bos_token_id=5, feature_map=feature_map)
    convert(tmp_path / "source", config).save_pretrained(tmp_path / "converted")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    kept = model.generation_config
    assert (kept.max_new_tokens, kept.eos_token_id, kept.repetition_penalty) == (6, [2, 7], 1.5)
    # The configuration's own: a token that it was given, and no cache where there are no states to keep.
    assert (kept.bos_token_id, kept.use_cache) == (5, feature_map is not None)
    assert model.generate(torch.full((1, 3), 11), do_sample=False).shape[1] <= 9


def test_a_head_that_does_not_fit_is_refused_by_name(tmp_path):
    save_source(tmp_path, "Electra", "ForMultipleChoice", summary_activation="tanh")
    config = converted_config(tmp_path)
    with pytest.raises(ValueError, match=r"summary_activation='tanh'.*head='Model'"):
        convert(tmp_path, config)
    assert convert(tmp_path, config, head="Model").config.embedding_size == 12
    with pytest.raises(ValueError, match="head='ForMaskedLm' is unknown"):
        convert(tmp_path, config, head="ForMaskedLm")
    with pytest.raises(ValueError, match="head='ForMaskedLM'"):
        convert(tmp_path, config, head="ForCausalLM")
    with pytest.raises(ValueError, match="positions='stretch' is unknown"):
        convert(tmp_path, config, positions="stretch")
    config = AutoConfig.from_pretrained(tmp_path)
    config.architectures = None
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="architectures"):
        convert(tmp_path, converted_config(tmp_path))
