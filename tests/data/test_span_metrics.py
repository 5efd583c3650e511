# SPDX-License-Identifier: Apache-2.0
"""Entities as seqeval counts them, answers as SQuAD's scripts do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nystrom_models.data.metrics.entities import entities, entity_scores, without_scheme
from nystrom_models.data.metrics.squad import answer_scores, best_threshold, normalized, squad_scores


# What seqeval 1.2.2's get_entities gives, with the place after the last word in place of the last.
@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O B-x I-x O", {("x", 1, 3)}),
        ("B-x B-x I-x", {("x", 0, 1), ("x", 1, 3)}),
        ("I-x I-x O I-y", {("x", 0, 2), ("y", 3, 4)}),  # IOB1, or a model that forgot a B
        ("B-x I-y I-x", {("x", 0, 1), ("y", 1, 2), ("x", 2, 3)}),
        ("B-x I-x E-x S-y I-y", {("x", 0, 3), ("y", 3, 4), ("y", 4, 5)}),
        ("B-x E-y I-x", {("x", 0, 1), ("y", 1, 2), ("x", 2, 3)}),
        ("E-x E-x", {("x", 0, 1), ("x", 1, 2)}),
        ("B-creative-work I-creative-work", {("creative-work", 0, 2)}),
        ("B I O", {("_", 0, 2)}),
        ("", set()),
    ],
)
def test_entities(tags, found):
    assert entities(tags.split()) == found


def test_tags_without_a_scheme():
    """Of these, seqeval takes ORG for O and person-other for the same entity as building-other."""
    names = ["O", "B-x-y", "I-x", "E-x", "S-x", "B", "I", "ORG", "person-other", "L-x", "OTHER", "B-", "I_x", "NN"]
    assert without_scheme(names) == ["ORG", "person-other", "L-x", "OTHER", "B-", "I_x", "NN"]


def test_scores_of_whole_entities():
    references = ["B-x I-x O B-y".split(), "O O".split()]
    predictions = ["B-x I-x O O".split(), "B-x B-y".split()]
    scores = entity_scores(references, predictions, ["x", "y"])
    assert scores == {
        "precision": 1 / 3,
        "recall": 1 / 2,
        "f1": 2 / 5,
        "accuracy": 3 / 6,
        "x_precision": 1 / 2,
        "x_recall": 1.0,
        "x_f1": 2 / 3,
        "y_precision": 0.0,
        "y_recall": 0.0,
        "y_f1": 0.0,
    }
    # Half an entity is none.
    assert entity_scores(["B-x I-x".split()], ["B-x O".split()])["f1"] == 0.0
    assert entity_scores([[]], [[]]) == dict.fromkeys(("precision", "recall", "f1", "accuracy"), 0.0)


TAGS = st.sampled_from("O B-x I-x E-x S-x B-y I-y E-y S-y".split())


@given(st.lists(st.lists(st.tuples(TAGS, TAGS), max_size=7), min_size=1, max_size=3))
def test_the_same_as_seqeval(pairs):
    """Where it is installed: it comes as source only, which today's pip cannot build by itself."""
    metrics = pytest.importorskip("seqeval.metrics")
    references, predictions = ([[pair[side] for pair in row] for row in pairs] for side in (0, 1))
    scores = entity_scores(references, predictions)
    for name in ("precision", "recall", "f1"):
        expected = getattr(metrics, f"{name}_score")(references, predictions, zero_division=0)
        assert scores[name] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "f1"),
    [
        ("the Denver Broncos!", ["Denver Broncos"], 1, 1),
        ("Broncos of Denver", ["Denver  broncos"], 0, 0.8),
        ("a", ["b", "A cat", "the cat, an Cat"], 0, 0),
        ("in 1999", ["1999", "in the year 1999"], 0, 0.8),
        ("«naïve»", ["naïve"], 0, 0),  # only ASCII punctuation is left out, in both scripts
        ("", ["x"], 0, 0),
        ("bye bye love", ["bye, bye"], 0, 0.8),  # a word counts as often as both have it
    ],
)
def test_an_answer_counts_by_its_words_and_by_the_best_right_one(prediction, answers, exact, f1):
    assert answer_scores(prediction, answers) == pytest.approx((exact, f1))
    assert answer_scores(prediction, answers, version_2=True) == pytest.approx((exact, f1))


def test_what_normalization_empties():
    """The two scripts differ: in version 2, such an answer does not count; in version 1, it has no words to share."""
    assert normalized("The a, an.") == ""
    assert answer_scores("the", ["The"]) == (1, 0)
    assert answer_scores("", ["The"], version_2=True) == (1, 1)
    assert answer_scores("x", [], version_2=True) == (0, 0) and answer_scores("", [], version_2=True) == (1, 1)


def test_scores_of_questions_with_and_without_answers():
    scores = squad_scores(["cat", "", "dog", ""], [["a cat"], ["x"], [], []], version_2=True)
    assert scores == {
        "exact_match": 0.5,
        "f1": 0.5,
        "has_answer_exact_match": 0.5,
        "has_answer_f1": 0.5,
        "no_answer_accuracy": 0.5,
    }
    assert squad_scores(["cat", "big dog"], [["a cat"], ["dog"]]) == pytest.approx(
        {"exact_match": 0.5, "f1": (1 + 2 / 3) / 2}
    )


QUESTIONS = st.tuples(
    st.sampled_from(["cat", "big cat", "dog"]), st.sampled_from([[], ["cat"], ["dog"]]), st.integers(-3, 3)
)


@given(st.lists(QUESTIONS, min_size=1, max_size=6))
def test_no_threshold_is_better_than_the_best(questions):
    texts, answers, differences = zip(*questions, strict=True)

    def f1(threshold):
        chosen = ["" if d > threshold else text for text, d in zip(texts, differences, strict=True)]
        return squad_scores(chosen, answers, version_2=True)["f1"]

    best, threshold = best_threshold(texts, answers, differences)
    assert best == pytest.approx(f1(threshold)) == pytest.approx(max(map(f1, range(-4, 4))))
