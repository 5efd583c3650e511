# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels, which are interpreted where there is no GPU (TRITON_INTERPRET, set by tests/conftest.py)."""

import pytest
import torch

import nystrom_models
from nystrom_models import kernels
from nystrom_models.models import attention_nystrom
from nystrom_models.models.attention_nystrom import landmark_segments, nystrom_attention, nystrom_attention_reference
from nystrom_models.models.attention_ops import depthwise_convolution
from tests.models import formulas
from tests.models.options import TINY, TOLERANCE, relative_error

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
M = 5
HEADS, DIM = 2, 10

# Float32 sums in another order than the reference; half precisions round weights and gradients between products.
KERNEL_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    kernels._fault.cache_clear()
    monkeypatch.setattr(kernels, "_devices", {"cuda", DEVICE})
    monkeypatch.delenv(kernels.VARIABLE, raising=False)


def ragged(length):
    """Rows with holes, padded on both sides to as many tokens as landmarks, a short one, one without a token."""
    mask = torch.zeros(4, length, dtype=torch.bool)
    mask[0] = torch.rand(length) < 0.6
    mask[0, length // 2 : length // 2 + M + 1] = True
    mask[1, 2 : 2 + M] = True
    mask[2, length - 3 :: 2] = True
    return mask.to(DEVICE)


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape).to(DEVICE, dtype)


def states(length, count, batch=4, dtype=torch.float32):
    """Tensors (B, H, N, D) in the layout of a model."""
    return [draw(batch, length, HEADS, DIM, dtype=dtype).transpose(1, 2) for _ in range(count)]


def rows_of(mask):
    from nystrom_models.kernels.tiles import Rows

    return Rows.of(mask, landmark_segments(mask, M))


def differentiable(forward, backward):
    """A kernel's two functions as one that autograd differentiates.

    forward(*inputs) -> (outputs, what backward needs); backward(saved, *gradients) -> the gradients of the inputs.
    """

    class Piece(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            outputs, ctx.saved = forward(*(tensor.detach() for tensor in inputs))
            return outputs

        @staticmethod
        def backward(ctx, *gradients):
            return backward(ctx.saved, *(gradient.contiguous() for gradient in gradients))

    return Piece.apply


def valid_tokens(mask, batch, length):
    mask = torch.ones(batch, length, dtype=torch.bool) if mask is None else mask.cpu()
    return [row.nonzero().squeeze(1) for row in mask]


def check(function, reference, inputs, keep=None, dtype=torch.float32, tolerance=None):
    """Outputs, where `keep` is not 0, and every gradient against `reference` in float64 on the CPU."""
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


def means_of_segments(tensor, tokens_of_rows):
    """Of the valid tokens, (B, H, M, D), zero where there is none."""
    means = tensor.new_zeros(len(tokens_of_rows), HEADS, M, DIM)
    for row, tokens in enumerate(tokens_of_rows):
        count = min(M, len(tokens))
        for head in range(HEADS):
            if count:
                means[row, head, :count] = formulas.segment_means(tensor[row, head, tokens], count)
    return means


def test_parts_fill_a_device():
    from nystrom_models.kernels.launch import count_parts

    # 96 heads of 128 blocks each on 264 places: two rounds of 240, not one of 192 or three with a third nearly empty.
    assert count_parts(128, 96, 264) == 5
    assert count_parts(8, 1536, 264) == 1  # there is enough to do for all
    assert count_parts(3, 1, 264) == 3  # no more parts than blocks


@pytest.mark.parametrize("masked", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize("length", [5, 6, 61], ids=lambda length: f"length{length}")
def test_landmarks_are_means_of_segments(length, masked):
    from nystrom_models.kernels import landmarks

    mask = ragged(max(length, 9)) if masked else None
    rows = None if mask is None else rows_of(mask)
    length = length if mask is None else mask.shape[1]

    def backward(before, gradient):
        query_grad = before.clone()
        landmarks.add_gradient(query_grad, gradient, rows)
        return query_grad - before

    function = differentiable(lambda query: (landmarks.run_forward(query, M, rows), torch.ones_like(query)), backward)
    tokens = valid_tokens(mask, 4, length)
    check(function, lambda query: means_of_segments(query, tokens), states(length, 1))


@pytest.mark.parametrize("where", ["on_chip", "workspace"])
@pytest.mark.parametrize(("count", "masked"), [(5, True), (5, False), (17, False)], ids=["ragged", "full", "wide"])
def test_pseudo_inverse(count, masked, where, monkeypatch):
    from nystrom_models.kernels import pseudo_inverse

    if where == "workspace":
        monkeypatch.setattr(pseudo_inverse, "ON_CHIP_LANDMARKS", 0)
    mask = ragged(17) if masked else None
    batch = 4 if masked else 1
    iterations = 6 if count == 17 else 2
    rows = rows_of(mask) if masked else None
    seen = draw(batch, HEADS, count, DIM)
    # Far from uniform: in a nearly singular A all start values are much alike.
    landmarks = [2 * draw(batch, HEADS, count, DIM) for _ in range(2)]

    def forward(q, k):
        inverse, landmark_values = pseudo_inverse.run_forward(q, k, seen, iterations, rows)
        torch.testing.assert_close(landmark_values, inverse @ seen)
        return inverse, (q, k)

    def reference(q, k):
        out = []
        for row, tokens in enumerate(valid_tokens(mask, batch, 17)):
            if masked and len(tokens) <= M:
                chosen = (torch.arange(count) < len(tokens)).to(q.dtype).diag().expand(HEADS, count, count)
                out.append(chosen + 0 * (q[row].sum() + k[row].sum()))
            else:
                a = [formulas.softmax(q[row, head] @ k[row, head].T / DIM**0.5) for head in range(HEADS)]
                out.append(torch.stack([formulas.pseudo_inverse(matrix, iterations) for matrix in a]))
        return torch.stack(out)

    backward = lambda saved, gradient: pseudo_inverse.run_backward(*saved, gradient, iterations, rows)  # noqa: E731
    check(differentiable(forward, backward), reference, landmarks)


@pytest.mark.parametrize("masked", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize("length", [9, 101], ids=lambda length: f"length{length}")
def test_landmarks_attend_to_valid_tokens(length, masked):
    from nystrom_models.kernels import landmark_attention

    mask = ragged(length) if masked else None
    rows = None if mask is None else rows_of(mask)
    key, value = states(length, 2)
    landmarks = draw(4, HEADS, M, DIM)
    tokens_of_rows = valid_tokens(mask, 4, length)
    exists = torch.stack([torch.arange(M) < len(tokens) for tokens in tokens_of_rows])

    def forward(q, k, v):
        context, lse, key_landmarks = landmark_attention.run_forward(q, k, v, rows)
        return (context, key_landmarks), (q, k, v, context, lse)

    def backward(saved, *gradients):
        query_grad, key_grad, value_grad = landmark_attention.run_backward(*saved, *gradients, rows=rows)
        # What values got from elsewhere is added to.
        before = torch.randn(value_grad.shape).to(value_grad).mul(mask_of_states).transpose(1, 2).contiguous()
        before = before.transpose(1, 2)
        together = landmark_attention.run_backward(*saved, *gradients, value_grad=before.clone(), rows=rows)[2]
        torch.testing.assert_close(together, value_grad + before)
        return query_grad, key_grad, value_grad

    def reference(q, k, v):
        out = []
        for row, tokens in enumerate(tokens_of_rows):
            values = v[row][:, tokens]
            if len(tokens) > M:
                out.append(formulas.softmax(q[row] @ k[row][:, tokens].mT / DIM**0.5) @ values)
            else:
                rest = v.new_zeros(HEADS, M - len(tokens), DIM)
                out.append(torch.cat([values, rest], dim=1) + 0 * (q[row].sum() + k[row].sum()))
        return torch.stack(out), means_of_segments(k, tokens_of_rows)

    mask_of_states = 1 if mask is None else mask[:, None, :, None]
    check(differentiable(forward, backward), reference, (landmarks, key, value), keep=exists[:, None, :, None])


def test_keys_and_values_may_have_an_offset():
    """The gradient of a landmark is a sum over the tokens in which what all keys have in common must cancel.

    In half precision, where the interpreter rounds as a GPU does, against float64.
    """
    from nystrom_models.kernels import landmark_attention

    landmarks = draw(1, HEADS, M, DIM, dtype=torch.float16)
    key, value = (4 + tensor for tensor in states(301, 2, batch=1, dtype=torch.float16))

    def forward(q, k, v):
        context, lse, _ = landmark_attention.run_forward(q, k, v)
        return context, (q, k, v, context, lse)

    def backward(saved, gradient):
        return landmark_attention.run_backward(*saved, gradient, torch.zeros_like(gradient))

    check(
        differentiable(forward, backward),
        lambda q, k, v: torch.softmax(q @ k.mT / DIM**0.5, dim=-1) @ v,
        (landmarks, key, value),
        dtype=torch.float16,
        # Measured: 1.8e-3 of q's gradient; 1.6e-2 with one term of the difference rounded and the other not.
        tolerance=7e-3,
    )


def token_attention(rows, seed=None, dropout_p=0.0):
    """The kernels as a function of query, k~, W and, for a convolution, value and taps."""
    from nystrom_models.kernels import token_attention as kernel

    def forward(query, key_landmarks, landmark_values, value=None, taps=None):
        saved = query, key_landmarks, landmark_values, value, taps
        arguments = query, key_landmarks, landmark_values, query if value is None else value, taps
        return kernel.run_forward(*arguments, rows, seed, dropout_p), saved

    def backward(saved, gradient):
        *attention, value, taps = saved
        gradients = kernel.run_backward(*attention, gradient, rows, seed, dropout_p)
        if value is None:
            return gradients
        of_convolution = kernel.run_convolution_backward(value, taps, gradient, M, rows)
        of_value, nothing = kernel.run_convolution_backward(value, taps, gradient, M, rows, of_taps=False)
        assert torch.equal(of_value, of_convolution[0]) and nothing is None
        return *gradients, *of_convolution

    return differentiable(forward, backward)


@pytest.mark.parametrize("masked", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize(("length", "taps"), [(9, 5), (61, 0), (61, 1), (61, 33), (61, 51)])
def test_tokens_attend_to_landmarks_and_are_convolved(length, taps, masked):
    mask = ragged(length) if masked else None
    query, value = states(length, 2)
    landmarks = [draw(4, HEADS, M, DIM) for _ in range(2)]
    convolution = [value, draw(HEADS, 1, taps, 1)] if taps else []
    keep = torch.ones(4, length) if mask is None else mask.cpu().float()

    def reference(q, k, w, *convolution):
        out = []
        for row, tokens in enumerate(valid_tokens(mask, 4, length)):
            count = max(1, min(M, len(tokens)))
            heads = []
            for head in range(HEADS):
                weights = formulas.softmax(q[row, head] @ k[row, head, :count].T / DIM**0.5)
                context = weights @ w[row, head, :count]
                if convolution:
                    v, weight = convolution
                    v = v[row, head] * keep[row, :, None]
                    # The formula in one product: as many loops as taps, not as tokens times taps.
                    padded = torch.nn.functional.pad(v, (0, 0, taps // 2, taps // 2))
                    context = context + sum(weight[head, 0, tap] * padded[tap : tap + length] for tap in range(taps))
                heads.append(context)
            out.append(torch.stack(heads))
        return torch.stack(out)

    function = token_attention(None if mask is None else rows_of(mask))
    check(function, reference, (query, *landmarks, *convolution), keep=keep[:, None, :, None])


@pytest.mark.parametrize(
    ("length", "masked", "dtype"),
    [
        (6, False, torch.float32),
        (37, True, torch.float32),
        (37, True, torch.bfloat16),
        (37, True, torch.float16),
        (150, True, torch.float16),
    ],
    ids=str,
)
def test_the_whole_is_the_reference(length, masked, dtype):
    mask = ragged(length) if masked else None
    inputs = [*states(length, 3, dtype=dtype), (draw(HEADS, 1, 5, 1) / 5).to(dtype)]
    keep = torch.ones(4, length) if mask is None else mask.cpu().float()

    def run(function, mask, q, k, v, weight):
        return function(q, k, v, mask, num_landmarks=M, pinv_iterations=2, conv_weight=weight)

    check(
        lambda *inputs: run(kernels.nystrom_attention, mask, *inputs),
        lambda *inputs: run(nystrom_attention_reference, None if mask is None else mask.cpu(), *inputs),
        inputs,
        keep=keep[:, None, :, None],
        dtype=dtype,
    )


def test_padding_is_never_read():
    """Neither what stands there nor the gradients that come in there, even if they are no numbers."""
    mask = ragged(37)
    clean = [tensor * mask[:, None, :, None] for tensor in states(37, 3)]
    weight = draw(4, HEADS, 37, DIM) * mask[:, None, :, None]
    results = []
    for content in (0.0, torch.nan):
        inputs = [tensor.masked_fill(~mask[:, None, :, None], content).requires_grad_() for tensor in clean]
        taps = torch.ones(HEADS, 1, 3, 1, device=DEVICE, requires_grad=True)
        out = kernels.nystrom_attention(*inputs, mask, num_landmarks=M, pinv_iterations=1, conv_weight=taps)
        gradient = weight.masked_fill(~mask[:, None, :, None], content)
        results.append([out.detach(), *torch.autograd.grad(out, [*inputs, taps], gradient)])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty) and torch.isfinite(dirty).all()
    assert not results[0][0].masked_select(~mask[:, None, :, None]).any()


def test_dropout_drops_weights_and_their_gradients():
    length, probability = 61, 0.3
    mask = ragged(length)
    query, value = states(length, 2)
    key_landmarks, landmark_values = draw(4, HEADS, M, DIM), draw(4, HEADS, M, DIM)
    seed = torch.tensor([2**40 + 7], device=DEVICE)
    # With the rows of an identity as values, the result is the weights.
    identity = torch.eye(M, DIM, device=DEVICE).expand(4, HEADS, M, DIM).contiguous()

    def weights(seed):
        return token_attention(rows_of(mask), seed, probability)(query, key_landmarks, identity)[..., :M]

    plain, dropped = weights(None), weights(seed)
    zero = dropped == 0
    torch.testing.assert_close(dropped[~zero], plain[~zero] / (1 - probability))
    everywhere = mask.clone()
    everywhere[1:] = False  # rows whose landmarks all exist
    drawn = zero[everywhere[:, None].expand(4, HEADS, length)]
    assert abs(drawn.float().mean() - probability) < 4 * (probability * (1 - probability) / drawn.numel()) ** 0.5
    assert torch.equal(weights(seed), dropped) and not torch.equal(weights(seed + 1), dropped)
    assert not torch.equal(zero[0, 0], zero[0, 1])

    def reference(q, k, w, v, weight):
        out = []
        for row, tokens in enumerate(valid_tokens(mask, 4, length)):
            count = max(1, min(M, len(tokens)))
            f = torch.softmax(q[row] @ k[row, :, :count].mT / DIM**0.5, dim=-1)
            f = f * ~zero[row, :, :, :count].cpu() / (1 - probability)
            out.append(f @ w[row, :, :count])
        return torch.stack(out) + depthwise_convolution(v, weight, mask.cpu())

    check(
        token_attention(rows_of(mask), seed, probability),
        reference,
        (query, key_landmarks, landmark_values, value, draw(HEADS, 1, 5, 1)),
        keep=mask.cpu()[:, None, :, None],
    )


def test_dropout_is_drawn_from_the_generator_and_its_mean_is_the_attention():
    inputs = states(13, 3, batch=1)
    plain = kernels.nystrom_attention(*inputs, num_landmarks=M, pinv_iterations=2)
    torch.manual_seed(0)
    drawn = [kernels.nystrom_attention(*inputs, num_landmarks=M, pinv_iterations=2, dropout_p=0.2) for _ in range(100)]
    torch.manual_seed(0)
    again = kernels.nystrom_attention(*inputs, num_landmarks=M, pinv_iterations=2, dropout_p=0.2)
    assert torch.equal(again, drawn[0]) and not torch.equal(drawn[0], drawn[1])
    drawn = torch.stack(drawn)
    error = (drawn.mean(dim=0) - plain).abs() / (drawn.std(dim=0) / 10)
    assert error.mean() < 1.2 and error.max() < 6


REASONS = {
    "dropout": ({"dropout_p": 1.0}, torch.float32, "below 1"),
    "exact": ({"num_landmarks": 12}, torch.float32, "exact attention"),
    "softmax": ({"num_landmarks": None}, torch.float32, "exact attention"),
    "dtype": ({}, torch.float64, "float16, bfloat16 or float32"),
    "mixed": ({"conv_weight": torch.ones(2, 1, 3, 1)}, torch.bfloat16, "one dtype"),
}


@pytest.mark.parametrize(("options", "dtype", "word"), REASONS.values(), ids=REASONS)
def test_what_does_not_apply_is_explained(options, dtype, word):
    inputs = states(12, 3, batch=1, dtype=dtype)
    options = {"num_landmarks": M} | options
    if "conv_weight" in options:
        options["conv_weight"] = options["conv_weight"].to(DEVICE)
    assert word in kernels.why_not(*inputs, **options)
    with pytest.raises(ValueError, match=word):
        kernels.nystrom_attention(*inputs, **options)


def test_sizes_that_do_not_fit_are_explained():
    def why_not(count, dim, dtype, taps=65):
        tensor = torch.zeros(1, 1, 200, dim, device=DEVICE, dtype=dtype)
        taps = torch.zeros(1, 1, taps, 1, device=DEVICE, dtype=dtype)
        return kernels.why_not(tensor, tensor, tensor, num_landmarks=count, conv_weight=taps)

    assert "128" in why_not(129, 64, torch.bfloat16)
    assert "num_attention_heads" in why_not(8, 160, torch.bfloat16)
    assert "at most 64" in why_not(65, 65, torch.float16) and why_not(128, 64, torch.bfloat16) is None
    assert "at most 64 or bfloat16" in why_not(128, 64, torch.float32) and why_not(64, 64, torch.float32) is None
    assert "conv_kernel_size" in why_not(64, 64, torch.bfloat16, 131) and why_not(64, 64, torch.bfloat16, 129) is None


def test_the_variable_switches_off_and_the_cpu_needs_no_word(monkeypatch):
    inputs = states(12, 3, batch=1)
    monkeypatch.setenv(kernels.VARIABLE, "0")
    assert kernels.VARIABLE in kernels.why_not(*inputs, num_landmarks=M)
    assert kernels.nystrom_attention_if_possible(*inputs, num_landmarks=M) is None
    monkeypatch.delenv(kernels.VARIABLE)
    assert kernels.why_not(*inputs, num_landmarks=M) is None
    monkeypatch.setattr(kernels, "_devices", {"cuda"})
    on_cpu = [tensor.cpu() for tensor in inputs]
    assert "cpu" in kernels.why_not(*on_cpu, num_landmarks=M)
    assert kernels.nystrom_attention_if_possible(*on_cpu, num_landmarks=M) is None


def operators_of(graphs):
    return [str(node.target) for graph in graphs for node in graph.graph.nodes if "nystrom_models" in str(node.target)]


@pytest.mark.parametrize("masked", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize("taps", [0, 5])
def test_compiled_graphs_hold_them_as_one_operator(taps, masked):
    """One graph, forward and backward, with the same results as outside of it."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    mask = ragged(37) if masked else None
    inputs = [tensor.requires_grad_() for tensor in states(37, 3)]
    if taps:
        inputs.append(draw(HEADS, 1, taps, 1).requires_grad_())

    def attend(q, k, v, weight=None):
        return nystrom_attention(q, k, v, mask, num_landmarks=M, pinv_iterations=2, conv_weight=weight)

    results = []
    weight = draw(4, HEADS, 37, DIM)
    for function in (torch.compile(attend, fullgraph=True, backend=aot_autograd(fw_compiler=keep)), attend):
        out = function(*inputs)
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    names = ["nystrom_models.nystrom_attention.default", "nystrom_models.nystrom_attention_backward.default"]
    assert operators_of(graphs) == names
    for compiled, eager in zip(*results, strict=True):
        assert relative_error(compiled, eager) < TOLERANCE[torch.float32]


def test_the_operator_keeps_pytorchs_rules():
    from nystrom_models.kernels import torch_operator

    taps = draw(HEADS, 1, 5, 1).requires_grad_()
    for rows, weight in (([], None), (list(rows_of(ragged(13))), taps)):
        inputs = [tensor.requires_grad_() for tensor in states(13, 3)]
        torch.library.opcheck(
            torch_operator._forward,
            (*inputs, weight, torch.tensor([3], device=DEVICE), rows, M, 1, 0.2),
            rtol=1e-4,
            atol=1e-4,
        )


def test_compiled_dropout_is_drawn_anew_in_every_call():
    torch._dynamo.reset()
    inputs = states(13, 3, batch=1)
    compiled = torch.compile(nystrom_attention, fullgraph=True, backend="aot_eager")
    options = {"num_landmarks": M, "pinv_iterations": 2, "dropout_p": 0.3}
    first, second = compiled(*inputs, **options), compiled(*inputs, **options)
    assert not torch.equal(first, second)


def test_where_they_do_not_apply_graphs_are_made_of_pytorch_operations(monkeypatch):
    torch._dynamo.reset()
    compiled = torch.compile(nystrom_attention, fullgraph=True, backend="aot_eager")
    short, long = states(M, 3, batch=1), states(12, 3, batch=1)
    monkeypatch.setattr(kernels, "_attend_in_graph", lambda *arguments: 1 / 0)
    monkeypatch.setattr(kernels, "_devices", {"cuda"})
    for inputs in (short, long):
        inputs = [tensor.cpu() for tensor in inputs]
        expected = nystrom_attention_reference(*inputs, num_landmarks=M)
        assert relative_error(compiled(*inputs, num_landmarks=M), expected) < TOLERANCE[torch.float32]


class Attention(torch.nn.Module):
    def forward(self, query, key, value):
        return nystrom_attention(query, key, value, num_landmarks=M)


def test_exported_graphs_run_where_this_package_is_not():
    inputs = tuple(states(12, 3, batch=1))
    exported = torch.export.export(Attention(), inputs)
    assert not operators_of([exported.graph_module])
    expected = nystrom_attention_reference(*inputs, num_landmarks=M)
    assert relative_error(exported.module()(*inputs), expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_model_uses_them_where_it_can(training, monkeypatch):
    """The package hung them on the attention; what they do not take turns them down, with one line in the log."""
    assert attention_nystrom.fast_kernels is kernels.nystrom_attention_if_possible
    ran, said = [], []
    attend = kernels._attend
    monkeypatch.setattr(kernels, "_attend", lambda *arguments: ran.append(1) or attend(*arguments))
    monkeypatch.setattr(kernels.logger, "warning_once", said.append)
    config = nystrom_models.NystromformerConfig(
        **TINY | {"num_hidden_layers": 1, "num_attention_heads": 2, "attention_probs_dropout_prob": 0.1},
        num_landmarks=M,
        conv_kernel_size=5,
    )
    model = nystrom_models.NystromformerModel(config).to(DEVICE).train(training)
    ids = torch.randint(3, 99, (2, 14), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        states = model(ids, attention_mask=mask).last_hidden_state
        assert len(ran) == 2 and not said  # once to see whether the kernels are right
        again = model(ids, attention_mask=mask).last_hidden_state
        assert len(ran) == 3 and torch.equal(states, again) != training
        model.double()(ids, attention_mask=mask)
        assert len(ran) == 3 and len(said) == 1 and "float16, bfloat16 or float32" in said[0]
        model.float()
        monkeypatch.setenv(kernels.VARIABLE, "0")
        expected = model(ids, attention_mask=mask).last_hidden_state
        assert len(ran) == 3 and len(said) == 1
    valid = mask.bool()
    assert training or relative_error(states[valid], expected[valid]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("fault", ["raises", "differs", "is_nan"])
def test_kernels_that_fail_on_a_device_are_not_used(fault, monkeypatch):
    attend, said = kernels._attend, []

    def faulty(query, *arguments):
        if fault == "raises":
            raise RuntimeError("out of resource: shared memory")
        return attend(query * (2.0 if fault == "differs" else torch.nan), *arguments)

    monkeypatch.setattr(kernels, "_attend", faulty)
    monkeypatch.setattr(kernels.logger, "warning_once", said.append)
    inputs = states(14, 3)
    with torch.inference_mode():
        out = nystrom_attention(*inputs, num_landmarks=M)
    assert len(said) == 1 and ("shared memory" if fault == "raises" else "differs") in said[0]
    expected = nystrom_attention_reference(*inputs, num_landmarks=M)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


def test_autocast_decides_the_dtype():
    inputs = states(12, 3, batch=1)
    weight = draw(HEADS, 1, 3, 1)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert kernels.why_not(inputs[0].bfloat16(), *inputs[1:], num_landmarks=M, conv_weight=weight) is None
        out = kernels.nystrom_attention(*inputs, num_landmarks=M, conv_weight=weight, pinv_iterations=2)
    expected = nystrom_attention_reference(*inputs, num_landmarks=M, conv_weight=weight, pinv_iterations=2)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]


NARROW, WIDE = [(16, 64), (32, 32), (64, 64)], [(128, 64), (64, 128)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "count", "dim"),
    # In float32 the wide ones do not fit.
    [(dtype, *size) for dtype in KERNEL_TOLERANCE for size in NARROW + WIDE * (dtype != torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("length", [129, 509, 4096])
def test_on_a_gpu(length, count, dim, dtype):
    """Sizes of real models, ragged: no further from the reference in float64, outputs and gradients, than PyTorch is.

    How much a pseudo-inverse magnifies the rounding of its landmarks depends on the inputs, and is the same for both.
    """
    mask = torch.rand(3, length, device="cuda") < 0.7
    mask[1, count // 2 :] = False
    mask[2] = torch.arange(length, device="cuda") >= length // 3
    inputs = [draw(3, length, 2, dim, dtype=dtype).transpose(1, 2) for _ in range(3)]
    inputs.append(draw(2, 1, 65, 1, dtype=dtype) / 8)
    weight = draw(3, 2, length, dim, dtype=dtype) * mask[:, None, :, None]

    def pytorch(*arguments, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention_nystrom, "fast_kernels", None)
            return nystrom_attention(*arguments, **options)

    results = []
    for function, cast in (
        (kernels.nystrom_attention, dtype),
        (pytorch, dtype),
        (nystrom_attention_reference, torch.float64),
    ):
        leaves = [tensor.detach().to(cast).requires_grad_() for tensor in inputs]
        out = function(*leaves[:3], mask, num_landmarks=count, conv_weight=leaves[3])
        gradients = torch.autograd.grad((out * weight.to(cast)).sum(), leaves)
        results.append([out.detach() * mask[:, None, :, None], *gradients])
    for ours, theirs, expected in zip(*results, strict=True):
        allowed = 2 * relative_error(theirs, expected) + KERNEL_TOLERANCE[dtype]
        assert relative_error(ours, expected) < allowed


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["inductor", "reduce-overhead", "cuda graph"])
def test_graphs_on_a_gpu(how):
    """A layer's attention, compiled and captured, forward and backward, is the one that runs without a graph."""
    inputs = [draw(2, 300, 2, 64, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)]
    inputs.append((draw(2, 1, 65, 1, dtype=torch.bfloat16) / 8).requires_grad_())

    def step(attend):
        out = attend(*inputs[:3], num_landmarks=64, conv_weight=inputs[3])
        return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]

    expected = step(nystrom_attention)
    if how == "cuda graph":
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step(nystrom_attention)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = step(nystrom_attention)
        graph.replay()
        torch.cuda.synchronize()
    else:
        mode = None if how == "inductor" else how
        compiled = torch.compile(nystrom_attention, fullgraph=True, mode=mode)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            actual = [tensor.clone() for tensor in step(compiled)]
    for ours, eager in zip(actual, expected, strict=True):
        assert relative_error(ours, eager) < TOLERANCE[torch.bfloat16]
