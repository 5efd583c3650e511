# SPDX-License-Identifier: Apache-2.0
"""From logits for the first and the last token of an answer to its text."""

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# More characters than letters have that are composed of others.
_LONGEST_LETTER = 8


def best_spans(
    start_logits: Tensor, end_logits: Tensor, context_mask: Tensor, n_best: int, max_answer_length: int
) -> tuple[Tensor, Tensor]:
    """The spans of the context with the largest sums of logits, among all spans up to a length.

    Args:
        start_logits, end_logits: (B, N), float.
        context_mask: (B, N), bool, the tokens that may be in an answer.
        n_best: number of spans.
        max_answer_length: the largest number of tokens of a span.

    Returns:
        First and last token, each (B, n_best) int64, best first. If the context has fewer spans, the positions of the
        others are -1.
    """
    lowest = -math.inf
    start = start_logits.masked_fill(~context_mask, lowest)
    end = F.pad(end_logits.masked_fill(~context_mask, lowest), (0, max_answer_length - 1), value=lowest)
    # (B, N, L): every first token with the L tokens from it on.
    sums = start[:, :, None] + end.unfold(1, max_answer_length, 1)
    scores, places = sums.flatten(1).topk(min(n_best, sums[0].numel()))
    first = places // max_answer_length
    last = first + places % max_answer_length
    found = scores > lowest
    missing = (0, n_best - scores.shape[1])
    return F.pad(first.where(found, -1), missing, value=-1), F.pad(last.where(found, -1), missing, value=-1)


@dataclass
class Answers:
    """The predictions for the questions of a split, in their order."""

    texts: list[str] = field(default_factory=list)  # "" for no answer
    n_best: list[list[dict[str, Any]]] = field(default_factory=list)
    best_texts: list[str] = field(default_factory=list)  # of answers other than ""
    differences: list[float] = field(default_factory=list)  # score of no answer minus that of the best text


def _belongs_to_the_letter(before: str, character: str) -> bool:
    """Whether a character belongs to the letter at the end of `before`, although no token contains it: an accent that
    some tokenizers drop, or a part of a syllable of Hangul or of a voiced kana. Tokenizers that compose such letters
    only tell the place of their first part."""
    if character.isascii():  # or ""
        return False
    before = before[-_LONGEST_LETTER:]
    whole, part = (unicodedata.normalize("NFKC", text) for text in (before + character, before))
    return unicodedata.category(character) == "Mn" or len(whole) <= len(part)


def collect_answers(
    contexts: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    found: Mapping[str, Sequence[Tensor]],
    n_best: int,
    threshold: float | None,
) -> Answers:
    """The answers to all questions, each from all of its windows.

    Args:
        contexts: the context of each question.
        rows: for each window its question (`document`), `context_start`, `char_starts` and `char_ends`.
        found: for each window `first` and `last`, from [`best_spans`], `first_logits` and `last_logits` of these
            spans, and `null`, the sum of the two logits of no answer.
        n_best: the number of answers to keep.
        threshold: no answer is predicted if its score exceeds that of the best answer by more than this; None if every
            question has an answer. The score of no answer is its smallest over all windows.
    """
    spans: list[dict[tuple[int, int], tuple[float, float]]] = [{} for _ in contexts]
    nulls = [math.inf] * len(contexts)
    for number, row in enumerate(rows):
        document, begin = row["document"], row["context_start"]
        nulls[document] = min(nulls[document], float(found["null"][number]))
        columns = [found[name][number].tolist() for name in ("first", "last", "first_logits", "last_logits")]
        for first, last, start_logit, end_logit in zip(*columns, strict=True):
            if first < 0:
                continue
            # Tokens of some tokenizers begin with a space, which is no part of an answer, or are one.
            start, end = row["char_starts"][first - begin], row["char_ends"][last - begin]
            while _belongs_to_the_letter(contexts[document][start:end], contexts[document][end : end + 1]):
                end += 1
            text = contexts[document][start:end]
            if not text.strip():
                continue
            span = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
            # A span that several windows contain, or that has several forms, keeps its best score.
            if sum(spans[document].get(span, (-math.inf, -math.inf))) < start_logit + end_logit:
                spans[document][span] = (start_logit, end_logit)
    answers = Answers()
    for context, candidates, null in zip(contexts, spans, nulls, strict=True):
        ranked = sorted(candidates.items(), key=lambda item: -sum(item[1]))[:n_best]
        entries: list[dict[str, Any]] = [
            {"text": context[start:end], "start": start, "end": end, "start_logit": a, "end_logit": b}
            for (start, end), (a, b) in ranked
        ]
        best = entries[0]["text"] if entries else ""
        difference = null - sum(ranked[0][1]) if ranked else math.inf
        scores = [sum(pair) for _, pair in ranked]
        if threshold is not None or not entries:
            entries.append({"text": "", "start": 0, "end": 0, "start_logit": null / 2, "end_logit": null / 2})
            scores.append(null)
        probabilities = torch.tensor(scores, dtype=torch.float64).softmax(0).tolist()
        entries = [entry | {"probability": p} for entry, p in zip(entries, probabilities, strict=True)]
        answers.texts.append("" if threshold is not None and difference > threshold else best)
        kept = sorted(entries, key=lambda entry: -entry["probability"])[:n_best]
        if threshold is not None and entries[-1] not in kept:  # no answer always has its probability in the file
            kept.append(entries[-1])
        answers.n_best.append(kept)
        answers.best_texts.append(best)
        answers.differences.append(difference)
    return answers
