# SPDX-License-Identifier: Apache-2.0
"""Models outside of PyTorch. Needs the extra `onnx`."""

from .onnx import compare_onnx, export_onnx

__all__ = ["compare_onnx", "export_onnx"]
