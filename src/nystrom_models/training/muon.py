# SPDX-License-Identifier: Apache-2.0
"""Muon for the matrices of the layers and AdamW for all other parameters, as one optimizer."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

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


# Matrices are orthogonalized together up to this many numbers, because each number takes about 16 bytes meanwhile.
# More would only leave a CPU's caches: 12 layers of 768 then took 0.4 GB more and 16 % longer.
MOST_NUMBERS = {"cpu": 2**21}
MOST_NUMBERS_ELSEWHERE = 2**25


def _orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz iterations on each of the matrices (K, rows, columns), as PyTorch's Muon makes them on one."""
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    found = matrices.mT if tall else matrices
    norms = torch.stack(torch._foreach_norm(found.unbind()))
    found = found / norms.clamp(min=eps)[:, None, None]
    for _ in range(steps):
        gram = found @ found.mT
        update = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        found = torch.baddbmm(found, update, found, beta=a)
    return found.mT if tall else found


def _precision(matrix: Tensor) -> torch.dtype:
    """In which dtype Muon orthogonalizes: bfloat16, as it was made, except on a CPU that is slow at this."""
    return torch.float32 if matrix.device.type == "cpu" and not has_fast_bfloat16() else torch.bfloat16


class BatchedMuon(torch.optim.Muon):
    """PyTorch's Muon, which computes matrices of one shape together. One by one, each takes 23 operations, and a host
    needs longer to launch them on a GPU than the GPU to compute them."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As in PyTorch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike: dict[Any, list[Tensor]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    alike.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(matrix)
            for matrices in alike.values():
                most = MOST_NUMBERS.get(matrices[0].device.type, MOST_NUMBERS_ELSEWHERE)
                number = max(1, most // max(1, matrices[0].numel()))
                for first in range(0, len(matrices), number):
                    self._update(matrices[first : first + number], group)
        return loss

    def _update(self, matrices: list[Tensor], group: Mapping[str, Any]) -> None:
        """Updates matrices of one shape."""
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]  # of all of them
        for matrix, gradient in zip(matrices, gradients, strict=True):
            if "momentum_buffer" not in self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(gradient)
        means = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(means, gradients, 1 - group["momentum"])
        directions = torch._foreach_lerp(gradients, means, group["momentum"]) if group["nesterov"] else means
        stacked = torch.stack(directions).to(_precision(matrices[0]))
        stacked = _orthogonalize(stacked, group["ns_coefficients"], group["ns_steps"], group["eps"])
        # The scale of "match_rms_adamw".
        rate = group["lr"] * (0.2 * math.sqrt(max(matrices[0].shape)))
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        # Laid out as the matrices, which then take one operation on a GPU, whatever their number.
        torch._foreach_add_(matrices, stacked.to(matrices[0].dtype).contiguous().unbind(), alpha=-rate)


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
            BatchedMuon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
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
        muon, adamw = self.parts
        loss = muon.step(closure)
        adamw.step()
        return loss
