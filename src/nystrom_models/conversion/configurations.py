# SPDX-License-Identifier: Apache-2.0
"""The configuration of a converted model, and whether one fits its source."""

import dataclasses
import os
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from ..checkpoint import load_config
from ..models.configuration_base import BaseConfig
from ..models.embeddings import is_sinusoidal
from ..registration import FAMILIES
from .sources import source_fields, source_kind

# Fields that change the function computed from the source's weights. `type_vocab_size` may grow, and
# `max_position_embeddings` may differ.
_SAME_FIELDS = (
    "vocab_size",
    "hidden_size",
    "embedding_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "layer_norm_eps",
    "pad_token_id",
)
# Fields of every configuration in Transformers that a head's meaning depends on.
HEAD_FIELDS = ("id2label", "label2id", "problem_type")


def converted_config(source: str | os.PathLike | PreTrainedConfig, family: str | None = None, **overrides: Any) -> Any:
    """The configuration for [`convert`]: every field that the family shares with the source has the source's value.

    `max_position_embeddings` is the longest sequence that the source takes: a RoBERTa's own field counts the unused
    rows of its position table, too (514 for 512 tokens). Labels and `problem_type` are kept. A linear transformer
    converted from another model has `feature_map="hedgehog"`, which can imitate softmax attention.

    Args:
        source: a folder, a name on the Hub, or a configuration, of a checkpoint that [`convert`] takes.
        family: a `model_type` of this package; None for the source's own, if it is one, and "nystromformer" otherwise.
        overrides: fields of the family's configuration, such as `max_position_embeddings=4096`.

    Returns:
        A `NystromformerConfig`, `LinformerConfig` or `LinearTransformerConfig`.

    Raises:
        ValueError: if the source is of another kind, the family or a field is unknown, or fields contradict each
            other.

    Example:

    ```python
    >>> from nystrom_models.conversion import converted_config

    >>> config = converted_config("google-bert/bert-base-uncased", max_position_embeddings=4096)
    ```
    """
    families = {base.config_class.model_type: base.config_class for base in FAMILIES}
    source_config = source if isinstance(source, PreTrainedConfig) else load_config(source)
    if family is None:
        family = source_config.model_type if source_kind(source_config).is_ours else "nystromformer"
    if family not in families:
        raise ValueError(f"family={family!r} is unknown: use one of {', '.join(families)}.")
    config_class = families[family]
    known = config_class()
    if unknown := [name for name in overrides if not hasattr(known, name)]:
        raise ValueError(
            f"{config_class.__name__} has no field {', '.join(unknown)}: correct the name, leave it out, or give the "
            "family that has it."
        )
    fields = source_fields(source_config)
    if fields["max_position_embeddings"] is None and known.max_position_embeddings is not None:
        # The source has no limit of length: keep the family's default.
        fields.pop("max_position_embeddings")
    fields |= _head_fields(source_config, overrides)
    fields |= _family_fields(source_config, config_class)
    if "feature_map" in overrides:
        # The default of use_cache depends on feature_map.
        fields.pop("use_cache", None)
    config = config_class(**fields | overrides)
    _check_direction(config, source_config)
    return config


def _family_fields(source_config: PreTrainedConfig, config_class: type[BaseConfig]) -> dict[str, Any]:
    """The family's own fields, without those of `BaseConfig`, as far as the source determines them."""
    own = {item.name for item in dataclasses.fields(config_class)}
    base = {item.name for item in dataclasses.fields(BaseConfig)}
    if source_config.model_type == config_class.model_type:
        return {name: getattr(source_config, name) for name in own - base}
    fields: dict[str, Any] = {}
    if source_kind(source_config).is_ours:
        # The convolution of the values is the same layer in every family.
        fields["conv_kernel_size"] = source_config.conv_kernel_size
    if "feature_map" in own:
        # Linear attention has no weights to drop.
        fields |= {"feature_map": "hedgehog", "attention_probs_dropout_prob": 0.0}
    return fields


def _head_fields(source_config: PreTrainedConfig, overrides: dict[str, Any]) -> dict[str, Any]:
    """The source's `HEAD_FIELDS`, without its classes if others are given; of those, both dictionaries."""
    fields = {name: getattr(source_config, name) for name in HEAD_FIELDS}
    if "id2label" in overrides:
        fields["label2id"] = {name: int(number) for number, name in overrides["id2label"].items()}
    elif "label2id" in overrides:
        fields["id2label"] = {number: name for name, number in overrides["label2id"].items()}
    elif overrides.get("num_labels", source_config.num_labels) != source_config.num_labels:
        del fields["id2label"], fields["label2id"]
    return fields


def _check_direction(config: BaseConfig, source_config: PreTrainedConfig) -> None:
    """Raises ValueError unless both attend to the whole sequence, or both only to previous tokens."""
    is_causal = bool(getattr(source_config, "is_decoder", False))
    if config.is_decoder != is_causal:
        raise ValueError(
            f"config has is_decoder={config.is_decoder}, but the source has is_decoder={is_causal}: a model that "
            "attends to the whole sequence cannot be converted to one that attends only to previous tokens, nor the "
            f"reverse. Set is_decoder={is_causal}."
        )


def check_config(config: BaseConfig, source_config: PreTrainedConfig, head: str) -> None:
    """Raises TypeError or ValueError unless the source's weights make sense in a model of this configuration."""
    if not isinstance(config, BaseConfig):
        raise TypeError(
            f"config is a {type(config).__module__}.{type(config).__name__}, but must be a configuration of "
            "nystrom_models: make it with converted_config()."
        )
    _check_direction(config, source_config)
    source = source_fields(source_config)
    expected = {name: source.get(name) for name in _SAME_FIELDS}
    if head in ("ForSequenceClassification", "ForMultipleChoice"):
        expected["classifier_activation"] = source["classifier_activation"]
    if config.type_vocab_size < source["type_vocab_size"]:
        expected["type_vocab_size"] = source["type_vocab_size"]
    if getattr(source_config, "conv_kernel_size", None) is not None and config.conv_kernel_size is not None:
        # Either no convolution, which drops the source's, or the source's.
        expected["conv_kernel_size"] = source_config.conv_kernel_size
    expected["layer_norm_position"] = source.get("layer_norm_position", "post")
    if is_sinusoidal(config):
        if getattr(source_config, "position_embedding_type", None) != config.position_embedding_type:
            raise ValueError(
                'config has position_embedding_type="sinusoidal", but the source has learned positions: set '
                'position_embedding_type="learned".'
            )
        # The sinusoids are scaled by it.
        expected["initializer_range"] = source_config.initializer_range
    wrong = [name for name, value in expected.items() if getattr(config, name) != value]
    if wrong:
        found = ", ".join(f"{name}={getattr(config, name)!r}" for name in wrong)
        needed = ", ".join(f"{name}={expected[name]!r}" for name in wrong)
        flag = ",".join(f"{name}={expected[name]}" for name in wrong)
        raise ValueError(
            f"config has {found}, with which the source's weights cannot be used: set {needed} (--config_overrides "
            f"{flag}), or make config with converted_config(), which takes them from the source."
        )
