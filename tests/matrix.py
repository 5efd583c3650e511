# SPDX-License-Identifier: Apache-2.0
"""Runs the tests on several Pythons, each with the newest versions that the package index has for it, without pins.

    python tests/matrix.py                                       # every supported Python that is found
    python tests/matrix.py --pythons python3.10 --packages torch==2.13.0

Each gets its own environment in .cache/matrix, with the package built and installed. Finally it prints a table in
Markdown. Transformers' common tests and those of quantization and Opacus, which need pinned versions, are left out.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13")
FOLDERS = ("models", "kernels", "compat", "conversion", "interface", "analysis", "deployment", "data", "training")
# They need packages that `make test` downloads for the pinned versions.
LEFT_OUT = ("tests/models/test_opacus.py", "tests/models/test_quantization.py")
ASK = """
import importlib.metadata, json, platform
names = ("torch", "transformers", "accelerate", "datasets")
print(json.dumps([platform.python_version(), *map(importlib.metadata.version, names)]))
"""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--pythons", nargs="+", default=PYTHONS, help="commands; those that are not found are left out"
    )
    parser.add_argument("--packages", nargs="*", default=[], help="requirements besides, such as torch==2.13.0")
    parser.add_argument("--folders", nargs="+", default=FOLDERS, help="of tests/")
    parser.add_argument("--workers", default="2", help="test processes")
    return parser.parse_args()


def find(python: str) -> str | None:
    """The first that runs: the command (pyenv has one even for inactive versions), or pyenv's own executable."""
    command = shutil.which(python)
    versions = sorted((Path.home() / ".pyenv/versions").glob(f"{python.removeprefix('python')}.*/bin/python"))
    for path in ([command] if command else []) + [str(path) for path in reversed(versions)]:
        if subprocess.run([path, "--version"], capture_output=True).returncode == 0:
            return path
    print(f"{python} was not found.")
    return None


def run(python: str, args: argparse.Namespace) -> list[str]:
    """A row of the table: versions, and pytest's counts."""
    version = subprocess.run([python, "--version"], capture_output=True, text=True, check=True).stdout.split()[-1]
    folder = ROOT / ".cache" / "matrix" / version
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    here = folder / "bin" / "python"
    pip = [here, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, *args.packages, f"{ROOT}[train,onnx,dev]"], check=True)
    versions = json.loads(subprocess.run([here, "-c", ASK], capture_output=True, text=True, check=True).stdout)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    start = time.monotonic()
    tests = [f"tests/{name}" for name in args.folders]
    command = [here, "-m", "pytest", "-q", "-n", args.workers, "-p", "no:cacheprovider", "-m", "not slow", *tests]
    command += [f"--deselect={test}" for test in LEFT_OUT]
    ran = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    print(ran.stdout[-3000:])
    counted = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", ran.stdout)}
    # Where pytest itself fails, it counts nothing: the other Pythons still get their rows.
    counted["failed"] = counted.get("failed", 0) + counted.get("error", 0) or int(ran.returncode != 0)
    counts = [str(counted.get(kind, 0)) for kind in ("passed", "failed", "skipped")]
    return [*versions, *counts, f"{time.monotonic() - start:.0f}"]


def main() -> int:
    args = parse_arguments()
    rows = [run(found, args) for python in args.pythons if (found := find(python))]
    head = ["Python", "torch", "transformers", "accelerate", "datasets", "passed", "failed", "skipped", "seconds"]
    for cells in (head, ["---"] * len(head), *rows):
        print("| " + " | ".join(cells) + " |")
    return int(not rows or any(row[-3] != "0" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
