# SPDX-License-Identifier: Apache-2.0
"""What the processor computes fast."""

import functools
from collections.abc import Mapping
from typing import Any

import torch


@functools.cache
def has_fast_bfloat16() -> bool:
    """Whether PyTorch multiplies matrices in bfloat16 by instructions of this CPU: AVX-512 BF16, AMX, or BF16 of ARM64
    (by oneDNN, which PyTorch's packages for macOS lack).

    Without them, such products take several times as long as in float32 where they are emulated (AVX-512 alone), and
    tens of times as long elsewhere. False if PyTorch does not tell.
    """
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    on_arm = capabilities.get("bf16") and torch.backends.mkldnn.is_available()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or on_arm)
