# SPDX-License-Identifier: Apache-2.0
"""E and F from the principal directions of keys and values on a sample of text, if that start has a smaller error.

A slot represents its tokens well if their keys and values are similar: with slots that are means of equally many
tokens, the softmax over slots equals the softmax over tokens if the tokens of each slot are equal. Segment means
assume that neighbours are similar. Here positions are grouped by their similarity on the sample: all positions are
split into two halves along their first principal direction, each half along its own, and so on, down to K groups
(principal direction divisive partitioning, Boley 1998, doi:10.1023/A:1009740529316, with halves of equal size).

Legend: R rows, N tokens, H heads, D head size, K slots. A Gram matrix is (N, N): products of the positions' keys and
values, summed over rows, heads and channels.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from ..models.attention_linformer import linformer_attention
from ..models.masked_attention import attend
from .exact_attention import AttentionInputs, attention_inputs
from .projections import ProjectionPlace, group_means, projection_places
from .report import ProjectionStart
from .sample import Sample

POWER_STEPS = 50


def first_principal_scores(gram: Tensor) -> Tensor:
    """The scores (n,) of n positions along their first principal direction, from their Gram matrix (n, n).

    Equal if all positions are.
    """
    centred = gram - gram.mean(dim=0) - gram.mean(dim=1, keepdim=True) + gram.mean()
    scale = gram.diagonal().mean()
    # A fixed start of the power iteration, so that the same sample gives the same groups.
    scores = torch.linspace(-1, 1, len(gram), dtype=gram.dtype) + 0.1 * torch.cos(torch.arange(len(gram))).to(gram)
    for _ in range(POWER_STEPS):
        scores = centred @ scores
        size = scores.norm()
        if size <= 1e-9 * scale:
            return torch.zeros_like(scores)
        scores = scores / size
    return scores


def principal_groups(gram: Tensor, slots: int) -> Tensor:
    """(N,) int64: for each position one of K slots, of N / K positions each (one more or less where K does not
    divide N)."""
    groups = torch.empty(len(gram), dtype=torch.long)

    def split(positions: Tensor, first: int, count: int) -> None:
        if count == 1:
            groups[positions] = first
            return
        scores = first_principal_scores(gram[positions][:, positions])
        # Positions with equal scores keep their order.
        ranked = positions[torch.sort(scores, stable=True).indices]
        half = count // 2
        cut = len(positions) * half // count
        split(ranked[:cut].sort().values, first, half)
        split(ranked[cut:].sort().values, first + half, count - half)

    split(torch.arange(len(gram)), 0, slots)
    return groups


def gram_matrices(inputs: Sequence[AttentionInputs], by_head: bool) -> Tensor:
    """The Gram matrices (H, N, N) of a layer's keys and values, normalised so that keys and values of each head have
    the same weight; or their sum over heads, (1, N, N)."""
    total: Tensor | float = 0.0
    for name in ("key", "value"):
        states = [getattr(chunk, name) for chunk in inputs]
        size = sum(chunk.square().sum(dim=(0, 2, 3)) for chunk in states)  # (H,)
        for chunk in states:
            scaled = chunk / size.clamp_min(1e-30).sqrt()[:, None, None]
            # (H or 1, N, rows and channels)
            scaled = scaled.permute(1, 2, 0, 3) if by_head else scaled.permute(2, 0, 1, 3)[None]
            scaled = scaled.flatten(2)
            total = total + scaled @ scaled.mT
    assert isinstance(total, Tensor)
    return total


def _from_gram(place: ProjectionPlace, grams: Tensor) -> list[Tensor]:
    """The projection matrices of a place from the Gram matrices (H or 1, N, N) of the states that they project."""
    sizes = [len(matrix) for matrix in place.matrices]
    return [group_means(principal_groups(gram, slots), slots) for gram, slots in zip(grams, sizes, strict=True)]


def principal_directions(
    exact: PreTrainedModel, places: Sequence[ProjectionPlace], rows: Tensor
) -> dict[str, list[Tensor]]:
    """For each projection, by name, its matrices from keys and values of rows (R, N) in a model with softmax
    attention.
    """
    found: dict[str, list[Tensor]] = {}
    total: Tensor | float = 0.0
    for layer, inputs in enumerate(attention_inputs(exact, rows)):
        here = [place for place in places if layer in place.layers]
        grams = gram_matrices(inputs, by_head=len(here[0].matrices) > 1)
        if here[0].is_of_all:
            total = total + grams
            continue
        # E and F of a layer have the same groups: the key of a slot decides the weight of its value.
        matrices = _from_gram(here[0], grams)
        found |= {place.name: matrices for place in here}
    if places[0].is_of_all:
        assert isinstance(total, Tensor)
        found[places[0].name] = _from_gram(places[0], total)
    return found


def _approximated(inputs: AttentionInputs, matrices: list[Tensor]) -> Tensor:
    """Linformer attention (R, H, N, D) with one matrix for each head, or one for all heads."""
    parts = [inputs]
    if len(matrices) > 1:
        # Heads may have different numbers of slots.
        parts = [AttentionInputs(*states) for states in zip(*(part.split(1, dim=1) for part in inputs), strict=True)]
    contexts = [
        linformer_attention(*part, key_projection=matrix, value_projection=matrix)
        for part, matrix in zip(parts, matrices, strict=True)
    ]
    return torch.cat(contexts, dim=1)


@torch.no_grad()
def output_errors(
    exact: PreTrainedModel, starts: Sequence[dict[int, list[Tensor]]], rows: Tensor
) -> list[list[tuple[float, float]]]:
    """For each start (matrices by layer) and each layer, ‖approximated - exact‖² and ‖exact‖² on rows (R, N)."""
    sums: list[list[tuple[float, float]]] = [[] for _ in starts]
    for layer, inputs in enumerate(attention_inputs(exact, rows)):
        totals = [[0.0, 0.0] for _ in starts]
        for chunk in inputs:
            context = attend(*chunk)
            for total, start in zip(totals, starts, strict=True):
                total[0] += (_approximated(chunk, start[layer]) - context).square().sum().item()
                total[1] += context.square().sum().item()
        for found, (squares, size) in zip(sums, totals, strict=True):
            found.append((squares, size))
    return sums


def start_projections(model: PreTrainedModel, exact: PreTrainedModel, sample: Sample) -> list[ProjectionStart]:
    """Sets E and F of a model, where they are matrices, to the better of two starts, measured on held-out rows.

    Args:
        model: its projections are segment means.
        exact: the source's encoder with softmax attention.
        sample: has rows as long as the model takes.

    Returns: for each separate projection both errors and the start taken; empty if no projection is a matrix.
    """
    places = [place for place in projection_places(model) if place.module.projection_type == "linear"]
    if not places:
        return []
    fit, held_out = sample.split(model.config.max_position_embeddings)
    principal = principal_directions(exact, places, fit)
    # The segment means of the model, before any is replaced.
    segments = {place.name: place.matrices for place in places}
    first: dict[int, str] = {}
    for place in places:
        for layer in place.layers:
            first.setdefault(layer, place.name)  # E's; F has the same matrices
    starts = [{layer: start[name] for layer, name in first.items()} for start in (segments, principal)]
    errors = output_errors(exact, starts, held_out)
    by_layers: dict[tuple[int, ...], list[ProjectionPlace]] = {}
    for place in places:
        by_layers.setdefault(tuple(place.layers), []).append(place)
    report = []
    for layers, together in by_layers.items():
        segment_error, principal_error = (
            math.sqrt(sum(found[layer][0] for layer in layers) / max(sum(found[layer][1] for layer in layers), 1e-30))
            for found in errors
        )
        taken = "principal_directions" if principal_error < segment_error else "segment_means"
        if taken == "principal_directions":
            with torch.no_grad():
                for place in together:
                    place.module.weight.copy_(place.assemble(principal[place.name]))
        report.append(
            ProjectionStart(None if together[0].is_of_all else layers[0], taken, segment_error, principal_error)
        )
    return report
