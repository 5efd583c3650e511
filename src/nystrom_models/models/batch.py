# SPDX-License-Identifier: Apache-2.0
"""The layout of a batch for the layers of every family: which tokens are valid, and where their states are.

Legend: B batch, N tokens of a row as given, W tokens of the longest row, T valid tokens of the batch, C hidden size,
H heads, R chosen rows of an attention map. A mask is (B, N), bool, True at valid tokens.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import Cache

from .input_checks import check_cumulative_lengths, check_same_documents, positions_start_again
from .recurrent_cache import State, read_state
from .token_layout import gather_tokens, pad_tokens, positions_by_rank, token_ranks
from .tracing import can_read_values, is_compiling

# From this share of padding on, only the valid tokens are computed. Below it, copying the tokens into rows for the
# attention and back takes about as long as the linear layers would save.
LEAST_PADDING = 1 / 16


@dataclass
class AttentionMaps:
    """The attention maps that a call asks for.

    rows: (R,) or (B, R) int64, the tokens whose rows are returned, by rank; None for all.
    collected: the map of each layer, (B, H, R or N, N).
    """

    rows: Tensor | None = None
    collected: list[Tensor] = field(default_factory=list)


@dataclass
class Batch:
    """Which tokens a batch holds. The model builds it once per call, and every layer reads it.

    For attention, states are in rows (B, W, C). In each row the valid tokens come first, in their order, and padding
    follows: so everything that a family computes along the tokens depends on their ranks. Elsewhere in the layers,
    states are in the same rows, or *packed*: only those of the valid tokens, (1, T, C), one row after the other.

    shape: B and N.
    rows: B and W.
    mask: (B, W) bool, of the rows; None where every token is valid.
    places: (T,) int64, the index of each packed token in the flattened rows; None where states are in rows.
    sources: (T,) int64, the index of each token of packed states or shortened rows in the flattened batch as given;
        None where rows are as long as given.
    order, ranks: (B, N) int64, the place in the batch as given of each token of the rows, and the reverse; None where
        the places are the same.
    given_mask: (B, N) bool, as given; None where every token is valid.
    positions: (1 or B, ...) int64, the rank of each token in the layout of the states, plus the number of tokens that
        a cache has seen.
    plan: what the family computes once for all layers.
    maps: the attention maps that the call asks for.
    cache: the cache of a causal family.
    """

    shape: tuple[int, int]
    rows: tuple[int, int]
    positions: Tensor
    mask: Tensor | None = None
    places: Tensor | None = None
    sources: Tensor | None = None
    order: Tensor | None = None
    ranks: Tensor | None = None
    given_mask: Tensor | None = None
    plan: Any = None
    maps: AttentionMaps | None = None
    cache: Cache | None = None
    _copies: dict[torch.device, "Batch"] = field(default_factory=dict, repr=False)

    # ---- states into the layout of the layers, and back ----

    def enter(self, states: Tensor) -> Tensor:
        """Brings states (B, N, ...) from the batch as given into the layout of the layers."""
        if self.sources is not None:
            tokens = states.flatten(0, 1).index_select(0, self.sources)
            return tokens[None] if self.places is not None else tokens.unflatten(0, self.rows)
        if self.order is None:
            return states
        if states.dim() == 2:
            return states.gather(1, self.order)
        return gather_tokens(states, self.order)

    def leave(self, states: Tensor) -> Tensor:
        """Brings states from the layout of the layers to the places as given, (B, N, C), with zeros at padding."""
        if self.sources is not None:
            return pad_tokens(states, self.sources, self.shape)
        if self.given_mask is None:
            return states
        if self.ranks is not None:
            states = gather_tokens(states, self.ranks)
        return states.masked_fill(~self.given_mask[..., None], 0)

    def to_rows(self, states: Tensor) -> Tensor:
        """Brings states from the layout of the layers into rows (B, W, C). Packed states get zeros at padding."""
        return states if self.places is None else pad_tokens(states, self.places, self.rows)

    def to_clean_rows(self, states: Tensor) -> Tensor:
        """The same, always with zeros at padding."""
        if self.places is not None or self.mask is None:
            return self.to_rows(states)
        return states.masked_fill(~self.mask[..., None], 0)

    def from_rows(self, states: Tensor) -> Tensor:
        """Brings states in rows (B, W, C) into the layout of the layers."""
        return states if self.places is None else states.flatten(0, 1).index_select(0, self.places)[None]

    # ---- attention maps ----

    def rank_of(self, tokens: Tensor) -> Tensor:
        """The ranks of tokens whose places in the rows as given are (R,) or (B, R) int64."""
        if self.ranks is None:
            return tokens
        return self.ranks.gather(1, tokens.expand(self.shape[0], -1))

    def record(self, attention_map: Tensor) -> Tensor:
        """Stores a layer's map (B, H, R or N, N), whose rows and columns are tokens by rank, for the output.

        In the output, tokens are at the places as given, and entries of padding are zero. Returns the same map by
        rank: if a layer computes its result from it, gradients reach the map in the output.
        """
        whole = self.maps.rows is None
        if self.ranks is not None:
            attention_map = _reorder_map(attention_map, self.ranks, whole)
        if self.given_mask is not None:
            padding = ~self.given_mask[:, None]
            attention_map = attention_map.masked_fill(padding[:, :, None], 0)
            if whole:
                attention_map = attention_map.masked_fill(padding[..., None], 0)
        self.maps.collected.append(attention_map)
        if self.order is None:
            return attention_map
        return _reorder_map(attention_map, self.order, whole).masked_fill(~self.mask[:, None, None], 0)

    # ---- devices ----

    def to(self, device: torch.device | str | int, **_: Any) -> "Batch":
        """The same batch on another device, copied once for all layers on that device."""
        device = torch.empty(0, device=device).device if not isinstance(device, torch.device) else device
        if self.positions.device == device:
            return self
        if device not in self._copies:
            moved = {item.name: _move(getattr(self, item.name), device) for item in fields(self)}
            self._copies[device] = replace(self, **moved)
        return self._copies[device]


def _reorder_map(attention_map: Tensor, order: Tensor, whole: bool) -> Tensor:
    """Reorders the columns of a map (B, H, R or N, N) by (B, N) int64; also the rows if the map is whole."""
    attention_map = attention_map.gather(3, order[:, None, None].expand(*attention_map.shape[:3], -1))
    return attention_map.gather(2, order[:, None, :, None].expand_as(attention_map)) if whole else attention_map


def _move(value: Any, device: torch.device) -> Any:
    """Moves the tensors in a value to a device; everything else stays as it is."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, AttentionMaps):
        return replace(value, rows=_move(value.rows, device))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_move(item, device) for item in value))
    if isinstance(value, dict):
        return {name: _move(item, device) for name, item in value.items()}
    return value


def make_batch(
    mask: Tensor | None,
    shape: tuple[int, int],
    device: torch.device,
    *,
    pack: bool = True,
    cache: Cache | None = None,
    documents: Tensor | None = None,
) -> Batch:
    """The batch of a mask (B, N) of rows of `shape`.

    Args:
        mask: (B, N) bool, None for all valid.
        shape: B and N.
        device: of the inputs.
        pack: whether states may be packed.
        cache: the cache of a causal family.
        documents: (B, N) int64, the number of each token's document in its row. A document is a run of equal numbers.
            Attention and convolution then have a row for each document. None: each row is one document.

    If there is a mask on a GPU, the host waits once, for three numbers; not in a graph.
    """
    made = _lay_out(mask, shape, device, pack) if documents is None else _by_document(mask, documents)
    made.cache = cache
    seen = read_state(cache, 0, State.TOKENS)
    if seen is not None:
        made.positions = made.positions + made.enter(seen[:, :1].to(device).expand(shape))
        if made.mask is not None and made.places is None:
            # At padding, positions must stay inside the table.
            made.positions = made.positions.masked_fill(~made.mask, 0)
    return made


def _lay_out(mask: Tensor | None, shape: tuple[int, int], device: torch.device, pack: bool) -> Batch:
    batch, length = shape
    if mask is None or mask.numel() == 0:
        return Batch(shape, shape, torch.arange(length, device=device)[None])
    if not can_read_values(mask):
        return _by_rank(mask)
    lengths = mask.sum(dim=-1)
    is_prefix = (mask == (torch.arange(length, device=mask.device) < lengths[:, None])).all()
    count, longest, in_place = torch.stack([lengths.sum(), lengths.max(), is_prefix]).cpu().tolist()
    if count == batch * length:
        return Batch(shape, shape, torch.arange(length, device=device)[None])
    if not pack or count == 0 or count > (1 - LEAST_PADDING) * batch * length:
        return _in_place(mask) if in_place else _by_rank(mask)
    # On a GPU, nonzero would wait for the count once more. Apple's MPS has no nonzero_static in PyTorch 2.11.
    is_valid = mask.flatten()
    sources = (is_valid.nonzero_static(size=count) if is_valid.is_cuda else is_valid.nonzero()).squeeze(-1)
    ranks = token_ranks(mask).flatten().index_select(0, sources)
    if count == batch * longest:
        # Rows of one length have no padding.
        return Batch(shape, (batch, longest), ranks.view(batch, longest), sources=sources, given_mask=mask)
    rows = (batch, longest)
    places = sources // length * longest + ranks
    row_mask = torch.arange(longest, device=mask.device) < lengths[:, None]
    return Batch(shape, rows, ranks[None], row_mask, places, sources, given_mask=mask)


def first_of_document(documents: Tensor, mask: Tensor | None) -> Tensor:
    """(B, N) bool: valid tokens that begin a document, because the valid token before them in the row is not of it."""
    length = documents.shape[1]
    before = torch.arange(-1, length - 1, device=documents.device).expand_as(documents)
    if mask is not None:
        # For each token the place of the last valid token before it; padding does not count.
        places = torch.where(mask, before + 1, -1).cummax(dim=1).values
        before = F.pad(places[:, :-1], (1, 0), value=-1)
    changed = (before < 0) | (documents != documents.gather(1, before.clamp_min(0)))
    return changed if mask is None else changed & mask


def find_documents(
    shape: tuple[int, int], seq_idx: Tensor | None, cu_seq_lens: Tensor | None, position_ids: Tensor | None
) -> Tensor | None:
    """The number of each token's document, (B, N) int64, for packed rows; None for other rows.

    Args:
        seq_idx: (B, N) int64, these numbers; None if they are not known.
        cu_seq_lens: (D + 1,) ints, the tokens before each of D documents, and all tokens of the batch, B N, as
            FlashAttention names them; None if they are not known.
        position_ids: (B, N), those of packed documents start again; None if they do not tell.

    Raises ValueError for lengths of other rows, and if they contradict `seq_idx`. A graph of torch.compile cannot
    decide by `position_ids`: it raises RuntimeError when it runs with some that start again. An exported graph does
    not notice them.
    """
    if cu_seq_lens is not None:
        check_cumulative_lengths(cu_seq_lens, shape)
        tokens = torch.arange(shape[0] * shape[1], dtype=cu_seq_lens.dtype, device=cu_seq_lens.device)
        documents = torch.searchsorted(cu_seq_lens[1:].contiguous(), tokens, right=True).view(shape)
        if seq_idx is None:
            return documents
        check_same_documents(seq_idx, documents)
    if seq_idx is not None or position_ids is None:
        return seq_idx
    restarts = positions_start_again(position_ids)
    if not can_read_values(position_ids):
        if is_compiling():
            torch._assert_async(
                ~restarts.any(),
                "position_ids start again within a row, so it holds several documents, which a compiled model knows "
                "only by seq_idx or cu_seq_lens_q: give one of them.",
            )
        return None
    return restarts.cumsum(dim=-1).expand(shape) if restarts.any() else None


@torch.compiler.disable(reason="packed rows must be read, which a graph cannot do: compile without fullgraph=True")
def _by_document(mask: Tensor | None, documents: Tensor) -> Batch:
    """One row for each document, with its valid tokens; packed states."""
    shape = (documents.shape[0], documents.shape[1])
    first = first_of_document(documents, mask).flatten()
    if mask is None:
        sources = torch.arange(first.numel(), device=documents.device)
    else:
        sources = mask.flatten().nonzero().squeeze(-1)
    first = first[sources]
    row = first.cumsum(0) - 1
    starts = first.nonzero().squeeze(-1)
    lengths = torch.diff(starts, append=starts.new_tensor([len(sources)]))
    longest = int(lengths.max()) if len(lengths) else 1
    ranks = torch.arange(len(sources), device=documents.device) - starts[row]
    row_mask = torch.arange(longest, device=documents.device) < lengths[:, None]
    rows = (len(starts), longest)
    return Batch(shape, rows, ranks[None], row_mask, row * longest + ranks, sources, given_mask=mask)


def _in_place(mask: Tensor) -> Batch:
    """Rows as given: their valid tokens already come first."""
    shape = (mask.shape[0], mask.shape[1])
    return Batch(shape, shape, torch.arange(shape[1], device=mask.device)[None], mask, given_mask=mask)


def _by_rank(mask: Tensor) -> Batch:
    """Rows as long as given, with the valid tokens moved to the beginning."""
    shape = (mask.shape[0], mask.shape[1])
    positions = torch.arange(shape[1], device=mask.device)[None]
    row_mask = positions < mask.sum(dim=-1, keepdim=True)
    return Batch(
        shape,
        shape,
        positions,
        row_mask,
        order=positions_by_rank(mask),
        ranks=token_ranks(mask),
        given_mask=mask,
    )
