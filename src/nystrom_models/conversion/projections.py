# SPDX-License-Identifier: Apache-2.0
"""Projections of a sequence to fewer slots, E and F, in a converted model: segment means, or those of the source.

Legend: H heads, K slots, N tokens of the longest sequence, S taps of a convolution. A projection is (K, N), or
(H, K, N) if each head has its own; if heads differ in K, their matrices are concatenated along K. The weight of a
convolution is (S,) or (H, S).
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from ..models.sequence_projection import SequenceProjection
from .positions import interpolate_rows

_OF_ALL = "encoder.sequence_projection.weight"
_OF_A_LAYER = re.compile(
    r"encoder\.layer\.(\d+)\.attention\.self\.(key_projection|value_projection|projection)\.weight"
)


@dataclass(frozen=True)
class ProjectionPlace:
    """A projection in a model.

    name: the name of its weight, without the prefix of the base model. module: its module.
    uses: the layers and the states, "key" or "value", that it projects.
    """

    name: str
    module: SequenceProjection
    uses: tuple[tuple[int, str], ...]

    @property
    def is_of_all(self) -> bool:
        """Whether all layers share it."""
        return self.name == _OF_ALL

    @property
    def is_conv(self) -> bool:
        """Whether it is a convolution's taps, and not a matrix."""
        return self.module.projection_type == "conv"

    @property
    def layers(self) -> list[int]:
        """The layers that use it."""
        return sorted({layer for layer, _ in self.uses})

    @property
    def matrices(self) -> list[Tensor]:
        """The matrices (K, N), or the taps (S,) of a convolution, of each head, or one for all heads; float32."""
        weight = self.module.weight.detach().float()
        if self.module.slots_of_heads:
            return list(weight.split(self.module.slots_of_heads))
        return list(weight) if weight.dim() == (2 if self.is_conv else 3) else [weight]

    def assemble(self, matrices: list[Tensor]) -> Tensor:
        """The weight that consists of these matrices; the inverse of `matrices`."""
        joined = torch.cat(matrices) if self.module.slots_of_heads else torch.stack(matrices)
        return joined.view_as(self.module.weight).to(self.module.weight)


def projection_places(model: PreTrainedModel) -> list[ProjectionPlace]:
    """The projections of a model of this package that have weights, in the order of its parameters."""
    modules = dict(model.base_model.named_modules())
    names = [
        name
        for name, _ in model.base_model.named_parameters()
        if (name == _OF_ALL or _OF_A_LAYER.fullmatch(name))
        and isinstance(modules[name.removesuffix(".weight")], SequenceProjection)
    ]
    places = []
    for name in names:
        match = _OF_A_LAYER.fullmatch(name)
        if match is None:
            layers, states = range(model.config.num_hidden_layers), ["key", "value"]
        else:
            layers, kind = range(int(match[1]), int(match[1]) + 1), match[2]
            has_pair = name.replace("key_projection", "value_projection") in names and kind == "key_projection"
            states = [kind.removesuffix("_projection")] if has_pair or kind == "value_projection" else ["key", "value"]
        uses = tuple((layer, state) for layer in layers for state in states)
        places.append(ProjectionPlace(name, modules[name.removesuffix(".weight")], uses))
    return places


def segment_means(place: ProjectionPlace) -> Tensor:
    """A projection whose slots are the means of K segments of the positions, of sizes as equal as possible."""
    if place.is_conv:
        return torch.full_like(place.module.weight, 1 / place.module.weight.shape[-1])
    sizes = [matrix.shape for matrix in place.matrices]
    return place.assemble([group_means(torch.arange(length) * slots // length, slots) for slots, length in sizes])


def group_means(groups: Tensor, slots: int) -> Tensor:
    """From the slot of each position, (N,) int64, the projection (K, N) to the mean of each slot's positions."""
    members = F.one_hot(groups, slots).T.float()
    return members / members.sum(dim=1, keepdim=True)


# ---- from a source that has projections ----


def carried_projection(
    place: ProjectionPlace, sources: list[ProjectionPlace], same_type: bool, positions: str
) -> tuple[Tensor, str, str] | None:
    """A projection made from those of a source of the same family.

    Where several projections of the source (of heads, of layers, of keys and values) become one, it is their mean. For
    fewer slots, neighbouring slots are averaged. For more, slots are repeated; if their number is a multiple of the
    source's, the function stays the same, because the softmax divides its weight among equal slots. The columns are
    extended like the positions: repeated, or interpolated so that their sums stay about the same.

    Args:
        place: the projection's place in the model.
        sources: all places of the source's model.
        same_type: whether both have the same `projection_type`.
        positions: "repeat" or "interpolate".

    Returns: the weight, the names in the source, and how it was made; None if no projection of the source fits.
    """
    found = [other for other in sources if set(other.uses) & set(place.uses)]
    if not found or not same_type:
        return None
    ours, theirs = place.matrices, [other.matrices for other in found]
    if place.is_conv and any(taps[0].shape != ours[0].shape for taps in theirs):
        return None
    made = []
    for index, matrix in enumerate(ours):
        if len(ours) == 1:  # all heads become one
            used = [taken for heads in theirs for taken in heads]
        else:  # each head stays as it is, or one becomes all
            used = [heads[0] if len(heads) == 1 else heads[index] for heads in theirs]
        if not place.is_conv:
            used = [_fit_columns(_fit_slots(taken, len(matrix)), matrix, positions) for taken in used]
        made.append(torch.stack(used).mean(dim=0))
    how = []
    if len(found) > 1:
        how.append(f"mean of {len(found)}")
    if len(theirs[0]) != len(ours):
        how.append("mean of the heads" if len(ours) == 1 else "one for all heads")
    before, after = ([matrix.shape for matrix in matrices] for matrices in (theirs[0], ours))
    if not place.is_conv and {shape[0] for shape in before} != {shape[0] for shape in after}:
        how.append(f"{_numbers(before)} slots made {_numbers(after)}")
    if not place.is_conv and before[0][1] != after[0][1]:
        how.append(f"columns of {before[0][1]} positions made {after[0][1]} ({positions})")
    return place.assemble(made), ", ".join(other.name for other in found), "; ".join(how) or "copied"


def _numbers(shapes: list[torch.Size]) -> str:
    """The different numbers of slots: "8", or "4, 8"."""
    return ", ".join(map(str, sorted({shape[0] for shape in shapes})))


def _fit_slots(projection: Tensor, slots: int) -> Tensor:
    """A projection (K, N) with another number of slots."""
    before = len(projection)
    if slots >= before:
        return projection[torch.arange(slots) * before // slots]
    return group_means(torch.arange(before) * slots // before, slots) @ projection


def _fit_columns(projection: Tensor, like: Tensor, positions: str) -> Tensor:
    """A projection (K, N) with as many columns as `like`."""
    before, length = projection.shape[1], like.shape[1]
    if positions == "repeat" or length <= before:
        return projection[:, torch.arange(length) % before]
    return interpolate_rows(projection.T, length).T * (before / length)


def projection_type(config: PreTrainedConfig) -> str | None:
    """The type of a family's projections; None if it has none."""
    if getattr(config, "projected_dim", None) is None:
        return None
    return getattr(config, "projection_type", "linear")
