# SPDX-License-Identifier: Apache-2.0
"""From the checkpoint of a quadratic encoder to a linear-time model."""

from .encoders import convert, convert_checkpoint, converted_config

__all__ = ["convert", "convert_checkpoint", "converted_config"]
