# SPDX-License-Identifier: Apache-2.0
"""The package with the lowest version of each of its dependencies: installs exactly these, and runs the tests.

    python -m tests.packaging.floors [pytest's arguments]

creates .cache/floors once, with the floors of pyproject.toml (some gigabytes, because the lowest PyTorch has CUDA),
and runs the tests of kernels (also the slow ones, which compile them), data, training, scripts and saved models in it.
Needs a package index.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

from packaging.requirements import Requirement

try:
    import tomllib
except ImportError:  # Python 3.10, for which pytest brings the same
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache" / "floors"
# What the tests themselves need, as in the development environment.
TESTING = ("hypothesis", "openvino", "pytest", "pytest-xdist", "PyYAML")
KERNELS = "tests/kernels"  # with the Triton that the lowest PyTorch brings
TESTS = (
    KERNELS,
    "tests/data",
    "tests/training",
    "tests/examples",
    "tests/configs",
    "tests/hub",
    "tests/compat",
    "tests/deployment",
)


def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def project() -> dict:
    """The table `project` of pyproject.toml."""
    return pyproject()["project"]


def floors(extras: tuple[str, ...] = ("train",)) -> dict[str, str]:
    """The lowest version of every dependency, by name.

    Raises:
        ValueError: if a dependency has none.
    """
    requirements = [*project()["dependencies"]]
    for extra in extras:
        requirements += project()["optional-dependencies"][extra]
    found = {}
    for requirement in map(Requirement, requirements):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue  # for other versions of Python
        lowest = [part.version for part in requirement.specifier if part.operator == ">="]
        if not lowest:
            raise ValueError(f"pyproject.toml names no lowest version of {requirement.name}.")
        found[requirement.name] = lowest[0]
    return found


def pinned(names: tuple[str, ...]) -> list[str]:
    """Lines of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] in names]


def main(arguments: list[str]) -> int:
    """Installs and tests; returns pytest's exit code."""
    python = FOLDER / "bin" / "python"
    lowest = floors(("train", "onnx", "lora"))
    # What builds the package for a test of the wheel: PyTorch says which of its versions can be installed.
    build = pyproject()["build-system"]["requires"]
    requirements = [*(f"{name}=={version}" for name, version in lowest.items()), *pinned(TESTING), *build]
    done = FOLDER / "installed"
    if not done.is_file() or done.read_text().split() != requirements:
        print(f"Installing {', '.join(requirements)}", flush=True)
        venv.create(FOLDER, clear=True, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *requirements], check=True)
        done.write_text("\n".join(requirements))
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    runs = [["-m", "not slow", *(arguments or TESTS)]]
    if not arguments:
        runs.append(["-m", "slow", KERNELS])
    command = [python, "-m", "pytest", "-q"]
    codes = [subprocess.run([*command, *run], cwd=ROOT, env=environment).returncode for run in runs]
    return next((code for code in codes if code), 0)  # negative if a signal ended pytest


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
