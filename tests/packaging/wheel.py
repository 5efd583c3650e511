# SPDX-License-Identifier: Apache-2.0
"""Installs a built wheel in an empty environment and uses it, away from the repository.

    python -m build && python -m tests.packaging.wheel dist/*.whl --versions lowest

The environment has only the wheel and its dependencies, with the lowest versions that pyproject.toml names, or
the newest of the package index. Needs a package index.
"""

import argparse
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from tests.packaging.floors import floors

# What a user does first. Nothing is downloaded: the model is small, with random weights.
USE = """
import torch
from transformers import AutoModelForMaskedLM
import nystrom_models
config = nystrom_models.NystromformerConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
model = AutoModelForMaskedLM.from_config(config).eval()
ids, mask = torch.randint(5, 1000, (2, 100)), torch.tensor([[1] * 100, [1] * 60 + [0] * 40])
alone, padded = model(ids[1:, :60]).logits, model(ids, attention_mask=mask).logits[1:, :60]
assert type(model) is nystrom_models.NystromformerForMaskedLM and torch.allclose(alone, padded, atol=1e-4)
model.save_pretrained("saved")
assert torch.equal(AutoModelForMaskedLM.from_pretrained("saved").eval()(ids).logits, model(ids).logits)
"""
SHOW = """
from importlib.metadata import version
print(*(f"{name} {version(name)}" for name in ("nystrom-models", "torch", "transformers")))
"""


def run(wheel: Path, versions: str) -> None:
    """Raises CalledProcessError if the wheel cannot be installed or used."""
    pins = [f"{name}=={version}" for name, version in floors(()).items()] if versions == "lowest" else []
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        pip = [python, "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", str(wheel.resolve()), *pins], check=True)
        subprocess.run([*pip, "check"], check=True)
        subprocess.run([python, "-I", "-c", SHOW], cwd=folder, check=True)
        subprocess.run([python, "-I", "-c", USE], cwd=folder, check=True)
    print(f"{wheel.name} works with the {versions} versions")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--versions", choices=["lowest", "newest"], default="newest", help="of the dependencies")
    args = parser.parse_args(arguments)
    run(args.wheel, args.versions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
