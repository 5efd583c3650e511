# SPDX-License-Identifier: Apache-2.0
"""Pathfinder: classes by tracing what was drawn."""

import math

import numpy as np
import pytest

from nystrom_models.data.lra.pathfinder import picture
from nystrom_models.data.lra.pictures import CHARACTERS, to_pixels, to_text


@pytest.fixture(scope="module")
def pictures():
    return [picture(f"test-{number}") for number in range(40)]


def trace(pixels):
    """The connected lit parts of a picture, as sets of pixels. Diagonal neighbours are connected."""
    rest = set(zip(*np.nonzero(pixels), strict=True))
    parts = []
    while rest:
        part, edge = set(), [rest.pop()]
        while edge:
            row, column = edge.pop()
            part.add((row, column))
            near = {(row + up, column + right) for up in (-1, 0, 1) for right in (-1, 0, 1)} & rest
            rest -= near
            edge.extend(near)
        parts.append(part)
    return parts


def dots(pixels, part):
    """The number of dots of a part: groups of bright pixels."""
    bright = np.zeros_like(pixels)
    places = tuple(np.array(sorted(part)).T)
    bright[places] = pixels[places] > 220
    return len(trace(bright))


def test_classes_are_those_of_the_traced_curves(pictures):
    for pixels, label in pictures:
        parts = sorted(trace(pixels), key=len)
        assert len(parts) == 7
        found = [dots(pixels, part) for part in parts]
        # The dots are on long curves: on one, or on both.
        assert found == [0] * 5 + ([0, 2] if max(found) == 2 else [1, 1]) or found == [0] * 5 + [2, 0]
        assert (max(found) == 2) == bool(label)


def test_curves_are_dashed_and_fill_the_picture(pictures):
    pixels = np.stack([pixels for pixels, _ in pictures])
    assert pixels.shape[1:] == (32, 32) and pixels.dtype == np.uint8
    assert 0.2 < (pixels > 0).mean() < 0.45
    # Where the darkest pixels are taken away, curves fall apart into dashes.
    parts = [len(trace(np.where(one > 80, one, 0))) for one in pixels]
    assert np.mean(parts) > 2 * 7
    assert (pixels.mean(axis=0)[4:28, 4:28] > 0).all()


def test_classes_are_balanced_and_pictures_differ(pictures):
    share = np.mean([label for _, label in pictures])
    assert abs(share - 0.5) < 3 * math.sqrt(0.25 / len(pictures))
    assert len({pixels.tobytes() for pixels, _ in pictures}) == len(pictures)
    again, label = picture("test-3")
    assert (again == pictures[3][0]).all() and label == pictures[3][1]


@pytest.mark.slow
def test_the_distance_between_the_dots_does_not_tell_the_class():
    distances = {0: [], 1: []}
    for number in range(500):
        pixels, label = picture(f"distance-{number}")
        bright = np.argwhere(pixels > 220)
        distances[label].append(np.hypot(*(bright[:, None] - bright[None]).transpose(2, 0, 1)).max())
    larger = np.subtract.outer(distances[1], distances[0])
    # The share of pairs of pictures of which that of class 1 has the larger distance; 0.70 if left to chance.
    assert abs((larger > 0).mean() + (larger == 0).mean() / 2 - 0.5) < 0.08


def test_pictures_as_texts():
    pixels = np.arange(256, dtype=np.uint8)
    assert to_text(pixels) == "".join(CHARACTERS) and (to_pixels(to_text(pixels)) == pixels).all()
    # None is a space, joins with its neighbour or is changed by normalization to another of them.
    assert all(character.isalpha() for character in CHARACTERS)
