# SPDX-License-Identifier: Apache-2.0
"""The C++ compiler, which the default back end of torch.compile needs on a CPU."""

import shutil

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
