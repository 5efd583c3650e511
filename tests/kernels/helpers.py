# SPDX-License-Identifier: Apache-2.0
"""Inputs of the kernels' tests, and their comparison with formulas in float64."""

import torch

from nystrom_models.models.attention_nystrom import landmark_segments
from tests.models import formulas
from tests.models.options import relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
M = 5
HEADS, DIM = 2, 10

# Largest error over largest entry, at most four times the value measured in the interpreter. Float32 sums in another
# order than the formulas. The interpreter rounds to float16 like a GPU, but truncates to bfloat16.
KERNEL_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 5e-3}


def ragged(length):
    """Rows with holes, with as many valid tokens as landmarks, with few tokens, and without a token."""
    mask = torch.zeros(4, length, dtype=torch.bool)
    mask[0] = torch.rand(length) < 0.6
    mask[0, length // 2 : length // 2 + M + 1] = True
    mask[1, 2 : 2 + M] = True
    mask[2, length - 3 :: 2] = True
    return mask.to(DEVICE)


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def draw_states(length, count, batch=4, dtype=torch.float32):
    """Tensors (B, N, H, D), the inputs of the stages."""
    return [draw(batch, length, HEADS, DIM, dtype=dtype) for _ in range(count)]


def draw_heads(length, count, batch=4, dtype=torch.float32):
    """Tensors (B, H, N, D) in the layout of a model, the inputs of the attention."""
    return [states.transpose(1, 2) for states in draw_states(length, count, batch, dtype)]


def rows_of(mask):
    from nystrom_models.kernels.nystrom.rows import Rows

    return None if mask is None else Rows.of(mask, landmark_segments(mask, M))


def differentiable(forward, backward):
    """A function for autograd from the forward and backward functions of a stage.

    forward(*inputs) -> (outputs, what backward needs); backward(saved, *gradients) -> the gradients of the inputs.
    """

    class Stage(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            outputs, ctx.saved = forward(*(tensor.detach() for tensor in inputs))
            return outputs

        @staticmethod
        def backward(ctx, *gradients):
            return backward(ctx.saved, *(gradient.contiguous() for gradient in gradients))

    return Stage.apply


def valid_tokens(mask, batch, length):
    mask = torch.ones(batch, length, dtype=torch.bool) if mask is None else mask.cpu()
    return [row.nonzero().squeeze(1) for row in mask]


def check(function, reference, inputs, keep=None, dtype=torch.float32, tolerance=None):
    """Compares outputs, where `keep` is not 0, and every gradient with `reference` in float64 on the CPU."""
    results = []
    for run, cast in ((function, None), (reference, torch.float64)):
        leaves = [tensor.detach().to("cpu" if cast else DEVICE, cast or tensor.dtype) for tensor in inputs]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        outputs = run(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(output.shape, generator=generator) for output in outputs]
        if keep is not None:
            weights = [weight * keep.cpu() for weight in weights]
        loss = sum((output * weight.to(output)).sum() for output, weight in zip(outputs, weights, strict=True))
        gradients = torch.autograd.grad(loss, leaves)
        kept = [output.detach().cpu() * (weight != 0) for output, weight in zip(outputs, weights, strict=True)]
        results.append([*kept, *(gradient.cpu() for gradient in gradients)])
    for index, (actual, expected) in enumerate(zip(*results, strict=True)):
        assert relative_error(actual, expected) < (tolerance or KERNEL_TOLERANCE[dtype]), index


def means_of_segments(states, tokens_of_rows):
    """The landmarks (B, H, M, D) of the valid tokens of states (B, N, H, D), zero where there is none."""
    means = states.new_zeros(len(tokens_of_rows), HEADS, M, DIM)
    for row, tokens in enumerate(tokens_of_rows):
        count = min(M, len(tokens))
        for head in range(HEADS):
            if count:
                means[row, head, :count] = formulas.segment_means(states[row, tokens, head], count)
    return means
