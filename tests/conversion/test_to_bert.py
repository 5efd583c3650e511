# SPDX-License-Identifier: Apache-2.0
"""Models with softmax attention as BERTs of Transformers' own class."""

import pytest
import torch
from transformers import AutoModelForMaskedLM

from nystrom_models import NystromformerForMaskedLM
from nystrom_models.conversion import convert, converted_config, to_bert
from nystrom_models.conversion.to_bert import _HEADS
from tests.models.options import make_model, padded_inputs, relative_error

# The largest that was measured is 3.5e-7.
TOLERANCE = 1e-6


def build(head, **fields):
    return make_model("nystromformer-softmax", head, **{"classifier_activation": "tanh"} | fields)


def padded_on_the_right():
    """BERT counts the positions of padding, too: with padding on the left, it is a different function."""
    inputs = {name: tensor[[0, 2]] for name, tensor in padded_inputs().items()}
    return inputs | {"token_type_ids": (torch.arange(40) > 12).long().expand(2, -1)}


@pytest.mark.parametrize("head", _HEADS)
@torch.no_grad()
def test_bert_computes_the_same(head, tmp_path):
    ours = build(head)
    bert = to_bert(ours)
    assert type(bert).__module__.startswith("transformers.models.bert")
    assert not bert.training
    bert.save_pretrained(tmp_path)
    bert = type(bert).from_pretrained(tmp_path)
    batch = padded_on_the_right()
    if head == "ForMultipleChoice":
        batch = {name: torch.stack([tensor, tensor.flip(0)], dim=1) for name, tensor in batch.items()}
    actual, expected = bert(**batch).to_tuple(), ours(**batch).to_tuple()
    assert len(actual) == len(expected)
    valid = batch["attention_mask"].bool()
    for theirs, mine in zip(actual, expected, strict=True):
        assert theirs.shape == mine.shape
        everywhere = theirs.shape[:2] == valid.shape
        assert relative_error(theirs[valid] if everywhere else theirs, mine[valid] if everywhere else mine) < TOLERANCE


@torch.no_grad()
def test_it_comes_back(tmp_path):
    ours = build("ForMaskedLM", id2label={0: "A", 1: "B"}, label2id={"A": 0, "B": 1})
    bert = to_bert(ours)
    assert bert.config.id2label == {0: "A", 1: "B"}
    bert.save_pretrained(tmp_path)
    again = convert(tmp_path, converted_config(tmp_path, num_landmarks=None, conv_kernel_size=None))
    assert isinstance(again, NystromformerForMaskedLM)
    state, expected = again.state_dict(), ours.state_dict()
    assert state.keys() == expected.keys()
    for name in expected:
        rows = slice(ours.config.first_position if "position_embeddings" in name else 0, None)
        assert torch.equal(state[name][rows], expected[name][rows]), name


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForPreTraining"])
@torch.no_grad()
def test_without_a_pooler_or_tied_weights(head, tmp_path):
    """As `convert` makes them of such BERTs."""
    bert = to_bert(build(head, tie_word_embeddings=False))
    if head == "Model":
        bert.pooler = None
    else:
        bert.cls.predictions.decoder.bias.normal_()
    bert.save_pretrained(tmp_path)
    ours = convert(tmp_path, converted_config(tmp_path, num_landmarks=None, conv_kernel_size=None))
    again, inputs = to_bert(ours), padded_on_the_right()
    actual, expected = again(**inputs), ours(**inputs)
    valid = inputs["attention_mask"].bool()
    assert relative_error(actual[0][valid], expected[0][valid]) < TOLERANCE


def test_weights_are_copies_of_the_same_dtype():
    ours = build("ForMaskedLM").to(torch.bfloat16)
    bert = to_bert(ours)
    assert bert.dtype == torch.bfloat16
    with torch.no_grad():
        bert.bert.embeddings.word_embeddings.weight.zero_()
    assert ours.nystromformer.embeddings.word_embeddings.weight.abs().sum() > 0
    assert bert.cls.predictions.decoder.weight is bert.bert.embeddings.word_embeddings.weight


@pytest.mark.parametrize(
    ("head", "fields", "message"),
    [
        ("Model", {"num_landmarks": 8}, "num_landmarks=8"),
        ("Model", {"conv_kernel_size": 3}, "conv_kernel_size=3"),
        ("Model", {"layer_norm_position": "pre"}, "layer_norm_position='pre'"),
        ("Model", {"embedding_size": 8}, "embedding_size=8"),
        ("ForSequenceClassification", {"classifier_activation": "relu"}, "classifier_activation='relu'"),
        ("ForSequenceClassification", {"classifier_pooling": "mean"}, "classifier_pooling='mean'"),
        ("ForMultipleChoice", {"classifier_pooling": "mean"}, "classifier_pooling='mean'"),
        ("ForMultipleChoice", {"classifier_activation": None}, "classifier_activation=None"),
    ],
)
def test_what_bert_cannot_compute_is_refused(head, fields, message):
    with pytest.raises(ValueError, match=message):
        to_bert(build(head, **fields))


def test_landmarks_that_cover_every_text_are_softmax():
    to_bert(build("Model", num_landmarks=512))


@pytest.mark.parametrize(("option", "head"), [("linformer-none", "Model"), ("linear-causal", "ForCausalLM")])
def test_other_classes_are_refused(option, head):
    model = make_model(option, head)
    with pytest.raises(TypeError, match=type(model).__name__):
        to_bert(model)


def test_an_adapter_must_be_merged_first():
    from peft import LoraConfig, get_peft_model

    model = build("ForSequenceClassification")
    with torch.no_grad():
        config = LoraConfig(task_type="SEQ_CLS", target_modules=["query"], init_lora_weights=False)
        adapted = get_peft_model(model, config).eval()
        with pytest.raises(TypeError, match=r"give model\.merge_and_unload\(\)"):
            to_bert(adapted)
        ids = torch.randint(5, 99, (2, 9))
        expected = adapted(ids).logits
        bert = to_bert(adapted.merge_and_unload())
        assert relative_error(bert(ids).logits, expected) < TOLERANCE


def test_it_loads_by_the_auto_class(tmp_path):
    to_bert(build("ForMaskedLM")).save_pretrained(tmp_path)
    assert AutoModelForMaskedLM.from_pretrained(tmp_path).config.model_type == "bert"
