# SPDX-License-Identifier: Apache-2.0
"""Muon for the matrices of the layers and AdamW for all other parameters, as one optimizer."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .processor import has_fast_bfloat16


def layer_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The trained weights of linear layers inside lists of modules, where models of Transformers have their layers.

    Embeddings, heads and poolers, for which Muon is not made, are outside such lists. Convolutions, projections of the
    tokens and feature maps are not linear layers.
    """
    found: dict[int, nn.Parameter] = {}
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList):
            for module in layers.modules():
                weight = getattr(module, "weight", None)
                if isinstance(module, nn.Linear) and isinstance(weight, nn.Parameter) and weight.requires_grad:
                    found[id(weight)] = weight
    return list(found.values())


class _Float32(TorchFunctionMode):
    """Within it, `bfloat16()` and, from PyTorch 2.15 on, `to(dtype=torch.bfloat16)` give a copy in float32. PyTorch's
    Muon orthogonalizes this copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_bfloat16 = func is torch.Tensor.to and kwargs.get("dtype") == torch.bfloat16
        if to_bfloat16 or func is torch.Tensor.bfloat16:
            return args[0].to(torch.float32, copy=True)
        return func(*args, **kwargs)


def _precision(matrix: torch.Tensor) -> AbstractContextManager:
    """How Muon orthogonalizes: in bfloat16, as it was made, except on a CPU that is slow at this."""
    return _Float32() if matrix.device.type == "cpu" and not has_fast_bfloat16() else nullcontext()


class MuonAndAdamW(torch.optim.Optimizer):
    """PyTorch's `Muon` (Jordan et al. 2024) for matrices, and its `AdamW` for groups of other parameters.

    Muon's rate is scaled to AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training", arXiv:2502.16982, eq. 4),
    so that one learning rate and one weight decay are used for both.

    Args:
        matrices: parameters of two dimensions.
        others: parameter groups of AdamW, with their options.
        lr: learning rate of both. weight_decay: that of the matrices.
        adamw: further options of AdamW.

    Matrices are orthogonalized in bfloat16; on a CPU without instructions for it, in float32.

    Its groups and state combine those of the two optimizers, so that schedules, checkpoints and Accelerate see one
    optimizer.
    """

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        others: Iterable[Mapping[str, Any]],
        lr: float,
        weight_decay: float,
        adamw: Mapping[str, Any],
    ):
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW([dict(group) for group in others], lr=lr, **adamw),
        )
        super().__init__([group for part in self.parts for group in part.param_groups], {"lr": lr})
        self._share()

    def _share(self) -> None:
        """Makes both optimizers use the groups and the state of this one."""
        groups = list(self.param_groups)
        for part in self.parts:
            count = len(part.param_groups)
            part.param_groups, groups = groups[:count], groups[count:]
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both. closure: recomputes loss and gradients; it is called once."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        muon, adamw = self.parts
        with _precision(muon.param_groups[0]["params"][0]):
            muon.step()
        adamw.step()
        return loss
