# SPDX-License-Identifier: Apache-2.0
import copy
import json
import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForPreTraining,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
)

from nystrom_models.data import PretrainingCollator, RowLoader, classification_dataset, eval_dataloader
from nystrom_models.models import input_checks
from nystrom_models.training import (
    ClassificationObjective,
    Evaluation,
    OptimizationArguments,
    PretrainingObjective,
    create_accelerator,
    create_optimizer,
    create_scheduler,
    evaluate,
    loop,
    save_pretrained,
    train,
)
from nystrom_models.training.optimization import OPTIMIZERS, SCHEDULES
from nystrom_models.training.saving import load_weights
from tests.training import processes, two_processes
from tests.training.models import FAMILIES, tiny_model

# For float64 models; where a gradient is nearly zero, Adam amplifies differences.
TOLERANCE = 1e-9


def pretrain(model, examples, tokenizer, micro_batch=8, accumulation=1, steps=4, learning_rate=1e-3, **options):
    args = OptimizationArguments(
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        learning_rate=learning_rate,
        max_train_steps=steps,
    )
    loader = RowLoader(examples, PretrainingCollator(tokenizer), micro_batch, accumulation)
    options = {"objective": PretrainingObjective(), "logging_steps": 1} | options
    return train(create_accelerator(), model, loader=loader, args=args, **options)


def assert_equal_histories(history, other_history):
    """Checks that two runs took the same steps."""
    for a, b in zip(history, other_history, strict=True):
        assert a == pytest.approx(b | {"tokens_per_second": a["tokens_per_second"]}, rel=TOLERANCE, nan_ok=True)


def assert_equal_weights(weights, other_weights):
    assert weights.keys() == other_weights.keys()
    for name in weights:
        torch.testing.assert_close(other_weights[name], weights[name], rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_pretraining_learns(family, examples, tokenizer):
    model = tiny_model(family, tokenizer)
    state = pretrain(model, examples, tokenizer, micro_batch=16, steps=200, learning_rate=1e-2)
    first, last = state.history[0], state.history[-1]
    assert last["mlm_loss"] < 0.5 * first["mlm_loss"]
    loader = eval_dataloader(examples, PretrainingCollator(tokenizer, seed=1), 32)
    scores = evaluate(create_accelerator(), model, PretrainingObjective(), loader)
    assert scores["mlm_accuracy"] > 0.7 and scores["sop_accuracy"] > 0.8
    assert state.tokens_per_second > 0 and state.num_tokens > 200 * 16 * 15


def test_freed_memory_is_returned_on_cpus(examples, tokenizer, monkeypatch):
    returned = []
    monkeypatch.setattr(loop, "_STEPS_BETWEEN_RETURNS", 2)
    monkeypatch.setattr(loop, "return_free_memory", lambda: returned.append(True))
    pretrain(tiny_model(FAMILIES[0], tokenizer), examples, tokenizer, steps=5)
    assert len(returned) == (0 if torch.accelerator.is_available() else 2)


def test_sparse_logits_give_the_same_losses_and_scores(examples, tokenizer):
    models = [tiny_model("nystromformer", tokenizer, sparse_prediction=sparse) for sparse in (False, True)]
    histories = [pretrain(model, examples, tokenizer).history for model in models]
    for full, sparse in zip(*histories, strict=True):
        assert full == pytest.approx(sparse | {"tokens_per_second": full["tokens_per_second"]}, rel=1e-4, nan_ok=True)


class _Reads(TorchDispatchMode):
    """Collects the operations for which the host would wait for a GPU."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        by_mask = (
            "index" in name
            and isinstance(args[1], list | tuple)
            and any(place is not None and place.dtype == torch.bool for place in args[1])
        )
        if by_mask or name in ("nonzero", "_local_scalar_dense"):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


def test_the_host_seldom_waits_for_a_gpu(examples, tokenizer, monkeypatch):
    """A step reads the number of masked tokens, and, without a dispatched operation, loss and norm together."""
    monkeypatch.setattr(input_checks, "can_read_values", lambda tensor: False)  # a GPU asserts without waiting
    model = tiny_model("nystromformer", tokenizer, sparse_prediction=True, unpad_inputs=False)
    reads, take_step = _Reads(), loop.TrainingLoop.take_step

    def observed(*arguments):
        with reads:
            take_step(*arguments)

    monkeypatch.setattr(loop.TrainingLoop, "take_step", observed)
    pretrain(model, examples, tokenizer, steps=3)
    assert reads.found == ["nonzero"] * 3


def test_classification_learns(texts, tokenizer):
    rows = Dataset.from_dict({"text": texts, "label": [i % 4 for i in range(len(texts))]})
    encoded = classification_dataset(rows, tokenizer, 40)
    pad = DataCollatorWithPadding(tokenizer)

    def collate(batch):
        return pad([{name: row[name] for name in ("input_ids", "attention_mask", "labels")} for row in batch])

    model = tiny_model("nystromformer", tokenizer, "classification", num_labels=4)
    args = OptimizationArguments(learning_rate=3e-3, max_train_steps=240)
    accelerator = create_accelerator()
    train(accelerator, model, ClassificationObjective(), RowLoader(encoded, collate, 16), args)
    scores = evaluate(accelerator, model, ClassificationObjective(), eval_dataloader(encoded, collate, 64))
    assert scores["accuracy"] > 0.95


@pytest.mark.parametrize("family", FAMILIES)
def test_micro_batches_equal_one_batch(family, examples, tokenizer):
    """The parts differ in their numbers of masked tokens and of pairs, and steps continue in a second epoch."""
    few = examples.select(range(48))
    (whole, weights), (divided, divided_weights) = (
        (pretrain(model, few, tokenizer, micro_batch, accumulation, steps=5).history, model.state_dict())
        for micro_batch, accumulation in ((16, 1), (4, 4))
        for model in [tiny_model(family, tokenizer).double()]
    )
    assert_equal_histories(whole, divided)
    assert_equal_weights(weights, divided_weights)


def test_the_gradient_is_that_of_the_mean_losses(examples, tokenizer):
    """As autograd alone gives it, neither larger nor smaller."""
    model = tiny_model("linformer", tokenizer).double()
    alone = copy.deepcopy(model).train()
    [row] = pretrain(model, examples, tokenizer, micro_batch=4, accumulation=2, steps=1).history
    [batch] = next(RowLoader(examples, PretrainingCollator(tokenizer), 8).steps()).batches
    outputs = alone(**batch)
    (outputs.mlm_loss + outputs.sop_loss).backward()
    norms = [parameter.grad.norm() for parameter in alone.parameters() if parameter.grad is not None]
    expected = {"mlm_loss": outputs.mlm_loss, "sop_loss": outputs.sop_loss, "grad_norm": torch.stack(norms).norm()}
    for name, value in expected.items():
        assert row[name] == pytest.approx(float(value.detach()), rel=1e-6), name


def test_a_batch_that_does_not_count_leaves_no_trace(examples, tokenizer):
    """A process that has no rows left computes one: no part of the gradient, of the log or of the tokens."""
    collator = PretrainingCollator(tokenizer)

    class WithOneMore(RowLoader):
        def steps(self, *arguments):
            more = collator([examples[100], examples[101]])
            for step in super().steps(*arguments):
                yield replace(step, batches=[more, *step.batches, more], num_rows=[0, *step.num_rows, 0])

    def run(kind):
        model, args = tiny_model("linformer", tokenizer).double(), OptimizationArguments(8, max_train_steps=3)
        loader = kind(examples, collator, 8)
        state = train(create_accelerator(), model, PretrainingObjective(), loader, args, logging_steps=1)
        return state.history, model.state_dict()

    (plain, weights), (more, weights_of_more) = run(RowLoader), run(WithOneMore)
    assert_equal_histories(plain, more)
    assert_equal_weights(weights, weights_of_more)


def test_a_loss_that_is_not_finite_stops_before_the_weights(examples, tokenizer):
    class Breaks(PretrainingObjective):
        calls = 0

        def losses(self, outputs):
            self.calls += 1
            losses = super().losses(outputs)
            return {name: loss * (float("nan") if self.calls == 5 else 1.0) for name, loss in losses.items()}

    model = tiny_model("nystromformer", tokenizer)
    # Two micro-batches per step: the fifth call is in step 3.
    with pytest.raises(
        FloatingPointError,
        match=r"loss of step 3 is not finite \(epoch 1, 8 rows from number 17 .*after step 2.*--learning_rate",
    ):
        pretrain(model, examples, tokenizer, 4, 2, steps=10, objective=Breaks())
    assert all(torch.isfinite(weight).all() for weight in model.parameters())


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_a_step_that_is_skipped_leaves_no_trace(precision, examples, tokenizer):
    """Neither in the means of the log nor, in float16, in the scaler of the loss."""

    class Breaks(PretrainingObjective):
        calls = 0

        def losses(self, outputs):
            self.calls += 1
            return {
                name: loss * (math.nan if self.calls == 3 else 1) for name, loss in super().losses(outputs).items()
            }

    accelerator = create_accelerator()
    if precision == "fp16":  # as Accelerate sets it up on a GPU
        accelerator.scaler, accelerator.native_amp = torch.amp.GradScaler("cpu", init_scale=8.0), True
        accelerator.state._mixed_precision = "fp16"
    args = OptimizationArguments(8, max_train_steps=6, max_skipped_steps=1)
    loader = RowLoader(examples, PretrainingCollator(tokenizer), 8)
    try:
        state = train(accelerator, tiny_model("linformer", tokenizer), Breaks(), loader, args, logging_steps=6)
    finally:
        accelerator.state._mixed_precision = "no"
    assert state.skipped_steps == 1 and state.step == 6
    [logged] = state.history
    assert all(math.isfinite(value) for value in logged.values())


# 9 / (9 / 7) is a little less than 7 in floating-point numbers: a seventh epoch ends with step 9.
@pytest.mark.parametrize(("num_rows", "batch"), [(32, 32), (33, 32), (48, 32), (100, 32), (9, 7)])
def test_an_epoch_that_ends_within_a_step_is_evaluated_after_it(num_rows, batch, examples, tokenizer):
    rows = examples.select([i % len(examples) for i in range(num_rows)])
    state = train(
        create_accelerator(),
        tiny_model("linformer", tokenizer),
        PretrainingObjective(),
        RowLoader(rows, PretrainingCollator(tokenizer), batch),
        OptimizationArguments(batch, num_train_epochs=12),
        evaluation=Evaluation(lambda model: {"accuracy": 0.0}, "epoch"),
    )
    evaluated = [row["step"] for row in state.history if "eval_accuracy" in row]
    # The caller evaluates after the last step.
    ends = {math.ceil(epoch * num_rows / batch) for epoch in range(1, 13)}
    assert evaluated == sorted(ends - {state.step}) and state.step == max(ends)


def test_a_loaded_model_is_trained_with_dropout_and_scored_without(examples, tokenizer):
    """`from_pretrained` returns models in evaluation mode."""
    modes = []

    class Recording(PretrainingObjective):
        def forward(self, model, batch):
            modes.append(model.training)
            return super().forward(model, batch)

    model = tiny_model("linformer", tokenizer, hidden_dropout_prob=0.5).eval()
    pretrain(model, examples, tokenizer, steps=3, objective=Recording())
    assert modes == [True] * 3 and model.training
    loader = eval_dataloader(examples.select(range(8)), PretrainingCollator(tokenizer), 8)
    scores = [evaluate(create_accelerator(), model, PretrainingObjective(), loader) for _ in range(2)]
    assert scores[0] == scores[1] and model.training


def test_evaluations_do_not_count_as_time_of_training(examples, tokenizer, monkeypatch):
    clock = [0.0]

    def evaluation(model):
        clock[0] += 1000.0
        return {"accuracy": 0.0}

    class Ticking(PretrainingObjective):
        def losses(self, outputs):
            clock[0] += 1.0
            return super().losses(outputs)

    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    options = {"objective": Ticking(), "logging_steps": 2, "evaluation": Evaluation(evaluation, 2)}
    state = pretrain(tiny_model("linformer", tokenizer), examples, tokenizer, steps=6, **options)
    assert state.seconds == 6.0
    rates = [row["tokens_per_second"] for row in state.history if "tokens_per_second" in row]
    tokens = [row["num_input_tokens_seen"] for row in state.history if "tokens_per_second" in row]
    assert rates == [(after - before) / 2 for before, after in pairwise([0, *tokens])]


def test_losses_have_their_weights_in_the_gradient_and_not_in_the_log(examples, tokenizer):
    class Weighted(PretrainingObjective):
        weights = {"mlm_loss": 0.25, "sop_loss": 0.25}

    class Alone(PretrainingObjective):
        weights = {"mlm_loss": 0.0}

    def first(objective):
        model = tiny_model("linformer", tokenizer).double()
        [row] = pretrain(model, examples, tokenizer, steps=1, objective=objective).history
        return row

    plain, weighted, alone = first(PretrainingObjective()), first(Weighted()), first(Alone())
    assert weighted["grad_norm"] == pytest.approx(plain["grad_norm"] / 4)
    assert 0 < alone["grad_norm"] < plain["grad_norm"]
    for name in ("mlm_loss", "sop_loss", "mlm_accuracy"):
        assert plain[name] == pytest.approx(weighted[name]) == pytest.approx(alone[name])


def test_gradients_are_clipped_to_the_norm(examples, tokenizer):
    """The logged norm is that before clipping."""
    runs = []
    for largest in (1e-3, 1e-2, 1e9):
        model = tiny_model("linformer", tokenizer).double()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        args = OptimizationArguments(
            8, learning_rate=1.0, weight_decay=0.0, adam_epsilon=1e6, max_grad_norm=largest, max_train_steps=1
        )
        loader = RowLoader(examples, PretrainingCollator(tokenizer), 8)
        state = train(create_accelerator(), model, PretrainingObjective(), loader, args, logging_steps=1)
        # With such an epsilon, AdamW's step is the gradient divided by it.
        step = [(old - new.detach()).norm() for old, new in zip(before, model.parameters(), strict=True)]
        runs.append((state.history[0]["grad_norm"], 1e6 * float(torch.stack(step).norm())))
    norm = runs[0][0]
    assert norm > 1e-2 and [found for found, _ in runs] == pytest.approx([norm] * 3)
    assert [size for _, size in runs] == pytest.approx([1e-3, 1e-2, norm], rel=1e-3)


def test_evaluation_counts_every_row_once(examples, tokenizer):
    rows = examples.select(range(23))
    model = tiny_model("nystromformer", tokenizer)
    collator = PretrainingCollator(tokenizer)
    loader = eval_dataloader(rows, collator, 7)
    scores = evaluate(create_accelerator(), model.train(), PretrainingObjective(), loader)
    assert model.training
    assert evaluate(create_accelerator(), model.eval(), PretrainingObjective(), loader) == scores
    assert not model.training
    correct = number = loss = sop_correct = sop_number = 0
    for row in rows:
        batch = collator([row])
        with torch.no_grad():
            outputs = model(**batch)
        for logits, label in zip(outputs.prediction_logits[0], batch["labels"][0], strict=True):
            if label != -100:
                number += 1
                correct += int(logits.argmax() == label)
                loss += float(F.cross_entropy(logits, label))
        if batch["sentence_order_label"] != -100:
            sop_number += 1
            sop_correct += int(outputs.sop_logits.argmax() == batch["sentence_order_label"])
    assert scores["mlm_accuracy"] == pytest.approx(correct / number)
    assert scores["mlm_loss"] == pytest.approx(loss / number, rel=1e-5)
    assert scores["sop_accuracy"] == pytest.approx(sop_correct / sop_number)


def test_two_processes_follow_one(texts, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    one = two_processes.run(tmp_path)
    codes, log = processes.run(two_processes.main, str(tmp_path), folder=tmp_path, num_processes=2)
    assert codes == [0, 0], log[-3000:]
    for rank in (0, 1):
        two = json.loads((tmp_path / f"result{rank}.json").read_text())
        assert two.keys() == one.keys()
        for name, result in two.items():
            assert len(result["history"]) == two_processes.STEPS
            assert_equal_histories(one[name]["history"], result["history"])
            assert result["scores"] == pytest.approx(one[name]["scores"], rel=1e-6)
            assert result.get("num_tokens") == one[name].get("num_tokens")
    for family in FAMILIES:
        assert_equal_weights(*(load_file(tmp_path / f"{family}{n}" / "model.safetensors") for n in (1, 2)))


def test_seeded_runs_are_equal(examples, tokenizer):
    runs = [pretrain(tiny_model("linformer", tokenizer), examples, tokenizer) for _ in range(2)]
    losses = [[row["mlm_loss"] for row in run.history] for run in runs]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(("seed", "expected"), [(5, 8), (2**32 - 1, 3)])
def test_each_process_draws_its_own_dropout(seed, expected, examples, tokenizer, monkeypatch):
    """Also from the largest seed."""
    monkeypatch.setattr("accelerate.utils.random.AcceleratorState", lambda: SimpleNamespace(process_index=3))
    pretrain(tiny_model("linformer", tokenizer), examples, tokenizer, steps=1, seed=seed)
    assert torch.initial_seed() == expected


def test_saved_model_and_tokenizer_are_loaded(examples, tokenizer, tmp_path):
    accelerator = create_accelerator()
    model = tiny_model("linformer", tokenizer)
    save_pretrained(accelerator, accelerator.prepare(model), tokenizer, tmp_path)
    # Whoever may read the folder may read the weights.
    assert len({path.stat().st_mode for path in tmp_path.iterdir() if path.suffix in (".json", ".safetensors")}) == 1
    loaded = AutoModelForPreTraining.from_pretrained(tmp_path)
    batch = PretrainingCollator(AutoTokenizer.from_pretrained(tmp_path))([examples[0]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(**batch).loss, model.eval()(**batch).loss)


def test_a_bert_with_old_names_of_weights_is_saved_with_its_own(tokenizer, tmp_path):
    """As google-bert's checkpoints have them, which Transformers would otherwise write again."""
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    BertForSequenceClassification(config).save_pretrained(tmp_path / "old")
    file = tmp_path / "old" / "model.safetensors"
    old = {
        name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): w
        for name, w in load_file(file).items()
    }
    save_file(old, file, {"format": "pt"})
    model, report = BertForSequenceClassification.from_pretrained(tmp_path / "old", output_loading_info=True)
    assert not report["missing_keys"]
    save_pretrained(create_accelerator(), model, tokenizer, tmp_path / "new")
    with torch.no_grad():
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        model.bert.embeddings.LayerNorm.weight.zero_()
    load_weights(model, tmp_path / "new")
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def learning_rates(optimizer, scheduler, steps):
    """Of all groups of parameters, in every step."""
    rates = []
    for _ in range(steps):
        rates.append(scheduler.get_last_lr())
        optimizer.step()
        scheduler.step()
    return rates


def first_rates(optimizer, scheduler, steps):
    return [rates[0] for rates in learning_rates(optimizer, scheduler, steps)]


def test_optimizer_and_schedule(tokenizer):
    args = OptimizationArguments(learning_rate=1.0, weight_decay=0.1, warmup_ratio=0.2)
    model = tiny_model("nystromformer", tokenizer)
    optimizer = create_optimizer(model, args)
    decayed, others = optimizer.param_groups
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    undecayed = {name for name, p in model.named_parameters() if any(p is other for other in others["params"])}
    assert {name for name, _ in model.named_parameters() if "bias" in name or "LayerNorm" in name} == undecayed
    options = OptimizationArguments(adam_beta1=0.8, adam_beta2=0.98, adam_epsilon=1e-7)
    for group in create_optimizer(model, options).param_groups:
        assert (group["betas"], group["eps"]) == ((0.8, 0.98), 1e-7)
    scheduler = create_scheduler(optimizer, args, num_training_steps=10)
    rates = first_rates(optimizer, scheduler, 10)
    assert rates == pytest.approx([0, 0.5, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125])


@pytest.mark.parametrize("optim", OPTIMIZERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_with_every_optimizer(schedule, optim, tokenizer):
    options = '{"min_lr": 0.01}' if "min_lr" in schedule else None
    args = OptimizationArguments(
        optim=optim, learning_rate=1.0, lr_scheduler_type=schedule, lr_scheduler_kwargs=options, num_warmup_steps=2
    )
    optimizer = create_optimizer(tiny_model("nystromformer", tokenizer), args)
    scheduler = create_scheduler(optimizer, args, num_training_steps=20)
    rates = learning_rates(optimizer, scheduler, 20)
    assert all(len(set(groups)) == 1 for groups in rates)
    first, second, third, *_, last = (groups[0] for groups in rates)
    assert third == pytest.approx(1, abs=0.01)
    assert (last == third) == schedule.startswith("constant")
    if schedule == "constant":
        assert first == second == 1
    elif schedule == "cosine_warmup_with_min_lr":  # Transformers' own warm-up begins one step later
        assert (first, second) == pytest.approx((0.5, 1))
    else:
        assert (first, second) == pytest.approx((0, 0.5))


def test_warm_up_by_steps(tokenizer):
    args = OptimizationArguments(learning_rate=1.0, num_warmup_steps=4, warmup_ratio=0.9)
    optimizer = create_optimizer(tiny_model("linformer", tokenizer), args)
    scheduler = create_scheduler(optimizer, args, num_training_steps=8)
    rates = first_rates(optimizer, scheduler, 8)
    assert rates == pytest.approx([0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25])


def test_a_stable_rate_decays_over_the_last_tenth(tokenizer):
    args = OptimizationArguments(learning_rate=1.0, lr_scheduler_type="warmup_stable_decay", num_warmup_steps=2)
    optimizer = create_optimizer(tiny_model("linformer", tokenizer), args)
    scheduler = create_scheduler(optimizer, args, num_training_steps=40)
    rates = first_rates(optimizer, scheduler, 40)
    assert rates[:3] == pytest.approx([0, 0.5, 1]) and rates[2:37] == [1.0] * 35
    assert all(before > after for before, after in pairwise(rates[36:])) and 0 < rates[-1] < 0.2


def schedule(steps, **options):
    args = OptimizationArguments(learning_rate=1.0, num_warmup_steps=2, **options)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    return first_rates(optimizer, create_scheduler(optimizer, args, steps), steps)


def test_the_decay_fits_into_the_run():
    options = {"lr_scheduler_type": "warmup_stable_decay"}
    with pytest.raises(ValueError, match="num_decay_steps 19, but after the warm-up 18 steps are left: give 18 or"):
        schedule(20, lr_scheduler_kwargs='{"num_decay_steps": 19}', **options)
    rates = schedule(20, lr_scheduler_kwargs='{"num_decay_steps": 18}', **options)
    assert rates[2] == 1.0 and all(before > after for before, after in pairwise(rates[2:]))
    # The decay takes all steps after the stable ones.
    with pytest.warns(UserWarning, match="num_stable_steps will be used"):
        rates = schedule(20, lr_scheduler_kwargs='{"num_stable_steps": 8}', **options)
    assert rates[2:11] == [1.0] * 9 and all(before > after > 0 for before, after in pairwise(rates[10:]))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("constant", '{"num_cycles": 2}'),
        ("constant_with_warmup", '{"num_decay_steps": 5}'),
        ("polynomial", '{"power": "2"}'),
        ("cosine_with_min_lr", '{"min_lr_rate": "0.1"}'),
        ("warmup_stable_decay", '{"num_stable_steps": "5"}'),
        ("linear", '{"last_epoch": 5}'),
    ],
)
def test_arguments_that_a_schedule_does_not_take_are_refused_at_once(kind, options):
    with pytest.raises(ValueError, match=f"--lr_scheduler_type {kind} does not take --lr_scheduler_kwargs"):
        OptimizationArguments(lr_scheduler_type=kind, lr_scheduler_kwargs=options)


def test_an_accelerator_that_accumulates_is_refused(examples, tokenizer):
    loader = RowLoader(examples, PretrainingCollator(tokenizer), 4)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=r"accumulates over 2 micro-batches.*create_accelerator"):
        train(accelerator, tiny_model("linformer", tokenizer), PretrainingObjective(), loader, OptimizationArguments())


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"learning_rate": 0.0}, "--learning_rate"),
        ({"gradient_accumulation_steps": 0}, "--gradient_accumulation_steps"),
        ({"max_train_steps": 0}, "--max_train_steps"),
        ({"warmup_ratio": 2.0}, "--warmup_ratio"),
        ({"num_warmup_steps": -1}, "--num_warmup_steps"),
        ({"num_train_epochs": 0.0}, "--num_train_epochs"),
        ({"num_train_epochs": math.nan}, "--num_train_epochs"),
        ({"num_train_epochs": math.inf}, "--num_train_epochs must be finite"),
        ({"weight_decay": -0.1}, "--weight_decay"),
        ({"weight_decay": math.nan}, "--weight_decay"),
        ({"adam_beta1": 1.0}, "--adam_beta1"),
        ({"adam_beta2": math.nan}, "--adam_beta2"),
        ({"adam_epsilon": -1.0}, "--adam_epsilon"),
        ({"learning_rate": math.nan}, "--learning_rate"),
        ({"max_grad_norm": math.nan}, "--max_grad_norm"),
        ({"group_by_length": True}, "--group_by_length"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_name_the_flag(options, flag):
    with pytest.raises(ValueError, match=flag):
        OptimizationArguments(**options)
