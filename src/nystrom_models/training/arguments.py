# SPDX-License-Identifier: Apache-2.0
"""Flags that the example scripts share, and recipes: files of flags."""

import os
import shlex
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import HfArgumentParser

from .checkpoints import CheckpointArguments


@dataclass(kw_only=True)
class DataArguments:
    """Where data come from: the Hub, or files."""

    dataset_name: str | None = field(default=None, metadata={"help": "Hub data set, or folder that `datasets` reads."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of --dataset_name."})
    validation_split: str = field(
        default="validation", metadata={"help": "Split of --dataset_name to evaluate on, if not validation."}
    )
    train_file: list[str] | None = field(
        default=None, metadata={"help": "Files to train on: .txt, .jsonl, .csv or .parquet, each also .gz."}
    )
    validation_file: list[str] | None = field(default=None, metadata={"help": "Files to evaluate on."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on a random sample of so many rows."})
    max_eval_samples: int | None = field(
        default=None, metadata={"help": "Evaluate on a random sample of so many rows of each validation set."}
    )
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})
    cache_dir: str | None = field(default=None, metadata={"help": "Where prepared data are kept."})

    def __post_init__(self):
        for name in ("max_train_samples", "max_eval_samples", "preprocessing_num_workers"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, but is {value}.")

    def hub_dataset(self) -> tuple[str | None, str | None]:
        """Name and configuration of the data set on the Hub; (None, None) for files."""
        if self.train_file or self.dataset_name is None or os.path.isdir(self.dataset_name):
            return None, None
        return self.dataset_name, self.dataset_config_name

    def data_source(self) -> str:
        """Where the data come from, for a reader elsewhere: without folders of this machine."""
        name, config = self.hub_dataset()
        if name is not None:
            return f"{name} ({config})" if config else name
        return ", ".join(Path(path).name for path in self.train_file or [str(self.dataset_name)])


@dataclass(kw_only=True)
class RunArguments(CheckpointArguments):
    """How a training run goes, and what it leaves."""

    output_dir: str = field(metadata={"help": "Everything is written here."})
    seed: int = field(default=0, metadata={"help": "Of new weights, dropout, masks, samples and order."})
    logging_steps: int = field(default=10, metadata={"help": "Figures shown and logged are means over so many steps."})
    eval_strategy: Literal["no", "steps", "epoch"] = field(
        default="epoch", metadata={"help": "When to evaluate besides the end: every --eval_steps, or every epoch."}
    )
    eval_steps: int | None = field(default=None, metadata={"help": "With --eval_strategy steps."})
    mixed_precision: Literal["no", "fp16", "bf16"] | None = field(
        default=None, metadata={"help": "Arithmetic in half precision; if not given, what `accelerate` is set to."}
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Compute layers again in the backward pass, which saves memory."}
    )
    torch_compile: bool = field(default=False, metadata={"help": "Compile the model."})
    torch_compile_backend: str = field(default="inductor", metadata={"help": "With --torch_compile."})
    dataloader_num_workers: int = field(default=0, metadata={"help": "Processes that make batches."})
    with_tracking: bool = field(default=False, metadata={"help": "Log to the trackers of --report_to."})
    report_to: list[str] = field(
        default_factory=lambda: ["tensorboard"],
        metadata={"help": "Trackers that Accelerate knows: tensorboard, wandb, mlflow, ...; or all installed ones."},
    )
    push_to_hub: bool = field(default=False, metadata={"help": "Upload what the run leaves to --hub_model_id."})
    hub_model_id: str | None = field(
        default=None, metadata={"help": "Repository to upload to; the name of --output_dir if not given."}
    )
    hub_token: str | None = field(
        default=None, metadata={"help": "Token to upload with, if not HF_TOKEN or the saved one."}
    )
    hub_private_repo: bool = field(default=False, metadata={"help": "A new repository is private."})

    def __post_init__(self):
        super().__post_init__()
        for name in ("logging_steps", "eval_steps"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, but is {value}.")
        if self.dataloader_num_workers < 0:
            raise ValueError(f"--dataloader_num_workers must be at least 0, but is {self.dataloader_num_workers}.")
        if (self.eval_strategy == "steps") != (self.eval_steps is not None):
            raise ValueError("--eval_strategy steps and --eval_steps N go together.")
        if self.push_to_hub and self.hub_model_id is None:
            self.hub_model_id = Path(self.output_dir).resolve().name
        if not self.push_to_hub and self.hub_model_id is not None:
            raise ValueError("--hub_model_id names where to upload to: give --push_to_hub, too.")

    @property
    def eval_every(self) -> int | Literal["epoch"] | None:
        """Steps between evaluations."""
        return {"no": None, "steps": self.eval_steps, "epoch": "epoch"}[self.eval_strategy]


def parse_arguments(
    types: Sequence[type], args: Sequence[str] | None = None, description: str | None = None
) -> tuple[Any, ...]:
    """Dataclasses from a command line, in which `--recipe FILE` stands for the flags in a file.

    A recipe holds flags as they would be typed, on any number of lines; `#` begins a comment. Flags given beside it
    take precedence, so that a recipe may be tried at another size.

    Args:
        types: dataclasses, no two of which have a field of one name.
        args: the command line; that of the process if None.
        description: what `--help` begins with.

    Raises:
        FileNotFoundError: if there is no such recipe.
    """
    recipes = ArgumentParser(add_help=False, allow_abbrev=False)
    recipes.add_argument("--recipe", action="append", default=[])
    given, rest = recipes.parse_known_args(args)
    flags: list[str] = []
    for recipe in given.recipe:
        if not Path(recipe).is_file():
            raise FileNotFoundError(f"--recipe {recipe} is not a file; configs/recipes/ holds the papers' recipes.")
        flags += shlex.split(Path(recipe).read_text(encoding="utf-8"), comments=True)
    parser = HfArgumentParser(
        types,  # type: ignore[arg-type]
        description=description,
        epilog="--recipe FILE takes flags from a file; flags given beside it take precedence.",
    )
    return parser.parse_args_into_dataclasses([*flags, *rest], look_for_args_file=False)
