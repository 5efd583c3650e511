# SPDX-License-Identifier: Apache-2.0
import gc
import os

# Before any import of huggingface_hub, which reads it once: no test may reach the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from hypothesis import settings

# With a build suffix, as in the index's default build, which the package's metadata lack. A test that
# compares the two versions then fails with every build.
torch.__version__ = torch.torch_version.TorchVersion(torch.__version__.split("+")[0] + "+cu130")

# Before any import of triton, which reads it once: without a GPU, the tests of kernels interpret them.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("repeatable", derandomize=True, deadline=None, database=None, print_blob=True)
settings.load_profile("repeatable")

# PyTorch then fills the results of torch.empty and similar functions with NaN, so that reads before writes are found.
torch.use_deterministic_algorithms(True, warn_only=True)


@pytest.fixture
def no_precision_yet():
    """The process of a test has the precision of its first run; this test has one of its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


# The marks on Transformers' common tests.
UPSTREAM_MARKERS = (
    "accelerate_tests",
    "flash_attn_test",
    "flash_attn_3_test",
    "flash_attn_4_test",
    "torch_compile_test",
)


def pytest_configure(config):
    for marker in UPSTREAM_MARKERS:
        config.addinivalue_line("markers", f"{marker}: set by Transformers")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    without_device = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(without_device)


@pytest.fixture(autouse=True, scope="module")
def only_new_objects_are_searched_for_garbage():
    """Imported modules stay to the end: no collection of garbage needs to look through them again.

    Tests import more, so this is repeated for each file, when the objects of the last one are gone.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_state():
    """Every test starts from the same seed and without compiled graphs, whose number is limited for each function."""
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


@pytest.fixture(scope="session")
def clean_python(tmp_path_factory):
    """The Python of a new virtual environment that sees the installed packages, but not this one.

    A path file leads to links to the packages; path files beside them, as an editable install's, are not followed.
    """
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.run([python, "-c", where], capture_output=True, text=True, check=True).stdout.strip()
    packages = folder / "packages"
    packages.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith("nystrom_models"):
            (packages / entry.name).symlink_to(entry)
    Path(site, "packages.pth").write_text(f"{packages}\n")
    return python


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """A headless Chromium (see tests/browser.py) for all tests of a process; skips where there is none."""
    from tests.browser import Browser, why_not

    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with Browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started
