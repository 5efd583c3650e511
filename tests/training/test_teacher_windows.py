# SPDX-License-Identifier: Apache-2.0
"""Rows cut for a teacher of fewer tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom_models.training.teacher_windows import Cutter

CLS, SEP, PAD = 2, 3, 0


def make_batch(lengths, side="right", width=None):
    """Rows of different tokens between CLS and SEP; of the second half of each row, the type is 1."""
    width = width or max(lengths)
    ids, mask, types = (torch.zeros(len(lengths), width, dtype=torch.long) for _ in range(3))
    for row, length in enumerate(lengths):
        tokens = torch.arange(length) + 100 * (row + 1)
        tokens[0], tokens[-1] = CLS, SEP
        place = slice(0, length) if side == "right" else slice(width - length, width)
        ids[row, place], mask[row, place] = tokens, 1
        types[row, place] = (torch.arange(length) >= length // 2).long()
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 40), min_size=1, max_size=4),
    longest=st.integers(3, 30),
    side=st.sampled_from(["right", "left"]),
)
def test_windows(lengths, longest, side):
    batch = make_batch(lengths, side)
    cutter = Cutter(longest, [CLS], [SEP], PAD)
    windows, seen = cutter.cut(batch), cutter.seen(batch["attention_mask"])
    ids, mask = windows.inputs["input_ids"], windows.inputs["attention_mask"].bool()
    assert ids.shape[1] <= longest or max(lengths) <= longest
    # Each is a row as the teacher knows rows, filled up on the right.
    for window, valid in zip(ids, mask, strict=True):
        length = int(valid.sum())
        assert valid[:length].all() and (window[length:] == PAD).all()
        assert window[0] == CLS and window[length - 1] == SEP and (window[1 : length - 1] >= 100).all()
        # One stretch of one row: nothing is skipped or repeated inside.
        assert (window[1 : length - 1].diff() == 1).all() and length > 2
    # Each token that is seen is in one window, and comes back to its place.
    assert torch.equal(windows.take_back(ids[..., None])[..., 0] * seen, batch["input_ids"] * seen)
    assert int(windows.own.sum()) == int(seen.sum())
    assert torch.equal(windows.bring(batch["input_ids"])[windows.own], ids[windows.own])
    types = windows.take_back(windows.inputs["token_type_ids"][..., None])[..., 0]
    assert torch.equal(types * seen, batch["token_type_ids"] * seen)
    for row, length in enumerate(lengths):
        own = batch["input_ids"][row][batch["attention_mask"][row].bool()]
        unseen = (~seen[row][batch["attention_mask"][row].bool()]).nonzero().flatten().tolist()
        if length <= longest:
            assert not unseen
            continue
        # Only the tokens in whose place special tokens stand are in none, and what is too little for a window.
        left = length - length % longest if 0 < length % longest <= 2 else length
        border = {place for at in range(longest, left + 1, longest) for place in (at - 1, at)}
        assert set(unseen) == {place for place in border if place < length} - (
            {length - 1} if left == length else set()
        ) | set(range(left, length)), (length, longest)
        # At the places that they have in repeated positions.
        for window, places in zip(ids, windows.places, strict=True):
            inside = (places >= 0) & (window // 100 == row + 1)
            columns = inside.nonzero().flatten()
            assert torch.equal((window[inside] - 100 * (row + 1)) % longest, columns)
        assert own[0] == CLS


def test_what_fits_stays_as_it_is():
    batch = make_batch([9, 5])
    windows = Cutter(9, [CLS], [SEP], PAD).cut(batch)
    assert windows.places is None and windows.inputs["input_ids"] is batch["input_ids"]
    assert torch.equal(
        Cutter(None, [CLS], [SEP], PAD).cut(make_batch([9, 5], "left")).inputs["input_ids"], batch["input_ids"]
    )


def test_a_window_needs_room():
    with pytest.raises(ValueError, match="no room"):
        Cutter(2, [CLS], [SEP], PAD)


def test_an_added_token_has_the_type_of_the_token_beside_it():
    """Here, the first window ends and the second begins within the second segment."""
    batch = {
        "input_ids": torch.tensor([[1, 10, 11, 12, 2, 20, 21, 22, 23, 24, 25, 2]]),
        "token_type_ids": torch.tensor([[0] * 3 + [1] * 9]),
        "attention_mask": torch.ones(1, 12, dtype=torch.long),
    }
    inputs = Cutter(6, [1], [2], 0).cut(batch).inputs
    assert inputs["input_ids"].tolist() == [[1, 10, 11, 12, 2, 2], [1, 22, 23, 24, 25, 2]]
    assert inputs["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1], [1] * 6]
