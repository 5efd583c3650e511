# SPDX-License-Identifier: Apache-2.0
"""Grey pictures as texts: one character per pixel, row by row, so that pictures are processed like texts."""

import numpy as np

LEVELS = 256
_FIRST = 256  # Latin letters from here on: all can be printed, and none is a space or joins with its neighbour
CHARACTERS = tuple(chr(_FIRST + level) for level in range(LEVELS))


def to_text(pixels: np.ndarray) -> str:
    """The text of pixels, uint8 of any shape."""
    return (pixels.astype("<u2") + _FIRST).tobytes().decode("utf-16-le")


def to_pixels(text: str) -> np.ndarray:
    """The pixels of a text, uint8 of shape (pixels,)."""
    return (np.frombuffer(text.encode("utf-16-le"), dtype="<u2") - _FIRST).astype(np.uint8)
