# SPDX-License-Identifier: Apache-2.0
"""Projections of a sequence to fewer slots, E and F, in a converted model: segment means, or those of the source.

Legend: H heads, K slots, N tokens of the longest sequence, S taps of a convolution. A projection is (K, N), or
(H, K, N) where each head has its own; a convolution's is (S,) or (H, S).
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

    name: of its weight, without the prefix of the base model. module: it.
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
    def layers(self) -> list[int]:
        return sorted({layer for layer, _ in self.uses})


def projection_places(model: PreTrainedModel) -> list[ProjectionPlace]:
    """The projections with weights of a model of this package, in the order of its parameters."""
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
    """A projection whose slots are the means of K segments of the positions, as equal in size as can be."""
    weight = place.module.weight
    if place.module.projection_type == "conv":
        return torch.full_like(weight, 1 / weight.shape[-1])
    groups = torch.arange(weight.shape[-1]) * weight.shape[-2] // weight.shape[-1]
    return group_means(groups, weight.shape[-2]).to(weight).expand_as(weight).clone()


def group_means(groups: Tensor, slots: int) -> Tensor:
    """(N,) int64, the slot of each position -> the projection (K, N) that takes the mean of each slot's positions."""
    members = F.one_hot(groups, slots).T.float()
    return members / members.sum(dim=1, keepdim=True)


# ---- from a source with projections of its own ----


def carried_projection(
    place: ProjectionPlace, sources: list[ProjectionPlace], same_type: bool, positions: str
) -> tuple[Tensor, str, str] | None:
    """What a projection becomes from those of a source of the same family.

    Where several of the source's fall together (of heads, of layers, of keys and values), it is their mean. For fewer
    slots, it is the mean of neighbouring ones; for more, slots are repeated: of a multiple of the source's, the
    function is the same, for the softmax divides its weight among equal slots. Columns follow the positions: repeated,
    or interpolated so that their sums stay.

    Args:
        place: in the model.
        sources: all places of the source's model.
        same_type: whether both have the same `projection_type`.
        positions: "repeat" or "interpolate".

    Returns: the weight, the names in the source, and how it was made; None if nothing of the source fits.
    """
    weight = place.module.weight
    found = [other for other in sources if set(other.uses) & set(place.uses)]
    if not found or not same_type:
        return None
    is_conv = place.module.projection_type == "conv"
    if is_conv and any(other.module.weight.shape[-1] != weight.shape[-1] for other in found):
        return None
    head_dims = 2 if is_conv else 3
    parts = []
    for other in found:
        theirs = other.module.weight.detach().float()
        if theirs.dim() == head_dims and weight.dim() < head_dims:
            theirs = theirs.mean(dim=0)
        parts.append(theirs if is_conv else _fit_columns(_fit_slots(theirs, weight.shape[-2]), weight, positions))
    made = torch.stack(torch.broadcast_tensors(*parts)).mean(dim=0).expand_as(weight).to(weight)
    how = []
    if len(found) > 1:
        how.append(f"mean of {len(found)}")
    theirs = found[0].module.weight
    if theirs.dim() > weight.dim():
        how.append("mean of the heads")
    elif theirs.dim() < weight.dim():
        how.append("one for all heads")
    if not is_conv and theirs.shape[-2] != weight.shape[-2]:
        how.append(f"{theirs.shape[-2]} slots made {weight.shape[-2]}")
    if not is_conv and theirs.shape[-1] != weight.shape[-1]:
        how.append(f"columns of {theirs.shape[-1]} positions made {weight.shape[-1]} ({positions})")
    return made.clone(), ", ".join(other.name for other in found), "; ".join(how) or "copied"


def _fit_slots(projection: Tensor, slots: int) -> Tensor:
    """(..., K, N) with another number of slots."""
    before = projection.shape[-2]
    if slots >= before:
        return projection.index_select(-2, torch.arange(slots) * before // slots)
    return group_means(torch.arange(before) * slots // before, slots) @ projection


def _fit_columns(projection: Tensor, like: Tensor, positions: str) -> Tensor:
    """(..., K, N) with the columns of `like`."""
    before, length = projection.shape[-1], like.shape[-1]
    if positions == "repeat" or length <= before:
        return projection[..., torch.arange(length) % before]
    flat = projection.flatten(0, -2).T  # (N, H K)
    stretched = interpolate_rows(flat, length) * (before / length)
    return stretched.T.reshape(*projection.shape[:-1], length)


def projection_type(config: PreTrainedConfig) -> str | None:
    """Of a family's projections; None if it has none."""
    if getattr(config, "projected_dim", None) is None:
        return None
    return getattr(config, "projection_type", "linear")
