# SPDX-License-Identifier: Apache-2.0
"""Each stage of the kernels for Nyström attention, forward and backward, against formulas in float64."""

import pytest
import torch

from nystrom_models.models.depthwise_convolution import depthwise_convolution
from tests.kernels.helpers import (
    DEVICE,
    DIM,
    HEADS,
    M,
    check,
    differentiable,
    draw,
    draw_states,
    means_of_segments,
    ragged,
    rows_of,
    valid_tokens,
)
from tests.models import formulas

pytest.importorskip("triton")

MASKED = pytest.mark.parametrize("masked", [False, True], ids=["full", "ragged"])


def test_parts_fill_a_device():
    from nystrom_models.kernels.common import count_parts

    # 96 heads of 128 blocks, 264 programs at once: 5 parts are two rounds of 240. 2 parts would be one round of 192;
    # with 6 parts, a third round would be nearly empty.
    assert count_parts(128, 96, 264) == 5
    assert count_parts(8, 1536, 264) == 1  # there are enough programs
    assert count_parts(3, 1, 264) == 3  # no more parts than blocks


@MASKED
@pytest.mark.parametrize("length", [5, 6, 61], ids=lambda length: f"length{length}")
def test_landmarks_are_means_of_segments(length, masked):
    from nystrom_models.kernels.nystrom import landmarks

    mask = ragged(max(length, 9)) if masked else None
    length = length if mask is None else mask.shape[1]
    rows = rows_of(mask)

    def backward(before, gradient):
        # The gradient comes in parts, and is added to another gradient of the queries.
        parts = draw(2, *gradient.shape).movedim(0, 2).contiguous()
        dq = before.clone()
        landmarks.landmarks_backward(dq, gradient - parts.sum(dim=2), parts, rows)
        return dq - before

    tokens = valid_tokens(mask, 4, length)
    check(
        differentiable(lambda q: (landmarks.landmarks_forward(q, M, rows), torch.ones_like(q)), backward),
        lambda q: means_of_segments(q, tokens),
        draw_states(length, 1),
    )


@pytest.mark.parametrize("where", ["on_chip", "workspace"])
@pytest.mark.parametrize(
    ("count", "masked", "dtype"),
    [(5, True, torch.float32), (5, False, torch.float16), (17, False, torch.float32), (40, False, torch.float16)],
    ids=str,
)
def test_pseudo_inverse(count, masked, dtype, where, monkeypatch):
    """W = A⁺ S and the gradients of both landmarks and S; in float32, the backward pass never stays on the chip."""
    from nystrom_models.kernels.nystrom import pseudo_inverse

    if where == "workspace":
        monkeypatch.setattr(pseudo_inverse, "ON_CHIP_LANDMARKS", 0)
    # Fewer programs than heads, so that one takes several in turn.
    monkeypatch.setattr(pseudo_inverse, "programs_at_once", lambda device, resident: 3)
    mask = ragged(17) if masked else None
    batch = 4 if masked else 2
    iterations = 6 if count == 17 else 2
    rows = rows_of(mask)
    # Far from uniform, because a nearly singular A hides errors. S has the size of a mean of some values.
    q, k = (2 * draw(batch, HEADS, count, DIM, dtype=dtype) for _ in range(2))
    seen = 1 + draw(batch, HEADS, count, DIM)
    elsewhere = draw(batch, HEADS, count, DIM)

    def forward(q, k, seen):
        return pseudo_inverse.pseudo_inverse_forward(q, k.float(), seen, iterations, rows), (q, k.float(), seen)

    def backward(saved, gradient):
        dq, dk, dseen = pseudo_inverse.pseudo_inverse_backward(
            *saved, gradient.float(), elsewhere.clone(), iterations, rows
        )
        return dq, dk - elsewhere, dseen

    def reference(q, k, seen):
        out = []
        for row, tokens in enumerate(valid_tokens(mask, batch, 17)):
            if masked and len(tokens) <= M:
                there = (torch.arange(count) < len(tokens)).to(q.dtype)[:, None]
                out.append(seen[row] * there + 0 * (q[row].sum() + k[row].sum()))
            else:
                a = [formulas.softmax(q[row, head] @ k[row, head].T / DIM**0.5) for head in range(HEADS)]
                inverse = torch.stack([formulas.pseudo_inverse(matrix, iterations) for matrix in a])
                out.append(inverse @ seen[row])
        return torch.stack(out)

    # Half precision rounds W; its backward pass uses single TF32 products, which are rounded here as on a GPU.
    tolerance = 2e-5 if dtype == torch.float32 else 6e-3
    check(differentiable(forward, backward), reference, (q, k, seen), tolerance=tolerance)


@MASKED
@pytest.mark.parametrize("length", [9, 101], ids=lambda length: f"length{length}")
def test_landmarks_attend_to_valid_tokens(length, masked):
    from nystrom_models.kernels.nystrom import landmark_attention

    mask = ragged(length) if masked else None
    rows = rows_of(mask)
    k, v = draw_states(length, 2)
    landmarks = draw(4, HEADS, M, DIM)
    tokens_of_rows = valid_tokens(mask, 4, length)
    exists = torch.stack([torch.arange(M) < len(tokens) for tokens in tokens_of_rows])
    keep = 1 if mask is None else mask[:, :, None, None]

    def forward(q, k, v):
        out, lse, k_landmarks = landmark_attention.landmark_attention_forward(q, k, v, rows)
        return (out, k_landmarks), (q, k, v, out, lse)

    def backward(saved, *gradients):
        run = landmark_attention.landmark_attention_backward
        partial, dk, dv = run(*saved, *gradients, rows=rows)
        # Another gradient of the values, to which this one is added.
        before = torch.randn(dv.shape).to(dv) * keep
        together = run(*saved, *gradients, dv=before.clone(), rows=rows)[2]
        torch.testing.assert_close(together, dv + before)
        return partial.sum(dim=2), dk, dv

    def reference(q, k, v):
        out = []
        for row, tokens in enumerate(tokens_of_rows):
            keys, values = (states[row, tokens].transpose(0, 1) for states in (k, v))
            if len(tokens) > M:
                out.append(formulas.softmax(q[row] @ keys.mT / DIM**0.5) @ values)
            else:
                rest = v.new_zeros(HEADS, M - len(tokens), DIM)
                out.append(torch.cat([values, rest], dim=1) + 0 * (q[row].sum() + k[row].sum()))
        return torch.stack(out), means_of_segments(k, tokens_of_rows)

    check(differentiable(forward, backward), reference, (landmarks, k, v), keep=exists[:, None, :, None])


def test_one_part_needs_no_merge(monkeypatch):
    """The result does not depend on the number of parts."""
    from nystrom_models.kernels.nystrom import landmark_attention

    mask = ragged(301)
    k, v = draw_states(301, 2)
    landmarks = draw(4, HEADS, M, DIM)
    plan = landmark_attention.plan_launch
    results = []
    for parts in (1, 3, 7):
        monkeypatch.setattr(landmark_attention, "plan_launch", lambda *sizes, parts=parts: (parts, plan(*sizes)[1]))
        results.append(landmark_attention.landmark_attention_forward(landmarks, k, v, rows_of(mask)))
    for found in results[1:]:
        for one, many in zip(results[0], found, strict=True):
            torch.testing.assert_close(one, many)


def test_keys_and_values_may_have_an_offset():
    """The gradient of a landmark is a sum over the tokens, in which a component that all keys share must cancel.

    In float16, to which the interpreter rounds like a GPU, against float64.
    """
    from nystrom_models.kernels.nystrom import landmark_attention

    landmarks = draw(1, HEADS, M, DIM, dtype=torch.float16)
    k, v = (4 + states for states in draw_states(301, 2, batch=1, dtype=torch.float16))

    def forward(q, k, v):
        out, lse, _ = landmark_attention.landmark_attention_forward(q, k, v)
        return out, (q, k, v, out, lse)

    def backward(saved, gradient):
        partial, dk, dv = landmark_attention.landmark_attention_backward(*saved, gradient, torch.zeros_like(gradient))
        return partial.sum(dim=2), dk, dv

    check(
        differentiable(forward, backward),
        lambda q, k, v: torch.softmax(q @ k.permute(0, 2, 3, 1) / DIM**0.5, dim=-1) @ v.transpose(1, 2),
        (landmarks, k, v),
        # Measured: 1.8e-3 for q's gradient; 1.6e-2 if only one term of the difference is rounded.
        tolerance=7e-3,
    )


def token_attention(rows, seed=None, dropout_p=0.0):
    """The kernels as a function of query, k~, W and, for a convolution, value and taps."""
    from nystrom_models.kernels.nystrom import convolution
    from nystrom_models.kernels.nystrom import token_attention as stage

    def forward(q, k_landmarks, w, v=None, taps=None):
        out = stage.token_attention_forward(q, k_landmarks, w, q if v is None else v, taps, rows, seed, dropout_p)
        return out, (q, k_landmarks, w, v, taps)

    def backward(saved, do):
        *attention, v, taps = saved
        gradients = stage.token_attention_backward(*attention, do, rows, seed, dropout_p)
        if v is None:
            return gradients
        of_convolution = convolution.convolution_backward(v, taps, do, M, rows)
        dv, nothing = convolution.convolution_backward(v, taps, do, M, rows, of_taps=False)
        assert torch.equal(dv, of_convolution[0]) and nothing is None
        return *gradients, *of_convolution

    return differentiable(forward, backward)


@MASKED
@pytest.mark.parametrize(
    ("length", "taps", "dtype", "block"),
    [
        (9, 5, torch.float32, 64),
        (37, 0, torch.float32, 64),
        (37, 9, torch.float32, 64),
        (9, 1, torch.float16, 64),
        (61, 33, torch.float16, 64),
        (200, 65, torch.float16, 64),
        # As for head sizes above 64: the window spans three blocks.
        pytest.param(200, 65, torch.float16, 32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_attend_to_landmarks_and_are_convolved(length, taps, dtype, block, masked, monkeypatch):
    from nystrom_models.kernels.nystrom import launches

    for stage in ("token_attention_fwd", "convolution_bwd"):
        launch = launches.LAUNCHES[stage][0]._replace(block=block)
        monkeypatch.setitem(launches.LAUNCHES, stage, (launch, launch, launches.LAUNCHES[stage][2]))
    mask = ragged(length) if masked else None
    q, v = draw_states(length, 2, dtype=dtype)
    landmarks = [draw(4, HEADS, M, DIM), draw(4, HEADS, M, DIM, dtype=dtype)]
    convolution = [v, (draw(HEADS, 1, taps, 1) / taps**0.5).to(dtype)] if taps else []
    keep = torch.ones(4, length) if mask is None else mask.cpu().float()

    def reference(q, k, w, *convolution):
        out = []
        for row, tokens in enumerate(valid_tokens(mask, 4, length)):
            count = max(1, min(M, len(tokens)))
            heads = []
            for head in range(HEADS):
                weights = formulas.softmax(q[row, :, head] @ k[row, head, :count].T / DIM**0.5)
                context = weights @ w[row, head, :count]
                if convolution:
                    v, weight = convolution
                    v = v[row, :, head] * keep[row, :, None]
                    # The formula with one loop over the taps, not over tokens and taps.
                    padded = torch.nn.functional.pad(v, (0, 0, taps // 2, taps // 2))
                    context = context + sum(weight[head, 0, tap] * padded[tap : tap + length] for tap in range(taps))
                heads.append(context)
            out.append(torch.stack(heads, dim=1))
        return torch.stack(out)

    inputs = (q, *landmarks, *convolution)
    check(token_attention(rows_of(mask)), reference, inputs, keep=keep[:, :, None, None], dtype=dtype)


def test_dropout_drops_weights_and_their_gradients():
    length, probability = 61, 0.3
    mask = ragged(length)
    q, v = draw_states(length, 2)
    k_landmarks, w = draw(4, HEADS, M, DIM), draw(4, HEADS, M, DIM)
    seed = torch.tensor([2**40 + 7], device=DEVICE)
    # With the rows of an identity as values, the result is the weights.
    identity = torch.eye(M, DIM, device=DEVICE).expand(4, HEADS, M, DIM).contiguous()

    def weights(seed):
        return token_attention(rows_of(mask), seed, probability)(q, k_landmarks, identity)[..., :M]

    plain, dropped = weights(None), weights(seed)
    zero = dropped == 0
    torch.testing.assert_close(dropped[~zero], plain[~zero] / (1 - probability))
    everywhere = mask.clone()
    everywhere[1:] = False  # rows whose landmarks all exist
    drawn = zero[everywhere]
    assert abs(drawn.float().mean() - probability) < 4 * (probability * (1 - probability) / drawn.numel()) ** 0.5
    assert torch.equal(weights(seed), dropped) and not torch.equal(weights(seed + 1), dropped)
    assert not torch.equal(zero[0, :, 0], zero[0, :, 1])

    def reference(q, k, w, v, weight):
        out = []
        for row, tokens in enumerate(valid_tokens(mask, 4, length)):
            count = max(1, min(M, len(tokens)))
            f = torch.softmax(q[row].transpose(0, 1) @ k[row, :, :count].mT / DIM**0.5, dim=-1)
            f = f * ~zero[row].transpose(0, 1)[..., :count].cpu() / (1 - probability)
            out.append(f @ w[row, :, :count])
        context = torch.stack(out) + depthwise_convolution(v.transpose(1, 2), weight, mask.cpu())
        return context.transpose(1, 2)

    check(
        token_attention(rows_of(mask), seed, probability),
        reference,
        (q, k_landmarks, w, v, draw(HEADS, 1, 5, 1)),
        keep=mask.cpu()[:, :, None, None],
    )


def test_weights_are_dropped_independently():
    """Four weights come from one draw: they are independent, as are neighbours in tokens or heads."""
    from nystrom_models.kernels.nystrom import token_attention as stage

    count, length = 32, 400
    q = torch.zeros(1, length, HEADS, count, device=DEVICE)
    identity = torch.eye(count, device=DEVICE).expand(1, HEADS, count, count).contiguous()
    seed = torch.tensor([3], device=DEVICE)
    out = stage.token_attention_forward(q, torch.zeros_like(identity), identity, q, seed=seed, dropout_p=0.5)
    kept = torch.sign(out[0].cpu().double() - 1e-6).transpose(0, 1)  # (H, N, M), 1 or -1
    samples = kept.reshape(HEADS, -1)
    for other in (kept.roll(1, dims=1), *(kept.roll(shift, dims=2) for shift in (1, 8, 16))):
        correlation = (samples * other.reshape(HEADS, -1)).mean()
        assert abs(correlation) < 4 / samples.numel() ** 0.5
    assert abs((samples[0] * samples[1]).mean()) < 4 / samples[0].numel() ** 0.5
    assert abs(samples.mean()) < 4 / samples.numel() ** 0.5
