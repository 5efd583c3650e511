# SPDX-License-Identifier: Apache-2.0
"""Values that are not finite are found before the weights change, skipped on request, and never saved."""

import math

import pytest
import torch
from accelerate.utils import DistributedType

from nystrom_models.data import PretrainingCollator, RowLoader
from nystrom_models.training import (
    CheckpointArguments,
    OptimizationArguments,
    PretrainingObjective,
    create_accelerator,
    list_checkpoints,
    save_pretrained,
    train,
)
from tests.training.models import tiny_model


class Breaks(PretrainingObjective):
    """In some steps, the loss is NaN, or finite with a gradient that is NaN, or whose norm alone is infinite."""

    def __init__(self, model, what, steps):
        self.weight, self.what, self.steps, self.step = next(model.parameters()), what, steps, 0

    def losses(self, outputs):
        self.step += 1
        losses = super().losses(outputs)
        if self.step in self.steps and self.what == "loss":
            losses["mlm_loss"] = losses["mlm_loss"] * math.nan
        elif self.step in self.steps:
            zeros = self.weight - self.weight.detach()
            # The root is 0, and its derivative is infinite there.
            added = zeros.pow(2).sum().sqrt() if self.what == "gradient" else (zeros * 1e38).sum()
            losses["mlm_loss"] = losses["mlm_loss"] + added
        return losses


def run(examples, tokenizer, folder, what, steps, resume=None, **options):
    model = tiny_model("nystromformer", tokenizer)
    state = None
    try:
        state = train(
            create_accelerator(),
            model,
            Breaks(model, what, steps),
            RowLoader(examples, PretrainingCollator(tokenizer), 4),
            OptimizationArguments(4, learning_rate=1e-3, max_train_steps=8, **options),
            logging_steps=1,
            checkpoints=CheckpointArguments(str(folder), 1, resume_from_checkpoint=resume),
        )
    finally:
        assert all(torch.isfinite(weight).all() for weight in model.parameters())
    return state


@pytest.mark.parametrize("what", ["loss", "gradient", "norm"])
def test_a_step_that_is_not_finite_ends_the_run_before_the_weights_change(what, examples, tokenizer, tmp_path):
    named = "loss" if what == "loss" else "gradient"
    with pytest.raises(
        FloatingPointError, match=rf"The {named} .*step 3 is not finite.*after step 2.*--max_skipped_steps"
    ):
        run(examples, tokenizer, tmp_path, what, {3})
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2"]


@pytest.mark.parametrize("what", ["loss", "gradient", "norm"])
def test_some_steps_may_be_left_out(what, examples, tokenizer, tmp_path):
    state = run(examples, tokenizer, tmp_path, what, {3, 5}, max_skipped_steps=2)
    assert state.step == 8 and state.skipped_steps == 2 and state.figures()["skipped_steps"] == 2
    norms = [row.get("grad_norm") for row in state.history]
    assert [norm is None for norm in norms] == [step in (3, 5) for step in range(1, 9)]
    assert all(norm > 0 for norm in norms if norm is not None)
    # The schedule goes on: after one step of warm-up, it falls to 0 in the other seven.
    rates = [row["learning_rate"] for row in state.history]
    assert rates == pytest.approx([1e-3 * (8 - step) / 7 for step in range(1, 9)])
    with pytest.raises(FloatingPointError, match="--max_skipped_steps is now 1"):
        run(examples, tokenizer, tmp_path / "again", what, {3, 5}, max_skipped_steps=1)


def test_a_resumed_run_counts_the_steps_that_were_left_out_before(examples, tokenizer, tmp_path):
    run(examples, tokenizer, tmp_path, "loss", {3}, max_skipped_steps=1)
    checkpoint = str(tmp_path / "checkpoint-4")
    state = run(examples, tokenizer, tmp_path, "loss", set(), checkpoint, max_skipped_steps=1)
    assert state.step == 8 and state.skipped_steps == 1
    with pytest.raises(FloatingPointError, match="--max_skipped_steps is now 1"):
        run(examples, tokenizer, tmp_path, "loss", {1}, checkpoint, max_skipped_steps=1)


def test_weights_that_are_not_finite_are_not_saved(tokenizer, tmp_path):
    model = tiny_model("linformer", tokenizer)
    with torch.no_grad():
        next(model.parameters())[3, 5] = math.inf
    with pytest.raises(FloatingPointError, match=r"word_embeddings\.weight are not finite"):
        save_pretrained(create_accelerator(), model, tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_compiled_model_is_saved_under_its_own_names(tokenizer, tmp_path):
    model = tiny_model("linformer", tokenizer)
    save_pretrained(create_accelerator(), torch.compile(model, backend="eager"), tokenizer, tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for (name, weight), other in zip(model.named_parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(other, weight, msg=name)


def test_weights_under_other_names_are_not_saved(tokenizer, tmp_path, monkeypatch):
    model, accelerator = tiny_model("linformer", tokenizer), create_accelerator()
    monkeypatch.setattr(type(accelerator), "distributed_type", DistributedType.FSDP)
    wrong = {f"_orig_mod.{name}": weight for name, weight in model.state_dict().items()}
    monkeypatch.setattr(accelerator, "get_state_dict", lambda model: wrong)
    with pytest.raises(RuntimeError, match="other names than those of a LinformerForPreTraining: _orig_mod"):
        save_pretrained(accelerator, model, tokenizer, tmp_path)
    assert not list(tmp_path.iterdir())
