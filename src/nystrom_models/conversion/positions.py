# SPDX-License-Identifier: Apache-2.0
"""A table of positions for another number of tokens.

Legend: P rows of a table, E width of the embeddings, N tokens of the longest sequence.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..models.embeddings import SinusoidalPositions, is_sinusoidal, repeat_positions

METHODS = ("repeat", "interpolate")


def check_method(method: str) -> None:
    """Raises ValueError for an unknown method."""
    if method not in METHODS:
        raise ValueError(f"positions={method!r} is unknown: use one of {', '.join(METHODS)}.")


def fit_positions(table: Tensor, first: int, length: int, method: str) -> tuple[Tensor, str]:
    """The positions (length, E) made from the rows of a table (P, E) from `first` on; and how they were made.

    Args:
        method: how to make more positions than the table has. "repeat", as in Longformer (Beltagy et al. 2020,
            arXiv:2004.05150, section 5): differences between positions up to P stay the same, and a sequence that fits
            into the table keeps its positions. "interpolate": linearly, with the same first and last position (usual
            for images: Dosovitskiy et al. 2021, arXiv:2010.11929, section 3.2): no two positions are the same, but
            every sequence gets other positions than before.

    If fewer positions are needed, both methods take the first ones.
    """
    used = table[first:]
    if length <= len(used):
        return used[:length], "copied" if length == len(used) else f"the first {length} rows of {len(used)}"
    if method == "repeat":
        return repeat_positions(used, 0, length), f"{len(used)} rows repeated to {length}"
    return interpolate_rows(used, length), f"{len(used)} rows interpolated to {length}"


def interpolate_rows(table: Tensor, length: int) -> Tensor:
    """A table (P, E), linearly interpolated to `length` rows; the first and the last row stay."""
    columns = table.T[None].float()
    return F.interpolate(columns, size=length, mode="linear", align_corners=True)[0].T.to(table.dtype)


@torch.no_grad()
def sinusoidal_table(config: Any, length: int, dtype: torch.dtype) -> Tensor | None:
    """The sinusoidal positions (length, E) of a model; None if it has a learned table."""
    if not is_sinusoidal(config):
        return None
    places = torch.arange(length) + config.first_position
    return SinusoidalPositions(config)(places, dtype)
