# SPDX-License-Identifier: Apache-2.0
"""Rows packed with several documents (`seq_idx`): each document gives the same as alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DataCollatorWithFlattening

from nystrom_models.models import input_checks
from nystrom_models.models.batch import first_of_document
from tests.models.options import OPTIONS, TOLERANCE, language_model, make_model, padded_inputs, relative_error


@pytest.mark.parametrize("option", OPTIONS)
@torch.no_grad()
def test_documents_do_not_see_each_other(option):
    model = make_model(option)
    ids, mask = torch.randint(3, 99, (3, 40)), torch.ones(3, 40, dtype=torch.long)
    documents = torch.zeros_like(ids)
    # Documents of 1, 16 and 23 tokens; of 30 and 3, with padding between and after; a single one.
    documents[0, 1:17], documents[0, 17:] = 1, 2
    documents[1, 30:] = 7
    mask[1, 30:35] = mask[1, 38:] = 0
    states = model(ids, attention_mask=mask, seq_idx=documents).last_hidden_state
    for row in range(3):
        for number in documents[row].unique():
            here = (documents[row] == number) & mask[row].bool()
            alone = model(ids[row : row + 1, here]).last_hidden_state[0]
            assert relative_error(states[row, here], alone) < TOLERANCE[torch.float32], (row, number)
    assert not states[mask == 0].any()


@settings(max_examples=25)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(0, 5))
def test_loss_and_gradients_are_those_of_the_documents(lengths, padding):
    model = make_model("linear-causal", "ForCausalLM")
    texts = [torch.randint(3, 99, (1, length)) for length in lengths]
    packed = torch.cat([*texts, torch.full((1, padding), 5)], dim=1)
    numbers = torch.cat([torch.full((1, length), number) for number, length in enumerate(lengths)], dim=1)
    numbers = torch.nn.functional.pad(numbers, (0, padding), value=99)
    mask = torch.ones_like(packed)
    mask[:, sum(lengths) :] = 0
    count = max(1, sum(lengths) - len(lengths))
    found = []
    for run in (
        lambda: model(packed, attention_mask=mask, labels=packed, seq_idx=numbers).loss,
        lambda: sum(model(text, labels=text, num_items_in_batch=count).loss for text in texts),
    ):
        model.zero_grad()
        loss = run()
        loss.backward()
        gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        found.append((loss.detach(), gradients))
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= TOLERANCE[torch.float32] * other.abs().max()


@pytest.mark.parametrize("option", ["linear-causal", "linear-causal_softmax"])
def test_positions_that_restart_are_documents(option):
    """Transformers' collator of packed rows returns only positions by default; its own causal models read them."""
    model = make_model(option, "ForCausalLM")
    texts = [[5, 6, 7], [8], [9, 10, 11, 12]]
    batch = DataCollatorWithFlattening()([{"input_ids": text} for text in texts])
    outputs = model(**batch)
    alone = [model(torch.tensor([text]), use_cache=False).logits[0] for text in texts]
    assert relative_error(outputs.logits[0], torch.cat(alone)) < TOLERANCE[torch.float32]
    numbered = torch.tensor([[0, 0, 0, 1, 2, 2, 2, 2]])
    assert torch.equal(outputs.loss, model(batch["input_ids"], labels=batch["input_ids"], seq_idx=numbered).loss)
    states = model.base_model(batch["input_ids"], position_ids=batch["position_ids"]).last_hidden_state
    assert torch.equal(states, model.base_model(batch["input_ids"], seq_idx=numbered).last_hidden_state)
    # The same positions for all rows.
    rows, positions = torch.randint(3, 99, (2, 8)), batch["position_ids"]
    expected = model(rows, position_ids=positions.expand(2, 8)).logits
    assert torch.equal(model(rows, position_ids=positions).logits, expected)
    # One document: positions that go on, and rows padded on the left.
    ids, mask = batch["input_ids"], torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    positions = torch.arange(8)[None]
    assert torch.equal(model(ids, position_ids=positions).logits, model(ids).logits)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    padded = model(ids, attention_mask=mask, position_ids=positions).logits
    assert torch.equal(padded, model(ids, attention_mask=mask).logits)


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linformer-headwise", "linear-causal"])
def test_an_encoder_warns_of_positions_that_start_again(option, monkeypatch):
    """Alone, they do not tell whether rows are packed: the tokens of a BERT see all of the row."""
    said = []
    monkeypatch.setattr(input_checks.logger, "warning_once", said.append)
    model = make_model(option)
    collate = DataCollatorWithFlattening(position_ids_start=model.config.first_position)
    batch = collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10, 11]}])
    ids, positions = batch["input_ids"], batch["position_ids"]
    rising = torch.arange(7)[None] + model.config.first_position
    model(ids)
    model(ids, position_ids=rising)
    model(ids, position_ids=positions, attention_mask=torch.ones_like(ids))
    model(ids, position_ids=positions, seq_idx=torch.tensor([[0, 0, 0, 1, 1, 1, 1]]))
    if not model.config.is_decoder:
        torch.compile(model, backend="eager")(ids, position_ids=positions)
    assert not said
    states = model(ids, position_ids=positions).last_hidden_state
    if model.config.is_decoder:
        assert not said
        return
    assert len(said) == 1 and "give seq_idx" in said[0]
    assert not torch.equal(states[:, :3], model(ids[:, :3]).last_hidden_state)
    # What the warning names keeps them apart.
    collate = DataCollatorWithFlattening(return_seq_idx=True, return_position_ids=False)
    batch = collate([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9, 10, 11]}])
    del batch["labels"]
    apart = model(**batch).last_hidden_state
    assert relative_error(apart[:, :3], model(ids[:, :3]).last_hidden_state) < TOLERANCE[torch.float32]


LENGTHS = "return_flash_attn_kwargs"


@pytest.mark.parametrize(
    "names",
    [{LENGTHS: True, "return_position_ids": False}, {LENGTHS: True}, {LENGTHS: True, "return_seq_idx": True}],
    ids=str,
)
@pytest.mark.parametrize("option", ["linear-causal", "nystromformer-landmarks"])
def test_documents_by_the_names_of_flash_attention(names, option):
    """As Transformers' collator and TRL's SFTTrainer(packing=True) give them."""
    model = language_model(option)
    model.resize_position_embeddings(20)  # for each document, but not for the whole row
    texts = [{"input_ids": list(range(5, 5 + length))} for length in (3, 1, 20, 4)]
    collate = DataCollatorWithFlattening(position_ids_start=model.config.first_position, **names)
    batch = collate(texts) | {"num_items_in_batch": torch.tensor(24)}
    numbered = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 1, 20, 4]))[None]
    expected = model(batch["input_ids"], labels=batch["labels"], seq_idx=numbered, num_items_in_batch=24)
    found = model(**batch)
    assert torch.equal(found.logits, expected.logits) and torch.equal(found.loss, expected.loss)


def test_a_document_that_is_too_long_is_refused():
    model = make_model("nystromformer-landmarks", max_position_embeddings=20)
    ids, numbers = torch.full((1, 30), 5), torch.arange(30)[None]
    assert model(ids, seq_idx=numbers // 20).last_hidden_state.shape == (1, 30, 32)
    with pytest.raises(ValueError, match="A sequence of 21 tokens is longer than max_position_embeddings=20"):
        model(ids, seq_idx=numbers // 21)


@pytest.mark.parametrize("lengths", [[0, 3, 7], [0, 3, 9], [1, 8], [0, 5, 3, 8], [[0, 8]]], ids=str)
def test_lengths_of_other_rows_are_refused(lengths):
    model = make_model("nystromformer-landmarks")
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(torch.arange(3, 11)[None], cu_seq_lens_q=torch.tensor(lengths))


@pytest.mark.parametrize(
    "documents", [{"seq_idx": torch.zeros(3, 40, dtype=torch.long)}, {"cu_seq_lens_q": torch.tensor([0, 40, 80, 120])}]
)
@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForMultipleChoice", "ForPreTraining"])
def test_one_result_for_several_documents_is_refused(head, documents):
    model, inputs = make_model("nystromformer-landmarks", head), padded_inputs(head, labels=True)
    with pytest.raises(ValueError, match=r"several documents in a row.*a row of its own"):
        model(**inputs, **documents)


@pytest.mark.parametrize("head", ["ForSequenceClassification", "ForMultipleChoice"])
def test_one_result_for_documents_by_position_is_refused(head):
    """A decoder divides rows where positions start again."""
    model = make_model("linear-causal", head)
    ids, positions = torch.randint(3, 99, (2, 2, 12)), torch.arange(12).remainder(7).expand(2, 2, 12)
    if head == "ForSequenceClassification":
        ids, positions = ids[0], positions[0]
    with pytest.raises(ValueError, match=r"position_ids that start again: .*a row of its own"):
        model(ids, position_ids=positions)
    assert model(ids, torch.ones_like(ids), position_ids=positions).logits.isfinite().all()  # one document


def test_two_divisions_of_a_causal_row_are_refused():
    model, ids = make_model("linear-causal", "ForCausalLM"), torch.randint(3, 99, (1, 12))
    numbers = torch.arange(12)[None] // 4
    assert model(ids, seq_idx=numbers, cu_seq_lens_q=torch.tensor([0, 4, 8, 12]), labels=ids).loss > 0
    with pytest.raises(ValueError, match="seq_idx and cu_seq_lens_q divide the rows into different documents"):
        model(ids, seq_idx=numbers, cu_seq_lens_q=torch.tensor([0, 7, 12]), labels=ids)


def test_first_tokens():
    documents, mask = torch.tensor([[1, 1, 0, 0, 5, 5]]), torch.tensor([[False, True, True, False, True, True]])
    assert first_of_document(documents, None).tolist() == [[True, False, True, False, True, False]]
    assert first_of_document(documents, mask).tolist() == [[False, True, True, False, True, False]]


def test_what_cannot_be_kept_apart_is_refused():
    model, ids = make_model("linear-causal", "ForCausalLM"), torch.randint(3, 99, (2, 8))
    with pytest.raises(ValueError, match=r"seq_idx has shape \(2, 7\)"):
        model(ids, seq_idx=ids[:, :7])
    for options in ({"use_cache": True}, {"output_attentions": True}):
        with pytest.raises(ValueError, match="caches and attention maps do not fit"):
            model(ids, seq_idx=torch.zeros_like(ids), **options)
    with pytest.raises(Exception, match="a graph cannot do: compile without fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(ids, seq_idx=torch.zeros_like(ids))
    with pytest.raises(ValueError, match=r"exported graphs and .* cannot do"):
        torch.export.export(model, (ids,), {"seq_idx": torch.zeros_like(ids)})


@pytest.mark.parametrize("option", ["linear-causal", pytest.param("nystromformer-landmarks", marks=pytest.mark.slow)])
def test_a_compiled_model_keeps_documents_apart(option):
    """At any lengths, with padding and without, by both names; in training."""
    model = language_model(option, num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager")
    first, second = torch.randint(3, 99, (2, 30)), torch.randint(3, 99, (3, 41))
    mask = torch.rand(3, 41) < 0.8
    lengths = torch.tensor([0, 7, 30, 31, 60], dtype=torch.int32)
    for inputs in (
        {"input_ids": first, "cu_seq_lens_q": lengths},
        {"input_ids": second, "seq_idx": (torch.rand(3, 41) < 0.2).cumsum(1), "attention_mask": mask.long()},
    ):
        found = []
        for run in (model, compiled):
            model.zero_grad()
            outputs = run(**inputs, labels=inputs["input_ids"])
            outputs.loss.backward()
            gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            found.append((outputs.logits.detach(), torch.cat(gradients)))
        for one, other in zip(*found, strict=True):
            assert relative_error(other, one) < TOLERANCE[torch.float32]


def test_a_graph_does_not_mix_documents_whose_positions_start_again():
    model, ids = make_model("linear-causal", "ForCausalLM", num_hidden_layers=1), torch.randint(3, 99, (2, 8))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    positions = torch.arange(8).repeat(2, 1)
    expected = model(ids, position_ids=positions).logits
    torch.testing.assert_close(compiled(ids, position_ids=positions).logits, expected)
    with pytest.raises(RuntimeError, match="position_ids start again within a row"):
        compiled(ids, position_ids=positions % 5)
