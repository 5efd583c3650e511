# SPDX-License-Identifier: Apache-2.0
"""Weights that are divided over processes."""

from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)


def remove_second_names(model: nn.Module) -> None:
    """Prepares a model with tied output biases for FSDP2, in place; other models stay as they are.

    `cls.predictions.bias`, a second name of the bias of `cls.predictions.decoder`, becomes None. With FSDP2,
    Accelerate divides the output layer together with the embeddings, and then the rest of the model; PyTorch refuses a
    parameter that is in both. The model computes the same. A checkpoint has the remaining name, and `from_pretrained`
    ties both.
    """
    if not isinstance(model, PreTrainedModel):
        return
    sources = model.all_tied_weights_keys.values()
    owners = [source.removesuffix(".bias") for source in sources if source.endswith(".bias")]
    # A module that has a bias and no weight does not compute with it.
    owners = [owner for owner in owners if [*model.get_submodule(owner)._parameters] == ["bias"]]
    for owner in owners:
        model.get_submodule(owner).register_parameter("bias", None)
    if owners:
        # Accelerate ties weights again if it loads them in one process only.
        removed = [f"{owner}.bias" for owner in owners]
        tied = (model._tied_weights_keys or {}).items()
        model._tied_weights_keys = {name: source for name, source in tied if source not in removed}
