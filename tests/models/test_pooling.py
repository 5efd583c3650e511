# SPDX-License-Identifier: Apache-2.0
"""What sequences are classified by: the first or last valid token, or the mean; and pairs of sequences."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nystrom_models.models.pooling import pool
from tests.models.options import TOLERANCE, make_model, padded_inputs, relative_error

POOLINGS = ("first", "mean", "last")
FAMILIES = ("nystromformer-landmarks", "linformer-layerwise", "linear-elu", "linear-causal")
POOLED = [
    (option, pooling) for option in FAMILIES for pooling in POOLINGS if (option, pooling) != ("linear-causal", "first")
]


def pooled_exactly(states, valid, pooling):
    """In float64, of one row (N, C); zero for the mean of nothing."""
    chosen = states.double()[valid]
    if pooling == "mean":
        return chosen.mean(dim=0) if len(chosen) else torch.zeros(states.shape[1], dtype=torch.float64)
    if not len(chosen):
        chosen = states.double()
    return chosen[0 if pooling == "first" else -1]


@settings(max_examples=30)
@given(st.lists(st.lists(st.booleans(), min_size=7, max_size=7), min_size=1, max_size=4), st.sampled_from(POOLINGS))
def test_any_mask(rows, pooling):
    mask = torch.tensor(rows)
    states = torch.randn(*mask.shape, 5).masked_fill(~mask[..., None], float("nan"))
    states[~mask.any(dim=1)] = 2.0
    expected = torch.stack([pooled_exactly(row, valid, pooling) for row, valid in zip(states, mask, strict=True)])
    torch.testing.assert_close(pool(states, mask.long(), pooling).double(), expected, rtol=1e-6, atol=1e-6)
    if mask.all():
        assert torch.equal(pool(states, None, pooling), pool(states, mask.long(), pooling))


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float16, 2**-11), (torch.bfloat16, 2**-8)])
def test_means_over_thousands_of_tokens_in_half_precision(dtype, rounding):
    """Their sum is beyond the range of float16, their number has more digits than bfloat16."""
    states = (20 + torch.randn(2, 4100, 3)).to(dtype)
    mask = torch.ones(2, 4100, dtype=torch.long)
    mask[0, 4097:] = 0
    expected = torch.stack([pooled_exactly(states[row], mask[row] == 1, "mean") for row in range(2)])
    found = pool(states, mask, "mean")
    assert found.dtype == dtype
    assert ((found.double() - expected).abs() <= rounding * expected.abs()).all()


def head_in_float64(model, features):
    dense, out = model.classifier.dense, model.classifier.out_proj
    hidden = features @ dense.weight.double().T + dense.bias.double()
    return model.classifier.activation(hidden) @ out.weight.double().T + out.bias.double()


@pytest.mark.parametrize(("option", "pooling"), POOLED)
@torch.no_grad()
def test_rows_are_classified_as_alone(option, pooling):
    """In batches padded left and right, packed and not."""
    model = make_model(option, "ForSequenceClassification", classifier_pooling=pooling, num_labels=3)
    inputs = padded_inputs()
    states = [
        model.base_model(ids[valid == 1][None]).last_hidden_state[0]
        for ids, valid in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
    ]
    pooled = [pooled_exactly(row, torch.ones(len(row), dtype=torch.bool), pooling) for row in states]
    expected = head_in_float64(model, torch.stack(pooled))
    for unpad in (True, False):
        model.config.unpad_inputs = unpad
        assert relative_error(model(**inputs).logits, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    "fields",
    [
        {"classifier_dropout": 1.0},
        {"hidden_dropout_prob": 1.0},
        {"classifier_dropout": 0.0, "hidden_dropout_prob": 1.0},
    ],
    ids=lambda fields: "-".join(fields),
)
@torch.no_grad()
def test_dropout_of_the_classifiers(fields):
    """Before each of their linear layers: by `classifier_dropout`, or `hidden_dropout_prob` if that is None."""
    dropped = fields.get("classifier_dropout", 1.0) == 1.0
    for head, layers in (("ForSequenceClassification", ("dense", "out_proj")), ("ForTokenClassification", ("",))):
        model = make_model("linear-elu", head, **fields)
        seen = []
        for layer in layers:
            linear = model.classifier.get_submodule(layer)
            linear.register_forward_pre_hook(lambda module, inputs, seen=seen: seen.append(inputs[0].any().item()))
        model.train()(torch.randint(3, 99, (2, 20)))
        assert seen == [not dropped] * len(layers)
        seen.clear()
        model.eval()(torch.randint(3, 99, (2, 20)))
        assert seen == [True] * len(layers)


@torch.no_grad()
def test_choices_are_scored_by_the_state_that_the_configuration_says():
    ids = torch.randint(3, 99, (2, 3, 20))
    for pooling in POOLINGS:
        model = make_model("linformer-layerwise", "ForMultipleChoice", classifier_pooling=pooling)
        states = model.base_model(ids.flatten(0, 1)).last_hidden_state
        hidden = model.activation(model.pre_classifier(pool(states, None, pooling)))
        torch.testing.assert_close(model(ids).logits, model.classifier(hidden).view(2, 3))


@torch.no_grad()
def test_the_pooler_of_a_causal_model_reads_the_last_valid_token():
    """Of an encoder's, the first."""
    inputs = padded_inputs()
    for option, index in (("linear-causal", -1), ("linear-elu", 0)):
        model = make_model(option)
        outputs = model(**inputs)
        for row, valid in enumerate(inputs["attention_mask"].bool()):
            state = outputs.last_hidden_state[row, valid][index]
            torch.testing.assert_close(outputs.pooler_output[row], torch.tanh(model.pooler.dense(state)))


@pytest.mark.parametrize("pooling", ["max", None])
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForMultipleChoice"])
def test_another_pooling_is_refused_after_the_model_was_made(head, pooling):
    model = make_model("linear-elu", head)
    model.config.classifier_pooling = pooling
    with pytest.raises(ValueError, match=f"classifier_pooling={pooling!r} is unknown: use one of first, mean, last"):
        model(**padded_inputs(head))


def pairs():
    """Four pairs, of which some texts are padded on the left, some on the right."""
    mask = torch.ones(4, 2, 24, dtype=torch.long)
    mask[0, 0, 9:] = mask[1, 1, :17] = mask[2, :, 20:] = mask[3, 0, 1:] = 0
    return {"input_ids": torch.randint(3, 99, mask.shape), "attention_mask": mask}


@pytest.mark.parametrize("option", FAMILIES)
@torch.no_grad()
def test_pairs_are_read_apart(option, tmp_path):
    fields = {"dual_encoder": True, "classifier_pooling": "mean", "num_labels": 2}
    model = make_model(option, "ForSequenceClassification", **fields)
    inputs = pairs()
    first, second = (
        torch.stack(
            [
                model.base_model(ids[valid == 1][None]).last_hidden_state[0].double().mean(dim=0)
                for ids, valid in zip(inputs["input_ids"][:, place], inputs["attention_mask"][:, place], strict=True)
            ]
        )
        for place in range(2)
    )
    expected = head_in_float64(model, torch.cat([first, second, first * second, first - second], dim=-1))
    outputs = model(**inputs, labels=torch.tensor([0, 1, 1, 0]))
    assert relative_error(outputs.logits, expected) < TOLERANCE[torch.float32]
    assert outputs.loss == pytest.approx(
        torch.nn.functional.cross_entropy(expected, torch.tensor([0, 1, 1, 0])).item(), rel=1e-4
    )
    embeds = model.get_input_embeddings()(inputs["input_ids"])
    by_embeds = model(inputs_embeds=embeds, attention_mask=inputs["attention_mask"]).logits
    assert relative_error(by_embeds, expected) < TOLERANCE[torch.float32]
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert torch.equal(again(**inputs).logits, outputs.logits)


def test_what_is_no_pair_is_refused():
    model = make_model("linear-elu", "ForSequenceClassification", dual_encoder=True)
    for shape in ((2, 24), (2, 3, 24)):
        with pytest.raises(ValueError, match=r"dual_encoder=True .* \(batch, 2, length\)"):
            model(torch.randint(3, 99, shape))


@pytest.mark.parametrize(
    "fields",
    [
        {"dual_encoder": True, "classifier_pooling": "mean"},
        pytest.param({"classifier_pooling": "mean"}, marks=pytest.mark.slow),
        pytest.param({"classifier_pooling": "last"}, marks=pytest.mark.slow),
    ],
    ids=["pairs", "mean", "last"],
)
@torch.no_grad()
def test_pooling_compiles_without_graph_breaks(fields):
    small = {"num_hidden_layers": 1, "pinv_iterations": 2}
    model = make_model("nystromformer-landmarks", "ForSequenceClassification", **small, **fields)
    inputs = pairs() if "dual_encoder" in fields else padded_inputs()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert relative_error(compiled(**inputs).logits, model(**inputs).logits) < TOLERANCE[torch.float32]
