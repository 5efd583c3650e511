# SPDX-License-Identifier: Apache-2.0
"""How near linear attention comes to a model's exact attention, measured on its own inputs; and pictures of it."""

from .capture import LayerAttention, visit_attention
from .inspection import NUM_LANDMARKS, inspect_attention
from .results import Inspection, Layer, Setting

__all__ = [
    "NUM_LANDMARKS",
    "Inspection",
    "Layer",
    "LayerAttention",
    "Setting",
    "inspect_attention",
    "visit_attention",
]
