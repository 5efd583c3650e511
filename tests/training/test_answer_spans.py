# SPDX-License-Identifier: Apache-2.0
import json
import math
import unicodedata
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from nystrom_models.data import train_tokenizer
from nystrom_models.data.question_answering import QuestionTask, question_answering_dataset
from nystrom_models.training.answer_spans import Answers, best_spans, collect_answers
from nystrom_models.training.question_answering import QuestionAnsweringArguments, QuestionAnsweringRun


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 12), st.integers(0, 2**31))
def test_the_best_of_all_spans_up_to_a_length(length, longest, n_best, seed):
    generator = torch.Generator().manual_seed(seed)
    start, end = (torch.randn(2, length, generator=generator) for _ in range(2))
    mask = torch.rand(2, length, generator=generator) > 0.3
    first, last = best_spans(start, end, mask, n_best, longest)
    assert first.shape == last.shape == (2, n_best)  # on all processes, whatever the lengths of their rows
    for row in range(2):
        spans = [
            (float(start[row, a] + end[row, b]), a, b)
            for a in range(length)
            for b in range(a, min(a + longest, length))
            if mask[row, a] and mask[row, b]
        ]
        best = [(a, b) for _, a, b in sorted(spans, reverse=True)[:n_best]]
        found = list(zip(first[row].tolist(), last[row].tolist(), strict=True))
        assert [span for span in found if span[0] >= 0] == best
        assert set(found[len(best) :]) <= {(-1, -1)}


def test_the_score_of_no_answer_and_the_loss_are_of_both_tokens():
    """Padding, which has the largest logits, is in neither."""
    run = object.__new__(QuestionAnsweringRun)
    run.args = SimpleNamespace(n_best_size=2, max_answer_length=3)
    start, end = torch.tensor([[2.0, 1, 5, 9]]), torch.tensor([[3.0, 1, 4, 9]])
    batch = {
        "attention_mask": torch.tensor([[1, 1, 1, 0]]),
        "context_mask": torch.tensor([[False, True, True, False]]),
    }
    batch |= {"null_position": torch.tensor([0])}
    outputs = SimpleNamespace(start_logits=start, end_logits=end)
    assert "loss" not in run._outputs(outputs, batch)
    found = run._outputs(outputs, batch | {"start_positions": torch.tensor([1]), "end_positions": torch.tensor([2])})
    assert {name: value.tolist() for name, value in found.items() if name != "loss"} == {
        "first": [[2, 1]],
        "last": [[2, 2]],
        "first_logits": [[5, 1]],
        "last_logits": [[4, 4]],
        "null": [5],
    }
    expected = -(start[0, :3].log_softmax(0)[1] + end[0, :3].log_softmax(0)[2]) / 2
    torch.testing.assert_close(found["loss"], expected[None])


CONTEXT = "the naïve cat sat"
# Two windows of two words each, the second one with the space before the last word, and one question whose context has
# no token.
ROWS = [
    {"document": 0, "context_start": 3, "char_starts": [0, 4], "char_ends": [3, 9]},
    {"document": 0, "context_start": 3, "char_starts": [4, 10, 13], "char_ends": [9, 13, 14]},
    {"document": 1, "context_start": 3, "char_starts": [], "char_ends": []},
]
FOUND = {
    "first": [torch.tensor([4, 3]), torch.tensor([5, 3, 4]), torch.tensor([-1, -1])],
    "last": [torch.tensor([4, 4]), torch.tensor([5, 3, 4]), torch.tensor([-1, -1])],
    "first_logits": [torch.tensor([1.0, 0.0]), torch.tensor([6.0, 2.0, 0.5]), torch.tensor([0.0, 0.0])],
    "last_logits": [torch.tensor([1.0, 1.0]), torch.tensor([6.0, 2.0, 0.0]), torch.tensor([0.0, 0.0])],
    "null": [torch.tensor(5.0), torch.tensor(4.5), torch.tensor(9.0)],
}


def test_scores_of_no_answer_are_json(tmp_path):
    """Other readers than Python's know no infinity."""
    run = object.__new__(QuestionAnsweringRun)
    run.args, run.task = SimpleNamespace(output_dir=tmp_path), SimpleNamespace(version_2=True)
    run.examples = {"test": Dataset.from_dict({"context": [CONTEXT, ""], "id": [0, 1]})}
    run.write("test", collect_answers([CONTEXT, ""], ROWS, FOUND, 3, 0.0))
    odds = json.loads((tmp_path / "test_null_odds.json").read_text(), parse_constant=pytest.fail)
    assert odds["0"] == 0.5 and odds["1"] > 1e300


@pytest.mark.parametrize("normalizer", [normalizers.NFC(), normalizers.NFKC()])
@pytest.mark.parametrize("answer", ["한국", "말이", "naïve", "ｶﾞｷﾞ", "ﾊﾟ", "கொ", "ab"])
def test_answers_end_with_the_whole_letter(answer, normalizer):
    """Also in decomposed texts, of which tokenizers only tell the place of a letter's first part."""
    answer = unicodedata.normalize("NFD", answer)
    context = f"it says {answer} here"
    tokenizer = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, pre_tokenizers.WhitespaceSplit()
    starts, ends = zip(*tokenizer.encode(context).offsets, strict=True)
    rows = [{"document": 0, "context_start": 0, "char_starts": starts, "char_ends": ends}]
    found = {name: [torch.tensor([2])] for name in ("first", "last", "first_logits", "last_logits", "null")}
    assert collect_answers([context], rows, found, 1, None).texts == [answer]
    found |= {name: [torch.tensor([3])] for name in ("first", "last")}
    assert collect_answers([context], rows, found, 1, None).texts == ["here"]


@pytest.mark.parametrize(("threshold", "text"), [(None, "naïve"), (0.0, ""), (0.5, "naïve"), (0.49, "")])
def test_answers_of_all_windows(threshold, text):
    answers = collect_answers([CONTEXT, ""], ROWS, FOUND, 3, threshold)
    assert answers.texts == [text, ""] and answers.best_texts == ["naïve", ""]
    assert answers.differences == [0.5, math.inf]
    entries = answers.n_best[0]
    # The same span of two windows is one, with its best score.
    texts = ["naïve", "the naïve", "cat"] if threshold is None else ["", "naïve", "the naïve"]
    assert [entry["text"] for entry in entries] == texts
    span = next(entry for entry in entries if entry["text"] == "naïve")
    assert (span["start"], span["end"], span["start_logit"], span["end_logit"]) == (4, 9, 2.0, 2.0)
    scores = [4.0, 1.0, 0.5] + ([] if threshold is None else [4.5])
    assert span["probability"] == pytest.approx(math.exp(4) / sum(map(math.exp, scores)))
    assert answers.n_best[1] == [
        {"text": "", "start": 0, "end": 0, "start_logit": 4.5, "end_logit": 4.5, "probability": 1.0}
    ]


def test_no_answer_is_always_among_the_best_ones():
    found = FOUND | {"null": [torch.tensor(-5.0)] * len(FOUND["null"])}
    entries = collect_answers([CONTEXT, ""], ROWS, found, 2, 0.0).n_best[0]
    assert [entry["text"] for entry in entries] == ["naïve", "the naïve", ""]
    scores = [4.0, 1.0, -5.0]
    assert entries[-1]["probability"] == pytest.approx(math.exp(-5) / sum(map(math.exp, scores)))
    entries = collect_answers([CONTEXT, ""], ROWS, found, 2, None).n_best[0]
    assert [entry["text"] for entry in entries] == ["naïve", "the naïve"]


def test_white_space_around_an_answer_is_no_part_of_it():
    """Tokens of some tokenizers begin with a space, or are one."""
    context = "a cat sat"
    row = {"document": 0, "context_start": 0, "char_starts": [0, 1, 2, 5], "char_ends": [1, 2, 5, 9]}
    found = {
        "first": [torch.tensor([2, 1, 3])],
        "last": [torch.tensor([2, 2, 3])],
        "first_logits": [torch.tensor([2.0, 3.0, 0.0])],
        "last_logits": [torch.tensor([1.0, 1.0, 1.0])],
        "null": [torch.tensor(0.0)],
    }
    answers = collect_answers([context], [row], found, 3, None)
    # The same text at the same place is one answer, with its best score.
    assert [(entry["text"], entry["start"], entry["end"], entry["start_logit"]) for entry in answers.n_best[0]] == [
        ("cat", 2, 5, 3.0),
        ("sat", 6, 9, 0.0),
    ]


@pytest.mark.parametrize("text", ["cafe\u0301", "\u05e9\u05dc\u05d5\u05dd\u05b8"])
def test_an_answer_keeps_the_accents_of_its_last_letter(text):
    """A tokenizer that drops accents has no token for them."""
    tokenizer = train_tokenizer(["x cafe \u05e9\u05dc\u05d5\u05dd"] * 9, vocab_size=60, show_progress=False)
    data = Dataset.from_dict({"question": ["x"], "context": [f"x {text} x"]})
    rows = question_answering_dataset(data, tokenizer, 16, with_answers=False)
    last = torch.tensor([rows[0]["context_start"] + len(rows[0]["char_ends"]) - 2])
    found = {"first": last - len(rows[0]["char_ends"]) + 3, "last": last, "first_logits": last, "last_logits": last}
    answers = collect_answers(
        data["context"], rows, {name: [value] for name, value in found.items()} | {"null": [0]}, 1, None
    )
    assert answers.texts == [text] and answers.n_best[0][0]["end"] == 2 + len(text)


def test_questions_without_ids_are_named_by_their_rows(tmp_path):
    """Also if only a random sample of them is answered."""
    run = object.__new__(QuestionAnsweringRun)
    run.args = QuestionAnsweringArguments(output_dir=str(tmp_path), model_name_or_path="x", max_eval_samples=3)
    run.task = QuestionTask()
    sample = run._sample("validation", Dataset.from_dict({"context": [str(number) for number in range(20)]}))
    run.examples, texts = {"validation": sample}, list(sample["context"])
    run.write("validation", Answers(texts, [[]] * 3, texts, [0.0] * 3))
    found = json.loads((tmp_path / "validation_predictions.json").read_text())
    assert found == {text: text for text in texts} and len(found) == 3


ANSWER, NONE = {"text": ["cat"], "answer_start": [0]}, {"text": [], "answer_start": []}


def test_a_threshold_is_recommended_if_f1_would_be_higher():
    """Not for a difference of rounding: the sums of F1 are in another order, and here 1 / 2 and a little less."""
    contexts = ["cat mat", "cat mat hat", "cat mat hat bat tap"]
    run, printed = object.__new__(QuestionAnsweringRun), []
    run.args = SimpleNamespace(n_best_size=2, null_score_diff_threshold=0.0)
    run.task, run.where = QuestionTask(version_2=True), {"test": "the test set"}
    run.accelerator = SimpleNamespace(print=printed.append)
    row = {"context_start": 0, "char_starts": [0]}
    rows = [row | {"document": number, "char_ends": [len(context)]} for number, context in enumerate(contexts)]
    run.rows = {"test": Dataset.from_list(rows)}
    places, zeros = [torch.tensor([0])] * 3, [torch.zeros(1)] * 3
    found = {
        "first": places,
        "last": places,
        "first_logits": zeros,
        "last_logits": zeros,
        "loss": [torch.zeros(())] * 3,
    }
    found["null"] = [torch.tensor(score) for score in (-3.0, -1.0, -2.0)]
    run.predict = lambda *_: found
    run.examples = {"test": Dataset.from_dict({"context": contexts, "answers": [ANSWER] * 3})}
    _, scores = run.score(None, "test", 8)
    assert scores["f1"] == pytest.approx(0.5) and not printed
    run.examples = {"test": Dataset.from_dict({"context": contexts, "answers": [ANSWER, NONE, ANSWER]})}
    _, scores = run.score(None, "test", 8)
    assert scores["best_f1"] == pytest.approx(2 / 3) and "--null_score_diff_threshold=-2.0" in printed[0]


def test_questions_of_several_windows_and_lost_answers_are_told():
    run = object.__new__(QuestionAnsweringRun)
    run.args = SimpleNamespace(max_seq_length=9)
    run.examples = {"train": Dataset.from_dict({"answers": [ANSWER, ANSWER, NONE]})}
    places = [(0, 0), (0, 3), (1, 0), (1, 0), (2, 0)]
    rows = [{"document": number, "start_positions": place, "null_position": 0} for number, place in places]
    assert run.notes("train", Dataset.from_list(rows)) == [
        "2 of 3 questions have a context that does not fit into 9 tokens; it is read in 4 windows.",
        "1 of 2 answers are not complete in any of their windows: a larger --doc_stride would help.",
    ]


@pytest.mark.parametrize(
    ("split", "answers", "known"),
    [("test", [NONE, NONE], False), ("test", [NONE, ANSWER], True), ("validation", [NONE, NONE], True)],
)
def test_answers_of_a_hidden_test_set_are_empty(split, answers, known):
    assert object.__new__(QuestionAnsweringRun)._has_answers(split, Dataset.from_dict({"answers": answers})) is known
