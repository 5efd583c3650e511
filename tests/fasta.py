# SPDX-License-Identifier: Apache-2.0
"""The reader of FASTA files, which older versions of `datasets` lack."""

import pytest
from datasets import packaged_modules

needs_fasta = pytest.mark.skipif(
    not hasattr(packaged_modules, "fasta"), reason="datasets 5.1 or newer reads FASTA files"
)
