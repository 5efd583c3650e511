# SPDX-License-Identifier: Apache-2.0
"""Linear attention: a product of feature maps in place of the softmax, so that keys and values are summed once.

Katharopoulos et al. 2020, "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
arXiv:2006.16236.

Legend: B batch, H heads, N tokens, D head size, F features, C tokens of a chunk, R chosen rows. A mask is (B, N),
bool, True at valid tokens, which may lie anywhere in a row.

For each row of the batch and each head, with a feature map φ (equation numbers of the paper):

    out_i = φ(q_i) Σ_j φ(k_j) v_jᵀ / (φ(q_i) Σ_j φ(k_j))        over all valid j (eq. 5)
    out_i = φ(q_i) S_i / (φ(q_i) z_i)                           over valid j <= i (eq. 9 to 12)
    S_i = S_(i-1) + φ(k_i) v_iᵀ,  z_i = z_(i-1) + φ(k_i)        one step of the recurrence (eq. 18 to 20)

All functions here take φ(q) and φ(k). The state (B, H, F, D + 1) holds S, and z as its last column: it is the sum of
φ(k_j) [v_jᵀ, 1]. Sums are in float32 at least, because sums over many tokens overflow float16 and stall in bfloat16;
the normaliser has 1e-6 added, so that a row without a valid token gives zero.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast
from transformers.utils.import_utils import is_tracing

from .cpu_blocks import BLOCK_TOKENS
from .token_layout import take_tokens
from .tracing import can_read_values, supports_autograd_functions

EPSILON = 1e-6
# Tokens of a chunk: about the number of features of a head, so that scores and states cost about the same.
CHUNK_TOKENS = 64


# ---- feature maps ----


def elu_features(states: Tensor) -> Tensor:
    """φ(x) = elu(x) + 1 (eq. 7), positive. (..., D) -> (..., D).

    It is computed as max(x, 0) + exp(min(x, 0)): for negative x, elu(x) + 1 = (exp(x) - 1) + 1 would keep few digits
    of exp(x), in bfloat16 none below -6. Besides, graphs record wrong strides for the gradient of elu (PyTorch 2.13).
    """
    if is_tracing(states):
        return F.relu(states) + states.clamp_max(0).exp()
    return _EluFeatures.apply(states) if torch.is_grad_enabled() else _EluFeatures.forward(states)


class _EluFeatures(torch.autograd.Function):
    """`elu_features`. The gradient needs only the result, which the attention keeps anyway: φ'(x) = min(φ(x), 1)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(states: Tensor) -> Tensor:
        return states.clamp_max(0).exp_().add_(F.relu(states))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (features,) = ctx.saved_tensors
        return gradient * features.clamp_max(1)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return _EluFeatures.backward(ctx, tangent)


def relu_features(states: Tensor) -> Tensor:
    """φ(x) = max(x, 0). (..., D) -> (..., D)."""
    return F.relu(states)


def hedgehog_features(states: Tensor, weight: Tensor) -> Tensor:
    """φ(x) = softmax([W x, -W x]), learned to imitate softmax attention (Zhang et al. 2024, arXiv:2402.04347, eq. 6).

    states: (B, H, N, D). weight: (H, D, D), W of each head. Returns: (B, H, N, 2 D), in float32 at least inside.
    """
    mapped = states @ weight.to(states.dtype).transpose(-2, -1)
    both = torch.cat([mapped, -mapped], dim=-1)
    return both.softmax(dim=-1, dtype=torch.promote_types(both.dtype, torch.float32)).to(states.dtype)


# ---- reference: the paper's equations in order, quadratic in the tokens ----


def linear_attention_reference(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """`linear_attention` computed with the N×N weights φ(q_i)·φ(k_j) (eq. 4)."""
    weights = _weights(query, key, mask)
    context = weights @ _precise(value) / (weights.sum(dim=-1, keepdim=True) + EPSILON)
    return context.to(value.dtype)


def causal_linear_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`causal_linear_attention` computed with the N×N weights φ(q_i)·φ(k_j), j <= i (eq. 8)."""
    weights = _weights(query, key, mask).tril()
    values = _with_ones(_precise(value))
    sums = weights @ values
    final = _precise(_valid(key, mask)).transpose(-2, -1) @ values
    if state is not None:
        sums, final = sums + _precise(query) @ state, final + state
    return _normalise(sums, value.dtype), final


def recurrent_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`causal_linear_attention` token by token, as a recurrent network (eq. 16 to 20)."""
    contexts = []
    for token in range(query.shape[2]):
        here = slice(token, token + 1)
        valid = None if mask is None else mask[:, here]
        context, state = _step(query[:, :, here], _valid(key[:, :, here], valid), value[:, :, here], state)
        contexts.append(context)
    return torch.cat(contexts, dim=2), state


# ---- fast path: time and memory linear in the tokens ----


def linear_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    """Every token attends to all valid tokens (eq. 5 and 6).

    Args:
        query, key: (B, H, N, F), φ(q) and φ(k), not negative. value: (B, H, N, D). mask: (B, N) bool, None for all
            valid. The number of keys and values, K, may differ from N.

    Returns: (B, H, N, D) in the values' dtype.
    """
    with maybe_autocast(device_type=query.device.type, enabled=False):
        state = _precise(_valid(key, mask)).transpose(-2, -1) @ _with_ones(_precise(value))
        return _normalise(_precise(query) @ state, value.dtype)


def causal_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Every token attends to the valid tokens up to itself (eq. 9 to 12).

    Computed in chunks: by scores within a chunk, and by the state of all earlier chunks. Only inputs and outputs are
    stored for each token; the backward pass recomputes the scores.

    Args:
        query, key: (B, H, N, F), φ(q) and φ(k), not negative. value: (B, H, N, D). mask: (B, N) bool, None for all
            valid.
        state: (B, H, F, D + 1) in float32 at least, of the earlier tokens; None if there are none.

    Returns: (B, H, N, D) in the values' dtype; the state after these tokens, to continue with.
    """
    key = _valid(key, mask)
    with maybe_autocast(device_type=query.device.type, enabled=False):
        # A trace of TorchScript would take this way for every length.
        if not torch.jit.is_tracing() and query.shape[2] == 1:
            return _step(query, key, value, state)
        if state is None:
            state = _no_state(key, value)
        sums, final = causal_product(query, key, _with_ones(value), state)
        return _normalise(sums, value.dtype), final


def linear_attention_map(
    query: Tensor, key: Tensor, mask: Tensor | None = None, *, causal: bool = False, rows: Tensor | None = None
) -> Tensor:
    """The attention matrix, for inspection and tests.

    Args:
        query, key, mask: as for `linear_attention`. causal: whether a token attends only to tokens up to itself.
        rows: (R,) or (B, R) int64, the tokens whose rows are returned; None for all.

    Returns: (B, H, N or R, N); each row sums to one, up to `EPSILON`.
    """
    tokens = torch.arange(query.shape[2], device=query.device) if rows is None else rows
    query = query if rows is None else take_tokens(query, rows)
    with maybe_autocast(device_type=query.device.type, enabled=False):
        weights = _weights(query, key, mask)
        if causal:
            later = torch.arange(key.shape[2], device=key.device) > tokens[..., None]
            weights = weights.masked_fill(later if tokens.dim() == 1 else later[:, None], 0)
        return (weights / (weights.sum(dim=-1, keepdim=True) + EPSILON)).to(query.dtype)


# ---- causal sums by chunks ----


def causal_product(left: Tensor, right: Tensor, values: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """out_i = left_i (state + Σ_(j<=i) right_jᵀ values_j), and the last state (algorithm 1 of the paper's supplement).

    left, right: (B, H, N, F). values: (B, H, N, E). state: (B, H, F, E) in float32 at least.
    Returns: (B, H, N, E) and (B, H, F, E), in the state's dtype.
    """
    if torch.is_grad_enabled() and supports_autograd_functions():
        return _differentiable_product(left, right, values, state, False)
    return _causal_product(left, right, values, state, False)


def _differentiable_product(
    left: Tensor, right: Tensor, values: Tensor, state: Tensor, backwards: bool
) -> tuple[Tensor, Tensor]:
    # torch.compile refuses functions with a `jvp`.
    function = _CausalProduct if torch.compiler.is_compiling() else _WithTangents
    return function.apply(left, right, values, state, backwards)


class _CausalProduct(torch.autograd.Function):
    """`_causal_product`; its gradients are products of the same kind (eq. 13 to 15)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(left: Tensor, right: Tensor, values: Tensor, state: Tensor, backwards: bool) -> tuple[Tensor, Tensor]:
        sums, final = _causal_product(left, right, values, state, backwards)
        # Autograd allows no output that is an input, as the state is without tokens, or a view of one.
        return sums, final.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *tensors, ctx.backwards = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, state_gradient: Tensor) -> tuple[Tensor | None, ...]:
        left, right, values, state = ctx.saved_tensors
        same, opposite = ctx.backwards, not ctx.backwards
        with maybe_autocast(device_type=left.device.type, enabled=False):
            left_gradient, _ = _differentiable_product(gradient, values, right, state.transpose(-2, -1), same)
            right_gradient, _ = _differentiable_product(
                values, gradient, left, state_gradient.transpose(-2, -1), opposite
            )
            value_gradient, before = _differentiable_product(right, left, gradient, state_gradient, opposite)
        return (
            left_gradient.to(left.dtype),
            right_gradient.to(right.dtype),
            value_gradient.to(values.dtype),
            before,
            None,
        )


class _WithTangents(_CausalProduct):
    """The same, also differentiable forwards (`torch.func.jvp`)."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        _CausalProduct.setup_context(ctx, inputs, output)
        ctx.save_for_forward(*inputs[:-1])

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor, Tensor]:
        """The product is linear in the left, in the right, and in the values with the state."""
        left, right, values, state = ctx.saved_tensors
        zeros = (torch.zeros_like(tensor) for tensor in (left, right, values, state))
        given = zip(tangents[:4], zeros, strict=True)
        left_, right_, values_, state_ = (zero if tangent is None else tangent for tangent, zero in given)
        by_left, _ = _differentiable_product(left_, right, values, state, ctx.backwards)
        by_right, final_by_right = _differentiable_product(
            left, right_, values, torch.zeros_like(state), ctx.backwards
        )
        by_values, final_by_values = _differentiable_product(left, right, values_, state_, ctx.backwards)
        return by_left + by_right + by_values, final_by_right + final_by_values


def _causal_product(
    left: Tensor, right: Tensor, values: Tensor, state: Tensor, backwards: bool
) -> tuple[Tensor, Tensor]:
    """`causal_product`; with `backwards`, the sum is over j >= i, and the state is that of the later tokens."""
    if left.device.type != "cpu" or not all(map(can_read_values, (left, right, values, state))):
        return _product_by_chunks(left, right, values, state, backwards)
    # Blocks stay in the CPU's caches, and intermediate results need the memory of only one block.
    out = state.new_empty(*left.shape[:3], values.shape[3])
    starts = range(0, left.shape[2], BLOCK_TOKENS)
    for start in reversed(starts) if backwards else starts:
        block = slice(start, start + BLOCK_TOKENS)
        sums, state = _product_by_chunks(left[:, :, block], right[:, :, block], values[:, :, block], state, backwards)
        out[:, :, block] = sums
    return out, state


def _product_by_chunks(
    left: Tensor, right: Tensor, values: Tensor, state: Tensor, backwards: bool
) -> tuple[Tensor, Tensor]:
    """The same for all chunks at once."""
    length = left.shape[2]
    size = CHUNK_TOKENS if is_tracing(left) else max(1, min(CHUNK_TOKENS, length))
    left, right, values = (_in_chunks(tensor, size, state.dtype) for tensor in (left, right, values))
    sums = right.transpose(-2, -1) @ values  # (B, H, N / C, F, E)
    # The state before each chunk, summed in order: later tokens must not change even the rounding.
    sums = torch.cat([state[:, :, None], sums.flip(2) if backwards else sums], dim=2).cumsum(dim=2)
    states, final = sums[:, :, :-1], sums[:, :, -1]
    scores = left @ right.transpose(-2, -1)  # (B, H, N / C, C, C)
    scores = scores.triu() if backwards else scores.tril()
    out = scores @ values + left @ (states.flip(2) if backwards else states)
    # By operators that the vmap of `torch.autograd.grad(is_grads_batched=True)` has, too: neither flatten nor a slice
    # of all tokens.
    out = out.reshape(*out.shape[:2], out.shape[2] * out.shape[3], out.shape[4])
    if is_tracing(out):  # a slice would be a condition on the length in the graph
        return out.index_select(2, torch.arange(length, device=out.device)), final
    return out.narrow(2, 0, length), final


def _in_chunks(states: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """(B, H, N, E) -> (B, H, N / C, C, E), the last chunk filled with zeros."""
    length = states.shape[2]
    # A graph has one or two extra chunks: otherwise it would be valid only for lengths above one chunk.
    count = length // size + 2 if is_tracing(states) else -(-length // size)
    states = F.pad(states, (0, 0, 0, count * size - length)).to(dtype)
    # As `unflatten`, but without a condition on the length in the graph.
    return states.unfold(2, size, size).transpose(-2, -1).contiguous()


# ---- parts ----


def _step(query: Tensor, key: Tensor, value: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token, (B, H, 1, F) and (B, H, 1, D) (eq. 18 to 20): its output and the state after it."""
    key, values = _precise(key), _with_ones(_precise(value))
    state = key.transpose(-2, -1) * values if state is None else torch.addcmul(state, key.transpose(-2, -1), values)
    return _normalise(_precise(query) @ state, value.dtype), state


def _weights(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    return _precise(query) @ _precise(_valid(key, mask)).transpose(-2, -1)


def _normalise(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Sums (B, H, N, D + 1), the normaliser last -> (B, H, N, D)."""
    return (sums[..., :-1] / (sums[..., -1:] + EPSILON)).to(dtype)


def _no_state(key: Tensor, value: Tensor) -> Tensor:
    dtype = torch.promote_types(key.dtype, torch.float32)
    return key.new_zeros(*key.shape[:2], key.shape[3], value.shape[3] + 1, dtype=dtype)


def _valid(key: Tensor, mask: Tensor | None) -> Tensor:
    """Keys (B, H, N, F), zero at invalid tokens, which then add nothing to any sum."""
    return key if mask is None else key.masked_fill(~mask[:, None, :, None], 0)


def _with_ones(value: Tensor) -> Tensor:
    """[v, 1]: (B, H, N, D) -> (B, H, N, D + 1). The last column sums the keys alone, for the normaliser."""
    return F.pad(value, (0, 1), value=1.0)


def _precise(states: Tensor) -> Tensor:
    return states.to(torch.promote_types(states.dtype, torch.float32))
