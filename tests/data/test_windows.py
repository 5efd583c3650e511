# SPDX-License-Identifier: Apache-2.0
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nystrom_models.data.windows import owners, window_starts, word_windows


@given(st.integers(0, 60), st.integers(1, 20), st.data())
def test_windows_hold_every_token_are_full_and_share_enough(length, size, data):
    overlap = data.draw(st.integers(0, size - 1))
    starts = window_starts(length, size, overlap)
    windows = [range(start, min(start + size, length)) for start in starts]
    assert set().union(*windows) == set(range(length))
    assert all(len(window) == min(size, length) for window in windows)
    assert all(left.stop - right.start >= overlap for left, right in pairwise(windows))
    # No more of them than are needed.
    assert len(windows) == max(1, -(-(length - overlap) // (size - overlap)))


@given(st.lists(st.integers(1, 6), max_size=25), st.integers(6, 15), st.integers(0, 8))
def test_windows_of_words_hold_every_word_and_one_of_them_has_its_context(sizes, size, overlap):
    windows = word_windows(sizes, size, overlap)
    assert set().union(*(range(*window) for window in windows)) == set(range(len(sizes)))
    assert all(sum(sizes[begin:end]) <= size for begin, end in windows)
    assert windows == sorted(set(windows))
    for (before, end), (begin, new_end) in list(pairwise(windows))[:-1]:
        assert sum(sizes[begin:end]) <= overlap and new_end > end
        # They share as many words as they may, if the next word still fits.
        more = sum(sizes[begin - 1 : end])
        assert begin == before + 1 or more > overlap or more + sizes[end] > size
    for (before, _), (begin, end) in list(pairwise(windows))[-1:]:
        # The last one has as many words as fit, which may be shared.
        assert end == len(sizes) and (begin == before + 1 or sum(sizes[begin - 1 :]) > size)
    if overlap == 0 and len(windows) > 1:
        # Another word would not fit: all but the last are full, and the last goes back as far as it can.
        assert all(sum(sizes[begin : end + 1]) > size for begin, end in windows[:-1])
    number = owners(sizes, windows)

    def context(word, window):
        begin, end = window
        return min(sum(sizes[begin:word]), sum(sizes[word + 1 : end])) if begin <= word < end else -1

    for word, chosen in enumerate(number):
        assert context(word, windows[chosen]) == max(context(word, window) for window in windows) >= 0


def test_of_two_windows_with_the_same_context_the_first_has_the_word():
    assert owners([1, 1, 1], [(0, 2), (1, 3)]) == [0, 0, 1]


@pytest.mark.parametrize(("size", "overlap"), [(4, 4), (4, -1), (0, 0)])
def test_windows_that_would_never_end_are_refused(size, overlap):
    with pytest.raises(ValueError, match=f"Windows of {size} tokens cannot share {overlap}"):
        window_starts(9, size, overlap)


def test_a_word_that_fits_into_no_window_is_refused():
    with pytest.raises(ValueError, match="A word of 7 tokens"):
        word_windows([1, 7], 6)
