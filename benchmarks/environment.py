# SPDX-License-Identifier: Apache-2.0
"""The conditions that a result depends on, besides the code under test: machine, versions, commit."""

import importlib.metadata
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable

import torch

from benchmarks.runners import seconds_a_call

PACKAGES = (
    "nystrom_models",
    "torch",
    "transformers",
    "triton",
    "nystrom-attention",
    "linformer",
    "linformer-pytorch",
    "flash-linear-attention",
)


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            found = re.search(r"^model name\s*:\s*(.+)$", file.read(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else platform.processor() or platform.machine()


def allocator() -> str:
    """The allocator of CPU memory for all contenders: that of the C library or a preloaded one, with its settings."""
    loaded = [os.path.basename(path) for path in re.split(r"[ :]+", os.environ.get("LD_PRELOAD", "")) if path]
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION") or "the C library's"
    except (AttributeError, OSError, ValueError):  # not on this system
        library = "the C library's"
    replaced = [name for name in loaded if "malloc" in name]
    settings = [f"{name}={os.environ[name]}" for name in _ALLOCATOR_SETTINGS if name in os.environ]
    return ", ".join([*(replaced or [library]), *settings])


_ALLOCATOR_SETTINGS = (
    "GLIBC_TUNABLES",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)


def machine(device: str) -> dict:
    """CPU, the cores that this process may use, memory and load; with device "cuda", also the GPU."""
    affinity = getattr(os, "sched_getaffinity", None)
    facts = {
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
        "system": platform.system(),
        "allocator": allocator(),
        "gpu": None,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "compute_capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return facts


def free_memory(device: str) -> int:
    """Bytes that a process can still allocate."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        with open("/proc/meminfo", encoding="utf-8") as file:
            found = re.search(r"^MemAvailable:\s*(\d+) kB", file.read(), re.MULTILINE)
    except OSError:
        found = None
    return 1024 * int(found.group(1)) if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def ceilings(device: str, dtype: torch.dtype) -> dict[str, float]:
    """The best rates of the machine: bytes read and written per second by a copy that does not fit into a cache, and
    additions and multiplications per second in a product of large matrices of this dtype."""
    numbers, side = (2**28, 8192) if device == "cuda" else (2**26, 2048)
    source = torch.ones(numbers, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    # Random, because a GPU multiplies equal numbers faster than others.
    matrix = torch.randn(side, side, dtype=dtype, device=device)
    product = torch.empty_like(matrix)

    def best(call: Callable[[], object]) -> float:
        # Measured for some time, because the machine may be slow for a while.
        found, stop = [], time.perf_counter() + 1.0
        while len(found) < 6 or time.perf_counter() < stop:
            found.append(seconds_a_call(call, 1, device))
        return min(found)

    return {
        "bytes_per_second": 2 * 4 * numbers / best(lambda: target.copy_(source)),
        "operations_per_second": 2 * side**3 / best(lambda: torch.mm(matrix, matrix, out=product)),
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of the packages that are compared; None for those that are not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    found["torch"] = torch.__version__  # with the build, such as +cu130
    return found


def commit() -> dict:
    """The git commit, and whether files under src/ or benchmarks/ differ from it; Nones outside a repository."""

    def git(*arguments: str) -> str | None:
        done = subprocess.run(("git", *arguments), capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    changes = git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    return {"commit": git("rev-parse", "HEAD"), "modified": None if changes is None else bool(changes)}


def describe_commit(source: dict) -> str:
    """The result of `commit` as text."""
    return (source["commit"] or "unknown")[:12] + (" with changes" if source["modified"] else "")
