# SPDX-License-Identifier: Apache-2.0
"""Attention dropout on a CPU: the formula with the weights that were kept, in blocks, with gradients, drawn again."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from nystrom_models import LinformerConfig, LinformerModel, NystromformerConfig, NystromformerModel
from nystrom_models.models import attention_dropout
from nystrom_models.models.attention_dropout import attention_with_dropout
from nystrom_models.models.masked_attention import attend
from tests.models.options import make_model, relative_error

DROPOUT = 0.25  # a multiple of 2⁻¹⁶
# (batch, heads, queries, keys), and the weights in a block.
SHAPES = {
    "one block": (3, 2, 7, 5, 2**18),
    "blocks of rows, the last smaller": (5, 2, 7, 5, 150),
    "blocks of queries, the last smaller": (2, 2, 11, 6, 48),
    "less than a query in a block": (2, 3, 4, 6, 5),
    "a number of weights that four does not divide": (1, 1, 3, 7, 2**18),
}


def inputs(batch: int, heads: int, queries: int, keys: int, dtype: torch.dtype = torch.float64):
    """Query, key, value and a mask with padding; the values are of another size."""
    generator = torch.Generator().manual_seed(1)

    def states(length: int, size: int) -> torch.Tensor:
        drawn = torch.randn(batch, heads, length, size, generator=generator, dtype=torch.float64)
        return drawn.to(dtype).requires_grad_()

    mask = torch.rand(batch, 1, 1, keys, generator=generator) < 0.7
    mask[..., 0] = True
    return states(queries, 4), states(keys, 4), states(keys, 3), mask


def draw(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    torch.manual_seed(7)
    return attention_with_dropout(query, key, value, mask, DROPOUT)


def kept_weights(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """(B, H, N, K) bool, by attention to values that are the unit vectors."""
    identity = torch.eye(key.shape[2], dtype=key.dtype).expand(*key.shape[:3], -1)
    return draw(query.detach(), key.detach(), identity, mask) > 0


def formula(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, kept: torch.Tensor
) -> torch.Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    return (torch.softmax(scores, dim=-1) * kept / (1 - DROPOUT)) @ value


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_formula_and_gradients(shape, masked, monkeypatch):
    *sizes, weights = SHAPES[shape]
    monkeypatch.setattr(attention_dropout, "BLOCK_WEIGHTS", weights)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    query, key, value, mask = inputs(*sizes)
    mask = mask if masked else None
    kept = kept_weights(query, key, mask)
    found, expected = draw(query, key, value, mask), formula(query, key, value, mask, kept)
    assert (found - expected).abs().max() < 4e-15  # 8.9e-16
    gradient = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(2))
    for ours, of_formula in zip(
        torch.autograd.grad(found, (query, key, value), gradient),
        torch.autograd.grad(expected, (query, key, value), gradient),
        strict=True,
    ):
        assert (ours - of_formula).abs().max() < 8e-15  # 1.8e-15


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 6e-7), (torch.float16, 3.6e-3), (torch.bfloat16, 2e-2)]
)
def test_precisions(dtype, tolerance):
    """Relative to the largest element, measured: 1.7e-7 in float32, 9e-4 in float16 and 6e-3 in bfloat16."""
    query, key, value, mask = inputs(3, 2, 50, 40, dtype)
    found = draw(query, key, value, mask)
    exact = [states.detach().double().requires_grad_() for states in (query, key, value)]
    expected = formula(*exact, mask, kept_weights(query, key, mask))
    gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    pairs = zip(
        (found, *torch.autograd.grad(found, (query, key, value), gradient)),
        (expected, *torch.autograd.grad(expected, exact, gradient.double())),
        strict=True,
    )
    for ours, of_formula in pairs:
        assert ours.dtype == dtype
        assert (ours - of_formula).abs().max() < tolerance * of_formula.abs().max()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 3.6e-3), (torch.bfloat16, 2e-2)])
def test_large_scores_keep_their_digits(dtype, tolerance):
    """A common part of all queries and keys makes scores large, and has no effect. In half precision such scores would
    have errors of a quarter and more, and so would the weights."""
    query, key, value, mask = inputs(3, 2, 50, 40, dtype)
    query, key = ((states.detach() + 12).requires_grad_() for states in (query, key))
    found = draw(query, key, value, mask)
    expected = formula(query.double(), key.double(), value.double(), mask, kept_weights(query, key, mask))
    assert (found - expected).abs().max() < tolerance * expected.abs().max()
    ours, of_formula = (torch.autograd.grad(context.sum(), key)[0].double() for context in (found, expected))
    assert (ours - of_formula).abs().max() < tolerance * of_formula.abs().max()


def test_sums_over_many_blocks_keep_their_digits(monkeypatch):
    """The gradients of keys and values are sums over 200 blocks of queries. Measured: 5.7e-4."""
    monkeypatch.setattr(attention_dropout, "BLOCK_WEIGHTS", 320)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    query, key, value, mask = inputs(3, 2, 800, 40, torch.float16)
    exact = [states.detach().double().requires_grad_() for states in (query, key, value)]
    expected = formula(*exact, mask, kept_weights(query, key, mask))
    found = draw(query, key, value, mask)
    gradient = torch.randn(found.shape, generator=torch.Generator().manual_seed(3)).to(torch.float16)
    for ours, of_formula in zip(
        torch.autograd.grad(found, (key, value), gradient),
        torch.autograd.grad(expected, exact[1:], gradient.double()),
        strict=True,
    ):
        assert (ours - of_formula).abs().max() < 2.3e-3 * of_formula.abs().max()


def test_share_of_kept_weights(monkeypatch):
    monkeypatch.setattr(attention_dropout, "BLOCK_WEIGHTS", 2**12)
    query, key = torch.zeros(4, 2, 64, 8), torch.zeros(4, 2, 128, 8)
    kept = kept_weights(query, key, None)
    # Of 65,536 weights: 0.0068 is four standard deviations. The same number for four weights would pass here, but not
    # for neighbours: of these, 0.75² are kept both.
    assert abs(kept.float().mean() - (1 - DROPOUT)) < 0.0068
    for first, second in (
        (kept[..., :-1], kept[..., 1:]),
        (kept[:, :, :-1], kept[:, :, 1:]),
        (kept[:, :1], kept[:, 1:]),
        (kept[:-1], kept[1:]),
    ):
        assert abs((first & second).float().mean() - (1 - DROPOUT) ** 2) < 0.015


@pytest.mark.parametrize("dropout", [1e-9, 1.0])
def test_nearly_none_or_all_dropped(dropout):
    query, key, value, mask = inputs(2, 2, 30, 20)
    torch.manual_seed(7)  # with this seed, the smallest probability drops none of these weights
    found = attention_with_dropout(query, key, value, mask, dropout)
    expected = (1 - DROPOUT) * formula(query, key, value, mask, torch.tensor(dropout < 0.5))
    assert (found - expected).abs().max() < 6e-5  # 1.5e-5, from 1 - 2⁻¹⁶
    (gradient,) = torch.autograd.grad(found.sum(), value)
    assert gradient.isfinite().all()


def test_draws_follow_the_generator():
    query, key, value, mask = inputs(2, 2, 30, 20)
    first = draw(query, key, value, mask)
    assert torch.equal(draw(query, key, value, mask), first)
    assert not torch.equal(attention_with_dropout(query, key, value, mask, DROPOUT), first)


def test_recomputed_layers_draw_the_same():
    query, key, value, mask = inputs(2, 2, 30, 20)
    gradients = torch.autograd.grad(draw(query, key, value, mask).square().sum(), (query, key, value))
    torch.manual_seed(7)
    result = checkpoint(attention_with_dropout, query, key, value, mask, DROPOUT, use_reentrant=False)
    for ours, expected in zip(torch.autograd.grad(result.square().sum(), (query, key, value)), gradients, strict=True):
        assert torch.equal(ours, expected)


def test_gradients_do_not_depend_on_the_threads_of_the_backward_pass(monkeypatch):
    monkeypatch.setattr(attention_dropout, "BLOCK_WEIGHTS", 500)
    query, key, value, mask = inputs(2, 2, 30, 20)
    gradients = []
    for threads in (1, 4):
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        loss = draw(query, key, value, mask).square().sum()
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        gradients.append(torch.autograd.grad(loss, (query, key, value)))
    for ours, expected in zip(*gradients, strict=True):
        assert torch.equal(ours, expected)


def test_autocast():
    """As in PyTorch's own attention: states of any dtype are converted."""
    query, key, value, mask = inputs(2, 2, 30, 20, torch.bfloat16)
    expected = draw(query, key, value, mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = draw(query.float(), key, value.float(), mask)
    assert torch.equal(found, expected)


def test_autocast_leaves_float64_and_backward_passes_as_they_are():
    query, key, value, mask = inputs(2, 2, 30, 20)
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            found = draw(query, key, value, mask)
            results.append((found, *torch.autograd.grad(found.square().sum(), (query, key, value))))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    states = [states.detach().float().requires_grad_() for states in (query, key, value)]
    results = []
    for enabled in (False, True):
        loss = draw(*states, mask).square().sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            results.append(torch.autograd.grad(loss, states))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("attention", ["softmax", "nystrom", "linformer"])
def test_training_does_not_store_the_weights(attention):
    """PyTorch's own attention with dropout on a CPU stores N×K weights, several times, for the backward pass."""
    length, heads = 512, 2
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "intermediate_size": 32,
        "max_position_embeddings": length,
        "attention_probs_dropout_prob": 0.1,
    }
    if attention == "linformer":
        model, keys = LinformerModel(LinformerConfig(projected_dim=128, **sizes)), 128
    else:
        landmarks = 128 if attention == "nystrom" else None
        model, keys = NystromformerModel(NystromformerConfig(num_landmarks=landmarks, **sizes)), landmarks or length
    stored = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        stored.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train()(torch.randint(50, (2, length))).last_hidden_state.sum()
    assert stored
    assert not [shape for shape in stored if len(shape) > 2 and shape[-2:] == (length, keys)]


@pytest.mark.parametrize("weights", [2**18, 48])
def test_second_derivatives(weights, monkeypatch):
    monkeypatch.setattr(attention_dropout, "BLOCK_WEIGHTS", weights)
    query, key, value, mask = inputs(2, 2, 11, 6)
    kept = kept_weights(query, key, mask)
    second = []
    for result in (draw(query, key, value, mask), formula(query, key, value, mask, kept)):
        gradients = torch.autograd.grad(result.square().sum(), (query, key, value), create_graph=True)
        second.append(torch.autograd.grad(sum(one.square().sum() for one in gradients), (query, key, value)))
    for ours, of_formula in zip(*second, strict=True):
        assert (ours - of_formula).abs().max() < 2e-14 * of_formula.abs().max()


def test_gradient_of_a_gradient_for_one_input():
    query, key, value, mask = inputs(2, 2, 11, 6)
    result = draw(query.detach(), key.detach(), value, mask)
    (gradient,) = torch.autograd.grad(result.square().sum(), value, create_graph=True)
    assert torch.autograd.grad(gradient.square().sum(), value)[0].any()


def test_gradients_of_an_input_from_which_another_is_computed():
    """As the values of a Nyströmformer's landmarks are, in part, from their keys."""
    query, key, _, mask = inputs(2, 2, 30, 20)

    def total(key):
        return draw(query, key, key.square(), mask).square().sum()

    (expected,) = torch.autograd.grad(total(key * 1), key)
    (found,) = torch.autograd.grad(total(key * 1), key, create_graph=True)
    assert relative_error(found, expected) < 2e-15  # 5e-16
    found = torch.func.grad(lambda key: total(key * 1))(key.detach())
    assert relative_error(found, expected) < 2e-15


@pytest.mark.parametrize("dropout", [-0.1, 1.5])
def test_no_probability(dropout):
    with pytest.raises(ValueError, match="must lie between 0 and 1: correct attention_probs_dropout_prob"):
        attention_with_dropout(*inputs(2, 2, 30, 20), dropout)


def test_another_default_device():
    states = inputs(2, 2, 30, 20)
    expected = draw(*states)
    with torch.device("meta"):
        assert torch.equal(draw(*states), expected)


def test_a_skip_of_one_number_for_several_places_is_not_written_over():
    query, key, value, _ = inputs(2, 2, 30, 20)
    skip = torch.randn(2, 1, 1, 3, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(attend(query, key, value, skip=skip.expand(2, 2, 30, 3)), attend(query, key, value) + skip)
        masks = torch.rand(3, 2, 20) < 0.7
        found = torch.func.vmap(lambda mask: attend(query, key, value, mask, skip=skip.expand(2, 2, 30, 3).clone()))(
            masks
        )
        expected = [attend(query, key, value, mask) + skip for mask in masks]
    assert relative_error(found, torch.stack(expected)) < 1e-13


@torch.no_grad()
def test_a_skip_that_is_the_values_is_not_written_over():
    """Later queries, here those beyond the first block, would read the results of earlier ones."""
    query, key, value = torch.randn(3, 1, 2, 1500, 4, dtype=torch.float64)
    expected = attend(query, key, value) + value
    assert torch.equal(attend(query, key, value, skip=value), expected)
    assert torch.equal(torch.func.functionalize(lambda value: attend(query, key, value, skip=value))(value), expected)


def test_attend_adds_the_skip():
    query, key, value, mask = inputs(2, 2, 30, 20)
    skip = torch.randn(2, 2, 30, 3, dtype=torch.float64)
    expected = draw(query, key, value, mask) + skip
    torch.manual_seed(7)
    assert torch.equal(attend(query, key, value, mask[:, 0, 0], DROPOUT, skip), expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "option", ["nystromformer-no_convolution", "nystromformer-softmax", "linformer-layerwise", "linformer-none"]
)
@torch.no_grad()
def test_every_implementation_drops_weights_in_training(option, implementation):
    """With a probability of 1, nothing is left; in evaluation mode nothing is dropped."""
    model = make_model(option, attention_probs_dropout_prob=1.0)
    model.set_attn_implementation(implementation)
    contexts = []
    model.encoder.layer[0].attention.self.register_forward_hook(lambda *call: contexts.append(call[2]))
    ids, mask = torch.randint(3, 99, (2, 40)), torch.ones(2, 40, dtype=torch.long)
    mask[1, 25:] = 0
    for given in (None, mask):
        model.train()(ids, attention_mask=given)
        assert not contexts[-1].any()
        assert model.eval()(ids, attention_mask=given, output_attentions=True).attentions[0].any()
        assert contexts[-1].any()
    # The map that an eager context is computed from; `sdpa` returns the map without dropout.
    attention_map = model.train()(ids, attention_mask=mask, output_attentions=True).attentions[0]
    assert attention_map.any() == (implementation == "sdpa")


@pytest.mark.parametrize("option", ["nystromformer-no_convolution", "nystromformer-softmax", "linformer-max_pool"])
@torch.no_grad()
def test_a_row_without_tokens_stays_finite_in_training(option):
    model = make_model(option, attention_probs_dropout_prob=0.1, unpad_inputs=False).train()
    mask = torch.ones(2, 40, dtype=torch.long)
    mask[1] = 0
    contexts = []
    model.encoder.layer[0].attention.self.register_forward_hook(lambda *call: contexts.append(call[2]))
    model(torch.randint(3, 99, mask.shape), attention_mask=mask)
    assert contexts[0].isfinite().all()
