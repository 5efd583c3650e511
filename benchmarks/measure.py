# SPDX-License-Identifier: Apache-2.0
"""Checks every contender against its reference, then times those that passed, alternating between them."""

import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from benchmarks.registry import Contender, Inputs, Setting, Workload
from benchmarks.runners import (
    AnyRunner,
    RemoteRunner,
    Runner,
    cpu_seconds,
    outputs_and_gradients,
    prepare_inputs,
    reason,
    seconds_a_call,
)
from benchmarks.runners import (
    gradient_like as gradient_like,  # for other measurements
)

# Largest deviation from the float64 result on the same (rounded) inputs, relative to the largest element.
# There are several roundings (softmax, pseudo-inverse, two products), each of about the dtype's epsilon.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
# A gradient is the result of twice as many operations as the output.
GRADIENT_FACTOR = 4

PLAINLY = "against the workload's reference in float64"

# A sample repeats a call until it takes about this long: single short calls would measure the dispatcher's jitter.
SAMPLE_SECONDS = 0.02
MAX_CALLS_A_SAMPLE = 50
MIN_SAMPLES = 3
# Calls shorter than this are run once without timing before each sample.
WARMED_SECONDS = 1.0


def in_float64(inputs: Inputs) -> Inputs:
    return {
        name: tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
        for name, tensor in inputs.items()
    }


def deviation(result: Tensor, reference: Tensor) -> float:
    """Largest absolute difference, relative to the reference's largest element; infinite for NaN or another shape."""
    if result.shape != reference.shape or not torch.isfinite(result).all():
        return math.inf
    scale = reference.abs().max().item() or 1.0
    return (result.double() - reference).abs().max().item() / scale


class References:
    """References of one setting in float64, each computed only once for all contenders that share it."""

    def __init__(self, setting: Setting, inputs: Inputs):
        self.setting, self.inputs = setting, in_float64(inputs)
        self.computed: dict[Callable, dict[str, Tensor]] = {}

    def __call__(self, function: Callable[[Setting, Inputs], Tensor]) -> dict[str, Tensor]:
        if function not in self.computed:
            self.computed[function] = outputs_and_gradients(
                lambda: function(self.setting, self.inputs), self.inputs, self.setting
            )
        return self.computed[function]


def check(workload: Workload, contender: Contender, runner: AnyRunner, references: References) -> dict:
    """Compares a contender with its reference.

    Returns:
        A dict of `passed`, `judged` (in words), `deviations` and `tolerances` (by name of the compared tensor) and
        `timed_deviation`, the deviation of the timed function if another one had to be compared, else None.
    """
    setting = references.setting
    timed = runner.outputs()
    function = contender.reference or workload.reference
    if function is None:
        finite = all(torch.isfinite(tensor).all().item() for tensor in timed.values())
        judged = contender.judged or "output is finite"
        return {"passed": finite, "judged": judged, "deviations": {}, "tolerances": {}, "timed_deviation": None}
    expected = references(function)
    compared, timed_deviation = runner.verified(), None
    if compared is None:
        compared = timed
    else:
        timed_deviation = deviation(timed["output"], expected["output"])
    names = [name for name in compared if name in expected]
    deviations = {name: deviation(compared[name], expected[name]) for name in names}
    # Each layer of a model adds rounding errors, and amplifies those of the layers before it.
    layers = (workload.num_layers or setting.num_layers) if workload.kind == "model" else 1
    tolerance = TOLERANCES[setting.dtype] * layers
    tolerances = {name: tolerance * (1 if name == "output" else GRADIENT_FACTOR) for name in names}
    return {
        "passed": all(deviations[name] <= tolerances[name] for name in names)
        and (timed_deviation is None or math.isfinite(timed_deviation)),
        "judged": contender.judged or PLAINLY,
        "deviations": deviations,
        "tolerances": tolerances,
        "timed_deviation": timed_deviation,
    }


def interleave(
    calls: dict[str, Callable[[], object]], *, repeats: int, max_seconds: float, device: str, seed: int = 0
) -> dict[str, list[float | None]]:
    """Seconds per call of functions of this process, measured by [`take_turns`]."""
    timers = {name: partial(seconds_a_call, call, device=device) for name, call in calls.items()}
    return take_turns(timers, repeats=repeats, max_seconds=max_seconds, seed=seed)


def take_turns(
    timers: dict[str, Callable[[int], float]], *, repeats: int, max_seconds: float, seed: int = 0
) -> dict[str, list[float | None]]:
    """Seconds per call of every contender, measured in rounds, so that a drift of the machine affects all alike.

    A timer makes the given number of calls, and returns their mean time. The order changes from round to round. A
    contender whose samples have taken `max_seconds` skips the later rounds (None there), but not before it has 3
    samples.

    Returns:
        For each name a list with one entry per round.
    """
    estimates = {}
    for name, timer in timers.items():
        timer(1)
        estimates[name] = timer(1)
    sizes = {
        name: min(MAX_CALLS_A_SAMPLE, max(1, math.ceil(SAMPLE_SECONDS / seconds)))
        for name, seconds in estimates.items()
    }
    samples: dict[str, list[float | None]] = {name: [] for name in timers}
    spent = dict.fromkeys(timers, 0.0)
    shuffler = random.Random(seed)
    order = list(timers)
    for done in range(repeats):
        shuffler.shuffle(order)
        for name in order:
            if done >= MIN_SAMPLES and spent[name] >= max_seconds:
                samples[name].append(None)
                continue
            if estimates[name] < WARMED_SECONDS:
                timers[name](1)  # the previous contender has replaced the caches and returned memory to the system
            seconds = timers[name](sizes[name])
            samples[name].append(seconds)
            spent[name] += seconds * sizes[name]
    return samples


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, quartiles, minimum, maximum and number of the values."""
    ordered = sorted(values)
    quartiles = statistics.quantiles(ordered, n=4, method="inclusive") if len(ordered) > 1 else [ordered[0]] * 3
    return {
        "median": statistics.median(ordered),
        "lower_quartile": quartiles[0],
        "upper_quartile": quartiles[2],
        "min": ordered[0],
        "max": ordered[-1],
        "samples": len(ordered),
    }


def cpu_seconds_of_others(runners: Iterable[AnyRunner]) -> float | None:
    """CPU time that all processes except this one and the contenders' have used so far, over all cores; None if the
    system does not provide it."""
    try:
        with open("/proc/stat", encoding="utf-8") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    all_seconds = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return all_seconds - cpu_seconds() - sum(runner.cpu_seconds() for runner in runners)


def measure(
    workload: Workload,
    setting: Setting,
    *,
    contenders: Iterable[str] | None = None,
    repeats: int = 15,
    max_seconds: float = 20.0,
    memory: bool = True,
    ceilings: dict[str, float] | None = None,
    apart: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> list[dict]:
    """Checks and times the contenders of a workload in one setting.

    Args:
        contenders: names; all of the workload by default. The baseline is always among them.
        repeats: rounds of timing.
        max_seconds: time after which a slow contender skips further rounds.
        memory: also measure peak memory.
        ceilings: `environment.ceilings`, for the minimum time of the workload on this machine.
        apart: each contender runs in a process of its own, so that memory left by one does not slow another down; the
            workload must be a registered one.
        report: called with a line of progress.

    Returns:
        One result for each contender. `status` is "ok", "wrong" (its output differs from its reference: it is not
        timed), "unavailable" or "error", the last three with a `reason`. `speedup`, the contender's time relative to
        the baseline's (spread of the ratios of times from the same round), exists only if both are "ok". `tokens` is
        the number of tokens in a call, without padding, if the workload counts them. `floor_milliseconds`, for ours if
        the workload knows it, is the time that the machine needs to move the necessary bytes or to do the necessary
        operations, whichever is longer. `others_cpu` is the CPU time that other processes used during the timing, per
        second: 0 on a quiet machine.
    """
    names = list(workload.contenders) if contenders is None else list(dict.fromkeys([workload.baseline, *contenders]))
    inputs = prepare_inputs(workload, setting)
    references = References(setting, inputs)
    tokens = None if workload.tokens is None else workload.tokens(inputs)
    results = {}
    for name in names:
        contender = workload.contenders[name]
        bounds = contender.floor or workload.floor
        floor = None
        if ceilings is not None and contender.ours and bounds is not None:
            floor = floor_milliseconds(bounds(setting, inputs), ceilings)
        results[name] = empty_result(workload, contender, tokens, floor)
    runners: dict[str, AnyRunner] = {}
    try:
        for name, result in results.items():
            report(f"{workload.name} n={setting.length}: checking {name}")
            runner = prepare(workload, workload.contenders[name], references, result, memory, apart)
            if runner is not None:
                runners[name] = runner
        references.computed.clear()
        report(f"{workload.name} n={setting.length}: timing {', '.join(runners)}")
        started, others = time.perf_counter(), cpu_seconds_of_others(runners.values())
        timers = {name: runner.seconds for name, runner in runners.items()}
        samples = take_turns(timers, repeats=repeats, max_seconds=max_seconds, seed=setting.seed)
        if others is not None:
            others = max(0.0, cpu_seconds_of_others(runners.values()) - others) / (time.perf_counter() - started)
    finally:
        for runner in runners.values():
            runner.close()
    for name, seconds in samples.items():
        results[name]["others_cpu"] = others
        results[name]["milliseconds"] = spread(1e3 * value for value in seconds if value is not None)
        if workload.baseline in samples and name != workload.baseline:
            rounds = zip(seconds, samples[workload.baseline], strict=True)
            results[name]["speedup"] = spread(
                theirs / ours for theirs, ours in rounds if theirs is not None and ours is not None
            )
    return list(results.values())


def floor_milliseconds(bounds: tuple[int, int] | None, ceilings: dict[str, float]) -> float | None:
    """The time of the bytes and operations of a `Workload.floor` at the machine's best rates."""
    if bounds is None:
        return None
    moved, operations = bounds
    return 1e3 * max(moved / ceilings["bytes_per_second"], operations / ceilings["operations_per_second"])


def empty_result(workload: Workload, contender: Contender, tokens: int | None, floor: float | None) -> dict:
    """The result of a contender before it runs."""
    return {
        "workload": workload.name,
        "contender": contender.name,
        "ours": contender.ours,
        "baseline": contender.name == workload.baseline,
        "status": "ok",
        "reason": None,
        "check": None,
        "milliseconds": None,
        "speedup": None,
        "peak_bytes": None,
        "tokens": tokens,
        "others_cpu": None,
        "floor_milliseconds": floor,
    }


def prepare(
    workload: Workload, contender: Contender, references: References, result: dict, memory: bool, apart: bool
) -> AnyRunner | None:
    """Builds and checks a contender, and writes the outcome to `result`; returns None if it is not to be timed."""
    why = contender.unavailable(references.setting)
    if why is not None:
        result.update(status="unavailable", reason=why)
        return None
    runner: AnyRunner | None = None
    try:
        runner = (RemoteRunner if apart else Runner)(workload, contender, references.setting)
        result["check"] = check(workload, contender, runner, references)
        if result["check"]["passed"]:
            if memory:
                result["peak_bytes"] = runner.peak_bytes()
            return runner
        result.update(status="wrong", reason=describe_failure(result["check"]))
    except Exception as error:
        if contender.ours:
            raise
        # A contender that cannot run must not end the measurement of the others.
        result.update(status="error", reason=reason(error))
    if runner is not None:
        runner.close()
    return None


def describe_failure(check: dict) -> str:
    exceeded = [
        f"{name} deviates by {value:.1e} of its largest element, {check['tolerances'][name]:.0e} allowed"
        for name, value in check["deviations"].items()
        if value > check["tolerances"][name]
    ]
    return "; ".join(exceeded) or "output is not finite"
