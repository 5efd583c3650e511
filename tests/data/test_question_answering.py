# SPDX-License-Identifier: Apache-2.0
import copy

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from nystrom_models.data import train_tokenizer
from nystrom_models.data.files import load_files
from nystrom_models.data.question_answering import (
    QuestionAnsweringCollator,
    answers_of,
    question_answering_dataset,
    require_answers,
    require_questions,
    token_span,
    without_impossible_answers,
)
from tests.data.test_encoding import unigram
from tests.data.test_pretraining import byte_level_tokenizer

WORDS = ["array", "batch", "Buffering", "naïve", "日本語", "e\u0301tude", "\U0001f600", "x-y", "a\u200bb"]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([" ".join([*WORDS, "where"])] * 9, 150, model_max_length=512, show_progress=False)


def rows_of(tokenizer, contexts, answers=None, question="where ?", max_length=20, doc_stride=0):
    columns = {"question": [question] * len(contexts), "context": contexts}
    if answers is not None:
        columns["answers"] = answers
    dataset = Dataset.from_dict(columns)
    return list(question_answering_dataset(dataset, tokenizer, max_length, answers is not None, doc_stride))


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=15),
    st.lists(st.sampled_from([" ", "  ", "\u00a0", "\n"]), min_size=15, max_size=15),
    st.data(),
)
def test_the_tokens_of_an_answer_lead_back_to_its_text(tokenizer, words, spaces, data):
    first = data.draw(st.integers(0, len(words) - 1))
    last = data.draw(st.integers(first, len(words) - 1))
    starts, context = [], ""
    for word, space in zip(words, spaces, strict=False):
        starts.append(len(context))
        context += word + space
    text = context[starts[first] : starts[last] + len(words[last])]
    overlap = data.draw(st.integers(0, 6))
    answers = [{"text": [text], "answer_start": [starts[first]]}]
    rows = rows_of(tokenizer, [context], answers, max_length=14, doc_stride=overlap)
    spans, covered = set(), set()
    for row in rows:
        begin, size = row["context_start"], len(row["char_starts"])
        assert row["length"] == len(row["input_ids"]) <= 14 and row["document"] == 0
        assert row["input_ids"][begin + size :] == [tokenizer.sep_token_id]
        covered |= set(zip(row["char_starts"], row["char_ends"], strict=True))
        if row["start_positions"] == row["null_position"]:
            assert row["end_positions"] == row["null_position"] == 0
            continue
        place = [row[name] - begin for name in ("start_positions", "end_positions")]
        assert 0 <= place[0] <= place[1] < size
        spans.add(context[row["char_starts"][place[0]] : row["char_ends"][place[1]]])
    # Either the answer itself, or no window holds it.
    assert spans <= {text}
    whole = tokenizer(context, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    assert covered == set(whole)
    if len(tokenizer.tokenize(text)) <= overlap:
        assert spans == {text}


def sentence_piece_tokenizer(texts):
    """A tokenizer like XLM-RoBERTa's, which marks the beginning of a word and has no token types."""
    tokenizer = unigram(texts)
    tokenizer.add_special_tokens({"cls_token": "<s>", "sep_token": "</s>", "pad_token": "<pad>"})
    special = [("<s>", tokenizer.cls_token_id), ("</s>", tokenizer.sep_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=special
    )
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    return tokenizer


@pytest.mark.parametrize("kind", ["wordpiece", "byte_level", "byte_level_with_prefix", "sentence_piece"])
def test_rows_are_what_the_tokenizer_makes_of_the_pair(kind, tokenizer):
    """Question and context are tokenized each for itself, and put together afterwards."""
    if kind == "sentence_piece":
        tokenizer = sentence_piece_tokenizer([" ".join(WORDS)] * 9)
    elif kind != "wordpiece":
        tokenizer = byte_level_tokenizer([" ".join(WORDS)] * 9, add_prefix_space=kind.endswith("prefix"))
    # Truncation and padding of an earlier call are not in force.
    tokenizer(["array", "batch array"], truncation=True, max_length=4, padding="max_length")
    contexts = [" array  batch ", "naïve", "", " array  batch ", "naïve"]
    questions = [" where", "where is array?", "batch", "e\u0301tude ", ""]
    dataset = Dataset.from_dict({"question": questions, "context": contexts})
    rows = question_answering_dataset(dataset, tokenizer, 60, False)
    pairs = tokenizer([question.strip() for question in questions], contexts, return_offsets_mapping=True)
    for i, row in enumerate(rows):
        for name in tokenizer.model_input_names:
            assert row[name] == pairs[name][i]
        sides = pairs.sequence_ids(i)
        assert row["context_start"] == (sides.index(1) if 1 in sides else len(sides))
        places = [place for place, side in zip(pairs["offset_mapping"][i], sides, strict=True) if side == 1]
        assert list(zip(row["char_starts"], row["char_ends"], strict=True)) == places


def test_windows_share_and_the_first_answer_inside_counts(tokenizer):
    words = ["array"] * 30
    words[4], words[25] = "batch", "naïve"
    context = " ".join(words)
    answers = [
        {"text": ["batch", "naïve"], "answer_start": [context.index("batch"), context.index("naïve")]},
        {"text": [], "answer_start": []},
    ]
    rows = rows_of(tokenizer, [context] * 2, answers, max_length=17, doc_stride=2)
    room = 17 - rows[0]["context_start"] - 1
    first = [row for row in rows if row["document"] == 0]
    assert [len(row["char_starts"]) for row in first] == [room] * len(first) and len(first) == len(rows) / 2
    found = [
        context[row["char_starts"][start] : row["char_ends"][row["end_positions"] - row["context_start"]]]
        for row in first
        if (start := row["start_positions"] - row["context_start"]) >= 0
    ]
    assert found == ["batch", "naïve"]
    assert all(row["start_positions"] == row["end_positions"] == 0 for row in rows if row["document"] == 1)
    batch = QuestionAnsweringCollator(tokenizer, with_index=True)(rows[:2])
    assert batch["context_mask"].sum(1).tolist() == [room] * 2 and batch["index"].tolist() == [0, 1]
    assert not {"context_mask", "null_position"} & QuestionAnsweringCollator(tokenizer)(rows).keys()


def test_no_answer_is_the_cls_token_wherever_it_stands():
    """XLNet's tokenizer puts it last."""
    tokenizer = sentence_piece_tokenizer([" ".join(WORDS)] * 9)
    special = [("<s>", tokenizer.cls_token_id), ("</s>", tokenizer.sep_token_id)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s> <s>", pair="$A </s> $B </s> <s>", special_tokens=special
    )
    answers = [{"text": [], "answer_start": []}]
    rows = rows_of(tokenizer, ["array batch " * 20], answers, "array", max_length=16, doc_stride=2)
    assert len(rows) > 1
    for row in rows:
        names = ("null_position", "start_positions", "end_positions")
        assert [row[name] for name in names] == [len(row["input_ids"]) - 1] * 3
        assert row["input_ids"][-1] == tokenizer.cls_token_id


@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_are_padded_on_the_right(side, tokenizer):
    """Answers and contexts are found by their places in a row."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.padding_side = side
    answers = [{"text": ["batch"], "answer_start": [place]} for place in (0, 6)]
    rows = rows_of(tokenizer, ["batch", "array batch array"], answers)
    batch = QuestionAnsweringCollator(tokenizer, with_index=True)(rows)
    found = [row[start] for row, start in zip(batch["input_ids"], batch["start_positions"], strict=True)]
    assert tokenizer.convert_ids_to_tokens(found) == ["batch"] * 2
    contexts = [row[mask].tolist() for row, mask in zip(batch["input_ids"], batch["context_mask"], strict=True)]
    assert [tokenizer.decode(ids) for ids in contexts] == ["batch", "array batch array"]
    assert batch["input_ids"][range(2), batch["null_position"]].tolist() == [tokenizer.cls_token_id] * 2
    assert tokenizer.padding_side == side


@pytest.mark.parametrize(
    ("start", "end", "span"), [(0, 5, (0, 0)), (1, 2, (0, 0)), (4, 8, (0, 1)), (5, 6, None), (6, 20, (1, 3))]
)
def test_token_span(start, end, span):
    assert token_span([0, 6, 9, 12], [5, 8, 12, 20], start, end) == span


CONTEXT = "Ünïcode: the array is a batch."


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([{"text": ["array"], "answer_start": [14]}], "Row 1 .*'answers.answer_start' is 14, .*'rray '.*it is at 13"),
        ([{"text": ["list"], "answer_start": [13]}], "it is not in the context"),
        ([{"text": ["array"], "answer_start": [-1]}], "is -1"),
        ([{"text": ["array"], "answer_start": [None]}], "Row 1 .* must be the number of a character, but is None"),
        ([{"text": ["array"], "answer_start": [13.0]}], "Row 1 .* must be the number of a character, but is 13.0"),
        ([{"text": [" "], "answer_start": [8]}], "Row 1 .* has an empty answer"),
        ([{"text": [1999], "answer_start": [8]}], "Row 1 .*'answers.text' must hold text, but holds 1999"),
        ([{"text": ["array"], "answer_start": []}], "lists 'text' and 'answer_start', of the same length, but row 1"),
        ([{"text": ["array"]}], "must hold an object with the lists"),
        ([{"text": [], "answer_start": []}], "Row 1 .* has no answer: give --version_2_with_negative"),
    ],
)
def test_answers_that_are_not_where_they_should_be(answers, message):
    with pytest.raises(ValueError, match=message):
        require_answers(Dataset.from_dict({"context": [CONTEXT], "answers": answers}), False, "the train set")


def test_both_forms_of_answers():
    right = [{"text": ["array"], "answer_start": [13]}, {"text": [], "answer_start": []}]
    require_answers(Dataset.from_dict({"context": [CONTEXT] * 2, "answers": right}), True, "the train set")
    listed = [[{"text": "array", "answer_start": 13}], []]
    require_answers(Dataset.from_dict({"context": [CONTEXT] * 2, "answers": listed}), True, "the train set")
    assert [answers_of(value) for value in (*right, *listed)] == [[("array", 13)], []] * 2


def test_questions_that_cannot_be_told_apart():
    columns = {"question": ["where?"] * 3, "context": ["a"] * 3, "id": ["u", "v", "u"]}
    with pytest.raises(ValueError, match="'id' of the test set has 'u' in rows 1 and 3"):
        require_questions(Dataset.from_dict(columns), "the test set")


def test_an_id_that_is_missing_beside_others_is_refused():
    """Its prediction had the id "None"."""
    dataset = Dataset.from_dict({"question": ["q"] * 2, "context": ["c"] * 2, "id": ["u", None]})
    with pytest.raises(ValueError, match="'id' of the test set has no value in row 2: give every question an id"):
        require_questions(dataset, "the test set")


def test_a_table_cannot_hold_answers(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("question,context,answers\nq,c,\"{'text': ['c'], 'answer_start': [0]}\"\n")
    with pytest.raises(ValueError, match=r"A .csv or .tsv file cannot hold it: give .jsonl or .parquet."):
        require_answers(load_files([path], cache_dir=tmp_path / "cache"), False, "the train set")


def test_impossible_questions_of_the_hub_have_no_answers():
    answers = [{"text": ["c"], "answer_start": [0]}] * 3
    dataset = Dataset.from_dict({"answers": answers, "is_impossible": [True, False, None]})
    found = without_impossible_answers(dataset, "the train set")
    assert [answers_of(value) for value in found["answers"]] == [[], [("c", 0)], [("c", 0)]]
    assert found.features == dataset.features
    # Without any to leave out, the data set is the same, for its digest.
    assert without_impossible_answers(found, "the train set") is found


def test_a_question_that_leaves_no_room(tokenizer):
    with pytest.raises(ValueError, match=r"Row 1 of the data set: the question has 16 tokens, which leaves 1 of"):
        rows_of(tokenizer, ["array " * 9], question="where " * 16, max_length=20, doc_stride=1)
    # Where all fits, nothing is shared.
    [row] = rows_of(tokenizer, ["array"], question="where " * 16, max_length=20, doc_stride=1)
    assert row["length"] == 20
    [row] = rows_of(tokenizer, [""])
    assert row["char_starts"] == []


def test_a_tokenizer_that_does_not_tell_places_is_refused(slow_tokenizer):
    with pytest.raises(ValueError, match=r"CanineTokenizer does not tell where .* a fast tokenizer is needed"):
        rows_of(slow_tokenizer, ["array"])
