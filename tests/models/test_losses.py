# SPDX-License-Identifier: Apache-2.0
"""Losses in Trainer, and in half precision."""

import pytest
import torch
from torch.nn import functional as F
from transformers import Trainer, TrainingArguments

from tests.analysis.models import make_model as make_albert
from tests.models.options import HEADS, make_model, padded_inputs, relative_error

FAMILIES = ("nystromformer-landmarks", "linformer-layerwise", "linear-elu")
WITH_LABELS = [head for head in HEADS if head not in ("Model", "ForQuestionAnswering")]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_many_labels_in_half_precision(dtype):
    """A sum of 9,000 terms overflows float16; a mean rounded to bfloat16 has two digits."""
    model = make_model("linformer-layerwise", "ForTokenClassification", num_labels=1000).to(dtype)
    ids = torch.randint(3, 99, (150, 60))
    labels = torch.randint(0, 1000, ids.shape)
    outputs = model(ids, labels=labels)
    expected = F.cross_entropy(outputs.logits.double().flatten(0, 1), labels.flatten())
    assert outputs.loss.dtype == torch.float32 and relative_error(outputs.loss, expected) < 1e-6


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("head", [*WITH_LABELS, "ForQuestionAnswering", "ForCausalLM"])
@torch.no_grad()
def test_labels_of_any_integer_dtype(head, padded, dtype):
    """Padding and the end of a row have the label -100, which not every dtype can hold."""
    model = make_model("linear-causal" if head == "ForCausalLM" else "nystromformer-landmarks", head, num_labels=2)
    ids = torch.randint(3, 99, (4, 3, 20) if head == "ForMultipleChoice" else (4, 20))
    inputs = {"input_ids": ids}
    if padded:
        inputs["attention_mask"] = torch.ones_like(ids)
        inputs["attention_mask"][..., 15:] = 0
    of_tokens = {"labels": ids % 2 if head == "ForTokenClassification" else ids}
    of_rows = torch.tensor([0, 1, 1, 0])
    labels = {
        "ForPreTraining": of_tokens | {"sentence_order_label": of_rows},
        "ForSequenceClassification": {"labels": of_rows},
        "ForMultipleChoice": {"labels": of_rows},
        "ForQuestionAnswering": {"start_positions": of_rows, "end_positions": of_rows},
    }.get(head, of_tokens)
    expected = model(**inputs, **labels).loss
    assert torch.equal(model(**inputs, **{name: label.to(dtype) for name, label in labels.items()}).loss, expected)


KINDS = {"regression": F.mse_loss, "multi_label_classification": F.binary_cross_entropy_with_logits}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("problem_type", KINDS)
@torch.no_grad()
def test_losses_of_numbers_and_several_labels(problem_type, dtype):
    """In float32 also in half precision; divided by the number of labels, or by the one that is given."""
    model = make_model("linear-elu", "ForSequenceClassification", num_labels=700, problem_type=problem_type).to(dtype)
    ids, labels = torch.randint(3, 99, (6, 20)), torch.randint(0, 2, (6, 700)).float()
    outputs = model(ids, labels=labels)
    expected = KINDS[problem_type](outputs.logits.double(), labels.double())
    assert outputs.loss.dtype == torch.float32 and relative_error(outputs.loss, expected) < 4e-7
    for count in (7, torch.tensor(7)):
        divided = model(ids, labels=labels, num_items_in_batch=count).loss
        assert relative_error(divided, expected * labels.numel() / 7) < 4e-7


@torch.no_grad()
def test_the_loss_of_answers():
    """The mean of those of the first and last tokens; positions may be a column, as some collators make them."""
    model, ids = make_model("linear-elu", "ForQuestionAnswering"), torch.randint(3, 99, (4, 20))
    starts, ends = torch.tensor([3, 0, 25, 7]), torch.tensor([4, 19, 25, -1])
    outputs = model(ids, start_positions=starts, end_positions=ends)
    logits = (outputs.start_logits.double(), outputs.end_logits.double())
    sums = [
        F.cross_entropy(one, where.masked_fill(where > 19, -100).masked_fill(where < 0, -100), reduction="sum")
        for one, where in zip(logits, (starts, ends), strict=True)
    ]
    assert relative_error(outputs.loss, (sums[0] / 3 + sums[1] / 2) / 2) < 4e-7
    columns = {"start_positions": starts[:, None], "end_positions": ends[:, None]}
    assert torch.equal(model(ids, torch.ones_like(ids), **columns).loss, outputs.loss)
    assert torch.equal(model(ids, **columns).loss, outputs.loss)
    divided = model(ids, **columns, num_items_in_batch=5).loss
    assert relative_error(divided, (sums[0] + sums[1]) / 5 / 2) < 4e-7


@pytest.mark.parametrize("labels", [torch.zeros(3, 2), torch.zeros(6), torch.zeros(2)], ids=lambda one: str(one.shape))
@pytest.mark.parametrize("problem_type", ["regression", "multi_label_classification"])
def test_labels_of_another_shape_are_refused(problem_type, labels):
    fields = {"num_labels": 3, "problem_type": problem_type}
    model = make_model("linformer-layerwise", "ForSequenceClassification", **fields)
    with pytest.raises(ValueError, match=r"labels have shape .* must be \(batch, num_labels\) = \(2, 3\)"):
        model(torch.randint(3, 99, (2, 9)), labels=labels)


@pytest.mark.parametrize("shape", [(2, 3), (3,)], ids=str)
@pytest.mark.parametrize("problem_type", [None, "single_label_classification"])
def test_several_classes_a_row_need_their_problem_type(problem_type, shape):
    model = make_model("linformer-layerwise", "ForSequenceClassification", num_labels=3, problem_type=problem_type)
    with pytest.raises(ValueError, match=r"must be \(batch,\) = \(2,\).*\(2, 3\) and problem_type="):
        model(torch.randint(3, 99, (2, 9)), labels=torch.ones(shape, dtype=torch.long))


def rows_of(inputs, rows):
    return {name: tensor[rows] for name, tensor in inputs.items()}


@pytest.mark.parametrize("head", WITH_LABELS)
@torch.no_grad()
def test_parts_of_a_batch_add_up_to_its_loss(head):
    """As in Trainer's accumulation: each part is divided by the number of labels of all parts, which may differ in
    size.
    """
    model = make_model("nystromformer-landmarks", head)
    if head == "ForMultipleChoice":
        inputs = {"input_ids": torch.randint(3, 99, (3, 2, 20)), "labels": torch.tensor([0, 1, 1])}
    else:
        inputs = padded_inputs(head, labels=True)
    if head != "ForSequenceClassification" and head != "ForMultipleChoice":
        inputs["labels"] = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
        inputs["labels"][1, 20:] = -100
    if head == "ForPreTraining":
        # The order of rows counts by their share of the labels: the same for all where there are as many.
        inputs["labels"] = torch.full_like(inputs["input_ids"], -100)
        inputs["labels"][:, 12:20] = 7
    count = (inputs["labels"] != -100).sum()
    parts = [rows_of(inputs, slice(0, 1)), rows_of(inputs, slice(1, 3))]
    losses = [model(**part, num_items_in_batch=count).loss for part in parts]
    assert relative_error(sum(losses), model(**inputs).loss) < 1e-6
    assert relative_error(model(**inputs, num_items_in_batch=int(count)).loss, model(**inputs).loss) < 1e-6


@pytest.mark.parametrize("number", [0, torch.tensor(0)], ids=str)
@pytest.mark.parametrize(
    ("option", "head"),
    [("linear-elu", "ForPreTraining"), ("linear-elu", "ForMaskedLM"), ("linear-causal", "ForCausalLM")],
)
def test_a_step_without_labels_has_no_loss(option, head, number):
    """Trainer counts the labels of a step: there may be none, in short rows."""
    model, ids = make_model(option, head), torch.randint(3, 99, (2, 9))
    order = {"sentence_order_label": torch.tensor([0, 1])} if head == "ForPreTraining" else {}
    loss = model(ids, labels=torch.full_like(ids, -100), num_items_in_batch=number, **order).loss
    loss.backward()
    assert loss == 0 and all(weight.grad is None or weight.grad.isfinite().all() for weight in model.parameters())


@torch.no_grad()
def test_labels_at_padding_do_not_weigh_the_sentence_order():
    """Its weight is this batch's share of the labels that count."""
    model, inputs = make_model("linear-elu", "ForPreTraining"), padded_inputs("ForPreTraining", labels=True)
    clean = inputs["labels"].masked_fill(inputs["attention_mask"] == 0, -100)
    expected = model(**inputs | {"labels": clean}, num_items_in_batch=300)
    found = model(**inputs, num_items_in_batch=300)
    assert torch.equal(found.sop_loss, expected.sop_loss) and torch.equal(found.mlm_loss, expected.mlm_loss)


@pytest.mark.parametrize("sparse", [False, True])
@torch.no_grad()
def test_the_label_that_does_not_count_is_the_configurations(sparse):
    inputs = padded_inputs("ForPreTraining", labels=True)
    found = []
    for ignored in (-100, -7):
        torch.manual_seed(0)
        fields = {"sparse_pred_ignore_index": ignored, "sparse_prediction": sparse}
        model = make_model("linformer-layerwise", "ForPreTraining", **fields)
        labels = inputs["labels"].clone()
        labels[:, ::3] = ignored
        found.append(model(**inputs | {"labels": labels}, num_items_in_batch=90))
    for name in ("mlm_loss", "sop_loss", "prediction_logits"):
        assert torch.equal(found[0][name], found[1][name]), name


@pytest.mark.parametrize("option", FAMILIES)
def test_trainer_accumulates_unequal_batches_as_one(option, tmp_path):
    """Four rows of 30, 2, 9 and 20 labels, in one step of one batch or of four: the same gradient."""
    rows = []
    for count in (30, 2, 9, 20):
        ids = torch.randint(3, 99, (40,))
        labels = torch.full_like(ids, -100)
        labels[:count] = ids[:count]
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    trained = []
    for batch_size in (4, 1):
        torch.manual_seed(0)
        model = make_model(option, "ForMaskedLM")
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=4 // batch_size,
            max_steps=1,
            learning_rate=0.1,
            optim="sgd",
            max_grad_norm=0,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(model, arguments, train_dataset=rows).train()
        trained.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert relative_error(trained[1], trained[0]) < 1e-5


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linformer-layerwise", "linear-elu"])
def test_a_tuple_of_outputs_has_the_order_of_alberts(option):
    model, ids = make_model(option, "ForPreTraining"), torch.randint(3, 99, (2, 9))
    inputs = {"labels": ids, "sentence_order_label": torch.tensor([0, 1]), "output_hidden_states": True}
    outputs = model(ids, **inputs)
    of_albert = make_albert("Albert", "ForPreTraining")(ids, **inputs)
    assert tuple(outputs)[: len(of_albert)] == tuple(of_albert)
    loss, logits, order, *_ = model(ids, **inputs, return_dict=False)
    assert torch.equal(loss, outputs.loss)
    assert torch.equal(logits, outputs.prediction_logits) and torch.equal(order, outputs.sop_logits)


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linformer-layerwise", "linear-causal"])
def test_trainer_evaluates_with_liger_kernels(option, monkeypatch, tmp_path):
    """Trainer then passes `skip_logits`, also to models that the package liger-kernel does not know."""
    monkeypatch.setattr("transformers.trainer.apply_liger_kernel", lambda *_: None)
    model = make_model(option, "ForCausalLM" if option == "linear-causal" else "ForMaskedLM")
    ids = torch.randint(3, 99, (20,))
    losses = []
    for use_liger_kernel in (False, True):
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            use_liger_kernel=use_liger_kernel,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(model, arguments, eval_dataset=[{"input_ids": ids, "labels": ids}])
        losses.append(trainer.evaluate()["eval_loss"])
    assert losses[0] == losses[1]


def test_predictions_are_logits_and_not_losses(tmp_path):
    """`Trainer.predict` removes the outputs of `keys_to_ignore_at_inference`."""
    model = make_model("nystromformer-landmarks", "ForPreTraining")
    rows = [{"input_ids": torch.randint(3, 99, (20,)), "sentence_order_label": 1} for _ in range(3)]
    rows = [row | {"labels": row["input_ids"]} for row in rows]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), report_to=[], disable_tqdm=True, use_cpu=True, per_device_eval_batch_size=2
    )
    predicted = Trainer(model, arguments).predict(rows).predictions
    assert [array.shape for array in predicted] == [(3, 20, 99), (3, 2)]


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForPreTraining"])
@pytest.mark.parametrize("option", FAMILIES)
def test_without_tied_weights_every_parameter_is_trained(option, head, tmp_path):
    model = make_model(option, head, tie_word_embeddings=False)
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
    model.resize_token_embeddings(110)
    model(**padded_inputs(head, labels=True)).loss.backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    model.save_pretrained(tmp_path)
    again, report = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    inputs = padded_inputs(head)
    with torch.no_grad():
        assert torch.equal(again.eval()(**inputs)[0], model(**inputs)[0])


@torch.no_grad()
def test_a_new_output_layer_brings_its_bias():
    """Also under the second name that it has where weights are tied."""
    model = make_model("linformer-layerwise", "ForMaskedLM")
    layer = torch.nn.Linear(32, 99)
    model.set_output_embeddings(layer)
    assert model.get_output_embeddings() is layer and model.cls.predictions.bias is layer.bias


def test_the_second_bias_of_tied_checkpoints_is_not_reported(tmp_path):
    model = make_model("linformer-layerwise", "ForMaskedLM")
    model.save_pretrained(tmp_path)
    _, report = type(model).from_pretrained(tmp_path, tie_word_embeddings=False, output_loading_info=True)
    assert not report["unexpected_keys"]
    assert report["missing_keys"] == {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}
