# SPDX-License-Identifier: Apache-2.0
"""What a teacher says is its own, and what it adds to the losses is what it should be."""

import math
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from torch.nn import functional as F
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining

from nystrom_models.conversion.weights import is_of_a_family
from nystrom_models.data import PretrainingCollator
from nystrom_models.training import (
    OptimizationArguments,
    PretrainingObjective,
    create_accelerator,
    create_scheduler,
)
from nystrom_models.training.distillation import ScoresBesideTeacher, TeacherArguments, divergence, with_teacher
from nystrom_models.training.objectives import Preparation
from nystrom_models.training.teacher import Teacher
from tests.training.teachers import EXACT, LENGTH, save_student, save_teacher
from tests.training.test_loop import first_rates


@pytest.fixture(scope="module")
def bert(tokenizer, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("bert"))
    save_teacher(folder, "Bert", tokenizer, "ForPreTraining")
    return folder


@pytest.fixture(scope="module")
def batch(tokenizer, examples):
    """Rows longer than the teachers take."""
    return PretrainingCollator(tokenizer)([examples[number] | {"index": number} for number in range(8)])


@pytest.fixture(scope="module")
def short(batch):
    """The beginnings of these rows, as long as a teacher takes, two of them padded."""
    cut = {name: value if value.dim() == 1 else value[:, :LENGTH].clone() for name, value in batch.items()}
    cut["attention_mask"][:2, 22:] = 0
    cut["labels"][:2, 22:] = -100
    return cut


def teach(student, source, tokenizer, **flags):
    """The objective of a student with a teacher."""
    args = TeacherArguments(teacher_model_name_or_path=source, **flags)
    accelerator = create_accelerator(cpu=True)
    teacher = Teacher(source, tokenizer)
    return with_teacher(PretrainingObjective(), teacher, student, accelerator, args)


@pytest.mark.parametrize("kind", ["Bert", "Roberta", "DistilBert", "Albert", "Electra", "Linformer"])
def test_what_a_teacher_says_is_its_own(kind, short, tokenizer, tmp_path):
    model = save_teacher(tmp_path, kind, tokenizer)
    teacher = Teacher(str(tmp_path), tokenizer)
    # In float32, products of chosen tokens differ from those of all by rounding, which depends on the processor.
    for each in (model, teacher.model):
        each.double()
    chosen, valid = short["labels"] != -100, short["attention_mask"].bool()
    said = teacher(short, chosen, with_states=True)
    inputs = {name: short[name] for name in ("input_ids", "attention_mask")}
    if kind not in ("Roberta", "DistilBert"):
        inputs["token_type_ids"] = short["token_type_ids"]
        assert short["token_type_ids"].any()
    with torch.no_grad():
        own = model(**inputs, output_hidden_states=True)
    torch.testing.assert_close(said.logits, own.logits[chosen], rtol=0, atol=1e-13)
    assert len(said.hidden_states) == 2
    for state, expected in zip(said.hidden_states, own.hidden_states[1:], strict=True):
        torch.testing.assert_close(state[valid], expected[valid], rtol=0, atol=1e-13)
    # Each layer, given what the teacher says it was given, attends as the teacher says it did.
    attention = teacher.attention(short)
    assert len(attention.inputs) == len(attention.outputs) == 2
    if kind in ("Bert", "Electra"):
        for layer, states, context in zip(
            model.base_model.encoder.layer, attention.inputs, attention.outputs, strict=True
        ):
            mask = torch.zeros(valid.shape, dtype=torch.float64).masked_fill(~valid, -math.inf)[:, None, None]
            with torch.no_grad():
                expected = layer.attention.self(states, mask)[0]
            torch.testing.assert_close(context[valid], expected[valid], rtol=0, atol=1e-13)
    assert not teacher.model.training and not any(p.requires_grad for p in teacher.model.parameters())


def test_feed_forward_layers_in_parts_do_not_limit_the_rows(short, tokenizer, tmp_path):
    save_teacher(tmp_path, "Bert", tokenizer, chunk_size_feed_forward=7)
    teacher = Teacher(str(tmp_path), tokenizer)
    assert teacher(short, with_states=True).hidden_states[0].shape[1] == LENGTH


def test_of_long_rows_it_says_what_it_says_of_windows(bert, batch, tokenizer):
    teacher = Teacher(bert, tokenizer)
    assert batch["input_ids"].shape[1] > LENGTH == teacher.longest
    chosen = (batch["labels"] != -100) & teacher.cutter.seen(batch["attention_mask"])
    said = teacher(batch, chosen, with_states=True)
    row = int(batch["attention_mask"].sum(1).argmax())
    first = torch.cat([batch["input_ids"][row, : LENGTH - 1], torch.tensor([tokenizer.sep_token_id])])
    with torch.no_grad():
        own = teacher.model(first[None], token_type_ids=batch["token_type_ids"][row, None, :LENGTH])
    places = chosen[row, : LENGTH - 1]
    logits = said.logits[chosen.nonzero()[:, 0] == row][: int(places.sum())]
    torch.testing.assert_close(logits, own.logits[0, : LENGTH - 1][places], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", ["short", "batch"])
def test_a_teacher_that_is_equal_teaches_nothing(rows, bert, tokenizer, tmp_path, request):
    """With the same weights and exact attention, all that a teacher adds is 0. Longer rows are seen in windows, in
    which attention is the same, too."""
    batch = request.getfixturevalue(rows)
    student = save_student(tmp_path, bert, max_position_embeddings=64, **EXACT)
    student.config.sparse_prediction = True
    flags = {"attention_matching_steps": 1, "alpha_cos": 1.0}
    objective = teach(student, bert, tokenizer, **flags)
    matching, taught = objective.at_step(0), objective.at_step(1)
    assert matching.losses(matching.forward(student, batch))["attention_loss"].item() < 1e-11
    if rows == "batch":
        return
    with torch.no_grad():
        losses = taught.losses(taught.forward(student, batch))
    assert max(float(losses[name]) for name in ("ce_loss", "mse_loss", "cos_loss")) < 1e-5
    assert losses.keys() == taught.num_targets(batch).keys()
    with torch.no_grad():
        own = student(**batch)
    assert float(losses["mlm_loss"]) == pytest.approx(float(own.mlm_loss))
    # Other weights are seen by each of them.
    with torch.no_grad():
        student.base_model.encoder.layer[0].attention.self.value.weight.mul_(-1)
        assert float(matching.losses(matching.forward(student, batch))["attention_loss"]) > 1e-4
        losses = taught.losses(taught.forward(student, batch))
    assert min(float(losses[name]) for name in ("ce_loss", "mse_loss", "cos_loss")) > 1e-4


def test_losses_are_means_over_what_is_counted(bert, batch, tokenizer, tmp_path):
    """Against the formulas, with all logits (as a compiled model has them) and with those of masked tokens."""
    student = save_student(tmp_path, bert, "linformer", projected_dim=4, max_position_embeddings=64)
    flags = {"alpha_cos": 0.5, "temperature": 3.0, "alpha_mlm": 0.25}
    objective = teach(student, bert, tokenizer, **flags)
    assert objective.weights == {"mlm_loss": 0.25, "ce_loss": 1.0, "mse_loss": 1.0, "cos_loss": 0.5}
    seen = objective.teacher.cutter.seen(batch["attention_mask"])
    masked = seen & (batch["labels"] != -100)
    counts = objective.num_targets(batch)
    assert (counts["ce_loss"], counts["mse_loss"]) == (masked.sum(), seen.sum())
    assert seen.sum() < batch["attention_mask"].sum()
    theirs = objective.teacher(batch, masked, True)
    with torch.no_grad():
        own = student(**batch, output_hidden_states=True)
        for sparse in (False, True):
            student.config.sparse_prediction = sparse
            losses = objective.losses(objective.forward(student, batch))
            probabilities = (theirs.logits / 3).softmax(-1)
            difference = probabilities.log() - (own.prediction_logits[masked] / 3).log_softmax(-1)
            expected = 9 * (probabilities * difference).sum(-1).mean()
            assert float(losses["ce_loss"]) == pytest.approx(float(expected), rel=1e-4)
            pairs = list(zip(own.hidden_states[1:], theirs.hidden_states, strict=True))
            errors = [((a[seen] - b[seen]) ** 2).mean() for a, b in pairs]
            assert float(losses["mse_loss"]) == pytest.approx(float(sum(errors) / 2), rel=1e-5)
            cosines = [F.cosine_similarity(a[seen], b[seen], dim=-1).mean() for a, b in pairs]
            assert float(losses["cos_loss"]) == pytest.approx(float(1 - sum(cosines) / 2), rel=1e-4)


def test_a_teacher_is_scored_on_the_tokens_that_it_sees(bert, batch, tokenizer, tmp_path):
    """Beside the model, whose scores stay what they are; against all logits of the windows."""
    student = save_student(tmp_path, bert, "linformer", projected_dim=4, max_position_embeddings=64).eval()
    teacher = Teacher(bert, tokenizer)
    # The last token of the first window is replaced by [SEP] in what the teacher reads.
    batch = {**batch, "labels": batch["labels"].clone()}
    batch["labels"][batch["attention_mask"].sum(1).argmax(), LENGTH - 1] = 5
    objective = ScoresBesideTeacher(teacher, create_accelerator(cpu=True))
    with torch.no_grad():
        scores = objective.scores(objective.forward(student, batch), batch)
        own = PretrainingObjective().scores(student(**batch), batch)
        windows = teacher.cutter.cut(batch)
        logits = windows.take_back(teacher.model(**windows.inputs).logits)
        # In the precision of the run.
        objective.accelerator = SimpleNamespace(autocast=lambda: torch.autocast("cpu", torch.bfloat16))
        assert objective.forward(student, batch)[1].dtype == torch.bfloat16
    assert scores.keys() == own.keys() | {"teacher_mlm_loss", "teacher_mlm_accuracy"}
    for name, (sums, counts) in own.items():
        assert torch.equal(scores[name][0], sums) and torch.equal(scores[name][1], counts), name
    masked = (batch["labels"] != -100) & teacher.cutter.seen(batch["attention_mask"])
    assert masked.sum() < (batch["labels"] != -100).sum()
    labels = batch["labels"].where(masked, 0)
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    for name, values in (
        ("teacher_mlm_loss", losses),
        ("teacher_mlm_accuracy", (logits.argmax(-1) == labels).float()),
    ):
        torch.testing.assert_close(scores[name][0], (values * masked).sum(1), rtol=1e-5, atol=1e-5)
        assert torch.equal(scores[name][1], masked.sum(1).float())


def test_a_teacher_saved_in_half_precision_has_that_of_the_run(bert, batch, tokenizer, tmp_path):
    """As the model that is made of it: otherwise, they would be compared in different precisions."""
    half = AutoModelForMaskedLM.from_pretrained(bert).bfloat16()
    half.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    masked = batch["labels"] != -100
    masked &= Teacher(bert, tokenizer).cutter.seen(batch["attention_mask"])
    teacher = Teacher(str(tmp_path), tokenizer)
    found = teacher(batch, masked).logits
    assert found.dtype == torch.float32
    teacher.model = half.float().eval()
    torch.testing.assert_close(found, teacher(batch, masked).logits)


def test_attention_is_matched_by_the_mean_squared_error(bert, batch, tokenizer, tmp_path):
    """Over tokens, layers and units; the error is relative to the teacher's attention."""
    student = save_student(tmp_path, bert, "linformer", projected_dim=4, max_position_embeddings=64)
    matching = teach(student, bert, tokenizer, attention_matching_steps=1).at_step(0)
    ours = []
    for layer in student.base_model.encoder.layer:
        layer.attention.self.register_forward_hook(lambda *args: ours.append(args[2]))
    with torch.no_grad():
        found = matching.forward(student, batch)
    theirs = matching.teacher.attention(batch)
    own = theirs.windows.own
    pairs = [(a[own], b[own]) for a, b in zip(ours, theirs.outputs, strict=True)]
    errors, squares = (sum(values) / 2 for values in zip(*(((a - b) ** 2, b**2) for a, b in pairs), strict=True))
    assert matching.num_targets(batch) == {"attention_loss": own.sum()}
    assert matching.losses(found)["attention_loss"].item() == pytest.approx(float(errors.mean()), rel=1e-4)
    total, count = matching.scores(found, batch)["attention_error"]
    assert float(total / count) == pytest.approx(float(errors.sum() / squares.sum()), rel=1e-4)


def test_attention_after_a_norm_is_matched_and_the_norm_is_left_alone(short, tokenizer, tmp_path):
    """Of layers with pre-norm, the teacher's states are those before the norm."""
    source = str(tmp_path / "source")
    save_teacher(source, "Linformer", tokenizer, layer_norm_position="pre")
    student = save_student(tmp_path / "student", source, "linformer", projected_dim=8)
    assert student.config.layer_norm_position == "pre"
    matching = teach(student, source, tokenizer, attention_matching_steps=1).at_step(0)
    assert matching.losses(matching.forward(student, short))["attention_loss"].item() < 1e-11
    with torch.no_grad():
        student.base_model.encoder.layer[0].attention.self.value.weight.mul_(-1)
    matching.losses(matching.forward(student, short))["attention_loss"].backward()
    reached = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    assert reached and not any("LayerNorm" in name for name in reached)


def test_vocabularies_that_are_filled_up():
    logits = torch.randn(5, 16)
    wide = torch.cat([logits, torch.randn(5, 4)], dim=1)
    assert float(divergence(logits, wide, 2.0, 12)) == pytest.approx(0, abs=1e-6)
    assert float(divergence(logits, wide.flip(1), 2.0, 12)) > 0.1


def test_the_divergence_of_rounded_logits_is_not_rounded():
    own, their = torch.randn(2, 50, 300).bfloat16()
    found, expected = (divergence(*logits, 2.0, 300) for logits in ((own, their), (own.double(), their.double())))
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(expected), rel=1e-5)


FAMILIES = [
    ("nystromformer", {"num_landmarks": 4, "conv_kernel_size": 3}),
    ("linformer", {"projected_dim": 4, "share_projection": "layerwise"}),
    ("linear_transformer", {}),
]


@pytest.mark.parametrize(("family", "fields"), FAMILIES, ids=[family for family, _ in FAMILIES])
@pytest.mark.parametrize("trained", ["added", "all"])
def test_gradients_flow_only_where_they_should(family, fields, trained, bert, batch, tokenizer, tmp_path):
    save_student(tmp_path, bert, family, max_position_embeddings=64, **fields)
    # Dropout is off while attention is matched, and on in training.
    dropout = {} if family == "linear_transformer" else {"attention_probs_dropout_prob": 0.5}
    student = AutoModelForPreTraining.from_pretrained(tmp_path, **dropout).train()
    flags = {"attention_matching_steps": 3, "attention_matching_parameters": trained, "alpha_cos": 1.0}
    objective = teach(student, bert, tokenizer, **flags)
    matching, taught = objective.at_step(2), objective.at_step(3)
    assert matching.is_partial and not taught.is_partial

    def reached(objective):
        student.zero_grad(set_to_none=True)
        losses = objective.losses(objective.forward(student, batch))
        torch.stack(
            [losses[name] for name in objective.num_targets(batch) if not losses[name].isnan()]
        ).sum().backward()
        return {name for name, p in student.named_parameters() if p.grad is not None and p.grad.any()}, losses

    names, losses = reached(matching)
    assert torch.equal(reached(matching)[1]["attention_loss"], losses["attention_loss"])
    added = {name for name, _ in student.named_parameters() if is_of_a_family(name)}
    shared = {
        name
        for name, _ in student.named_parameters()
        if any(f".self.{part}." in name for part in ("query", "key", "value"))
    }
    assert added and names - {n for n in shared if n.endswith("key.bias")} == added | (
        {n for n in shared if not n.endswith("key.bias")} if trained == "all" else set()
    )
    everything = {name for name, p in student.named_parameters() if p.requires_grad}
    # A key's bias adds the same to all scores of a softmax; and rows of positions and types that do not occur.
    assert everything - reached(taught)[0] <= {n for n in everything if n.endswith("key.bias")}
    # Dropout is on again in every part.
    assert all(module.training for module in student.modules())
    assert all(p.requires_grad for p in student.parameters())
    assert not any(p.requires_grad or p.grad is not None for p in objective.teacher.model.parameters())


def test_what_is_frozen_stays_frozen(bert, batch, tokenizer, tmp_path):
    """As beside adapters: while attention is matched, and afterwards."""
    student = save_student(tmp_path, bert, num_landmarks=4, conv_kernel_size=3, max_position_embeddings=64)
    kept = {name for name, _ in student.named_parameters() if ".query." in name or is_of_a_family(name)}
    for name, parameter in student.named_parameters():
        parameter.requires_grad_(name in kept)
    flags = {"attention_matching_steps": 1, "attention_matching_parameters": "added"}
    matching = teach(student, bert, tokenizer, **flags).at_step(0)
    matching.losses(matching.forward(student, batch))["attention_loss"].backward()
    reached = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    assert reached == {name for name in kept if is_of_a_family(name)}
    assert {name for name, parameter in student.named_parameters() if parameter.requires_grad} == kept


def test_the_first_steps_have_a_rate_of_their_own_and_the_schedule_begins_after_them():
    args = OptimizationArguments(learning_rate=1e-3, warmup_ratio=1 / 3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=args.learning_rate)
    scheduler = create_scheduler(optimizer, args, 10, Preparation(4, 5e-2, PretrainingObjective()))
    rates = first_rates(optimizer, scheduler, 10)
    assert rates == pytest.approx([5e-2] * 4 + [0, 5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"alpha_ce": 1.0}, "--alpha_ce needs a teacher: also give --teacher_model_name_or_path"),
        ({"attention_matching_steps": 0}, "--attention_matching_steps needs"),
        ({"teacher_model_name_or_path": "x", "temperature": 0.0}, "--temperature must be positive"),
        ({"teacher_model_name_or_path": "x", "alpha_mse": -1.0}, "--alpha_mse must be at least 0"),
        ({"teacher_model_name_or_path": "x", "alpha_mse": math.nan}, "--alpha_mse must be at least 0"),
        ({"teacher_model_name_or_path": "x", "attention_matching_parameters": "some"}, "all or added"),
        ({"teacher_model_name_or_path": "x", "alpha_mse": 0.0, "alpha_ce": 0.0}, "teaches nothing"),
    ],
)
def test_flags(flags, message):
    with pytest.raises(ValueError, match=message):
        TeacherArguments(**flags)


@pytest.mark.parametrize(("trained", "rate"), [("all", 1e-3), ("added", 1e-2), (None, 1e-3)])
def test_added_parameters_have_a_larger_rate(trained, rate):
    args = TeacherArguments(teacher_model_name_or_path="x", attention_matching_parameters=trained)
    assert args.attention_matching_learning_rate == rate


def test_divided_weights_are_refused():
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP)
    with pytest.raises(ValueError, match=r"needs whole layers, but FSDP divides them: .*configs/accelerate/"):
        with_teacher(PretrainingObjective(), None, None, accelerator, TeacherArguments())


def test_teachers_that_cannot_teach(bert, tokenizer, tmp_path):
    other = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, mask_token="[MASK]", pad_token="[PAD]")
    other.add_tokens(["more"])
    with pytest.raises(
        ValueError, match=rf"{len(other) - 1} tokens, and the model's has {len(other)}.*--tokenizer_name"
    ):
        Teacher(bert, other)
    save_teacher(tmp_path / "base", "Bert", tokenizer, "Model")
    with pytest.raises(ValueError, match=r"no trained head that predicts tokens: .*--alpha_ce 0"):
        Teacher(str(tmp_path / "base"), tokenizer)
    assert Teacher(str(tmp_path / "base"), tokenizer, with_logits=False).model
    save_teacher(tmp_path / "causal", "Bert", tokenizer, "ForMaskedLM", is_decoder=True)
    with pytest.raises(ValueError, match=r"--teacher_model_name_or_path .*is a decoder"):
        Teacher(str(tmp_path / "causal"), tokenizer)
    deep = str(tmp_path / "deep")
    save_teacher(deep, "Bert", tokenizer, num_hidden_layers=3)
    student = save_student(tmp_path / "student", bert, **EXACT)
    with pytest.raises(ValueError, match=r"num_hidden_layers=3, and the model 2.* --alpha_mse 0"):
        teach(student, deep, tokenizer)
    assert teach(student, deep, tokenizer, alpha_mse=0.0)
    # Hidden states can be compared whatever the heads; attention cannot.
    heads = str(tmp_path / "heads")
    save_teacher(heads, "Bert", tokenizer, num_attention_heads=8)
    assert teach(student, heads, tokenizer)
    with pytest.raises(ValueError, match=r"num_attention_heads=8, and the model 4.* --attention_matching_steps 0"):
        teach(student, heads, tokenizer, attention_matching_steps=1)
    flags = {"attention_matching_steps": 1, "attention_matching_parameters": "added"}
    with pytest.raises(ValueError, match="has no parameters that its source does not have"):
        teach(student, bert, tokenizer, **flags)
