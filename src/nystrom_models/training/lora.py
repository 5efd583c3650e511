# SPDX-License-Identifier: Apache-2.0
"""LoRA (Hu et al. 2021, arXiv:2106.09685) by PEFT: matrices of low rank are trained beside weights that stay.

The model keeps its class, and what is saved is a model as any other: the matrices are merged into its weights. What
was trained is saved beside it as well, for a run that goes on: from merged weights the matrices cannot be had back.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..conversion.weights import is_of_a_family

# In the folder of a saved model: LoRA's matrices, and the other parameters that were trained.
TRAINED = Path("lora", "trained.safetensors")

# The linear layers of the attention, as in LoLCATs (Zhang et al. 2024, arXiv:2410.10254, section 3.2).
_TARGETS = r".*\.attention\.(self\.(query|key|value)|output\.dense)"
_ADAPTER = "default"


@dataclass(kw_only=True)
class LoraArguments:
    """LoRA, under PEFT's names."""

    lora_r: int | None = field(
        default=None,
        metadata={
            "help": "Train LoRA's matrices of this rank in the linear layers of the attention (needs peft) instead of "
            "all weights; beside them only what no source has: feature maps, projections of the tokens, convolutions "
            "and the sentence-order head. The saved model has the matrices merged into its weights: it is loaded as "
            "any other, without peft."
        },
    )
    lora_alpha: float | None = field(
        default=None,
        metadata={
            "help": "With --lora_r: the matrices' product is scaled by this over the rank; 2 x rank by default."
        },
    )

    def __post_init__(self):
        if self.lora_r is None and self.lora_alpha is not None:
            raise ValueError("--lora_alpha scales LoRA's matrices: also give their rank, --lora_r.")
        if self.lora_r is not None:
            if self.lora_r < 1:
                raise ValueError(f"--lora_r must be at least 1, but is {self.lora_r}.")
            if self.lora_alpha is None:
                self.lora_alpha = 2.0 * self.lora_r
            if not self.lora_alpha > 0:
                raise ValueError(f"--lora_alpha must be positive, but is {self.lora_alpha}.")


def add_lora(model: PreTrainedModel, rank: int, alpha: float, sentence_order: bool) -> None:
    """Puts LoRA's matrices into the linear layers of the attention, in place, and freezes what is not trained.

    Args:
        model: of this package.
        rank, alpha: of the matrices.
        sentence_order: whether the head of the sentence order is trained, and the pooler before it.

    Raises:
        ImportError: if PEFT is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError("--lora_r needs PEFT: pip install peft.") from error
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=_TARGETS)  # type: ignore[arg-type]
    inject_adapter_in_model(config, model, _ADAPTER)
    heads = (".pooler.", "cls.seq_relationship.") if sentence_order else ()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name or is_of_a_family(name) or any(head in f".{name}" for head in heads))


def has_lora(model: torch.nn.Module) -> bool:
    """Whether [`add_lora`] has been at work."""
    return any(".lora_" in name for name, _ in model.named_parameters())


def merged_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """All weights under the names of a model without LoRA, with the matrices merged into them."""
    state = {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items()}
    state = {name: tensor for name, tensor in state.items() if ".lora_" not in name}
    with torch.no_grad():
        for name, module in model.named_modules():
            if hasattr(module, "lora_A") and hasattr(module, "get_delta_weight"):
                layer: Any = module
                state[f"{name}.weight"] = layer.base_layer.weight + layer.get_delta_weight(_ADAPTER)
    return state


def save_trained(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Writes the parameters that are trained, by their own names."""
    path = Path(folder) / TRAINED
    path.parent.mkdir(parents=True, exist_ok=True)
    trained = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if p.requires_grad}
    save_file(trained, path)


def load_trained(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Loads what [`save_trained`] wrote; all other weights stay as they are.

    Raises:
        RuntimeError: if a parameter that is trained is missing, or another is there.
    """
    path = Path(folder) / TRAINED
    saved = load_file(path)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if saved.keys() != trained.keys():
        odd = sorted(saved.keys() ^ trained.keys())
        raise RuntimeError(f"{path} has other parameters than those that this run trains, such as {odd[0]}.")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(saved[name])
