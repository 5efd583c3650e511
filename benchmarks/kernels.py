# SPDX-License-Identifier: Apache-2.0
"""Times each Triton kernel on the device: its share of the memory bandwidth, the cost of masked rows and dropout, and
whether another way to launch it is faster."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.exact import split_heads
from benchmarks.measure import GRADIENT_FACTOR, TOLERANCES, deviation, gradient_like, prepare_inputs, seconds_a_call
from benchmarks.registry import WORKLOADS, Setting

BLOCKS, WARPS, STAGES, RESIDENT = (16, 32, 64, 128), (4, 8), (1, 2, 3, 4), (1, 2, 3, 4, 6)
DROPOUT = 0.1


class Kernel(NamedTuple):
    """call: one launch, or launches that belong together. sequences: the number of tensors (B, N, H·D) that it must
    read or write once. plan: for a stage that goes through the tokens, the launch in use. checked: gives results that
    do not depend on the launch, if those of `call` do."""

    call: Callable[[], Any]
    sequences: int
    plan: Callable[[], tuple[int, dict[str, int]]] | None = None
    checked: Callable[[], tuple[Tensor, ...]] | None = None


def prepare(setting: Setting, ragged: bool = False) -> dict[str, Kernel]:
    """Every kernel of a forward and a backward pass, and the two passes, on the inputs of `nystrom-conv`.

    ragged: with rows of n / 2 to n tokens, and with attention dropout.
    """
    # Triton may not be installed where no kernels run.
    from nystrom_models.kernels.nystrom import (
        attention,
        convolution,
        landmark_attention,
        landmarks,
        launches,
        pseudo_inverse,
        token_attention,
    )
    from nystrom_models.kernels.nystrom.rows import Rows
    from nystrom_models.models.attention_nystrom import landmark_segments

    inputs = prepare_inputs(WORKLOADS["nystrom-conv"], setting)
    query, key, value = (split_heads(inputs[name], setting.num_heads) for name in ("query", "key", "value"))
    q, k, v = (states.transpose(1, 2) for states in (query, key, value))
    taps, count, steps = inputs["conv_weight"], setting.num_landmarks, 6
    rows, seed, dropout_p = None, None, 0.0
    if ragged:
        mask = row_mask(setting)
        rows, dropout_p = Rows.of(mask, landmark_segments(mask, count)), DROPOUT
        seed = torch.tensor([setting.seed], device=setting.device)
    forward = (query, key, value, taps, seed, list(rows or ()), count, steps, dropout_p)
    context, q_landmarks, k_landmarks, seen, lse, w = attention.forward(*forward)
    incoming = gradient_like(context, setting.seed)
    do = incoming.transpose(1, 2).contiguous()
    dropout = (rows, seed, dropout_p)
    dq, dk_landmarks, dw = token_attention.token_attention_backward(q, k_landmarks, w, do, *dropout)
    dv, _ = convolution.convolution_backward(v, taps, do, count, rows)
    dv_of_convolution = dv.clone()
    dq_landmarks, dk_landmarks, dseen = pseudo_inverse.pseudo_inverse_backward(
        q_landmarks, k_landmarks, seen, dw, dk_landmarks, steps, rows
    )
    partial, *_ = landmark_attention.landmark_attention_backward(
        q_landmarks, k, v, seen, lse, dseen, dk_landmarks, dv, rows
    )
    saved = (q_landmarks, k_landmarks, seen, lse, w)

    def landmark_gradients() -> tuple[Tensor, ...]:
        parts, dk, dv_sum = landmark_attention.landmark_attention_backward(
            q_landmarks, k, v, seen, lse, dseen, dk_landmarks, dv_of_convolution.clone(), rows
        )
        return parts.sum(2), dk, dv_sum

    def plan(stage: str, taps: int = 0) -> Callable[[], tuple[int, dict[str, int]]]:
        return lambda: launches.plan_launch(stage, q, count, taps)

    width = taps.shape[2]
    return {
        "landmarks_fwd": Kernel(lambda: landmarks.landmarks_forward(q, count, rows), 1),
        "landmark_attention_fwd": Kernel(
            lambda: landmark_attention.landmark_attention_forward(q_landmarks, k, v, rows),
            2,
            plan("landmark_attention_fwd"),
        ),
        "pseudo_inverse_fwd": Kernel(
            lambda: pseudo_inverse.pseudo_inverse_forward(q_landmarks, k_landmarks, seen, steps, rows), 0
        ),
        "token_attention_fwd": Kernel(
            lambda: token_attention.token_attention_forward(q, k_landmarks, w, v, taps, *dropout),
            3,
            plan("token_attention_fwd", width),
        ),
        "forward": Kernel(lambda: attention.forward(*forward), 4),
        "token_attention_bwd": Kernel(
            lambda: token_attention.token_attention_backward(q, k_landmarks, w, do, *dropout),
            3,
            plan("token_attention_bwd"),
        ),
        "convolution_bwd": Kernel(
            lambda: convolution.convolution_backward(v, taps, do, count, rows), 3, plan("convolution_bwd", width)
        ),
        "pseudo_inverse_bwd": Kernel(
            lambda: pseudo_inverse.pseudo_inverse_backward(
                q_landmarks, k_landmarks, seen, dw, dk_landmarks, steps, rows
            ),
            0,
        ),
        "landmark_attention_bwd": Kernel(
            lambda: landmark_attention.landmark_attention_backward(
                q_landmarks, k, v, seen, lse, dseen, dk_landmarks, dv, rows
            ),
            5,
            plan("landmark_attention_bwd"),
            landmark_gradients,
        ),
        "landmarks_bwd": Kernel(lambda: landmarks.landmarks_backward(dq, dq_landmarks, partial, rows), 2),
        "backward": Kernel(
            lambda: attention.backward(
                incoming, query, key, value, taps, seed, list(rows or ()), *saved, steps, dropout_p, True
            ),
            7,
        ),
    }


def prepare_linear(setting: Setting, ragged: bool = False) -> dict[str, Kernel]:
    """The launches of a forward and of a backward pass of causal linear attention, with as many features of a head as
    channels; none for sizes that do not fit.

    ragged: of rows of n / 2 to n tokens.
    """
    from nystrom_models.kernels.linear import dispatch
    from nystrom_models.kernels.linear.causal import causal_backward, causal_forward
    from nystrom_models.models.attention_linear import elu_features

    inputs = prepare_inputs(WORKLOADS["nystrom-conv"], setting)
    query, key, value = (split_heads(inputs[name], setting.num_heads) for name in ("query", "key", "value"))
    query, key = elu_features(query), elu_features(key)
    mask = row_mask(setting) if ragged else None
    # The interpreter is told of no GPU, which is a reason of its own.
    if setting.device == "cuda" and dispatch.why_not(query, key, value, mask) is not None:
        return {}
    q, k, v = (states.transpose(1, 2).contiguous() for states in (query, key, value))
    out, states = causal_forward(q, k, v, mask)
    do = gradient_like(out, setting.seed)
    return {
        "causal_linear_fwd": Kernel(lambda: causal_forward(q, k, v, mask), 4),
        "causal_linear_bwd": Kernel(lambda: causal_backward(q, k, v, mask, states, do, None), 7),
    }


def row_mask(setting: Setting) -> Tensor:
    """(B, N) bool: rows of n / 2 to n tokens."""
    lengths = torch.linspace(setting.length / 2, setting.length, setting.batch_size, device=setting.device)
    return torch.arange(setting.length, device=setting.device) < lengths[:, None]


def seconds(call: Callable[[], Any], device: str) -> float:
    """The median time of a call on the device, without the host's time: from replays of a CUDA graph of many calls.

    On a CPU, in Triton's interpreter, one call is timed, as a test run.
    """
    if device == "cuda":
        from triton.testing import do_bench_cudagraph

        call()  # compiles
        return do_bench_cudagraph(call, return_mode="median") / 1e3
    return seconds_a_call(call, 1, device)


def describe_plan(plan: tuple[int, dict[str, int]]) -> str:
    parts, sizes = plan
    return f"{sizes['BLOCK_N']}, {sizes['num_warps']}, {sizes['num_stages']}, {parts}"


@contextlib.contextmanager
def launched(stage: str, launch: Any) -> Iterator[None]:
    from nystrom_models.kernels.nystrom import launches

    before = launches.find_launch
    launches.find_launch = lambda name, *facts: launch if name == stage else before(name, *facts)
    try:
        yield
    finally:
        launches.find_launch = before


def sweep(stage: str, kernel: Kernel, current: Any, setting: Setting) -> dict[str, float]:
    """Seconds per call for each launch that fits: first block, warps and stages are varied, then the parts of the
    best. A launch whose results differ from those of `current`, the launch in use, is left out."""
    from nystrom_models.kernels.nystrom.launches import Launch

    found: dict[str, float] = {}
    fastest: dict[Any, float] = {}

    def results() -> list[Tensor]:
        output = (kernel.checked or kernel.call)()
        outputs = output if isinstance(output, tuple) else (output,)
        return [tensor.double() for tensor in outputs if tensor is not None]

    expected = results()
    most = GRADIENT_FACTOR * TOLERANCES[setting.dtype]

    def measure(launch: Any) -> None:
        with launched(stage, launch), contextlib.suppress(Exception):  # it does not fit; the errors differ
            name = describe_plan(kernel.plan())
            if name in found:
                return
            if all(deviation(mine, theirs) <= most for mine, theirs in zip(results(), expected, strict=True)):
                found[name] = fastest[launch] = seconds(kernel.call, setting.device)

    measure(current)
    # The interpreter knows neither warps nor stages.
    others = (WARPS, STAGES) if setting.device == "cuda" else (WARPS[:1], STAGES[:1])
    for block, warps, stages in itertools.product(BLOCKS, *others):
        measure(Launch(block, warps, stages, current.resident))
    for resident in RESIDENT:
        measure(min(fastest, key=fastest.__getitem__)._replace(resident=resident))
    return found


def table(
    setting: Setting,
    ceilings: dict[str, float],
    with_sweep: bool,
    report: Callable[[str], None],
    names: list[str] | None = None,
) -> Iterator[str]:
    """The lines of a Markdown table of the kernels in one setting, each as soon as it is measured. Ragged rows have
    dropout in Nyström attention; linear attention has none.

    with_sweep: adds the fastest launch that was found for each. names: the kernels to time; None for all.
    """
    from nystrom_models.kernels.nystrom import launches

    sequence = setting.batch_size * setting.length * setting.hidden_size * setting.dtype.itemsize
    heading = ["kernel", "us", "sequences", "GB/s", "% of a copy's", "block, warps, stages, parts"]
    yield f"| {' | '.join(heading + ['fastest found', 'us'] * with_sweep + ['us ragged, dropout'])} |"
    yield "| --- | ---: | ---: | ---: | ---: | --- |" + " --- | ---: |" * with_sweep + " ---: |"
    ragged = prepare(setting, ragged=True) | prepare_linear(setting, ragged=True)
    for name, kernel in (prepare(setting) | prepare_linear(setting)).items():
        if names is not None and name not in names:
            continue
        report(f"kernels n={setting.length}: {name}")
        taken = seconds(kernel.call, setting.device)
        rate = kernel.sequences * sequence / taken
        share = f"{100 * rate / ceilings['bytes_per_second']:.0f}" if kernel.sequences else ""
        line = [name, f"{1e6 * taken:.1f}", str(kernel.sequences), f"{rate / 1e9:.0f}", share]
        line.append(describe_plan(kernel.plan()) if kernel.plan else "")
        if with_sweep:
            found = {}
            if name in launches.LAUNCHES:
                sizes = setting.dtype, setting.num_landmarks, setting.head_dim, torch.device(setting.device)
                found = sweep(name, kernel, launches.find_launch(name, *sizes), setting)
            best = min(found, key=found.__getitem__) if found else ""
            line += [best, f"{1e6 * found[best]:.1f}" if found else ""]
        line.append(f"{1e6 * seconds(ragged[name].call, setting.device):.1f}")
        yield f"| {' | '.join(line)} |"
