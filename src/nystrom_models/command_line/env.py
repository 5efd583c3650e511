# SPDX-License-Identifier: Apache-2.0
"""Print versions and hardware, for a bug report.

It prints no paths and no names of users or machines, and does not use the network.
"""

import argparse
import importlib.metadata
import json
import os
import platform

PACKAGES = ("torch", "transformers", "tokenizers", "huggingface_hub", "triton", "accelerate", "datasets")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print JSON.")


def environment() -> dict[str, str]:
    """What a bug may depend on, by name: this package, Python, packages, system, processor, GPUs, kernels."""
    import torch

    from .. import __version__
    from ..kernels.device import why_not_on

    found = {
        "nystrom_models": __version__,
        "python": f"{platform.python_version()} {platform.python_implementation()}",
    }
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["torch"] = torch.__version__  # with the build, such as +cu130
    found["system"] = platform.platform()
    found["processor"] = (
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, "
        f"{torch.get_num_threads()} threads"
    )
    found |= _accelerators()
    found["kernels"] = why_not_on(torch.device("cuda")) or "can run"
    return found


def _accelerators() -> dict[str, str]:
    """Each GPU by its number, or another accelerator, or none."""
    import torch

    if torch.cuda.is_available():
        build = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
        found = {}
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(index)
            found[f"gpu {index}"] = (
                f"{device.name}, {device.total_memory / 2**30:.0f} GiB, "
                f"compute capability {device.major}.{device.minor}, {build}"
            )
        return found
    if torch.backends.mps.is_available():
        return {"gpu": "Apple MPS"}
    return {"gpu": "none that PyTorch finds"}


def run(arguments: argparse.Namespace) -> None:
    found = environment()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return
    width = max(map(len, found)) + 1
    for name, value in found.items():
        print(f"{name + ':':<{width}} {value}")
