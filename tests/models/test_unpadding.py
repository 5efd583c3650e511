# SPDX-License-Identifier: Apache-2.0
"""Padding is not computed, and nobody can tell from the results."""

from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nystrom_models.models import encoder
from nystrom_models.models.attention_ops import find_unpadding, pad_tokens, unpad_tokens
from tests.models.options import HEADS, OPTIONS, TOLERANCE, make_model, relative_error

FAMILIES = ("nystromformer-landmarks", "linformer-none")
LENGTH = 40


@pytest.fixture(autouse=True)
def prediction_head_leaves_padding_out():
    """Also in models as narrow as these, where it does not pay."""
    with mock.patch.object(encoder, "COPIED_LOGIT", 0):
        yield


def mask_of(*rows):
    """A mask (B, 40) from the tokens of each row, as slices of the positions."""
    mask = torch.zeros(len(rows), LENGTH, dtype=torch.long)
    for row, tokens in enumerate(rows):
        for part in tokens:
            mask[row, part] = 1
    return mask


MASKS = {
    "every kind": mask_of(
        [slice(0, 9)], [slice(29, 40)], [slice(5, 20), slice(23, 30)], [slice(7, 8)], [], [slice(0, 40, 2)]
    ),
    "beside a full row": mask_of([slice(0, 40)], [slice(0, 17)], [slice(20, 40)]),
    "rows alike": mask_of([slice(0, 18)], [slice(22, 40)], [slice(11, 29)]),
    "one row": mask_of([slice(3, 30)]),
}


def padded():
    """The encoder as it computes in graphs: with its padding."""
    return mock.patch.object(encoder, "find_unpadding", lambda mask: (mask, None))


def outputs_and_gradients(model, inputs, weights):
    """Every floating-point tensor of the output, and the gradients of a loss in which every entry has its weight."""
    model.zero_grad()
    outputs = model(**inputs)
    tensors = {name: value for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    tensors |= {f"state {index}": state for index, state in enumerate(outputs.get("hidden_states") or ())}
    for state in outputs.get("hidden_states") or ():
        state.retain_grad()
    total = 0
    for name, tensor in tensors.items():
        weights.setdefault(name, torch.randn(tensor.shape))
        total = total + (tensor * weights[name]).sum()
    total.backward()
    gradients = {f"gradient of {name}": parameter.grad for name, parameter in model.named_parameters()}
    for index, state in enumerate(outputs.get("hidden_states") or ()):
        gradients[f"gradient of state {index}"] = state.grad
    return tensors | {name: gradient for name, gradient in gradients.items() if gradient is not None}


def assert_nobody_can_tell(model, inputs):
    weights = {}
    actual = outputs_and_gradients(model, inputs, weights)
    with padded():
        expected = outputs_and_gradients(model, inputs, weights)
    assert actual.keys() == expected.keys() and len(expected) > 2
    largest = max(tensor.abs().max() for name, tensor in expected.items() if name.startswith("gradient"))
    for name, tensor in expected.items():
        difference = (actual[name] - tensor).abs().max()
        # A gradient that is zero but for rounding (of a key's bias) has no scale of its own.
        scale = tensor.abs().max() if not name.startswith("gradient") else max(tensor.abs().max(), 1e-3 * largest)
        assert difference <= 5 * TOLERANCE[torch.float32] * scale, (name, difference, scale)


def draw(mask, head="Model"):
    ids = torch.randint(3, 99, mask.shape)
    if head == "ForMultipleChoice":
        ids, mask = ids[:, None].expand(-1, 2, -1), mask[:, None].expand(-1, 2, -1)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if head in ("ForMaskedLM", "ForPreTraining"):
        inputs["labels"] = ids.masked_fill(torch.rand(ids.shape) > 0.3, -100)
    return inputs


@pytest.mark.parametrize("option", OPTIONS)
def test_outputs_and_gradients_of_every_option(option):
    model = make_model(option, "ForPreTraining")
    for mask in MASKS.values():
        assert_nobody_can_tell(model, draw(mask, "ForPreTraining"))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("option", FAMILIES)
def test_outputs_and_gradients_of_every_head(option, head):
    assert_nobody_can_tell(make_model(option, head), draw(MASKS["every kind"], head))


@pytest.mark.parametrize("option", FAMILIES)
def test_outputs_and_gradients_of_every_way_to_call(option):
    mask = MASKS["every kind"]
    model = make_model(option, "ForMaskedLM", sparse_prediction=True)
    inputs = draw(mask, "ForMaskedLM")
    inputs["token_type_ids"] = torch.randint(0, 2, mask.shape)
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).detach()
    variants = [
        {},
        {"labels": None},
        {"output_hidden_states": True},
        {"position_ids": torch.randint(2, 40, mask.shape)},
        {"position_ids": torch.arange(2, 42)[None]},
        {"input_ids": None, "inputs_embeds": embeddings},
        {"attention_mask": mask.float()},
    ]
    for variant in variants:
        assert_nobody_can_tell(model, inputs | variant)
    model.set_attn_implementation("eager")
    assert_nobody_can_tell(model, inputs)
    model.set_attn_implementation("sdpa")
    for layer in model.base_model.encoder.layer:
        layer.chunk_size_feed_forward = 7
    assert_nobody_can_tell(model, inputs)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert_nobody_can_tell(model, inputs)


class Rows(TorchFunctionMode):
    """How many rows each call of a function has seen."""

    def __init__(self):
        super().__init__()
        self.seen = {F.linear: [], F.layer_norm: [], F.embedding: []}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in self.seen:
            states = args[0]
            self.seen[function].append(states.numel() if function is F.embedding else states.shape[:-1].numel())
        return function(*args, **(kwargs or {}))


@contextmanager
def counted():
    with Rows() as rows, torch.no_grad():
        yield rows.seen


@pytest.mark.parametrize("kind", ["every kind", "rows alike"])
@pytest.mark.parametrize("option", OPTIONS)
def test_linear_layers_see_tokens_alone(option, kind):
    mask = MASKS[kind]
    tokens = int(mask.sum())
    model = make_model(option, "ForMaskedLM")
    inputs = draw(mask) | {"output_hidden_states": True}
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with counted() as seen:
            model(**inputs)
        # Queries, outputs, two of the feed-forward; the two layers of the head see a zero state, for padding, besides.
        assert seen[F.linear].count(tokens) >= 2 * 4 and seen[F.linear].count(tokens + 1) == 2
        slots = 8 * len(mask) if option.startswith("linformer") else 0
        by_row = implementation == "eager"  # the readable reference takes the tokens row by row
        convolved = mask.numel() if by_row and "headwise" in option else 0
        others = [rows for rows in seen[F.linear] if rows not in (tokens, tokens + 1)]
        assert max(others, default=0) <= max(slots, LENGTH * by_row, convolved)
        assert seen[F.layer_norm] == [tokens] * 5 + [tokens + 1]
    with padded(), counted() as seen:
        model(**inputs)
    assert seen[F.layer_norm] == [mask.numel()] * 6


@pytest.mark.parametrize(("copied", "alone"), [(23, True), (25, False)])
def test_the_prediction_head_leaves_padding_out_where_it_pays(copied, alone):
    """A quarter of padding saves a quarter of 32 multiplications a logit, three times as many with a backward pass."""
    model = make_model("linformer-layerwise", "ForMaskedLM")
    inputs = draw(mask_of([slice(0, 20)], [slice(0, 40)]))
    for factor, context in ((1, nullcontext()), (3, torch.no_grad())):
        with context, mock.patch.object(encoder, "COPIED_LOGIT", copied / factor), Rows() as rows:
            model(**inputs)
        assert rows.seen[F.layer_norm][-1] == (61 if alone else 80)


@pytest.mark.parametrize("option", FAMILIES)
@torch.no_grad()
def test_words_are_embedded_in_the_callers_shape(option):
    """NEFTune scales its noise by the shape that leaves this module."""
    model = make_model(option)
    shapes = []
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: shapes.append(output.shape))
    model(**draw(MASKS["every kind"]))
    assert shapes == [(6, LENGTH, 32)]


@pytest.mark.parametrize("option", FAMILIES)
@torch.no_grad()
def test_hidden_states_are_zero_at_padding_on_every_path(option):
    model = make_model(option, "ForTokenClassification")
    inputs = draw(MASKS["every kind"])
    padding = inputs["attention_mask"] == 0
    expected = model(**inputs, output_hidden_states=True)
    for path, options in ((nullcontext(), {}), (padded(), {}), (nullcontext(), {"output_attentions": True})):
        with path:
            outputs = model(**inputs, output_hidden_states=True, **options)
        for state, reference in zip(outputs.hidden_states, expected.hidden_states, strict=True):
            assert (state[padding] == 0).all() and relative_error(state, reference) < 1e-5
        assert relative_error(outputs.logits, expected.logits) < 1e-5
        if options:
            assert [tuple(map_.shape) for map_ in outputs.attentions] == [(6, 4, LENGTH, LENGTH)] * 2


@pytest.mark.parametrize("option", FAMILIES)
def test_gradients_reach_the_states_that_are_returned(option):
    model = make_model(option)
    inputs = draw(MASKS["every kind"])
    gradients = []
    for path in (nullcontext(), padded()):
        with path:
            outputs = model(**inputs, output_hidden_states=True)
        total = outputs.last_hidden_state.square().sum()
        gradients.append(torch.autograd.grad(total, outputs.hidden_states))
    for actual, expected in zip(*gradients, strict=True):
        tokens = inputs["attention_mask"].bool()
        assert actual.abs().max() > 0 and relative_error(actual[tokens], expected[tokens]) < 5e-5


@pytest.mark.parametrize("sparse", [False, True], ids=["all", "sparse"])
@pytest.mark.parametrize("head", ["ForMaskedLM", "ForTokenClassification"])
@torch.no_grad()
def test_labels_at_padding_do_not_matter(head, sparse):
    model = make_model("nystromformer-landmarks", head, sparse_prediction=sparse, num_labels=3)
    inputs = draw(MASKS["every kind"])
    labels = torch.randint(0, 3, inputs["input_ids"].shape)
    clean = labels.masked_fill(inputs["attention_mask"] == 0, -100)
    expected = model(**inputs, labels=clean)
    for path in (nullcontext(), padded()):
        with path:
            actual = model(**inputs, labels=labels)
        assert relative_error(actual.loss, expected.loss) < 1e-6
        assert relative_error(actual.logits, expected.logits) < 1e-5


@torch.no_grad()
def test_an_output_rebuilt_on_its_way_gives_the_same_logits():
    """As wrappers of sub-modules do: what is no entry of the output is lost."""
    model = make_model("linformer-layerwise", "ForMaskedLM")
    inputs = draw(MASKS["every kind"], "ForMaskedLM")
    expected = model(**inputs)
    model.linformer.register_forward_hook(lambda module, arguments, output: type(output)(**output))
    actual = model(**inputs)
    assert relative_error(actual.logits, expected.logits) < 1e-5 and relative_error(actual.loss, expected.loss) < 1e-6


def test_rows_are_as_short_as_the_tokens_allow():
    mask = MASKS["every kind"].bool()
    _, unpadding = find_unpadding(mask)
    # The row with every second token reaches farthest, from 0 to 38, and keeps its holes.
    assert unpadding.row_mask.shape == (6, 39) and unpadding.row_mask.sum() == mask.sum() == len(unpadding.tokens)
    assert unpadding.row_mask[5].tolist() == mask[5, :39].tolist()
    assert unpadding.row_mask[1].tolist() == [True] * 11 + [False] * 28
    states = torch.randn(6, LENGTH, 3)
    alone = unpad_tokens(states, unpadding)
    assert torch.equal(alone[0], states[mask])
    assert torch.equal(pad_tokens(alone, unpadding.tokens, mask.shape), states * mask[..., None])
    rows = pad_tokens(alone, unpadding.row_tokens, unpadding.row_mask.shape)
    assert torch.equal(rows[1, :11], states[1, 29:])
    _, alike = find_unpadding(MASKS["rows alike"].bool())
    assert alike.row_mask is None and unpad_tokens(states[:3], alike).shape == (3, 18, 3)
    # Nothing to leave out, nothing to keep, and too little padding for it to pay.
    little = torch.ones(2, LENGTH, dtype=torch.bool)
    assert find_unpadding(little) == find_unpadding(little[:0]) == (None, None)
    assert find_unpadding(~little)[1] is None
    little[0, :3] = False
    assert torch.equal(find_unpadding(little)[0], little) and find_unpadding(little)[1] is None
