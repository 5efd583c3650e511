# SPDX-License-Identifier: Apache-2.0
"""All measurements that need a GPU, in parts of at most ten minutes: `python -m benchmarks gpu`, or `make gpu`.

A part is a command of this package in a process of its own, so that neither a crash nor a lack of memory ends the
others. Its output is kept in a file with date, GPU, driver, versions and commit. With `--device cpu` the same commands
run with small sizes and with kernels in Triton's interpreter: a test run, whose times mean nothing.
"""

import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import environment, report

ROOT = Path(__file__).parents[1]
PART_SECONDS = 600
RESULTS = {"cuda": "benchmarks/results", "cpu": "outputs/gpu-rehearsal"}

SMALL_OPERATION = "--batch_size 1 --num_heads 2 --head_dim 8 --num_landmarks 4 --conv_kernel_size 3"
# Kernels that can be launched in several ways.
FORWARD = "landmark_attention_fwd token_attention_fwd"
BACKWARD = "landmark_attention_bwd token_attention_bwd convolution_bwd"
QUICK = "--repeats 1 --max_seconds 0.1 --no_memory"


class Part(NamedTuple):
    """One part.

    about: what it shows. command: the arguments of `python -m benchmarks` on a GPU. small: those of the test run on a
    CPU. keeps_json: whether the command takes `--output`, for figures as JSON.
    """

    about: str
    command: str
    small: str
    keeps_json: bool = False


PARTS = {
    "tests": Part(
        "the tests that need a GPU (pytest -m gpu)",
        "tests --seconds 570",
        "tests --seconds 570 --device cpu",
    ),
    "tests-compiled": Part(
        "the tests that interpret the kernels where there is no GPU, here compiled",
        "tests --select kernels --seconds 570",
        "tests --select kernels --seconds 570 --device cpu",
    ),
    "sanitizers": Part(
        "compute-sanitizer's memcheck, racecheck, synccheck and initcheck on the largest sizes, forward and backward",
        "sanitize --seconds 570",
        "sanitize --device cpu --cases float16-16x16-5taps",
    ),
    "kernels": Part(
        "the time of each kernel, and its share of the memory bandwidth",
        "kernels --lengths 512 8192 32768 --tokens 524288",
        f"kernels --device cpu --dtype float32 --lengths 20 {SMALL_OPERATION}",
    ),
    "sweep-forward": Part(
        "other ways to launch the kernels of the forward pass",
        f"kernels --sweep --lengths 8192 --tokens 65536 --kernels {FORWARD}",
        f"kernels --sweep --device cpu --dtype float32 --lengths 6 {SMALL_OPERATION} --kernels {FORWARD}",
    ),
    "sweep-backward": Part(
        "other ways to launch the kernels of the backward pass",
        f"kernels --sweep --lengths 8192 --tokens 65536 --kernels {BACKWARD}",
        f"kernels --sweep --device cpu --dtype float32 --lengths 6 {SMALL_OPERATION} --kernels {BACKWARD}",
    ),
    "attention": Part(
        "attention's forward pass against exact attention and the memory's limit",
        "run --device cuda --dtype bfloat16 --op nystrom-conv --lengths 512 1024 2048 4096 8192 32768 --tokens 65536",
        f"run --op nystrom-conv --lengths 16 32 {SMALL_OPERATION} {QUICK}",
        keeps_json=True,
    ),
    "backward": Part(
        "attention forward and backward",
        "run --device cuda --dtype bfloat16 --op nystrom-conv --lengths 1024 8192 32768 --tokens 65536 --backward",
        f"run --op nystrom-conv --lengths 16 32 {SMALL_OPERATION} {QUICK} --backward",
        keeps_json=True,
    ),
    "encoders": Part(
        "whole encoders at fixed lengths",
        "run --device cuda --dtype bfloat16 --model encoder --lengths 1024 4096 16384 65536 --tokens 65536 "
        "--contenders ours ours-linformer bert-sdpa modernbert-sdpa",
        f"run --model encoder --lengths 16 32 --num_layers 1 --projected_dim 4 {SMALL_OPERATION} {QUICK} "
        "--contenders ours bert-sdpa modernbert-sdpa",
        keeps_json=True,
    ),
    "encoders-variable": Part(
        "whole encoders at variable lengths, about half padding",
        "run --device cuda --dtype bfloat16 --model encoder-variable --lengths 512 8192 --tokens 65536 "
        "--contenders ours ours-linformer bert-sdpa modernbert-sdpa",
        f"run --model encoder-variable --lengths 16 32 --num_layers 1 --projected_dim 4 {SMALL_OPERATION} {QUICK} "
        "--contenders ours bert-sdpa",
        keeps_json=True,
    ),
    "decoding": Part(
        "causal models: a generated token, prefill and a training step, compared with a GPT-2",
        "decode --device cuda --dtype bfloat16",
        "decode --lengths 48 --repeats 2",
    ),
    "training": Part(
        "pretraining of a base-size model in bfloat16: tokens a second and the share of the GPU's operations",
        "train",
        "train --device cpu",
    ),
}


def describe_gpu() -> list[str]:
    """Name, driver, clock and power limit of each GPU, as printed by nvidia-smi; empty if there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    fields = "name,driver_version,clocks.max.sm,power.limit"
    done = subprocess.run([program, f"--query-gpu={fields}", "--format=csv,noheader"], capture_output=True, text=True)
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def slug(device: str) -> str:
    """The GPU's name for a file name."""
    if device != "cuda":
        return "cpu"
    return re.sub(r"[^a-z0-9]+", "-", environment.machine(device)["gpu"]["name"].lower()).strip("-")


def new_file(folder: Path, stem: str) -> Path:
    """folder/stem.md, or with a number appended if that exists, so that no result is overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (stem if number == 1 else f"{stem}-{number}" for number in range(1, sys.maxsize))
    return next(path for path in (folder / f"{name}.md" for name in names) if not path.exists())


def run_command(command: list[str], env: dict[str, str], seconds: float) -> Iterator[tuple[str | None, int | None]]:
    """(line, None) for each line that is printed, and last (None, status); the status is None if it was stopped after
    `seconds`.

    Progress, on the standard error stream, goes to that of this process.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, bufsize=1, start_new_session=True
    )
    late = threading.Event()

    def stop() -> None:
        late.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, stop)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            yield line.rstrip("\n"), None
        status = process.wait()
    finally:
        timer.cancel()
        if process.poll() is None:
            stop()
            process.wait()
    yield None, None if late.is_set() else status


def run_part(
    name: str, device: str, folder: Path, seconds: float, say: Callable[[str], None]
) -> tuple[Path, int | None]:
    """Runs a part and keeps its output; returns the file and the exit status (None if it took too long)."""
    part = PARTS[name]
    words = (part.command if device == "cuda" else part.small).split()
    now = datetime.datetime.now(datetime.timezone.utc)
    path = new_file(folder, f"{now:%Y-%m-%d}-{slug(device)}-{name}")
    if part.keeps_json:
        words += ["--output", str(path.with_suffix(".json"))]
    facts = {
        "created": now.isoformat(timespec="seconds"),
        "machine": environment.machine(device),
        "versions": environment.versions(),
        "source": environment.commit(),
    }
    env = dict(os.environ)
    if device == "cpu":
        env["TRITON_INTERPRET"] = "1"
    start = time.perf_counter()
    with path.open("w", encoding="utf-8", buffering=1) as file:

        def keep(line: str) -> None:
            say(line)
            file.write(line + "\n")

        keep(f"# {name}: {part.about}\n")
        keep(f"    python -m benchmarks {' '.join(words)}\n")
        for line in (*describe_gpu(), report.describe_machine(facts)):
            keep(line + "\n")
        status = None
        for line, found in run_command([sys.executable, "-m", "benchmarks", *words], env, seconds):
            if line is None:
                status = found
            else:
                keep(line)
        took = f"{time.perf_counter() - start:.0f} s"
        ending = f"stopped after {took}, unfinished" if status is None else f"exit status {status}, {took}"
        keep(f"\n{ending}")
    return path, status


def run_parts(names: list[str], device: str, folder: Path, seconds: float, say: Callable[[str], None]) -> int:
    """Runs parts, prints their outcomes and the state of the targets, and returns the number of parts that failed."""
    lines = [["part", "outcome", "s", "file"], ["---", "---", "---:", "---"]]
    failed = 0
    for name in names:
        start = time.perf_counter()
        path, status = run_part(name, device, folder, seconds, say)
        outcome = "unfinished" if status is None else "done" if status == 0 else f"failed ({status})"
        failed += status != 0
        lines.append([name, outcome, f"{time.perf_counter() - start:.0f}", path.name])
        say("")
    for line in lines:
        say(f"| {' | '.join(line)} |")
    say("\n" + targets_table(folder, slug(device)))
    return failed


class Target(NamedTuple):
    """about: the target. part: the part whose figures decide. measure: from the part's rows, the measured figures, or
    an empty text, and whether the target is reached; None if it may be, but not all of its lengths were measured."""

    about: str
    part: str
    measure: Callable[[list[dict]], tuple[str, bool | None]]


def milliseconds(rows: list[dict], contender: str, length: int) -> float | None:
    for row in rows:
        if row["contender"] == contender and row["setting"]["length"] == length and row["milliseconds"]:
            return row["milliseconds"]["median"]
    return None


def lengths_of(rows: list[dict]) -> list[int]:
    return sorted({row["setting"]["length"] for row in rows})


def judged(
    found: dict[int, float], lengths: Iterable[int], met: Callable[[int, float], bool], digits: int = 2
) -> tuple[str, bool | None]:
    """As `Target.measure`, from the figures by length, and what they must meet at these lengths."""
    text = ", ".join(f"{found[length]:.{digits}f} at {length:,}" for length in sorted(found))
    if not all(met(length, figure) for length, figure in found.items()):
        return text, False
    return text, True if found.keys() >= set(lengths) else None


def over_floor(lengths: Sequence[int], most: float) -> Callable[[list[dict]], tuple[str, bool | None]]:
    """The target that ours takes at most `most` times the machine's minimum at these lengths and longer ones."""

    def measure(rows: list[dict]) -> tuple[str, bool | None]:
        found = {
            row["setting"]["length"]: row["milliseconds"]["median"] / row["floor_milliseconds"]
            for row in rows
            if row["baseline"] and row["milliseconds"] and row["floor_milliseconds"]
            if row["setting"]["length"] >= min(lengths)
        }
        return judged(found, lengths, lambda _, ratio: ratio <= most)

    return measure


def against_exact(wanted: dict[int, float]) -> Callable[[list[dict]], tuple[str, bool | None]]:
    """The target that ours is `wanted[length]` times as fast as the fastest exact attention at each length."""

    def measure(rows: list[dict]) -> tuple[str, bool | None]:
        found = {}
        for length in wanted:
            exact = [milliseconds(rows, row["contender"], length) for row in rows if "exact" in row["contender"]]
            ours = milliseconds(rows, "ours", length)
            if ours and any(exact):
                found[length] = min(time for time in exact if time) / ours
        return judged(found, wanted, lambda length, ratio: ratio >= wanted[length], digits=1)

    return measure


def rate(row: dict) -> float:
    return 1e3 * row["tokens"] / row["milliseconds"]["median"]


def steady_rate(rows: list[dict]) -> tuple[str, bool | None]:
    """The tokens per second of our encoder at every length, relative to those at 1,024."""
    rates = {row["setting"]["length"]: rate(row) for row in rows if row["baseline"] and row["milliseconds"]}
    first = rates.get(1024)
    found = {} if first is None else {length: found / first for length, found in rates.items()}
    return judged(found, [1024, *LONG], lambda _, share: share >= 0.85)


def above_modernbert(rows: list[dict]) -> tuple[str, bool | None]:
    found = {}
    for length in lengths_of(rows):
        ours, theirs = (milliseconds(rows, name, length) for name in ("ours", "modernbert-sdpa"))
        if length >= LONG[0] and ours and theirs:
            found[length] = theirs / ours
    return judged(found, LONG, lambda _, ratio: ratio > 1)


LONG = (4096, 16384, 65536)
TARGETS = (
    Target(
        "forward: time over the limit of its bytes at most 2 from 8,192 tokens",
        "attention",
        over_floor((8192, 32768), 2),
    ),
    Target(
        "forward: as fast as the best exact attention from 1,024 tokens, 10 times at 8,192, 25 times at 32,768",
        "attention",
        against_exact({1024: 1, 2048: 1, 4096: 1, 8192: 10, 32768: 25}),
    ),
    Target(
        "forward and backward: time over the limit at most 2.5 from 8,192", "backward", over_floor((8192, 32768), 2.5)
    ),
    Target("encoder: tokens a second within 15 % of those at 1,024, up to 65,536", "encoders", steady_rate),
    Target("encoder: more tokens a second than ModernBERT-base from 4,096", "encoders", above_modernbert),
)


def newest_rows(folder: Path, gpu: str, part: str) -> list[dict[str, Any]]:
    """The rows of the newest result file of a part on a GPU; none if there is none."""
    pattern = re.compile(rf"\d{{4}}-\d\d-\d\d-{re.escape(gpu)}-{part}(?:-(\d+))?\.json")
    files = [(path, match) for path in folder.glob("*.json") if (match := pattern.fullmatch(path.name))]
    if not files:
        return []
    newest, _ = max(files, key=lambda file: (file[0].name[:10], int(file[1][1] or -1)))
    return json.loads(newest.read_text(encoding="utf-8"))["results"]


def targets_table(folder: Path, gpu: str) -> str:
    """The targets of the project, with the newest results on a GPU."""
    lines = ["| target | measured | |", "| --- | --- | --- |"]
    for target in TARGETS:
        rows = newest_rows(folder, gpu, target.part)
        measured, reached = target.measure(rows)
        verdict = {True: "reached", False: "missed", None: "lengths are missing" if measured else ""}[reached]
        lines.append(f"| {target.about} | {measured or 'not measured'} | {verdict} |")
    return "\n".join(lines)
