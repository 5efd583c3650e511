# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model have Nyström attention, and with how many landmarks: a field `nystrom` of its configuration.

    {"num_landmarks": 64, "pinv_iterations": 6, "layers": null}

`num_landmarks` is a number or a list with one number for each layer; `layers` is the numbers of the layers from 0, or
null for all. Without the field, all layers have Nyström attention with the configuration's `num_landmarks` (if that is
null, no layer has it), or with 64 if the configuration has no such field.
The field is saved in `config.json` like any other; Transformers does not save which implementation a model uses.
"""

import copy
import functools
import inspect
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypeVar

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..models.modeling_base import BasePreTrainedModel

IMPLEMENTATION = "nystrom"
FIELD = "nystrom"
DEFAULT_LANDMARKS = 64
DEFAULT_ITERATIONS = 6
# The attribute for the layer number that `use_nystrom` sets on modules without `layer_idx`.
MARK = "nystrom_layer_idx"
# The modules from which models of Transformers compute a bias for each pair of tokens. Such a bias may start at zero,
# so that only the trained model would be refused when it is called.
POSITION_BIASES = (
    "relative_attention_bias",  # T5, in its first layer for all
    "relative_position_bias",  # BEiT, Swin
    "shared_position_bias",  # BEiT, in its encoder for all layers
    "rel_pos_bias",  # LayoutLMv3
    "rel_pos_x_bias",
    "linear_pos",  # Wav2Vec2-BERT and Wav2Vec2-Conformer with "relative" positions
    "distance_embedding",  # Wav2Vec2-BERT with "relative_key" positions
    "relative_k_proj",  # Parakeet
)

Model = TypeVar("Model", bound=PreTrainedModel)


class LayerSettings(NamedTuple):
    """The settings of one layer. num_landmarks: M."""

    num_landmarks: int
    pinv_iterations: int


def settings_of(module: nn.Module) -> LayerSettings | None:
    """The settings of an attention layer, from its configuration; None for a layer that keeps exact attention.

    Raises ValueError for invalid settings, and for settings by layer if the module does not know its layer.
    """
    config = getattr(module, "config", None)
    field = getattr(config, FIELD, None)
    if field is None:
        field = {"num_landmarks": getattr(config, "num_landmarks", DEFAULT_LANDMARKS)}
        if field["num_landmarks"] is None:
            return None
    num_landmarks, pinv_iterations, layers = _read(field)
    if layers is None and not isinstance(num_landmarks, Sequence):
        return LayerSettings(num_landmarks, pinv_iterations)
    index = getattr(module, MARK, None)
    if index is None:
        index = getattr(module, "layer_idx", None)
    if index is None:
        raise ValueError(
            f"The configuration has settings by layer, but {type(module).__name__} does not know its layer: call "
            "nystrom_models.use_nystrom(model) once after loading, which applies the settings of the configuration."
        )
    if layers is not None and index not in layers:
        return None
    if isinstance(num_landmarks, Sequence):
        place = index if layers is None else layers.index(index)
        if place >= len(num_landmarks):
            raise ValueError(
                f"num_landmarks has {len(num_landmarks)} numbers, but there is a layer {index}: give one for each "
                "layer."
            )
        return LayerSettings(num_landmarks[place], pinv_iterations)
    return LayerSettings(num_landmarks, pinv_iterations)


def use_nystrom(
    model: Model,
    num_landmarks: int | Sequence[int] | None = None,
    pinv_iterations: int | None = None,
    layers: Iterable[int] | None = None,
) -> Model:
    """Give a model of Transformers, or one of its parts, Nyström attention (Xiong et al. 2021, eq. 17), in place.

    Without arguments, the settings of the configuration are used: after `from_pretrained`, `use_nystrom(model)`
    restores the settings that were saved. If any argument is given, the others have their defaults.

    Args:
        model: an encoder of Transformers, with any head; or the encoder of an encoder-decoder
            (`model.get_encoder()`), or one part of a model with several parts (`model.vision_model`).
        num_landmarks: M, at least 1; a list has one for each of the layers. Rows of at most M tokens get exact
            attention. Default: the configuration's `num_landmarks` if it has one, otherwise 64.
        pinv_iterations: steps of the pseudo-inverse's iteration, at least 1. Default: 6.
        layers: numbers of the layers, from 0; the others keep exact attention (`sdpa`). Default: all.

    Returns: the model. Its configuration holds the settings, which `save_pretrained` keeps.

    Raises ValueError for a model whose attention does not go through Transformers' `AttentionInterface`, for causal
    attention, for a learned position bias (T5, BEiT, Swin), for layers that do not exist, and for numbers below 1. The
    model is then unchanged.
    """
    if not isinstance(model, PreTrainedModel):
        raise ValueError(f"use_nystrom() takes a model of Transformers, not a {_other_kind(model)}.")
    attentions = _attention_modules(model)
    _share_configs(model, model.config)
    configs = list({id(config): config for config in map(_config_of, attentions.values())}.values())
    if model.config.is_encoder_decoder and all(config is not model.config for config in configs):
        raise ValueError(
            f"{type(model).__name__} has an encoder and a decoder: give use_nystrom() only model.get_encoder()."
        )
    field = _field(configs, num_landmarks, pinv_iterations, layers)
    marks = _layer_numbers(attentions, field) if _is_by_layer(field) else {}

    for config in configs:
        if not isinstance(getattr(config, FIELD, None), dict):
            setattr(config, FIELD, {})
        getattr(config, FIELD).clear()
        getattr(config, FIELD).update(copy.deepcopy(field))
    for name, module in attentions.items():
        if name in marks:
            setattr(module, MARK, marks[name])
    if model.config.is_encoder_decoder:
        _give_own_config(model)
    model.set_attn_implementation(IMPLEMENTATION)
    return model


def _other_kind(model: Any) -> str:
    """The name of something that is no model of Transformers, and what can be done."""
    name = type(model).__name__
    if hasattr(model, "get_base_model"):  # a PeftModel
        return f"{name}: call it before PEFT wraps the model, or with model.get_base_model()"
    return name


def _share_configs(module: nn.Module, shared: PreTrainedConfig) -> None:
    """Gives the parts of a model the configuration of the model around them in place of an equal one. Classes that
    compose models, such as `EncoderDecoderModel`, copy the configuration of a part, whose layers keep the one from
    before."""
    for part in module.children():
        config: Any = getattr(part, "config", None)
        if isinstance(config, type(shared)) and config is not shared and config.to_dict() == shared.to_dict():
            setattr(part, "config", shared)  # noqa: B010 (mypy takes it for a submodule)
        _share_configs(part, part.config if isinstance(part, PreTrainedModel) else shared)


def _give_own_config(model: PreTrainedModel) -> None:
    """Gives an encoder a copy of the configuration that it shares with a decoder, so that the decoder does not change.

    Both configurations contain the same dictionary of settings, so that saving the whole model saves them.
    """
    shared = model.config
    own = copy.deepcopy(shared)
    setattr(own, FIELD, getattr(shared, FIELD))
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            setattr(module, "config", own)  # noqa: B010 (mypy takes it for a submodule)


def _config_of(module: nn.Module) -> PreTrainedConfig:
    config = module.config
    assert isinstance(config, PreTrainedConfig)
    return config


def _attention_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that compute attention, by their names; raises ValueError if their attention cannot be replaced."""
    name = type(model).__name__
    if isinstance(model, BasePreTrainedModel):
        raise ValueError(f"{name} already is linear in the length: set num_landmarks or projected_dim in its config.")
    attentions = {path: module for path, module in model.named_modules() if _uses_interface(module.__class__)}
    if not attentions or not model._can_set_attn_implementation():
        raise ValueError(
            f"{name} computes its attention itself, not through Transformers' AttentionInterface, so it cannot be "
            "replaced: choose another architecture."
        )
    for path in attentions:
        if bias := _position_bias(model, path):
            raise ValueError(
                f"{bias} of {name} is a position bias, added to the scores of each pair of tokens, which landmarks "
                'cannot represent: keep attn_implementation="sdpa", or choose another architecture.'
            )
    for path, module in attentions.items():
        # Modules may be marked as causal although the configuration makes the model bidirectional.
        if getattr(module, "is_causal", False) is True and getattr(_config_of(module), "is_causal", True):
            raise ValueError(
                f"{path} of {name} is causal, and landmarks of a whole row would show later tokens: give "
                "use_nystrom() only the encoder, such as model.get_encoder() or model.vision_model. For linear "
                "causal models see the LinearTransformer family."
            )
    return attentions


def _position_bias(model: nn.Module, path: str) -> str | None:
    """The name of a learned position bias of the attention module at `path`, or of the modules around it, which give
    one bias to all their layers; None if there is none."""
    parts = path.split(".")
    for depth in range(len(parts), -1, -1):
        around = ".".join(parts[:depth])
        children = dict(model.get_submodule(around).named_children())
        if found := next((name for name in POSITION_BIASES if name in children), None):
            return f"{around}.{found}".removeprefix(".")
    return None


@functools.cache
def _uses_interface(module_class: type) -> bool:
    """Whether modules of this class get their attention function from Transformers by name."""
    if issubclass(module_class, PreTrainedModel):
        return False
    for part in module_class.__mro__:
        if part is nn.Module:
            break
        try:
            if "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(part):
                return True
        except (OSError, TypeError):
            continue
    return False


def _field(
    configs: Sequence[PreTrainedConfig],
    num_landmarks: int | Sequence[int] | None,
    pinv_iterations: int | None,
    layers: Iterable[int] | None,
) -> dict[str, Any]:
    """The validated field, from the arguments or, without any, from the configurations."""
    saved = getattr(configs[0], FIELD, None)
    if num_landmarks is None and pinv_iterations is None and layers is None and saved is not None:
        defaults = {"num_landmarks": DEFAULT_LANDMARKS, "pinv_iterations": DEFAULT_ITERATIONS, "layers": None}
        field: dict[str, Any] = defaults | saved if isinstance(saved, dict) else saved
    else:
        if num_landmarks is None:
            num_landmarks = getattr(configs[0], "num_landmarks", None) or DEFAULT_LANDMARKS
        field = {
            "num_landmarks": _plain(num_landmarks),
            "pinv_iterations": DEFAULT_ITERATIONS if pinv_iterations is None else _plain(pinv_iterations),
            "layers": None if layers is None else _plain(layers),
        }
    _read(field)
    if _is_by_layer(field) and len(configs) > 1:
        parts = ", ".join(sorted({type(config).__name__ for config in configs}))
        raise ValueError(
            f"layers are counted in one part of a model, but this model has several ({parts}): give one part."
        )
    return copy.deepcopy(field)


def _is_by_layer(field: dict[str, Any]) -> bool:
    return field["layers"] is not None or isinstance(field["num_landmarks"], Sequence)


def _read(field: dict[str, Any]) -> tuple[int | Sequence[int], int, Sequence[int] | None]:
    """num_landmarks, pinv_iterations and layers of a field; raises ValueError for invalid values."""
    if not isinstance(field, dict) or not field.keys() <= {"num_landmarks", "pinv_iterations", "layers"}:
        raise ValueError(
            f'config.{FIELD} must be like {{"num_landmarks": 64, "pinv_iterations": 6, "layers": null}}, but is '
            f"{field!r}."
        )
    num_landmarks = field.get("num_landmarks", DEFAULT_LANDMARKS)
    pinv_iterations = field.get("pinv_iterations", DEFAULT_ITERATIONS)
    layers = field.get("layers")
    _check_number(pinv_iterations, "pinv_iterations")
    by_layer = isinstance(num_landmarks, Sequence) and not isinstance(num_landmarks, str)
    for number in num_landmarks if by_layer else [num_landmarks]:
        _check_number(number, "num_landmarks")
    if layers is None:
        return num_landmarks, pinv_iterations, None
    if not layers or len(set(layers)) != len(layers) or not all(_is_number(layer, 0) for layer in layers):
        raise ValueError(f"layers={layers!r} must be a list of different layer numbers from 0, at least one.")
    if by_layer and len(num_landmarks) != len(layers):
        raise ValueError(
            f"num_landmarks has {len(num_landmarks)} numbers for {len(layers)} layers: give one, or one for each."
        )
    return num_landmarks, pinv_iterations, layers


def _plain(value: Any) -> Any:
    """A list of the items of an iterable, and NumPy's integers as Python's, which JSON can hold."""
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool) or not isinstance(value, Integral) else int(value)


def _is_number(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _check_number(value: Any, name: str) -> None:
    if not _is_number(value, 1):
        raise ValueError(f"{name}={value!r} must be a number of at least 1, such as 64 landmarks or 6 iterations.")


def _layer_numbers(attentions: dict[str, nn.Module], field: dict[str, Any]) -> dict[str, int]:
    """The number of the layer of each attention module, by their names; raises ValueError if the field does not fit.

    A layer's number is its place in the list of layers, as the module's name says: 3 in "encoder.layer.3.attention".
    """
    numbers = {}
    lists = set()
    for path in attentions:
        parts = path.split(".")
        places = [place for place, part in enumerate(parts) if part.isdecimal()]
        if not places:
            raise ValueError(f"{path} is not in a list of layers, so it has no layer number: omit layers.")
        lists.add(".".join(parts[: places[-1]]))
        numbers[path] = int(parts[places[-1]])
    if len(lists) > 1:
        raise ValueError(
            f"layers are counted in one list, but this model has several ({', '.join(sorted(lists))}): omit layers, "
            "or give use_nystrom() one part of the model."
        )
    count = max(numbers.values()) + 1
    configured = getattr(_config_of(next(iter(attentions.values()))), "num_hidden_layers", count)
    if count < configured:
        raise ValueError(
            f"The {configured} layers share {count} attention module{'s' * (count > 1)}, so their settings cannot "
            "differ: omit layers."
        )
    layers, num_landmarks = field["layers"], field["num_landmarks"]
    for layer in layers or ():
        if layer >= count:
            raise ValueError(f"layers={layers} has {layer}, but the {count} layers are 0 to {count - 1}.")
    if layers is None and len(num_landmarks) != count:
        raise ValueError(f"num_landmarks has {len(num_landmarks)} numbers for {count} layers: give one for each.")
    return numbers
