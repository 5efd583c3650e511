# SPDX-License-Identifier: Apache-2.0
import pytest
from transformers import AutoTokenizer

from nystrom_models import LinformerConfig, NystromformerConfig
from nystrom_models.data import train_tokenizer


def test_pairs_and_special_tokens(tokenizer):
    encoding = tokenizer("the mean", "of a tensor")
    tokens = tokenizer.convert_ids_to_tokens(encoding["input_ids"])
    assert tokens[0] == "[CLS]" and tokens[-1] == "[SEP]" and tokens.count("[SEP]") == 2
    second = tokens.index("[SEP]") + 1
    assert encoding["token_type_ids"] == [0] * second + [1] * (len(tokens) - second)


@pytest.mark.parametrize("config_class", [NystromformerConfig, LinformerConfig])
def test_ids_are_the_defaults_of_the_configurations(tokenizer, config_class):
    config = config_class()
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id) == (
        config.bos_token_id,
        config.pad_token_id,
        config.eos_token_id,
    )


@pytest.mark.parametrize("config_class", [NystromformerConfig, LinformerConfig])
def test_auto_tokenizer_loads_it_beside_a_model(tokenizer, tmp_path, config_class):
    config_class().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "Compute the mean of unbelievable values [MASK]."
    assert dict(loaded(text, text)) == dict(tokenizer(text, text))
    assert loaded.model_max_length == 512 and loaded.mask_token_id == tokenizer.mask_token_id
    assert loaded.decode(loaded("compute the mean", add_special_tokens=False)["input_ids"]) == "compute the mean"


def test_nothing_to_train_from():
    with pytest.raises(ValueError, match="holds no text"):
        train_tokenizer([""], vocab_size=100, show_progress=False)
    with pytest.raises(ValueError, match="vocab_size must be above 5"):
        train_tokenizer(["text"], vocab_size=5)
