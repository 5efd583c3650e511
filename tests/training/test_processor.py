# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from nystrom_models.training.processor import has_fast_bfloat16


@pytest.mark.parametrize(
    "capabilities, has_onednn, wanted",
    [
        ({"architecture": "x86_64", "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, True, False),
        ({"architecture": "x86_64", "avx512_f": True, "avx512_bf16": True, "amx_bf16": False}, True, True),
        ({"architecture": "x86_64", "avx512_f": True, "avx512_bf16": False, "amx_bf16": True}, True, True),
        ({"architecture": "arm64", "neon": True, "bf16": True}, True, True),
        ({"architecture": "arm64", "neon": True, "bf16": True}, False, False),  # macOS
        ({"architecture": "arm64", "neon": True, "bf16": False}, True, False),
        ({}, True, False),
    ],
)
def test_bfloat16_is_fast_where_the_processor_multiplies_it(monkeypatch, capabilities, has_onednn, wanted):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    assert has_fast_bfloat16.__wrapped__() is wanted


def test_bfloat16_is_slow_for_a_pytorch_that_does_not_tell(monkeypatch):
    monkeypatch.delattr(torch.cpu, "get_capabilities", raising=False)
    assert not has_fast_bfloat16.__wrapped__()
