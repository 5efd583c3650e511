# SPDX-License-Identifier: Apache-2.0
"""ListOps: answers by another algorithm than the generator's; lengths, depth and classes."""

import re
import statistics
from collections import Counter

import pytest

from nystrom_models.data.lra import generate
from nystrom_models.data.lra.listops import DIGITS, TOKENS, expression

FUNCTIONS = {
    "MIN": min,
    "MAX": max,
    "MED": lambda values: int(statistics.median(values)),
    "SM": lambda values: sum(values) % 10,
}


def evaluate(text):
    """The value of an expression, innermost lists first, by rewriting the text."""
    found = 1
    while found:
        text, found = re.subn(
            r"\[(MIN|MAX|MED|SM)((?: \d)+) \]",
            lambda match: str(FUNCTIONS[match[1]]([int(value) for value in match[2].split()])),
            text,
        )
    assert re.fullmatch(r"\d", text), text
    return int(text)


@pytest.fixture(scope="module")
def rows():
    return [expression(f"test-{number}") for number in range(400)]


def test_every_answer_is_that_of_another_evaluator(rows):
    assert evaluate("[MED 1 8 [SM 7 6 ] 4 ]") == 3 and evaluate("[MAX 2 9 [MIN 4 7 ] 0 ]") == 9
    assert [evaluate(text) for text, _ in rows] == [label for _, label in rows]


def test_lengths_depths_arguments_and_classes(rows):
    lengths = [len(text.split()) for text, _ in rows]
    assert min(lengths) > 500 and max(lengths) < 2000 and 950 < statistics.fmean(lengths) < 1150
    deepest = most = 0
    operators = Counter()
    for text, _ in rows:
        open_lists = []
        for token in text.split():
            if token == "]":
                most = max(most, open_lists.pop())
            if token != "]" and open_lists:
                open_lists[-1] += 1
            if token.startswith("["):
                operators[token] += 1
                open_lists.append(0)
                deepest = max(deepest, len(open_lists))
    # Operators are at depths 1 to 9, with values below them.
    assert deepest == 9 and most == 10
    assert operators.keys() == set(TOKENS[:4]) and max(operators.values()) < 1.05 * min(operators.values())
    classes = Counter(label for _, label in rows)
    # MIN and MAX make 0 and 9 frequent: about 17 % each, the others about 8 %.
    assert all(0.04 < classes[label] / len(rows) < 0.12 for label in range(1, 9))
    assert all(0.12 < classes[label] / len(rows) < 0.23 for label in (0, 9))
    assert len({text for text, _ in rows}) == len(rows)


def test_any_number_of_processes_gives_the_same_rows(tmp_path):
    sizes = {"train": 1200, "test": 30}
    options = {"seed": 3, "label_names": DIGITS, "min_length": 8, "max_length": 40}
    found = [
        generate(expression, sizes, num_proc=workers, cache_dir=str(tmp_path / str(workers)), **options)
        for workers in (None, 2)
    ]
    for split, size in sizes.items():
        one, two = (rows[split] for rows in found)
        assert one["text"] == two["text"] and one["label"] == two["label"] and len(one) == size
    assert one["text"][7] == expression("test-3-7", 8, 40)[0]
    assert not set(found[0]["train"]["text"][:30]) & set(one["text"])
