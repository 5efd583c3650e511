# SPDX-License-Identifier: Apache-2.0
import re
import warnings

import pytest
from datasets import Dataset

from nystrom_models.data import (
    TokenTask,
    causal_dataset,
    causal_stream,
    causal_tokenizer,
    classification_dataset,
    pretraining_dataset,
    question_answering_dataset,
    token_classification_dataset,
    train_byte_level_tokenizer,
    train_character_tokenizer,
)
from nystrom_models.data.unknown_text import check_known, check_known_documents, unknown_characters

GENOME = "ACGT" * 100


def test_the_share_of_characters(tokenizer):
    assert unknown_characters(tokenizer, ["the mean value", ""]) == (0.0, "")
    share, example = unknown_characters(tokenizer, ["mean value", "Ж value"])
    assert share == pytest.approx(1 / (9 + 6)) and example == "Ж"
    assert unknown_characters(tokenizer, [GENOME]) == (1.0, GENOME)  # a word of more than 100 characters
    assert unknown_characters(tokenizer, []) == (0.0, "")
    # Only the beginning of a text is read.
    assert unknown_characters(tokenizer, ["mean " * 2000 + GENOME]) == (0.0, "")


def test_spaces_between_words_of_a_list_are_no_text(tokenizer):
    """The bases of a gene as words, for a tokenizer of bases: 3 of 103 characters are unknown, and no space is."""
    bases = train_character_tokenizer(["ACGT"] * 2, 30, show_progress=False)
    rows = Dataset.from_dict({"tokens": [[*"ACGT" * 25, *"RYK"], []]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_known_documents(rows, ["tokens"], bases, "the texts")
    assert unknown_characters(bases, rows["tokens"]) == (3 / 103, "R")
    assert unknown_characters(tokenizer, [["mean", "Ж", "value"], ["Ж"]]) == (2 / 11, "Ж")
    assert unknown_characters(tokenizer, [["mean"] * 2500 + ["Ж"]]) == (0.0, "")  # only its beginning is read
    assert unknown_characters(tokenizer, [["mean" * 5000]])[0] == 1.0


def test_tokenizers_that_know_everything_or_do_not_tell(slow_tokenizer):
    assert unknown_characters(train_byte_level_tokenizer(["text"], 300, show_progress=False), ["Ж" + GENOME])[0] == 0
    assert unknown_characters(slow_tokenizer, [GENOME]) == (0.0, "")


def test_a_few_unknown_characters_are_fine_more_are_a_warning(tokenizer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_known(tokenizer, ["mean " * 100 + "Ж"], "the texts")
    with pytest.warns(UserWarning, match=r"replaces 11% of the characters of the texts by \[UNK\], for example 'Ж'"):
        check_known(tokenizer, ["meanvalue" * 9 + " " + "Ж " * 10], "the texts")


@pytest.mark.parametrize("stream", [False, True])
def test_documents_of_all_parts_of_a_data_set_are_looked_at(tokenizer, stream):
    """101 known ones and 150 genomes after them, beyond the first 100, which are read of a stream."""
    texts = Dataset.from_dict({"text": ["the mean " * 45] * 101 + [GENOME] * 150, "other": [0] * 251})
    if stream:
        check_known_documents(texts.to_iterable_dataset(), ["text"], tokenizer, "the texts")
        texts = texts.select(range(101, 251)).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"of the characters of the texts by \[UNK\], for example 'ACGTACGT"):
        check_known_documents(texts, ["text"], tokenizer, "the texts")


def test_no_rows_are_made_of_unknown_text(tokenizer):
    texts = Dataset.from_dict({"text": [GENOME] * 3, "label": [0, 1, 0]})
    message = re.escape("--tokenizer_type character for texts without spaces")
    with pytest.raises(ValueError, match=message):
        pretraining_dataset(texts, tokenizer, 64)
    with pytest.raises(ValueError, match=message):
        causal_dataset(texts, causal_tokenizer(tokenizer), 64)
    with pytest.raises(ValueError, match=message):
        causal_stream(texts.to_iterable_dataset(), causal_tokenizer(tokenizer), list, 64)
    with pytest.raises(ValueError, match=message):
        classification_dataset(texts, tokenizer, 64)
    words = Dataset.from_dict({"tokens": [["the", GENOME]] * 3})
    with pytest.raises(ValueError, match=message):
        token_classification_dataset(words, tokenizer, 64, TokenTask("tokens", "tags"), None)
    questions = Dataset.from_dict({"question": ["the"] * 3, "context": [GENOME] * 3})
    with pytest.raises(ValueError, match=message):
        question_answering_dataset(questions, tokenizer, 64, with_answers=False, doc_stride=8)
