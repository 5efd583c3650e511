# SPDX-License-Identifier: Apache-2.0
"""Pathfinder (Linsley et al. 2018, arXiv:1805.08315), in the size of the Long Range Arena: are two dots the ends of
one dashed curve?

A picture of 32 × 32 has two long curves of 14 dashes and five short ones of 4. Two ends of long curves are dots: both
of one curve (class 1), or one of each (class 0). These numbers are the Long Range Arena's; the drawing is our own. In
our pictures, the distance between the dots does not depend on the class: at random, the ends of one curve are farther
apart, which alone would give two thirds of the answers. Lengths are in pixels.
"""

import math
import random
from collections.abc import Callable
from functools import cache

import numpy as np

from .pictures import to_text

SIZE = 32
CONTOUR_LENGTH = 14  # dashes
DISTRACTOR_LENGTH = CONTOUR_LENGTH // 3
NUM_DISTRACTORS = 20 // DISTRACTOR_LENGTH
DASH, GAP = 1.5, 1.1
HALF_WIDTH = 0.4
DOT_RADIUS = 1.5
DASH_LEVEL, DOT_LEVEL = 0.75, 1.0
MARGIN = 2.0
# Distance between the middle lines of two curves, or of distant parts of one. A curve is lit up to 0.9 px from its
# middle line: between two curves there is at least one dark pixel, between two dashes of one there is none.
SEPARATION = 3.3
# Distance between a dot's centre and other curves, and between two dots.
DOT_SEPARATION = 4.4
SAME_DISTANCE = 1.0  # largest difference between the distances of the dots in the two classes
TURN = 0.45  # standard deviation of the angle between two dashes, in radians
_ATTEMPTS = 12  # attempts at the next dash of a curve, before the curve is given up
_CURVES = 400  # attempts at a curve, before the picture is given up

_FINE = 4  # cells per pixel

Place = tuple[float, float]  # x and y
Dash = tuple[Place, Place]  # beginning and end
Dots = tuple[Place, Place]


def _disc(radius: float) -> np.ndarray:
    reach = np.arange(-math.ceil(radius * _FINE), math.ceil(radius * _FINE) + 1) / _FINE
    return np.hypot(reach, reach[:, None]) < radius + 0.75 / _FINE  # places are rounded to cells


class _Taken:
    """The places that are too near to a curve, as a fine grid with a border for discs around its edge."""

    border = math.ceil(DOT_SEPARATION * _FINE) + 1

    def __init__(self):
        cells = SIZE * _FINE + 2 * self.border
        self.cells = np.zeros((cells, cells), dtype=bool)

    def __contains__(self, place: Place) -> bool:
        return bool(self.cells[round(place[1] * _FINE) + self.border, round(place[0] * _FINE) + self.border])

    def add(self, place: Place, disc: np.ndarray) -> None:
        """Marks the places of a disc around a place as taken."""
        half = len(disc) // 2
        row, column = (round(place[axis] * _FINE) + self.border - half for axis in (1, 0))
        self.cells[row : row + len(disc), column : column + len(disc)] |= disc


_NEAR, _NEAR_A_DOT = _disc(SEPARATION), _disc(DOT_SEPARATION)


def _places(dash: Dash) -> tuple[Place, ...]:
    """Beginning, middle and end of a dash."""
    (x, y), (u, v) = dash
    return dash[0], ((x + u) / 2, (y + v) / 2), dash[1]


def _ends(curve: list[Dash]) -> tuple[Place, Place]:
    return curve[0][0], curve[-1][1]


def _draw_curve(draw: Callable[[], float], length: int, lines: _Taken, dots: _Taken) -> list[Dash] | None:
    """A random curve that stays away from others and from itself; None if there was no place for its next dash.

    Args:
        draw: gives random numbers from 0 to 1.
        length: number of dashes.
        lines, dots: where no dash and no dot may be.
    """
    own = _Taken()
    place = (MARGIN + (SIZE - 2 * MARGIN) * draw(), MARGIN + (SIZE - 2 * MARGIN) * draw())
    angle = 2 * math.pi * draw()
    curve: list[Dash] = []
    for number in range(length):
        at_end = length == CONTOUR_LENGTH and number in (0, length - 1)  # where a dot may be
        for _ in range(_ATTEMPTS):
            # The sum of three uniform numbers is nearly normal, with a standard deviation of one half.
            turned = angle + (2 * TURN * (draw() + draw() + draw() - 1.5) if number else 0.0)
            x, y = math.cos(turned), math.sin(turned)
            begin = (place[0] + GAP * x, place[1] + GAP * y) if number else place
            end = (begin[0] + DASH * x, begin[1] + DASH * y)
            if min(end) < MARGIN or max(end) > SIZE - MARGIN:
                continue
            dash = (begin, end)
            _, middle, _ = _places(dash)
            # The end is tested first, because it most often collides.
            if end in lines or end in own or middle in lines or middle in own or begin in lines or begin in own:
                continue
            if not at_end or (end if number else begin) not in dots:
                break
        else:
            return None
        curve.append(dash)
        place, angle = end, turned
        if number >= 2:  # the two previous dashes are always near
            for point in _places(curve[number - 2]):
                own.add(point, _NEAR)
    # Dots at the two ends must not touch each other, either.
    return curve if math.dist(*_ends(curve)) >= DOT_SEPARATION else None


def _dots(first: list[Dash], second: list[Dash]) -> tuple[Dots, Dots] | None:
    """The ends that become dots, by class: two ends of different curves, and those of one curve, at about the same
    distance; None if these curves have no such ends."""
    apart = [(one, other) for one in _ends(first) for other in _ends(second)]
    connected = [_ends(first), _ends(second)]
    pairs = [(two, one) for two in apart for one in connected]
    best = min(pairs, key=lambda pair: abs(math.dist(*pair[0]) - math.dist(*pair[1])))
    return best if abs(math.dist(*best[0]) - math.dist(*best[1])) < SAME_DISTANCE else None


def _scene(draw: Callable[[], float]) -> tuple[list[list[Dash]], tuple[Dots, Dots]] | None:
    """Two long curves, then the short ones, and the dots by class; None if there was no room."""
    curves: list[list[Dash]] = []
    dots: tuple[Dots, Dots] | None = None
    lines, ends = _Taken(), _Taken()
    for length in (CONTOUR_LENGTH,) * 2 + (DISTRACTOR_LENGTH,) * NUM_DISTRACTORS:
        for _ in range(_CURVES):
            if (curve := _draw_curve(draw, length, lines, ends)) is not None:
                break
        else:
            return None
        curves.append(curve)
        for dash in curve:
            for point in _places(dash):
                lines.add(point, _NEAR)
                ends.add(point, _NEAR_A_DOT)
        if length == CONTOUR_LENGTH:
            # Any end of a long curve may become a dot, so each has room for one, in both classes.
            for end in _ends(curve):
                lines.add(end, _NEAR_A_DOT)
        if len(curves) == 2 and (dots := _dots(*curves)) is None:
            return None
    assert dots is not None
    return curves, dots


@cache
def _pixel_centres() -> np.ndarray:
    places = np.arange(SIZE) + 0.5
    return np.stack(np.meshgrid(places, places), axis=-1)


def _distance_to_dashes(curves: list[list[Dash]]) -> np.ndarray:
    """Distance of each pixel's centre to the nearest dash, (SIZE, SIZE)."""
    dashes = np.array([dash for curve in curves for dash in curve])
    begin, along = dashes[:, 0], dashes[:, 1] - dashes[:, 0]
    offset = _pixel_centres()[:, :, None] - begin
    share = np.clip((offset * along).sum(-1) / np.square(along).sum(-1), 0, 1)
    return np.sqrt(np.square(offset - share[..., None] * along).sum(-1).min(-1))


def _coverage(distance: np.ndarray, radius: float) -> np.ndarray:
    """The share of a pixel within `radius`, from 0 to 1, by the distance of its centre."""
    return np.clip(0.5 + radius - distance, 0, 1)


def picture(seed: str) -> tuple[np.ndarray, int]:
    """A random picture, uint8 (32, 32), and its class; the classes are equally likely."""
    draw = random.Random(seed).random
    label = int(draw() < 0.5)
    while (scene := _scene(draw)) is None:
        pass
    curves, dots = scene
    grey = DASH_LEVEL * _coverage(_distance_to_dashes(curves), HALF_WIDTH)
    for dot in dots[label]:
        distance = np.sqrt(np.square(_pixel_centres() - dot).sum(-1))
        grey = np.maximum(grey, DOT_LEVEL * _coverage(distance, DOT_RADIUS))
    return np.rint(255 * grey).astype(np.uint8), label


def picture_text(seed: str) -> tuple[str, int]:
    """[`picture`], with a character for each pixel."""
    pixels, label = picture(seed)
    return to_text(pixels), label
