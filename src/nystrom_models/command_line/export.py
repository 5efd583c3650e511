# SPDX-License-Identifier: Apache-2.0
"""Write a model of this package as an ONNX file, which runs without PyTorch.

Writes model.onnx, for every batch size and length, with the configuration and the tokenizer. The results of the file
are compared with those of the model.

    nystrom-models export outputs/classifier outputs/onnx --quantize
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="Folder or Hub name of the model.")
    parser.add_argument("output_dir", help="Folder to write to.")
    parser.add_argument(
        "--task",
        help="What the model is for, as feature-extraction, fill-mask or text-classification (default: what it was "
        "saved for).",
    )
    parser.add_argument("--tokenizer_name", help="Tokenizer, if not the model's.")
    parser.add_argument(
        "--opset_version", type=int, default=20, help="Version of ONNX's operators, 18 to 22 (default: 20)."
    )
    parser.add_argument("--quantize", action="store_true", help="Also write model_quantized.onnx, with 8-bit weights.")
    parser.add_argument("--overwrite_output_dir", action="store_true", help="Overwrite an existing model.onnx.")


def run(arguments: argparse.Namespace) -> None:
    target = Path(arguments.output_dir) / "model.onnx"
    if target.exists() and not arguments.overwrite_output_dir:
        raise FileExistsError(f"{target} exists: choose another folder, or give --overwrite_output_dir.")
    from ..checkpoint import load_tokenizer
    from ..deployment.folder import export_folder, load_for_export

    model = load_for_export(arguments.checkpoint, arguments.task)
    tokenizer = load_tokenizer(arguments.tokenizer_name or arguments.checkpoint)
    print(f"Exporting a {type(model).__name__} of {model.num_parameters():,} parameters", flush=True)
    files = export_folder(
        model,
        tokenizer,
        arguments.output_dir,
        opset_version=arguments.opset_version,
        quantize=arguments.quantize,
    )
    for path in files.values():
        print(f"{path}: {path.stat().st_size / 1e6:,.1f} MB")
