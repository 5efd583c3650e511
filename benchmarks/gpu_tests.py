# SPDX-License-Identifier: Apache-2.0
"""Runs the tests that need a GPU, and those of the kernels, which run compiled on a GPU; prints a table."""

import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[1]
COLUMNS = ("passed", "failed", "skipped")


# Arguments of pytest: the tests that need a GPU, and those of the kernels that run in the interpreter without one.
SELECTIONS = {
    "gpu": ["tests", "-m", "gpu"],
    "kernels": ["tests/kernels", "-m", "not gpu and not slow"],
}


def pytest_arguments(selection: str, device: str) -> list[str]:
    """On a CPU, for a test run, only one file: tests that need a GPU are skipped; `make test` runs the others."""
    if device == "cpu":
        return ["tests/kernels/test_gpu.py", "-m", "gpu"]
    # Compilation, on the CPU, takes the longest; more workers would fill a GPU's memory.
    return [*SELECTIONS[selection], "-n", str(min(8, os.cpu_count() or 1)), "--dist", "worksteal"]


def run(selection: str, device: str, seconds: float) -> tuple[str, int]:
    """The table, and pytest's exit status; tests that are unfinished after `seconds` are a failure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *pytest_arguments(selection, device)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=sys.stderr, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            # Like Ctrl-C: finished tests are still reported.
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            status = 1
        if not report.is_file():
            return f"pytest left no report: stopped after {seconds:.0f} s or failed to start", status or 1
        return table(ElementTree.parse(report)), status


def table(report: ElementTree.ElementTree) -> str:
    """Outcomes and seconds by file, and the first line of each failure."""
    files: dict[str, dict[str, float]] = {}
    failures = []
    for case in report.iter("testcase"):
        name = case.get("classname", "").removeprefix("tests.")
        row = files.setdefault(name, dict.fromkeys((*COLUMNS, "seconds"), 0.0))
        fault = case.find("failure") if case.find("error") is None else case.find("error")
        outcome = "failed" if fault is not None else "skipped" if case.find("skipped") is not None else "passed"
        row[outcome] += 1
        row["seconds"] += float(case.get("time", 0))
        if fault is not None:
            lines = fault.get("message", "").strip().splitlines()
            failures.append(f"- {name}::{case.get('name')}: {lines[0] if lines else 'no message'}")
    lines = ["| file | passed | failed | skipped | s |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, row in files.items():
        counts = " | ".join(f"{row[column]:.0f}" for column in COLUMNS)
        lines.append(f"| {name} | {counts} | {row['seconds']:.0f} |")
    totals = " | ".join(f"{sum(row[column] for row in files.values()):.0f}" for column in COLUMNS)
    lines.append(f"| all | {totals} | {sum(row['seconds'] for row in files.values()):.0f} |")
    return "\n".join(lines + [""] * bool(failures) + failures)
