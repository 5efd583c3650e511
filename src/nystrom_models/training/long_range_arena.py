# SPDX-License-Identifier: Apache-2.0
"""The Long Range Arena (Tay et al. 2021, arXiv:2011.04006): small models trained from scratch, or pretrained with
masked tokens on the task's own inputs."""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from accelerate import PartialState
from datasets import Dataset, concatenate_datasets, load_dataset
from transformers import PreTrainedTokenizerBase

from ..data.classification import require_column
from ..data.lra import ARENA_TASKS, expression, generate, load_aan, load_cifar, picture_text, require_counts
from ..models.configuration_base import BaseConfig
from ..models.configuration_linear_transformer import LinearTransformerConfig
from ..models.configuration_linformer import LinformerConfig
from ..models.configuration_nystromformer import NystromformerConfig
from .arguments import DataArguments, RunArguments
from .checkpoints import find_checkpoint, read_progress
from .finetuning import finetune
from .grid import finetune_grid, parse_grid
from .identity import DIVISION, HOUSEKEEPING, PLACES, WARNED, compare, data_digest, flags, run_settings, weights_digest
from .launch import create_accelerator, launched_processes
from .optimization import OptimizationArguments
from .pretraining import PretrainingArguments, pretrain
from .results import read_json, write_json
from .signals import no_further_run
from .splits import load_splits, sample
from .text_classification import TextClassificationArguments

Attention = Literal["softmax", "nystrom", "linformer", "linear"]
ATTENTIONS = get_args(Attention)
CONFIGURATION, PRETRAINING = "configuration", "pretraining"  # folders in --output_dir
_FINISHED = "finished.json"
_LENGTHS = ", ".join(f"{task.max_length} ({name})" for name, task in ARENA_TASKS.items())
IMDB = "stanfordnlp/imdb"
IMDB_ROWS, IMDB_VALIDATION_ROWS = 25_000, 2_000
IMDB_WHERE = "The data set stanfordnlp/imdb of the Hub has them; without --train_file and --test_file it is loaded"


@dataclass(kw_only=True)
class ArenaArguments(TextClassificationArguments):
    """The flags of run_lra.py."""

    # The length is that of the generated data and of the new model.
    not_in_a_grid: ClassVar[frozenset[str]] = TextClassificationArguments.not_in_a_grid | frozenset(
        "max_length task data_dir attention data_seed generated_rows pretrain_on_task pretrain_steps"
        " pretrain_learning_rate pretrain_mlm_probability".split()
    )

    task: Literal["listops", "text", "retrieval", "image", "pathfinder"] = field(metadata={"help": "The task."})
    attention: Attention | None = field(
        default=None,
        metadata={
            "help": "Attention of a new model: Nyström with 64 landmarks, Linformer with k = 256. To change them: "
            "--config_overrides num_landmarks=128, or projected_dim=128."
        },
    )
    max_length: int | None = field(
        default=None,
        metadata={
            "help": "Largest number of tokens of a text, a generated expression and a new model; by default that of "
            f"the task: {_LENGTHS}."
        },
    )
    data_dir: str | None = field(
        default=None,
        metadata={"help": "Folder of data_batch_1.bin and the others (image), or of new_aan_pairs.*.tsv (retrieval)."},
    )
    data_seed: int = field(default=0, metadata={"help": "Seed of generated data, and of the held-out part of IMDB."})
    generated_rows: list[int] | None = field(
        default=None,
        metadata={
            "help": "Numbers of training, validation and test rows of listops and pathfinder; by default 96000 "
            "2000 2000, and 160000 20000 20000."
        },
    )
    pretrain_on_task: bool = field(
        default=False,
        metadata={"help": "First pretrain with masked tokens on the training set's inputs (arXiv:2310.02980)."},
    )
    pretrain_steps: int = field(default=10_000, metadata={"help": "With --pretrain_on_task: number of steps."})
    pretrain_learning_rate: float = field(
        default=1e-3, metadata={"help": "With --pretrain_on_task: peak learning rate."}
    )
    pretrain_mlm_probability: float = field(
        default=0.15, metadata={"help": "With --pretrain_on_task: share of tokens to predict."}
    )

    def __post_init__(self):
        task, start = ARENA_TASKS[self.task], self.model_name_or_path
        if self.config_name is not None and (
            self.attention is None or not self._is_own(self.config_name, CONFIGURATION)
        ):
            raise ValueError(
                "run_lra.py makes the model by --attention: leave out --config_name, and change its fields by "
                "--config_overrides."
            )
        if self.model_name_or_path is None and self.config_name is None:
            if self.attention is None:
                raise ValueError(f"A new model needs --attention: one of {', '.join(ATTENTIONS)}.")
            self.config_name = self.tokenizer_name = str(Path(self.output_dir, CONFIGURATION))
        elif self.attention is not None and self.config_name is None and not self.pretrain_on_task:
            raise ValueError(
                "--attention is that of a new model: leave it out with --model_name_or_path, or train a new model."
            )
        super().__post_init__()
        if self.max_length is None:
            self.max_length = task.max_length
        if task.fixed_length and self.max_length != task.max_length:
            raise ValueError(
                f"A picture has {task.max_length} pixels: leave out --max_length with --task {self.task}."
            )
        if self.text_column_names is not None or self.label_column_name != "label":
            raise ValueError(
                f"--task {self.task} sets the columns: leave out --text_column_names and --label_column_name."
            )
        if self.do_regression or self.multi_label:
            raise ValueError(f"--task {self.task} has classes: leave out --do_regression and --multi_label.")
        if self.generated_rows is not None:
            if task.generated is None:
                raise ValueError(f"--generated_rows is for listops and pathfinder, not for --task {self.task}.")
            if len(self.generated_rows) != 3 or min(self.generated_rows) < 1:
                raise ValueError("--generated_rows takes three numbers, such as 96000 2000 2000.")
        if self.data_dir is not None and self.task not in ("image", "retrieval"):
            raise ValueError(f"--data_dir holds the files of image or retrieval, not of --task {self.task}.")
        if self.task != "text" and (self.train_file or self.validation_file or self.test_file or self.dataset_name):
            raise ValueError(f"--task {self.task} sets the data: leave out --dataset_name and files.")
        if self.validation_split is not None:
            raise ValueError(f"--task {self.task} sets its validation set: leave out --validation_split.")
        if self.pretrain_on_task and self.config_name is None and not self._is_own(start, PRETRAINING):
            raise ValueError("--pretrain_on_task starts from a new model: leave out --model_name_or_path.")
        if self.pretrain_steps < 1:
            raise ValueError(f"--pretrain_steps must be at least 1, but is {self.pretrain_steps}.")

    def _is_own(self, place: str | None, name: str) -> bool:
        """Whether a place is this folder in --output_dir, or in that of the grid to which the run belongs."""
        output = Path(self.output_dir).absolute()
        own = [output, output.parent] if "=" in output.name else [output]
        return place is not None and Path(place).absolute() in (folder / name for folder in own)

    def data_source(self) -> str:
        return ARENA_TASKS[self.task].title

    def hub_dataset(self) -> tuple[str | None, str | None]:
        if self.task == "text" and not self.train_file:
            return self.dataset_name or IMDB, self.dataset_config_name
        return None, None


def arena_config(task: str, attention: str, tokenizer: PreTrainedTokenizerBase, max_length: int) -> BaseConfig:
    """The model of table 3 in the Nyströmformer paper: 2 layers of 64, 2 heads, feed-forward layers of 128, pre-norm,
    mean pooling; the sizes of the authors' code (https://github.com/mlpen/Nystromformer, LRA/code/lra_config.py).

    Args:
        task: of [`ARENA_TASKS`]. The model for "retrieval" reads two texts separately.
        attention: "softmax", "nystrom" (64 landmarks and a convolution of 35), "linformer" (k = 256, E = F in each
            layer) or "linear" (elu + 1).
        tokenizer: of the task.
        max_length: the longest sequence.
    """
    label_names = ARENA_TASKS[task].text_task.label_names or ()
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "hidden_act": "gelu",
        "layer_norm_position": "pre",
        "classifier_pooling": "mean",
        "classifier_activation": "relu",
        "dual_encoder": task == "retrieval",
        "max_position_embeddings": max_length,
        "type_vocab_size": 1,
        # About PyTorch's default for layers of this width.
        "initializer_range": 0.07,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "eos_token_id": None,
        "id2label": dict(enumerate(label_names)),
        "label2id": {name: number for number, name in enumerate(label_names)},
    }
    if attention == "softmax":
        return NystromformerConfig(**common | {"num_landmarks": None, "conv_kernel_size": None})
    if attention == "nystrom":
        return NystromformerConfig(num_landmarks=64, conv_kernel_size=35, **common)
    if attention == "linformer":
        return LinformerConfig(projected_dim=min(256, max_length), share_projection="key_value", **common)
    if attention == "linear":
        return LinearTransformerConfig(feature_map="elu", attention_probs_dropout_prob=0.0, **common)
    raise ValueError(f"attention={attention!r} is unknown: use one of {', '.join(ATTENTIONS)}.")


def load_arena_task(args: ArenaArguments) -> dict[str, Dataset]:
    """`train`, `validation` and `test` of a task, generated or loaded; without `train` if nothing is trained.

    Raises:
        FileNotFoundError, ValueError: if files are missing, or are not those of the task.
    """
    assert args.max_length is not None
    task, workers = ARENA_TASKS[args.task], args.preprocessing_num_workers
    with PartialState().main_process_first(), _naming_the_flag(args.task):
        if task.generated is not None:
            sizes = dict(zip(("train", "validation", "test"), args.generated_rows or task.generated, strict=True))
            draw: Any = picture_text
            options: dict[str, int] = {}
            if args.task == "listops":
                # At least a quarter of the model's length: from 500 to 2,000 tokens in the Long Range Arena.
                draw, options = expression, {"min_length": args.max_length // 4, "max_length": args.max_length}
            names = task.text_task.label_names or ()
            return generate(draw, sizes, args.data_seed, names, workers, args.cache_dir, **options)
        if args.task == "image":
            return load_cifar(args.data_dir, args.cache_dir, workers)
        if args.task == "retrieval":
            return load_aan(args.data_dir, args.max_length, args.cache_dir)
        return _load_reviews(args)


@contextmanager
def _naming_the_flag(task: str) -> Iterator[None]:
    """If the Hub cannot be reached, says which flag gives the files."""
    flag = {"text": "--train_file and --test_file", "image": "--data_dir"}.get(task)
    try:
        yield
    except ConnectionError as error:
        if flag is None or type(error) is not ConnectionError:  # such as that to a process
            raise
        raise ConnectionError(f"{error}. With {flag}, files are read instead.") from error


def _load_reviews(args: ArenaArguments) -> dict[str, Dataset]:
    """IMDB. It has no validation set: part of the training set is held out, unless there is a file."""
    if args.train_file or args.validation_file or args.test_file:
        files = {"train": args.train_file, "validation": args.validation_file, "test": args.test_file}
        splits = load_splits(files, args.cache_dir)
    else:
        found = load_dataset(args.dataset_name or IMDB, args.dataset_config_name, cache_dir=args.cache_dir)
        splits = {split: found[split] for split in ("train", "test")}
    for split in ("train", "test"):
        if split in splits and (split == "test" or "validation" not in splits):
            require_column(splits[split], "label", f"the {split} set of IMDB", values=False)
            require_counts(splits[split], "label", IMDB_ROWS, f"the {split} set of IMDB", IMDB_WHERE)
    if "validation" not in splits and "train" in splits:
        held_out = len(splits["train"]) * IMDB_VALIDATION_ROWS // IMDB_ROWS
        parts = splits["train"].train_test_split(test_size=held_out, seed=args.data_seed)
        splits |= {"train": parts["train"], "validation": parts["test"]}
    return splits


def _write_configuration(args: ArenaArguments) -> None:
    """Writes the configuration and the tokenizer of a new model."""
    assert args.max_length is not None and args.attention is not None
    state = PartialState()
    if state.is_main_process:
        tokenizer = ARENA_TASKS[args.task].tokenizer(args.max_length)
        folder = str(args.config_name)
        arena_config(args.task, args.attention, tokenizer, args.max_length).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    state.wait_for_everyone()


def _documents(args: ArenaArguments, dataset: Dataset) -> Dataset:
    """The inputs of rows, each text by itself."""
    columns = ARENA_TASKS[args.task].text_task.text_columns
    parts = [
        dataset.select_columns(column).rename_columns({column: "text"} if column != "text" else {})
        for column in columns
    ]
    return concatenate_datasets(parts)


def _pretrain(
    args: ArenaArguments, optimization: OptimizationArguments, splits: Mapping[str, Dataset]
) -> dict[str, dict[str, Any]]:
    """Pretrains with masked tokens on the inputs of the training set, in a separate folder. Returns the results, or
    those of a finished pretraining with the same flags and data; after a signal, only the figures of `train`."""
    shared = {f.name: getattr(args, f.name) for part in (RunArguments, DataArguments) for f in fields(part)}
    # Flags of data, evaluation and upload are meant for the task.
    own = {f.name for f in fields(DataArguments)} - {"max_train_samples", "max_eval_samples"}
    own -= {"preprocessing_num_workers", "cache_dir", "overwrite_cache"}
    own |= {"eval_strategy", "eval_steps", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"}
    own |= {"early_stopping_patience", "early_stopping_threshold", "push_to_hub", "hub_model_id", "hub_strategy"}
    latest = args.resume_from_checkpoint is not None
    run_args = PretrainingArguments(
        **{name: value for name, value in shared.items() if name not in own}
        | {
            "output_dir": str(Path(args.output_dir, PRETRAINING)),
            "config_name": args.config_name,
            "config_overrides": args.config_overrides,
            "tokenizer_name": args.tokenizer_name,
            "max_length": args.max_length,
            "eval_strategy": "no",
            "resume_from_checkpoint": "latest" if latest else None,
            "sentence_order": False,
            "short_seq_prob": 0.0,
            "mlm_probability": args.pretrain_mlm_probability,
        }
    )
    run_optimization = replace(
        optimization,
        max_train_steps=args.pretrain_steps,
        learning_rate=args.pretrain_learning_rate,
        num_warmup_steps=None,
        warmup_ratio=0.1,
    )
    documents = {
        split: _documents(args, sample(splits[split], size, args.seed))
        for split, size in (("train", args.max_train_samples), ("validation", args.max_eval_samples))
    }
    model = read_json(Path(str(run_args.config_name), "config.json"))
    rows = math.prod(getattr(optimization, name) for name in DIVISION) * launched_processes()[0]
    identity = {
        "flags": flags(run_args, run_optimization, leave_out=HOUSEKEEPING.union(PLACES, DIVISION)),
        "rows of a step": rows if optimization.tokens_per_step is None else None,
        "model": model,
        "data": {split: data_digest(dataset) for split, dataset in documents.items()},
    }
    folder = run_args.output_dir
    marker = Path(folder, _FINISHED)
    saved = read_json(marker)
    # The weights may be those of another pretraining, which was killed.
    if saved is not None and saved["identity"] == identity and saved.get("weights") == weights_digest(folder, model):
        return saved["results"]
    checkpoint = find_checkpoint(run_args)
    if checkpoint is not None and (steps := read_progress(checkpoint)["step"]) > args.pretrain_steps:
        raise ValueError(
            f"{checkpoint} has taken {steps:,} steps, more than --pretrain_steps {args.pretrain_steps}: give at least "
            f"--pretrain_steps {steps}, or begin a new run in another --output_dir, without --resume_from_checkpoint."
        )
    results = pretrain(replace(run_args, max_train_samples=None, max_eval_samples=None), run_optimization, documents)
    if "validation" in results and PartialState().is_main_process:
        write_json(marker, {"identity": identity, "weights": weights_digest(folder, model), "results": results})
    PartialState().wait_for_everyone()
    return results


def _check_pretraining(args: ArenaArguments, optimization: OptimizationArguments) -> None:
    """Refuses to resume a run that began with other flags, before another pretraining replaces its own."""
    left_out = {"versions", *(() if args.grid is None else parse_grid(args.grid, args, optimization)), *WARNED}
    folders = [Path(args.output_dir)] if args.grid is None else sorted(Path(args.output_dir).glob("*=*"))
    for folder in folders:
        checkpoint = find_checkpoint(replace(args, grid=None, keep_best_only=False, output_dir=str(folder)))
        if checkpoint is not None:
            current = {name: value for name, value in run_settings(args, optimization).items() if name not in left_out}
            saved = read_progress(checkpoint)["settings"]
            compare({name: saved.get(name) for name in current}, json.loads(json.dumps(current)), str(checkpoint))


def train_arena(args: ArenaArguments, optimization: OptimizationArguments) -> dict[str, Any]:
    """Trains a model on a task, evaluates it on validation and test set, and writes the files of [`finetune`].

    With `--pretrain_on_task`, the model is first pretrained in the folder `pretraining` of `--output_dir`; all seeds
    of a grid start from this model. A finished pretraining is not repeated.

    Returns:
        The figures of `all_results.json`; after a signal, only those of `train`.
    """
    create_accelerator(args.mixed_precision)  # the processes find each other before they divide the work on the data
    splits: Mapping[str, Dataset] = load_arena_task(args)
    if args.model_name_or_path is None:
        _write_configuration(args)
    if args.pretrain_on_task:
        if args.resume_from_checkpoint is not None:
            _check_pretraining(args, optimization)
        results = _pretrain(args, optimization, splits)
        if no_further_run(results):
            return {"train": results["train"]}
        start = str(Path(args.output_dir, PRETRAINING))
        args = replace(args, model_name_or_path=start, config_name=None, config_overrides=None)
    run = finetune if args.grid is None else finetune_grid
    return run(args, optimization, ARENA_TASKS[args.task].text_task, splits)
