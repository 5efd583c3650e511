# SPDX-License-Identifier: Apache-2.0
"""Models as folders that `from_pretrained` loads."""

import importlib
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from ..checkpoint import save_tokenizer
from .lora import has_lora, load_trained, merged_weights, save_trained
from .sharding import SHARDED


def bare_model(accelerator: Accelerator, model: nn.Module) -> PreTrainedModel:
    """The model itself, without the wrappers of `prepare` and `torch.compile`."""
    return accelerator.unwrap_model(model, keep_torch_compile=False)


def weights(accelerator: Accelerator, model: nn.Module) -> dict[str, Tensor]:
    """All weights, under the model's own names; called by all processes.

    Raises:
        RuntimeError: if their names differ from the model's, so that `from_pretrained` could not load them.
        FloatingPointError: if one of them is not finite.
    """
    bare = bare_model(accelerator, model)
    sharded = accelerator.distributed_type in SHARDED
    if has_lora(bare):
        state = merged_weights(bare)
        names = set(state)
    else:
        state = accelerator.get_state_dict(model) if sharded else bare.state_dict()
        names = set(bare.state_dict())
    if accelerator.is_main_process:
        if set(state) != names:
            odd = sorted(set(state) ^ names)
            raise RuntimeError(
                f"The weights to save have other names than those of a {type(bare).__name__}: {', '.join(odd[:3])}"
                f"{', ...' if len(odd) > 3 else ''}. Save without --torch_compile, or report this as a bug."
            )
        for name, weight in state.items():
            if weight.is_floating_point() and not torch.isfinite(weight).all():
                raise FloatingPointError(f"The weights {name} are not finite, so the model is not saved.")
    return state


def save_pretrained(
    accelerator: Accelerator,
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    output_dir: str | os.PathLike,
) -> None:
    """Writes model and tokenizer for `from_pretrained`. All processes call this; the main process writes.

    Raises:
        RuntimeError, FloatingPointError: as [`weights`] does.
    """
    state = weights(accelerator, model)
    bare = bare_model(accelerator, model)
    bare.save_pretrained(
        output_dir,
        is_main_process=accelerator.is_main_process,
        state_dict=state,
        # Otherwise, a BERT that was loaded from a checkpoint with older names of weights would be saved with them.
        save_original_format=False,
    )
    if accelerator.is_main_process:
        for file in Path(output_dir).glob("*.safetensors"):  # which only their owner may read otherwise
            shutil.copymode(Path(output_dir, CONFIG_NAME), file)
    if accelerator.is_main_process and has_lora(bare):
        save_trained(bare, output_dir)
    if accelerator.is_main_process and tokenizer is not None:
        save_tokenizer(tokenizer, output_dir)
    accelerator.wait_for_everyone()


def load_weights(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Loads what [`save_pretrained`] wrote into a model of the same class, including tied weights. With LoRA, only
    the trained parameters are loaded: the others are those of the model at the start of the run.

    Raises:
        RuntimeError: if a weight is missing, unknown or of another shape.
    """
    if has_lora(model):
        load_trained(model, folder)
        return
    state = _saved_weights(model, folder)
    if isinstance(model, FSDPModule):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # after a forward pass, its own parameters are whole
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True))
    elif any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        _load_into_zero_3(model, state)
    else:  # not by safetensors' `load_model`, which refuses weights that share memory, as with ZeRO's stage 2
        model.load_state_dict(state)


def _load_into_zero_3(model: PreTrainedModel, state: dict[str, Tensor]) -> None:
    """Loads weights into a model that ZeRO's stage 3 has divided; called by all processes."""
    deepspeed: Any = importlib.import_module("deepspeed")
    for name, parameter in model.named_parameters():
        if name not in state:
            raise RuntimeError(f"There is no weight {name} to load.")
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if parameter.shape != state[name].shape:
                raise RuntimeError(f"{name} is of shape {tuple(parameter.shape)}, not {tuple(state[name].shape)}.")
            parameter.copy_(state[name])


def _saved_weights(model: PreTrainedModel, folder: str | os.PathLike) -> dict[str, Any]:
    """The saved weights under all names that they have in a model: of tied weights, only one is saved."""
    state: dict[str, Any] = load_file(Path(folder, SAFE_WEIGHTS_NAME))
    named = dict(model.named_parameters(remove_duplicate=False))
    saved = {id(named[name]): state[name] for name in state if name in named}
    return state | {
        name: saved[id(weight)] for name, weight in named.items() if name not in state and id(weight) in saved
    }
