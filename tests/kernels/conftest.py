# SPDX-License-Identifier: Apache-2.0
import pytest

from nystrom_models.kernels import device, first_try
from tests.kernels.helpers import DEVICE


@pytest.fixture(autouse=True)
def kernels_run_here(monkeypatch):
    """Where there is no GPU the kernels are interpreted (TRITON_INTERPRET, set by tests/conftest.py) on the CPU."""
    monkeypatch.setattr(device, "DEVICE_TYPES", {"cuda", DEVICE})
    monkeypatch.setattr(first_try, "_faults", {})
