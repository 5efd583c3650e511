# SPDX-License-Identifier: Apache-2.0
"""The results do not depend on the layout of a padded batch in the layers, nor on whether padding is computed."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from nystrom_models.models import batch as batches
from nystrom_models.models import pretraining_heads
from nystrom_models.models.batch import make_batch
from tests.models.options import HEADS, OPTIONS, TOLERANCE, make_model, relative_error

FAMILIES = ("nystromformer-landmarks", "linformer-none", "linear-causal")
LENGTH = 40


@pytest.fixture(autouse=True)
def prediction_head_leaves_padding_out():
    """Enables unpadding in models as narrow as these, where it saves no time."""
    with mock.patch.object(pretraining_heads, "MULTIPLICATIONS_OF_A_COPY", 0):
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


@contextmanager
def layout(model, name):
    """packed: only the valid tokens; rows: with padding; graph: as in a graph, which cannot read the mask."""
    model.config.unpad_inputs = name == "packed"
    blind = mock.patch.object(batches, "can_read_values", lambda tensor: False)
    with blind if name == "graph" else mock.MagicMock():
        yield
    model.config.unpad_inputs = True


LAYOUTS = ("packed", "rows", "graph")


def outputs_and_gradients(model, inputs, weights):
    """Every floating-point tensor of the output, and the gradients of a weighted sum of all entries."""
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
    weights, results = {}, {}
    for name in LAYOUTS:
        with layout(model, name):
            results[name] = outputs_and_gradients(model, inputs, weights)
    expected = results.pop("rows")
    largest = max(tensor.abs().max() for name, tensor in expected.items() if name.startswith("gradient"))
    for actual in results.values():
        assert actual.keys() == expected.keys() and len(expected) > 2
        for name, tensor in expected.items():
            difference = (actual[name] - tensor).abs().max()
            # A gradient that is zero except for rounding (of a key's bias) has no scale of its own.
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


@pytest.mark.parametrize(("name", "tokens"), [("packed", [42, 21]), ("rows", [42] * 5 + [30])])
@torch.no_grad()
def test_chunks_have_the_same_size_in_every_layout(name, tokens):
    """7 columns of 6 rows, also where only the valid tokens are computed."""
    model, inputs = make_model("linear-elu", chunk_size_feed_forward=7, num_hidden_layers=1), draw(MASKS["every kind"])
    seen = []
    intermediate = model.encoder.layer[0].intermediate
    intermediate.register_forward_hook(lambda module, given, output: seen.append(output.shape[:-1].numel()))
    with layout(model, name):
        model(**inputs)
    assert seen == tokens


class Rows(TorchFunctionMode):
    """The number of rows in each call of a function."""

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
def test_linear_layers_and_norms_see_tokens_alone(option, kind):
    mask = MASKS[kind]
    # Some layers see a zero state more in each row; a Linformer's keys and values may be made of slots.
    most = max(int(mask.sum()) + len(mask), 8 * len(mask) if option.startswith("linformer") else 0)
    model = make_model(option, "ForMaskedLM")
    inputs = draw(mask) | {"output_hidden_states": True}
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        with counted() as seen:
            model(**inputs)
        assert max(seen[F.linear]) <= most and max(seen[F.layer_norm]) <= int(mask.sum()) + 1
    with layout(model, "rows"), counted() as seen:
        model(**inputs)
    assert set(seen[F.layer_norm]) == {mask.numel()}


@pytest.mark.parametrize(("copied", "alone"), [(23, True), (25, False)])
def test_the_prediction_head_leaves_padding_out_where_it_pays(copied, alone):
    """A quarter of padding saves a quarter of the 32 multiplications per logit, and three times as many backward."""
    model = make_model("linformer-layerwise", "ForMaskedLM")
    inputs = draw(mask_of([slice(0, 20)], [slice(0, 40)]))
    for factor in (1, 3):
        heads = mock.patch.object(pretraining_heads, "MULTIPLICATIONS_OF_A_COPY", copied / factor)
        with torch.set_grad_enabled(factor == 1), heads, Rows() as rows:
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
    for name, options in (("packed", {}), ("rows", {}), ("graph", {}), ("packed", {"output_attentions": True})):
        with layout(model, name):
            outputs = model(**inputs, output_hidden_states=True, **options)
        for state, reference in zip(outputs.hidden_states, expected.hidden_states, strict=True):
            assert (state[padding] == 0).all() and relative_error(state, reference) < 1e-5
        assert relative_error(outputs.logits, expected.logits) < 1e-5
        if options:
            assert [tuple(map_.shape) for map_ in outputs.attentions] == [(6, 4, LENGTH, LENGTH)] * 2


@pytest.mark.parametrize("content", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("option", FAMILIES)
def test_embeddings_at_padding_may_be_anything(option, content):
    model = make_model(option, "ForTokenClassification")
    inputs = draw(MASKS["every kind"])
    tokens = inputs["attention_mask"].bool()
    clean = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    embeddings = clean.masked_fill(~tokens[..., None], content).requires_grad_()
    expected = model(inputs_embeds=clean, **inputs).logits
    for name in LAYOUTS:
        with layout(model, name):
            logits = model(inputs_embeds=embeddings, **inputs).logits
        assert relative_error(logits, expected) < 1e-5
        [gradient] = torch.autograd.grad(logits.square().sum(), embeddings)
        assert gradient[tokens].isfinite().all() and (gradient[~tokens] == 0).all() and gradient.any()


@pytest.mark.parametrize("option", FAMILIES)
def test_gradients_reach_the_states_that_are_returned(option):
    model = make_model(option)
    inputs = draw(MASKS["every kind"])
    gradients = []
    for name in LAYOUTS:
        with layout(model, name):
            outputs = model(**inputs, output_hidden_states=True)
        total = outputs.last_hidden_state.square().sum()
        gradients.append(torch.autograd.grad(total, outputs.hidden_states))
    tokens = inputs["attention_mask"].bool()
    for actual, expected, other in zip(*gradients, strict=True):
        assert actual.abs().max() > 0 and relative_error(actual[tokens], expected[tokens]) < 5e-5
        assert relative_error(other[tokens], expected[tokens]) < 5e-5


@pytest.mark.parametrize("sparse", [False, True], ids=["all", "sparse"])
@pytest.mark.parametrize("head", ["ForMaskedLM", "ForTokenClassification"])
@torch.no_grad()
def test_labels_at_padding_do_not_matter(head, sparse):
    model = make_model("nystromformer-landmarks", head, sparse_prediction=sparse, num_labels=3)
    inputs = draw(MASKS["every kind"])
    labels = torch.randint(0, 3, inputs["input_ids"].shape)
    clean = labels.masked_fill(inputs["attention_mask"] == 0, -100)
    expected = model(**inputs, labels=clean)
    for name in LAYOUTS:
        with layout(model, name):
            actual = model(**inputs, labels=labels)
        assert relative_error(actual.loss, expected.loss) < 1e-6
        assert relative_error(actual.logits, expected.logits) < 1e-5


@torch.no_grad()
def test_an_output_rebuilt_on_its_way_gives_the_same_logits():
    """Wrappers of sub-modules lose everything that is not an entry of the output."""
    model = make_model("linformer-layerwise", "ForMaskedLM")
    inputs = draw(MASKS["every kind"], "ForMaskedLM")
    expected = model(**inputs)
    model.linformer.register_forward_hook(lambda module, arguments, output: type(output)(**output))
    actual = model(**inputs)
    assert relative_error(actual.logits, expected.logits) < 1e-5 and relative_error(actual.loss, expected.loss) < 1e-6


def test_rows_are_as_short_as_the_tokens_allow():
    mask = MASKS["every kind"].bool()
    states = torch.randn(6, LENGTH, 3)
    batch = make_batch(mask, mask.shape, mask.device)
    # The third row has most, 22; in all rows, valid tokens come first.
    assert batch.rows == (6, 22) and batch.mask.sum(dim=1).tolist() == mask.sum(dim=1).tolist()
    packed = batch.enter(states)
    assert torch.equal(packed[0], states[mask]) and batch.positions[0, -20:].tolist() == list(range(20))
    rows = batch.to_rows(packed)
    assert torch.equal(rows[1, :11], states[1, 29:]) and not rows[~batch.mask].any()
    assert torch.equal(rows[5, :20], states[5, ::2])
    assert torch.equal(batch.from_rows(rows), packed)
    assert torch.equal(batch.leave(packed), states * mask[..., None])

    alike = make_batch(MASKS["rows alike"].bool(), (3, LENGTH), mask.device)
    assert alike.mask is None and alike.enter(states[:3]).shape == (3, 18, 3)


def test_rows_stay_as_they_are_where_moving_does_not_pay():
    full = torch.ones(2, LENGTH, dtype=torch.bool)
    states = torch.randn(2, LENGTH, 3)
    for mask in (None, full):
        batch = make_batch(mask, full.shape, full.device)
        assert batch.mask is None and batch.enter(states) is states and batch.leave(states) is states
    assert make_batch(full[:0], (0, LENGTH), full.device).mask is None
    assert make_batch(~full, full.shape, full.device).places is None
    right, left = full.clone(), full.clone()
    right[0, -2:] = left[0, :2] = False
    batch = make_batch(right, full.shape, full.device)
    assert batch.places is None and batch.enter(states) is states and torch.equal(batch.mask, right)
    # Too little padding to be removed, but the valid tokens come first.
    batch = make_batch(left, full.shape, full.device)
    assert batch.places is None and torch.equal(batch.enter(states)[0, :-2], states[0, 2:])
    assert torch.equal(batch.leave(batch.enter(states)), states * left[..., None])
    # Padding is not removed if that is switched off.
    wide = MASKS["every kind"].bool()
    assert make_batch(wide, wide.shape, wide.device, pack=False).rows == (6, LENGTH)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("option", FAMILIES)
@torch.no_grad()
def test_hooks_see_the_shape_that_the_configuration_says(option, pack):
    model = make_model(option, unpad_inputs=pack)
    mask = MASKS["every kind"]
    seen = []
    model.encoder.layer[0].register_forward_hook(lambda module, inputs, output: seen.append(tuple(output.shape)))
    for little in (False, True):
        model(torch.randint(3, 99, mask.shape), attention_mask=torch.ones_like(mask) if little else mask)
    rows = (6, LENGTH, 32)
    assert seen == [(1, int(mask.sum()), 32) if pack else rows, rows]


@settings(max_examples=30)
@given(st.data())
@torch.no_grad()
def test_a_row_with_holes_is_the_row_alone(data):
    """In every layout, with padding at any position; convolutions also use the tokens' ranks."""
    option = data.draw(st.sampled_from(["nystromformer-landmarks", "nystromformer-softmax", "linformer-headwise"]))
    rows = data.draw(st.lists(st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH), min_size=1, max_size=3))
    torch.manual_seed(0)
    model = make_model(option, **({"conv_kernel_size": 5} if option.endswith("softmax") else {}))
    mask = torch.tensor(rows)
    ids = torch.randint(3, 99, mask.shape)
    for name in LAYOUTS:
        with layout(model, name):
            states = model(ids, attention_mask=mask.long()).last_hidden_state
        for row in range(len(mask)):
            if mask[row].any():
                alone = model(ids[row : row + 1, mask[row]]).last_hidden_state[0]
                assert relative_error(states[row, mask[row]], alone) < TOLERANCE[torch.float32], name


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("option", FAMILIES)
@torch.no_grad()
def test_maps_show_tokens_at_their_places(option, implementation):
    """For a row with padding at any position: the map of the row alone, and zero at padding."""
    model = make_model(option)
    model.set_attn_implementation(implementation)
    mask = MASKS["every kind"]
    ids = torch.randint(3, 99, mask.shape)
    chosen = torch.tensor([7, 12])
    for name in LAYOUTS:
        with layout(model, name):
            maps = model(ids, attention_mask=mask, output_attentions=True).attentions
            some = model(ids, attention_mask=mask, output_attentions=True, attention_rows=chosen).attentions
        for row in (0, 1, 2, 5):
            valid = mask[row].bool()
            alone = model(ids[row : row + 1, valid], output_attentions=True).attentions
            for actual, expected, part in zip(maps, alone, some, strict=True):
                assert relative_error(actual[row][:, valid][:, :, valid], expected[0]) < 1e-5
                assert not actual[row][:, ~valid].any() and not actual[row][:, :, ~valid].any()
                inside = valid[chosen]
                assert torch.allclose(part[row][:, inside], actual[row][:, chosen[inside]], atol=1e-6)


@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_rows_of_maps_that_differ_in_the_batch(option):
    model = make_model(option)
    mask = MASKS["beside a full row"]
    inputs = {"input_ids": torch.randint(3, 99, mask.shape), "attention_mask": mask, "output_attentions": True}
    rows = torch.tensor([[39, 0, 17], [16, 3, 0], [20, 39, 30]])
    whole = model(**inputs).attentions
    for part, map_ in zip(model(**inputs, attention_rows=rows).attentions, whole, strict=True):
        expected = torch.stack([map_[row][:, rows[row]] for row in range(3)])
        torch.testing.assert_close(part, expected, rtol=0, atol=1e-6)
