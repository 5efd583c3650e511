# SPDX-License-Identifier: Apache-2.0
"""A model of this package with the weights of a source, and the origin of each weight."""

import copy
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from ..models.configuration_base import BaseConfig
from ..models.embeddings import is_sinusoidal
from ..models.self_attention import SelfAttention
from .positions import fit_positions, sinusoidal_table
from .projections import carried_projection, projection_places, projection_type, segment_means
from .reading import SourceModel, auto_class
from .report import ConversionReport, Origin
from .sources import approximates_softmax

_POSITIONS = "embeddings.position_embeddings.weight"
_TYPES = "embeddings.token_type_embeddings.weight"
_WORDS = "embeddings.word_embeddings.weight"
_DECODER = "cls.predictions.decoder.weight"
_OF_A_FAMILY = re.compile(
    r"(^|.*\.)encoder\.(layer\.\d+\.attention\.self\.(conv|query_features|key_features|\w*projection)"
    r"|sequence_projection)\."
)


def is_of_a_family(name: str) -> bool:
    """Whether a parameter, by its name, belongs to a family's attention beside queries, keys and values, so that the
    other families do not have it: feature maps, projections of the tokens (E and F), a convolution."""
    return _OF_A_FAMILY.match(name) is not None


@dataclass
class _State:
    """Weights for a model, by names without the prefix of the base model, and their origins."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    origins: dict[str, tuple[str | None, str]] = field(default_factory=dict)

    def put(self, name: str, tensor: Tensor, source: str | None, how: str = "copied") -> None:
        self.tensors[name] = tensor
        self.origins[name] = (source, how)


@torch.no_grad()
def take_over(
    source: SourceModel, config: BaseConfig, head: str, positions: str
) -> tuple[PreTrainedModel, ConversionReport]:
    """A model with the source's weights, in the source's dtype and in evaluation mode, and the report.

    Args:
        config: one that fits the source, see `check_config`.
        head: the head of the model, one of `HEADS`; weights of another head are dropped.
        positions: "repeat" or "interpolate", see `fit_positions`.

    Raises:
        ValueError: if weights of the source's encoder have no place in the model.
    """
    model = auto_class(head).from_config(copy.deepcopy(config), dtype=source.model.dtype).eval()
    prefix = "" if head == "Model" else model.base_model_prefix + "."
    parameters = {name.removeprefix(prefix): tensor for name, tensor in model.state_dict().items()}
    state, left_behind = _State(), set(source.unread)
    for name, (tensor, theirs) in source.weights.items():
        if name == "cls.predictions.bias" and not config.tie_word_embeddings:
            # The model reads only the bias of the output layer itself.
            continue
        if name in (_POSITIONS, _TYPES):
            continue
        if name in parameters and parameters[name].shape == tensor.shape and not _is_projection(name):
            state.put(name, tensor, theirs)
            continue
        if name.startswith(("embeddings.", "encoder.")) and not is_of_a_family(name):
            raise ValueError(
                f"The weight {theirs!r} of the source has no place in {type(model).__name__}: give a "
                "checkpoint with BERT's layers."
            )
        left_behind.add(theirs)
    left_behind -= {theirs for name, (_, theirs) in source.weights.items() if name in state.tensors}
    _put_embeddings(state, source, config, positions)
    left_behind -= _put_projections(state, source, model, positions)
    for name, module in model.base_model.named_modules():
        if isinstance(module, SelfAttention) and module.conv is not None:
            weight = f"{name}.conv.weight"
            if weight not in state.tensors:
                # The model starts as the same function as the source, and a kernel of zeros still gets gradients.
                state.put(weight, torch.zeros_like(module.conv.weight), None, "zero, to be trained")

    loaded = {_with_prefix(name, prefix): tensor for name, tensor in state.tensors.items()}
    _, unexpected = model.load_state_dict(loaded, strict=False)
    if unexpected:
        raise RuntimeError(f"{type(model).__name__} has no {unexpected}.")
    if model.can_generate():
        _take_over_generation(model, source, config)
    report = ConversionReport(
        source=type(source.model).__name__,
        model=type(model).__name__,
        head=head,
        origins=_origins(model, state, prefix),
        left_behind=sorted(left_behind),
        notes=_notes(source, config, state),
    )
    return model, report


def _take_over_generation(model: Any, source: SourceModel, config: BaseConfig) -> None:
    """Gives a causal model the source's settings of `generate`, which its configuration does not contain."""
    settings: Any = copy.deepcopy(source.model.generation_config)
    # Whether there are states to keep depends on the feature map, and tokens may be others than the source's.
    settings.use_cache = model.generation_config.use_cache
    for name in ("bos_token_id", "eos_token_id"):
        if getattr(config, name) != getattr(source.config, name):
            setattr(settings, name, getattr(config, name))
    model.generation_config = settings


def _is_projection(name: str) -> bool:
    return is_of_a_family(name) and "projection." in name


def _with_prefix(name: str, prefix: str) -> str:
    return prefix + name if name.startswith(("embeddings.", "encoder.", "pooler.")) else name


def _put_embeddings(state: _State, source: SourceModel, config: BaseConfig, positions: str) -> None:
    words, _ = source.weights[_WORDS]
    if config.tie_word_embeddings and _DECODER in state.tensors and not torch.equal(words, state.tensors[_DECODER]):
        raise ValueError(
            "config has tie_word_embeddings=True, but the source's output layer is not its word embeddings: set "
            "tie_word_embeddings=False."
        )
    if not is_sinusoidal(config):
        length = config.max_position_embeddings
        computed = None
        if source.kind.is_ours:
            computed = sinusoidal_table(source.config, length, words.dtype)
        if computed is not None:
            rows, theirs, how = computed, "sinusoidal positions", f"computed for {length} tokens"
        else:
            table, theirs = source.weights[_POSITIONS]
            rows, how = fit_positions(table, source.kind.first_position(source.config), length, positions)
        # No token uses the rows before the first position.
        unused = rows.new_zeros(config.first_position, rows.shape[1])
        state.put(_POSITIONS, torch.cat([unused, rows]), theirs, how)
    if _TYPES in source.weights:
        types, theirs = source.weights[_TYPES]
        added = config.type_vocab_size - len(types)
        how = f"types from {len(types)} on are copies of type 0, to be trained" if added else "copied"
        state.put(_TYPES, torch.cat([types, types[:1].expand(added, -1)]), theirs, how)
    else:
        how = "zero, because the source has no token types"
        state.put(_TYPES, words.new_zeros(config.type_vocab_size, words.shape[1]), None, how)


def _put_projections(state: _State, source: SourceModel, model: PreTrainedModel, positions: str) -> set[str]:
    """Adds the projections, from the source or as segment means; returns the names of the source's that were used."""
    same_family = source.kind.is_ours and source.config.model_type == model.config.model_type
    theirs = projection_places(source.model) if same_family else []
    same_type = same_family and projection_type(source.config) == projection_type(model.config)
    used = set()
    for place in projection_places(model):
        carried = carried_projection(place, theirs, same_type, positions)
        if carried is None:
            state.put(place.name, segment_means(place), None, "segment means, to be trained")
        else:
            state.put(place.name, *carried)
            used |= set(carried[1].split(", "))
    return used


def _origins(model: PreTrainedModel, state: _State, prefix: str) -> list[Origin]:
    """The origin of each parameter under its first name; tied parameters have several names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    origins = []
    for aliases in names.values():
        known = [
            state.origins[name.removeprefix(prefix)] for name in aliases if name.removeprefix(prefix) in state.origins
        ]
        source, how = known[0] if known else (None, "as in a new model, to be trained")
        origins.append(Origin(aliases[0], source, how))
    return origins


def _notes(source: SourceModel, config: BaseConfig, state: _State) -> list[str]:
    notes = []
    fixed = source.kind.head_activation
    if fixed is not None and config.hidden_act != fixed and "cls.predictions.transform.dense.weight" in state.tensors:
        notes.append(
            f"the masked language modelling head applies hidden_act={config.hidden_act!r}, the source's applies "
            f"{fixed}: their logits differ"
        )
    if not approximates_softmax(config) and config.model_type != source.config.model_type:
        notes.append(
            f"the attention of model_type={config.model_type!r} is a different function from the source's at every "
            "length: train the model further"
        )
    return notes
