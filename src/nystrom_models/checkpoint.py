# SPDX-License-Identifier: Apache-2.0
"""Loads the model of a checkpoint to measure or export it, in float32 and never with random weights, and its
configuration and tokenizer."""

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file


@contextmanager
def naming_damage(name: str | os.PathLike) -> Iterator[None]:
    """Raises a ValueError that names the checkpoint, where a file of its weights is damaged."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"The weights of {name} are damaged ({error}): copy or download them again.") from error


def load_complete(model_class: Any, name: str | os.PathLike, advice: str) -> Any:
    """`model_class.from_pretrained(name)` in float32, in evaluation mode.

    A pooler may be missing: checkpoints of masked language models have none, and no prediction uses it.

    Args:
        model_class: a model's or an Auto class.
        name: a folder or a name on the Hub.
        advice: what the user can do about missing weights; the end of the error message.

    Raises:
        ValueError: if other weights are missing, or have another shape than the configuration asks for, and would be
            random; or if a file is damaged.
    """
    options = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    with naming_damage(name):
        model, info = model_class.from_pretrained(name, **options)
    if mismatched := sorted(info["mismatched_keys"]):
        weight, shape, wanted = mismatched[0]
        raise ValueError(
            f"{name} has {len(mismatched)} weights of other shapes than its config.json asks for, such as {weight} of "
            f"{tuple(shape)} instead of {tuple(wanted)}: correct the configuration."
        )
    can_do_without = "add_pooling_layer" in inspect.signature(type(model).__init__).parameters
    if can_do_without and any("pooler" in weight for weight in info["missing_keys"]):
        model.pooler = None  # it was not saved, and would be random
    if missing := sorted(weight for weight in info["missing_keys"] if "pooler" not in weight):
        raise ValueError(
            f"{name} lacks {len(missing)} weights of {type(model).__name__}, such as {missing[0]}, which would be "
            f"random: {advice}"
        )
    return model.eval()


def require_possible(name: str | os.PathLike | None, correct: str = "the path") -> None:
    """Raises a FileNotFoundError if `name` neither exists nor can be a name on the Hub, which has at most one slash.

    Args:
        name: a file, a folder or a name on the Hub; nothing is checked if None.
        correct: what the message asks to correct, such as a flag.
    """
    if name is None or os.path.exists(name):
        return
    try:
        validate_repo_id(str(name))
    except HFValidationError:
        raise FileNotFoundError(f"There is no file or folder {str(name)!r}: correct {correct}.") from None


def refuse_adapter(name: str | os.PathLike, **kwargs: Any) -> None:
    """Raises a ValueError if a folder or a name on the Hub is, or has beside its model, an adapter of PEFT.

    kwargs: of `from_pretrained`, for finding files.
    """
    if find_adapter_config_file(os.fspath(name), **kwargs) is not None:
        raise ValueError(
            f"{name} holds an adapter of PEFT (adapter_config.json): merge it first, and give the folder of the "
            "merged model: AutoPeftModel.from_pretrained(...).merge_and_unload().save_pretrained(FOLDER), with the "
            "class of its task."
        )


def load_config(name: str | os.PathLike, trust_remote_code: bool | None = None, **kwargs: Any) -> PreTrainedConfig:
    """`AutoConfig.from_pretrained` of a model, after [`refuse_adapter`], whose errors and `kwargs` these are."""
    refuse_adapter(name, **kwargs)
    return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, **kwargs)


def load_tokenizer(name: str | os.PathLike | None, **kwargs: Any) -> PreTrainedTokenizerBase:
    """`AutoTokenizer.from_pretrained(name, **kwargs)`.

    Raises:
        FileNotFoundError: if there is no such folder, and the name cannot be one on the Hub.
        ValueError: if there is none, as beside many adapters of PEFT. Transformers makes one up for some kinds of
            models, with nothing but special tokens.
    """
    require_possible(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
    except (OSError, ValueError):
        if name is not None and os.path.isdir(name):
            refuse_adapter(name)
        # Transformers would name packages of other kinds of tokenizers.
        wanted = ("config.json", "tokenizer_config.json", "tokenizer.json")
        if name is not None and os.path.isdir(name) and not any(os.path.exists(Path(name, file)) for file in wanted):
            raise ValueError(
                f"The folder {str(name)!r} has no model and no tokenizer: none of {', '.join(wanted)}. A training run "
                "writes them when it ends, and before that to its checkpoints."
            ) from None
        raise
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ValueError(
            f"{str(name)!r} has no tokenizer: save one there with tokenizer.save_pretrained(), or give another one."
        )
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: str | os.PathLike) -> None:
    """Writes a tokenizer that, loaded by AutoTokenizer, returns the same inputs."""
    # AutoTokenizer loads it as the general class, which knows BERT's token types only if they are listed.
    tokenizer.init_kwargs["model_input_names"] = list(tokenizer.model_input_names)
    if tokenizer.is_fast:
        # Left by the last call, if there was one: rows from a cache need none.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    tokenizer.save_pretrained(folder)
