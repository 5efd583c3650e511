# SPDX-License-Identifier: Apache-2.0
"""The registry of workloads (an operation or a whole model) and their contenders.

A contender is a small function that takes the workload's setting and inputs and returns a `Prepared` call. The
function does one-time work (building modules, copying weights), so that only the call is timed.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Setting:
    """Sizes and conditions of one measurement. A workload ignores sizes that it does not use."""

    length: int
    batch_size: int = 1
    num_heads: int = 12
    head_dim: int = 64
    num_landmarks: int = 64
    conv_kernel_size: int = 65
    projected_dim: int = 256
    num_layers: int = 12
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    backward: bool = False
    seed: int = 0

    @property
    def hidden_size(self) -> int:
        return self.num_heads * self.head_dim


Inputs = dict[str, Tensor]
# The bytes and operations of `Workload.floor`.
Floor = Callable[[Setting, Inputs], tuple[int, int] | None]


@dataclass(frozen=True)
class Prepared:
    """A contender ready to run.

    Args:
        call: the timed function, without arguments.
        parameters: tensors, besides the workload's inputs, whose gradients a backward pass computes.
        verify: the function whose output is compared with the reference, if it cannot be `call` itself.
    """

    call: Callable[[], Tensor]
    parameters: tuple[Tensor, ...] = ()
    verify: Callable[[], Tensor] | None = None


@dataclass(frozen=True)
class Contender:
    """One implementation of a workload.

    Args:
        name: its name on the command line and in result files.
        build: makes the `Prepared` call.
        ours: whether it is an implementation of this package. Ratios refer to the one named by `Workload.baseline`.
        reference: function of the inputs that this contender is checked against, in float64; by default, the
            workload's. Contenders that compute another function (exact attention) have their own.
        judged: how the comparison is made, in words, if it is not simply with the workload's reference.
        floor: as `Workload.floor`, for a contender of ours that computes something else than the workload's.
        requires: modules that must be importable.
        install: the command that installs them.
        refuses: returns why this contender cannot run a setting, or None.
    """

    name: str
    build: Callable[[Setting, Inputs], Prepared]
    ours: bool = False
    reference: Callable[[Setting, Inputs], Tensor] | None = None
    judged: str | None = None
    floor: Floor | None = None
    requires: tuple[str, ...] = ()
    install: str = "pip install -e '.[bench]'"
    refuses: Callable[[Setting], str | None] | None = None

    def unavailable(self, setting: Setting | None = None) -> str | None:
        """The reason why this contender cannot run (with this setting), or None."""
        missing = [name for name in self.requires if importlib.util.find_spec(name) is None]
        if missing:
            return f"needs the Python module {', '.join(missing)}: {self.install}"
        return self.refuses(setting) if self.refuses is not None and setting is not None else None


@dataclass
class Workload:
    """Something that several contenders compute.

    Args:
        name: its name on the command line and in result files.
        kind: "op" (an operation) or "model" (a whole encoder).
        title: one line for tables, formatted with the fields of `Setting`.
        inputs: draws the inputs as float32 CPU tensors; they are rounded to the dtype, then moved to the device.
        reference: the function that all contenders are checked against, on inputs in float64; None: outputs must only
            be finite.
        baseline: name of the contender that all ratios refer to.
        tokens: counts the tokens of the inputs, without padding; tables then show tokens per second.
        floor: the bytes that any implementation of the reference must read or write, and the additions and
            multiplications that it must do, or None; tables then compare ours with the machine's limits.
        num_layers: of a model whose depth is fixed; by default, the setting's.
    """

    name: str
    kind: str
    title: str
    inputs: Callable[[Setting, torch.Generator], Inputs]
    reference: Callable[[Setting, Inputs], Tensor] | None
    baseline: str
    tokens: Callable[[Inputs], int] | None = None
    floor: Floor | None = None
    num_layers: int | None = None
    contenders: dict[str, Contender] = field(default_factory=dict)

    def contender(self, name: str, **options) -> Callable:
        """Decorator that registers a build function as contender `name`; options as in `Contender`."""

        def register(build):
            if name in self.contenders:
                raise ValueError(f"workload {self.name!r} already has a contender {name!r}")
            self.contenders[name] = Contender(name=name, build=build, **options)
            return build

        return register


WORKLOADS: dict[str, Workload] = {}


def register(workload: Workload) -> Workload:
    if workload.name in WORKLOADS:
        raise ValueError(f"workload {workload.name!r} is already registered")
    WORKLOADS[workload.name] = workload
    return workload
