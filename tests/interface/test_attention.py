# SPDX-License-Identifier: Apache-2.0
"""The attention function against references in float64, and what it refuses."""

import ast
import inspect
import re
import types
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModel

from nystrom_models import LinearTransformerConfig, NystromformerConfig, NystromformerModel, use_nystrom
from nystrom_models.deployment import export_onnx
from nystrom_models.interface.attention import CHANGES, nystrom_attention_forward
from nystrom_models.models.attention_nystrom import nystrom_attention_reference, nystrom_cross_attention_reference
from tests.interface.models import make, tokens
from tests.models.options import relative_error

M = 8


class Attention(nn.Module):
    """The part of an attention layer that the function uses."""

    def __init__(self, num_landmarks=M, is_causal=False, **config):
        super().__init__()
        self.config = types.SimpleNamespace(num_landmarks=num_landmarks, **config)
        self.is_causal = is_causal


def states(queries=29, keys=29, heads=4, groups=4, dim=8, dtype=torch.float64):
    return (
        torch.randn(2, heads, queries, dim, dtype=dtype),
        torch.randn(2, groups, keys, dim, dtype=dtype),
        torch.randn(2, groups, keys, dim, dtype=dtype),
    )


def ragged(keys=29):
    mask = torch.rand(2, keys) < 0.7
    mask[1, 5:] = False
    mask[:, 0] = True
    return mask


@pytest.mark.parametrize("masked", [False, True], ids=["full", "ragged"])
@pytest.mark.parametrize("keys", [29, 17, 6], ids=["self", "cross", "cross-exact"])
@pytest.mark.parametrize("scaling", [None, 0.1, 1.0], ids=lambda scaling: f"scaling{scaling}")
@pytest.mark.parametrize("groups", [4, 1], ids=["heads", "grouped"])
def test_the_function_is_the_reference(groups, scaling, keys, masked):
    """Outputs, gradients and maps, of self- and cross-attention."""
    query, key, value = (tensor.requires_grad_() for tensor in states(29, keys, groups=groups))
    mask = ragged(keys) if masked else None
    context, weights = nystrom_attention_forward(
        Attention(),
        query,
        key,
        value,
        None if mask is None else mask[:, None, None],
        scaling=scaling,
        output_attentions=True,
    )
    reference = nystrom_attention_reference if keys == 29 else nystrom_cross_attention_reference
    scaled = query * (1 if scaling is None else scaling * 8**0.5)
    repeated = (tensor.repeat_interleave(4 // groups, dim=1) for tensor in (key, value))
    expected = reference(scaled, *repeated, mask, num_landmarks=M)
    valid = torch.ones(2, 1, 29, 1, dtype=torch.bool) if mask is None or keys != 29 else mask[:, None, :, None]
    direction = torch.randn_like(expected) * valid
    found = context.transpose(1, 2)
    assert context.is_contiguous()
    # Measured: 3e-15.
    assert relative_error(found * valid, expected * valid) < 1e-13
    whole = value.repeat_interleave(4 // groups, dim=1)
    assert relative_error((weights @ whole) * valid, expected * valid) < 1e-13
    gradients = [
        torch.autograd.grad((out * direction).sum(), (query, key, value), retain_graph=True)
        for out in (found, expected)
    ]
    for mine, theirs in zip(*gradients, strict=True):
        assert relative_error(mine, theirs) < 1e-11


class CrossAttention(Attention):
    """Layers whose class says so attend to another sequence."""


@pytest.mark.parametrize(
    ("module", "num_landmarks"),
    [(CrossAttention, M), (CrossAttention, 300), (Attention, 300)],
    ids=["landmarks", "exact", "exact, of an unknown class"],
)
def test_as_many_queries_as_keys_of_another_sequence(module, num_landmarks):
    """A hidden key does not hide the query with its number. Where attention is exact, no layer needs to say so."""
    query, key, value = states(300, 300)
    mask = torch.arange(300) < torch.tensor([[300], [90]])
    module = module(num_landmarks)
    context, weights = nystrom_attention_forward(
        module, query, key, value, mask[:, None, None], output_attentions=True
    )
    expected = nystrom_cross_attention_reference(query, key, value, mask, num_landmarks=num_landmarks)
    assert relative_error(context.transpose(1, 2), expected) < 1e-12
    assert relative_error(weights @ value, expected) < 1e-12


@pytest.mark.parametrize("keys", [29, 17], ids=["self", "cross"])
def test_the_iterations_are_those_of_the_settings(keys):
    query, key, value = states(29, keys)
    reference = nystrom_attention_reference if keys == 29 else nystrom_cross_attention_reference
    expected = reference(query, key, value, num_landmarks=M, pinv_iterations=2)
    for by_layer in ({}, {"layers": [3, 1]}, {"layers": [3, 1], "num_landmarks": [9, M]}):
        module = Attention(nystrom={"num_landmarks": M, "pinv_iterations": 2} | by_layer)
        module.layer_idx = 1
        context, weights = nystrom_attention_forward(module, query, key, value, output_attentions=True)
        assert relative_error(context.transpose(1, 2), expected) < 4e-15
        assert relative_error(weights @ value, expected) < 4e-15


def test_a_layer_beyond_the_list_is_refused():
    module = Attention(nystrom={"num_landmarks": [M, M]})
    module.layer_idx = 2
    with pytest.raises(ValueError, match="num_landmarks has 2 numbers, but there is a layer 2"):
        nystrom_attention_forward(module, *states())


def test_rows_of_few_tokens_are_exact():
    for queries, keys in ((M, M), (M, 100), (100, M), (1, 100)):
        query, key, value = states(queries, keys)
        context, weights = nystrom_attention_forward(Attention(), query, key, value, output_attentions=True)
        exact = torch.softmax(query @ key.mT * 8**-0.5, dim=-1)
        assert relative_error(weights, exact) < 1e-13
        assert relative_error(context.transpose(1, 2), exact @ value) < 1e-13


def test_dropout_is_of_the_mean():
    """Entries of F are dropped and scaled up: the mean over many draws is the attention without dropout."""
    query, key, value = states()
    expected, _ = nystrom_attention_forward(Attention(), query, key, value)
    drawn = [nystrom_attention_forward(Attention(), query, key, value, dropout=0.2)[0] for _ in range(300)]
    assert not torch.equal(drawn[0], drawn[1])
    # Measured: 0.03.
    assert relative_error(torch.stack(drawn).mean(0), expected) < 0.12


@pytest.mark.parametrize(("queries", "keys"), [(29, 29), (29, 17), (29, M), (M, 29), (1, 29)])
@pytest.mark.parametrize("module", [Attention(), Attention(num_landmarks=None)], ids=["nystrom", "exact layer"])
def test_all_attention_is_dropped(module, queries, keys):
    """With a probability of 1, nothing is left, also of cross-attention and of layers that stay exact."""
    query, key, value = states(queries, keys)
    module.training = True
    context, _ = nystrom_attention_forward(module, query, key, value, dropout=1.0)
    assert context.shape == (2, queries, 4, 8) and not context.any()


def test_learned_queries_are_for_every_row():
    query, key, value = states(29, 17)
    for one in (query[:1], query[:1].expand(2, -1, -1, -1)):
        context, _ = nystrom_attention_forward(Attention(), one, key, value)
        expected = nystrom_cross_attention_reference(query[:1].expand(2, -1, -1, -1), key, value, num_landmarks=M)
        assert relative_error(context.transpose(1, 2), expected) < 1e-13
        # Each row has its own dropout.
        first, second = nystrom_attention_forward(Attention(), one, key[:1].expand_as(key), value, dropout=0.5)[0]
        assert first.shape == (29, 4, 8) and not torch.allclose(first, second)


@pytest.mark.parametrize("form", [None, "bool", "added"])
@pytest.mark.parametrize("groups", [4, 2], ids=["heads", "grouped"])
def test_layers_that_stay_exact_are_softmax_attention(groups, form):
    """With the scaling and the mask that the model gives; so are their maps."""
    query, key, value = states(29, 17, groups=groups)
    mask = ragged(17)[:, None, None]
    given = {"bool": mask, "added": torch.zeros(mask.shape).double().masked_fill(~mask, -1e4)}.get(form)
    repeated = [tensor.repeat_interleave(4 // groups, dim=1) for tensor in (key, value)]
    scores = query @ repeated[0].mT * 0.3
    weights = torch.softmax(scores if form is None else scores.masked_fill(~mask, -torch.inf), dim=-1)
    module = Attention(num_landmarks=None)
    module.num_key_value_groups = 4 // groups
    for wanted in (False, True):
        context, found = nystrom_attention_forward(
            module, query, key, value, given, scaling=0.3, output_attentions=wanted
        )
        assert relative_error(context.transpose(1, 2), weights @ repeated[1]) < 4e-15
        assert found is None if not wanted else relative_error(found, weights) < 4e-15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_maps_of_exact_layers_keep_the_digits_of_large_scores(dtype):
    """A common part of all keys makes scores large, and has no effect. In float16, products of 64 · 40² also leave the
    range before they are scaled."""
    query, key, value = (tensor.to(dtype) for tensor in states(dim=64))
    query, key = query + 40, key + 40
    _, found = nystrom_attention_forward(Attention(num_landmarks=None), query, key, value, output_attentions=True)
    expected = torch.softmax(query.double() @ key.double().mT / 8, dim=-1)
    assert relative_error(found, expected) < 4 * torch.finfo(dtype).eps  # float32 rounds scores of 12,800 to 1e-3


@pytest.mark.parametrize("change", [{"softcap": 50.0}, {"is_causal": True}], ids=lambda one: next(iter(one)))
def test_maps_that_would_be_wrong_are_refused_in_exact_layers_too(change):
    query, key, value = states()
    with pytest.raises(ValueError, match=r"softcap|is causal"):
        nystrom_attention_forward(Attention(num_landmarks=None), query, key, value, output_attentions=True, **change)


def test_a_module_that_does_not_say_is_causal_unless_it_has_a_mask():
    """As by the convention of Transformers."""
    module, (query, key, value) = Attention(), states()
    del module.is_causal
    with pytest.raises(ValueError, match="is causal"):
        nystrom_attention_forward(module, query, key, value)
    nystrom_attention_forward(module, query, key, value, ragged()[:, None, None])


def test_a_module_of_a_decoder_is_refused():
    """It says so itself, or its configuration does."""
    module, (query, key, value) = Attention(), states(29, 17)
    module.is_decoder = True
    with pytest.raises(ValueError, match="belongs to a decoder"):
        nystrom_attention_forward(module, query, key, value)
    # Exact attention to few keys shows no later token.
    nystrom_attention_forward(module, query, key[:, :, :M], value[:, :, :M])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("landmarks", [M, None], ids=["nystrom", "exact"])
@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_attention_is_refused(name, landmarks, window):
    """In layers that stay exact, too: `sdpa` leaves out attention sinks and others without a message."""
    query, key, value = states()
    module = Attention(num_landmarks=landmarks)
    nystrom_attention_forward(module, query, key, value, sliding_window=window, **{name: None})
    with pytest.raises(ValueError, match=f"{name}, .*sdpa"):
        nystrom_attention_forward(module, query, key, value, sliding_window=window, **{name: torch.ones(3)})


@pytest.mark.parametrize(
    ("module", "options", "says"),
    [
        (Attention(is_causal=True), {}, "is causal"),
        (Attention(), {"is_causal": True}, "is causal"),
        (Attention(), {"tree_mask": torch.ones(2)}, "the tensor tree_mask"),
        (Attention(num_landmarks=0), {}, "num_landmarks=0 must be"),
        (Attention(nystrom={"landmarks": 3}), {}, "config.nystrom must be like"),
        (Attention(nystrom={"num_landmarks": 3, "layers": [0]}), {}, "call nystrom_models.use_nystrom"),
        (Attention(is_decoder=True), {"keys": 17}, "belongs to a decoder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_right_is_refused(module, options, says):
    query, key, value = states(29, options.pop("keys", 29))
    with pytest.raises(ValueError, match=says):
        nystrom_attention_forward(module, query, key, value, **options)


def test_what_means_nothing_is_let_through():
    query, key, value = states(1, 29)
    harmless = {
        "position_ids": torch.arange(3),
        "deterministic": True,
        "max_length_q": 3,
        "softcap": None,
        "alibi": False,
    }
    nystrom_attention_forward(Attention(is_causal=True), query, key, value, **harmless)  # one query sees all keys


def test_the_family_itself_is_not_for_it():
    config = NystromformerConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32)
    model = NystromformerModel(config)
    with pytest.raises(ValueError, match=r'Nystromformer.* has the attention that its configuration.*Use "sdpa"'):
        model.set_attn_implementation("nystrom")
    model.config._attn_implementation = "nystrom"
    with pytest.raises(ValueError, match="already is linear in the length"):
        model(tokens())
    linear = LinearTransformerConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32)
    with pytest.raises(ValueError, match="LinearTransformerModel has the attention that its configuration"):
        AutoModel.from_config(linear, attn_implementation="nystrom")


@torch.no_grad()
@pytest.mark.parametrize("name", ["BERT", "ModernBERT", "ViT", "SigLIP vision"])
def test_maps_of_all_layers(name):
    """One map for each layer, also for exact layers and sliding windows; the rows of a map sum to one."""
    model = make(name)
    if name in ("ViT", "SigLIP vision"):  # which does not pass output_attentions to its layers
        inputs = {"pixel_values": torch.randn(2, 3, 24, 24)}
    else:
        inputs = {"input_ids": tokens(), "attention_mask": torch.ones(2, 40)}
        inputs["attention_mask"][1, 30:] = 0
    expected = model(**inputs).last_hidden_state
    use_nystrom(model, 64)
    short = model(**inputs, output_attentions=True)
    assert relative_error(short.last_hidden_state, expected) < 1e-5
    model.set_attn_implementation("eager")
    eager = model(**inputs, output_attentions=True).attentions
    assert len(short.attentions) == len(eager) == 2
    for mine, theirs in zip(short.attentions, eager, strict=True):
        assert relative_error(mine, theirs) < 1e-5
    use_nystrom(model, 8, layers=[0])
    few = model(**inputs, output_attentions=True).attentions
    assert relative_error(few[0], eager[0]) > 1e-2
    for attention_map in few:
        # An approximated row sums to one only as far as the pseudo-inverse has converged.
        assert attention_map.shape == eager[0].shape and attention_map.isfinite().all()


def one_layer(name):
    """One layer and two steps of the pseudo-inverse are enough: a graph takes seconds."""
    config = make(name).config
    config.num_hidden_layers = 1
    return use_nystrom(AutoModel.from_config(config).eval(), M, pinv_iterations=2)


@torch.no_grad()
@pytest.mark.slow
def test_one_graph_for_all_lengths():
    """Compiled without a break, for lengths on both sides of the landmarks, with padding and without."""
    model = one_layer("BERT")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (40, 21, 5):
        ids, mask = tokens(2, length), torch.ones(2, length, dtype=torch.long)
        mask[1, length // 2 :] = 0
        found = compiled(input_ids=ids, attention_mask=mask).last_hidden_state
        expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
        assert relative_error(found[mask.bool()], expected[mask.bool()]) < 4e-6  # measured: 9e-7


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("name", ["ModernBERT", "ESM-2", "DistilBERT", "ViT", "Whisper encoder"])
def test_other_graphs(name):
    """Models with windows, with rotary positions, without masks: compiled, and exported."""
    model = make(name)
    inputs = {"input_ids": tokens()}
    if name == "Whisper encoder":
        model, inputs = model.encoder, {"input_features": torch.randn(2, 8, 80)}
    if name == "ViT":
        inputs = {"pixel_values": torch.randn(2, 3, 24, 24)}
    use_nystrom(model, M)
    expected = model(**inputs).last_hidden_state
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    exported = torch.export.export(model, (), inputs).module()
    for graph in (compiled, exported):
        assert relative_error(graph(**inputs).last_hidden_state, expected) < 1e-5


def test_second_derivatives_by_plain_operations():
    """PyTorch's fused attention has none; `SDPBackend.MATH` has, backwards and forwards."""
    model, along = use_nystrom(make("BERT").double(), M), torch.randn(2, 40, 32, dtype=torch.float64)
    embeddings, mask = torch.randn_like(along), torch.ones(2, 40, dtype=torch.long)
    mask[1, 30:] = 0

    def total(embeddings):
        states = model(inputs_embeds=embeddings, attention_mask=mask).last_hidden_state
        return (states.sin() * mask[..., None]).sum()

    gradient = torch.func.grad(total)
    after, before = (gradient(embeddings + step * along) for step in (1e-6, -1e-6))
    with sdpa_kernel(SDPBackend.MATH):
        _, forwards = torch.func.jvp(gradient, (embeddings,), (along,))
        backwards = torch.func.grad(lambda states: (gradient(states) * along).sum())(embeddings)
    for product in (forwards, backwards):
        assert relative_error(product, (after - before) / 2e-6) < 1e-6


def test_an_export_with_a_mask_takes_every_length():
    """Also lengths at which the model's rows are exact, although the graph was recorded with longer ones."""
    model = use_nystrom(make("BERT"), M)
    inputs = {"input_ids": tokens(), "attention_mask": torch.ones_like(tokens())}
    inputs["attention_mask"][0, 30:] = 0
    sizes = {key: {0: torch.export.Dim("batch", max=8), 1: torch.export.Dim("length", max=80)} for key in inputs}
    exported = torch.export.export(model, (), inputs, dynamic_shapes=sizes).module()
    for length in (2, M, M + 1, 35):
        shorter = {name: tensor[:, :length].clone() for name, tensor in inputs.items()}
        shorter["attention_mask"][1, length // 2 :] = 0
        valid = shorter["attention_mask"].bool()
        found, expected = (graph(**shorter).last_hidden_state[valid] for graph in (exported, model))
        assert relative_error(found, expected) < 1e-5


@pytest.mark.slow
def test_masks_are_looked_at_in_graphs():
    """One graph for all lengths; a mask that differs between queries is refused at run time, not taken as a mask of
    keys.
    """
    module = Attention()

    def attend(query, key, value, mask):
        return nystrom_attention_forward(module, query, key, value, mask)[0]

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (29, 17, 5):
        query, key, value = states(length, length)
        rows = torch.ones(2, 1, length, length, dtype=torch.bool)
        rows[1, :, :, length // 2 :] = False
        # Values at padding are undefined.
        found, expected = (function(query, key, value, rows)[:, : length // 2] for function in (compiled, attend))
        assert relative_error(found, expected) < 1e-12
        # Without double quotes, which Inductor would not compile.
        with pytest.raises(RuntimeError, match=r"'nystrom' takes no mask that differs between queries"):
            compiled(query, key, value, rows.tril())


@torch.no_grad()
@pytest.mark.parametrize("name", ["DistilBERT", pytest.param("BERT", marks=pytest.mark.slow)])
def test_onnx_is_one_file_for_all_lengths(name, tmp_path):
    """With token types and, for DistilBERT, without."""
    import onnxruntime

    model = one_layer(name)
    path = export_onnx(model, tmp_path / "model.onnx", verify=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for length in (33, 6):
        ids, mask = tokens(3, length), torch.ones(3, length, dtype=torch.long)
        mask[1, length // 2 :] = 0
        mask[2, 1:-1:3] = 0
        expected = model(input_ids=ids, attention_mask=mask).last_hidden_state
        (found,) = session.run(["last_hidden_state"], {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        assert relative_error(torch.from_numpy(found)[mask.bool()], expected[mask.bool()]) < 1e-4


def test_every_argument_of_transformers_is_known():
    """Each argument that models of the installed Transformers give their attention is used, refused or harmless."""
    taken = set(inspect.signature(nystrom_attention_forward).parameters) | {"attention_mask"}
    harmless = {"position_ids", "deterministic", "max_length_q", "max_length_k"}
    found = {}
    for path in Path(transformers.models.__path__[0]).glob("*/modeling_*.py"):
        text = path.read_text(encoding="utf-8")
        for match in re.finditer(r"= attention_interface\(", text):
            depth, end = 1, match.end()
            while depth:
                depth += {"(": 1, ")": -1}.get(text[end], 0)
                end += 1
            call = ast.parse(re.sub(r"^\s*", "", text[match.start() + 2 : end])).body[0].value
            found |= {keyword.arg: path.name for keyword in call.keywords if keyword.arg is not None}
    assert {"scaling", "cu_seq_lens_q", "position_bias", "softcap"} <= found.keys()
    unknown = {name: file for name, file in found.items() if name not in taken | harmless | CHANGES.keys()}
    assert unknown == {}
