# SPDX-License-Identifier: Apache-2.0
"""The data of the Long Range Arena (Tay et al. 2021, arXiv:2011.04006), generated here or checked."""

from .aan import load_aan
from .cifar import load_cifar
from .counts import require_counts
from .generation import generate
from .listops import listops_rows
from .pathfinder import pathfinder_rows
from .tasks import ARENA_TASKS, ArenaTask

__all__ = [
    "ARENA_TASKS",
    "ArenaTask",
    "generate",
    "listops_rows",
    "load_aan",
    "load_cifar",
    "pathfinder_rows",
    "require_counts",
]
