# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens from texts, and how long they can be."""

import pytest

from nystrom_models.analysis.texts import longest_row, token_rows
from nystrom_models.data import train_tokenizer
from tests.analysis.models import make_model

TEXT = "Return a list of the names of all columns . Raise an error if the file does not exist . "


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT] * 4, vocab_size=99, model_max_length=64, show_progress=False)


def test_rows_are_the_beginnings_of_texts_and_short_texts_are_joined(tokenizer):
    def texts():
        # Tokens: more than a row, less than one, enough with the one before, exactly one row.
        for count in (13, 3, 7, 8):
            yield " ".join(["list"] * (count - 1) + ["file"])
        raise AssertionError("No more text is needed.")

    word, end = (tokenizer.convert_tokens_to_ids(name) for name in ("list", "file"))
    assert tokenizer.unk_token_id not in (word, end)
    rows = token_rows(texts(), tokenizer, 10, 3)
    wanted = ([word] * 8, [word, word, end, *[word] * 5], [*[word] * 7, end])
    assert [row["input_ids"].tolist() for row in rows] == [
        [[tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]] for ids in wanted
    ]
    assert len(token_rows([TEXT], tokenizer, 3, 1)) == 1


def test_too_little_text_or_room_is_refused(tokenizer):
    with pytest.raises(ValueError, match="A row of 2 tokens has room only for the special tokens"):
        token_rows([TEXT], tokenizer, 2, 1)
    with pytest.raises(ValueError, match="fewer than 60 tokens"):
        token_rows([TEXT[:20], TEXT[20:40]], tokenizer, 60, 1)


@pytest.mark.parametrize(
    ("family", "fields", "longest"),
    [
        ("Bert", {"max_position_embeddings": 40}, 40),
        ("Bert", {"max_position_embeddings": 80}, 64),
        # Its positions start after that of padding: 40 rows of the table, of which two stand for no token.
        ("Roberta", {"max_position_embeddings": 40}, 38),
        ("Linformer", {"max_position_embeddings": 40, "projected_dim": 8}, 40),
        ("LinearTransformer", {"max_position_embeddings": None, "position_embedding_type": "sinusoidal"}, 64),
    ],
    ids=["model", "tokenizer", "RoBERTa", "first positions of a family", "any length"],
)
def test_a_row_is_as_long_as_both_model_and_tokenizer_take(family, fields, longest, tokenizer):
    assert longest_row(make_model(family, **fields), tokenizer) == longest
