# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning for any task. Each task adds a subclass of [`FinetuningRun`]."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint import load_config, load_tokenizer
from ..data.loading import Collator, RowLoader, eval_dataloader
from ..models.configuration_base import BaseConfig
from .arguments import DataArguments, RunArguments
from .identity import (
    BEGAN_WITH,
    HOUSEKEEPING,
    PLACES,
    data_digest,
    encoding_digest,
    flags,
    model_settings,
    weights_digest,
)
from .language_modeling import override, read_config, row_length, row_loader, shapes_of_overrides
from .launch import launched_processes
from .objectives import Objective
from .optimization import OptimizationArguments
from .results import validation_metrics
from .run import final_scores, finish_run, prepare_model, prepare_to_evaluate, start_run, start_trackers, train_model
from .saving import save_pretrained
from .scores import Outputs, predict_rows
from .splits import sample


class Task(Protocol):
    """What a model predicts, and from which columns."""

    @property
    def best_metric(self) -> str:
        """The metric by which models are compared."""


@dataclass
class FinetuningOptimizationArguments(OptimizationArguments):
    """As `OptimizationArguments`, with the learning rate of fine-tuning."""

    learning_rate: float = field(default=3e-5, metadata={"help": "Peak learning rate."})


@dataclass(kw_only=True)
class FinetuningArguments(RunArguments, DataArguments, ABC):
    """Model, data and output of any task, under the names of Transformers' example scripts."""

    # Flags that are read once, before the first run of a grid: the data and what they mean, the output, and the
    # precision of the process.
    not_in_a_grid: ClassVar[frozenset[str]] = frozenset(
        "output_dir grid keep_best_only hub_model_id cache_dir dataset_name dataset_config_name validation_split"
        " train_file validation_file test_file mixed_precision".split()
    )
    # Without a flag, rows have at most as many tokens; None for as many as the model takes.
    usual_length: ClassVar[int | None] = None

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or Hub name of the pretrained model."}
    )
    config_name: str | None = field(
        default=None,
        metadata={
            "help": "Instead of --model_name_or_path: folder, file or Hub name of the configuration of a new model, "
            "whose weights --seed draws."
        },
    )
    config_overrides: str | None = field(
        default=None,
        metadata={
            "help": "Fields of the configuration to change: classifier_pooling=mean,hidden_dropout_prob=0.1 for any "
            "model; hidden_size=128,num_hidden_layers=2 for a new one."
        },
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "Another tokenizer than the model's."})
    test_file: list[str] | None = field(
        default=None,
        metadata={"help": "Files whose rows are predicted; in .txt files, empty lines separate the texts."},
    )
    max_predict_samples: int | None = field(
        default=None, metadata={"help": "Predict only this many rows of each test set, the first ones."}
    )
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Replace the model's classifier if it was trained for other classes."}
    )
    grid: list[str] | None = field(
        default=None, metadata={"help": "Run at each of several values: learning_rate=2e-5,3e-5 seed=0,1,2"}
    )
    keep_best_only: bool = field(
        default=False, metadata={"help": "With --grid: keep only the weights of the best run of the best point."}
    )

    def __post_init__(self):
        RunArguments.__post_init__(self)
        DataArguments.__post_init__(self)
        if self.max_predict_samples is not None and self.max_predict_samples < 1:
            raise ValueError(f"--max_predict_samples must be at least 1, but is {self.max_predict_samples}.")
        if (self.model_name_or_path is None) == (self.config_name is None):
            raise ValueError(
                "Give either --model_name_or_path for a pretrained model, or --config_name for a new one, not both."
            )
        if self.config_name is not None and self.tokenizer_name is None:
            raise ValueError("A new model needs --tokenizer_name; examples/train_tokenizer.py trains one.")
        if self.config_name is not None and not self.do_train:
            raise ValueError("--no_do_train evaluates a finished model: give --model_name_or_path.")
        if self.grid is not None and self.push_to_hub:
            raise ValueError("--grid trains many models: leave out --push_to_hub, and upload the best one.")
        if self.grid is not None and not self.do_train:
            raise ValueError("--grid trains: leave out --no_do_train.")
        if self.keep_best_only and self.grid is None:
            raise ValueError("--keep_best_only chooses among the models of a --grid.")
        for item in self.grid or ():
            if (name := item.partition("=")[0]) in self.not_in_a_grid:
                raise ValueError(
                    f"--grid {item!r}: --{name} applies to the whole run: give it outside of --grid, and run the "
                    "script once for each value."
                )

    @abstractmethod
    def run_class(self) -> type["FinetuningRun"]:
        """The part of the run that depends on the task."""


def class_names(config: Any) -> list[str]:
    """The names of a model's classes, in the order of their ids."""
    return [config.id2label[i] for i in range(config.num_labels)]


def unnamed_classes(number: int) -> list[str]:
    """The names that Transformers gives to classes without names."""
    return [f"LABEL_{i}" for i in range(number)]


def in_own_order(config: Any, names: list[str]) -> list[str]:
    """Names of classes in the order of the model's classifier, if its configuration names the same ones: it was
    trained for them, and goes on with them. Else as given."""
    own = class_names(config)
    return own if sorted(own) == sorted(names) else names


def _config_and_tokenizer(args: FinetuningArguments) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Configuration and tokenizer of the pretrained model; or of a new one, for this vocabulary and special tokens."""
    remote = {"trust_remote_code": args.trust_remote_code}
    name = args.tokenizer_name or args.model_name_or_path
    tokenizer = load_tokenizer(name, **remote)
    if args.model_name_or_path is not None:
        config = load_config(args.model_name_or_path, **remote)
        return override(config, args.config_overrides), tokenizer
    names = {"bos_token_id": "cls_token_id", "pad_token_id": "pad_token_id", "eos_token_id": "sep_token_id"}
    ids = {field_name: getattr(tokenizer, token) for field_name, token in names.items()}
    wanted = "a configuration of this package, such as configs/nystromformer/base-512.json"
    return read_config(args, tokenizer, ids, wanted), tokenizer


def _longest(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, int | None]:
    """The largest number of tokens that a model takes, and that of its tokenizer; None for any number."""
    longest = getattr(config, "max_position_embeddings", None)
    known = None if tokenizer.model_max_length >= 10**9 else tokenizer.model_max_length
    # The tokenizer may be that of another model. Other families than ours count positions that no token has.
    if not isinstance(config, BaseConfig):
        longest = min((limit for limit in (longest, known) if limit is not None), default=None)
    return longest, known


class FinetuningRun(ABC):
    """Model, tokenizer, rows and scores of a run. Each task has a subclass."""

    auto_class: Any  # loads the model with its head
    length_flag: str  # the field that holds the largest number of tokens of a row
    args: Any
    task: Any

    def __init__(self, accelerator: Accelerator, args: FinetuningArguments, task: Task, splits: Mapping[str, Dataset]):
        self.accelerator, self.args, self.task = accelerator, args, task
        self.where = {split: f"the {split.replace('_', ' ')} set" for split in splits}
        for split, dataset in splits.items():
            self.check_columns(split, dataset)
        self.config: Any
        self.config, self.tokenizer = _config_and_tokenizer(args)
        self.prepare_tokenizer()
        self.set_classes(splits)
        longest, known = _longest(self.config, self.tokenizer)
        given = getattr(args, self.length_flag)
        flag, source = f"--{self.length_flag}", args.model_name_or_path
        length = row_length(flag, given, longest, self.config, known, source, args.usual_length)
        if isinstance(self.config, BaseConfig):
            self.tokenizer.model_max_length = longest or max(length, self.tokenizer.model_max_length)
        lengths: dict[str, Any] = {self.length_flag: length}
        self.args = replace(args, **lengths)
        self.examples = {split: self._sample(split, dataset) for split, dataset in splits.items()}
        with accelerator.main_process_first():
            self.rows = {split: self.tokenized(split, dataset) for split, dataset in self.examples.items()}
        for split, rows in self.rows.items():
            if len(rows) == 0:
                none = "has a token of this tokenizer" if len(self.examples[split]) else "is there"
                raise ValueError(f"No text of {self.where[split]} {none}: leave it out.")
            for line in self.notes(split, rows):
                accelerator.print(f"{self.where[split][0].upper()}{self.where[split][1:]}: {line}")
        self.model = self._model()
        prepare_model(self.model, args)

    def _model(self) -> PreTrainedModel:
        """A new model, or the pretrained one with a head for the task."""
        args = self.args
        if args.model_name_or_path is None:
            return self.auto_class.from_config(self.config)
        with shapes_of_overrides(args, self.config):
            model, loaded = self.auto_class.from_pretrained(
                args.model_name_or_path,
                config=self.config,
                ignore_mismatched_sizes=args.ignore_mismatched_sizes,
                output_loading_info=True,
                dtype=torch.float32,  # half precision would round most updates away
                trust_remote_code=args.trust_remote_code,
            )
        if not args.do_train and loaded["missing_keys"]:
            raise ValueError(
                f"--no_do_train needs a model that was fine-tuned: {args.model_name_or_path} has no "
                f"{', '.join(sorted(loaded['missing_keys']))}."
            )
        if args.config_overrides is not None:
            # Of the base model, only a pooler may be new: some checkpoints have none.
            base = f"{model.base_model_prefix}."
            new = [key for key in loaded["missing_keys"] if key.startswith(base) and ".pooler." not in key]
            if new:
                raise ValueError(
                    f"--config_overrides {args.config_overrides}: {args.model_name_or_path} has no weights for "
                    f"{', '.join(sorted(new)[:3])}, so that they would be random. Such fields are for a new model, "
                    "with --config_name."
                )
        return model

    @abstractmethod
    def check_columns(self, split: str, dataset: Dataset) -> None:
        """Raises a ValueError if a split lacks a column or a value."""

    def prepare_tokenizer(self) -> None:  # noqa: B027, not every task changes it
        """Changes how the tokenizer reads texts. It is saved so, with the model."""

    def set_classes(self, splits: Mapping[str, Dataset]) -> None:  # noqa: B027, not every task has classes
        """Finds the classes in the data, or in a finished model, and sets them in the configuration."""

    def own_order(self, names: list[str]) -> list[str]:
        """Names of classes in the order of the model's classifier, if it was trained for them; else as given. Says if
        the model names as many others."""
        before, own = class_names(self.config), in_own_order(self.config, names)
        others = len(before) == len(own) and sorted(before) != sorted(own) and before != unnamed_classes(len(own))
        if others and self.args.model_name_or_path is not None:
            self.accelerator.print(
                f"{self.args.model_name_or_path} names the classes {', '.join(before)}: if it has a classifier for "
                f"them, this one is trained on, for {', '.join(own)}."
            )
        return own

    @abstractmethod
    def tokenized(self, split: str, dataset: Dataset) -> Dataset:
        """The rows of a split, with `length` and `index`, the number of the row."""

    def row_options(self, split: str) -> dict[str, Any]:
        """Arguments that the data sets of every task take."""
        return {
            "num_proc": self.args.preprocessing_num_workers,
            "load_from_cache_file": not self.args.overwrite_cache,
            "desc": f"Tokenizing {self.where[split]}",
            "where": self.where[split],
        }

    def notes(self, split: str, rows: Dataset) -> list[str]:
        """Sentences to print about the rows of a split, such as how many texts were cut."""
        return []

    @abstractmethod
    def collator(self, with_index: bool = False) -> Collator:
        """Makes batches of rows."""

    @abstractmethod
    def objective(self) -> Objective:
        """The training objective."""

    @abstractmethod
    def metrics(self) -> Iterable[str]:
        """The names of the metrics that [`score`] returns, besides the loss."""

    @abstractmethod
    def score(self, model: nn.Module, split: str, batch_size: int) -> tuple[Any, dict[str, float]]:
        """The predictions for a split and, if labels or right answers are known, loss and metrics."""

    @abstractmethod
    def write(self, split: str, predictions: Any) -> None:
        """Writes predictions of a test set into `--output_dir`."""

    def example(self) -> Any:
        """The input of the model card's snippet; None for the default of the task."""
        return None

    def _sample(self, split: str, dataset: Dataset) -> Dataset:
        """The rows of a split that the flags select."""
        args = self.args
        if split.startswith("test"):
            return dataset.select(range(min(len(dataset), args.max_predict_samples or len(dataset))))
        return sample(dataset, args.max_train_samples if split == "train" else args.max_eval_samples, args.seed)

    def loader(self, optimization: OptimizationArguments) -> RowLoader:
        """The training loader."""
        return row_loader(self.args, optimization, self.rows["train"], self.collator())

    def predict(self, model: nn.Module, split: str, batch_size: int, outputs: Outputs) -> dict[str, Any]:
        """The results of `outputs` for every row of a split; see [`predict_rows`]."""
        rows = self.rows[split]
        loader = eval_dataloader(rows, self.collator(with_index=True), batch_size, **self.args.loader_options())
        return predict_rows(self.accelerator, model, loader, outputs, desc=f"Predicting {self.where[split]}")

    def validate(self, model: nn.Module, batch_size: int) -> dict[str, dict[str, float]]:
        """Loss and metrics of every validation set."""
        return {
            split: self.score(model, split, batch_size)[1] for split in self.rows if split.startswith("validation")
        }

    def write_tests(self, model: nn.Module, batch_size: int) -> dict[str, dict[str, float]]:
        """Writes predictions for every test set, and returns the scores of those with labels or right answers."""
        found: dict[str, dict[str, float]] = {}
        for split in self.rows:
            if split.startswith("test"):
                predictions, figures = self.score(model, split, batch_size)
                self.accelerator.print(f"{len(self.examples[split]):,} rows of {self.where[split]} were predicted.")
                if figures:
                    found[split] = figures
                if self.accelerator.is_main_process:
                    self.write(split, predictions)
        return found

    def card(self) -> dict[str, Any]:
        """The model card's statements about the data, the initial model and its use."""
        args, sets = self.args, [split for split in self.rows if split.startswith("validation")]
        trained = "Trained" if args.model_name_or_path is None else "Fine-tuned"
        name, config = args.hub_dataset()
        evaluated = f"{' and '.join(split.replace('_', ' ') for split in sets)} set{'s' if len(sets) > 1 else ''}"
        if args.validation_split is not None and sets == ["validation"]:
            evaluated = f"{args.validation_split} split"
        return {
            "data": (
                f"{trained} on {len(self.examples['train']):,} rows of {args.data_source()}, and evaluated on "
                f"{sum(len(self.examples[split]) for split in sets):,} rows of its {evaluated}."
            ),
            "base_model": args.model_name_or_path,
            "dataset_name": name,
            "dataset_config_name": config,
            "dataset_split": args.validation_split or "validation" if sets == ["validation"] else ", ".join(sets),
            "example": self.example(),
        }


def _check_splits(args: FinetuningArguments, splits: Mapping[str, Dataset]) -> None:
    """Raises a ValueError if data are missing."""
    if args.do_train and ("train" not in splits or not any(split.startswith("validation") for split in splits)):
        raise ValueError(
            f"Data for training and validation are needed (--train_file, --validation_file), but the splits are "
            f"{list(splits) or 'none'}."
        )
    if not args.do_train and not any(split != "train" for split in splits):
        raise ValueError("Data to evaluate or to predict are needed: give --validation_file or --test_file.")


def content_digests(args: FinetuningArguments, splits: Mapping[str, Dataset]) -> dict[str, Any]:
    """Digests of the data as they were read, and of the model that a run starts from."""
    config, tokenizer = _config_and_tokenizer(args)
    start = args.model_name_or_path
    return {
        "data": {split: data_digest(dataset) for split, dataset in splits.items()},
        "model": None if start is None else weights_digest(start, config),
        "tokenizer": encoding_digest(tokenizer),
        **model_settings(config, tokenizer),
    }


def finetuning_identity(
    args: FinetuningArguments, optimization: OptimizationArguments, content: Mapping[str, Any]
) -> dict[str, Any]:
    """Everything that determines the results of a run: its flags, [`content_digests`], and the number of processes,
    by which a step has more rows."""
    processes, _ = launched_processes()
    return {
        "flags": flags(args, optimization, leave_out=HOUSEKEEPING | PLACES),
        **content,
        **({"processes": processes} if processes > 1 else {}),
    }


def began_with(args: FinetuningArguments, weights: str | None) -> dict[str, str | None]:
    """The weights that a run started from, for its settings; not if it writes over them."""
    start = args.model_name_or_path
    if start is not None and Path(start).absolute() == Path(args.output_dir).absolute():
        return {}
    return {BEGAN_WITH: weights}


def finetune(
    args: FinetuningArguments,
    optimization: OptimizationArguments,
    task: Task,
    splits: Mapping[str, Dataset],
    content: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Fine-tunes a pretrained model, or trains a new one, evaluates it, and writes predictions. With `--no_do_train`,
    the model is not trained.

    It writes to `--output_dir`: model and tokenizer, `all_results.json`, `history.jsonl`, the training curve, a model
    card, a prediction file for each test set, and the requested checkpoints. A run that a signal ended leaves only its
    checkpoint, from which it can be resumed.

    Args:
        args: model, lengths, seed and output.
        optimization: optimizer, schedule and length of the run.
        task: what the columns mean.
        splits: `train`, any number of sets for evaluation, whose names start with `validation`, and of sets to
            predict, whose names start with `test`. A test set with labels or answers is scored, too.
        content: [`content_digests`], if they are known already.

    Returns:
        The loss and metrics of every validation set, and of every scored test set, by its name, and the figures
        of `train`; after a signal, only those of `train`.

    Raises:
        ValueError: if a split is missing, `--max_length` or `--max_seq_length` exceeds the model's maximum, or the
            data do not fit the task; always before training.
    """
    _check_splits(args, splits)
    if not args.do_train:
        splits = {split: dataset for split, dataset in splits.items() if split != "train"}
    with start_run(args) as accelerator:
        run = args.run_class()(accelerator, args, task, splits)
        identity = finetuning_identity(args, optimization, content or content_digests(args, splits))
        args, batch_size = run.args, optimization.per_device_eval_batch_size
        if not args.do_train:
            model = prepare_to_evaluate(accelerator, run.model)
            scored = run.validate(model, batch_size) | run.write_tests(model, batch_size)
            finish_run(accelerator, None, scored, (args, optimization), identity, {})
            return scored

        latest: dict[str, dict[str, float]] = {}  # by validation set

        def scores(model: nn.Module) -> dict[str, float]:
            latest.update(run.validate(model, batch_size))
            return validation_metrics(latest)

        def save_model(model: nn.Module, folder: Path) -> None:
            save_pretrained(accelerator, model, run.tokenizer, folder)

        goal = args.goal(task.best_metric)
        measured = dict.fromkeys(("loss", *run.metrics()), 0.0)
        goal.require(validation_metrics(dict.fromkeys(run.rows, measured)))
        start_trackers(accelerator, args, optimization)
        state = train_model(
            accelerator,
            run.model,
            run.objective(),
            run.loader(optimization),
            args,
            optimization,
            scores,
            goal,
            "Fine-tuning",
            save_model,
            {
                "the training data": data_digest(run.rows["train"]),
                "the validation data": {
                    split: data_digest(rows) for split, rows in run.rows.items() if split.startswith("validation")
                },
                **model_settings(run.config, run.tokenizer),
                **began_with(args, identity["model"]),
            },
        )
        if state.interrupted:
            return {"train": state.figures()}
        metrics = final_scores(accelerator, state, args, scores, goal, save_model)
        results = {"train": state.figures(), **latest, **run.write_tests(state.model, batch_size)}
        reported = {name: value for name, value in metrics.items() if not name.endswith("loss")}
        finish_run(accelerator, state, results, (args, optimization), identity, reported, **run.card())
        return results
