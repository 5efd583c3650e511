# SPDX-License-Identifier: Apache-2.0
"""Weights that are divided over processes."""

from accelerate.utils import DistributedType
from torch import nn
from transformers import PreTrainedModel

SHARDED = (DistributedType.FSDP, DistributedType.DEEPSPEED)


def remove_second_names(model: nn.Module) -> None:
    """Prepares a model with tied biases for FSDP2, in place; other models stay as they are.

    `cls.predictions.bias`, a second name of the bias of `cls.predictions.decoder`, becomes None. With FSDP2,
    Accelerate divides the output layer together with the embeddings, and then the rest of the model; PyTorch refuses a
    parameter that is in both. The model computes the same. A checkpoint has the remaining name, and `from_pretrained`
    ties both.
    """
    if not isinstance(model, PreTrainedModel):
        return
    biases = [source for source in model.all_tied_weights_keys.values() if source.endswith(".bias")]
    for source in biases:
        model.get_submodule(source.removesuffix(".bias")).register_parameter("bias", None)
    if biases:
        # Accelerate ties weights again if it loads them in one process only.
        tied = (model._tied_weights_keys or {}).items()
        model._tied_weights_keys = {name: source for name, source in tied if not source.endswith(".bias")}
