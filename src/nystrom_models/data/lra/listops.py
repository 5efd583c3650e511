# SPDX-License-Identifier: Apache-2.0
"""ListOps (Nangia & Bowman 2018, arXiv:1804.06028), in the lengths of the Long Range Arena.

An expression such as `[MAX 2 9 [MIN 4 7 ] 0 ]` has a value from 0 to 9, which is its class: here 9.
"""

import random

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
END = "]"
DIGITS = tuple("0123456789")
TOKENS = (*OPERATORS, END, *DIGITS)

MAX_DEPTH = 10
MAX_ARGUMENTS = 10
# The Long Range Arena's script calls this VALUE_P, although it makes an operator with this probability, not a value.
OPERATOR_PROBABILITY = 0.25


class _TooLongError(Exception):
    pass


def apply(operator: str, values: list[int]) -> int:
    """The value of an operator: minimum, maximum, median or sum modulo 10. The median of an even number of values is
    the mean of the two in the middle, rounded down."""
    if operator == "[MIN":
        return min(values)
    if operator == "[MAX":
        return max(values)
    if operator == "[SM":
        return sum(values) % 10
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) // 2


def _write(rng: random.Random, depth: int, longest: int, tokens: list[str]) -> int:
    """Appends a random expression to `tokens`, and returns its value."""
    draw = rng.random
    if depth == MAX_DEPTH or draw() >= OPERATOR_PROBABILITY:
        value = int(10 * draw())
        tokens.append(DIGITS[value])
        return value
    count = 2 + int((MAX_ARGUMENTS - 1) * draw())
    operator = OPERATORS[int(len(OPERATORS) * draw())]
    tokens.append(operator)
    values = []
    for _ in range(count):
        if len(tokens) >= longest:
            raise _TooLongError
        values.append(_write(rng, depth + 1, longest, tokens))
    tokens.append(END)
    return apply(operator, values)


def expression(seed: str, min_length: int = 500, max_length: int = 2000) -> tuple[str, int]:
    """A random expression of more than `min_length` and less than `max_length` tokens, and its value.

    As in the Long Range Arena's script: a node at a depth of less than 10 is an operator of 2 to 10 arguments with
    probability 0.25; trees of other lengths are drawn again. Only `random()` of Python's generator is used, which is
    the same in all versions.
    """
    rng = random.Random(seed)
    while True:
        tokens: list[str] = []
        try:
            value = _write(rng, 1, max_length, tokens)
        except _TooLongError:
            continue
        if min_length < len(tokens) < max_length:
            return " ".join(tokens), value
