# SPDX-License-Identifier: Apache-2.0
"""A BERT, RoBERTa or Nyströmformer checkpoint becomes a model of this package, with as many positions as wanted.

Where the result attends exactly, it is the function of the BERT or RoBERTa: the sub-layers are the same and take the
same weights. A Nyströmformer, ours or Transformers' own, gets more positions or landmarks, or becomes a Linformer.
"""

import copy
import dataclasses
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForPreTraining, AutoTokenizer
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from ..models.configuration_base import BaseConfig
from ..models.configuration_nystromformer import NystromformerConfig
from ..models.embeddings import repeat_positions
from ..models.self_attention import SelfAttention
from ..registration import FAMILIES

logger = logging.get_logger(__name__)

ROBERTA_TYPES = ("roberta", "xlm-roberta", "camembert")
NYSTROMFORMER = "nystromformer"
SOURCE_TYPES = ("bert", *ROBERTA_TYPES, NYSTROMFORMER)

# What changes the function that the source's weights make. `type_vocab_size` may grow, `max_position_embeddings` vary.
_SAME_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "layer_norm_eps",
    "pad_token_id",
)

# Arguments of from_pretrained that say where files are; a configuration and a tokenizer take them as a model does.
_FILE_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

# The head of RoBERTa under BERT's names, which are this package's.
_RENAMED = {
    "lm_head.dense.": "cls.predictions.transform.dense.",
    "lm_head.layer_norm.": "cls.predictions.transform.LayerNorm.",
    "lm_head.": "cls.predictions.",
}


# ---- configurations ----


def _first_position(source_config: PreTrainedConfig) -> int:
    """The row of the source's position table that its first token takes."""
    if source_config.model_type not in SOURCE_TYPES:
        raise ValueError(
            f"The source has model_type={source_config.model_type!r}, but its layers must be BERT's: give a "
            f"checkpoint of {', '.join(SOURCE_TYPES)}."
        )
    if source_config.model_type == NYSTROMFORMER:
        return NystromformerConfig.first_position
    if source_config.is_decoder or source_config.add_cross_attention:
        raise ValueError(
            "The source is a decoder (is_decoder or add_cross_attention), whose attention is causal: give a "
            "checkpoint with is_decoder=False and add_cross_attention=False."
        )
    return source_config.pad_token_id + 1 if source_config.model_type in ROBERTA_TYPES else 0


def _longest_sequence(source_config: PreTrainedConfig, first: int) -> int:
    """Tokens of the longest sequence that the source takes. RoBERTa's field counts the rows before the first, too."""
    length = source_config.max_position_embeddings
    return length if source_config.model_type == NYSTROMFORMER else length - first


def converted_config(
    source: str | os.PathLike | PreTrainedConfig, family: str = "nystromformer", **overrides: Any
) -> Any:
    """The configuration for [`convert`] that takes every field it shares with the source's from there.

    `max_position_embeddings` is the longest sequence that the source takes: a RoBERTa's own field counts the unused
    rows of its position table, too (514 for 512 tokens).

    Args:
        source: a folder, a name on the Hub, or a configuration, of a BERT, RoBERTa or Nyströmformer.
        family: a `model_type` of this package.
        overrides: fields of the family's configuration, such as `max_position_embeddings=4096`.

    Returns:
        A `NystromformerConfig` or `LinformerConfig`.

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
    if family == "linear_transformer":
        raise ValueError(
            "A linear transformer computes another function than softmax attention, and weights of a softmax model do "
            "not fit it: use family='nystromformer' or family='linformer', or train a linear transformer from nothing."
        )
    if family not in families:
        raise ValueError(f"family={family!r} is unknown: use one of {', '.join(families)}.")
    known = families[family]()
    if unknown := [name for name in overrides if not hasattr(known, name)]:
        raise ValueError(
            f"{type(known).__name__} has no field {', '.join(unknown)}: correct the name, or leave it out."
        )
    source_config = source if isinstance(source, PreTrainedConfig) else AutoConfig.from_pretrained(source)
    first = _first_position(source_config)
    shared = BaseConfig
    if source_config.model_type == family == NYSTROMFORMER:
        shared = NystromformerConfig
    names = {item.name for item in dataclasses.fields(shared)} - {
        item.name for item in dataclasses.fields(PreTrainedConfig)
    }
    fields = {name: getattr(source_config, name) for name in names if hasattr(source_config, name)}
    fields["max_position_embeddings"] = _longest_sequence(source_config, first)
    return families[family](**fields | overrides)


def _check_config(config: BaseConfig, source_config: PreTrainedConfig) -> None:
    if not isinstance(config, BaseConfig):
        raise TypeError(
            f"config is a {type(config).__module__}.{type(config).__name__}, but must be a configuration of "
            "nystrom_models: make it with converted_config()."
        )
    wrong = [name for name in _SAME_FIELDS if getattr(config, name) != getattr(source_config, name)]
    if getattr(source_config, "conv_kernel_size", None) is not None and config.conv_kernel_size is not None:
        # Either none, which leaves the source's behind, or the source's.
        wrong += ["conv_kernel_size"] * (config.conv_kernel_size != source_config.conv_kernel_size)
    if config.layer_norm_position != getattr(source_config, "layer_norm_position", "post"):
        raise ValueError(
            f"config has layer_norm_position={config.layer_norm_position!r}, and the source's layers are not made so: "
            "make config with converted_config(), which takes it from the source."
        )
    if config.type_vocab_size < source_config.type_vocab_size:
        wrong.append("type_vocab_size")
    if wrong:
        found = ", ".join(f"{name}={getattr(config, name)!r}" for name in wrong)
        needed = ", ".join(f"{name}={getattr(source_config, name)!r}" for name in wrong)
        raise ValueError(
            f"config has {found}, with which the source's weights cannot be used: set {needed}, or make config with "
            "converted_config(), which takes them from the source."
        )


# ---- weights ----


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Transformers' report on a class that the source is only read through; ours follows."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _missing(info: dict[str, Any]) -> set[str]:
    """Names that the checkpoint does not hold in the right shape."""
    return set(info["missing_keys"]) | {mismatch[0] for mismatch in info["mismatched_keys"]}


def _load_source(
    model_name_or_path: str | os.PathLike, source_config: PreTrainedConfig, arguments: dict[str, Any]
) -> tuple[dict[str, Tensor], set[str], torch.dtype]:
    """The tensors of the checkpoint, without the prefix of its base model, names that were not read, and the dtype."""
    arguments = arguments | {"output_loading_info": True}
    with _quiet():
        # The class with all heads that have a counterpart here.
        source, info = AutoModelForPreTraining.from_pretrained(
            model_name_or_path, config=copy.deepcopy(source_config), **arguments
        )
        prefix = source.base_model_prefix + "."
        missing = _missing(info)
        if absent := sorted(name for name in missing if name.startswith(prefix) and ".pooler." not in name):
            raise ValueError(
                f"The checkpoint {model_name_or_path!r} lacks {len(absent)} weights of the encoder that its "
                f"config.json describes, such as {absent[0]!r}: give the checkpoint of a whole model."
            )
        weights = {
            name.removeprefix(prefix): tensor for name, tensor in source.state_dict().items() if name not in missing
        }
        unread = {name.removeprefix(prefix) for name in info["unexpected_keys"]}
        if any(name.startswith("pooler.") for name in unread):
            # RoBERTa's class has no pooler, but its checkpoint may. Without layers, only the embeddings come along.
            shallow = copy.deepcopy(source_config)
            shallow.num_hidden_layers = 0
            base, info = AutoModel.from_pretrained(model_name_or_path, config=shallow, **arguments)
            pooler = {name for name in base.state_dict() if name.startswith("pooler.")} - _missing(info)
            weights |= {name: base.state_dict()[name] for name in pooler}
            unread -= pooler
    if strange := sorted(name for name in unread if name.startswith(("embeddings.", "encoder.", "pooler."))):
        raise ValueError(
            f"The checkpoint {model_name_or_path!r} holds {len(strange)} weights in its encoder that its config.json "
            f"does not describe, such as {strange[0]!r}: it has other layers than BERT, or another number of them."
        )
    return weights, unread, source.dtype


def _positions(table: Tensor, source_first: int, first: int, length: int) -> Tensor:
    """(first + length, C): the rows of the table (P, C) from `source_first` on, repeated or cut to `length`."""
    # The rows before the first position are no token's.
    unused = table.new_zeros(first, table.shape[1])
    return torch.cat([unused, repeat_positions(table[source_first:], 0, length)])


def _summary(names: Iterable[str]) -> str:
    """Sorted names, those of all layers as one: encoder.layer.*.attention..."""
    return ", ".join(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names}))


@torch.no_grad()
def convert(
    model_name_or_path: str | os.PathLike,
    config: BaseConfig,
    output_loading_info: bool = False,
    **kwargs: Any,
) -> Any:
    """Makes a linear-time model of a BERT, RoBERTa or Nyströmformer checkpoint.

    Taken over, in the source's dtype: embeddings, all layers, pooler and masked language modelling head. From BERT, a
    Nyströmformer then computes what the source does for every sequence of at most `num_landmarks` tokens, and for all
    with `num_landmarks=None`. Beyond, and as a Linformer at any length, it is another function, to be trained on.

    - **Positions.** The source's table is repeated up to `max_position_embeddings`, as for Longformer (Beltagy et al.
      2020, section 5) and by Nyströmformer's authors, or cut. A row's first token has the source's first position,
      wherever the padding is. (BERT itself counts padding on the left as tokens.)
    - **Convolution.** A Nyströmformer's is taken over. Otherwise it starts at zero and not, as with the authors, at
      random: the model begins as the source's function, and gradients reach a kernel of zeros.
    - **Sentence order.** A Nyströmformer's head is taken over. Otherwise it starts anew, although the classes of
      BERT's next-sentence head agree with it (0 = in order). That one was trained to tell passages of other documents,
      and knows nothing of the order of two passages of one: 52.0% are right (ALBERT, Lan et al. 2020, table 5). The
      pooler is kept.
    - **Token types.** `type_vocab_size` may be larger than the source's (RoBERTa has one type); new types start as
      copies of type 0.
    - **Linformer's projections** start as in a new model.

    What is newly initialised, and what is left behind, is logged as a warning.

    Args:
        model_name_or_path: a folder or a name on the Hub: a checkpoint of BERT, RoBERTa, XLM-RoBERTa, CamemBERT or
            Nyströmformer, with any head, in any format that Transformers reads.
        config: of the model to make. What the source's weights depend on (`vocab_size`, `hidden_size`, `hidden_act`,
            ...) must be as there: [`converted_config`] sees to it.
        output_loading_info: whether to return the report, too.
        kwargs: of `from_pretrained`, for the source: `revision`, `token`, `cache_dir`, `dtype` and so on.

    Returns:
        A `NystromformerForPreTraining` or `LinformerForPreTraining` in evaluation mode, whose `save_pretrained` writes
        what every Auto class reads. With `output_loading_info=True`, the model and a dictionary of sorted lists of
        names: `missing_keys`, the model's weights that are newly initialised, and `unexpected_keys`, the source's
        weights that are not used.

    Raises:
        TypeError: if `config` is none of this package.
        ValueError: if a field of `config` does not fit the source, the source is of another kind, lacks a part of its
            encoder, or holds weights in it that have no place here.
    """
    files = {name: kwargs[name] for name in _FILE_ARGUMENTS if name in kwargs}
    source_config = AutoConfig.from_pretrained(model_name_or_path, **files)
    first = _first_position(source_config)
    _check_config(config, source_config)
    weights, unread, dtype = _load_source(model_name_or_path, source_config, kwargs)

    model = AutoModelForPreTraining.from_config(copy.deepcopy(config), dtype=dtype).eval()
    for module in model.modules():
        if isinstance(module, SelfAttention) and module.conv is not None:
            nn.init.zeros_(module.conv.weight)

    state = {}
    for name, tensor in weights.items():
        next_sentence = name.startswith("cls.seq_relationship.") and source_config.model_type != NYSTROMFORMER
        if next_sentence or (name.endswith(".conv.weight") and config.conv_kernel_size is None):
            unread.add(name)
            continue
        for old, new in _RENAMED.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        in_base = name.startswith(("embeddings.", "encoder.", "pooler."))
        state[f"{model.base_model_prefix}.{name}" if in_base else name] = tensor
    embeddings = f"{model.base_model_prefix}.embeddings."
    words, decoder = state[embeddings + "word_embeddings.weight"], state.get("cls.predictions.decoder.weight")
    if config.tie_word_embeddings and decoder is not None and not torch.equal(words, decoder):
        raise ValueError(
            "config has tie_word_embeddings=True, but the source's output layer is not its word embeddings: set "
            "tie_word_embeddings=False."
        )
    table = state[embeddings + "position_embeddings.weight"]
    state[embeddings + "position_embeddings.weight"] = _positions(
        table, first, config.first_position, config.max_position_embeddings
    )
    types = state[embeddings + "token_type_embeddings.weight"]
    added = types[:1].expand(config.type_vocab_size - len(types), -1)
    state[embeddings + "token_type_embeddings.weight"] = torch.cat([types, added])

    if not config.tie_word_embeddings:
        # There, only the output layer's own bias is read.
        state.pop("cls.predictions.bias", None)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected:
        raise ValueError(f"Weights of the source have no place in {type(model).__name__}: {_summary(unexpected)}.")
    # An output layer that is tied has its weight from the embeddings.
    missing = [name for name in missing if model.all_tied_weights_keys.get(name, name) in missing]
    _report(model, missing, unread, source_config, _longest_sequence(source_config, first))
    if not output_loading_info:
        return model
    return model, {"missing_keys": sorted(missing), "unexpected_keys": sorted(unread)}


def _report(
    model: PreTrainedModel, missing: list[str], unread: set[str], source_config: PreTrainedConfig, length: int
) -> None:
    """Logs what is not the source's. length: of the longest sequence that the source takes."""
    lines = [f"{type(model).__name__} from a {source_config.model_type}:"]
    if convolution := [name for name in missing if name.endswith(".conv.weight")]:
        lines.append(f"- zero: {_summary(convolution)}")
    if new := set(missing).difference(convolution):
        lines.append(f"- newly initialised, to be trained: {_summary(new)}")
    if unread:
        lines.append(f"- left behind: {_summary(unread)}")
    positions = model.config.max_position_embeddings
    if positions > length:
        lines.append(f"- positions {length} to {positions - 1} repeat those from 0 on, to be trained")
    elif positions < length:
        lines.append(f"- positions {positions} to {length - 1} are cut off")
    if model.config.type_vocab_size > source_config.type_vocab_size:
        lines.append(f"- token types from {source_config.type_vocab_size} on are copies of 0, to be trained")
    head_is_taken = not any(name.startswith("cls.predictions.") for name in missing)
    if source_config.model_type in ROBERTA_TYPES and source_config.hidden_act != "gelu" and head_is_taken:
        lines.append(
            f"- the masked language modelling head applies hidden_act={source_config.hidden_act!r} where the source's "
            "applies gelu: its logits differ"
        )
    if len(lines) > 1:
        logger.warning("\n".join(lines))


def convert_checkpoint(
    model_name_or_path: str | os.PathLike, output_dir: str | os.PathLike, config: BaseConfig, **kwargs: Any
) -> Any:
    """[`convert`], and saves the model with the source's tokenizer, ready for any Auto class and `pipeline`.

    The tokenizer's `model_max_length` becomes `config.max_position_embeddings`: with the source's, long texts would be
    cut to its length, without a word.

    Args:
        model_name_or_path, config, kwargs: see [`convert`]. The source must come with a tokenizer.
        output_dir: another folder than the source's.

    Returns:
        What [`convert`] returns.

    Raises:
        OSError: if the source has no tokenizer.
        TypeError, ValueError: see [`convert`]; also if `output_dir` is the source, or the tokenizer is no fast one.
    """
    source = Path(model_name_or_path)
    if source.is_dir() and source.resolve() == Path(output_dir).resolve():
        raise ValueError(f"output_dir={str(output_dir)!r} is the source, which would be overwritten: name another.")
    files = {name: kwargs[name] for name in _FILE_ARGUMENTS if name in kwargs}
    tokenizer = AutoTokenizer.from_pretrained(model_name_or_path, **files)
    if not tokenizer.is_fast:
        raise ValueError(
            f"The source's tokenizer, {type(tokenizer).__name__}, is not a fast one, which AutoTokenizer needs beside "
            "a model of this package: use convert(), and load the tokenizer by its class."
        )
    tokenizer.model_max_length = config.max_position_embeddings
    # AutoTokenizer will load it by the general class, which must be told about BERT's token types.
    tokenizer.init_kwargs["model_input_names"] = list(tokenizer.model_input_names)
    converted = convert(model_name_or_path, config, **kwargs)
    model = converted[0] if isinstance(converted, tuple) else converted
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    return converted
