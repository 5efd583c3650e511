# SPDX-License-Identifier: Apache-2.0
import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import cli, decoding, environment, measure, models, report, runners
from benchmarks.registry import WORKLOADS, Prepared, Setting

SIZES = {
    "num_heads": 2,
    "head_dim": 8,
    "num_landmarks": 8,
    "projected_dim": 6,
    "conv_kernel_size": 5,
    "num_layers": 1,
}
SMALL = [text for name, size in SIZES.items() for text in (f"--{name}", str(size))]
QUICK = ["--repeats", "2", "--max_seconds", "1", "--one_process"]
ON_A_GPU = {"ours-kernels", "ours-pytorch"}
OPERATIONS = [name for name, workload in WORKLOADS.items() if workload.kind == "op"]

COMMANDS = ("python -m benchmarks run ", "python -m benchmarks decode ")
FOLDER = Path(__file__).parents[2] / "benchmarks" / "results"
KEPT = [
    path
    for path in sorted(FOLDER.glob("*.json"))
    if json.loads(path.read_text()).get("command", "").startswith(COMMANDS)
]

ROW = {
    "workload",
    "contender",
    "ours",
    "baseline",
    "status",
    "reason",
    "check",
    "milliseconds",
    "speedup",
    "peak_bytes",
    "tokens",
    "others_cpu",
    "floor_milliseconds",
    "setting",
}


def run(path, *arguments):
    code = cli.main(["run", *SMALL, *QUICK, "--output", str(path), *arguments])
    return code, json.loads(path.read_text())


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(["--backward"], id="backward"),
        pytest.param([], id="forward", marks=pytest.mark.slow),
        pytest.param(["--dtype", "bfloat16"], id="bf16", marks=pytest.mark.slow),
    ],
)
def test_every_operation_runs_and_is_stored_complete(tmp_path, capsys, options):
    code, stored = run(tmp_path / "deep" / "result.json", "--op", "--lengths", "32", "37", *options)
    assert code == 0
    printed = capsys.readouterr().out

    assert set(stored) == {
        "schema_version",
        "created",
        "command",
        "machine",
        "versions",
        "source",
        "ceilings",
        "apart",
        "results",
    }
    assert stored["machine"]["cores"] >= 1 and stored["versions"]["torch"] == torch.__version__
    rows = {(row["workload"], row["contender"], row["setting"]["length"]): row for row in stored["results"]}
    assert set(rows) == {(name, who, n) for name in OPERATIONS for who in WORKLOADS[name].contenders for n in (32, 37)}
    for (name, who, _), row in rows.items():
        assert set(row) == ROW
        assert row["status"] == "ok" or row["reason"], (name, who)
        assert row["status"] != "wrong", row["reason"]
        if row["status"] == "ok":
            assert row["check"]["passed"] and 0 < row["milliseconds"]["min"] <= row["milliseconds"]["median"]
            assert row["milliseconds"]["samples"] == 2 and row["peak_bytes"] > 0
            assert (row["speedup"] is None) == row["baseline"]
            compared = {"output"} | {key for key in row["check"]["deviations"] if key.startswith("gradient of ")}
            assert set(row["check"]["deviations"]) == compared and (len(compared) > 1) == ("--backward" in options)
        if row["ours"] and who not in ON_A_GPU:
            assert row["status"] == "ok"
            has_floor = name.startswith(("nystrom", "linear")) or (
                name != "self-attention" and "--backward" not in options
            )
            assert bool(row["floor_milliseconds"]) == has_floor
        if who in ON_A_GPU:
            assert row["status"] == "unavailable" and "--device cuda" in row["reason"]

    cli.main(["table", str(tmp_path / "deep" / "result.json")])
    assert printed.endswith(capsys.readouterr().out)
    assert all(WORKLOADS[name].contenders.keys() & set(printed.split()) for name in OPERATIONS)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("length", [32, 64])
def test_opponents_compute_what_we_compute(length, backward):
    """A contender with the same formula as ours passes the check."""
    setting = Setting(length, batch_size=2, backward=backward, **SIZES)
    expected = {"transformers", "nystrom-attention", "linformer", "linformer-pytorch", "exact-sdpa", "exact-softmax"}
    for name in OPERATIONS:
        for row in measure.measure(WORKLOADS[name], setting, repeats=1, memory=False):
            if row["contender"] in expected and not (row["status"] == "unavailable" and "module" in row["reason"]):
                assert row["status"] == "ok", (name, row["contender"], row["reason"])


class Scaled(torch.autograd.Function):
    """A correct output with a wrong gradient."""

    @staticmethod
    def forward(ctx, states):
        return states.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.01 * gradient


WRONG = {
    "output": lambda output: output * 1.001,
    "shape": lambda output: output[:, :-1],
    "nan": lambda output: output.index_fill(1, torch.tensor([3]), torch.nan),
    "gradient": Scaled.apply,
}


@pytest.mark.parametrize("baseline", [False, True], ids=["opponent", "baseline"])
@pytest.mark.parametrize("fault", WRONG)
def test_no_speedup_for_a_wrong_result(fault, baseline):
    workload = copy.deepcopy(WORKLOADS["nystrom"])
    right = workload.contenders["ours"].build

    @workload.contender("wrong", ours=baseline)
    def wrong(setting, inputs):
        return Prepared(lambda: WRONG[fault](right(setting, inputs).call()))

    if baseline:
        workload.baseline = "wrong"
    setting = Setting(32, backward=fault == "gradient", **SIZES)
    names = ["ours", "ours-reference", "wrong"]
    rows = measure.measure(workload, setting, contenders=names, repeats=2, memory=False)
    rows = {row["contender"]: {**row, "setting": cli.describe_setting(setting)} for row in rows}

    assert rows["wrong"]["status"] == "wrong" and rows["wrong"]["reason"]
    assert rows["wrong"]["milliseconds"] is None and rows["wrong"]["speedup"] is None
    assert rows["ours"]["status"] == rows["ours-reference"]["status"] == "ok"
    # Without a correct baseline there is no speedup.
    assert (rows["ours-reference"]["speedup"] is None) == baseline
    assert "WRONG" in "\n".join(report.grid(list(rows.values()), "speed-up", report.speedup_cell))


@pytest.mark.parametrize("name", ["encoder", "encoder-variable", "bert", "esm", "vit"])
def test_encoders_run_and_ours_are_checked(name):
    checked = {"nystrom", "ours", "ours-linformer"} | ({"transformers"} if name == "encoder" else set())
    setting = Setting(32, batch_size=3, **SIZES)
    rows = measure.measure(WORKLOADS[name], setting, repeats=1, memory=False)
    for row in rows:
        if row["status"] != "unavailable":
            assert row["status"] == "ok", (row["contender"], row["reason"])
            assert bool(row["check"]["deviations"]) == (row["contender"] in checked)
    rows = [{**row, "setting": cli.describe_setting(setting)} for row in rows]
    printed = "\n".join(report.grid(rows, "tokens a second", report.tokens_cell))
    assert all(row["contender"] in printed for row in rows if row["status"] == "ok")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_every_attention_of_the_long_range_arena_is_checked(backward):
    workload, setting = WORKLOADS["lra-text"], Setting(300, batch_size=2, backward=backward)
    rows = measure.measure(workload, setting, repeats=1)
    assert [row["contender"] for row in rows] == ["nystrom", "linformer", "linear", "softmax-sdpa", "softmax-stored"]
    for row in rows:
        assert row["status"] == "ok" and row["tokens"] == 600 and row["check"]["deviations"].keys() == {"output"}
        assert row["check"]["tolerances"]["output"] == 2 * measure.TOLERANCES[torch.float32]  # of two layers
    peaks = {row["contender"]: row["peak_bytes"] for row in rows}
    matrices = 2 * 2 * 300**2 * 4  # rows, heads, float32
    assert peaks["softmax-stored"] > peaks["softmax-sdpa"] + matrices


def test_variable_lengths_are_half_padding_and_tokens_are_real_ones():
    workload, setting = WORKLOADS["encoder-variable"], Setting(512, batch_size=64)
    inputs = measure.prepare_inputs(workload, setting)
    lengths = inputs["attention_mask"].sum(dim=-1)
    assert 240 < lengths.float().mean() < 272 and 40 < lengths.float().std() < 90
    assert workload.tokens(inputs) == lengths.sum()
    row = {"milliseconds": {"median": 500.0}, "tokens": 1000}
    assert report.tokens_cell(row) == "2,000"
    assert WORKLOADS["encoder"].tokens(measure.prepare_inputs(WORKLOADS["encoder"], setting)) == 64 * 512


def test_an_opponent_that_fails_does_not_end_the_run():
    workload = copy.deepcopy(WORKLOADS["nystrom"])

    @workload.contender("broken")
    def broken(setting, inputs):
        raise RuntimeError("expected this shape\nand a second line")

    setting = Setting(32, **SIZES)
    rows = measure.measure(workload, setting, contenders=["broken", "exact-sdpa"], repeats=1, memory=False)
    assert {row["contender"]: row["status"] for row in rows} == {"ours": "ok", "broken": "error", "exact-sdpa": "ok"}
    assert next(row["reason"] for row in rows if row["contender"] == "broken") == "RuntimeError: expected this shape"


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.slow
def test_each_contender_in_a_process_of_its_own(backward, monkeypatch):
    """Contenders are checked and timed as in one process, one after the other in every round."""
    setting = Setting(32, backward=backward, **SIZES)
    names = ["ours", "exact-sdpa"]
    started, pids = runners.RemoteRunner.__init__, []

    def start(runner, *arguments):
        started(runner, *arguments)
        pids.append(runner.process.pid)

    monkeypatch.setattr(runners.RemoteRunner, "__init__", start)
    here = measure.measure(WORKLOADS["nystrom"], setting, contenders=names, repeats=2)
    assert not pids
    apart = measure.measure(WORKLOADS["nystrom"], setting, contenders=names, repeats=2, apart=True)
    assert len(set(pids)) == 2 and os.getpid() not in pids
    for row, other in zip(here, apart, strict=True):
        assert row.keys() == other.keys() and other["status"] == "ok"
        assert other["check"] == row["check"] and other["peak_bytes"] == row["peak_bytes"]
        assert other["milliseconds"]["samples"] == 2 and other["milliseconds"]["min"] > 0
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


@pytest.mark.slow
def test_the_command_gives_each_contender_a_process(tmp_path):
    """Run as a command, because processes of contenders import the main module, too."""
    output = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks", "run", "--op", "nystrom", "--contenders", "exact-sdpa"]
    command += ["--lengths", "32", *SMALL, "--repeats", "1", "--no_memory", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(cli.__file__).parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    assert "each contender in a process of its own" in done.stdout
    stored = json.loads(output.read_text())
    assert stored["apart"] and [row["status"] for row in stored["results"]] == ["ok", "ok"]


@pytest.mark.slow
def test_an_opponent_that_fails_in_its_process(monkeypatch):
    """A contender fails with an error, or because the system ends its process."""
    bf16 = Setting(32, dtype=torch.bfloat16, **SIZES)
    rows = measure.measure(
        WORKLOADS["nystrom"], bf16, contenders=["transformers"], repeats=1, memory=False, apart=True
    )
    by_name = {row["contender"]: row for row in rows}
    assert by_name["ours"]["status"] == "ok" and by_name["transformers"]["status"] == "error"
    assert by_name["transformers"]["reason"].startswith("RuntimeError: expected scalar type")
    runner = runners.RemoteRunner(WORKLOADS["nystrom"], WORKLOADS["nystrom"].contenders["ours"], Setting(32, **SIZES))
    runner.seconds(1)
    runner.process.kill()
    with pytest.raises(runners.ContenderFailed, match="ended with exit code -9"):
        runner.seconds(1)
    runner.close()


def test_the_allocator_is_named(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert environment.allocator().endswith("MALLOC_ARENA_MAX=1")
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/libtcmalloc.so.4")
    assert environment.allocator() == "libtcmalloc.so.4, MALLOC_ARENA_MAX=1"


def test_rounds_are_interleaved_and_slow_contenders_sit_out():
    calls = []
    contenders = {name: lambda name=name: calls.append(name) for name in "abc"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "SAMPLE_SECONDS", 0.0)
        patch.setattr(measure, "WARMED_SECONDS", 0.0)
        samples = measure.interleave(contenders, repeats=5, max_seconds=100, device="cpu")
        assert all(len(times) == 5 and None not in times for times in samples.values())
        rounds = [calls[start : start + 3] for start in range(6, len(calls), 3)]
        assert len(rounds) == 5 and all(sorted(names) == ["a", "b", "c"] for names in rounds)
        samples = measure.interleave(contenders, repeats=5, max_seconds=0, device="cpu")
    assert all([time is None for time in times] == [False] * 3 + [True] * 2 for times in samples.values())


def test_peak_memory_counts_what_is_held_at_once():
    def call():
        for _ in range(3):
            block = torch.zeros(2**20)
            del block
        return torch.zeros(2**18)

    assert 4 * 2**20 <= runners.peak_memory(call, "cpu") < 1.1 * 4 * 2**20
    held = [torch.zeros(2**22)]

    def free_and_call():
        held.clear()
        return call()

    # What was allocated before is not its own.
    assert 4 * 2**20 <= runners.peak_memory(free_and_call, "cpu") < 1.1 * 4 * 2**20


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--op", "nystroem"], "nystrom-conv"),
        (["--contenders", "transformer"], "transformers"),
        (["--conv_kernel_size", "4"], "--conv_kernel_size"),
        (["--lengths", "0"], "--lengths"),
        (["--repeats", "0"], "--repeats"),
        (["--tokens", "0"], "--tokens"),
        (["--threads", "0"], "--threads"),
    ],
)
def test_bad_arguments_name_what_would_work(capsys, arguments, named):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["run", *arguments])
    assert stopped.value.code == 2 and named in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--repeats", "--lengths", "--threads"])
def test_decoding_needs_a_repeat_a_token_and_a_thread(capsys, flag):
    with pytest.raises(SystemExit):
        cli.main(["decode", flag, "0"])
    assert f"argument {flag}: must be at least 1" in capsys.readouterr().err


def test_layouts_of_the_papers_tables(tmp_path, capsys):
    path = tmp_path / "result.json"
    code, stored = run(path, "--op", "self-attention", "--lengths", "256", "512")
    assert code == 0 and all(row["status"] == "ok" for row in stored["results"])
    capsys.readouterr()
    rows = {(row["contender"], row["setting"]["length"]): row for row in stored["results"]}

    def times(name, length):
        return rows[name, length]["milliseconds"]["median"]

    cli.main(["table", str(path), "--layout", "nystromformer-table-1"])
    printed = capsys.readouterr().out
    ratio = times("exact-softmax", 512) / times("nystromformer-32", 512)
    assert f"{times('nystromformer-32', 512):.4g} ({ratio:.3g}x)" in printed
    cli.main(["table", str(path), "--layout", "linformer-table-3", "--against", "exact-sdpa"])
    printed = capsys.readouterr().out
    ratios = [times("exact-sdpa", 256) / times(f"linformer-{k}", 256) for k in (128, 256)]
    assert f"| 256 | {ratios[0]:.3g}x | {ratios[1]:.3g}x |" in printed
    with pytest.raises(SystemExit, match="choose from nystromformer-64"):
        cli.main(["table", str(path), "--layout", "linformer-table-3", "--against", "bert"])


@pytest.mark.parametrize("command", ["table", "plot"])
@pytest.mark.parametrize("content", [None, "no JSON", "[]"])
def test_a_file_that_is_not_of_a_benchmark_is_named(tmp_path, command, content):
    path = tmp_path / "other.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match=r"other\.json"):
        cli.main([command, str(path)])


@pytest.mark.slow
def test_batches_of_as_many_tokens_at_every_length(tmp_path, capsys):
    options = ["--lengths", "16", "32", "128", "--tokens", "64", "--contenders", "ours"]
    _, stored = run(tmp_path / "result.json", "--op", "nystrom", *options)
    assert [row["setting"]["batch_size"] for row in stored["results"]] == [4, 2, 1]
    options[options.index("128")] = "64"
    run(tmp_path / "result.json", "--op", "nystrom", *options)
    assert "batch of 64 tokens" in capsys.readouterr().out


def test_reference_of_causal_linear_attention():
    from benchmarks.causal_linear import causal_linear_attention

    query, key, value = torch.randn(3, 2, 300, 2, 4, dtype=torch.float64)
    features = [torch.nn.functional.elu(states) + 1 for states in (query, key)]
    weights = torch.einsum("bnhd,bmhd->bhnm", *features).tril()
    expected = torch.einsum("bhnm,bmhd->bnhd", weights / weights.sum(dim=-1, keepdim=True), value)
    torch.testing.assert_close(causal_linear_attention(query, key, value), expected)


def test_scores_that_do_not_fit_are_not_asked_for():
    refuses = WORKLOADS["nystrom"].contenders["exact-softmax"].refuses
    assert refuses(Setting(512)) is None
    assert "GiB are free" in refuses(Setting(2**20))


def test_floor_is_the_slower_of_bytes_and_operations():
    workload, setting = WORKLOADS["nystrom"], Setting(32, **SIZES)
    moved, operations = 4 * 32 * 16 * 4, 2 * 32 * 16 * 4 * 8

    def floor(bytes_per_second, operations_per_second):
        ceilings = {"bytes_per_second": bytes_per_second, "operations_per_second": operations_per_second}
        names = ["exact-sdpa"]
        ours, other = measure.measure(workload, setting, contenders=names, repeats=1, memory=False, ceilings=ceilings)
        assert other["floor_milliseconds"] is None
        return ours["floor_milliseconds"]

    assert floor(1e6, 1e12) == pytest.approx(1e3 * moved / 1e6)
    assert floor(1e12, 1e6) == pytest.approx(1e3 * operations / 1e6)
    row = {"milliseconds": {"median": 5.0}, "floor_milliseconds": 2.0}
    assert report.floor_cell(row) == "40"


def test_the_floor_of_a_linformer_is_that_of_its_own_products():
    workload, setting = WORKLOADS["encoder"], Setting(40, batch_size=3, **SIZES)
    # At most one of the two rates counts: every operation takes a millisecond, and moving bytes takes no time.
    ceilings = {"bytes_per_second": 1e30, "operations_per_second": 1e3}
    rows = measure.measure(
        workload, setting, contenders=["ours-linformer"], repeats=1, memory=False, ceilings=ceilings
    )
    inputs = runners.prepare_inputs(workload, setting)
    model = models.seeded(setting, lambda: models.linformer(setting, "eager"))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**inputs)
    assert rows[1]["floor_milliseconds"] == pytest.approx(counter.get_total_flops())


def test_plot(tmp_path, capsys):
    path = tmp_path / "result.json"
    run(path, "--op", "linformer", "--lengths", "16", "32", "--contenders", "exact-sdpa")
    cli.main(["plot", str(path)])
    assert f"Drawn: {tmp_path / 'result.png'}" in capsys.readouterr().out
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")
    cli.main(["plot", str(path), "--output", str(tmp_path / "new" / "picture.svg")])
    assert (tmp_path / "new" / "picture.svg").exists()


@pytest.mark.parametrize("command", [["run", "--plot"], ["plot", "result.json", "--output"]], ids=["run", "plot"])
def test_a_picture_that_cannot_be_written_is_refused_before_the_measurement(command, monkeypatch):
    monkeypatch.setattr(cli, "measure", None)
    monkeypatch.setattr(cli, "read", lambda path: {"results": []})
    with pytest.raises(SystemExit, match=rf"{command[-1]} picture.pgn: .* end in .png, .svg or .pdf"):
        cli.main([*command, "picture.pgn"])


def test_plot_of_chosen_contenders_for_light_and_dark_pages(tmp_path):
    path, picture = tmp_path / "result.json", str(tmp_path / "picture.svg")
    run(path, "--op", "linformer", "--lengths", "16", "32", "--contenders", "exact-sdpa", "exact-softmax")
    command = ["plot", str(path), "--output", picture, "--contenders", "ours", "exact-sdpa", "--color_schemes"]
    cli.main([*command, "light", "dark", "--labels", "this package", "exact"])
    light, dark = ((tmp_path / f"picture-{scheme}.svg").read_text() for scheme in ("light", "dark"))
    for text, color in ((light, "#00796b"), (dark, "#4db6ac")):
        assert color in text and "<!-- this package -->" in text and "<!-- exact -->" in text
        assert "exact-softmax" not in text
    with pytest.raises(SystemExit):
        cli.main([*command, "light", "--labels", "only one"])
    with pytest.raises(SystemExit, match=r"--contenders performer: was not measured; choose from .*exact-sdpa"):
        cli.main(["plot", str(path), "--contenders", "performer"])


def test_list_names_every_workload_and_contender(capsys):
    cli.main(["list"])
    words = capsys.readouterr().out.replace(":", " ").split()
    for workload in WORKLOADS.values():
        assert workload.name in words and set(workload.contenders) <= set(words)


@pytest.mark.parametrize("flag", ["--batch_size", "--lengths"])
def test_collators_need_a_row_of_a_token(capsys, flag):
    with pytest.raises(SystemExit):
        cli.main(["collators", flag, "0"])
    assert f"argument {flag}: must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_kept_results_of_run_and_decode_are_printed(capsys, path):
    cli.main(["table", str(path)])
    assert json.loads(path.read_text())["created"] in capsys.readouterr().out


def test_collators_are_timed(capsys):
    cli.main(["collators", "--batch_size", "2", "--lengths", "32"])
    printed = capsys.readouterr().out
    assert "2 rows of 32 tokens" in printed
    rows = dict(re.findall(r"^(\S.*?)  +[\d.]+ +([\d,]+)$", printed, re.MULTILINE))
    assert list(rows) == ["ours: MLM + SOP", "Transformers: MLM", "Transformers: MLM, NumPy"]


def test_every_timed_token_follows_the_same_context(monkeypatch):
    found = {}

    def call(decoders, **options):
        for name in (decoding.GROWING, decoding.STATIC):
            for _ in range(3):
                decoders[name]()
            found[name] = int(decoders[name].cache.get_seq_length())
        return {name: [1.0] for name in decoders}

    monkeypatch.setattr(decoding, "interleave", call)
    decoding.decode(48, 2, 1.0, 48, decoding.Place())
    assert found[decoding.GROWING] == found[decoding.STATIC] == 48


def test_decoding_is_timed_beside_exact_attention(capsys, tmp_path):
    output = tmp_path / "decoding.json"
    cli.main(["decode", "--lengths", "48", "--repeats", "2", "--output", str(output)])
    printed = capsys.readouterr().out
    for title in report.DECODING.values():
        assert title in printed
    results = json.loads(output.read_text())["results"]
    assert [row["contender"] for row in results["decode"]] == [decoding.OURS, decoding.GROWING, decoding.STATIC]
    # 4 layers of 4 heads with 64 features, 64 + 1 sums; and the count of tokens.
    assert results["decode"][0]["state_bytes"] == 4 * 4 * 64 * 65 * 4 + 16
    assert results["decode"][1]["state_bytes"] == 2 * 4 * 256 * 48 * 4
    assert results["decode"][2]["state_bytes"] == 2 * 4 * 256 * (48 + 1) * 4  # and the new token
    assert all(row["seconds"]["median"] > 0 and row["peak_bytes"] > 0 for row in results["train"])

    cli.main(["table", str(output)])
    again = capsys.readouterr().out
    assert again.strip() == printed.strip()
    with pytest.raises(SystemExit):
        cli.main(["plot", str(output)])
    assert "is of `decode`, which only `table` shows" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["table", str(output), "--layout", next(iter(report.LAYOUTS))])
    assert "argument --layout" in capsys.readouterr().err
