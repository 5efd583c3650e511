# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for Nyström attention on an NVIDIA GPU, in place of `nystrom_attention`'s PyTorch operations.

A model uses them with `attn_implementation="nystrom_triton"` (see `interface.py`), the default on a GPU; `why_not`
tells where they do not apply. Triton is imported at the first call that needs it, and the kernels are compiled at the
first call of their sizes; then they are compared with PyTorch's operations once, and not used on a device where they
fail or differ.

Sums have a fixed order: the same inputs give the same result on the same device.

Legend: B batch, H heads, N tokens, M landmarks, D head size. A mask is (B, N), bool, True at valid tokens.
"""

import functools
import importlib.util

import torch
from torch import Tensor
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing

from ..models.attention_nystrom import Segments, landmark_segments, nystrom_attention_reference
from ..models.depthwise_convolution import depthwise_convolution

logger = logging.get_logger(__name__)

MAX_LANDMARKS = 128
MAX_HEAD_SIZE = 128
MAX_TAPS = 129
# Of the landmarks and channels, each rounded up to a power of two: what fits into 99 KiB of shared memory, in half
# precision; in float32 it is half as much.
MAX_LANDMARKS_TIMES_HEAD_SIZE = 8192

# Tests add "cpu", where Triton interprets.
_devices = {"cuda"}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What a grid holds along its second dimension.
_MAX_PROGRAMS = 65535


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def why_not_on(device: torch.device) -> str | None:
    """Why they run on this device not at all."""
    if not _has_triton():
        return "the package triton is not installed: pip install triton"
    if device.type == "cuda" and torch.version.hip is not None:
        return "they were made for NVIDIA's GPUs and never tried on AMD's"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "they need a GPU of compute capability 8.0 (A100) or newer"
    return None


def why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    num_landmarks: int | None,
    pinv_iterations: int = 6,
    conv_weight: Tensor | None = None,
    dropout_p: float = 0.0,
    segments: Segments | None = None,
) -> str | None:
    """Why the kernels do not compute this attention, with what to change; None if they do.

    Arguments are those of `nystrom_attention`.
    """
    if is_tracing(query) or torch._C._are_functorch_transforms_active():
        return "a graph is being recorded (torch.export, torch.jit) or transformed, and PyTorch's operations do that"
    tensors = [tensor for tensor in (query, key, value, conv_weight) if tensor is not None]
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) for tensor in tensors):
        return f"they need plain tensors, not {type(query).__name__}"
    return _why_not_of_shape(query, key, value, num_landmarks, conv_weight, dropout_p) or why_not_on(query.device)


def _why_not_of_shape(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    num_landmarks: int | None,
    conv_weight: Tensor | None,
    dropout_p: float,
) -> str | None:
    """Why not for tensors of these shapes, dtypes and devices."""
    tensors = [tensor for tensor in (query, key, value, conv_weight) if tensor is not None]
    device = query.device
    if device.type not in _devices or any(tensor.device != device for tensor in tensors):
        return f"they need tensors on one CUDA device, and there are some on {device}"
    batch, heads, length, dim = query.shape
    if num_landmarks is None or length <= num_landmarks:
        return f"{length} tokens with num_landmarks={num_landmarks} get exact attention, which PyTorch has kernels for"
    if num_landmarks > MAX_LANDMARKS:
        return f"num_landmarks={num_landmarks} is more than the {MAX_LANDMARKS} that fit: choose at most that"
    if conv_weight is not None and conv_weight.shape[2] > MAX_TAPS:
        return f"conv_kernel_size={conv_weight.shape[2]} is more than the {MAX_TAPS} that fit: choose at most that"
    if dim > MAX_HEAD_SIZE:
        return (
            f"a head size of {dim} is more than the {MAX_HEAD_SIZE} that fit: raise num_attention_heads, hidden_size "
            "staying the same"
        )
    dtypes = {tensor.dtype for tensor in tensors}
    if not dtypes <= set(_DTYPES) or (len(dtypes) > 1 and not torch.is_autocast_enabled(device.type)):
        return f"they take one dtype, float16, bfloat16 or float32, and not {', '.join(sorted(map(str, dtypes)))}"
    dtype = _computed_dtype(query)
    fitting = MAX_LANDMARKS_TIMES_HEAD_SIZE // (2 if dtype == torch.float32 else 1)
    if _power_of_two(num_landmarks) * _power_of_two(dim) > fitting:
        most = f"choose at most {fitting // _power_of_two(dim)}" + (" or bfloat16" if dtype == torch.float32 else "")
        return f"num_landmarks={num_landmarks} do not fit with a head size of {dim} in {dtype}: {most}"
    if not 0 <= dropout_p < 1:
        return f"they drop weights with a probability of at least 0 and below 1, and dropout_p is {dropout_p}"
    if batch * heads > _MAX_PROGRAMS:
        return f"batch size times heads is {batch * heads}, above {_MAX_PROGRAMS}: take a smaller batch"
    if length * max(heads * dim, query.stride(2), key.stride(2), value.stride(2)) >= 2**31:
        return "an example has 2**31 elements or more"
    return None


def nystrom_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    num_landmarks: int | None,
    pinv_iterations: int = 6,
    conv_weight: Tensor | None = None,
    dropout_p: float = 0.0,
    segments: Segments | None = None,
) -> Tensor:
    """`attention_nystrom.nystrom_attention` by the kernels; differentiable once.

    Raises ValueError where `why_not` has a reason.

    Returns: (B, H, N, D), zero at invalid tokens; gradients that come in there are ignored.
    """
    reason = why_not(
        query,
        key,
        value,
        mask,
        num_landmarks=num_landmarks,
        pinv_iterations=pinv_iterations,
        conv_weight=conv_weight,
        dropout_p=dropout_p,
        segments=segments,
    )
    if reason is not None or num_landmarks is None:
        raise ValueError(f"The Triton kernels do not apply: {reason}.")
    return _attend(query, key, value, mask, num_landmarks, pinv_iterations, conv_weight, dropout_p, segments)


def nystrom_attention_if_possible(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    *,
    num_landmarks: int,
    pinv_iterations: int = 6,
    conv_weight: Tensor | None = None,
    dropout_p: float = 0.0,
    segments: Segments | None = None,
) -> Tensor | None:
    """The same, or None where the kernels do not apply. On a GPU the reason is logged, once."""
    if query.device.type not in _devices:
        return None
    if torch.compiler.is_compiling():
        return _attend_in_graph(
            query, key, value, mask, num_landmarks, pinv_iterations, conv_weight, dropout_p, segments
        )
    reason = why_not(
        query,
        key,
        value,
        mask,
        num_landmarks=num_landmarks,
        pinv_iterations=pinv_iterations,
        conv_weight=conv_weight,
        dropout_p=dropout_p,
        segments=segments,
    )
    if reason is None:
        reason = _fault(query.device, _computed_dtype(query), num_landmarks, query.shape[-1])
    if reason is not None:
        logger.warning_once(
            f'Nyström attention without its Triton kernels: {reason}. attn_implementation="sdpa" silences this.'
        )
        return None
    return _attend(query, key, value, mask, num_landmarks, pinv_iterations, conv_weight, dropout_p, segments)


def _computed_dtype(query: Tensor) -> torch.dtype:
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


@torch.compiler.assume_constant_result
def _work(device: torch.device, dtype: torch.dtype, num_landmarks: int, dim: int) -> bool:
    """Found out once, when a graph is recorded."""
    return why_not_on(device) is None and _fault(device, dtype, num_landmarks, dim) is None


def _attend_in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    num_landmarks: int,
    pinv_iterations: int,
    conv_weight: Tensor | None,
    dropout_p: float,
    segments: Segments | None,
) -> Tensor | None:
    """The attention as an operator of the graph that torch.compile records; None where the kernels do not apply.

    Exported graphs are for other programs, which do not know the operator.
    """
    if torch.compiler.is_exporting() or query.shape[2] <= num_landmarks:
        return None
    if _why_not_of_shape(query, key, value, num_landmarks, conv_weight, dropout_p) is not None:
        return None
    if not _work(query.device, _computed_dtype(query), num_landmarks, query.shape[-1]):
        return None
    return _attend(query, key, value, mask, num_landmarks, pinv_iterations, conv_weight, dropout_p, segments)


def _seed(device: torch.device, dropout_p: float) -> Tensor | None:
    # On the device, so that the host does not wait and a CUDA graph draws anew every time.
    return torch.randint(2**62, (1,), device=device) if dropout_p > 0 else None


# Largest difference over largest value, of outputs and gradients: roundings stay far below, faults do not.
_FAULT = {torch.float32: 1e-2, torch.bfloat16: 1e-1, torch.float16: 5e-2}


@functools.cache
def _fault(device: torch.device, dtype: torch.dtype, num_landmarks: int, dim: int) -> str | None:
    """What is wrong with the kernels of these sizes on this device; None if they compute what PyTorch does.

    A small attention with its gradients is computed by both, once in a process.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("Run the model once before its CUDA graph is captured: the kernels are compiled then.")
    length = 2 * num_landmarks + 3
    results = []
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
            generator = torch.Generator().manual_seed(0)
            draws = [torch.randn(2, 1, length, dim, generator=generator) for _ in range(4)]
            mask = torch.ones(2, length, dtype=torch.bool, device=device)
            mask[0, : num_landmarks // 2] = False
            attends = (
                lambda q, k, v, weight: _attend(q, k, v, mask, num_landmarks, 2, weight, 0.0, None),
                lambda q, k, v, weight: nystrom_attention_reference(
                    q,
                    k,
                    v,
                    mask,
                    num_landmarks=num_landmarks,
                    pinv_iterations=2,
                    skip=depthwise_convolution(v, weight, mask),
                ),
            )
            for attend in attends:
                *inputs, gradient = (draw.to(device, dtype) for draw in draws)
                taps = torch.full((1, 1, 5, 1), 0.2, device=device, dtype=dtype)
                leaves = [tensor.requires_grad_() for tensor in (*inputs, taps)]
                out = attend(*leaves)
                kept = mask[:, None, :, None]
                gradients = torch.autograd.grad(out, leaves, gradient * kept)
                results.append([tensor.detach().float() for tensor in (out * kept, *gradients)])
    except Exception as error:  # whatever a compiler or a driver raises
        return f"a first try on {device} failed ({type(error).__name__}: {str(error)[:200]})"
    for ours, theirs in zip(*results, strict=True):
        difference = float((ours - theirs).abs().max() / theirs.abs().max())
        if not difference <= _FAULT[dtype]:
            return f"a first try on {device} differs from PyTorch's operations by {difference:.1%}"
    return None


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    num_landmarks: int,
    pinv_iterations: int,
    conv_weight: Tensor | None,
    dropout_p: float,
    segments: Segments | None,
) -> Tensor:
    from .attention import Attention
    from .tiles import Rows
    from .torch_operator import nystrom_attention as in_graph

    dtype = _computed_dtype(query)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    conv_weight = None if conv_weight is None else conv_weight.to(dtype)
    seed = _seed(query.device, dropout_p)
    rows = None
    if mask is not None:
        rows = Rows.of(mask, landmark_segments(mask, num_landmarks) if segments is None else segments)
    compute = in_graph if torch.compiler.is_compiling() else Attention.apply
    return compute(query, key, value, conv_weight, seed, rows, num_landmarks, pinv_iterations, dropout_p)


__all__ = ["MAX_HEAD_SIZE", "MAX_LANDMARKS", "MAX_TAPS", "nystrom_attention", "why_not", "why_not_on"]
