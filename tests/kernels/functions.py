# SPDX-License-Identifier: Apache-2.0
"""Nyström attention with the arguments of the kernels, which include the weight of the convolution."""

from nystrom_models import kernels
from nystrom_models.models import attention_nystrom
from nystrom_models.models.depthwise_convolution import depthwise_convolution


def in_pytorch(query, key, value, mask=None, *, conv_weight=None, function=None, **options):
    """By PyTorch's operations."""
    skip = None if conv_weight is None else depthwise_convolution(value, conv_weight, mask)
    function = attention_nystrom.nystrom_attention if function is None else function
    return function(query, key, value, mask, skip=skip, **options)


def nystrom_attention_reference(*tensors, **options):
    """By the reference."""
    return in_pytorch(*tensors, function=attention_nystrom.nystrom_attention_reference, **options)


def nystrom_attention(*tensors, **options):
    """By the kernels if they apply, as in a model."""
    context = kernels.nystrom_attention_if_possible(*tensors, **options)
    return in_pytorch(*tensors, **options) if context is None else context
