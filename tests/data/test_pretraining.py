# SPDX-License-Identifier: Apache-2.0
import re
import warnings
from itertools import pairwise

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from nystrom_models.data import (
    PretrainingCollator,
    pretraining_dataset,
    pretraining_stream,
    train_character_tokenizer,
)
from nystrom_models.data.pretraining import ordered_share

MAX_LENGTH = 48


@pytest.fixture(scope="module")
def rows(documents, tokenizer):
    return pretraining_dataset(documents, tokenizer, MAX_LENGTH, short_seq_prob=0.2)


def tokens_of(text, tokenizer):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def byte_level_tokenizer(texts, add_prefix_space=False):
    """A tokenizer like RoBERTa's: a word begins with the space before it, a character may be several tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    bpe.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<mask>", "<pad>"]
    trainer = trainers.BpeTrainer(
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=specials, show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, model_max_length=64, mask_token="<mask>", pad_token="<pad>", padding_side="right"
    )


def test_rows_follow_each_other_and_lose_nothing(documents, rows, tokenizer):
    together = [token for row in rows for token in row["input_ids"].tolist()]
    assert together == [token for text in documents["text"] for token in tokens_of(text, tokenizer)]
    assert list(rows["length"]) == [len(row["input_ids"]) + 3 for row in rows]
    assert max(rows["length"]) <= MAX_LENGTH
    assert list(rows["index"]) == list(range(len(rows)))


def test_a_row_has_as_many_whole_sentences_as_it_can(tokenizer):
    """It had no room for the sentence after it or, if the document was cut from its end, for the one before it."""
    texts = [
        " ".join(f"Sentence {'data ' * (i * k % 5)}of the default dtype." for i in range(99)) for k in range(1, 9)
    ]
    rows = pretraining_dataset(Dataset.from_dict({"text": texts}), tokenizer, MAX_LENGTH, 0.0)
    sentences = [[len(part) for part in np.split(row["input_ids"], row["sentence_starts"])] for row in rows]
    decoded = [tokenizer.decode(part) for row in rows for part in np.split(row["input_ids"], row["sentence_starts"])]
    assert all(re.fullmatch(r"sentence [a-z ]+\.", text) for text in decoded)
    lengths = [len(tokens_of(text, tokenizer)) for text in texts]
    ends = np.flatnonzero(np.isin(np.cumsum([sum(row) for row in sentences]), np.cumsum(lengths)))
    directions = set()
    for first, last in pairwise([-1, *ends.tolist()]):
        pairs = list(pairwise(sentences[first + 1 : last + 1]))
        forwards = all(sum(row) + following[0] + 3 > MAX_LENGTH for row, following in pairs)
        backwards = all(before[-1] + sum(row) + 3 > MAX_LENGTH for before, row in pairs)
        assert len(pairs) > 5 and forwards + backwards == 1
        directions.add(forwards)
    assert directions == {True, False}
    assert len({len(row) for row in sentences}) > 1


def test_the_lengths_of_segments_do_not_show_their_order(tokenizer):
    """Cut from the beginning alone, the first segment is the longer one in 56 % of the pairs, as it begins with the
    sentence for which the row before had no room."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 60, size=(4, 10_000))
    texts = [" ".join("Data" + " data" * (length - 1) + "." for length in row) for row in lengths.tolist()]
    rows = pretraining_dataset(Dataset.from_dict({"text": texts}), tokenizer, 128, load_from_cache_file=False)
    shares = []
    for row in rows:
        if len(row["sentence_starts"]):
            first = row["sentence_starts"] / len(row["input_ids"])
            shares.append(np.mean(first > 0.5) + np.mean(first == 0.5) / 2)
    assert len(shares) > 7_000 and abs(np.mean(shares) - 0.5) < 0.01, np.mean(shares)


def test_a_sentence_longer_than_a_row_is_cut_between_words_and_gives_no_order(tokenizer):
    """Half a sentence at the end of the first segment would show that the pair is swapped."""
    around = "The mean. The sum. " * MAX_LENGTH
    text = around + "The axis. Begin " + "the data " * 2 * MAX_LENGTH + "end. The axis. " + around
    document, forwards = Dataset.from_dict({"text": [text]}), set()
    for seed in range(4):
        rows = pretraining_dataset(document, tokenizer, MAX_LENGTH, 0.0, seed, with_word_starts=True)
        texts = [tokenizer.decode(row["input_ids"]) for row in rows]
        first, last = (next(i for i, text in enumerate(texts) if word in text) for word in ("begin", "end"))
        assert 3 < first < last - 3
        assert [len(row["sentence_starts"]) > 0 for row in rows] == [not first <= i <= last for i in range(len(rows))]
        # One end of the long sentence has other sentences beside it.
        forwards.add("axis" in texts[last])
        assert ("axis" in texts[last]) + ("axis" in texts[first]) == 1
        assert all(row["word_starts"][0] for row in rows)
        assert all(text.endswith(".") for text in texts[:first] + texts[last:])
        full = slice(first, last) if "axis" in texts[last] else slice(first + 1, last + 1)
        assert min(rows["length"][full]) >= MAX_LENGTH - 8  # the longest word is a few tokens
    assert forwards == {True, False}


def test_without_sentence_order_rows_are_full(tokenizer, documents):
    """They end between words, except the last of a document, and have no sentences."""
    text = " ".join(f"Sentence {i} about the compute data of the default dtype." for i in range(300))
    document = Dataset.from_dict({"text": [text]})
    rows = pretraining_dataset(document, tokenizer, MAX_LENGTH, 0.0, with_word_starts=True, sentence_order=False)
    lengths = np.array(rows["length"])[:-1]
    assert lengths.min() >= MAX_LENGTH - 8  # the longest word is a few tokens
    assert lengths.mean() > 0.95 * MAX_LENGTH
    assert all(row["word_starts"][0] for row in rows) and ordered_share(rows) == 0
    short = pretraining_dataset(documents, tokenizer, MAX_LENGTH, short_seq_prob=0.5, sentence_order=False)
    test_rows_follow_each_other_and_lose_nothing(documents, short, tokenizer)
    assert np.mean(np.array(short["length"]) < MAX_LENGTH / 2) > 0.15


def test_sentences_begin_where_the_row_says(rows, tokenizer):
    checked = 0
    for row in rows:
        ids, starts = row["input_ids"], row["sentence_starts"].tolist()
        assert starts == sorted(set(starts)) and all(0 < start < len(ids) for start in starts)
        for start in starts:
            assert tokenizer.decode(ids[start:]).startswith("sentence")
            checked += 1
        # Every beginning is stored, except at the beginning of the row, if the row consists of whole sentences.
        whole = re.fullmatch(r"sentence .*\.", tokenizer.decode(ids))
        assert len(starts) == (len(re.findall("sentence", tokenizer.decode(ids[1:]))) if whole else 0)
    assert checked > 500


def test_sentences_begin_with_the_space_before_them():
    text = "Röhre auf. Dann zu. Ende! \U0001f600 Noch eins."
    for add_prefix_space in (False, True):
        tokenizer = byte_level_tokenizer([text] * 3, add_prefix_space)
        [row] = pretraining_dataset(Dataset.from_dict({"text": [text]}), tokenizer, 64, 0.0)
        parts = np.split(row["input_ids"], row["sentence_starts"])
        assert [tokenizer.decode(part).strip() for part in parts] == [
            "Röhre auf.",
            "Dann zu.",
            "Ende!",
            "\U0001f600 Noch eins.",
        ]


def test_abbreviations_are_those_of_the_language():
    """In the rows of a data set and of a stream."""
    text = "Siehe Abb. 3 im Text. Dann weiter."
    tokenizer = byte_level_tokenizer([text] * 3)
    documents = Dataset.from_dict({"text": [text]})
    for language, number in (("en", 3), ("de", 2)):
        [row] = pretraining_dataset(documents, tokenizer, 64, 0.0, language=language)
        assert len(row["sentence_starts"]) == number - 1
        options = {"language": language, "per_device_train_batch_size": 1}
        stream = pretraining_stream(documents.to_iterable_dataset(), tokenizer, list, 64, 0.0, **options)
        [[streamed]] = next(stream.steps()).batches
        assert streamed["sentence_starts"].tolist() == row["sentence_starts"].tolist()


@pytest.mark.parametrize("kind", ["byte_level", "byte_level_with_prefix", "character"])
def test_white_space_does_not_show_the_order(kind):
    """Whatever stands first or last in a document, or in a line."""
    texts = ["Röhre auf. Dann zu.\nEnde!\n\nNoch  eins. ", "\tDann auf.", " \n ", "Ende! Dann auf.\r\nNoch eins."]
    if kind == "character":
        tokenizer = train_character_tokenizer(texts * 3, show_progress=False)
    else:
        tokenizer = byte_level_tokenizer(texts * 3, kind.endswith("prefix"))
    rows = pretraining_dataset(Dataset.from_dict({"text": texts}), tokenizer, 30, 0.0)
    sentences = [part for row in rows for part in np.split(row["input_ids"], row["sentence_starts"])]
    decoded = [tokenizer.decode(part).lower() for part in sentences]
    assert len(decoded) == 8
    assert all(sentence[0] == " " and not sentence[1:2].isspace() for sentence in decoded)
    assert not any(sentence[-1].isspace() for sentence in decoded)


def test_a_character_of_many_tokens_ends():
    tokenizer = byte_level_tokenizer(["value"])
    rows = pretraining_dataset(Dataset.from_dict({"text": ["\U0001f600 value \U0001f600"]}), tokenizer, 7)
    assert len(rows) > 0 and max(rows["length"]) <= 7


def test_short_rows_have_a_probability_and_end_with_a_sentence(documents, tokenizer):
    def lengths(probability):
        return np.array(pretraining_dataset(documents, tokenizer, 128, short_seq_prob=probability)["length"])

    assert np.mean(lengths(0.0) < 32) + 0.1 < np.mean(lengths(0.9) < 32)
    text = " ".join(f"Sentence {i} about data." for i in range(200))
    rows = pretraining_dataset(Dataset.from_dict({"text": [text]}), tokenizer, MAX_LENGTH, short_seq_prob=1.0)
    assert all(tokenizer.decode(row["input_ids"]).startswith("sentence") for row in rows)


def test_rows_do_not_depend_on_processes(documents, rows, tokenizer):
    parallel = pretraining_dataset(documents, tokenizer, MAX_LENGTH, short_seq_prob=0.2, num_proc=2)
    assert parallel.with_format(None).to_list() == rows.with_format(None).to_list()


def test_a_row_takes_four_bytes_a_token(rows):
    assert set(rows.column_names) == {"input_ids", "sentence_starts", "length", "index"}
    tokens = sum(len(row["input_ids"]) for row in rows)
    assert rows.select_columns(["input_ids", "sentence_starts"]).data.nbytes < 6 * tokens  # short rows, many sentences


def test_the_share_of_rows_with_an_order(tokenizer):
    texts = ["The mean. The sum.", "The mean of the tensor", "Он пришёл. Она ушла!", "The sum"]
    rows = pretraining_dataset(Dataset.from_dict({"text": texts}), tokenizer, MAX_LENGTH, short_seq_prob=0.0)
    assert ordered_share(rows) == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 4}, "max_length must lie between 5"),
        ({"max_length": 1000}, "tokenizer's model_max_length, but is 1000"),
        ({"short_seq_prob": 1.5}, "short_seq_prob must lie between 0 and 1"),
        ({"text_column": "body"}, r"text_column='body' does not exist; the columns are \['text'\]"),
    ],
    ids=["short", "long", "probability", "column"],
)
def test_bad_options_are_named(documents, tokenizer, options, message):
    with pytest.raises(ValueError, match=message):
        pretraining_dataset(documents, tokenizer, **{"max_length": MAX_LENGTH, **options})


def test_no_text_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="contains no text"):
        pretraining_dataset(Dataset.from_dict({"text": ["", " \n"]}), tokenizer, MAX_LENGTH)


def unigram_tokenizer(texts):
    """As XLM-RoBERTa's, which takes all up to the next space for a word."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=special, unk_token="[UNK]", show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    names = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, **dict(zip(names, special, strict=True))
    )


# Lines without a space, sentences on their own, and words.
CHINESE = "春天来了，山上的花都开了。孩子们在河边放风筝，老人坐在树下喝茶！"
WORDS = "The kite is red, and the tea is hot. "


@pytest.mark.parametrize("texts", [[CHINESE * 6] * 4, CHINESE.split("，") * 20], ids=["long", "short"])
def test_words_that_are_whole_lines_are_not_masked_as_words(texts):
    """Most rows would have nothing but masks."""
    tokenizer = unigram_tokenizer(texts)
    options = {"sentence_order": False, "load_from_cache_file": False}
    with pytest.raises(
        ValueError, match=r"tokens of the column 'text' are in words of .* Leave out --whole_word_mask"
    ):
        pretraining_dataset(Dataset.from_dict({"text": texts}), tokenizer, 64, with_word_starts=True, **options)
    pretraining_dataset(Dataset.from_dict({"text": texts}), tokenizer, 64, **options)
    stream = Dataset.from_dict({"text": texts}).to_iterable_dataset()
    arguments = (stream, tokenizer, PretrainingCollator(tokenizer, whole_word_mask=True), 64)
    options = {"sentence_order": False, "per_device_train_batch_size": 2, "buffer_size": 4}
    with pytest.raises(ValueError, match=r"Leave out --whole_word_mask"):
        pretraining_stream(*arguments, with_word_starts=True, **options)
    pretraining_stream(*arguments, **options)


def test_some_words_that_are_whole_lines_are_a_warning():
    texts = [WORDS * 10] * 2 + [CHINESE * 4]
    tokenizer = unigram_tokenizer([WORDS * 4, *CHINESE * 9])
    options = {"with_word_starts": True, "sentence_order": False, "load_from_cache_file": False}
    with pytest.warns(UserWarning, match=r"^[1-4]\d% of the tokens"):
        pretraining_dataset(Dataset.from_dict({"text": texts}), tokenizer, 64, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pretraining_dataset(Dataset.from_dict({"text": texts[:2]}), tokenizer, 64, **options)
