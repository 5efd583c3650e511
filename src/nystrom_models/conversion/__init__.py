# SPDX-License-Identifier: Apache-2.0
"""Converts the checkpoint of a trained encoder to a linear-time model, and one with softmax attention to a BERT."""

from .configurations import converted_config
from .convert import convert, convert_checkpoint
from .feature_maps import Matching
from .report import ConversionReport
from .sources import SOURCE_TYPES
from .to_bert import to_bert

__all__ = [
    "SOURCE_TYPES",
    "ConversionReport",
    "Matching",
    "convert",
    "convert_checkpoint",
    "converted_config",
    "to_bert",
]
