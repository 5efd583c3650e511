# SPDX-License-Identifier: Apache-2.0
"""When the kernels for Nyström attention apply, what is logged if they do not, and how graphs contain them."""

import functools
import subprocess
import sys

import pytest
import torch
from transformers import BertConfig, BertModel

import nystrom_models
from nystrom_models import kernels
from nystrom_models.kernels import device
from nystrom_models.kernels.interface import NystromTriton
from nystrom_models.kernels.nystrom import dispatch, first_try, inputs
from tests.kernels.functions import nystrom_attention, nystrom_attention_reference
from tests.kernels.helpers import DEVICE, DIM, HEADS, M, draw, draw_heads, ragged, rows_of
from tests.models.options import TINY, TOLERANCE, relative_error

pytest.importorskip("triton")


@pytest.fixture
def said(monkeypatch):
    """The messages of the log."""
    lines = []
    monkeypatch.setattr(dispatch.logger, "warning_once", lines.append)
    return lines


@pytest.fixture
def ran(monkeypatch):
    """The inputs of each attention that the kernels computed."""
    computed, compute = [], dispatch.compute
    monkeypatch.setattr(dispatch, "compute", lambda inputs: computed.append(inputs) or compute(inputs))
    return computed


REASONS = {
    "dropout": ({"dropout_p": 1.0}, torch.float32, "below 1"),
    "exact": ({"num_landmarks": 12}, torch.float32, "exact attention"),
    "softmax": ({"num_landmarks": None}, torch.float32, "exact attention"),
    "dtype": ({}, torch.float64, "float16, bfloat16 or float32"),
    "mixed": ({"conv_weight": torch.ones(2, 1, 3, 1)}, torch.bfloat16, "one dtype"),
    "mask": ({"mask": torch.ones(1, 12, dtype=torch.long)}, torch.float32, "mask.bool()"),
    "devices": ({"mask": torch.ones(1, 12, dtype=torch.bool, device="meta")}, torch.float32, "one device"),
}


@pytest.mark.parametrize(("options", "dtype", "word"), REASONS.values(), ids=REASONS)
def test_what_does_not_apply_is_explained(options, dtype, word):
    tensors = draw_heads(12, 3, batch=1, dtype=dtype)
    options = {"num_landmarks": M} | options
    for name in ("conv_weight", "mask"):
        if name in options and options[name].device.type == "cpu":
            options[name] = options[name].to(DEVICE)
    assert word in kernels.why_not(*tensors, **options)
    with pytest.raises(ValueError, match=word):
        kernels.nystrom_attention(*tensors, **options)


def test_sizes_that_do_not_fit_are_explained(monkeypatch):
    def why_not(count, dim, dtype, taps=65):
        tensor = torch.zeros(1, 1, 200, dim, device=DEVICE, dtype=dtype)
        taps = torch.zeros(1, 1, taps, 1, device=DEVICE, dtype=dtype)
        return kernels.why_not(tensor, tensor, tensor, num_landmarks=count, conv_weight=taps)

    assert "128" in why_not(129, 64, torch.bfloat16)
    assert "num_attention_heads" in why_not(8, 160, torch.bfloat16)
    assert "at most 64" in why_not(65, 65, torch.float16) and why_not(128, 64, torch.bfloat16) is None
    assert "at most 64 or bfloat16" in why_not(128, 64, torch.float32) and why_not(64, 64, torch.float32) is None
    assert "conv_kernel_size" in why_not(64, 64, torch.bfloat16, 67) and why_not(64, 64, torch.bfloat16, 65) is None
    monkeypatch.setattr(inputs, "compute_capability", lambda device: 100)
    assert "at most 64" in why_not(65, 64, torch.bfloat16) and why_not(64, 64, torch.bfloat16) is None


def test_devices_that_do_not_fit_are_explained(monkeypatch):
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, word in ((75, "8.0"), (80, None)):
        monkeypatch.setattr(device, "_capability", lambda index, capability=capability: capability)
        assert (word is None and kernels.why_not_on(cuda) is None) or word in kernels.why_not_on(cuda)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "AMD" in kernels.why_not_on(cuda)
    monkeypatch.setattr(device, "_has_triton", lambda: False)
    assert "pip install triton" in kernels.why_not_on(cuda)
    monkeypatch.setattr(device, "DEVICE_TYPES", {"cuda"})
    assert "CUDA device" in kernels.why_not_on(torch.device("cpu"))


@pytest.mark.slow
def test_without_triton_the_package_imports_and_says_so():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util as util; find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
        "from nystrom_models import kernels; import torch\n"
        "print(kernels.why_not_on(torch.device('cuda')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install triton" in done.stdout


def test_a_cpu_needs_no_word(said, monkeypatch):
    tensors = [tensor.cpu() for tensor in draw_heads(12, 3, batch=1)]
    monkeypatch.setattr(device, "DEVICE_TYPES", {"cuda"})
    assert kernels.nystrom_attention_if_possible(*tensors, num_landmarks=M) is None and not said


def operators_of(graphs):
    return [str(node.target) for graph in graphs for node in graph.graph.nodes if "nystrom_models" in str(node.target)]


@pytest.mark.slow
@pytest.mark.parametrize("masked", [False, True], ids=["full", "ragged"])
def test_compiled_graphs_hold_them_as_one_operator(masked):
    """One graph, forward and backward, with the same results as without it; without taps if rows are full."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    mask = ragged(37) if masked else None
    tensors = [tensor.requires_grad_() for tensor in draw_heads(37, 3)]
    if masked:
        tensors.append(draw(HEADS, 1, 5, 1).requires_grad_())

    def attend(q, k, v, weight=None):
        return nystrom_attention(q, k, v, mask, num_landmarks=M, pinv_iterations=2, conv_weight=weight)

    results = []
    weight = draw(4, HEADS, 37, DIM)
    for function in (torch.compile(attend, fullgraph=True, backend=aot_autograd(fw_compiler=keep)), attend):
        out = function(*tensors)
        results.append([out, *torch.autograd.grad((out * weight).sum(), tensors)])
    names = ["nystrom_models.nystrom_attention.default", "nystrom_models.nystrom_attention_backward.default"]
    assert operators_of(graphs) == names
    for compiled, eager in zip(*results, strict=True):
        assert relative_error(compiled, eager) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "masked",
    [pytest.param(False, id="full", marks=pytest.mark.slow), pytest.param(True, id="ragged", marks=pytest.mark.slow)],
)
def test_the_operator_keeps_pytorchs_rules(masked):
    from nystrom_models.kernels.nystrom import attention

    taps = draw(HEADS, 1, 5, 1).requires_grad_() if masked else None
    rows = list(rows_of(ragged(13))) if masked else []
    tensors = [tensor.requires_grad_() for tensor in draw_heads(13, 3)]
    seed = torch.tensor([3], device=DEVICE) if masked else None
    torch.library.opcheck(
        attention._operator, (*tensors, taps, seed, rows, M, 1, 0.2 if masked else 0.0), rtol=1e-4, atol=1e-4
    )


def test_compiled_dropout_is_drawn_anew_in_every_call():
    torch._dynamo.reset()
    tensors = draw_heads(13, 3, batch=1)
    compiled = torch.compile(nystrom_attention, fullgraph=True, backend="aot_eager")
    options = {"num_landmarks": M, "pinv_iterations": 2, "dropout_p": 0.3}
    first, second = compiled(*tensors, **options), compiled(*tensors, **options)
    assert not torch.equal(first, second)


def test_where_they_do_not_apply_graphs_are_made_of_pytorch_operations(monkeypatch):
    torch._dynamo.reset()
    compiled = torch.compile(nystrom_attention, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(dispatch, "compute", lambda inputs: 1 / 0)
    monkeypatch.setattr(device, "DEVICE_TYPES", {"cuda"})
    for length in (M, 12):
        tensors = [tensor.cpu() for tensor in draw_heads(length, 3, batch=1)]
        expected = nystrom_attention_reference(*tensors, num_landmarks=M)
        assert relative_error(compiled(*tensors, num_landmarks=M), expected) < TOLERANCE[torch.float32]


class Attention(torch.nn.Module):
    def forward(self, query, key, value):
        return nystrom_attention(query, key, value, num_landmarks=M)


def test_exported_graphs_run_where_this_package_is_not():
    tensors = tuple(draw_heads(12, 3, batch=1))
    exported = torch.export.export(Attention(), tensors)
    assert not operators_of([exported.graph_module])
    expected = nystrom_attention_reference(*tensors, num_landmarks=M)
    assert relative_error(exported.module()(*tensors), expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_model_uses_them_where_it_can(training, said, ran, monkeypatch):
    """By their name; inputs that they do not take are computed by PyTorch's operations, with one line in the log."""
    config = nystrom_models.NystromformerConfig(
        **TINY | {"num_hidden_layers": 1, "num_attention_heads": 2, "attention_probs_dropout_prob": 0.1},
        num_landmarks=M,
        conv_kernel_size=5,
    )
    monkeypatch.setattr(NystromTriton, "why_not_here", lambda self: None)
    model = nystrom_models.NystromformerModel(config).to(DEVICE).train(training)
    assert model.config._attn_implementation == NystromTriton.name
    ids = torch.randint(3, 99, (2, 14), device=DEVICE)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    with torch.no_grad():
        states = model(ids, attention_mask=mask).last_hidden_state
        assert len(ran) == 2 and not said  # once for the first try
        again = model(ids, attention_mask=mask).last_hidden_state
        assert len(ran) == 3 and torch.equal(states, again) != training
        model.double()(ids, attention_mask=mask)
        assert len(ran) == 3 and len(said) == 1 and "float16, bfloat16 or float32" in said[0]
        model.float()
        model.set_attn_implementation("sdpa")
        expected = model(ids, attention_mask=mask).last_hidden_state
        assert len(ran) == 3 and len(said) == 1
    valid = mask.bool()
    assert training or relative_error(states[valid], expected[valid]) < TOLERANCE[torch.float32]


def test_what_cannot_run_here_is_refused_by_name(monkeypatch):
    """Without a GPU, the kernels are not the default, and choosing them gives an error with the reason."""
    config = nystrom_models.NystromformerConfig(**TINY)
    reason = "there is no CUDA device"
    monkeypatch.setattr(NystromTriton, "why_not_here", lambda self: reason)
    model = nystrom_models.NystromformerModel(config)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match=rf'"nystrom_triton" cannot be used here: {reason}. Use "sdpa"'):
        model.set_attn_implementation("nystrom_triton")
    with pytest.raises(ValueError, match="not made for LinformerModel"):
        nystrom_models.LinformerModel(nystrom_models.LinformerConfig(**TINY, attn_implementation="nystrom_triton"))
    bert = BertModel(BertConfig(**TINY, attn_implementation="nystrom_triton"))
    with pytest.raises(ValueError, match=r"only with Nyströmformers of nystrom_models.*Bert"):
        bert(torch.randint(3, 99, (1, 9)))


# ---- the first try ----


def test_the_first_try_runs_what_the_model_will(ran):
    """The same taps, iterations, landmarks, mask and dropout, so the same compiled kernels; backward if needed."""
    tensors = draw_heads(14, 3)
    weight = draw(HEADS, 1, 9, 1)
    options = {"num_landmarks": M, "pinv_iterations": 3, "conv_weight": weight, "dropout_p": 0.1}
    kernels.nystrom_attention_if_possible(*tensors, ragged(14), **options)
    tried, used = ran
    assert first_try.Variant.of(tried) == first_try.Variant.of(used)
    assert 0 < tried.dropout_p < 1e-6 and tried.mask is not None and tried.taps == 9 and tried.pinv_iterations == 3
    kernels.nystrom_attention_if_possible(*tensors, ragged(14), **options)
    assert len(ran) == 3  # nothing was new
    tensors[0].requires_grad_()
    kernels.nystrom_attention_if_possible(*tensors, ragged(14), **options)
    assert len(ran) == 5 and ran[3].query.requires_grad  # now its gradients are wanted, too
    assert not ran[3].conv_weight.requires_grad  # frozen, as with LoRA: another kernel
    weight.requires_grad_()
    kernels.nystrom_attention_if_possible(*tensors, ragged(14), **options)
    assert len(ran) == 7 and ran[5].conv_weight.requires_grad


def test_shapes_that_the_kernels_would_read_past_are_refused():
    tensors = draw_heads(14, 3)
    why = functools.partial(kernels.why_not, *tensors, num_landmarks=M)
    assert why(torch.ones(1, 14, dtype=torch.bool, device=DEVICE)).endswith("not (1, 14): mask.expand(4, 14)")
    for shape in ((HEADS, 1, 4, 1), (1, 1, 3, 1)):
        assert f"(2, 1, T, 1) with an odd T, not {shape}" in why(conv_weight=draw(*shape))
    assert why(torch.ones(4, 14, dtype=torch.bool, device=DEVICE), conv_weight=draw(HEADS, 1, 3, 1)) is None


def test_second_derivatives_are_refused_with_what_has_them():
    tensors = [tensor.requires_grad_() for tensor in draw_heads(14, 3)]
    out = kernels.nystrom_attention_if_possible(*tensors, num_landmarks=M)
    with pytest.raises(RuntimeError, match=r'differentiable once.*attn_implementation="eager"'):
        torch.autograd.grad(out.sum(), tensors, create_graph=True)


def test_the_first_try_draws_none_of_the_models_random_numbers():
    """Otherwise the dropout of a run's first step, and of the first one after resuming, would be another."""
    tensors, results = draw_heads(14, 3), []
    for _ in range(2):  # only the first has a first try
        torch.manual_seed(1)
        results.append(kernels.nystrom_attention_if_possible(*tensors, num_landmarks=M, dropout_p=0.3))
    assert torch.equal(*results)


@pytest.mark.parametrize("fault", ["raises", "differs", "is_nan", "backward"])
def test_kernels_that_fail_on_a_device_are_not_used(fault, said, monkeypatch):
    compute = dispatch.compute

    def faulty(given):
        if fault == "raises":
            raise RuntimeError("out of resource: shared memory")
        if fault == "backward":  # correct only in the forward pass
            out = compute(given)
            return out.detach() + 2 * (out - out.detach())
        factor = 2.0 if fault == "differs" else torch.nan
        query = given.query * factor
        return compute(inputs.AttentionInputs(query, given.key, given.value, given.mask, num_landmarks=M))

    monkeypatch.setattr(dispatch, "compute", faulty)
    tensors = [tensor.requires_grad_() for tensor in draw_heads(14, 3)]
    out = nystrom_attention(*tensors, num_landmarks=M)
    assert len(said) == 1 and ("shared memory" if fault == "raises" else "differs") in said[0]
    expected = nystrom_attention_reference(*tensors, num_landmarks=M)
    assert relative_error(out, expected) < TOLERANCE[torch.float32]


def test_a_full_memory_is_no_fault(said, monkeypatch):
    compute = dispatch.compute

    def out_of_memory(given):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    tensors = draw_heads(14, 3)
    monkeypatch.setattr(dispatch, "compute", out_of_memory)
    assert kernels.nystrom_attention_if_possible(*tensors, num_landmarks=M) is None and "no memory" in said[0]
    monkeypatch.setattr(dispatch, "compute", compute)
    assert kernels.nystrom_attention_if_possible(*tensors, num_landmarks=M) is not None


def test_the_first_try_takes_no_part_in_what_surrounds_it(said):
    """It does not depend on the default device, inference mode or autocast, nor change the model's random numbers."""
    tensors = draw_heads(14, 3)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    # A default device on which tensors of the first try must not be, like "cuda" for its random numbers.
    with torch.inference_mode(), torch.device("meta"), torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = kernels.nystrom_attention_if_possible(*tensors, num_landmarks=M)
    assert out is not None and out.dtype == torch.bfloat16 and not said
    assert torch.equal(torch.rand(1), expected)
