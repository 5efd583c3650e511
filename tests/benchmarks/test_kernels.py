# SPDX-License-Identifier: Apache-2.0
"""The benchmark of single kernels, in Triton's interpreter, where its times mean nothing."""

import dataclasses

import pytest
import torch

from benchmarks import cli, kernels
from benchmarks.exact import split_heads
from benchmarks.measure import deviation, prepare_inputs
from benchmarks.nystrom import reference
from benchmarks.registry import WORKLOADS, Setting
from nystrom_models.models.attention_linear import causal_linear_attention_reference, elu_features

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTING = Setting(20, batch_size=2, num_heads=1, head_dim=8, num_landmarks=4, conv_kernel_size=3, device=DEVICE)
CEILINGS = {"bytes_per_second": 1e9, "operations_per_second": 1e9}


@pytest.mark.slow
def test_every_kernel_is_timed():
    lines = kernels.table(SETTING, CEILINGS, False, lambda line: None)
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in lines}
    from nystrom_models.kernels.nystrom.launches import LAUNCHES

    assert set(LAUNCHES) < set(rows) and {"forward", "backward", "pseudo_inverse_fwd"} < set(rows)
    for name, row in rows.items():
        if name not in ("kernel", "---"):
            assert float(row[1]) > 0 and (row[2] == "0" or float(row[3]) >= 0)
            assert bool(row[5].strip()) == (name in LAUNCHES)
            assert float(row[6].strip("| ")) > 0
    assert {"causal_linear_fwd", "causal_linear_bwd"} < set(rows)
    context = kernels.prepare(SETTING)["forward"].call()[0].transpose(1, 2).flatten(2)
    expected = reference(SETTING, prepare_inputs(WORKLOADS["nystrom-conv"], SETTING))
    assert deviation(context, expected) < 2e-5


def test_causal_linear_attention_is_what_is_timed():
    inputs = prepare_inputs(WORKLOADS["nystrom-conv"], SETTING)
    query, key, value = (split_heads(inputs[name], SETTING.num_heads) for name in ("query", "key", "value"))
    for mask in (None, kernels.row_mask(SETTING)):
        timed = kernels.prepare_linear(SETTING, ragged=mask is not None)
        expected, _ = causal_linear_attention_reference(elu_features(query), elu_features(key), value, mask)
        context, _ = timed["causal_linear_fwd"].call()
        assert deviation(context.transpose(1, 2), expected) < 2e-5
        assert all(gradient.any() for gradient in timed["causal_linear_bwd"].call()[:3])


@pytest.mark.slow
def test_ragged_rows_and_dropout_are_what_is_timed():
    """With ragged rows, shorter rows end in zeros; with dropout, weights of the others are dropped."""
    plain, ragged = (kernels.prepare(SETTING, ragged)["forward"].call()[0] for ragged in (False, True))
    assert not ragged[0, :, SETTING.length // 2 :].any()
    assert torch.isfinite(ragged).all() and not torch.equal(ragged[1], plain[1])


def test_the_sweep_finds_the_fastest_that_computes_the_same(monkeypatch):
    from nystrom_models.kernels.nystrom import launches

    facts = "token_attention_fwd", SETTING.dtype, SETTING.num_landmarks, SETTING.head_dim, torch.device("cpu")
    current = lambda: launches.find_launch(*facts)  # noqa: E731
    before = current()

    def call():
        if current().stages == 3:
            raise RuntimeError("out of resource: shared memory")
        return torch.ones(2) * (2.0 if current().block == 128 else 1.0), None

    def plan():
        # With many taps, a block of 16 becomes one of 32.
        launch = current()
        sizes = {"BLOCK_N": max(32, launch.block), "num_warps": launch.warps, "num_stages": launch.stages}
        return launch.resident, sizes

    timed = []
    cost = {16: 1.0, 32: 1.0, 64: 2.0, 128: 0.5}
    monkeypatch.setattr(kernels, "seconds", lambda *_: timed.append(plan()) or cost[current().block] / plan()[0])
    on_a_gpu = dataclasses.replace(SETTING, device="cuda")
    found = kernels.sweep("token_attention_fwd", kernels.Kernel(call, 1, plan), before, on_a_gpu)
    assert len(timed) == len(found) == len({kernels.describe_plan(plan) for plan in timed})  # each once
    blocks_and_stages = {tuple(name.split(", ")[::2]) for name in found}
    assert blocks_and_stages == {(b, s) for b in ("32", "64") for s in ("1", "2", "4")}
    best = min(found, key=found.__getitem__).split(", ")
    assert best[0] == "32" and best[3] == str(max(kernels.RESIDENT))
    assert current() is before


def test_without_a_gpu_the_command_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        cli.main(["kernels"])
    assert "for a GPU" in capsys.readouterr().err
