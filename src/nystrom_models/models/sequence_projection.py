# SPDX-License-Identifier: Apache-2.0
"""The projection of a sequence to fewer slots, along the tokens, as a layer.

Legend: B batch, H heads, N tokens, K slots, C hidden size, D head size.
"""

import torch
from torch import Tensor, nn
from transformers import initialization as init

from .attention_linformer import project, projection_matrix


class SequenceProjection(nn.Module):
    """E or F: a (K, N) matrix for "linear", ceil(N / K) taps for "conv", with a leading axis if each head has its own;
    nothing for pooling. Matrices of heads that differ in K are stacked to one of (sum of K over the heads, N).

    Args:
        projection_type: "linear", "conv", "mean_pool" or "max_pool".
        projected_dim: K; for "linear" also a list with one for each head.
        length: N, the longest sequence.
        num_heads: H if each head has its own, else None.
        positive: whether the initial weights are not negative; not with a list.
    """

    def __init__(
        self,
        projection_type: str,
        projected_dim: int | list[int],
        length: int,
        num_heads: int | None = None,
        positive: bool = False,
    ):
        super().__init__()
        self.projection_type = projection_type
        self.positive = positive
        self.slots_of_heads = projected_dim if isinstance(projected_dim, list) else None
        if isinstance(projected_dim, list):
            num_heads, projected_dim = None, sum(projected_dim)
        self.kernel_size = None if projection_type == "linear" else -(-length // projected_dim)
        shape = (self.kernel_size,) if self.kernel_size else (projected_dim, length)
        # As in the authors' code (Xavier with gain 1/√2): projected tokens then have about the size of tokens.
        self.std = sum(shape) ** -0.5
        self.weight = None
        if projection_type in ("linear", "conv"):
            self.weight = nn.Parameter(torch.empty(shape if num_heads is None else (num_heads, *shape)))

    def initialize_parameters(self) -> None:
        """Draws the weights, if there are any: normal, or uniform if they must not be negative."""
        if self.weight is None:
            return
        if self.slots_of_heads is not None:
            length = self.weight.shape[1]
            draws = [torch.randn(slots, length) * (slots + length) ** -0.5 for slots in self.slots_of_heads]
            init.copy_(self.weight, torch.cat(draws))
        elif self.positive:
            init.uniform_(self.weight, 0.0, 3**0.5 * self.std)
        else:
            init.normal_(self.weight, mean=0.0, std=self.std)

    def forward(self, states: Tensor, lengths: Tensor | None = None, as_matrix: bool = False) -> Tensor:
        """Tokens by rank, (B, N, C) or (B, H, N, D), -> slots (B, K', C) or (B, H, K', D), see `project`.

        If heads differ in K, (B, H, N, D) -> (B, sum of K, D), with the slots of one head after the other.
        as_matrix: return the matrix that acts on the tokens instead, (1 or B, 1 or H, K', N), see `projection_matrix`.
        """
        if self.slots_of_heads is not None and not as_matrix:
            heads = zip(states.unbind(1), self.weight.split(self.slots_of_heads), strict=True)
            return torch.cat([project(head, weight, "linear", None, lengths) for head, weight in heads], dim=1)
        arguments = (states, self.weight, self.projection_type, self.kernel_size, lengths)
        return projection_matrix(*arguments).clone() if as_matrix else project(*arguments)

    def resize(self, length: int) -> None:
        """Accepts sequences of `length` tokens: the columns of a "linear" projection are repeated or cut."""
        columns = torch.arange(length, device=self.weight.device)
        weight = self.weight.detach()[..., columns % self.weight.shape[-1]]
        self.weight = nn.Parameter(weight, requires_grad=self.weight.requires_grad)
