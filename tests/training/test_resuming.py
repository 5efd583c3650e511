# SPDX-License-Identifier: Apache-2.0
"""Which settings must be the same when a run is resumed, which may change, and which cause a warning."""

import dataclasses
import json

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from safetensors.torch import load_file

from nystrom_models import NystromformerConfig
from nystrom_models.training import OptimizationArguments, identity
from nystrom_models.training.causal import CausalArguments
from nystrom_models.training.long_range_arena import ArenaArguments
from nystrom_models.training.pretraining import PretrainingArguments
from nystrom_models.training.question_answering import QuestionAnsweringArguments
from nystrom_models.training.text_classification import TextClassificationArguments
from nystrom_models.training.token_classification import TokenClassificationArguments
from tests.training.models import tiny_model
from tests.training.test_checkpoints import short_run

BASE = {"output_dir": "x", "model_name_or_path": "x"}


def settings(*, model=None, pretraining=None, optimization=None, **content):
    arguments = PretrainingArguments(**(BASE | (pretraining or {})))
    config = NystromformerConfig(hidden_size=32, num_attention_heads=2, **(model or {}))
    return identity.run_settings(
        arguments,
        OptimizationArguments(**(optimization or {})),
        **{"the training data": "abc", "the model's configuration": config.to_dict(), **content},
    )


def digest(columns):
    return identity.data_digest(Dataset.from_dict(columns))


def test_the_digest_of_data_is_that_of_all_values_in_their_places(monkeypatch):
    columns = {"ids": [[1, 2], [3], []], "text": ["a", "b", None], "number": [0.5, 1.0, 2.0], "label": [0, 1, 1]}
    changes = [
        {"ids": [[1], [2, 3], []]},
        {"ids": [[1, 2], [4], []]},
        {"ids": [[1, 2], [], [3]]},
        {"text": ["a", "c", None]},
        {"text": ["a", None, "b"]},
        {"number": [0.5, 1.0, 2.5]},
        {"label": [1, 0, 1]},
        {"more": [0, 1, 1]},
    ]
    others = [columns | change for change in changes]
    others += [{"other" if name == "label" else name: values for name, values in columns.items()}]
    others += [{name: values[rows] for name, values in columns.items()} for rows in (slice(2), slice(None, None, -1))]
    assert len({digest(each) for each in (columns, *others)}) == 1 + len(others)
    # However it is stored.
    turned = Dataset.from_dict({name: values[::-1] for name, values in columns.items()})
    parts = Dataset.from_dict(columns)
    parts = concatenate_datasets([parts.select([0]), parts.select([1, 2])])
    assert digest(columns) == identity.data_digest(turned.select([2, 1, 0])) == identity.data_digest(parts)
    # Of several blocks.
    monkeypatch.setattr(identity, "_ROWS_OF_A_BLOCK", 3)
    many = [[number + (number == changed) for number in range(10)] for changed in range(11)]
    assert len({digest({"label": labels}) for labels in many}) == 11


def test_every_flag_has_a_rule():
    """A flag that is in no list must match."""
    rules = identity.HOUSEKEEPING | identity.SHOWN_BY_CONTENT | identity.MAY_CHANGE | identity.WARNED
    flags = {
        field.name
        for part in (
            *(PretrainingArguments, CausalArguments, ArenaArguments, OptimizationArguments),
            *(TextClassificationArguments, TokenClassificationArguments, QuestionAnsweringArguments),
        )
        for field in dataclasses.fields(part)
    }
    assert flags - rules == {
        *(
            "seed",
            "streaming",
            "shuffle_buffer_size",
            "max_length",
            "max_seq_length",
            "block_size",
            "sentence_order",
            "mlm_probability",
        ),
        *("whole_word_mask", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "tokens_per_step"),
        *(
            "group_by_length",
            "optim",
            "lora_r",
            "lora_alpha",
            "temperature",
            "alpha_ce",
            "alpha_mlm",
            "alpha_mse",
            "alpha_cos",
        ),
        *("attention_matching_steps", "attention_matching_parameters", "attention_matching_learning_rate"),
        *("pretrain_on_task", "pretrain_steps", "pretrain_learning_rate", "pretrain_mlm_probability"),
    }
    assert not identity.MAY_CHANGE & identity.WARNED and not identity.PLACES & identity.MAY_CHANGE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pretraining": {"seed": 1}}, "--seed was 0 and is 1"),
        ({"pretraining": {"mlm_probability": 0.3}}, "--mlm_probability was 0.15 and is 0.3"),
        ({"optimization": {"weight_decay": 0.0}}, "--weight_decay was 0.01 and is 0.0"),
        ({"model": {"hidden_dropout_prob": 0.0}}, "configuration: hidden_dropout_prob was 0.1 and is 0.0"),
        ({"the training data": "abd"}, "the training data was abc and is abd"),
    ],
    ids=["seed", "masking", "decay", "configuration", "data"],
)
def test_what_makes_another_run_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        identity.compare(settings(), settings(**change), "checkpoint-4")


@pytest.mark.parametrize(
    "change",
    [
        {"optimization": {"max_train_steps": 99}},
        {"optimization": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}},
        {"pretraining": {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 3, "output_dir": "y"}},
        {"pretraining": {"train_file": ["moved.txt"], "dataloader_num_workers": 3, "torch_compile": True}},
    ],
    ids=["longer", "divided", "evaluation", "moved"],
)
def test_what_may_change(change, recwarn):
    identity.compare(settings(), settings(**change), "checkpoint-4")
    assert not recwarn


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimization": {"learning_rate": 1e-5}}, "--learning_rate was 0.0001 and is 1e-05"),
        ({"pretraining": {"mixed_precision": "bf16"}}, "--mixed_precision was None and is bf16"),
    ],
)
def test_what_is_worth_a_warning(change, message):
    with pytest.warns(UserWarning, match=message):
        identity.compare(settings(), settings(**change), "checkpoint-4")


def test_other_versions_are_worth_a_warning():
    old = settings()
    old["versions"] = {**old["versions"], "torch": "2.11.0"}
    with pytest.warns(UserWarning, match=r"versions: torch was 2\.11\.0 and is"):
        identity.compare(old, settings(), "checkpoint-4")


def losses(state):
    return [row["mlm_loss"] for row in state.history]


def test_a_longer_run_follows_the_longer_schedule(tokenizer, examples, tmp_path, capsys):
    short_run(tokenizer, examples, tmp_path / "first", steps=4)
    state = short_run(tokenizer, examples, tmp_path / "first", steps=12, resume_from_checkpoint="latest")
    assert state.step == 12
    # After one step of warm-up, 8 of 11 steps of decay are left.
    assert "The learning rate was 0 and is now 0.000727273" in capsys.readouterr().out
    # The same as if it had been set from the start.
    whole = short_run(tokenizer, examples, tmp_path / "whole", steps=12)
    assert state.history[-1]["learning_rate"] == whole.history[-1]["learning_rate"] == 0.0


def test_a_lower_learning_rate_is_taken(tokenizer, examples, tmp_path):
    """Following the advice of the error of a run that diverged."""
    short_run(tokenizer, examples, tmp_path, steps=6)
    checkpoint = str(tmp_path / "checkpoint-2")
    with pytest.warns(UserWarning, match=r"--learning_rate was 0\.001 and is 1e-30"):
        short_run(tokenizer, examples, tmp_path, steps=6, learning_rate=1e-30, resume_from_checkpoint=checkpoint)
    before, after = (load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors") for step in (2, 6))
    for name, weight in before.items():
        torch.testing.assert_close(after[name], weight, rtol=1e-6, atol=1e-9)


def test_a_step_may_be_divided_otherwise(tokenizer, examples, tmp_path):
    model = tiny_model("linformer", tokenizer).double()
    whole = short_run(tokenizer, examples, tmp_path / "whole", steps=8, model=model)
    folder = tmp_path / "divided"
    short_run(tokenizer, examples, folder, steps=8, model=tiny_model("linformer", tokenizer).double())
    state = short_run(
        tokenizer,
        examples,
        folder,
        steps=8,
        micro_batch=2,
        model=tiny_model("linformer", tokenizer).double(),
        resume_from_checkpoint=str(folder / "checkpoint-4"),
    )
    assert losses(state) == pytest.approx(losses(whole), rel=1e-9)
    weights = load_file(folder / "checkpoint-8" / "model.safetensors")
    for name, weight in load_file(tmp_path / "whole" / "checkpoint-8" / "model.safetensors").items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-9, atol=1e-9)


def test_another_batch_is_refused(tokenizer, examples, tmp_path):
    short_run(tokenizer, examples, tmp_path)
    progress = json.loads((tmp_path / "checkpoint-6" / "progress.json").read_text())
    assert progress["position"] == {"rows": 48} and progress["settings"]["an optimizer step"] == "8 rows"
    with pytest.raises(ValueError, match="an optimizer step was 8 rows and is 16 rows"):
        identity.compare(progress["settings"], {**progress["settings"], "an optimizer step": "16 rows"}, "x")


def test_a_checkpoint_from_before_a_flag(recwarn):
    before = settings()
    del before["optim"]
    identity.compare(before, settings(), "checkpoint-4")
    with pytest.raises(ValueError, match="--optim was adamw and is muon"):
        identity.compare(before, settings(optimization={"optim": "muon"}), "checkpoint-4")
    assert not recwarn
