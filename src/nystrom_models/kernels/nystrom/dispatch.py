# SPDX-License-Identifier: Apache-2.0
"""Nyström attention by the kernels, where they apply. Triton is imported by the first call that needs it."""

from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ...models.attention_nystrom import landmark_segments
from .. import device
from .first_try import fault
from .inputs import AttentionInputs

logger = logging.get_logger(__name__)


def why_not(*arguments: Any, **options: Any) -> str | None:
    """Why the kernels cannot compute this attention, and what to change; None if they can.

    Arguments: those of `AttentionInputs`, which are those of `attention_nystrom.nystrom_attention`, with the
    convolution's weight instead of its result.
    """
    return AttentionInputs(*arguments, **options).why_not()


def nystrom_attention(*arguments: Any, **options: Any) -> Tensor:
    """`attention_nystrom.nystrom_attention`, with the convolution, computed by the kernels; differentiable once.

    Raises ValueError if `why_not` returns a reason for the same arguments.

    Returns: (B, H, N, D), zero at invalid tokens, whose incoming gradients are ignored.
    """
    inputs = AttentionInputs(*arguments, **options)
    reason = inputs.why_not()
    if reason is not None:
        raise ValueError(f"The Triton kernels do not apply: {reason}.")
    return compute(inputs)


def nystrom_attention_if_possible(*arguments: Any, **options: Any) -> Tensor | None:
    """`nystrom_attention`; None if the kernels do not apply, or differed from PyTorch's operations at their first try.

    On a GPU the reason is logged once. In graphs of torch.compile the attention is one operator.
    """
    inputs = AttentionInputs(*arguments, **options)
    if inputs.query.device.type not in device.DEVICE_TYPES:
        return None
    reason = inputs.why_not() or fault(inputs, compute)
    if reason is None:
        return compute(inputs)
    if not torch.compiler.is_compiling():
        logger.warning_once(
            f"Nyström attention without its Triton kernels: {reason}. For a Nyströmformer, "
            'attn_implementation="sdpa" silences this.'
        )
    return None


def compute(inputs: AttentionInputs) -> Tensor:
    """The attention of inputs that the kernels accept."""
    from .attention import Attention, attention_in_graph
    from .rows import Rows

    query, key, value, *weight = (tensor.to(inputs.dtype) for tensor in inputs.tensors)
    seed = None
    if inputs.dropout_p > 0:
        # Drawn on the device, so that the host does not wait, and every replay of a CUDA graph draws again.
        seed = torch.randint(2**62, (1,), device=query.device)
    assert inputs.num_landmarks is not None
    rows = []
    if inputs.mask is not None:
        rows = list(Rows.of(inputs.mask, inputs.segments or landmark_segments(inputs.mask, inputs.num_landmarks)))
    run = attention_in_graph if torch.compiler.is_compiling() else Attention.apply
    return run(
        query,
        key,
        value,
        weight[0] if weight else None,
        seed,
        rows,
        inputs.num_landmarks,
        inputs.pinv_iterations,
        inputs.dropout_p,
    )
