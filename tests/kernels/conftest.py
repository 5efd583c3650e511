# SPDX-License-Identifier: Apache-2.0
import pytest

from nystrom_models.kernels import device, first_try
from tests.kernels.helpers import DEVICE


@pytest.fixture(autouse=True)
def kernels_run_here(monkeypatch):
    """Without a GPU, the kernels are interpreted on the CPU (TRITON_INTERPRET, set by tests/conftest.py)."""
    monkeypatch.setattr(device, "DEVICE_TYPES", {"cuda", DEVICE})
    monkeypatch.setattr(first_try, "_faults", {})
