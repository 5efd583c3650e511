# SPDX-License-Identifier: Apache-2.0
import random

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from nystrom_models import LinformerConfig, NystromformerConfig
from nystrom_models.data import (
    TextBatches,
    causal_tokenizer,
    tokenization,
    train_byte_level_tokenizer,
    train_character_tokenizer,
    train_tokenizer,
)


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


@pytest.mark.parametrize("train", [train_tokenizer, train_character_tokenizer])
def test_nothing_to_train_from(train):
    with pytest.raises(ValueError, match="contains no text"):
        train([""], vocab_size=100, show_progress=False)
    with pytest.raises(ValueError, match="vocab_size must be above 5"):
        train(["text"], vocab_size=5)


def test_characters(tokenizer, tmp_path):
    """White space and characters of several bytes are tokens, too; special tokens are those of WordPiece."""
    texts = ["GATTACA\n ก็ดี é😀"] * 2 + ["x"]
    train_character_tokenizer(texts, show_progress=False).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    assert loaded.all_special_ids == tokenizer.all_special_ids
    assert dict(loaded("ga", "t")).keys() == dict(tokenizer("ga", "t")).keys()
    assert loaded("ga", "t")["token_type_ids"] == [0] * 4 + [1] * 2
    assert loaded.tokenize("GA[MASK]ก็\n x") == ["g", "a", "[MASK]", "ก", "็", "\n", " ", "[UNK]"]  # x occurs once
    assert loaded.decode(loaded(texts[0], add_special_tokens=False)["input_ids"]) == texts[0].lower()
    kept = train_character_tokenizer(texts, lowercase=False, show_progress=False)
    assert kept.tokenize("GaT") == ["G", "[UNK]", "T"]
    few = train_character_tokenizer(texts, vocab_size=6, show_progress=False)
    assert few.convert_ids_to_tokens(range(6)) == [*("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"), "a"]


def test_the_same_texts_give_the_same_vocabulary():
    """With many ties between merges, and with characters that occur only at the beginning of words."""
    words = ["".join(random.Random(i).choices("abcdefghijklé中", k=5)) for i in range(60)]
    texts = [f"({' '.join(words)})", "Żółw x"]
    vocabularies = [
        list(train_tokenizer(given, 80, min_frequency=1, show_progress=False).get_vocab().items())
        for given in (texts, texts, iter(texts), [texts])
    ]
    first = sorted(vocabularies[0], key=lambda item: item[1])
    for vocabulary in vocabularies[1:]:
        assert sorted(vocabulary, key=lambda item: item[1]) == first
    assert [i for _, i in first] == list(range(len(first)))
    assert {"(", "##a", "x"} <= {token for token, _ in first} and "##(" not in dict(first)


def test_characters_beyond_the_alphabet_leave_no_holes():
    letters = [chr(0x4E00 + i) for i in range(1500)] + [chr(0xAC00 + i) + "a" for i in range(1500)]
    tokenizer = train_tokenizer([" ".join(letters)] * 2, 4000, show_progress=False, lowercase=False)
    assert sorted(tokenizer.get_vocab().values()) == list(range(len(tokenizer)))
    assert tokenizer.all_special_tokens and not any(token.startswith("##") for token in tokenizer.all_special_tokens)


def test_batches_of_a_column_can_be_read_twice():
    batches = TextBatches(Dataset.from_dict({"body": ["a", "b", "c"], "other": [1, 2, 3]}), "body", batch_size=2)
    assert list(batches) == list(batches) == [["a", "b"], ["c"]]


def test_a_byte_level_tokenizer_loses_nothing(documents, tmp_path):
    tokenizer = train_byte_level_tokenizer(documents["text"], 400, show_progress=False)
    assert len(tokenizer) == 400
    assert train_byte_level_tokenizer(documents["text"], 400, show_progress=False).get_vocab() == tokenizer.get_vocab()
    config = LinformerConfig()
    ids = (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert ids == (config.bos_token_id, config.pad_token_id, config.eos_token_id)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in (*documents["text"][:20], "  R\u00f6hre , \U0001f600\n\tEND ."):
        for each in (tokenizer, loaded, causal_tokenizer(loaded)):
            found = each(text)
            assert set(found) == {"input_ids", "attention_mask"} and found["input_ids"][0] == each.bos_token_id
            assert each.decode(found["input_ids"], skip_special_tokens=True) == text
    assert len(loaded(documents["text"][0])["input_ids"]) < len(documents["text"][0]) / 2
    with pytest.raises(ValueError, match="vocab_size must be at least 259"):
        train_byte_level_tokenizer(documents["text"], 258)


@pytest.mark.parametrize("train", [train_tokenizer, train_byte_level_tokenizer, train_character_tokenizer])
def test_training_on_parts_of_texts_finds_the_same_vocabulary(train, documents, monkeypatch):
    """Trainers take quadratic time for a text without spaces, so that they get long texts in parts."""
    texts = [*documents["text"][:100], "\n\n  ".join(documents["text"]), "Tab\tand  two   spaces .\r\n" * 99]

    def vocabulary(longest_part):
        monkeypatch.setattr(tokenization, "LONGEST_PART", longest_part)
        return train(texts, 400, show_progress=False).backend_tokenizer.to_str()

    assert vocabulary(10**9) == vocabulary(2000) == vocabulary(50)


def test_texts_without_spaces_are_trained_on_in_parts():
    """Of all their characters, and none is longer than a trainer can take."""
    genome = "".join(random.Random(0).choices("ACGT", k=10_001))
    [parts] = tokenization._in_parts([[genome, "short"]])
    assert "".join(parts) == genome + "short" and max(map(len, parts)) == tokenization.LONGEST_PART
    tokenizer = train_byte_level_tokenizer([genome], 300, show_progress=False)
    assert tokenizer.decode(tokenizer(genome, verbose=False)["input_ids"], skip_special_tokens=True) == genome


def test_every_character_is_kept_in_a_small_vocabulary():
    """Each at the beginning of words and within, and no continuation of a letter that no text has."""
    letters = [chr(0x430 + number) for number in range(32)]
    words = [first + second for first, second in zip(letters, reversed(letters), strict=True)]
    tokenizer = train_tokenizer([" ".join(words)] * 3, vocab_size=20, lowercase=False, show_progress=False)
    assert tokenizer.tokenize(" ".join(words)) == [piece for word in words for piece in (word[0], f"##{word[1]}")]
    assert "##a" not in tokenizer.get_vocab()
