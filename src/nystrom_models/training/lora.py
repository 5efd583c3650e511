# SPDX-License-Identifier: Apache-2.0
"""LoRA (Hu et al. 2021, arXiv:2106.09685) by PEFT: matrices of low rank are trained, and other weights stay fixed.

The model keeps its class. When it is saved, the matrices are merged into its weights, so that it loads without PEFT.
The trained parameters are also saved on their own: a resumed run cannot recover the matrices from merged weights.
"""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from ..conversion.weights import is_of_a_family
from .objectives import serves_sentence_order

# The trained parameters, in the folder of a saved model: LoRA's matrices and the others that were trained.
TRAINED = Path("lora", "trained.safetensors")

# The linear layers of the attention, as in LoLCATs (Zhang et al. 2024, arXiv:2410.10254, section 3.2).
_TARGETS = r".*\.attention\.(self\.(query|key|value)|output\.dense)"
_ADAPTER = "default"


@dataclass(kw_only=True)
class LoraArguments:
    """The flags of LoRA, with the names of PEFT."""

    lora_r: int | None = field(
        default=None,
        metadata={
            "help": "Train LoRA matrices of this rank in the linear layers of the attention, instead of all weights "
            "(needs peft). Parameters that the source does not have are also trained: feature maps, projections of "
            "the tokens, convolutions and the sentence-order head. The matrices are merged into the saved model, "
            "which loads without peft."
        },
    )
    lora_alpha: float | None = field(
        default=None,
        metadata={
            "help": "With --lora_r: the product of the matrices is scaled by lora_alpha / lora_r; 2 lora_r by default."
        },
    )

    def __post_init__(self):
        if self.lora_r is None and self.lora_alpha is not None:
            raise ValueError("--lora_alpha needs the rank of the matrices: also give --lora_r.")
        if self.lora_r is not None:
            if self.lora_r < 1:
                raise ValueError(f"--lora_r must be at least 1, but is {self.lora_r}.")
            if self.lora_alpha is None:
                self.lora_alpha = 2.0 * self.lora_r
            if not 0 < self.lora_alpha < math.inf:
                raise ValueError(f"--lora_alpha must be positive and finite, but is {self.lora_alpha}.")


def add_lora(model: PreTrainedModel, rank: int, alpha: float, sentence_order: bool) -> None:
    """Adds LoRA matrices to the linear layers of the attention, in place, and freezes what is not trained.

    Args:
        model: of this package.
        rank, alpha: of the matrices.
        sentence_order: whether to train the sentence-order head and the pooler.

    Raises:
        ImportError: if PEFT is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ImportError("--lora_r needs PEFT: pip install '.[lora]' in the repository.") from error
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=_TARGETS)  # type: ignore[arg-type]
    inject_adapter_in_model(config, model, _ADAPTER)
    for name, parameter in model.named_parameters():
        of_a_head = sentence_order and serves_sentence_order(name)
        parameter.requires_grad_(".lora_" in name or is_of_a_family(name) or of_a_head)


def has_lora(model: torch.nn.Module) -> bool:
    """Whether the model has LoRA matrices."""
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
    """Saves the parameters that are trained, under their own names."""
    path = Path(folder) / TRAINED
    path.parent.mkdir(parents=True, exist_ok=True)
    trained = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters() if p.requires_grad}
    save_file(trained, path)


def load_trained(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Loads what [`save_trained`] wrote. All other weights stay unchanged.

    Raises:
        RuntimeError: if the file does not have exactly the parameters that are trained.
    """
    path = Path(folder) / TRAINED
    saved = load_file(path)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if saved.keys() != trained.keys():
        odd = sorted(saved.keys() ^ trained.keys())
        raise RuntimeError(f"{path} does not have the parameters that this run trains: they differ in {odd[0]}.")
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(saved[name])
