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
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
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
from ..data.loading import eval_dataloader, train_dataloader
from ..data.metrics import load_metric
from .arguments import DataArguments, RunArguments
from .loop import log_figures, save_pretrained, train
from .objectives import ClassificationObjective, RegressionObjective
from .optimization import OptimizationArguments
from .run import finish_run, prepare_model, start_run
from .splits import sample


@dataclass
class FinetuningOptimizationArguments(OptimizationArguments):
    """How a pretrained model is trained on."""

    learning_rate: float = field(default=3e-5, metadata={"help": "Peak learning rate."})


@dataclass(kw_only=True)
class FinetuningArguments(RunArguments, DataArguments):
    """Model, data and output, under the names of Transformers' example scripts."""

    model_name_or_path: str = field(metadata={"help": "Folder or Hub name of the pretrained model."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Another tokenizer than the model's."})
    test_file: list[str] | None = field(default=None, metadata={"help": "Files to write predictions for."})
    text_column_names: list[str] | None = field(
        default=None, metadata={"help": "Column of the text, or the two columns of a pair."}
    )
    label_column_name: str = field(default="label", metadata={"help": "Column of the label."})
    do_regression: bool = field(default=False, metadata={"help": "The label is a number, not a class."})
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens of a row, at most; those the model takes if not given."}
    )
    truncation_strategy: TruncationStrategy = field(
        default="head", metadata={"help": "What is kept of a longer text: its head, its tail, or half of each."}
    )
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Replace a classifier that the model has for other classes."}
    )
    grid: list[str] | None = field(
        default=None, metadata={"help": "Run at each of several values: learning_rate=2e-5,3e-5 seed=0,1,2"}
    )

    def __post_init__(self):
        RunArguments.__post_init__(self)
        DataArguments.__post_init__(self)
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"--max_length must be at least 1, but is {self.max_length}.")
        if self.grid is not None and self.push_to_hub:
            raise ValueError("--grid trains many models: leave out --push_to_hub, and upload the best one.")

    def task(self) -> TextTask:
        """The task of data that are no known benchmark."""
        return TextTask(
            tuple(self.text_column_names or ("text",)),
            self.label_column_name,
            regression=self.do_regression,
            metric="regression" if self.do_regression else "classification",
        )


def _classes(task: TextTask, train_set: Dataset) -> tuple[dict[Any, int], list[str]]:
    """Ids by label, as it may stand in the data, and the labels' names in the order of their ids."""
    if task.label_names is not None:
        names = list(task.label_names)
        return {name: i for i, name in enumerate(names)} | {i: i for i in range(len(names))}, names
    if str(train_set.features[task.label_column].dtype).startswith(("float", "double")):
        raise ValueError(
            f"The column {task.label_column!r} of the train set holds floating-point numbers: --do_regression "
            "predicts them; classes must be integers or text."
        )
    ids = class_labels(train_set, task.label_column)
    names = [str(label) for label in ids]
    if len(names) < 2:
        raise ValueError(f"The train set has one label alone, {names}: there is nothing to tell apart.")
    return ids, names


def _has_labels(dataset: Dataset, task: TextTask) -> bool:
    """Whether a test set says its labels; benchmarks give -1, or no such column, where they are hidden."""
    return task.label_column in dataset.column_names and not set(dataset.unique(task.label_column)) <= {-1, None}


def _max_length(requested: int | None, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> int:
    longest = min(getattr(config, "max_position_embeddings", None) or 10**9, tokenizer.model_max_length)
    if requested is None:
        if longest >= 10**9:
            raise ValueError("The model does not say how many tokens it takes: give --max_length.")
        return longest
    if requested > longest:
        raise ValueError(f"--max_length must be at most {longest}, which the model takes, but is {requested}.")
    return requested


@torch.no_grad()
def predict(accelerator: Accelerator, model: nn.Module, dataloader: DataLoader, desc: str = "Predicting") -> Tensor:
    """The logits of every row, float32 of shape (rows, classes), on all processes and in the data set's order.

    Args:
        accelerator: gathers over the processes.
        model: as prepared by Accelerate, or on the accelerator's device.
        dataloader: from [`eval_dataloader`], not prepared yet; labels are not needed.
        desc: text beside the progress bar.
    """
    order = torch.tensor(list(dataloader.sampler))
    dataloader = accelerator.prepare(dataloader)
    was_training = model.training
    model.eval()
    parts = []
    for batch in tqdm(dataloader, desc=desc, leave=False, disable=not accelerator.is_main_process):
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        # Rows that fill up the last batch of the processes are dropped here.
        parts.append(accelerator.gather_for_metrics(logits.float()).cpu())
    model.train(was_training)
    gathered = torch.cat(parts)
    logits = torch.empty_like(gathered)
    logits[order] = gathered
    return logits


def evaluate_predictions(task: TextTask, logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Loss and metrics of a task from logits (rows, classes) and labels (rows,)."""
    if task.regression:
        predictions = logits[:, 0]
        loss = F.mse_loss(predictions, labels)
    else:
        predictions = logits.argmax(-1)
        loss = F.cross_entropy(logits, labels)
    metric = load_metric(task.metric)
    return {"loss": float(loss), **metric.compute(predictions=predictions.numpy(), references=labels.numpy())}


def validation_metrics(results: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Loss and metrics of the validation sets in `results`, by name; of several, by `{split}/{name}`."""
    splits = [split for split in results if split.startswith("validation")]
    return {
        name if len(splits) == 1 else f"{split}/{name}": value
        for split in splits
        for name, value in results[split].items()
    }


def write_predictions(path: str | os.PathLike, task: TextTask, logits: Tensor, label_names: Sequence[str]) -> None:
    """Writes a line a row, its number from 0, a tab and the prediction: GLUE's format for submission.

    Args:
        path: the file.
        task: says how classes are written. Predictions of STS-B are clipped to its scale, 0 to 5.
        logits: (rows, classes), or (rows, 1) for regression.
        label_names: the classes where the task does not name them.
    """
    if task.regression:
        values = logits[:, 0].clamp(0, 5) if task.metric == "stsb" else logits[:, 0]
        predictions = [f"{value:.6g}" for value in values.tolist()]
    else:
        names = task.prediction_names or label_names
        predictions = [names[i] for i in logits.argmax(-1).tolist()]
    lines = ["index\tprediction", *(f"{i}\t{prediction}" for i, prediction in enumerate(predictions))]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def finetune(
    args: FinetuningArguments,
    optimization: OptimizationArguments,
    task: TextTask,
    splits: Mapping[str, Dataset],
) -> dict[str, dict[str, Any]]:
    """Fine-tunes a pretrained model, evaluates it, and writes predictions.

    In `--output_dir` it leaves model and tokenizer, `all_results.json`, `history.jsonl`, the training curve, a model
    card, a prediction file for each test set, and the checkpoints asked for. A run that SIGTERM ends leaves its
    checkpoint alone, to go on from.

    Args:
        args: model, lengths, seed and output.
        optimization: optimizer, schedule and length of the run.
        task: what the columns mean.
        splits: `train`, any number of sets to evaluate on that start with `validation`, and of sets to predict that
            start with `test`, whose labels are read where they are known: then there are scores of it, too.

    Returns:
        The loss and metrics of every validation set, and of every test set with labels, by its name, and the figures
        of `train`, which stand alone after SIGTERM.

    Raises:
        ValueError: if a split is missing, `--max_length` is more than the model takes, or the data do not fit the
            task; all before anything is trained.
    """
    validation = [split for split in splits if split.startswith("validation")]
    if "train" not in splits or not validation:
        raise ValueError(
            f"Data to train on and to validate on are needed (--train_file, --validation_file), but given are "
            f"{list(splits) or 'none'}."
        )
    accelerator = start_run(args, optimization)

    where = {split: f"the {split.replace('_', ' ')} set" for split in splits}
    for split, dataset in splits.items():
        for column in (*task.text_columns, *(() if split.startswith("test") else (task.label_column,))):
            require_column(dataset, column, where[split])
    ids: dict[Any, int] | None = None
    label_names: list[str] = []
    head: dict[str, Any] = {"num_labels": 1, "problem_type": "regression"}
    if not task.regression:
        ids, label_names = _classes(task, splits["train"])
        head = {
            "id2label": dict(enumerate(label_names)),
            "label2id": {name: i for i, name in enumerate(label_names)},
            "problem_type": "single_label_classification",
        }
    config = AutoConfig.from_pretrained(args.model_name_or_path, **head)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name or args.model_name_or_path)
    max_length = _max_length(args.max_length, config, tokenizer)
    args = replace(args, max_length=max_length)

    sizes = {"train": args.max_train_samples, "validation": args.max_eval_samples}
    labelled = {split for split in splits if not split.startswith("test") or _has_labels(splits[split], task)}
    with accelerator.main_process_first():
        rows = {
            split: classification_dataset(
                sample(dataset, sizes.get(split.split("_")[0]), args.seed),
                tokenizer,
                max_length,
                task.text_columns,
                task.label_column if split in labelled else None,
                ids,
                task.regression,
                args.truncation_strategy,
                args.preprocessing_num_workers,
                desc=f"Tokenizing {where[split]}",
                where=where[split],
            )
            for split, dataset in splits.items()
        }

    model = AutoModelForSequenceClassification.from_pretrained(
        args.model_name_or_path, config=config, ignore_mismatched_sizes=args.ignore_mismatched_sizes
    )
    prepare_model(model, args)
    collator = ClassificationCollator(tokenizer)
    batch_size = optimization.per_device_train_batch_size

    def score(model: nn.Module, split: str) -> tuple[Tensor, dict[str, float]]:
        """The logits of a split and, where labels are known, loss and metrics."""
        loader = eval_dataloader(rows[split], collator, optimization.per_device_eval_batch_size)
        logits = predict(accelerator, model, loader, desc=f"Predicting {where[split]}")
        if split not in labelled:
            return logits, {}
        with accelerator.main_process_first():
            return logits, evaluate_predictions(task, logits, torch.tensor(list(rows[split]["labels"])))

    def held_out(model: nn.Module) -> dict[str, float]:
        return validation_metrics({split: score(model, split)[1] for split in validation})

    state = train(
        accelerator,
        model,
        RegressionObjective() if task.regression else ClassificationObjective(),
        train_dataloader(
            rows["train"],
            collator,
            batch_size,
            batch_size * accelerator.num_processes * optimization.gradient_accumulation_steps,
            args.seed,
            num_workers=args.dataloader_num_workers,
        ),
        optimization,
        args.logging_steps,
        "Fine-tuning",
        args,
        held_out,
        args.eval_every,
    )
    results: dict[str, dict[str, Any]] = {"train": state.figures()}
    if state.interrupted:
        accelerator.print(f"Stopped after step {state.step}; --resume_from_checkpoint latest goes on.")
        return results
    # Saved first: what follows cannot cost the training.
    save_pretrained(accelerator, state.model, tokenizer, args.output_dir)

    for split in rows:
        if split == "train":
            continue
        logits, scores = score(state.model, split)
        if scores:
            results[split] = scores
        if split not in validation and accelerator.is_main_process:
            name = task.prediction_files.get(split, f"{split}_predictions.tsv")
            write_predictions(Path(args.output_dir, name), task, logits, label_names)
    metrics = validation_metrics(results)
    log_figures(accelerator, state, {f"eval_{name}": value for name, value in metrics.items()})
    finish_run(
        accelerator,
        state,
        results,
        (args, optimization),
        metrics={name: value for name, value in metrics.items() if not name.endswith("loss")},
        data=(
            f"Fine-tuned on {len(rows['train']):,} rows of {args.data_source()}, and evaluated on "
            f"{sum(len(rows[split]) for split in validation):,} rows of its "
            f"{' and '.join(split.replace('_', ' ') for split in validation)} set{'s' if len(validation) > 1 else ''}."
        ),
        base_model=args.model_name_or_path,
        dataset_name=args.hub_dataset()[0],
        dataset_config_name=args.hub_dataset()[1],
        dataset_split=args.validation_split if validation == ["validation"] else ", ".join(validation),
        example=("Replace this text by your own.", "And this one, too.") if len(task.text_columns) > 1 else None,
    )
    return results
