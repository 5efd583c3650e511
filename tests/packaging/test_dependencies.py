# SPDX-License-Identifier: Apache-2.0
"""All imported packages are declared, with their lowest versions, and optional ones are imported only when needed."""

import ast
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest

from tests.packaging.floors import ROOT, floors

SOURCES = ROOT / "src" / "nystrom_models"
# Installed with PyTorch builds for GPUs.
WITH_PYTORCH = {"triton"}
EXTRAS = {
    "data": ("train",),
    "training": ("train", "lora"),
    "deployment": ("onnx",),
    "command_line": ("train", "cli"),
    "analysis": ("train",),
}


def imported(folder):
    """Third-party distributions that the files of a folder import, anywhere in them."""
    names = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
    distributions = packages_distributions()
    return {distributions[name][0] for name in names - sys.stdlib_module_names - {"nystrom_models"} - WITH_PYTORCH}


def plain(name):
    return name.lower().replace("_", "-")


@pytest.mark.parametrize("folder", sorted(path.name for path in SOURCES.iterdir() if (path / "__init__.py").is_file()))
def test_every_import_is_declared_with_its_lowest_version(folder):
    declared = {plain(name) for name in floors(EXTRAS.get(folder, ()))}
    found = {plain(name) for name in imported(SOURCES / folder)}
    assert found <= declared
    assert "torch" in found


def test_models_need_no_extras_and_training_imports_plots_trackers_and_metrics_when_they_are_used():
    code = (
        "import sys\n"
        "for_training = ('accelerate', 'datasets', 'onnx', 'sentencex')\n"
        "for name in (*for_training, 'evaluate', 'matplotlib', 'sklearn', 'tensorboard'):\n"
        "    sys.modules[name] = None\n"
        "import nystrom_models\n"
        "print('models')\n"
        "for name in for_training:\n"
        "    del sys.modules[name]\n"
        "import nystrom_models.training.finetuning, nystrom_models.training.pretraining\n"
        "from nystrom_models.training.curve import plot_history\n"
        "try:\n"
        "    plot_history({'a': [{'step': 1, 'loss': 1.0}]}, 'x.png')\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "models" in done.stdout and "pip install matplotlib" in done.stdout
