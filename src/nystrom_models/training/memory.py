# SPDX-License-Identifier: Apache-2.0
"""Memory of the process."""

import ctypes
import sys


def return_free_memory() -> None:
    """Gives memory that was freed back to the system, where glibc keeps it (Linux).

    Rows of varying length leave gaps between smaller allocations, in which the next rows find no room: the memory of a
    run on a CPU would grow for hours, to several times that of a step.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
        if trim is not None:
            trim(0)
