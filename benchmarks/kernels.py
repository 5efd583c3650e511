# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels one by one: how long each takes, how close that is to the memory's limit, and whether another way
to launch it is faster."""

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from benchmarks.exact import split_heads
from benchmarks.measure import GRADIENT_FACTOR, TOLERANCES, deviation, gradient_like, interleave, prepare_inputs
from benchmarks.registry import WORKLOADS, Setting

BLOCKS, WARPS, STAGES, RESIDENT = (16, 32, 64, 128), (4, 8), (1, 2, 3, 4), (1, 2, 3, 4, 6)
SAMPLES = 5


class Kernel(NamedTuple):
    """call: one launch, or the launches that belong together. sequences: how many tensors (B, N, H·D) it must read or
    write, each once."""

    call: Callable[[], Any]
    sequences: int


def prepare(setting: Setting) -> dict[str, Kernel]:
    """Every kernel of a forward and a backward pass, and the two passes, on the inputs of `nystrom-conv`."""
    # Triton is only where its kernels are.
    from nystrom_models.kernels import attention, landmark_attention, landmarks, pseudo_inverse, token_attention

    inputs = prepare_inputs(WORKLOADS["nystrom-conv"], setting)
    query, key, value = (split_heads(inputs[name], setting.num_heads) for name in ("query", "key", "value"))
    taps, count, steps = inputs["conv_weight"], setting.num_landmarks, 6
    forward = (query, key, value, taps, None, None, count, steps, 0.0)
    context, query_landmarks, key_landmarks, inverse, seen, lse, values = attention.run_forward(*forward)
    incoming = gradient_like(context, setting.seed)
    query_grad, key_landmarks_grad, values_grad = token_attention.run_backward(query, key_landmarks, values, incoming)
    value_grad, _ = token_attention.run_convolution_backward(value, taps, incoming, count)
    seen_grad, inverse_grad = inverse.mT @ values_grad, values_grad @ seen.mT
    saved = (query_landmarks, key_landmarks, inverse, seen, lse, values)
    return {
        "landmarks": Kernel(lambda: landmarks.run_forward(query, count), 1),
        "landmark_attention": Kernel(lambda: landmark_attention.run_forward(query_landmarks, key, value), 2),
        "pseudo_inverse": Kernel(lambda: pseudo_inverse.run_forward(query_landmarks, key_landmarks, seen, steps), 0),
        "token_attention": Kernel(lambda: token_attention.run_forward(query, key_landmarks, values, value, taps), 3),
        "forward": Kernel(lambda: attention.run_forward(*forward), 4),
        "token_attention_backward": Kernel(
            lambda: token_attention.run_backward(query, key_landmarks, values, incoming), 3
        ),
        "convolution_backward": Kernel(
            lambda: token_attention.run_convolution_backward(value, taps, incoming, count), 3
        ),
        "pseudo_inverse_backward": Kernel(
            lambda: pseudo_inverse.run_backward(query_landmarks, key_landmarks, inverse_grad, steps), 0
        ),
        "landmark_attention_backward": Kernel(
            lambda: landmark_attention.run_backward(
                query_landmarks, key, value, seen, lse, seen_grad, key_landmarks_grad, value_grad
            ),
            5,
        ),
        "landmarks_backward": Kernel(lambda: landmarks.add_gradient(query_grad, key_landmarks_grad), 2),
        "backward": Kernel(
            lambda: attention.run_backward(
                incoming, query, key, value, taps, None, None, *saved, pinv_iterations=steps, dropout_p=0.0
            ),
            7,
        ),
    }


def seconds(call: Callable[[], Any], device: str) -> float:
    """Median of a few samples, after calls that compile and warm up."""
    samples = interleave({"": call}, repeats=SAMPLES, max_seconds=math.inf, device=device)[""]
    return statistics.median(sample for sample in samples if sample is not None)


@contextlib.contextmanager
def launched(kernel: str, place: int, launch: Any) -> Iterator[None]:
    from nystrom_models.kernels.launch import LAUNCHES

    before = LAUNCHES[kernel]
    LAUNCHES[kernel] = (*before[:place], launch, *before[place + 1 :])
    try:
        yield
    finally:
        LAUNCHES[kernel] = before


def sweep(kernel: str, call: Callable[[], Any], place: int, setting: Setting) -> dict[Any, float]:
    """Seconds a call by `Launch`, of those that fit: first by block, warps and stages, then by parts of the best.

    One whose first result differs from that of the launch in use is left out.
    """
    from nystrom_models.kernels.launch import LAUNCHES, Launch

    current = LAUNCHES[kernel][place]
    found: dict[Any, float] = {}

    def result() -> Tensor:
        output = call()
        return (output[0] if isinstance(output, tuple) else output).double()

    expected = result()

    def measure(launch: Any) -> None:
        if launch in found:
            return
        with launched(kernel, place, launch), contextlib.suppress(Exception):  # more than fits, in words of its own
            if deviation(result(), expected) <= GRADIENT_FACTOR * TOLERANCES[setting.dtype]:
                found[launch] = seconds(call, setting.device)

    measure(current)
    for block, warps, stages in itertools.product(BLOCKS, WARPS, STAGES):
        measure(Launch(block, warps, stages, current.resident))
    for resident in RESIDENT:
        measure(min(found, key=found.__getitem__)._replace(resident=resident))
    return found


def table(setting: Setting, ceilings: dict[str, float], with_sweep: bool, report: Callable[[str], None]) -> str:
    """A Markdown table of the kernels in one setting; with_sweep: also the fastest way found to launch each."""
    from nystrom_models.kernels.launch import LAUNCHES, launch_place

    place = launch_place(setting.dtype, setting.num_landmarks, setting.head_dim)
    sequence = setting.batch_size * setting.length * setting.hidden_size * setting.dtype.itemsize
    heading = ["kernel", "us", "sequences", "GB/s", "% of a copy's", "block, warps, stages, resident"]
    lines = [heading + ["fastest found", "us"] * with_sweep]
    for name, kernel in prepare(setting).items():
        report(f"kernels n={setting.length}: {name}")
        taken = seconds(kernel.call, setting.device)
        rate = kernel.sequences * sequence / taken
        share = f"{100 * rate / ceilings['bytes_per_second']:.0f}" if kernel.sequences else ""
        launch = LAUNCHES[name][place] if name in LAUNCHES else None
        line = [name, f"{1e6 * taken:.1f}", str(kernel.sequences), f"{rate / 1e9:.0f}", share]
        line.append(", ".join(map(str, launch or ())))
        if with_sweep:
            found = sweep(name, kernel.call, place, setting) if launch else {}
            best = min(found, key=found.__getitem__) if found else ()
            line += [", ".join(map(str, best)), f"{1e6 * found[best]:.1f}" if found else ""]
        lines.append(line)
    rows = [f"| {' | '.join(line)} |" for line in lines]
    rows.insert(1, "| --- | ---: | ---: | ---: | ---: | --- |" + " --- | ---: |" * with_sweep)
    return "\n".join(rows)
