# SPDX-License-Identifier: Apache-2.0
"""The benchmark of single kernels, in Triton's interpreter, where its times mean nothing."""

import pytest
import torch

from benchmarks import cli, kernels, measure
from benchmarks.measure import deviation, prepare_inputs
from benchmarks.nystrom import reference
from benchmarks.registry import WORKLOADS, Setting

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTING = Setting(20, num_heads=1, head_dim=8, num_landmarks=4, conv_kernel_size=3, device=DEVICE)
CEILINGS = {"bytes_per_second": 1e9, "operations_per_second": 1e9}


@pytest.fixture(autouse=True)
def once(monkeypatch):
    monkeypatch.setattr(kernels, "SAMPLES", 1)
    monkeypatch.setattr(measure, "SAMPLE_SECONDS", 0.0)


def test_every_kernel_is_timed():
    text = kernels.table(SETTING, CEILINGS, False, lambda line: None)
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in text.splitlines()}
    from nystrom_models.kernels.launch import LAUNCHES

    assert set(LAUNCHES) < set(rows) and {"forward", "backward", "pseudo_inverse"} < set(rows)
    for name, row in rows.items():
        if name not in ("kernel", "---"):
            assert float(row[1]) > 0 and (row[2] == "0" or float(row[3]) >= 0)
            assert bool(row[5].strip(" |")) == (name in LAUNCHES)
    context = kernels.prepare(SETTING)["forward"].call()[0].transpose(1, 2).flatten(2)
    expected = reference(SETTING, prepare_inputs(WORKLOADS["nystrom-conv"], SETTING))
    assert deviation(context, expected) < 2e-5


def test_the_sweep_finds_the_fastest_that_computes_the_same(monkeypatch):
    from nystrom_models.kernels import launch

    place = launch.launch_place(SETTING.dtype, SETTING.num_landmarks, SETTING.head_dim)
    before = launch.LAUNCHES["token_attention"]
    current = lambda: launch.LAUNCHES["token_attention"][place]  # noqa: E731

    def call():
        if current().stages == 3:
            raise RuntimeError("out of resource: shared memory")
        return torch.ones(2) * (2.0 if current().block == 128 else 1.0), None

    cost = {16: 4.0, 32: 1.0, 64: 2.0, 128: 0.5}
    monkeypatch.setattr(kernels, "seconds", lambda *_: cost[current().block] / current().resident)
    found = kernels.sweep("token_attention", call, place, SETTING)
    assert {(launch.block, launch.stages) for launch in found} == {(b, s) for b in (16, 32, 64) for s in (1, 2, 4)}
    best = min(found, key=found.__getitem__)
    assert best.block == 32 and best.resident == max(kernels.RESIDENT)
    assert launch.LAUNCHES["token_attention"] is before


def test_without_a_gpu_the_command_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        cli.main(["kernels"])
    assert "for a GPU" in capsys.readouterr().err
