# SPDX-License-Identifier: Apache-2.0
"""What masked and causal language modeling share: flags, configurations, data loaders, and the run itself."""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_args

import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint import refuse_adapter
from ..conversion.sources import SOURCE_TYPES
from ..data.loading import Collator, RowLoader, TrainingLoader
from ..data.streams import StreamLoader
from ..models.configuration_base import BaseConfig
from .arguments import DataArguments, RunArguments
from .objectives import Objective
from .optimization import OptimizationArguments
from .run import Scores, final_scores, finish_run, start_trackers, train_model

Documents = Mapping[str, Dataset | IterableDataset]
Config = TypeVar("Config", bound=PretrainedConfig)

_NEXT_FIELD = re.compile(r",(?=\w+=)")  # a comma that does not separate the numbers of a list
_NONE = re.compile(r"\b(none|None|null)\b")
_NUMBERS = {int: "a whole number", float: "a number"}


@dataclass(kw_only=True)
class LanguageModelingArguments(RunArguments, DataArguments):
    """Model, data and output, under the names of Transformers' example scripts."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Initial weights: a model of this package; for run_pretraining.py also a BERT, RoBERTa, "
            "DistilBERT, ELECTRA or ALBERT, with --config_name."
        },
    )
    config_name: str | None = field(default=None, metadata={"help": "Folder, file or Hub name of the configuration."})
    config_overrides: str | None = field(
        default=None, metadata={"help": "Fields of the configuration to change: hidden_size=128,num_landmarks=none"}
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer; the model's own by default."})
    streaming: bool = field(
        default=False,
        metadata={
            "help": "Read the documents while training, without storing them. Evaluations before the end need "
            "--eval_strategy steps."
        },
    )
    shuffle_buffer_size: int = field(
        default=10_000, metadata={"help": "With --streaming: size of the buffer from which rows are drawn at random."}
    )
    validation_split_percentage: float = field(
        default=5.0, metadata={"help": "Share of the documents that is held out if no validation data are given."}
    )
    text_column_name: str = field(default="text", metadata={"help": "Column of the documents."})

    def __post_init__(self):
        if self.streaming and self.eval_strategy == "epoch":
            if self.load_best_model_at_end or self.early_stopping_patience is not None:
                raise ValueError(
                    "--load_best_model_at_end and --early_stopping_patience need evaluations, and the end of an epoch "
                    "of a stream is unknown: give --eval_strategy steps and --eval_steps N."
                )
            self.eval_strategy = "no"
        RunArguments.__post_init__(self)
        DataArguments.__post_init__(self)
        if self.model_name_or_path is None and self.config_name is None:
            raise ValueError("Give --config_name for a new model, or --model_name_or_path to continue with a model.")
        if self.model_name_or_path is None and self.tokenizer_name is None:
            raise ValueError("A new model needs --tokenizer_name; examples/train_tokenizer.py trains one.")
        if not 0 <= self.validation_split_percentage < 100:
            raise ValueError(
                "--validation_split_percentage must lie between 0 and 100, but is "
                f"{self.validation_split_percentage:g}."
            )
        if self.shuffle_buffer_size < 1:
            raise ValueError(f"--shuffle_buffer_size must be at least 1, but is {self.shuffle_buffer_size}.")
        if not self.do_train and self.model_name_or_path is None:
            raise ValueError("--no_do_train evaluates a finished model: give --model_name_or_path.")


class NewModelArguments(Protocol):
    """The flags that [`read_config`] reads."""

    model_name_or_path: str | None
    config_name: str | None
    config_overrides: str | None


def read_config(
    args: NewModelArguments,
    tokenizer: PreTrainedTokenizerBase,
    token_ids: Mapping[str, int | None],
    wanted: str,
) -> BaseConfig:
    """The configuration of the flags, with the vocabulary's size and special tokens.

    Args:
        args: the flags.
        tokenizer: the model's tokenizer.
        token_ids: values of fields such as `bos_token_id`.
        wanted: a description of valid values of --config_name, for a message.
    """
    name = str(args.config_name or args.model_name_or_path)
    if args.model_name_or_path is not None:
        refuse_adapter(args.model_name_or_path)
    config = AutoConfig.from_pretrained(name)
    if not isinstance(config, BaseConfig):
        raise ValueError(f"{name} is a {config.model_type!r} configuration: --config_name must name {wanted}.")
    config = override(config, args.config_overrides)
    if args.model_name_or_path is None:
        config.vocab_size = len(tokenizer)
    elif len(tokenizer) > config.vocab_size:
        # A --config_name, perhaps a recipe's, may have a smaller vocabulary than the weights with their own tokenizer.
        size = getattr(AutoConfig.from_pretrained(args.model_name_or_path), "vocab_size", 0)
        fix = "give the model's own tokenizer, by omitting --tokenizer_name."
        if size >= len(tokenizer):
            fix = f"set --config_overrides vocab_size={size}, that of {args.model_name_or_path}."
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens, but vocab_size is {config.vocab_size}, by {name}: {fix}"
        )
    for field_name, token_id in token_ids.items():
        setattr(config, field_name, token_id)
    return config


def override(config: Config, overrides: str | None) -> Config:
    """The configuration with the fields of --config_overrides, `name=value,name=value`.

    Values are read as Transformers reads them; `none` (or `None`, `null`) and JSON lists are taken, too, for fields
    that may have them.

    Raises:
        ValueError: if there is no such field, or the fields do not fit together.
    """
    if overrides is None:
        return config
    may_be_none = {part.name for part in fields(config) if type(None) in get_args(part.type)}
    try:
        for item in _NEXT_FIELD.split(overrides):
            name, equals, text = item.partition("=")
            if not equals or not hasattr(config, name):
                raise ValueError(f"{item!r} must be a field of {type(config).__name__} with a value, name=value")
            if "," in text and not text.startswith("["):
                raise ValueError(f"write a list as {name}=[{text}], and else name=value,name=value")
            _set_field(config, name, text, may_be_none=name in may_be_none)
    except (AttributeError, ValueError, StrictDataclassError) as error:
        raise ValueError(f"--config_overrides {overrides!r}: {error}.") from error
    return type(config).from_dict(config.to_dict())  # checks the fields together


def _set_field(config: PretrainedConfig, name: str, text: str, may_be_none: bool) -> None:
    """Sets a field to the value that a text stands for; raises ValueError if it stands for none of the field's."""
    value = getattr(config, name)
    is_none = may_be_none and _NONE.fullmatch(text) is not None
    if is_none or text.startswith("[") or isinstance(value, list | None):
        setattr(config, name, _parsed(text))
        return
    try:
        config.update_from_string(f"{name}={text}")
    except ValueError as error:
        if type(value) not in _NUMBERS:
            raise
        expected = _NUMBERS[type(value)] + (" or none" if may_be_none else "")
        raise ValueError(f"{name} must be {expected}, not {text}") from error


def _parsed(text: str) -> Any:
    """None, a number, a list or a name."""
    try:
        return json.loads(_NONE.sub("null", text))
    except ValueError:
        return text


def load_weights_from(auto_class: Any, args: LanguageModelingArguments, config: BaseConfig) -> PreTrainedModel:
    """The model of `--model_name_or_path`.

    Raises:
        ValueError: if it is to be evaluated as it is, and lacks weights.
    """
    with shapes_of_overrides(args, config):
        # Half precision would round most updates away.
        options = {"config": config, "dtype": torch.float32, "output_loading_info": True}
        model, loaded = auto_class.from_pretrained(args.model_name_or_path, **options)
    require_pretrained(args, loaded["missing_keys"])
    return model


@contextmanager
def shapes_of_overrides(args: Any, config: PretrainedConfig) -> Iterator[None]:
    """Says which flag it was if pretrained weights have other shapes because of --config_overrides."""
    try:
        yield
    except RuntimeError as error:
        if args.config_overrides is None or "ignore_mismatched_sizes" not in str(error):
            raise
        command = _lengthening(args.model_name_or_path, config, "N")
        raise ValueError(
            f"--config_overrides {args.config_overrides}: weights of {args.model_name_or_path} have other shapes, see "
            "above. Such fields are for a new model, with --config_name."
            + (f" More positions: {command}" if command else "")
        ) from error


def require_pretrained(args: LanguageModelingArguments, missing: Iterable[str], hint: str = "") -> None:
    """Raises ValueError if a model is to be evaluated as it is, and lacks the weights `missing`. The message ends with
    `hint`."""
    if not args.do_train and (names := sorted(missing)):
        raise ValueError(
            f"--no_do_train needs a model that was pretrained: {args.model_name_or_path} has no {', '.join(names)}."
            f"{hint}"
        )


def row_length(
    flag: str,
    value: int | None,
    longest: int | None,
    config: PretrainedConfig,
    default: int | None = None,
    pretrained: str | None = None,
    usual: int | None = None,
) -> int:
    """The number of tokens of the longest row: `value`; if None, `usual`, but not more than `longest`; if that is
    None, too, `longest`, or else `default`.

    longest: what the model takes; None for any number. pretrained: the name of the model whose weights are taken as
    they are.

    Raises:
        ValueError: if `value` is more than `longest`, or no length is known.
    """
    if value is None and usual is not None:
        value = min(usual, longest or usual)
    if value is None:
        value = default if longest is None else longest
    if value is None:
        raise ValueError(f"The model takes any number of tokens: give the length of rows with {flag}.")
    if longest is not None and value > longest:
        if pretrained is None:
            remedy = f", or give --config_overrides max_position_embeddings={value}"
        elif command := _lengthening(pretrained, config, str(value)):
            remedy = f", or make the model longer first: {command}"
        else:
            remedy = ""
        raise ValueError(
            f"{flag} {value} is more than the {longest} tokens that the model takes: give {flag} {longest} or "
            f"less{remedy}."
        )
    return value


def _lengthening(pretrained: str, config: PretrainedConfig, length: str) -> str | None:
    """The command that gives a pretrained model more positions; None if the model cannot be converted."""
    if config.model_type not in SOURCE_TYPES:
        return None
    family = f" --family {config.model_type}" if isinstance(config, BaseConfig) else ""
    return f"python -m nystrom_models convert {shlex.quote(pretrained)} OUT{family} --max_length {length}"


def loader_arguments(args: RunArguments, optimization: OptimizationArguments) -> dict[str, Any]:
    """Arguments of every loader for training."""
    return {
        "per_device_train_batch_size": optimization.per_device_train_batch_size,
        "gradient_accumulation_steps": optimization.gradient_accumulation_steps,
        **args.loader_options(),
    }


def stream_arguments(args: LanguageModelingArguments, optimization: OptimizationArguments) -> dict[str, Any]:
    """Arguments of a [`StreamLoader`].

    Raises:
        ValueError: if steps should be counted in tokens.
    """
    if optimization.tokens_per_step is not None:
        raise ValueError("--tokens_per_step needs rows that can be counted: omit --streaming.")
    return {"buffer_size": args.shuffle_buffer_size, **loader_arguments(args, optimization)}


def row_loader(
    args: RunArguments, optimization: OptimizationArguments, rows: Dataset, collator: Collator
) -> RowLoader:
    """The training loader for rows that can be counted."""
    return RowLoader(
        rows,
        collator,
        tokens_per_step=optimization.tokens_per_step,
        group_by_length=optimization.group_by_length,
        seed=args.seed,
        **loader_arguments(args, optimization),
    )


def train_and_score(
    accelerator: Accelerator,
    model: PreTrainedModel,
    objective: Objective,
    loader: TrainingLoader,
    args: LanguageModelingArguments,
    optimization: OptimizationArguments,
    scores: Scores,
    metrics: Sequence[str],
    desc: str,
    save_model: Callable[[nn.Module, Path], None],
    settings: Mapping[str, Any],
    identity: Mapping[str, Any],
    card: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """Trains, scores the final model, and writes the files of the run.

    Args:
        metrics: the figures of `scores`. By the first one, models are compared, unless the flags name another.
        identity: digests of the data and of the initial weights.
        card: fields of the model card.
        The others: see [`train_model`].

    Returns:
        The scores of `validation` and the figures of `train`; after a signal, only those of `train`.
    """
    goal = args.goal(metrics[0])
    goal.require(metrics)
    settings = {**settings, "the training data": identity["train"], "the validation data": identity["validation"]}
    if isinstance(loader, StreamLoader):
        # Of a stream, only the first documents are in the digest.
        names = ("text_column_name", "language", "short_seq_prob", "max_train_samples")
        settings["the rows of the stream"] = {name: getattr(args, name) for name in names if hasattr(args, name)}
    start_trackers(accelerator, args, optimization)
    state = train_model(
        accelerator, model, objective, loader, args, optimization, scores, goal, desc, save_model, settings
    )
    if state.interrupted:
        return {"train": state.figures()}
    validation = final_scores(accelerator, state, args, scores, goal, save_model)
    results = {"train": state.figures(), "validation": validation}
    reported = {name: value for name, value in validation.items() if not name.endswith("loss")}
    finish_run(accelerator, state, results, (args, optimization), identity, reported, **card)
    return results


def data_card(args: LanguageModelingArguments, documents: Documents, how: str, held_out: str = "") -> dict[str, Any]:
    """The fields of the model card about the data and the initial model.

    Args:
        args: the flags.
        documents: `train`, which may be a stream, and `validation`.
        how: what it was trained with, such as "masked tokens".
        held_out: further text about the held-out documents.
    """
    train = documents["train"]
    number = f"{len(train):,} documents" if isinstance(train, Dataset) else "a stream of documents"
    name, config = args.hub_dataset()
    # Documents that were held out are of the split for training. A file is of none.
    split = None if name is None else documents["validation"].split
    return {
        "data": f"Pretrained on {number} of {args.data_source()}, with {how}; evaluated on "
        f"{len(documents['validation']):,} documents that were held out{held_out}.",
        "base_model": args.model_name_or_path,
        "dataset_name": name,
        "dataset_config_name": config,
        "dataset_split": str(split or args.validation_split or "validation"),
    }
