# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
from datasets import ClassLabel, Dataset, Features, Sequence, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom_models.data import train_tokenizer
from nystrom_models.data.token_classification import (
    TokenClassificationCollator,
    TokenTask,
    tag_names,
    token_classification_dataset,
)

NAMES = ["O", "B-x", "I-x"]
# Words of one token, of several, one that no tokenizer of ASCII letters knows, and two that are no token at all.
WORDS = ["array", "batch", "buffering", "caching", "日本", "\u200b", ""]


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["array batch"] * 9 + ["buffering caching"]
    return train_tokenizer(texts, vocab_size=40, model_max_length=512, show_progress=False)


def rows_of(tokenizer, tokens, tags=None, max_length=16, **options):
    task = TokenTask(label_all_tokens=options.pop("label_all_tokens", False))
    columns = {"tokens": tokens} | ({} if tags is None else {"ner_tags": tags})
    features = Features({name: Sequence(Value("string")) for name in columns})
    dataset = Dataset.from_dict(columns, features=features)
    return list(
        token_classification_dataset(dataset, tokenizer, max_length, task, None if tags is None else NAMES, **options)
    )


def test_a_label_is_on_the_first_token_of_its_word(tokenizer):
    words, tags = ["array", "buffering", "batch"], ["O", "B-x", "I-x"]
    pieces = [len(tokenizer.tokenize(word)) for word in words]
    assert pieces[0] == pieces[2] == 1 and (more := pieces[1] - 1) > 0
    [row] = rows_of(tokenizer, [words], [tags])
    assert row["labels"] == [-100, 0, 1, *[-100] * more, 2, -100]
    assert row["words"] == [-1, 0, 1, *[-1] * more, 2, -1]
    assert row["input_ids"] == tokenizer(words, is_split_into_words=True)["input_ids"]
    [row] = rows_of(tokenizer, [words], [tags], label_all_tokens=True)
    assert row["labels"] == [-100, 0, 1, *[2] * more, 2, -100]
    # Without labels, for a test set.
    [row] = rows_of(tokenizer, [words])
    assert "labels" not in row and row["words"] == [-1, 0, 1, *[-1] * more, 2, -1]


@settings(max_examples=25)
@given(
    st.lists(st.lists(st.sampled_from(WORDS), max_size=12), min_size=1, max_size=4),
    st.integers(3, 12),
    st.integers(0, 3),
    st.booleans(),
)
def test_each_word_with_a_token_is_labelled_once_however_rows_are_divided(
    tokenizer, texts, max_length, overlap, everywhere
):
    overlap = min(overlap, max_length - 3)
    tags = [[NAMES[i % 3] for i in range(len(words))] for words in texts]
    rows = rows_of(tokenizer, texts, tags, max_length, doc_stride=overlap, label_all_tokens=everywhere)
    found = {}
    for number, row in enumerate(rows):
        assert row["index"] == number and row["length"] == len(row["input_ids"]) <= max_length
        assert row["input_ids"][0] == tokenizer.cls_token_id and row["input_ids"][-1] == tokenizer.sep_token_id
        for place, word in enumerate(row["words"]):
            if word >= 0:
                key = row["document"], word
                assert key not in found
                found[key] = row["input_ids"][place]
                assert row["labels"][place] == word % 3
            elif not everywhere:
                assert row["labels"][place] == -100
    first = {
        (number, place): ids[0]
        for number, words in enumerate(texts)
        for place, word in enumerate(words)
        if (ids := tokenizer(word, add_special_tokens=False)["input_ids"])
    }
    assert found == first


def test_many_texts_without_a_token(tokenizer):
    rows = rows_of(tokenizer, [[]] * 120 + [["array"]], [[]] * 120 + [["B-x"]])
    assert [(row["document"], row["labels"]) for row in rows] == [(120, [-100, 1, -100])]


def test_a_word_that_is_longer_than_a_row_keeps_its_first_tokens(tokenizer):
    ids = tokenizer("buffering", add_special_tokens=False)["input_ids"]
    assert len(ids) > 3
    rows = rows_of(tokenizer, [["array", "buffering", "batch"]], [NAMES], max_length=5)
    assert [row["shortened"] for row in rows] == [0, 1, 0] and rows[1]["input_ids"][1:-1] == ids[:3]


def test_labels_by_number_and_by_name(tokenizer):
    features = Features({"tokens": Sequence(Value("string")), "ner_tags": Sequence(ClassLabel(names=NAMES))})
    dataset = Dataset.from_dict({"tokens": [["array", "batch"]], "ner_tags": [[2, 0]]}, features=features)
    assert tag_names(dataset, "ner_tags", "the data set") == NAMES
    turned = ["I-x", "O", "B-x"]
    [row] = token_classification_dataset(dataset, tokenizer, 8, TokenTask(), turned)
    assert row["labels"] == [-100, 0, 1, -100]
    # -1, which stands for hidden labels, is not the last class.
    hidden = Dataset.from_dict({"tokens": [["array", "batch"]], "ner_tags": [[-1, 0]]}, features=features)
    with pytest.raises(ValueError, match=r"contains \['-1'\] in row 1, .* remove their column"):
        token_classification_dataset(hidden, tokenizer, 8, TokenTask(), NAMES)
    plain = Dataset.from_dict({"tokens": [["array", "batch"]], "ner_tags": [[2, 0]]})
    with pytest.raises(ValueError, match=r"holds labels as int64: give their names .* --label_names O B-person"):
        tag_names(plain, "ner_tags", "the data set")
    [row] = token_classification_dataset(plain, tokenizer, 8, TokenTask(label_names=tuple(NAMES)), NAMES)
    assert row["labels"] == [-100, 2, 0, -100]


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_are_padded_with_ignored_labels_on_the_right(side, tokenizer):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = side
    rows = rows_of(tokenizer, [["array"], ["array", "batch"]], [["O"], ["B-x", "I-x"]])
    batch = TokenClassificationCollator(tokenizer, with_index=True)(rows)
    assert batch["labels"].tolist() == [[-100, 0, -100, -100], [-100, 1, 2, -100]]
    assert batch["index"].tolist() == [0, 1] and batch["attention_mask"].sum().item() == 7
    assert not {"words", "document", "shortened"} & batch.keys()
    assert batch["attention_mask"][0].tolist() == [1, 1, 1, 0] and tokenizer.padding_side == side


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"words": [["array"]]}, {}, r"no column 'tokens'; its columns are \['words'\]"),
        ({"tokens": ["array batch"]}, {}, "'tokens' of the data set must hold a list of words"),
        ({"tokens": [["array"]], "ner_tags": ["O"]}, {}, "'ner_tags' of the data set must hold a list of labels"),
        ({"tokens": [["array"]] * 2, "ner_tags": [["O"], ["O", "O"]]}, {}, "Row 2 .* has 1 words .* but 2 labels"),
        (
            {"tokens": [["array"], [None]], "ner_tags": [["O"], ["O"]]},
            {},
            "'tokens' of .* has a list without a value in row 2",
        ),
        ({"tokens": [["array"], None], "ner_tags": [["O"], ["O"]]}, {}, "'tokens' .* has no value in row 2"),
        ({"tokens": [["array"]], "ner_tags": [["B-y"]]}, {}, r"contains \['B-y'\] in row 1, not among the labels"),
        ({"tokens": [["array"]], "ner_tags": [["O"]]}, {"max_length": 2}, "--max_seq_length must leave room"),
        ({"tokens": [["array"]], "ner_tags": [["O"]]}, {"doc_stride": 6}, "--doc_stride must be .* less than 6"),
    ],
)
def test_bad_data(columns, options, message, tokenizer):
    options = {"max_length": 8, "task": TokenTask(), "label_names": NAMES, **options}
    with pytest.raises(ValueError, match=message):
        token_classification_dataset(Dataset.from_dict(columns), tokenizer, **options)


def test_a_tokenizer_that_does_not_tell_words_is_refused(slow_tokenizer):
    dataset = Dataset.from_dict({"tokens": [["array"]], "ner_tags": [["O"]]})
    with pytest.raises(ValueError, match=r"CanineTokenizer does not tell which word .* a fast tokenizer is needed"):
        token_classification_dataset(dataset, slow_tokenizer, 8, TokenTask(), NAMES)
