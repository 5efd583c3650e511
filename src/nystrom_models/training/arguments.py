# SPDX-License-Identifier: Apache-2.0
"""Flags that the example scripts share, and recipes: files of flags."""

import os
import shlex
from argparse import Action, ArgumentDefaultsHelpFormatter, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils import DynamoBackend, LoggerType
from transformers import HfArgumentParser

from ..checkpoint import require_possible
from .checkpoints import SOURCES, CheckpointArguments
from .selection import Goal

# Flags of Transformers' Trainer, which have other names in Accelerate's scripts and here.
_OF_TRAINER = {
    "bf16": "mixed_precision bf16",
    "fp16": "mixed_precision fp16",
    "save_steps": "checkpointing_steps",
    "save_total_limit": "checkpoints_total_limit",
    "warmup_steps": "num_warmup_steps",
}


@dataclass(kw_only=True)
class DataArguments:
    """The data: from the Hub, or from files."""

    dataset_name: str | None = field(default=None, metadata={"help": "Hub data set, or folder that `datasets` reads."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of --dataset_name."})
    validation_split: str | None = field(
        default=None, metadata={"help": "Split of --dataset_name to evaluate on; by default 'validation'."}
    )
    train_file: list[str] | None = field(
        default=None,
        metadata={
            "help": "Files to train on: .txt, .json, .jsonl, .csv, .tsv, .parquet or FASTA (.fa, .fasta, "
            ".fna, .ffn, .faa, .frn), each also .gz."
        },
    )
    validation_file: list[str] | None = field(default=None, metadata={"help": "Files to evaluate on."})
    max_train_samples: int | None = field(
        default=None,
        metadata={"help": "Train on a random sample of this many rows; in pretraining, of documents."},
    )
    max_eval_samples: int | None = field(
        default=None,
        metadata={
            "help": "Evaluate on a random sample of this many rows of each validation set; in pretraining, of "
            "documents."
        },
    )
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that tokenize."})
    cache_dir: str | None = field(default=None, metadata={"help": "Folder in which prepared data are cached."})
    overwrite_cache: bool = field(
        default=False, metadata={"help": "Prepare the data again instead of reading them from the cache."}
    )

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
        """The name of the data for publication: without folders of this machine."""
        name, config = self.hub_dataset()
        if name is not None:
            return f"{name} ({config})" if config else name
        # Such as that of the current folder, if it is given as a dot.
        return ", ".join(
            os.path.basename(os.path.abspath(path)) for path in self.train_file or [str(self.dataset_name)]
        )


@dataclass(kw_only=True)
class RunArguments(CheckpointArguments):
    """How a run trains, evaluates, logs and uploads."""

    output_dir: str = field(metadata={"help": "Folder to write to."})
    seed: int = field(default=0, metadata={"help": "Seed of initial weights, dropout, masks, samples and order."})
    logging_steps: int = field(default=10, metadata={"help": "Log means over this many steps."})
    do_train: bool = field(
        default=True, metadata={"help": "Train the model; --no_do_train only evaluates it and predicts."}
    )
    eval_strategy: Literal["no", "steps", "epoch"] = field(
        default="epoch",
        metadata={"help": "When to evaluate before the end: never, every --eval_steps, or every epoch."},
    )
    eval_steps: int | None = field(
        default=None, metadata={"help": "With --eval_strategy steps: number of steps between evaluations."}
    )
    load_best_model_at_end: bool = field(
        default=False, metadata={"help": "Save the model with the best evaluation instead of the last one."}
    )
    metric_for_best_model: str | None = field(
        default=None, metadata={"help": "Metric by which models are compared; by default the task's own."}
    )
    greater_is_better: bool | None = field(
        default=None,
        metadata={
            "help": "Whether a larger --metric_for_best_model is better; known for all metrics of this package."
        },
    )
    early_stopping_patience: int | None = field(
        default=None, metadata={"help": "Stop after this many evaluations in a row without an improvement."}
    )
    early_stopping_threshold: float = field(
        default=0.0, metadata={"help": "Smallest change that counts as an improvement."}
    )
    mixed_precision: Literal["no", "fp16", "bf16"] | None = field(
        default=None, metadata={"help": "Half precision; by default, the setting of `accelerate config`."}
    )
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Save memory by recomputing the layers in the backward pass."}
    )
    torch_compile: bool = field(default=False, metadata={"help": "Compile the model."})
    torch_compile_backend: str = field(default="inductor", metadata={"help": "With --torch_compile: the backend."})
    dataloader_num_workers: int | None = field(
        default=None, metadata={"help": "Processes that make batches; by default 2 with a GPU and 0 without."}
    )
    dataloader_pin_memory: bool = field(
        default=True, metadata={"help": "Copy batches to the GPU from pinned memory, while it computes."}
    )
    with_tracking: bool = field(default=False, metadata={"help": "Log to the trackers of --report_to."})
    report_to: list[str] = field(
        default_factory=list,
        metadata={
            "help": "With --with_tracking: trackers of Accelerate (wandb, mlflow, ...; or all, for the installed "
            "ones); by default tensorboard."
        },
    )
    project_name: str = field(default="nystrom_models", metadata={"help": "Name of the project in trackers."})
    run_name: str | None = field(
        default=None, metadata={"help": "Name of the run in trackers; by default the name of --output_dir."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Allow code that comes with a model on the Hub to run."}
    )
    push_to_hub: bool = field(
        default=False, metadata={"help": "Upload the finished model, its card and its results to --hub_model_id."}
    )
    hub_model_id: str | None = field(
        default=None, metadata={"help": "Repository to upload to; by default the name of --output_dir."}
    )
    hub_strategy: Literal["end", "every_save"] = field(
        default="end", metadata={"help": "When to upload: at the end only, or also the model of every checkpoint."}
    )
    hub_token: str | None = field(
        default=None, metadata={"help": "Token for the upload; by default HF_TOKEN or the saved one."}
    )
    hub_private_repo: bool = field(default=False, metadata={"help": "Create the repository as a private one."})
    language: str | None = field(
        default=None,
        metadata={
            "help": "Language of the texts (ISO 639-1): for the card and, in pretraining, for splitting sentences."
        },
    )
    license: str | None = field(default=None, metadata={"help": "For the model card, such as apache-2.0."})

    def __post_init__(self):
        super().__post_init__()
        for name in ("logging_steps", "eval_steps", "early_stopping_patience"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, but is {value}.")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"--seed must lie between 0 and {2**32 - 1}, but is {self.seed}.")
        if not self.early_stopping_threshold >= 0:
            raise ValueError(f"--early_stopping_threshold must be at least 0, but is {self.early_stopping_threshold}.")
        if self.dataloader_num_workers is not None and self.dataloader_num_workers < 0:
            raise ValueError(f"--dataloader_num_workers must be at least 0, but is {self.dataloader_num_workers}.")
        if (self.eval_strategy == "steps") != (self.eval_steps is not None):
            raise ValueError("Give --eval_strategy steps and --eval_steps N together, or neither.")
        if self.eval_strategy == "no" and (self.load_best_model_at_end or self.early_stopping_patience is not None):
            raise ValueError(
                "--load_best_model_at_end and --early_stopping_patience need evaluations to choose from: "
                "--eval_strategy epoch, or steps."
            )
        backends = sorted(backend.lower() for backend in DynamoBackend.list() if backend != "NO")
        if self.torch_compile and self.torch_compile_backend.lower() not in backends:
            raise ValueError(
                f"--torch_compile_backend must be one of {', '.join(backends)}, but is {self.torch_compile_backend}."
            )
        if self.metric_for_best_model is not None:
            Goal.of(self.metric_for_best_model, self.greater_is_better)
        if self.push_to_hub and self.hub_model_id is None:
            self.hub_model_id = Path(self.output_dir).resolve().name
        if self.with_tracking:
            self.report_to = self.report_to or ["tensorboard"]
            if unknown := [name for name in self.report_to if name not in LoggerType]:
                raise ValueError(
                    f"--report_to {' '.join(unknown)} is no tracker of Accelerate: give one or more of "
                    f"{', '.join(map(str, LoggerType))}; for none, omit --with_tracking."
                )
        elif self.report_to not in ([], ["none"]):  # none, as for the Trainer
            raise ValueError(f"--report_to {' '.join(self.report_to)} needs --with_tracking: give it, too.")
        if self.push_to_hub and not self.do_train:
            raise ValueError(
                "--push_to_hub uploads the model that a run trains: give only one of it and --no_do_train."
            )
        if not self.push_to_hub and self.hub_model_id is not None:
            raise ValueError("--hub_model_id names the repository to upload to: also give --push_to_hub.")

    @property
    def eval_every(self) -> int | Literal["epoch"] | None:
        """Steps between evaluations."""
        return {"no": None, "steps": self.eval_steps, "epoch": "epoch"}[self.eval_strategy]

    def goal(self, default: str) -> Goal:
        """The metric of this run, and whether larger values are better; `default` is the task's metric."""
        return Goal.of(self.metric_for_best_model or default, self.greater_is_better)

    def loader_options(self) -> dict[str, Any]:
        """Arguments of data loaders: worker processes and pinned memory."""
        gpu = torch.accelerator.is_available()
        workers = self.dataloader_num_workers
        return {
            "num_workers": (2 if gpu else 0) if workers is None else workers,
            "pin_memory": self.dataloader_pin_memory and gpu,
        }


def read_recipe(path: str | os.PathLike) -> list[str]:
    """The flags in a file, written as in a shell; `#` begins a comment. A value that begins with ./ or ../ is a path
    relative to the recipe, not to the current folder.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    recipe = Path(path)
    if not recipe.is_file():
        raise FileNotFoundError(f"--recipe {path} is not a file; configs/recipes/ holds the papers' recipes.")
    words = shlex.split(recipe.read_text(encoding="utf-8"), comments=True)
    return [str((recipe.parent / word).resolve()) if word.startswith(("./", "../")) else word for word in words]


class _HelpFormatter(ArgumentDefaultsHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the lines of the description, and shows defaults only where there are any."""

    def _get_help_string(self, action: Action) -> str | None:
        if action.option_strings and action.option_strings[0].startswith("--no_"):
            return f"Switch --{action.dest} off."
        if action.default in (None, []) or action.required:
            return action.help
        return super()._get_help_string(action)


def _values_of(name: str, flags: Sequence[str] | None) -> tuple[list[str], list[str]]:
    """The values of a flag, which may stand several times, and the other flags; flags: the process's own if None."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", action="append", default=[])
    given, rest = parser.parse_known_args(flags)
    return getattr(given, name), rest


def _no_such_flags(unknown: Sequence[str], known: Sequence[str]) -> str:
    """Says which words of a command line are no flags, and which flags have a similar name or contain it."""
    found = []
    for word in unknown:
        flag, _, _ = word.partition("=")
        if not flag.startswith("-"):
            continue  # the value of an unknown flag
        name = flag.lstrip("-").replace("-", "_")
        ours = _OF_TRAINER.get(name, "")
        near = [ours] if ours.split(" ")[0] in known else get_close_matches(name, known, n=1)
        near = near or [other for other in known if f"_{name}_" in f"_{other}_"][:3]
        found.append(flag + (f" (did you mean {' or '.join(f'--{other}' for other in near)}?)" if near else ""))
    return f"unknown {', '.join(found or unknown)}; --help lists all flags"


def parse_arguments(
    types: Sequence[type], args: Sequence[str] | None = None, description: str | None = None
) -> tuple[Any, ...]:
    """Dataclasses from a command line, in which `--recipe FILE` is replaced by the flags in a file.

    Other flags on the command line take precedence, so that a recipe can be tried at another size; of
    `--config_overrides`, field by field. `--eval_strategy no` also leaves out the recipe's `--eval_steps`.
    (`HfArgumentParser` also reads files of flags, but without comments, quotes and relative paths.)

    Args:
        types: dataclasses, whose fields all have different names.
        args: the command line; the process's own if None.
        description: the first lines of `--help`.

    Raises:
        SystemExit: if there is no such flag, a flag is missing, or a value is none of its flag's.
        FileNotFoundError: if there is no such recipe, model, configuration or tokenizer.
    """
    recipes, rest = _values_of("recipe", args)
    flags = [flag for recipe in recipes for flag in read_recipe(recipe)]
    strategies, _ = _values_of("eval_strategy", rest)
    if strategies and strategies[-1] != "steps":
        _, flags = _values_of("eval_steps", flags)
    overrides, flags = _values_of("config_overrides", [*flags, *rest])
    if overrides:
        flags += ["--config_overrides", ",".join(overrides)]
    parser = HfArgumentParser(
        types,  # type: ignore[arg-type]
        usage="%(prog)s [--recipe FILE] [flags]",
        description=description,
        formatter_class=_HelpFormatter,
        epilog="--recipe FILE takes flags from a file; flags on the command line take precedence, of "
        "--config_overrides field by field.",
    )
    # Before the values are checked: what they lack may stand after a misspelled flag.
    _, unknown = parser.parse_known_args(flags)
    if unknown:
        parser.error(_no_such_flags(unknown, [part.name for kind in types for part in fields(kind) if part.init]))
    parsed = parser.parse_args_into_dataclasses(flags, look_for_args_file=False)
    # As they were given: run_lra.py sets --config_name itself, to a folder that it writes later.
    for name in SOURCES:
        given, _ = _values_of(name, flags)
        require_possible(given[-1] if given else None, f"--{name}")
    return parsed
