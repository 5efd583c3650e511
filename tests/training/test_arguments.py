# SPDX-License-Identifier: Apache-2.0
"""What `--help` of the scripts prints, and what they take from recipes and the command line."""

from dataclasses import dataclass, field, make_dataclass

import pytest

from nystrom_models import NystromformerConfig
from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.finetuning import FinetuningOptimizationArguments
from nystrom_models.training.language_modeling import override
from nystrom_models.training.token_classification import TokenClassificationArguments


def test_help_keeps_the_command_apart_and_shows_defaults_that_exist(capsys):
    @dataclass
    class Flags:
        """Flags."""

        name: str = field(metadata={"help": "A name."})
        size: int | None = field(default=None, metadata={"help": "The model's by default."})
        steps: int = field(default=3, metadata={"help": "Steps."})
        shuffle: bool = field(default=True, metadata={"help": "Shuffle the rows."})

    with pytest.raises(SystemExit):
        parse_arguments((Flags,), ["--help"], "Do it.\n\n    python do.py --name NAME\n\ndoes it.")
    printed = capsys.readouterr().out
    assert "\n    python do.py --name NAME\n\ndoes it.\n" in printed
    assert "Steps. (default: 3)" in printed and "Switch --shuffle off.\n" in printed
    assert "A name.\n" in printed and "The model's by default.\n" in printed


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], "hidden_dropout_prob=0,num_landmarks=[8,none]"),
        (["--config_overrides", "num_landmarks=16"], "hidden_dropout_prob=0,num_landmarks=[8,none],num_landmarks=16"),
        (
            ["--config_overrides=conv_kernel_size=33"],
            "hidden_dropout_prob=0,num_landmarks=[8,none],conv_kernel_size=33",
        ),
    ],
    ids=["recipe", "same field", "another field"],
)
def test_fields_of_a_recipe_stay_beside_those_of_the_command_line(given, expected, tmp_path):
    @dataclass
    class Flags:
        """Flags."""

        config_overrides: str | None = field(default=None, metadata={"help": "Fields."})
        steps: int = field(default=3, metadata={"help": "Steps."})

    (tmp_path / "recipe.args").write_text(
        "--config_overrides hidden_dropout_prob=0,num_landmarks=[8,none] --steps 4\n", encoding="utf-8"
    )
    (flags,) = parse_arguments((Flags,), ["--recipe", f"{tmp_path}/recipe.args", "--steps", "5", *given])
    assert flags.config_overrides == expected and flags.steps == 5
    config = override(NystromformerConfig(num_hidden_layers=2), flags.config_overrides)
    assert config.hidden_dropout_prob == 0 and config.num_landmarks == (16 if "num" in "".join(given) else [8, None])


@pytest.mark.parametrize(
    ("given", "strategy", "steps"),
    [
        ([], "steps", 500),
        (["--eval_strategy", "no"], "no", None),
        (["--eval_strategy=epoch"], "epoch", None),
        (["--eval_strategy", "steps"], "steps", 500),
        (["--eval_strategy", "no", "--eval_steps", "9"], "no", 9),  # which the scripts refuse
    ],
)
def test_a_run_without_the_evaluations_of_its_recipe(given, strategy, steps, tmp_path):
    Flags = make_dataclass("Flags", [("eval_strategy", str, "no"), ("eval_steps", int | None, None)])
    (tmp_path / "recipe.args").write_text("--eval_strategy steps --eval_steps 500\n", encoding="utf-8")
    (flags,) = parse_arguments((Flags,), ["--recipe", f"{tmp_path}/recipe.args", *given])
    assert (flags.eval_strategy, flags.eval_steps) == (strategy, steps)


@pytest.mark.parametrize("name", ["model_name_or_path", "teacher_model_name_or_path", "config_name", "tokenizer_name"])
def test_a_missing_folder_is_named_with_its_flag(name, tmp_path):
    """A folder that exists, and a name that can be one on the Hub, are no errors."""
    Flags = make_dataclass("Flags", [(name, str | None, None)])
    with pytest.raises(FileNotFoundError, match=f"or folder 'outputs/missing/pretrained': correct --{name}\\."):
        parse_arguments((Flags,), [f"--{name}", "outputs/missing/pretrained"])
    for good in (str(tmp_path), "google-bert/bert-base-uncased", "gpt2"):
        (flags,) = parse_arguments((Flags,), [f"--{name}", good])
        assert getattr(flags, name) == good
    assert parse_arguments((Flags,), []) == (Flags(),)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--max_length 64", "--max_length (did you mean --max_seq_length?)"),
        ("--epochs=3", "--epochs (did you mean --num_train_epochs?)"),
        (
            "--batch-size 8",
            "--batch-size (did you mean --per_device_train_batch_size or --per_device_eval_batch_size?)",
        ),
        ("--fp16 --save_steps 5", "--fp16 (did you mean --mixed_precision fp16?), --save_steps (did you mean --check"),
        ("--colour red", "--colour; --help"),
        ("train.csv", "train.csv; --help"),
    ],
)
def test_an_unknown_flag_is_named_with_a_known_one(given, expected, capsys):
    """Before the values of others are checked, which may be missing for the same reason."""
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(
            (TokenClassificationArguments, FinetuningOptimizationArguments), ["--output_dir", "x", *given.split()]
        )
    assert f"error: unknown {expected}" in capsys.readouterr().err
    if "--fp16" in given:  # not a flag of a script that lacks it
        with pytest.raises(SystemExit, match="2"):
            parse_arguments((FinetuningOptimizationArguments,), ["--fp16"])
        assert "error: unknown --fp16; --help" in capsys.readouterr().err
