# SPDX-License-Identifier: Apache-2.0
"""Pretraining with masked language modeling (MLM) and sentence-order prediction (SOP)."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForPreTraining,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..conversion import convert
from ..conversion.encoders import SOURCE_TYPES
from ..data.classification import require_column
from ..data.loading import RowLoader, TrainingLoader, eval_dataloader
from ..data.masking import PretrainingCollator
from ..data.pretraining import MIN_ORDERED_SHARE, ordered_share, pretraining_dataset
from ..data.streams import pretraining_stream
from ..models.configuration_base import BaseConfig
from .arguments import DataArguments, RunArguments
from .identity import data_digest, model_settings, weights_digest
from .objectives import PretrainingObjective
from .optimization import OptimizationArguments
from .run import final_scores, finish_run, prepare_model, start_run, start_trackers, train_model
from .saving import bare_model, save_pretrained
from .scores import evaluate

# Of the held-out tokens, whatever --mlm_probability says of those to train on: figures of different runs compare.
EVAL_MLM_PROBABILITY = 0.15


@dataclass(kw_only=True)
class PretrainingArguments(RunArguments, DataArguments):
    """Model, data and output, under the names of Transformers' example scripts."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Initial weights: a model of this package, or a BERT or RoBERTa together with --config_name."
        },
    )
    config_name: str | None = field(default=None, metadata={"help": "Folder, file or Hub name of the configuration."})
    config_overrides: str | None = field(
        default=None, metadata={"help": "Fields of the configuration to change: hidden_size=128,num_hidden_layers=2"}
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer; the model's own by default."})
    streaming: bool = field(
        default=False, metadata={"help": "Read the documents while training, without storing them."}
    )
    shuffle_buffer_size: int = field(
        default=10_000, metadata={"help": "With --streaming: size of the buffer from which rows are drawn at random."}
    )
    validation_split_percentage: float = field(
        default=5.0, metadata={"help": "Share of the documents that is held out if no validation data are given."}
    )
    text_column_name: str = field(default="text", metadata={"help": "Column of the documents."})
    max_length: int | None = field(
        default=None, metadata={"help": "Largest number of tokens of a row; the model's maximum by default."}
    )
    short_seq_prob: float = field(
        default=0.1, metadata={"help": "Share of rows that are cut to a random, shorter length."}
    )
    sentence_order: bool = field(
        default=True,
        metadata={"help": "Also predict the order of sentences; --no_sentence_order trains on masked tokens only."},
    )
    mlm_probability: float = field(
        default=0.15,
        metadata={
            "help": "Share of tokens to predict in training; evaluation always uses 0.15, so that runs compare."
        },
    )
    whole_word_mask: bool = field(default=False, metadata={"help": "Mask whole words: all pieces of a word, or none."})
    pad_to_multiple_of: int | None = field(
        default=None, metadata={"help": "Pad batches to a multiple of this length."}
    )

    def __post_init__(self):
        RunArguments.__post_init__(self)
        DataArguments.__post_init__(self)
        if self.model_name_or_path is None and self.config_name is None:
            raise ValueError("Give --config_name for a new model, or --model_name_or_path for one to go on with.")
        if self.model_name_or_path is None and self.tokenizer_name is None:
            raise ValueError("A new model needs --tokenizer_name; examples/train_tokenizer.py trains one.")
        if not 0 <= self.validation_split_percentage < 100:
            raise ValueError(
                "--validation_split_percentage must lie between 0 and 100, but is "
                f"{self.validation_split_percentage:g}."
            )
        if self.streaming and self.eval_strategy == "epoch":
            self.eval_strategy = "no"  # a stream does not tell where its epoch ends
        if not self.do_train and self.model_name_or_path is None:
            raise ValueError("--no_do_train evaluates a finished model: give --model_name_or_path.")

    def row_options(self) -> dict[str, Any]:
        """Arguments of [`pretraining_dataset`] and [`pretraining_stream`]."""
        return {
            "max_length": self.max_length,
            "short_seq_prob": self.short_seq_prob,
            "seed": self.seed,
            "text_column": self.text_column_name,
            "language": self.language or "en",
            "with_word_starts": self.whole_word_mask,
        }

    def collator(self, tokenizer: PreTrainedTokenizerBase, mlm_probability: float) -> PretrainingCollator:
        """What makes batches of rows."""
        return PretrainingCollator(
            tokenizer,
            mlm_probability,
            self.whole_word_mask,
            sentence_order=self.sentence_order,
            pad_to_multiple_of=self.pad_to_multiple_of,
            seed=self.seed,
        )


def _config(args: PretrainingArguments, tokenizer: PreTrainedTokenizerBase) -> BaseConfig:
    name = str(args.config_name or args.model_name_or_path)
    config = AutoConfig.from_pretrained(name)
    if not isinstance(config, BaseConfig):
        raise ValueError(
            f"{name} is a {config.model_type!r} configuration: --config_name must name a Nyströmformer or a "
            "Linformer, such as configs/nystromformer/base-512.json."
        )
    if args.config_overrides is not None:
        try:
            config.update_from_string(args.config_overrides)
        except (AttributeError, ValueError) as error:
            raise ValueError(f"--config_overrides {args.config_overrides!r}: {error}.") from error
        config = type(config).from_dict(config.to_dict())  # checks the fields together
    if args.model_name_or_path is None:
        config.vocab_size = len(tokenizer)
    elif len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens, but the model takes {config.vocab_size}: give the model's "
            "own tokenizer, by leaving out --tokenizer_name."
        )
    for field_name, token in (("bos", "cls"), ("pad", "pad"), ("eos", "sep")):
        if (token_id := getattr(tokenizer, f"{token}_token_id")) is not None:
            setattr(config, f"{field_name}_token_id", token_id)
    return config


def _model(args: PretrainingArguments, config: BaseConfig) -> PreTrainedModel:
    """A new model, one to go on with, or one that is made from a BERT or RoBERTa."""
    if args.model_name_or_path is None:
        return AutoModelForPreTraining.from_config(config)
    source = AutoConfig.from_pretrained(args.model_name_or_path)
    if source.model_type in SOURCE_TYPES:
        return convert(args.model_name_or_path, config)
    model, loaded = AutoModelForPreTraining.from_pretrained(
        args.model_name_or_path, config=config, output_loading_info=True
    )
    if not args.do_train and loaded["missing_keys"]:
        raise ValueError(
            f"--no_do_train needs a model that was pretrained: {args.model_name_or_path} has no "
            f"{', '.join(sorted(loaded['missing_keys']))}."
        )
    return model


def _rows(args: PretrainingArguments, documents: Dataset, tokenizer: PreTrainedTokenizerBase, what: str) -> Dataset:
    require_column(documents, args.text_column_name, f"the {what} documents")
    return pretraining_dataset(
        documents,
        tokenizer,
        num_proc=args.preprocessing_num_workers,
        load_from_cache_file=not args.overwrite_cache,
        desc=f"Building the {what} rows",
        **args.row_options(),
    )


def _check_order(args: PretrainingArguments, share: float) -> str:
    """Says how many rows have a sentence order, and refuses too few: the SOP loss would be about nothing."""
    if not args.sentence_order:
        return "Without sentence order: only masked tokens are predicted"
    if share < MIN_ORDERED_SHARE:
        raise ValueError(
            f"{share:.1%} of the training rows have two sentences or more: there is no sentence order to learn. Give "
            "documents of several sentences, with their punctuation, or train on masked tokens only "
            "(--no_sentence_order)."
        )
    return f"{share:.0%} of the training rows have two sentences or more, and so an order"


def held_out_scores(accelerator: Accelerator, model: nn.Module, dataloader: DataLoader) -> dict[str, float]:
    """MLM loss, accuracy and perplexity, and SOP loss and accuracy, over a whole data set."""
    scores = evaluate(accelerator, model, PretrainingObjective(), dataloader)
    return {**scores, "perplexity": math.exp(min(scores["mlm_loss"], 700.0))}


def _save(
    accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase, sparse: bool
) -> Callable[[nn.Module, Path], None]:
    """Saves the model with the `sparse_prediction` that its configuration came with."""

    def save(model: nn.Module, folder: Path) -> None:
        config = bare_model(accelerator, model).config
        training, config.sparse_prediction = config.sparse_prediction, sparse
        save_pretrained(accelerator, model, tokenizer, folder)
        config.sparse_prediction = training

    return save


def _loader(
    args: PretrainingArguments,
    optimization: OptimizationArguments,
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[TrainingLoader, float, str]:
    """The loader to train by, the share of its rows with a sentence order, and the digest of its data."""
    collator = args.collator(tokenizer, args.mlm_probability)
    options: dict[str, Any] = {
        "per_device_train_batch_size": optimization.per_device_train_batch_size,
        "gradient_accumulation_steps": optimization.gradient_accumulation_steps,
        **args.loader_options(),
    }
    if isinstance(documents, IterableDataset):
        if optimization.tokens_per_step is not None:
            raise ValueError("--tokens_per_step needs rows that can be counted: leave out --streaming.")
        stream = pretraining_stream(
            documents, tokenizer, collator, buffer_size=args.shuffle_buffer_size, **args.row_options(), **options
        )
        first = Dataset.from_list(list(documents.take(100)))
        share = ordered_share(_rows(args, first, tokenizer, "first"))
        return stream, share, data_digest(documents)
    rows = _rows(args, documents, tokenizer, "training")
    loader = RowLoader(
        rows,
        collator,
        tokens_per_step=optimization.tokens_per_step,
        group_by_length=optimization.group_by_length,
        seed=args.seed,
        **options,
    )
    return loader, ordered_share(rows), data_digest(rows)


def pretrain(
    args: PretrainingArguments,
    optimization: OptimizationArguments,
    documents: Mapping[str, Dataset | IterableDataset],
) -> dict[str, dict[str, Any]]:
    """Pretrains a model, from nothing or from given weights, and evaluates it on held-out documents.

    In `--output_dir` it leaves model and tokenizer, `all_results.json`, `history.jsonl`, the training curve, a model
    card, and the checkpoints asked for. A run that is ended by a signal leaves only its checkpoint, from which
    it can be resumed. With `--no_do_train`, the model is evaluated as it is.

    Args:
        args: model, data, seed and output.
        optimization: optimizer, schedule and length of the run.
        documents: `train`, which may be a stream, and `validation`, with a document a row.

    Returns:
        The scores of `validation`, and the figures of `train`; after a signal, only those of `train`.

    Raises:
        ValueError: if the documents, the tokenizer and the model do not fit together, or have no sentence order;
            before anything is trained.
    """
    accelerator = start_run(args)
    tokenizer = AutoTokenizer.from_pretrained(
        args.tokenizer_name or args.model_name_or_path, trust_remote_code=args.trust_remote_code
    )
    config = _config(args, tokenizer)
    args = _with_max_length(args, config)
    tokenizer.model_max_length = config.max_position_embeddings or args.max_length
    held_out = _held_out_loader(accelerator, args, optimization, documents["validation"], tokenizer)

    def scores(model: nn.Module) -> dict[str, float]:
        return held_out_scores(accelerator, model, held_out)

    model = _model(args, config)
    prepare_model(model, args)
    accelerator.print(f"{type(model).__name__} of {model.num_parameters():,} parameters")
    identity = {"validation": data_digest(held_out.dataset)}
    if args.model_name_or_path is not None:
        identity["model"] = weights_digest(args.model_name_or_path, config)
    if not args.do_train:
        results: dict[str, dict[str, Any]] = {"validation": scores(accelerator.prepare(model))}
        finish_run(accelerator, None, results, (args, optimization), identity, {})
        return results

    settings = model_settings(config, tokenizer)
    save_model = _save(accelerator, tokenizer, config.sparse_prediction)
    # Only the logits of masked tokens are computed. How many there are depends on the data, so a compiled model, whose
    # shapes are fixed by its inputs, computes all.
    model.config.sparse_prediction = not args.torch_compile
    with accelerator.main_process_first():
        loader, share, identity["train"] = _loader(args, optimization, documents["train"], tokenizer)
    accelerator.print(_check_order(args, share))
    settings["the training data"] = identity["train"]
    goal, objective = args.goal("mlm_loss"), PretrainingObjective()
    start_trackers(accelerator, args, optimization)
    state = train_model(
        accelerator, model, objective, loader, args, optimization, scores, goal, "Pretraining", save_model, settings
    )
    if state.interrupted:
        return {"train": state.figures()}
    validation = final_scores(accelerator, state, args, scores, goal, save_model)
    results = {"train": state.figures(), "validation": validation}
    reported = {name: value for name, value in validation.items() if not name.endswith("_loss")}
    finish_run(accelerator, state, results, (args, optimization), identity, reported, **_card(args, documents))
    return results


def _with_max_length(args: PretrainingArguments, config: BaseConfig) -> PretrainingArguments:
    """The arguments with a length that the model takes."""
    longest = config.max_position_embeddings
    if args.max_length is None:
        if longest is None:
            raise ValueError("The model takes any number of tokens: say by --max_length how long the rows are to be.")
        return replace(args, max_length=longest)
    if longest is not None and args.max_length > longest:
        raise ValueError(
            f"--max_length {args.max_length} is more than the {longest} tokens that the model takes: lower it, or "
            f"give --config_overrides max_position_embeddings={args.max_length}."
        )
    return args


def _held_out_loader(
    accelerator: Accelerator,
    args: PretrainingArguments,
    optimization: OptimizationArguments,
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
) -> DataLoader:
    """The rows to evaluate on: masked in the same way in every evaluation of every run, whatever is masked in
    training."""
    collator = args.collator(tokenizer, EVAL_MLM_PROBABILITY)
    with accelerator.main_process_first():
        rows = _rows(args, documents, tokenizer, "validation")
        return eval_dataloader(rows, collator, optimization.per_device_eval_batch_size, **args.loader_options())


def _card(args: PretrainingArguments, documents: Mapping[str, Dataset | IterableDataset]) -> dict[str, Any]:
    """What the model card says of the data and of the model that the run began from."""
    train = documents["train"]
    number = f"{len(train):,} documents" if isinstance(train, Dataset) else "a stream of documents"
    data = (
        f"Pretrained on {number} of {args.data_source()}, with masked tokens"
        f"{' and sentence order' if args.sentence_order else ''}; evaluated on "
        f"{len(documents['validation']):,} documents that were held out, of whose tokens "
        f"{EVAL_MLM_PROBABILITY:.0%} are masked."
    )
    name, config = args.hub_dataset()
    return {
        "data": data,
        "base_model": args.model_name_or_path,
        "dataset_name": name,
        "dataset_config_name": config,
    }
