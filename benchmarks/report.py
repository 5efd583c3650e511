# SPDX-License-Identifier: Apache-2.0
"""Result files as tables and plots."""

import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.environment import describe_commit
from benchmarks.measure import PLAINLY
from benchmarks.registry import WORKLOADS

# CPU seconds per second that other processes may use before a table warns that its figures are uncertain.
BUSY = 0.1

MARKS = {"wrong": "WRONG", "error": "error", "unavailable": "-"}


def groups(results: dict) -> dict[tuple, list[dict]]:
    """The rows of a result file by workload and conditions, in the file's order."""
    found: dict[tuple, list[dict]] = {}
    for row in results["results"]:
        setting = row["setting"]
        key = (row["workload"], setting["dtype"], setting["device"], setting["backward"])
        found.setdefault(key, []).append(row)
    return found


def title(rows: list[dict]) -> str:
    setting = rows[0]["setting"]
    sizes = {row["setting"]["length"] * row["setting"]["batch_size"] for row in rows}
    if len({row["setting"]["batch_size"] for row in rows}) > 1 and len(sizes) == 1:
        setting = setting | {"batch_size": f"of {sizes.pop()} tokens"}
    workload = WORKLOADS.get(rows[0]["workload"])
    text = workload.title.format(**setting) if workload else rows[0]["workload"]
    passes = "forward and backward" if setting["backward"] else "forward"
    return f"{text}, {setting['dtype']}, {setting['device']}, {passes}"


def grid(rows: list[dict], heading: str, cell: Callable[[dict], str | None]) -> list[str]:
    """A Markdown table with contenders as rows and lengths as columns, without contenders that have no cell."""
    lengths = sorted({row["setting"]["length"] for row in rows})
    by_place = {(row["contender"], row["setting"]["length"]): row for row in rows}
    lines = [[heading, *(f"n = {length}" for length in lengths)]]
    for name in dict.fromkeys(row["contender"] for row in rows):
        cells = []
        for length in lengths:
            row = by_place.get((name, length))
            text = cell(row) if row else None
            cells.append(text if text is not None else MARKS.get(row["status"], "") if row else "")
        if any(text not in ("", "-") for text in cells):
            lines.append([name, *cells])
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    formatted = [
        [
            text.rjust(width) if column else text.ljust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    formatted.insert(1, ["-" * (width - 1) + ":" if column else "-" * width for column, width in enumerate(widths)])
    return [f"| {' | '.join(line)} |" for line in formatted]


def time_cell(row: dict) -> str | None:
    times = row["milliseconds"]
    if times is None:
        return None
    return f"{times['median']:.3g} ({times['lower_quartile']:.3g} to {times['upper_quartile']:.3g})"


def speedup_cell(row: dict) -> str | None:
    if row["baseline"]:
        return "1" if row["status"] == "ok" else None
    return None if row["speedup"] is None else f"{row['speedup']['median']:.3g}"


def tokens_cell(row: dict) -> str | None:
    if row["milliseconds"] is None or row.get("tokens") is None:
        return None
    return f"{1e3 * row['tokens'] / row['milliseconds']['median']:,.0f}"


def floor_cell(row: dict) -> str | None:
    if row["milliseconds"] is None or row.get("floor_milliseconds") is None:
        return None
    return f"{100 * row['floor_milliseconds'] / row['milliseconds']['median']:.0f}"


def memory_cell(row: dict) -> str | None:
    memory = memory_of(row)
    return None if memory is None else f"{memory:.4g}"


def deviation_cell(row: dict) -> str | None:
    if row["check"] is None or not row["check"]["deviations"]:
        return None
    text = f"{max(row['check']['deviations'].values()):.0e}"
    timed = row["check"]["timed_deviation"]
    return text if timed is None else f"{text} (timed: {timed:.0e})"


def remarks(rows: list[dict]) -> list[str]:
    """Why contenders are missing, failed, or were not compared with the workload's reference."""
    every = {row["setting"]["length"] for row in rows}
    found: dict[str, dict[str, set[int]]] = {}
    for row in rows:
        text = None
        if row["reason"]:
            text = f"{row['status']}: {row['reason']}"
        elif row["check"] and row["check"]["judged"] != PLAINLY:
            text = f"checked {row['check']['judged']}"
        if text:
            found.setdefault(text, {}).setdefault(row["contender"], set()).add(row["setting"]["length"])
    lines = []
    busy = max((row["others_cpu"] or 0.0) for row in rows)
    if busy > BUSY:
        lines.append(f"- Other processes used up to {busy:.2g} cores: times are too long and ratios uncertain.")
    for text, places in found.items():
        names = [
            name if lengths == every else f"{name} (n = {', '.join(map(str, sorted(lengths)))})"
            for name, lengths in places.items()
        ]
        lines.append(f"- {', '.join(names)}: {text}")
    return lines


def describe_machine(results: dict) -> str:
    machine, versions, source = results["machine"], results["versions"], results["source"]
    hardware = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads"
    hardware += f", load {machine['load_at_start']} at start"
    if machine["gpu"]:
        hardware += f", {machine['gpu']['name']}"
    installed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    commit = describe_commit(source)
    limits = results.get("ceilings")
    if limits:
        hardware += f"; copies {limits['bytes_per_second'] / 1e9:.3g} GB/s"
        hardware += f", multiplies matrices at {limits['operations_per_second'] / 1e12:.3g} TFLOP/s"
    if "allocator" in machine:
        hardware += f"; memory from {machine['allocator']}"
    if "apart" in results:
        hardware += f", {'each contender in a process of its own' if results['apart'] else 'all in one process'}"
    return f"{hardware}; {installed}; commit {commit}; {results['created']}"


def table(results: dict) -> str:
    """The whole result file as text: times, ratios, memory and deviations of every workload, by length."""
    lines = [describe_machine(results)]
    for rows in groups(results).values():
        baseline = next(row["contender"] for row in rows if row["baseline"])
        blocks = (
            ("time, ms (quartiles)", time_cell),
            (f"time over that of {baseline}", speedup_cell),
            ("tokens a second, without padding", tokens_cell),
            ("peak memory, MiB", memory_cell),
            ("the machine's limit over time, %", floor_cell),
            ("largest relative deviation", deviation_cell),
        )
        lines += ["", title(rows)]
        for heading, cell in blocks:
            block = grid(rows, heading, cell)
            if len(block) > 2:
                lines += ["", *block]
        notes = remarks(rows)
        if notes:
            lines += ["", *notes]
    return "\n".join(lines)


def over(row: dict, other: dict | None, quantity: Callable[[dict], float | None]) -> float | None:
    """The ratio of a quantity of another contender to that of this one."""
    mine, theirs = quantity(row), None if other is None else quantity(other)
    return theirs / mine if mine and theirs else None


def time_of(row: dict) -> float | None:
    return row["milliseconds"] and row["milliseconds"]["median"]


def memory_of(row: dict) -> float | None:
    return row["peak_bytes"] and row["peak_bytes"] / 2**20


def nystromformer_table_1(rows: list[dict], against: str) -> list[str]:
    """Like Table 1 of arXiv:2102.03902: memory and time of every module, and how many times less than another one."""
    others = {row["setting"]["length"]: row for row in rows if row["contender"] == against}

    def cell(quantity: Callable[[dict], float | None]) -> Callable[[dict], str | None]:
        def text(row: dict) -> str | None:
            if not quantity(row):
                return None
            ratio = over(row, others.get(row["setting"]["length"]), quantity)
            return f"{quantity(row):.4g}" + (f" ({ratio:.3g}x)" if ratio else "")

        return text

    memory = grid(rows, f"memory, MiB ({against} over it)", cell(memory_of))
    time = grid(rows, f"time, ms ({against} over it)", cell(time_of))
    return ["", *memory, "", *time]


def linformer_table_3(rows: list[dict], against: str) -> list[str]:
    """Like Table 3 of arXiv:2006.04768: how many times less time and memory Linformers of each k use."""
    others = {row["setting"]["length"]: row for row in rows if row["contender"] == against}
    names = [name for name in dict.fromkeys(row["contender"] for row in rows) if name.startswith("linformer-")]
    names.sort(key=lambda name: int(name.rpartition("-")[2]))
    lines = []
    for heading, quantity in (("time", time_of), ("memory", memory_of)):
        columns = [f"k = {name.rpartition('-')[2]}" for name in names]
        lines += ["", f"| {heading} saved, n | {' | '.join(columns)} |", f"| --- |{' ---: |' * len(names)}"]
        for length in sorted(others):
            by_name = {row["contender"]: row for row in rows if row["setting"]["length"] == length}
            ratios = [over(by_name[name], others[length], quantity) if name in by_name else None for name in names]
            lines.append(f"| {length} | {' | '.join('-' if r is None else f'{r:.3g}x' for r in ratios)} |")
    return lines


LAYOUTS = {"nystromformer-table-1": nystromformer_table_1, "linformer-table-3": linformer_table_3}


def paper_table(results: dict, layout: str, against: str) -> str:
    """The modules of `self_attention.py` in the layout of a paper's table, compared with the one named `against`."""
    lines = [describe_machine(results)]
    for rows in groups(results).values():
        if rows[0]["workload"] == "self-attention":
            names = list(dict.fromkeys(row["contender"] for row in rows))
            if against not in names:
                raise SystemExit(f"--against {against}: was not measured; choose from {', '.join(names)}")
            lines += ["", title(rows), *LAYOUTS[layout](rows, against)]
    if len(lines) == 1:
        raise SystemExit("--layout: needs results of python -m benchmarks run --op self-attention")
    return "\n".join(lines)


# The measurements of `python -m benchmarks decode`.
DECODING = {
    "decode": "A generated token after n tokens of context",
    "prefill": "Prefill of n tokens",
    "train": "A training step of one row of n tokens, forward and backward",
    "projected": "Linear attention in both directions alone, without and with a projection of n tokens",
}


def decoding_table(what: str, rows: list[dict], models: str = "") -> str:
    """Rows of `python -m benchmarks decode` as text.

    Args:
        what: a key of `DECODING`.
        models: a text on the models' sizes.
    """
    lines = [
        DECODING[what] + models,
        f"{'n':>8}  {'model':<20} {'ms':>10} {'quartiles':>17} {'tokens/s':>11} {'times ours':>11}"
        + {"decode": "  cache, KiB", "train": "  peak, MiB", "projected": "  normaliser <= 0"}.get(what, ""),
    ]
    for item in rows:
        times = {name: value * 1e3 for name, value in item["seconds"].items()}
        tokens = 1 if what == "decode" else item["length"]
        line = f"{item['length']:>8,}  {item['contender']:<20} {times['median']:>10.4g} "
        line += f"{times['lower_quartile']:>8.4g} {times['upper_quartile']:>8.4g} "
        line += f"{tokens / item['seconds']['median']:>11,.0f} {item['times_ours']['median']:>11.3g}"
        if "state_bytes" in item:
            line += f"  {item['state_bytes'] / 2**10:>10,.0f}"
        if "peak_bytes" in item:
            line += f"  {item['peak_bytes'] / 2**20:>9,.0f}"
        if "not_positive" in item:
            line += f"  {item['not_positive']:>15.0%}"
        lines.append(line)
    return "\n".join(lines)


# Colors of the text, and of the lines in order, for pictures on a light or a dark page.
COLORS = {
    "light": ("#24292f", ("#00796b", "#e65100", "#3949ab", "#8e24aa", "#6d4c41", "#757575")),
    "dark": ("#d0d7de", ("#4db6ac", "#ffb74d", "#9fa8da", "#ce93d8", "#bcaaa4", "#9e9e9e")),
}


def chosen_rows(
    results: dict, workloads: Sequence[str] | None, contenders: Sequence[str] | None
) -> list[tuple[list[dict], list[str]]]:
    """The rows of each workload, and the names of its contenders in the given order; None for all.

    Raises:
        SystemExit: for a name that the file does not contain.
    """
    found = [rows for key, rows in groups(results).items() if workloads is None or key[0] in workloads]
    measured = {row["contender"] for rows in found for row in rows}
    for flag, wanted, known in (
        ("--workloads", workloads, {row["workload"] for row in results["results"]}),
        ("--contenders", contenders, measured),
    ):
        for name in set(wanted or ()) - known:
            raise SystemExit(f"{flag} {name}: was not measured; choose from {', '.join(sorted(known))}")
    chosen = []
    for rows in found:
        names = list(dict.fromkeys(row["contender"] for row in rows))
        chosen.append((rows, names if contenders is None else [name for name in contenders if name in names]))
    return chosen


def require_plotting(path: str, flag: str) -> None:
    """Ends the program, before anything is measured, if a picture cannot be written: without matplotlib, or in a
    format that it does not know.

    flag: the one that gives the path.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise SystemExit("plotting needs matplotlib: pip install matplotlib") from error
    if os.path.splitext(path)[1].lstrip(".").lower() not in FigureCanvasBase.get_supported_filetypes():
        raise SystemExit(f"{flag} {path}: is not the name of a picture; let it end in .png, .svg or .pdf")


def plot(
    results: dict,
    path: str,
    *,
    workloads: Sequence[str] | None = None,
    contenders: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    color_scheme: str | None = None,
) -> None:
    """Plots time and peak memory over length, both axes logarithmic, with one row of panels for each workload.

    Args:
        path: image file to write; its suffix chooses the format (png, svg, pdf).
        workloads, contenders: those to draw, in this order; None for all.
        labels: labels of the contenders, in their order; None for their names.
        color_scheme: "light" or "dark", for a picture on a page of that color, without a background and without title
            and machine, which the page contains; None for a white background, with both.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    chosen = chosen_rows(results, workloads, contenders)
    called = dict(zip(contenders or (), labels or contenders or (), strict=True))
    settings: dict = {"svg.hashsalt": "nystrom_models"}  # the same results give the same file
    if color_scheme is not None:
        text, lines = COLORS[color_scheme]
        names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
        settings |= dict.fromkeys(names, text) | {"axes.prop_cycle": matplotlib.cycler(color=lines)}
        settings |= {"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with matplotlib.rc_context(settings):
        width, height = (11, 4) if color_scheme is None else (8, 3.2)
        figure, panels = pyplot.subplots(len(chosen), 2, figsize=(width, height * len(chosen)), squeeze=False)
        for (rows, names), pair in zip(chosen, panels, strict=True):
            draw_panels(rows, names, called, pair)
        if color_scheme is None:
            for (rows, _), pair in zip(chosen, panels, strict=True):
                pair[0].set_title(title(rows), fontsize="small", loc="left")
                pair[0].legend(fontsize="small")
            figure.text(0.01, 0.005, textwrap.fill(describe_machine(results), 220), fontsize=5)
        else:
            figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="upper center", ncols=2)
        figure.tight_layout(rect=(0, 0.03, 1, 1) if color_scheme is None else (0, 0, 1, 0.86))
        metadata = {"Date": None} if path.endswith(".svg") else None
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        figure.savefig(path, dpi=110, transparent=color_scheme is not None, metadata=metadata)
        pyplot.close(figure)


def draw_panels(rows: list[dict], names: Sequence[str], called: dict[str, str], panels: Any) -> None:
    """Lines of the contenders in two panels: time on the left, memory on the right."""
    lengths = sorted({row["setting"]["length"] for row in rows})
    quantities = (("time, ms", time_of), ("peak memory, MiB", memory_of))
    for panel, (label, value) in zip(panels, quantities, strict=True):
        for index, name in enumerate(names):
            mine = [row for row in rows if row["contender"] == name and value(row)]
            mine.sort(key=lambda row: row["setting"]["length"])
            if mine:
                panel.plot(
                    [row["setting"]["length"] for row in mine],
                    [value(row) for row in mine],
                    marker="o",
                    markersize=3,
                    linewidth=2.4 if mine[0]["baseline"] else 1.2,
                    color=f"C{index}",
                    label=called.get(name, name),
                )
        panel.set(xscale="log", yscale="log", xlabel="length n", ylabel=label)
        panel.set_xticks(lengths, [str(length) for length in lengths])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
