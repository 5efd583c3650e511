# SPDX-License-Identifier: Apache-2.0
"""Division of texts that are longer than a row."""

from collections.abc import Sequence


def window_starts(length: int, size: int, overlap: int = 0) -> list[int]:
    """First positions of windows over `length` tokens. Each has `size` tokens, or all tokens if there are fewer.

    Args:
        length: number of tokens.
        size: number of tokens of a window.
        overlap: tokens that neighbouring windows share; the last one may share more, so that it is as long as the
            others.

    Raises:
        ValueError: if `overlap` is not less than `size`.
    """
    if not 0 <= overlap < size:
        raise ValueError(f"Windows of {size} tokens cannot share {overlap}: it must be at least 0, and less.")
    if length <= size:
        return [0]
    return [*range(0, length - size, size - overlap), length - size]


def word_windows(sizes: Sequence[int], size: int, overlap: int = 0) -> list[tuple[int, int]]:
    """Windows of whole words. Each is the number of its first word and that of the word after its last one.

    Args:
        sizes: the number of tokens of each word, none more than `size`.
        size: the largest number of tokens of a window.
        overlap: the largest number of tokens that neighbouring windows share; the last window is filled up with
            earlier words, and may share more.

    Raises:
        ValueError: if a word is longer than a window.
    """
    if max(sizes, default=0) > size:
        raise ValueError(f"A word of {max(sizes)} tokens does not fit into a window of {size}.")
    windows: list[tuple[int, int]] = []
    begin = 0
    while True:
        end, used = begin, 0
        while end < len(sizes) and used + sizes[end] <= size:
            used += sizes[end]
            end += 1
        if end == len(sizes):
            while windows and begin > windows[-1][0] + 1 and used + sizes[begin - 1] <= size:
                begin -= 1
                used += sizes[begin]
            return [*windows, (begin, end)]
        windows.append((begin, end))
        # Go back by whole shared words, as long as the next word still fits.
        begin, shared = end, 0
        while (
            begin > windows[-1][0] + 1
            and shared + sizes[begin - 1] <= overlap
            and shared + sizes[begin - 1] + sizes[end] <= size
        ):
            begin -= 1
            shared += sizes[begin]


def owners(sizes: Sequence[int], windows: Sequence[tuple[int, int]]) -> list[int]:
    """For each word the window in which it has the most context, as in BERT's SQuAD script: the window whose nearer
    end is farthest from the word; of equal ones the first.

    Args:
        sizes: the number of tokens of each word.
        windows: from [`word_windows`].
    """
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    best = [(-1, 0)] * len(sizes)
    for number, (begin, end) in enumerate(windows):
        for word in range(begin, end):
            context = min(ends[word] - ends[begin], ends[end] - ends[word + 1])
            if context > best[word][0]:
                best[word] = (context, number)
    return [number for _, number in best]
