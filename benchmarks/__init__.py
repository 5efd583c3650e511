# SPDX-License-Identifier: Apache-2.0
"""Side-by-side measurements: `python -m benchmarks list | run | table | plot`, from the repository root."""

import os

# Set before the first import of torch: otherwise its profiler, which measures memory, reports every start and stop.
os.environ.setdefault("KINETO_LOG_LEVEL", "6")
