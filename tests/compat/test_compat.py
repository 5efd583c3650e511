# SPDX-License-Identifier: Apache-2.0
"""Tests for every supported version of Transformers. `make test` runs this file with the lowest and the newest."""

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    pipeline,
)
from transformers.models.nystromformer.configuration_nystromformer import NystromformerConfig as BuiltinConfig
from transformers.models.nystromformer.modeling_nystromformer import NystromformerForMaskedLM as BuiltinForMaskedLM

import nystrom_models

FAMILIES = {
    "Nystromformer": {"num_landmarks": 4, "conv_kernel_size": 3},
    "Linformer": {"projected_dim": 4},
    "LinearTransformer": {},
}
HEADS = {
    "Model": AutoModel,
    "ForPreTraining": AutoModelForPreTraining,
    "ForMaskedLM": AutoModelForMaskedLM,
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForQuestionAnswering": AutoModelForQuestionAnswering,
    "ForMultipleChoice": AutoModelForMultipleChoice,
}
WORDS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "the", "cat", "sat", "on", "mat"]

each_family = pytest.mark.parametrize("family", FAMILIES)
each_head = pytest.mark.parametrize("head", HEADS)


def small_config(family, **options):
    config_class = getattr(nystrom_models, f"{family}Config")
    return config_class(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        **{**FAMILIES[family], **options},
    )


def small_inputs(head, length=11):
    """Two rows of 11 and 7 valid tokens, more than the landmarks or k; for ForMultipleChoice, two choices."""
    input_ids = torch.randint(3, len(WORDS), (2, length))
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, 7:] = 0
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
    return {name: value[None] for name, value in inputs.items()} if head == "ForMultipleChoice" else inputs


@each_head
@each_family
def test_auto_class_round_trip(family, head, tmp_path):
    config = small_config(family)
    model = HEADS[head].from_config(config).eval()
    assert type(model) is getattr(nystrom_models, family + head)
    inputs = small_inputs(head)
    with torch.no_grad():
        expected = model(**inputs)[0]
    assert torch.isfinite(expected).all()

    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(config)
    reloaded = HEADS[head].from_pretrained(tmp_path).eval()
    assert type(reloaded) is type(model)
    with torch.no_grad():
        torch.testing.assert_close(reloaded(**inputs)[0], expected, rtol=1e-5, atol=1e-6)


# The newer name of the method does not exist in the lowest version.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@each_family
def test_training_step(family):
    model = getattr(nystrom_models, f"{family}ForPreTraining")(small_config(family))
    model.gradient_checkpointing_enable()
    inputs = small_inputs("ForPreTraining")
    model(**inputs, labels=inputs["input_ids"], sentence_order_label=torch.tensor([0, 1])).loss.backward()
    without_gradient = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not without_gradient


@each_family
def test_fill_mask_pipeline(family, tmp_path):
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
    ).save_pretrained(tmp_path)
    getattr(nystrom_models, f"{family}ForMaskedLM")(small_config(family)).save_pretrained(tmp_path)

    assert AutoTokenizer.from_pretrained(tmp_path).mask_token == "<mask>"
    fill = pipeline("fill-mask", model=str(tmp_path), device="cpu")
    assert type(fill.model) is getattr(nystrom_models, f"{family}ForMaskedLM")
    answers = fill("the cat sat on the <mask>", top_k=len(WORDS))
    assert {answer["token_str"] for answer in answers} == set(WORDS)
    assert sum(answer["score"] for answer in answers) == pytest.approx(1, abs=1e-4)


def test_builtin_checkpoint_exchange(tmp_path):
    """With as many landmarks as tokens both classes compute exact attention, so their outputs can be compared."""
    config = small_config("Nystromformer", num_landmarks=11, segment_means_seq_len=11)
    ours = nystrom_models.NystromformerForMaskedLM(config).eval()
    input_ids = torch.randint(3, len(WORDS), (2, 11))
    with torch.no_grad():
        expected = ours(input_ids).logits

    ours.save_pretrained(tmp_path / "ours")
    builtin_config = BuiltinConfig.from_pretrained(tmp_path / "ours")
    theirs, report = BuiltinForMaskedLM.from_pretrained(
        tmp_path / "ours", config=builtin_config, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    theirs.save_pretrained(tmp_path / "theirs")
    back, report = nystrom_models.NystromformerForMaskedLM.from_pretrained(
        tmp_path / "theirs", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(input_ids).logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(back.eval()(input_ids).logits, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "siglip_vision_model"])
@torch.no_grad()
def test_nystrom_attention_by_name(model_type):
    """Encoders of Transformers: short rows as with sdpa, padding unseen, and maps of every layer."""
    fields = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    if model_type == "siglip_vision_model":
        config = AutoConfig.for_model(model_type, **fields, image_size=24, patch_size=4)
        inputs = {"pixel_values": torch.randn(2, 3, 24, 24)}
    else:
        windows = {"local_attention": 8, "layer_types": ["full_attention", "sliding_attention"]}
        ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
        config = AutoConfig.for_model(
            model_type, **fields, vocab_size=99, **(windows if "modern" in model_type else {})
        )
        config.update(ids)
        inputs = {"input_ids": torch.randint(3, 99, (2, 36)), "attention_mask": torch.ones(2, 36, dtype=torch.long)}
        inputs["attention_mask"][1, 20:] = 0
    model = AutoModel.from_config(config).eval()
    valid = inputs.get("attention_mask", torch.ones(2, 36)).bool()
    expected = model(**inputs).last_hidden_state[valid]
    nystrom_models.use_nystrom(model, 64)
    torch.testing.assert_close(model(**inputs).last_hidden_state[valid], expected, rtol=1e-5, atol=1e-5)
    nystrom_models.use_nystrom(model, 6)
    outputs = model(**inputs, output_attentions=True)
    assert (outputs.last_hidden_state[valid] - expected).abs().max() > 1e-5
    assert [attention_map.shape for attention_map in outputs.attentions] == [(2, 2, 36, 36)] * 2
    if "input_ids" in inputs:
        inputs["input_ids"][1, 20:] = 7
        other = model(**inputs).last_hidden_state
        torch.testing.assert_close(other[valid], outputs.last_hidden_state[valid], rtol=1e-5, atol=1e-5)
