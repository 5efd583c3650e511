# SPDX-License-Identifier: Apache-2.0
"""Checks every contender against its reference, then times those that passed, in turn, in one process."""

import json
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.registry import Contender, Inputs, Prepared, Setting, Workload

# Largest deviation from the float64 result on the same (rounded) inputs, relative to the largest element.
# Several roundings follow each other (softmax, pseudo-inverse, two products), each of about the dtype's epsilon.
TOLERANCES = {
    torch.float64: 1e-10,
    torch.float32: 2e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
# A gradient passes twice as many operations as the output.
GRADIENT_FACTOR = 4

PLAINLY = "against the workload's reference in float64"

# A sample repeats a call until it lasts about this long: single short calls would measure the dispatcher's jitter.
SAMPLE_SECONDS = 0.02
MAX_CALLS_A_SAMPLE = 50
MIN_SAMPLES = 3
# Calls shorter than this run once, not timed, before each sample.
WARMED_SECONDS = 1.0


def prepare_inputs(workload: Workload, setting: Setting) -> Inputs:
    generator = torch.Generator().manual_seed(setting.seed)
    inputs = {}
    for name, tensor in workload.inputs(setting, generator).items():
        if tensor.is_floating_point():
            tensor = tensor.to(setting.device, setting.dtype).requires_grad_(setting.backward)
        else:
            tensor = tensor.to(setting.device)
        inputs[name] = tensor
    return inputs


def in_float64(inputs: Inputs) -> Inputs:
    return {
        name: tensor.detach().double().requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else tensor
        for name, tensor in inputs.items()
    }


def gradient_like(output: Tensor, seed: int) -> Tensor:
    """The incoming gradient of the backward pass: the same for every contender and for its reference."""
    generator = torch.Generator().manual_seed(seed + 1)
    return torch.randn(output.shape, generator=generator).to(output.device, output.dtype)


def outputs_and_gradients(call: Callable[[], Tensor], inputs: Inputs, setting: Setting) -> dict[str, Tensor]:
    """The output, and with `setting.backward` the gradient of each input that the call depends on."""
    if not setting.backward:
        with torch.no_grad():
            return {"output": call()}
    output = call()
    leaves = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad}
    if not leaves:
        return {"output": output.detach()}
    gradients = torch.autograd.grad(
        output, list(leaves.values()), gradient_like(output, setting.seed), allow_unused=True
    )
    found = {f"gradient of {name}": grad for name, grad in zip(leaves, gradients, strict=True) if grad is not None}
    return {"output": output.detach(), **found}


def deviation(result: Tensor, reference: Tensor) -> float:
    """Largest absolute difference, relative to the reference's largest element; infinite for NaN or another shape."""
    if result.shape != reference.shape or not torch.isfinite(result).all():
        return math.inf
    scale = reference.abs().max().item() or 1.0
    return (result.double() - reference).abs().max().item() / scale


class References:
    """References of one setting in float64, each computed once, however many contenders share it."""

    def __init__(self, setting: Setting, inputs: Inputs):
        self.setting, self.inputs = setting, in_float64(inputs)
        self.computed: dict[Callable, dict[str, Tensor]] = {}

    def __call__(self, function: Callable[[Setting, Inputs], Tensor]) -> dict[str, Tensor]:
        if function not in self.computed:
            self.computed[function] = outputs_and_gradients(
                lambda: function(self.setting, self.inputs), self.inputs, self.setting
            )
        return self.computed[function]


def check(
    workload: Workload, contender: Contender, prepared: Prepared, inputs: Inputs, references: References
) -> dict:
    """Compares a contender with its reference.

    Returns:
        A dict of `passed`, `judged` (in words), `deviations` and `tolerances` (by name of the compared tensor) and
        `timed_deviation`, the deviation of what is timed where something else had to be compared, else None.
    """
    setting = references.setting
    timed = outputs_and_gradients(prepared.call, inputs, setting)
    function = contender.reference or workload.reference
    if function is None:
        finite = all(torch.isfinite(tensor).all().item() for tensor in timed.values())
        judged = contender.judged or "output is finite"
        return {"passed": finite, "judged": judged, "deviations": {}, "tolerances": {}, "timed_deviation": None}
    expected = references(function)
    if prepared.verify is None:
        compared, timed_deviation = timed, None
    else:
        compared = outputs_and_gradients(prepared.verify, inputs, setting)
        timed_deviation = deviation(timed["output"], expected["output"])
    names = [name for name in compared if name in expected]
    deviations = {name: deviation(compared[name], expected[name]) for name in names}
    # Each layer of a model adds its roundings, and magnifies those before it.
    tolerance = TOLERANCES[setting.dtype] * (setting.num_layers if workload.kind == "model" else 1)
    tolerances = {name: tolerance * (1 if name == "output" else GRADIENT_FACTOR) for name in names}
    return {
        "passed": all(deviations[name] <= tolerances[name] for name in names)
        and (timed_deviation is None or math.isfinite(timed_deviation)),
        "judged": contender.judged or PLAINLY,
        "deviations": deviations,
        "tolerances": tolerances,
        "timed_deviation": timed_deviation,
    }


def timed_call(prepared: Prepared, inputs: Inputs, setting: Setting) -> Callable[[], object]:
    """What one measurement runs: the forward pass, or forward and backward to every input and parameter."""
    if not setting.backward:

        def forward():
            with torch.no_grad():
                return prepared.call()

        return forward
    leaves = [tensor for tensor in (*inputs.values(), *prepared.parameters) if tensor.requires_grad]
    incoming = gradient_like(prepared.call(), setting.seed)
    return lambda: torch.autograd.grad(prepared.call(), leaves, incoming, allow_unused=True)


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds_a_call(call: Callable[[], object], calls: int, device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def peak_memory(call: Callable[[], object], device: str) -> int:
    """Most bytes that one call held at once beyond what was allocated before, as PyTorch's allocator saw it."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events = [event for event in json.load(file)["traceEvents"] if event.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: (event["ts"], event["args"]["Ev Idx"])):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def interleave(
    calls: dict[str, Callable[[], object]], *, repeats: int, max_seconds: float, device: str, seed: int = 0
) -> dict[str, list[float | None]]:
    """Seconds a call of every contender, round after round, so that a drift of the machine hits all alike.

    The order changes from round to round. A contender whose samples have taken `max_seconds` sits out the later rounds
    (None there), but not before it has 3 samples.

    Returns:
        For each name a list with one entry a round.
    """
    estimates = {}
    for name, call in calls.items():
        call()
        estimates[name] = seconds_a_call(call, 1, device)
    sizes = {
        name: min(MAX_CALLS_A_SAMPLE, max(1, math.ceil(SAMPLE_SECONDS / seconds)))
        for name, seconds in estimates.items()
    }
    samples: dict[str, list[float | None]] = {name: [] for name in calls}
    spent = dict.fromkeys(calls, 0.0)
    shuffler = random.Random(seed)
    order = list(calls)
    for done in range(repeats):
        shuffler.shuffle(order)
        for name in order:
            if done >= MIN_SAMPLES and spent[name] >= max_seconds:
                samples[name].append(None)
                continue
            if estimates[name] < WARMED_SECONDS:
                calls[name]()  # what ran before has emptied the caches and given memory back to the system
            seconds = seconds_a_call(calls[name], sizes[name], device)
            samples[name].append(seconds)
            spent[name] += seconds * sizes[name]
    return samples


def spread(values: Iterable[float]) -> dict[str, float]:
    """Median, quartiles, least, most and number of the values."""
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


def cpu_seconds_of_others() -> float | None:
    """CPU time that all other processes have used so far, all cores together; None where Linux does not tell."""
    try:
        with open("/proc/stat", encoding="utf-8") as file:
            user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    used = os.times()
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - used.user - used.system


def measure(
    workload: Workload,
    setting: Setting,
    *,
    contenders: Iterable[str] | None = None,
    repeats: int = 15,
    max_seconds: float = 20.0,
    memory: bool = True,
    ceilings: dict[str, float] | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> list[dict]:
    """Checks and times the contenders of a workload in one setting.

    Args:
        contenders: names; all of the workload by default. The baseline is always among them.
        repeats: rounds of timing.
        max_seconds: time after which a slow contender sits out further rounds.
        memory: also measure peak memory.
        ceilings: `environment.ceilings`, to tell how long the workload takes at least on this machine.
        report: called with a line of progress.

    Returns:
        One result a contender. `status` is "ok", "wrong" (its output is not its reference's: timed not at all),
        "unavailable" or "error", the last three with a `reason`. `speedup`, how many times as fast as this contender
        the baseline is (spread of the ratios of times from the same round), exists only where both are "ok".
        `tokens` is their number in a call, without padding, where the workload counts them.
        `floor_milliseconds`, of ours where the workload knows it, is the time in which the machine could move the
        bytes or do the operations that cannot be avoided, whichever takes longer.
        `others_cpu` is the CPU time that other processes took during the timing, per second: 0 on a quiet machine.
    """
    names = list(workload.contenders) if contenders is None else list(dict.fromkeys([workload.baseline, *contenders]))
    inputs = prepare_inputs(workload, setting)
    references = References(setting, inputs)
    bounds = None if workload.floor is None else workload.floor(setting, inputs)
    floor = None
    if ceilings is not None and bounds is not None:
        moved, operations = bounds
        floor = 1e3 * max(moved / ceilings["bytes_per_second"], operations / ceilings["operations_per_second"])
    results: dict[str, dict] = {}
    ready: dict[str, Callable[[], object]] = {}
    for name in names:
        contender = workload.contenders[name]
        result = {
            "workload": workload.name,
            "contender": name,
            "ours": contender.ours,
            "baseline": name == workload.baseline,
            "status": "ok",
            "reason": None,
            "check": None,
            "milliseconds": None,
            "speedup": None,
            "peak_bytes": None,
            "tokens": None if workload.tokens is None else workload.tokens(inputs),
            "others_cpu": None,
            "floor_milliseconds": floor if contender.ours else None,
        }
        results[name] = result
        reason = contender.unavailable(setting)
        if reason is not None:
            result.update(status="unavailable", reason=reason)
            continue
        report(f"{workload.name} n={setting.length}: checking {name}")
        try:
            prepared = contender.build(setting, inputs)
            result["check"] = check(workload, contender, prepared, inputs, references)
            if not result["check"]["passed"]:
                result.update(status="wrong", reason=describe_failure(result["check"]))
                continue
            call = timed_call(prepared, inputs, setting)
            if memory:
                result["peak_bytes"] = peak_memory(call, setting.device)
        except Exception as error:  # an opponent that cannot run must not end the others' measurement
            if contender.ours:
                raise
            result.update(status="error", reason=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
            continue
        ready[name] = call
    references.computed.clear()
    report(f"{workload.name} n={setting.length}: timing {', '.join(ready)}")
    started, others = time.perf_counter(), cpu_seconds_of_others()
    samples = interleave(ready, repeats=repeats, max_seconds=max_seconds, device=setting.device, seed=setting.seed)
    if others is not None:
        others = max(0.0, cpu_seconds_of_others() - others) / (time.perf_counter() - started)
    for name, seconds in samples.items():
        results[name]["others_cpu"] = others
        results[name]["milliseconds"] = spread(1e3 * value for value in seconds if value is not None)
        if workload.baseline in samples and name != workload.baseline:
            rounds = zip(seconds, samples[workload.baseline], strict=True)
            results[name]["speedup"] = spread(
                theirs / ours for theirs, ours in rounds if theirs is not None and ours is not None
            )
    return list(results.values())


def describe_failure(check: dict) -> str:
    exceeded = [
        f"{name} deviates by {value:.1e} of its largest element, {check['tolerances'][name]:.0e} allowed"
        for name, value in check["deviations"].items()
        if value > check["tolerances"][name]
    ]
    return "; ".join(exceeded) or "output is not finite"
