# SPDX-License-Identifier: Apache-2.0
"""Export of models to ONNX, to run without PyTorch. Needs the extra `onnx`."""

from .folder import export_folder, load_for_export
from .onnx import compare_onnx, export_onnx

__all__ = ["compare_onnx", "export_folder", "export_onnx", "load_for_export"]
