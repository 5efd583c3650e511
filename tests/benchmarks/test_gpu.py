# SPDX-License-Identifier: Apache-2.0
"""The parts of `make gpu`, in a test run on a CPU, and how it keeps and judges results."""

import json
import sys

import pytest

from benchmarks import cli, compiled_kernels, gpu, gpu_tests, sanitize, training
from nystrom_models import NystromformerConfig


def rehearse(part, folder, capsys):
    """The printed output, and the content of the kept file."""
    assert cli.main(["gpu", "--device", "cpu", "--part", part, "--results", str(folder)]) == 0
    (kept,) = folder.glob(f"*-cpu-{part}.md")
    return capsys.readouterr().out, kept.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_part_is_run_and_kept(tmp_path, capsys):
    printed, kept = rehearse("attention", tmp_path, capsys)
    assert kept in printed and "nystrom-conv" in kept and "| ours" in kept and "exit status 0" in kept
    assert "torch" in kept and "commit" in kept
    (figures,) = tmp_path.glob("*.json")
    assert json.loads(figures.read_text(encoding="utf-8"))["results"]
    # The targets for exact attention and for the limit of bytes were measured, those of the backward pass were not.
    assert "| forward: time over the limit" in printed and "not measured" in printed


@pytest.mark.slow
@pytest.mark.parametrize("part", ["tests", "sanitizers", "training"])
def test_parts_of_other_kinds_are_rehearsed(part, tmp_path, capsys):
    """`python -m benchmarks gpu --device cpu` runs all of them."""
    printed, kept = rehearse(part, tmp_path, capsys)
    assert kept in printed and "exit status 0" in kept


def test_every_part_is_a_command_that_exists():
    parser = cli.build_parser()
    for part in gpu.PARTS.values():
        for command in (part.command, part.small):
            parser.parse_args(command.split() + ["--output", "x.json"] * part.keeps_json)


def test_nothing_that_was_kept_is_written_over(tmp_path):
    names = []
    for _ in range(3):
        path = gpu.new_file(tmp_path, "part")
        path.touch()
        names.append(path.name)
    assert names == ["part.md", "part-2.md", "part-3.md"]


def test_a_part_that_takes_too_long_is_stopped_and_says_so(tmp_path, monkeypatch):
    """It is stopped with the processes that it started, and its output is kept."""
    code = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    run = gpu.run_command
    monkeypatch.setattr(gpu, "run_command", lambda command, env, seconds: run([sys.executable, "-c", code], env, 2))
    path, status = gpu.run_part("kernels", "cpu", tmp_path, 600, lambda line: None)
    kept = path.read_text(encoding="utf-8")
    assert status is None and "begun\n" in kept and "stopped after" in kept


def test_a_part_that_fails_does_not_end_the_others(tmp_path, monkeypatch):
    run = gpu.run_command
    monkeypatch.setattr(
        gpu, "run_command", lambda command, env, seconds: run([sys.executable, "-c", "raise SystemExit(3)"], env, 60)
    )
    lines = []
    assert gpu.run_parts(["kernels", "attention"], "cpu", tmp_path, 60, lines.append) == 2
    assert sum("failed (3)" in line for line in lines) == 2


def row(contender, length, milliseconds, floor=None, tokens=1000):
    return {
        "contender": contender,
        "baseline": contender == "ours",
        "setting": {"length": length},
        "milliseconds": {"median": milliseconds},
        "floor_milliseconds": floor,
        "tokens": tokens,
    }


def test_targets_are_judged_by_the_newest_results(tmp_path):
    def keep(name, rows):
        (tmp_path / name).write_text(json.dumps({"results": rows}), encoding="utf-8")

    fast = [row("ours", 8192, 2.0, floor=1.1), row("exact-flash", 8192, 30.0), row("exact-softmax", 8192, 90.0)]
    whole = [
        row(name, length, time, floor=1.1)
        for length in (1024, 2048, 4096, 8192, 32768)
        for name, time in (("ours", 2.0), ("exact-flash", 50.0))
    ]
    slow = [row("ours", 8192, 4.0, floor=1.1), row("exact-flash", 8192, 30.0)]
    keep("2030-01-01-a-gpu-attention-2.json", slow)
    keep("2030-01-01-a-gpu-attention-10.json", fast)
    keep("2030-01-01-a-gpu-attention.json", slow)  # written last, as by a checkout
    keep("2030-01-01-a-gpu-backward.json", whole)
    keep("2030-01-02-another-attention.json", slow)
    encoders = [row("ours", 1024, 5.0), row("ours", 4096, 5.5), row("modernbert-sdpa", 4096, 5.0)]
    keep("2030-01-01-a-gpu-encoders.json", encoders)
    table = gpu.targets_table(tmp_path, "a-gpu").splitlines()
    missing = "| lengths are missing |"
    assert f"| 1.82 at 8,192 {missing}" in table[2] and f"| 15.0 at 8,192 {missing}" in table[3]
    assert "| 1.82 at 8,192, 1.82 at 32,768 | reached |" in table[4]
    assert f"1.00 at 1,024, 0.91 at 4,096 {missing}" in table[5] and "0.91 at 4,096 | missed |" in table[6]
    keep("2030-01-02-a-gpu-attention.json", whole)
    table = gpu.targets_table(tmp_path, "a-gpu").splitlines()
    assert "25.0 at 32,768 | reached |" in table[3]
    assert "| not measured |  |" in gpu.targets_table(tmp_path, "a third")
    other = gpu.targets_table(tmp_path, "another")
    assert "3.64 at 8,192 | missed" in other and "7.5 at 8,192 | missed" in other


def test_tests_become_a_table(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.kernels.test_gpu" name="test_a" time="1.5"/>
        <testcase classname="tests.kernels.test_gpu" name="test_b" time="2">
        <failure message="too far&#10;off"/></testcase>
        <testcase classname="tests.kernels.test_gpu" name="test_c" time="0"><skipped message="no"/></testcase>
        </testsuite></testsuites>""",
        encoding="utf-8",
    )
    table = gpu_tests.table(gpu_tests.ElementTree.parse(report))
    assert "| kernels.test_gpu | 1 | 1 | 1 | 4 |" in table and "test_b: too far" in table


def test_what_a_sanitizer_found_and_where_there_is_none(monkeypatch):
    assert sanitize.summary("== a\n========= ERROR SUMMARY: 3 errors\n") == "3 errors"
    assert sanitize.summary("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)").startswith("0 ")
    monkeypatch.setattr(sanitize.shutil, "which", lambda name: None)
    lines = []
    assert sanitize.run(list(compiled_kernels.CASES), "cuda", 60, lines.append) == 1 and "CUDA toolkit" in lines[0]


def test_operations_of_a_training_step():
    """For BERT-base's sizes: 6 operations for each weight of layers and, at masked tokens, of the head, and those of
    the attention."""
    config = NystromformerConfig(vocab_size=30000, num_landmarks=64, conv_kernel_size=65)
    layers = 12 * 12 * 768**2
    attention = 12 * 768 * (4 * 64 + 65)
    head = 768**2 + 768 * 30000
    assert training.operations_per_token(config) == round(6 * (layers + attention + 0.15 * head))
    assert training.data_sheet("NVIDIA H100 80GB HBM3") == 989e12 and training.data_sheet("NVIDIA H100 PCIe") == 756e12
    assert training.data_sheet("NVIDIA A100-SXM4-80GB") == 312e12 and training.data_sheet("Some GPU") is None
