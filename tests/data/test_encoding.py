# SPDX-License-Identifier: Apache-2.0
import random
from itertools import pairwise

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from nystrom_models.data import train_byte_level_tokenizer, train_character_tokenizer
from nystrom_models.data.encoding import NUM_CHARACTERS, encode_texts


@pytest.fixture(scope="module")
def texts(documents):
    """Short and long ones, with white space of all kinds and characters of several bytes."""
    choices = random.Random(0).choices
    spaces = choices([" ", " ", " ", "  ", "\n", " \t", " é ", " 😀 "], k=20_000)
    words = choices([*documents["text"][0].split(), "Ångström", "don't"], k=20_000)
    return ["", " ", "word", *documents["text"][:50], "".join(map("".join, zip(words, spaces, strict=True)))]


def unigram(texts):
    """As XLM-RoBERTa's and T5's: a word begins with its space."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=300, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.fixture(scope="module", params=["wordpiece", "byte_level_bpe", "unigram", "character"])
def any_tokenizer(request, texts):
    if request.param == "wordpiece":
        return request.getfixturevalue("tokenizer")
    if request.param == "unigram":
        return unigram(texts)
    train = train_byte_level_tokenizer if request.param == "byte_level_bpe" else train_character_tokenizer
    return train(texts, 400, show_progress=False)


@pytest.mark.parametrize("size", [400, 1009, NUM_CHARACTERS])
def test_parts_give_the_tokens_of_whole_texts(any_tokenizer, texts, size):
    whole = any_tokenizer(texts, add_special_tokens=False, verbose=False)
    for number, (ids, ends, word_starts) in enumerate(encode_texts(texts, any_tokenizer, size)):
        expected = whole[number]
        assert ids.tolist() == expected.ids
        assert ends.tolist() == np.maximum.accumulate([end for _, end in expected.offsets]).tolist()
        words = [None, *expected.word_ids]
        begins = [after is None or after != before for before, after in pairwise(words)]
        assert word_starts.tolist() == begins


def test_a_chromosome_is_tokenized_in_parts(monkeypatch):
    """No space to cut at, and never more at once than asked for."""
    genome = "".join(random.Random(0).choices("ACGT", k=250_001))
    tokenizer = train_character_tokenizer([genome[:1000]], show_progress=False)
    sizes = []
    call = PreTrainedTokenizerFast.__call__

    def counted(self, parts, **options):
        sizes.append(sum(map(len, parts)))
        return call(self, parts, **options)

    monkeypatch.setattr(PreTrainedTokenizerFast, "__call__", counted)
    short, ((ids, ends, word_starts)) = encode_texts(["acgt", genome], tokenizer, 100_000)
    assert max(sizes) <= 100_000 and sum(sizes) == 250_005
    assert tokenizer.decode(ids) == genome.lower() and tokenizer.decode(short.ids) == "acgt"
    assert ends.tolist() == list(range(1, 250_002)) and word_starts.all()


@pytest.mark.parametrize("k", [3, 6, 7, 11, 13])
def test_a_cut_does_not_change_the_frame_of_k_mers(k):
    genome = "".join(random.Random(0).choices("ACGT", k=NUM_CHARACTERS + 6 * k))
    whole = [genome[i : i + k] for i in range(0, len(genome), k)]
    words = {word: number for number, word in enumerate(dict.fromkeys(["[UNK]", *whole]))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(f".{{1,{k}}}"), behavior="isolated")
    (found,) = encode_texts([genome], PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]"))
    assert found.ids.tolist() == [words[word] for word in whole]
