# SPDX-License-Identifier: Apache-2.0
"""Measures the error of linear attention against a model's exact attention, on the model's inputs, and draws it."""

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
