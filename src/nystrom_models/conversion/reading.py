# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint: its model as it was saved, and its weights under this package's names."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import transformers
from torch import Tensor
from transformers import AutoModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from ..checkpoint import naming_damage
from .sources import SourceKind, source_head, source_kind

# Prefixes of the weights of heads for fine-tuning.
_TASK_WEIGHTS = ("classifier.", "pre_classifier.", "qa_outputs.", "sequence_summary.")


@dataclass
class SourceModel:
    """A checkpoint that is read.

    model: of the source's own class, in evaluation mode. config: its configuration. kind: its kind.
    head: the head that is converted, one of `HEADS`.
    weights: tensors by their names in this package, without the prefix of the base model, each with its name in the
        source.
    unread: weights of the checkpoint that its class does not use, by their names in the source.
    """

    model: PreTrainedModel
    config: PreTrainedConfig
    kind: SourceKind
    head: str
    weights: dict[str, tuple[Tensor, str]]
    unread: set[str]


def auto_class(head: str) -> Any:
    """The Auto class of a head: `AutoModel` for "Model", `AutoModelForMaskedLM` for "ForMaskedLM"."""
    return AutoModel if head == "Model" else getattr(transformers, f"AutoModel{head}")


@contextmanager
def without_load_report() -> Iterator[None]:
    """Suppresses Transformers' report of missing and unexpected weights; the caller reports them."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _missing(info: dict[str, Any]) -> set[str]:
    """Names that the checkpoint does not hold in the right shape."""
    return set(info["missing_keys"]) | {mismatch[0] for mismatch in info["mismatched_keys"]}


def read_source(
    model_name_or_path: str | os.PathLike, config: PreTrainedConfig, head: str, arguments: dict[str, Any]
) -> SourceModel:
    """Reads a checkpoint.

    Args:
        model_name_or_path: a folder or a name on the Hub.
        config: the checkpoint's configuration.
        head: the head to convert, see `check_head`.
        arguments: of `from_pretrained`.

    Raises:
        ValueError: if the encoder does not match its configuration, or a file is damaged.
    """
    kind = source_kind(config)
    # Heads of other tasks have weights of the same names, which would be read as those of this head.
    is_other_task = head not in ("ForPreTraining", "ForMaskedLM") and head != source_head(config, head)
    reader = getattr(transformers, kind.pretraining_class) if head == "ForPreTraining" else auto_class(head)
    # Weights of the wrong shape are reported as missing, and refused if they belong to the encoder.
    arguments = arguments | {"output_loading_info": True, "ignore_mismatched_sizes": True}
    theirs = copy.deepcopy(config)
    # It changes no result, and Transformers refuses lengths that it does not divide.
    theirs.chunk_size_feed_forward = 0
    with without_load_report(), naming_damage(model_name_or_path):
        model, info = reader.from_pretrained(model_name_or_path, config=theirs, **arguments)
        # The names of base models have no prefix.
        prefix = model.base_model_prefix + "."
        missing = {name.removeprefix(prefix) for name in _missing(info)}
        found = {name.removeprefix(prefix): tensor for name, tensor in model.state_dict().items()}
        unread = {name.removeprefix(prefix) for name in info["unexpected_keys"]}
        unread |= {name for name in found if name.startswith(_TASK_WEIGHTS)} - missing if is_other_task else set()
        found = {name: tensor for name, tensor in found.items() if name not in missing | unread}
        if head == "ForPreTraining" and any(name.startswith("pooler.") for name in unread):
            # RoBERTa's class has no pooler, but its checkpoint may have one. Without layers, only the embeddings are
            # read with it.
            shallow = copy.deepcopy(config)
            shallow.num_hidden_layers = 0
            base, info = AutoModel.from_pretrained(model_name_or_path, config=shallow, **arguments)
            pooler = {name for name in base.state_dict() if name.startswith("pooler.")} - _missing(info)
            found |= {name: base.state_dict()[name] for name in pooler}
            unread -= pooler
    unread |= {mismatch[0].removeprefix(prefix) for mismatch in info["mismatched_keys"]} - found.keys()
    parts = {name for name, _ in model.base_model.named_children()} - {"pooler"}
    _check_encoder(str(model_name_or_path), missing, unread, parts)
    weights = {target: (tensor, name) for name, tensor in found.items() for target in kind.targets(name, head, config)}
    unread |= {name for name in found if not kind.targets(name, head, config)}
    return SourceModel(model.eval(), config, kind, head, weights, unread)


def _check_encoder(name: str, missing: set[str], unread: set[str], parts: set[str]) -> None:
    """Raises ValueError if weights of the encoder that the configuration describes are missing, or if there are
    others.

    parts: first components of the encoder's names.
    """
    if absent := sorted(key for key in missing if key.split(".")[0] in parts):
        raise ValueError(
            f"The checkpoint {name!r} lacks {len(absent)} weights of the encoder that its config.json describes, such "
            f"as {absent[0]!r}: give a complete checkpoint."
        )
    if strange := sorted(key for key in unread if key.split(".")[0] in parts):
        raise ValueError(
            f"The checkpoint {name!r} holds {len(strange)} weights in its encoder that its config.json does not "
            f"describe, such as {strange[0]!r}: it has other layers than BERT, or another number of them."
        )
