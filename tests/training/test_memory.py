# SPDX-License-Identifier: Apache-2.0
"""Memory that was freed is free for other programs."""

import platform
import subprocess
import sys

import pytest

from nystrom_models.training import memory

# In a process of its own, in whose heap the small blocks find no older gaps. glibc maps blocks from 128 KB on one by
# one. The small ones keep the end of the heap where it is.
FREED = """
import runpy, sys
import psutil

return_free_memory = runpy.run_path(sys.argv[1])["return_free_memory"]
blocks = [(bytearray(2**16), bytearray(600)) for _ in range(4000)]
kept = [small for _, small in blocks]
del blocks
before = psutil.Process().memory_info().rss
return_free_memory()
print((before - psutil.Process().memory_info().rss) / (4000 * 2**16))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps memory in this way")
def test_memory_between_other_allocations_is_returned():
    command = [sys.executable, "-c", FREED, memory.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0.9
