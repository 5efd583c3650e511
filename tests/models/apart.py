# SPDX-License-Identifier: Apache-2.0
"""Programs that use torchao, bitsandbytes or Opacus, in processes of their own.

Transformers and PEFT import the first two wherever they are installed, and the third has packages of the names
`examples` and `benchmarks`, so the other tests do without them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / ".cache" / "apart"


def run(program: str, folder: Path, *arguments: str) -> str:
    """Runs a Python program with arguments in a folder and returns what it prints."""
    if not PACKAGES.is_dir():
        pytest.fail(f"Nothing is in {PACKAGES}: `make test` fetches it, or alone: make .cache/apart/installed")
    paths = [str(PACKAGES), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", program, *arguments]
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout
