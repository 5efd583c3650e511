# SPDX-License-Identifier: Apache-2.0
"""The data of the Long Range Arena (Tay et al. 2021, arXiv:2011.04006), generated here or checked."""

from .aan import load_aan
from .cifar import load_cifar
from .counts import require_counts
from .generation import generate
from .listops import expression
from .pathfinder import picture_text
from .tasks import ARENA_TASKS, ArenaTask

__all__ = [
    "ARENA_TASKS",
    "ArenaTask",
    "expression",
    "generate",
    "load_aan",
    "load_cifar",
    "picture_text",
    "require_counts",
]
