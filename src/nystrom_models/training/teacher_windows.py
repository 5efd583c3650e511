# SPDX-License-Identifier: Apache-2.0
"""Cuts rows into windows for a teacher that takes fewer tokens, and maps its outputs back to the rows.

Legend: B rows, N tokens of a row as given, W windows, L tokens of a window.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Windows:
    """The inputs of a teacher, padded on the right.

    inputs: `input_ids`, `attention_mask` and `token_type_ids`, (W, L) int64.
    places: (W, L) int64, the place of each token in the flattened batch as given; -1 for padding and for added special
        tokens. None if the inputs are the batch as given.
    shape: B and N.
    """

    inputs: dict[str, Tensor]
    places: Tensor | None
    shape: tuple[int, int]

    @property
    def own(self) -> Tensor:
        """(W, L) bool: True at tokens of the batch, False at padding and added special tokens."""
        return self.inputs["attention_mask"].bool() if self.places is None else self.places >= 0

    def bring(self, values: Tensor) -> Tensor:
        """Brings values (B, N), of the batch as given, to the places of the windows (W, L), with zeros elsewhere."""
        if self.places is None:
            return values
        return values.flatten()[self.places.clamp(min=0)] * self.own

    def take_back(self, values: Tensor) -> Tensor:
        """Brings values (W, L, C) to the places of the batch as given, (B, N, C), with zeros at tokens that are in no
        window."""
        if self.places is None:
            return values
        rows, length = self.shape
        flat = values.new_zeros(rows * length, values.shape[-1])
        return flat.index_copy(0, self.places[self.own], values[self.own]).unflatten(0, self.shape)


@dataclass(frozen=True)
class Cutter:
    """Cuts rows into windows.

    A row of at most `longest` tokens is one window. Of a longer one, the windows are its first `longest` tokens, the
    next `longest`, and so on, so that a token has the position in its window that it has in a table of positions that
    was repeated. The special tokens of a row, [CLS] ... [SEP], replace the first and the last tokens of each window,
    except at the ends of the row: the replaced tokens are in no window. A last window that would consist only of
    special tokens is left out.

    longest: tokens of a window; None for no limit. before, after: ids of the special tokens at the beginning and at
        the end of a row. pad_token_id: fills windows up.

    Raises:
        ValueError: if a window has no room beside the special tokens.
    """

    longest: int | None
    before: Sequence[int]
    after: Sequence[int]
    pad_token_id: int

    def __post_init__(self) -> None:
        if self.longest is not None and self.longest <= len(self.before) + len(self.after):
            raise ValueError(f"A window of {self.longest} tokens has no room beside the special tokens of a row.")

    def seen(self, attention_mask: Tensor) -> Tensor:
        """Which tokens are in a window, (B, N) bool, for a mask (B, N)."""
        mask = attention_mask.bool()
        if self.longest is None or mask.shape[1] <= self.longest:
            return mask
        number, offset, count, last = self._windows(mask)
        begins = (number == 0) | (offset >= len(self.before))
        ends = (number == last[:, None]) | (offset < self.longest - len(self.after))
        return mask & begins & ends & (number < count[:, None])

    def _windows(self, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """For each token of a mask (B, N), the number of its window in the row and its place there, (B, N); for each
        row, the count of its windows and the number of the window in which the row ends, (B,)."""
        longest = self.longest or mask.shape[1]
        ranks, lengths = (mask.long().cumsum(dim=1) - 1).clamp(min=0), mask.sum(dim=1)
        last = (lengths - 1).clamp(min=0) // longest
        is_empty = (last > 0) & (lengths - last * longest <= len(self.before) + len(self.after))
        return ranks // longest, ranks % longest, torch.where(is_empty, last, last + 1), last

    def cut(self, batch: Mapping[str, Tensor]) -> Windows:
        """The windows of a batch, one row after the other.

        batch: `input_ids`, `attention_mask` and perhaps `token_type_ids`, (B, N) int64. Each row begins and ends with
        its special tokens; padding may be on either side.
        """
        ids, mask = batch["input_ids"], batch["attention_mask"].bool()
        rows, width = ids.shape
        types = batch.get("token_type_ids", torch.zeros_like(ids))
        fits = self.longest is None or width <= self.longest
        if fits and bool((mask[:, 1:] <= mask[:, :-1]).all()):
            inputs = {"input_ids": ids, "attention_mask": mask.long(), "token_type_ids": types}
            return Windows(inputs, None, (rows, width))
        length = width if self.longest is None or fits else self.longest
        number, offset, count, last = self._windows(mask)
        seen = self.seen(mask)
        begin = count.cumsum(dim=0) - count
        total = int(count.sum())
        flat = torch.arange(rows * width, device=ids.device).view(rows, width)
        places = torch.full((total, length), -1, device=ids.device)
        places[(begin[:, None] + number)[seen], offset[seen]] = flat[seen]

        of_row = torch.arange(rows, device=ids.device).repeat_interleave(count)
        of_window = torch.arange(total, device=ids.device) - begin[of_row]
        is_last = of_window == last[of_row]
        sizes = torch.where(is_last, mask.sum(dim=1)[of_row] - of_window * length, length)
        added = torch.full_like(places, self.pad_token_id)
        if total > rows:
            added[:, : len(self.before)] = torch.tensor(self.before, device=ids.device)
            tail = length - len(self.after)
            added[:, tail:] = torch.where(
                is_last[:, None], added[:, tail:], torch.tensor(self.after, device=ids.device)
            )
        own, index = places >= 0, places.clamp(min=0)
        inputs = {
            "input_ids": torch.where(own, ids.flatten()[index], added),
            "attention_mask": (torch.arange(length, device=ids.device) < sizes[:, None]).long(),
            "token_type_ids": types.flatten()[_nearest(index, own)],
        }
        return Windows(inputs, places, (rows, width))


def _nearest(index: Tensor, own: Tensor) -> Tensor:
    """(W, L) int64: for an added token, the place of the token of the batch before it, or else of the first one."""
    columns = torch.arange(own.shape[1], device=own.device).expand_as(own)
    last = torch.where(own, columns, -1).cummax(dim=1).values
    first = own.int().argmax(dim=1, keepdim=True)
    return index.gather(1, torch.where(last < 0, first, last))
