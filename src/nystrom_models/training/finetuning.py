# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning for classification and regression of texts and pairs of texts."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..data.classification import (
    ClassificationCollator,
    TextTask,
    TruncationStrategy,
    class_labels,
    classification_dataset,
    require_column,
)
from ..data.loading import RowLoader, eval_dataloader
from ..data.metrics import load_metric
from .arguments import DataArguments, RunArguments
from .identity import HOUSEKEEPING, PLACES, data_digest, flags, model_settings, weights_digest
from .language_modeling import read_config
from .objectives import ClassificationObjective, MultiLabelObjective, Objective, RegressionObjective
from .optimization import OptimizationArguments
from .run import final_scores, finish_run, prepare_model, start_run, start_trackers, train_model
from .saving import save_pretrained
from .scores import predict
from .splits import sample


@dataclass
class FinetuningOptimizationArguments(OptimizationArguments):
    """As `OptimizationArguments`, with the learning rate of fine-tuning."""

    learning_rate: float = field(default=3e-5, metadata={"help": "Peak learning rate."})


@dataclass(kw_only=True)
class FinetuningArguments(RunArguments, DataArguments):
    """Model, data and output, under the names of Transformers' example scripts."""

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
            "help": "With --config_name: fields of the configuration to change: hidden_size=128,num_landmarks=32"
        },
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "Another tokenizer than the model's."})
    test_file: list[str] | None = field(default=None, metadata={"help": "Files whose rows are predicted."})
    max_predict_samples: int | None = field(
        default=None, metadata={"help": "Predict only this many rows of each test set, the first ones."}
    )
    text_column_names: list[str] | None = field(
        default=None, metadata={"help": "Column of the text, or the two columns of a pair."}
    )
    label_column_name: str = field(default="label", metadata={"help": "Column of the label."})
    label_delimiter: str = field(
        default=",", metadata={"help": "With --multi_label: separator of the labels, if they are given as one text."}
    )
    do_regression: bool = field(default=False, metadata={"help": "The label is a number, not a class."})
    multi_label: bool = field(
        default=False, metadata={"help": "A row has any number of labels: a list, or a text with a separator."}
    )
    max_length: int | None = field(
        default=None, metadata={"help": "Largest number of tokens of a row; the model's maximum by default."}
    )
    truncation_strategy: TruncationStrategy = field(
        default="head",
        metadata={"help": "What is kept of a text that is too long: its head, its tail, or half of each."},
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
        for name in ("max_length", "max_predict_samples"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, but is {value}.")
        if (self.model_name_or_path is None) == (self.config_name is None):
            raise ValueError(
                "Give either --model_name_or_path for a pretrained model, or --config_name for a new one, not both."
            )
        if self.config_name is not None and self.tokenizer_name is None:
            raise ValueError("A new model needs --tokenizer_name; examples/train_tokenizer.py trains one.")
        if self.config_name is not None and not self.do_train:
            raise ValueError("--no_do_train evaluates a finished model: give --model_name_or_path.")
        if self.config_overrides is not None and self.config_name is None:
            raise ValueError("--config_overrides changes the configuration of a new model: give --config_name.")
        if self.do_regression and self.multi_label:
            raise ValueError("A label is a number (--do_regression) or several classes (--multi_label), not both.")
        if self.grid is not None and self.push_to_hub:
            raise ValueError("--grid trains many models: leave out --push_to_hub, and upload the best one.")
        if self.grid is not None and not self.do_train:
            raise ValueError("--grid trains: leave out --no_do_train.")
        if self.keep_best_only and self.grid is None:
            raise ValueError("--keep_best_only chooses among the models of a --grid.")

    def text_task(self) -> TextTask:
        """The task of data that are not a known benchmark."""
        metric, best = "classification", "accuracy"
        if self.do_regression:
            metric, best = "regression", "mse"
        elif self.multi_label:
            metric, best = "multi_label", "micro_f1"
        return TextTask(
            tuple(self.text_column_names or ("text",)),
            self.label_column_name,
            regression=self.do_regression,
            multi_label=self.multi_label,
            label_delimiter=self.label_delimiter,
            metric=metric,
            best_metric=best,
        )


def _classes(task: TextTask, train_set: Dataset) -> tuple[dict[Any, int], list[str]]:
    """Ids by label, as labels occur in the data, and the names of the labels in the order of their ids."""
    if task.label_names is not None:
        return _named(list(task.label_names))
    if str(getattr(train_set.features[task.label_column], "dtype", "")).startswith(("float", "double")):
        raise ValueError(
            f"The column {task.label_column!r} of the train set holds floating-point numbers: --do_regression "
            "predicts them; classes must be integers or text."
        )
    ids = class_labels(train_set, task.label_column, task.label_delimiter if task.multi_label else None)
    names = [str(label) for label in ids]
    if len(names) < 2 and not task.multi_label:
        raise ValueError(f"The train set has only one label, {names}: there is nothing to learn.")
    if not names:
        raise ValueError("The train set has no label at all.")
    return ids, names


def _named(names: list[str]) -> tuple[dict[Any, int], list[str]]:
    """Ids of named classes, by name and by number."""
    return {name: i for i, name in enumerate(names)} | {i: i for i in range(len(names))}, names


def _has_labels(dataset: Dataset, task: TextTask) -> bool:
    """Whether a test set has labels. Where they are hidden, benchmarks give -1 or no such column."""
    if task.label_column not in dataset.column_names:
        return False
    if hasattr(dataset.features[task.label_column], "feature"):
        return True  # a list
    return not set(dataset.unique(task.label_column)) <= {-1, None}


def _config_and_tokenizer(args: FinetuningArguments) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Of the pretrained model; or those of a new one, with the vocabulary's size and special tokens."""
    remote = {"trust_remote_code": args.trust_remote_code}
    name = args.tokenizer_name or args.model_name_or_path
    tokenizer = AutoTokenizer.from_pretrained(name, **remote)
    if args.model_name_or_path is not None:
        return AutoConfig.from_pretrained(args.model_name_or_path, **remote), tokenizer
    names = {"bos_token_id": "cls_token_id", "pad_token_id": "pad_token_id", "eos_token_id": "sep_token_id"}
    ids = {field_name: getattr(tokenizer, token) for field_name, token in names.items()}
    wanted = "a configuration of this package, such as configs/nystromformer/base-512.json"
    return read_config(args, tokenizer, ids, wanted), tokenizer


def _max_length(requested: int | None, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    longest = min(getattr(config, "max_position_embeddings", None) or 10**9, tokenizer.model_max_length)
    if requested is None:
        if longest >= 10**9:
            raise ValueError("The model does not say how many tokens it takes: give --max_length.")
        return longest
    if requested > longest:
        raise ValueError(f"--max_length must be at most {longest}, which the model takes, but is {requested}.")
    return requested


def evaluate_predictions(task: TextTask, logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Loss and metrics of a task, from logits (rows, classes) and labels (rows,), or (rows, classes) if a row has
    several labels."""
    if task.regression:
        predictions = logits[:, 0]
        loss = F.mse_loss(predictions, labels)
    elif task.multi_label:
        predictions = (logits > 0).long()
        loss = F.binary_cross_entropy_with_logits(logits, labels.float())
        labels = labels.long()
    else:
        predictions = logits.argmax(-1)
        loss = F.cross_entropy(logits, labels)
    metric = load_metric(task.metric)
    return {"loss": float(loss), **metric.compute(predictions=predictions.numpy(), references=labels.numpy())}


def validation_metrics(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Loss and metrics of the validation sets in `results`, by name, or by `{split}/{name}` if there are several."""
    splits = [split for split in results if split.startswith("validation")]
    return {
        name if len(splits) == 1 else f"{split}/{name}": value
        for split in splits
        for name, value in results[split].items()
    }


def write_predictions(path: str | os.PathLike, task: TextTask, logits: Tensor, label_names: Sequence[str]) -> None:
    """Writes a line for each row: its number from 0, a tab, the prediction. This is GLUE's format for submission.

    Args:
        path: the file.
        task: has the names of classes for prediction files. Predictions of STS-B are clipped to its scale, 0 to 5;
            several labels are separated by the task's delimiter.
        logits: (rows, classes), or (rows, 1) for regression.
        label_names: the classes, if the task does not name them.
    """
    names = task.prediction_names or label_names
    if task.regression:
        values = logits[:, 0].clamp(0, 5) if task.metric == "stsb" else logits[:, 0]
        predictions = [f"{value:.6g}" for value in values.tolist()]
    elif task.multi_label:
        chosen = (logits > 0).tolist()
        predictions = [
            task.label_delimiter.join(name for name, there in zip(names, row, strict=True) if there) for row in chosen
        ]
    else:
        predictions = [names[i] for i in logits.argmax(-1).tolist()]
    lines = ["index\tprediction", *(f"{i}\t{prediction}" for i, prediction in enumerate(predictions))]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


class _Finetuning:
    """Model, tokenizer, rows and scores of a run."""

    def __init__(
        self, accelerator: Accelerator, args: FinetuningArguments, task: TextTask, splits: Mapping[str, Dataset]
    ):
        self.accelerator, self.task = accelerator, task
        self.where = {split: f"the {split.replace('_', ' ')} set" for split in splits}
        for split, dataset in splits.items():
            for column in (*task.text_columns, *(() if split.startswith("test") else (task.label_column,))):
                require_column(dataset, column, self.where[split])
        self.config: Any
        self.config, self.tokenizer = _config_and_tokenizer(args)
        self.order: list[int] | None = None  # of the model's classes, if it differs from the task's
        self.ids, self.label_names = self._head(splits["train"]) if args.do_train else self._own_head()
        self.args = replace(args, max_length=_max_length(args.max_length, self.config, self.tokenizer))
        self.labelled = {split for split in splits if not split.startswith("test") or _has_labels(splits[split], task)}
        with accelerator.main_process_first():
            self.rows = {split: self._tokenized(split, dataset) for split, dataset in splits.items()}
        self.model = self._model()
        prepare_model(self.model, args)

    def _model(self) -> PreTrainedModel:
        """A new model, or the pretrained one with a head for the task."""
        args = self.args
        if args.model_name_or_path is None:
            return AutoModelForSequenceClassification.from_config(self.config)
        model, loaded = AutoModelForSequenceClassification.from_pretrained(
            args.model_name_or_path,
            config=self.config,
            ignore_mismatched_sizes=args.ignore_mismatched_sizes,
            output_loading_info=True,
            trust_remote_code=args.trust_remote_code,
        )
        if not args.do_train and loaded["missing_keys"]:
            raise ValueError(
                f"--no_do_train needs a model that was fine-tuned: {args.model_name_or_path} has no "
                f"{', '.join(sorted(loaded['missing_keys']))}."
            )
        return model

    def _head(self, train_set: Dataset) -> tuple[dict[Any, int] | None, list[str]]:
        """Ids by label and the labels' names, which are also set in the configuration."""
        task, config = self.task, self.config
        if task.regression:
            config.num_labels, config.problem_type = 1, "regression"
            return None, []
        ids, names = _classes(task, train_set)
        config.id2label = dict(enumerate(names))
        config.label2id = {name: i for i, name in enumerate(names)}
        config.problem_type = "multi_label_classification" if task.multi_label else "single_label_classification"
        return ids, names

    def _own_head(self) -> tuple[dict[Any, int] | None, list[str]]:
        """The same for a finished model. Its classes may be in another order than the task's."""
        names = [self.config.id2label[i] for i in range(self.config.num_labels)]
        if self.task.regression:
            if len(names) != 1:
                raise ValueError(f"The model tells {len(names)} classes apart, and predicts no number.")
            return None, []
        if self.task.label_names is None:
            ids, _ = _named(names)
            if all(name.lstrip("-").isdecimal() for name in names):  # classes that were numbers
                ids = {name: i for i, name in enumerate(names)} | {int(name): i for i, name in enumerate(names)}
            return ids, names
        wanted = list(self.task.label_names)
        if sorted(names) == sorted(wanted):
            self.order = [names.index(name) for name in wanted]
        elif names != [f"LABEL_{i}" for i in range(len(wanted))]:
            raise ValueError(f"The model tells {names} apart, but the task {wanted}.")
        return _named(wanted)

    def _tokenized(self, split: str, dataset: Dataset) -> Dataset:
        args, task, kind = self.args, self.task, split.split("_")[0]
        if kind == "test":
            dataset = dataset.select(range(min(len(dataset), args.max_predict_samples or len(dataset))))
        else:
            size = args.max_train_samples if kind == "train" else args.max_eval_samples
            dataset = sample(dataset, size, args.seed)
        return classification_dataset(
            dataset,
            self.tokenizer,
            int(args.max_length or 0),
            task.text_columns,
            task.label_column if split in self.labelled else None,
            self.ids,
            task.regression,
            args.truncation_strategy,
            task.label_delimiter if task.multi_label else None,
            args.preprocessing_num_workers,
            not args.overwrite_cache,
            desc=f"Tokenizing {self.where[split]}",
            where=self.where[split],
            apart=getattr(self.config, "dual_encoder", False),
        )

    def loader(self, optimization: OptimizationArguments) -> RowLoader:
        """The training loader."""
        return RowLoader(
            self.rows["train"],
            ClassificationCollator(self.tokenizer),
            optimization.per_device_train_batch_size,
            optimization.gradient_accumulation_steps,
            optimization.tokens_per_step,
            optimization.group_by_length,
            self.args.seed,
            **self.args.loader_options(),
        )

    def objective(self) -> Objective:
        """The objective of the task."""
        if self.task.regression:
            return RegressionObjective()
        return MultiLabelObjective() if self.task.multi_label else ClassificationObjective()

    def score(self, model: nn.Module, split: str, batch_size: int) -> tuple[Tensor, dict[str, float]]:
        """The logits of a split and, if labels are known, loss and metrics."""
        collator = ClassificationCollator(self.tokenizer, with_index=True)
        loader = eval_dataloader(self.rows[split], collator, batch_size, **self.args.loader_options())
        logits = predict(self.accelerator, model, loader, desc=f"Predicting {self.where[split]}")
        logits = logits if self.order is None else logits[:, self.order]
        if split not in self.labelled:
            return logits, {}
        labels = torch.tensor(list(self.rows[split]["labels"]))
        with self.accelerator.main_process_first():
            return logits, evaluate_predictions(self.task, logits, labels)

    def validate(self, model: nn.Module, batch_size: int) -> dict[str, dict[str, float]]:
        """Loss and metrics of every validation set."""
        return {
            split: self.score(model, split, batch_size)[1] for split in self.rows if split.startswith("validation")
        }

    def write_tests(self, model: nn.Module, batch_size: int) -> dict[str, dict[str, float]]:
        """Writes a file of predictions for every test set, and returns the scores of those with labels."""
        found: dict[str, dict[str, float]] = {}
        for split in self.rows:
            if split.startswith("test"):
                logits, figures = self.score(model, split, batch_size)
                if figures:
                    found[split] = figures
                if self.accelerator.is_main_process:
                    name = self.task.prediction_files.get(split, f"{split}_predictions.tsv")
                    write_predictions(Path(self.args.output_dir, name), self.task, logits, self.label_names)
        return found

    def card(self) -> dict[str, Any]:
        """What the model card says of the data, the model it began from and its use."""
        args, sets = self.args, [split for split in self.rows if split.startswith("validation")]
        trained = "Trained" if args.model_name_or_path is None else "Fine-tuned"
        name, config = args.hub_dataset()
        return {
            "data": (
                f"{trained} on {len(self.rows['train']):,} rows of {args.data_source()}, and evaluated on "
                f"{sum(len(self.rows[split]) for split in sets):,} rows of its "
                f"{' and '.join(split.replace('_', ' ') for split in sets)} set{'s' if len(sets) > 1 else ''}."
            ),
            "base_model": args.model_name_or_path,
            "dataset_name": name,
            "dataset_config_name": config,
            "dataset_split": args.validation_split or "validation" if sets == ["validation"] else ", ".join(sets),
            "example": ("Replace this text by your own.", "And this one, too.")
            if len(self.task.text_columns) > 1
            else self.task.example,
        }


def _check_splits(args: FinetuningArguments, splits: Mapping[str, Dataset]) -> None:
    """Raises a ValueError where data are missing."""
    if args.do_train and ("train" not in splits or not any(split.startswith("validation") for split in splits)):
        raise ValueError(
            f"Data to train on and to validate on are needed (--train_file, --validation_file), but given are "
            f"{list(splits) or 'none'}."
        )
    if not args.do_train and not any(split != "train" for split in splits):
        raise ValueError("Data to evaluate on or to predict are needed: --validation_file or --test_file.")


def content_digests(args: FinetuningArguments, splits: Mapping[str, Dataset]) -> dict[str, Any]:
    """Digests of the data as they were read, and of the model that a run begins from."""
    config, tokenizer = _config_and_tokenizer(args)
    start = args.model_name_or_path
    return {
        "data": {split: data_digest(dataset) for split, dataset in splits.items()},
        "model": None if start is None else weights_digest(start, config),
        **model_settings(config, tokenizer),
    }


def finetuning_identity(
    args: FinetuningArguments, optimization: OptimizationArguments, content: Mapping[str, Any]
) -> dict[str, Any]:
    """What the results of a run follow from: its flags, and [`content_digests`]."""
    return {"flags": flags(args, optimization, leave_out=HOUSEKEEPING | PLACES), **content}


def finetune(
    args: FinetuningArguments,
    optimization: OptimizationArguments,
    task: TextTask,
    splits: Mapping[str, Dataset],
    content: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Fine-tunes a pretrained model, or trains a new one, evaluates it, and writes predictions; with `--no_do_train`,
    as it is.

    In `--output_dir` it leaves model and tokenizer, `all_results.json`, `history.jsonl`, the training curve, a model
    card, a prediction file for each test set, and the checkpoints asked for. A run that is ended by a signal
    leaves only its checkpoint, from which it can be resumed.

    Args:
        args: model, lengths, seed and output.
        optimization: optimizer, schedule and length of the run.
        task: what the columns mean.
        splits: `train`, any number of sets to evaluate on that start with `validation`, and of sets to predict that
            start with `test`. A test set with labels is scored, too.
        content: [`content_digests`], where they are known already.

    Returns:
        The loss and metrics of every validation set, and of every test set with labels, by its name, and the figures
        of `train`; after a signal, only those of `train`.

    Raises:
        ValueError: if a split is missing, `--max_length` is more than the model takes, or the data do not fit the
            task; all before anything is trained.
    """
    _check_splits(args, splits)
    if not args.do_train:
        splits = {split: dataset for split, dataset in splits.items() if split != "train"}
    accelerator = start_run(args)
    run = _Finetuning(accelerator, args, task, splits)
    identity = finetuning_identity(args, optimization, content or content_digests(args, splits))
    args, batch_size = run.args, optimization.per_device_eval_batch_size
    if not args.do_train:
        model = accelerator.prepare(run.model)
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
        {"the training data": data_digest(run.rows["train"]), **model_settings(run.config, run.tokenizer)},
    )
    if state.interrupted:
        return {"train": state.figures()}
    metrics = final_scores(accelerator, state, args, scores, goal, save_model)
    results = {"train": state.figures(), **latest, **run.write_tests(state.model, batch_size)}
    reported = {name: value for name, value in metrics.items() if not name.endswith("loss")}
    finish_run(accelerator, state, results, (args, optimization), identity, reported, **run.card())
    return results
