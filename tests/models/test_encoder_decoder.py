# SPDX-License-Identifier: Apache-2.0
"""Every family as the encoder of Transformers' `EncoderDecoderModel`, which writes a short text about a long one."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

from nystrom_models import LinearTransformerConfig
from tests.models.options import TINY, TOLERANCE, make_model, padded_inputs, relative_error

DECODERS = {
    "bert": lambda: BertLMHeadModel(BertConfig(**TINY, is_decoder=True, add_cross_attention=True)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, add_cross_attention=True)
    ),
}


def make_pair(option, decoder, folder):
    """From two saved models, as users make it."""
    make_model(option).save_pretrained(folder / "encoder")
    DECODERS[decoder]().save_pretrained(folder / "decoder")
    model = EncoderDecoderModel.from_encoder_decoder_pretrained(folder / "encoder", folder / "decoder")
    for settings in (model.config, model.generation_config):
        settings.decoder_start_token_id, settings.pad_token_id, settings.eos_token_id = 1, 0, 2
    return model.eval()


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("option", ["nystromformer-exact_last_layer", "linformer-headwise", "linear-relu"])
def test_train_generate_save_and_load(option, decoder, tmp_path):
    model = make_pair(option, decoder, tmp_path)
    # Rows padded on either side, which must not change what is written about each row alone.
    inputs, labels = padded_inputs(), torch.randint(3, 99, (3, 7))
    model(**inputs, labels=labels).loss.backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {"encoder.pooler.dense.weight", "encoder.pooler.dense.bias"}  # as with a BERT

    outputs = model(**inputs, labels=labels)
    written = model.generate(**inputs, max_new_tokens=6, num_beams=2, do_sample=False)
    for row, mask in enumerate(inputs["attention_mask"].bool()):
        alone = model(inputs["input_ids"][row, mask][None], labels=labels[row : row + 1])
        assert relative_error(outputs.logits[row : row + 1], alone.logits) < TOLERANCE[torch.float32]
        text = model.generate(inputs["input_ids"][row, mask][None], max_new_tokens=6, num_beams=2, do_sample=False)[0]
        assert torch.equal(written[row, : len(text)], text)

    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved")
    assert isinstance(loaded, EncoderDecoderModel) and type(loaded.encoder) is type(model.encoder)
    assert torch.equal(loaded.eval()(**inputs, labels=labels).logits, outputs.logits)


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linformer-layerwise", "linear-elu"])
def test_a_trainer_evaluates_the_texts_that_are_written(option, tmp_path):
    """It gives the labels to `generate()`, which gives them to the encoder."""
    model = make_pair(option, "bert", tmp_path)
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path / "run"),
        predict_with_generate=True,
        generation_max_length=6,
        per_device_train_batch_size=3,
        max_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    inputs = padded_inputs() | {"labels": torch.randint(3, 99, (3, 7))}
    rows = [{name: tensor[row] for name, tensor in inputs.items()} for row in range(3)]
    trainer = Seq2SeqTrainer(model, arguments, train_dataset=rows)
    trainer.train()
    predicted = trainer.predict(rows, max_length=6)
    written = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], max_length=6)
    assert predicted.predictions[:, : written.shape[1]].tolist() == written.tolist()
    assert predicted.metrics["test_loss"] > 0


def test_a_family_as_the_decoder_is_refused_by_name():
    with pytest.raises(ValueError, match="no cross-attention: use add_cross_attention=False"):
        LinearTransformerConfig(is_decoder=True, add_cross_attention=True)
    encoder, decoder = BertModel(BertConfig(**TINY)), LinearTransformerConfig(**TINY, is_decoder=True)
    with pytest.raises(ValueError, match="must be another model, such as a BERT or GPT-2"):
        EncoderDecoderModel(encoder=encoder, decoder=AutoModelForCausalLM.from_config(decoder))
