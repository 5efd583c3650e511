# SPDX-License-Identifier: Apache-2.0
"""Command line: `python -m benchmarks COMMAND`, and `--help` for the commands."""

import argparse
import dataclasses
import datetime
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import (  # noqa: F401  (they register)
    any_encoder,
    architecture_table,
    capabilities,
    collators,
    compiled_kernels,
    decoding,
    environment,
    gpu,
    gpu_tests,
    kernels,
    linear,
    linformer,
    long_range_arena,
    models,
    nystrom,
    report,
    sanitize,
    self_attention,
    training,
)
from benchmarks.measure import measure
from benchmarks.registry import WORKLOADS, Setting

SCHEMA_VERSION = 1
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SIZES = [field for field in dataclasses.fields(Setting) if field.type is int and field.name != "length"]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure attention side by side.")
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="check and time workloads, print a table, store the results")
    run.add_argument("--op", nargs="*", help="operations to measure (see list); without names: all of them")
    run.add_argument("--model", nargs="*", help="whole models to measure (see list); without names: all of them")
    run.add_argument("--contenders", nargs="+", help="measure only these and the baseline")
    run.add_argument("--backward", action="store_true", help="time forward and backward together")
    run.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    run.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's)")
    run.add_argument("--repeats", type=int, default=15, help="rounds of timing (default: 15)")
    run.add_argument(
        "--max_seconds",
        type=float,
        default=20.0,
        help="seconds after which a slow contender skips further rounds, but not before three (default: 20)",
    )
    run.add_argument("--no_memory", action="store_true", help="do not measure peak memory")
    run.add_argument(
        "--one_process",
        action="store_true",
        help="run all contenders in this process: it starts faster, but the memory that one leaves slows others down",
    )
    run.add_argument("--output", help="JSON file for the results")
    run.add_argument("--plot", help="image file for a plot of the results (needs matplotlib)")
    add_sizes(run)

    alone = commands.add_parser("kernels", help="time each Triton kernel (GPU), and ways to launch it")
    alone.add_argument("--sweep", action="store_true", help="also find the fastest way to launch each (minutes)")
    alone.add_argument(
        "--compiled",
        action="store_true",
        help="instead print the resources of the compiled kernels, without a GPU: registers, shared memory, spills, "
        "barriers (half an hour)",
    )
    alone.add_argument(
        "--capabilities",
        type=int,
        nargs="+",
        choices=compiled_kernels.SHARED_MEMORY,
        default=list(compiled_kernels.SHARED_MEMORY),
        help="with --compiled: compute capabilities times ten (default: all)",
    )
    cases = {case.name: case for case in compiled_kernels.CASES}
    alone.add_argument(
        "--cases",
        nargs="+",
        choices=cases,
        default=list(cases),
        help="with --compiled: dtypes and sizes (default: all)",
    )
    alone.add_argument(
        "--options",
        nargs="+",
        choices=compiled_kernels.OPTIONS,
        default=list(compiled_kernels.OPTIONS),
        help="with --compiled: with or without mask and dropout (default: both)",
    )
    alone.add_argument("--kernels", nargs="+", metavar="NAME", help="time only these, by their names in the table")
    alone.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu, with TRITON_INTERPRET=1: a test run, whose times mean nothing (default: cuda)",
    )
    add_sizes(alone)
    alone.set_defaults(dtype="bfloat16")

    batches = commands.add_parser("collators", help="time the making of batches for pretraining (CPU, under a minute)")
    batches.add_argument("--batch_size", type=int, default=32, help="rows (default: 32)")
    batches.add_argument("--lengths", type=int, nargs="+", default=[128, 512], help="tokens of a row")

    causal = commands.add_parser("decode", help="time causal models: a generated token, prefill, a training step")
    causal.add_argument("--what", nargs="+", choices=decoding.MEASURES, default=list(decoding.MEASURES))
    causal.add_argument("--lengths", type=int, nargs="+", help="numbers of tokens (default: those of each measure)")
    causal.add_argument("--repeats", type=int, default=9, help="rounds of timing (default: 9)")
    causal.add_argument("--max_seconds", type=float, default=20.0, help="as for run (default: 20)")
    causal.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    causal.add_argument("--dtype", choices=DTYPES, default="float32")
    causal.add_argument("--threads", type=int, help="CPU threads (default: PyTorch's)")
    causal.add_argument("--output", help="JSON file for the results")

    commands.add_parser("list", help="list workloads and contenders")
    table = commands.add_parser("table", help="print a result file as tables")
    table.add_argument("file")
    table.add_argument(
        "--layout", choices=report.LAYOUTS, help="print --op self-attention like the table of this paper"
    )
    table.add_argument(
        "--against", default="exact-softmax", help="contender that a layout compares with (default: exact-softmax)"
    )
    plot = commands.add_parser("plot", help="plot a result file (needs matplotlib)")
    plot.add_argument("file")
    plot.add_argument("--output", help="image file (default: the result file's name with .png)")
    plot.add_argument("--workloads", nargs="+", metavar="NAME", help="draw only these")
    plot.add_argument("--contenders", nargs="+", metavar="NAME", help="draw only these, in this order")
    plot.add_argument("--labels", nargs="+", metavar="TEXT", help="labels of the --contenders, in their order")
    plot.add_argument(
        "--color_schemes",
        nargs="+",
        choices=report.COLORS,
        help="one picture without a background for each color of the page: picture-light.svg, picture-dark.svg",
    )
    commands.add_parser(
        "architectures",
        help='which encoders of Transformers work with attn_implementation="nystrom" (CPU, under a minute)',
    )
    abilities = commands.add_parser("capabilities", help="test what each implementation can do (CPU, under a minute)")
    abilities.add_argument("--markdown", action="store_true", help="print the table as Markdown")

    on_gpu = commands.add_parser("gpu", help="all measurements that need a GPU, kept in benchmarks/results/")
    on_gpu.add_argument("--part", nargs="+", choices=gpu.PARTS, default=list(gpu.PARTS), help="default: all, in order")
    on_gpu.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a test run with small sizes (default: cuda)"
    )
    on_gpu.add_argument(
        "--results", help=f"folder of the results (default: {gpu.RESULTS['cuda']}; {gpu.RESULTS['cpu']} on a CPU)"
    )
    on_gpu.add_argument(
        "--seconds",
        type=float,
        default=gpu.PART_SECONDS,
        help=f"time after which a part is stopped (default: {gpu.PART_SECONDS})",
    )
    tests = commands.add_parser("tests", help="run the tests for a GPU, and print a table")
    tests.add_argument("--select", choices=gpu_tests.SELECTIONS, default="gpu", help="which tests (default: gpu)")
    sanitized = commands.add_parser("sanitize", help="run the kernels under compute-sanitizer, and print a table")
    sanitized.add_argument(
        "--cases", nargs="+", choices=cases, default=list(cases), help="dtypes and sizes (default: all)"
    )
    trained = commands.add_parser("train", help="a short pretraining run: tokens per second and MFU")
    for command in (tests, sanitized, trained):
        command.add_argument(
            "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a test run (default: cuda)"
        )
    for command in (tests, sanitized):
        command.add_argument(
            "--seconds",
            type=float,
            default=gpu.PART_SECONDS,
            help=f"time after which it stops and reports what is done (default: {gpu.PART_SECONDS})",
        )
    return parser


def add_sizes(command: argparse.ArgumentParser) -> None:
    command.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192], help="numbers of tokens n")
    command.add_argument("--dtype", choices=DTYPES, default="float32")
    command.add_argument(
        "--tokens", type=int, help="tokens per batch, which sets the number of rows (default: --batch_size rows)"
    )
    for field in SIZES:
        command.add_argument(f"--{field.name}", type=int, default=field.default, help=f"default: {field.default}")


def settings(arguments: argparse.Namespace, **conditions: bool) -> Iterator[Setting]:
    """One setting for each length."""
    sizes = {field.name: getattr(arguments, field.name) for field in SIZES}
    for length in arguments.lengths:
        if arguments.tokens:
            sizes["batch_size"] = max(1, arguments.tokens // length)
        yield Setting(length=length, dtype=DTYPES[arguments.dtype], device=arguments.device, **conditions, **sizes)


def selected_workloads(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list:
    """The workloads that --op and --model name; all operations when neither is given."""
    if arguments.op is None and arguments.model is None:
        arguments.op = []
    chosen = []
    for kind, names in (("op", arguments.op), ("model", arguments.model)):
        known = [name for name, workload in WORKLOADS.items() if workload.kind == kind]
        if names is None:
            continue
        for name in names or known:
            if name not in known:
                parser.error(f"argument --{kind}: unknown name {name!r}; choose from {', '.join(known)}")
            chosen.append(WORKLOADS[name])
    if arguments.contenders:
        for name in arguments.contenders:
            if not any(name in workload.contenders for workload in chosen):
                known = sorted({contender for workload in chosen for contender in workload.contenders})
                parser.error(f"argument --contenders: unknown name {name!r}; choose from {', '.join(known)}")
    return chosen


def require_positive(parser: argparse.ArgumentParser, arguments: argparse.Namespace, *names: str) -> None:
    """Ends the program if a number, or one of several, is below 1. None is let through."""
    for name in names:
        given = getattr(arguments, name)
        if given is not None and min(given if isinstance(given, list) else [given]) < 1:
            parser.error(f"argument --{name}: must be at least 1")


def check_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.command == "run":
        require_positive(parser, arguments, "repeats", "threads")
        if arguments.plot:
            report.require_plotting(arguments.plot, "--plot")
    sizes = ("batch_size", "num_heads", "head_dim", "num_landmarks", "projected_dim", "num_layers")
    require_positive(parser, arguments, *sizes, "tokens", "lengths")
    if arguments.conv_kernel_size % 2 == 0 or arguments.conv_kernel_size < 1:
        parser.error(f"argument --conv_kernel_size: must be odd, such as {max(arguments.conv_kernel_size, 0) + 1}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: PyTorch finds no CUDA device here; use cpu")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def circumstances(arguments: argparse.Namespace) -> dict:
    """The conditions that results depend on, besides the code."""
    return {
        "created": now(),
        "machine": environment.machine(arguments.device),
        "versions": environment.versions(),
        "source": environment.commit(),
        "ceilings": environment.ceilings(arguments.device, DTYPES[arguments.dtype]),
    }


def heading(arguments: argparse.Namespace, argv: list[str]) -> dict:
    """What a result file has besides the results."""
    command = shlex.join(["python", "-m", "benchmarks", *argv])
    return {"schema_version": SCHEMA_VERSION, "command": command, **circumstances(arguments)}


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def describe_setting(setting: Setting) -> dict:
    return {**dataclasses.asdict(setting), "dtype": str(setting.dtype).removeprefix("torch.")}


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace, argv: list[str]) -> int:
    check_arguments(parser, arguments)
    workloads = selected_workloads(parser, arguments)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results = {**heading(arguments, argv), "apart": not arguments.one_process, "results": []}
    for workload in workloads:
        chosen = arguments.contenders and [name for name in arguments.contenders if name in workload.contenders]
        for setting in settings(arguments, backward=arguments.backward):
            rows = measure(
                workload,
                setting,
                contenders=chosen,
                repeats=arguments.repeats,
                max_seconds=arguments.max_seconds,
                memory=not arguments.no_memory,
                ceilings=results["ceilings"],
                apart=results["apart"],
                report=progress,
            )
            results["results"] += [{**row, "setting": describe_setting(setting)} for row in rows]
            if arguments.output:  # after every length, so that an interrupted run keeps its results
                write(results, arguments.output)
    print(report.table(results))
    if arguments.plot:
        report.plot(results, arguments.plot)
    wrong = [row for row in results["results"] if row["status"] == "wrong" and row["ours"]]
    return 1 if wrong else 0


def compile_kernels(arguments: argparse.Namespace) -> int:
    """Prints the table; returns 1 if something does not fit."""
    versions = environment.versions()
    commit = environment.commit()
    print(f"Triton {versions['triton']}, commit {commit['commit']}" + ", modified" * bool(commit["modified"]))
    print("\nregisters per thread / KiB of shared memory / spilled bytes per thread / barriers\n")
    cases = [case for case in compiled_kernels.CASES if case.name in arguments.cases]
    rows = compiled_kernels.measure(arguments.capabilities, cases, arguments.options, progress)
    print(compiled_kernels.table(arguments.capabilities, rows))
    faults = compiled_kernels.faults(rows)
    for fault in faults:
        print(f"\n{fault}")
    return 1 if faults else 0


def require_device(parser: argparse.ArgumentParser, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("this is for a GPU, and PyTorch finds no CUDA device here; --device cpu makes a test run")


def time_kernels(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    require_device(parser, arguments.device)
    if arguments.device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("argument --device: on a CPU the kernels are interpreted: set TRITON_INTERPRET=1")
    check_arguments(parser, arguments)
    found = circumstances(arguments)
    print(report.describe_machine(found))
    for setting in settings(arguments):
        print(f"\nn = {setting.length}, batch {setting.batch_size}, {arguments.dtype}\n")
        for line in kernels.table(setting, found["ceilings"], arguments.sweep, progress, arguments.kernels):
            print(line, flush=True)
    return 0


def time_decoding(arguments: argparse.Namespace, argv: list[str]) -> int:
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    results = {**heading(arguments, argv), "results": {}}
    print(report.describe_machine(results))
    decoding.check(arguments.device)
    place = decoding.Place(arguments.device, DTYPES[arguments.dtype])
    for what in arguments.what:
        rows = decoding.measure(what, arguments.lengths, arguments.repeats, arguments.max_seconds, progress, place)
        results["results"][what] = rows
        print(f"\n{report.decoding_table(what, rows, decoding.SIZES)}")
        if arguments.output:
            write(results, arguments.output)
    return 0


def write(results: dict, path: str) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(results, file, indent=1)
        file.write("\n")


def read(path: str) -> dict:
    try:
        with open(path, encoding="utf-8") as file:
            results = json.load(file)
    except (OSError, ValueError) as error:
        raise SystemExit(
            f"{path} is not a file that `python -m benchmarks` wrote with `run --output` or `decode --output`: {error}"
        ) from error
    if not isinstance(results, dict) or results.get("schema_version") != SCHEMA_VERSION:
        raise SystemExit(f"{path}: not a result file of schema version {SCHEMA_VERSION}; run the benchmark again")
    return results


def is_decoding(results: dict) -> bool:
    """Whether a result file is of `decode`, whose rows are kept by measure."""
    return isinstance(results["results"], dict)


def show_table(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    results = read(arguments.file)
    if not is_decoding(results):
        layout = arguments.layout
        print(report.paper_table(results, layout, arguments.against) if layout else report.table(results))
        return
    if arguments.layout:
        parser.error(f"argument --layout: {arguments.file} is of `decode`; leave it out")
    print(report.describe_machine(results))
    for what, rows in results["results"].items():
        print(f"\n{report.decoding_table(what, rows, decoding.SIZES)}")


def list_workloads() -> None:
    for workload in WORKLOADS.values():
        print(f"--{workload.kind} {workload.name}: {workload.title.format(**describe_setting(Setting(length=0)))}")
        for contender in workload.contenders.values():
            remarks = [reason for reason in (contender.unavailable(),) if reason]
            if contender.name == workload.baseline:
                remarks.append("baseline")
            print(f"    {contender.name}" + (f" ({', '.join(remarks)})" if remarks else ""))


def show_capabilities(markdown: bool) -> int:
    """Prints the table; returns 1 if ours fail a check."""
    answers = capabilities.measure(capabilities.CONTENDERS, progress)
    print(capabilities.table(answers, markdown))
    return 1 if capabilities.failures(answers) else 0


def plot(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """One picture, or one for each color scheme."""
    if arguments.labels and len(arguments.labels) != len(arguments.contenders or ()):
        parser.error("argument --labels: give one for each of --contenders")
    results, path = read(arguments.file), arguments.output or os.path.splitext(arguments.file)[0] + ".png"
    if is_decoding(results):
        parser.error(f"argument file: {arguments.file} is of `decode`, which only `table` shows")
    report.require_plotting(path, "--output")
    stem, ending = os.path.splitext(path)
    for scheme in arguments.color_schemes or [None]:
        picture = path if scheme is None else f"{stem}-{scheme}{ending}"
        report.plot(
            results,
            picture,
            workloads=arguments.workloads,
            contenders=arguments.contenders,
            labels=arguments.labels,
            color_scheme=scheme,
        )
        print(f"Drawn: {picture}")


def show_architectures() -> int:
    """Prints the table as Markdown; returns 1 if something is wrong with an architecture that runs."""
    versions, commit = environment.versions(), environment.describe_commit(environment.commit())
    print("    python -m benchmarks architectures\n")
    print(f"transformers {versions['transformers']}, torch {versions['torch']}; commit {commit}; {now()}\n")
    answers = architecture_table.measure(report=progress)
    print(architecture_table.table(answers))
    return 1 if architecture_table.failures(answers) else 0


def on_a_gpu(arguments: argparse.Namespace) -> int:
    """Runs the parts that need a GPU; returns 0 if nothing failed."""
    if arguments.command == "gpu":
        folder = Path(arguments.results or gpu.RESULTS[arguments.device])
        return 1 if gpu.run_parts(arguments.part, arguments.device, folder, arguments.seconds, print) else 0
    if arguments.command == "tests":
        text, status = gpu_tests.run(arguments.select, arguments.device, arguments.seconds)
    elif arguments.command == "sanitize":
        chosen = [case for case in compiled_kernels.CASES if case.name in arguments.cases]
        faults = sanitize.run(chosen, arguments.device, arguments.seconds, lambda line: print(line, flush=True))
        return 1 if faults else 0
    else:
        text, status = training.table(arguments.device, progress), 0
    print(text)
    return 1 if status else 0


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command == "run":
        return run(parser, arguments, argv)
    if arguments.command == "kernels" and arguments.compiled:
        return compile_kernels(arguments)
    if arguments.command == "kernels":
        return time_kernels(parser, arguments)
    if arguments.command in ("gpu", "tests", "sanitize", "train"):
        require_device(parser, arguments.device)
        return on_a_gpu(arguments)
    if arguments.command == "decode":
        require_device(parser, arguments.device)
        require_positive(parser, arguments, "repeats", "lengths", "threads")
        return time_decoding(arguments, argv)
    if arguments.command == "collators":
        require_positive(parser, arguments, "batch_size", "lengths")
        for length in arguments.lengths:
            print(collators.table(arguments.batch_size, length), end="\n\n")
    elif arguments.command == "list":
        list_workloads()
    elif arguments.command == "table":
        show_table(parser, arguments)
    elif arguments.command == "architectures":
        return show_architectures()
    elif arguments.command == "capabilities":
        return show_capabilities(arguments.markdown)
    else:
        plot(parser, arguments)
    return 0
