# SPDX-License-Identifier: Apache-2.0
"""Exact match and F1 of answers, as the scripts of SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018) compute them."""

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, and with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _f1(prediction: str, answer: str, version_2: bool) -> float:
    """F1 of the words of a prediction."""
    predicted, there = normalized(prediction).split(), normalized(answer).split()
    if version_2 and not (predicted and there):
        return float(predicted == there)
    common = sum((Counter(predicted) & Counter(there)).values())
    return 2 * common / (len(predicted) + len(there)) if common else 0.0


def answer_scores(prediction: str, answers: Sequence[str], version_2: bool = False) -> tuple[float, float]:
    """Exact match and F1 of a prediction with the answer for which each is highest; "" is no answer.

    Args:
        prediction: text, or "".
        answers: the right ones; in version 2, none if the question has no answer.
        version_2: answers that are empty after normalization do not count, as in SQuAD 2.0.
    """
    if version_2:
        answers = [answer for answer in answers if normalized(answer)] or [""]
    exact = max(float(normalized(prediction) == normalized(answer)) for answer in answers)
    return exact, max(_f1(prediction, answer, version_2) for answer in answers)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def squad_scores(
    predictions: Sequence[str], answers: Sequence[Sequence[str]], version_2: bool = False
) -> dict[str, float]:
    """Means over all questions, fractions of 1.

    Returns:
        `exact_match` and `f1`; in version 2 also `has_answer_exact_match`, `has_answer_f1` and `no_answer_accuracy`,
        the share of unanswerable questions for which no answer is predicted. 0 if there are no such questions.
    """
    pairs = [answer_scores(*pair, version_2) for pair in zip(predictions, answers, strict=True)]
    scores = {"exact_match": _mean([exact for exact, _ in pairs]), "f1": _mean([f1 for _, f1 in pairs])}
    if version_2:
        there = [pair for pair, right in zip(pairs, answers, strict=True) if right]
        absent = [exact for (exact, _), right in zip(pairs, answers, strict=True) if not right]
        scores["has_answer_exact_match"] = _mean([exact for exact, _ in there])
        scores["has_answer_f1"] = _mean([f1 for _, f1 in there])
        scores["no_answer_accuracy"] = _mean(absent)
    return scores


def best_threshold(
    texts: Sequence[str], answers: Sequence[Sequence[str]], differences: Sequence[float]
) -> tuple[float, float]:
    """The best F1 that any threshold gives, and this threshold, as the script of SQuAD 2.0 searches it.

    Args:
        texts: the best answer other than "" of each question.
        answers: the right ones; none if the question has no answer.
        differences: the score of no answer minus that of `texts`; above the threshold, no answer is predicted.
    """
    gains = [
        answer_scores(text, right, True)[1] - answer_scores("", right, True)[1]
        for text, right in zip(texts, answers, strict=True)
    ]
    order = sorted(range(len(gains)), key=differences.__getitem__)
    total = sum(answer_scores("", right, True)[1] for right in answers)
    best, threshold = total, differences[order[0]] - 1.0 if order else 0.0
    for place, i in enumerate(order):
        total += gains[i]
        last = place + 1 == len(order) or differences[order[place + 1]] > differences[i]
        if last and total > best:
            best, threshold = total, differences[i]
    return best / max(len(gains), 1), threshold
