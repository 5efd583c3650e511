# SPDX-License-Identifier: Apache-2.0
"""Pretraining with masked language modeling (MLM) and sentence-order prediction (SOP)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
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
from ..data.loading import eval_dataloader, stream_dataloader, train_dataloader
from ..data.pretraining import PretrainingCollator, pretraining_dataset, pretraining_stream
from ..models.configuration_base import BaseConfig
from .arguments import DataArguments, RunArguments
from .loop import evaluate, log_figures, save_pretrained, train
from .objectives import PretrainingObjective
from .optimization import OptimizationArguments
from .run import finish_run, prepare_model, start_run


@dataclass(kw_only=True)
class PretrainingArguments(RunArguments, DataArguments):
    """Model, data and output, under the names of Transformers' example scripts."""

    model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Weights to begin with, of this package's families, or of BERT or RoBERTa with --config_name."
        },
    )
    config_name: str | None = field(default=None, metadata={"help": "Folder, file or Hub name of the configuration."})
    config_overrides: str | None = field(
        default=None, metadata={"help": "Fields to change in it: hidden_size=128,num_hidden_layers=2"}
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer; that of the model if not given."})
    streaming: bool = field(default=False, metadata={"help": "Read the documents while training, in their order."})
    shuffle_buffer_size: int = field(
        default=10_000, metadata={"help": "With --streaming, examples are drawn at random from so many."}
    )
    validation_split_percentage: float = field(
        default=5.0, metadata={"help": "Documents held out where there are none to validate on."}
    )
    text_column_name: str = field(default="text", metadata={"help": "Column of the documents."})
    max_length: int | None = field(
        default=None, metadata={"help": "Tokens of an example, at most; those the model takes if not given."}
    )
    short_seq_prob: float = field(default=0.1, metadata={"help": "Share of examples that are shorter at random."})
    mlm_probability: float = field(default=0.15, metadata={"help": "Share of tokens to predict."})
    whole_word_mask: bool = field(default=False, metadata={"help": "Mask all pieces of a word or none."})
    pad_to_multiple_of: int | None = field(default=None, metadata={"help": "Round the length of a batch up."})

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
    if args.model_name_or_path is None:
        return AutoModelForPreTraining.from_config(config)
    source = AutoConfig.from_pretrained(args.model_name_or_path)
    if source.model_type in SOURCE_TYPES:
        return convert(args.model_name_or_path, config)
    return AutoModelForPreTraining.from_pretrained(args.model_name_or_path, config=config)


def _examples(
    args: PretrainingArguments, documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase, what: str
) -> Dataset | IterableDataset:
    options: dict[str, Any] = {
        "max_length": args.max_length,
        "short_seq_prob": args.short_seq_prob,
        "seed": args.seed,
        "text_column": args.text_column_name,
    }
    if isinstance(documents, IterableDataset):
        return pretraining_stream(documents, tokenizer, buffer_size=args.shuffle_buffer_size, **options)
    require_column(documents, args.text_column_name, f"the {what} documents")
    return pretraining_dataset(
        documents, tokenizer, num_proc=args.preprocessing_num_workers, desc=f"Building the {what} examples", **options
    )


def held_out_scores(accelerator: Accelerator, model: nn.Module, dataloader: DataLoader) -> dict[str, float]:
    """MLM loss, accuracy and perplexity, and SOP loss and accuracy, over a whole data set."""
    scores = evaluate(accelerator, model, PretrainingObjective(), dataloader)
    return {**scores, "perplexity": math.exp(min(scores["mlm_loss"], 700.0))}


def pretrain(
    args: PretrainingArguments,
    optimization: OptimizationArguments,
    documents: Mapping[str, Dataset | IterableDataset],
) -> dict[str, dict[str, Any]]:
    """Pretrains a model, from nothing or from given weights, and evaluates it on held-out documents.

    In `--output_dir` it leaves model and tokenizer, `all_results.json`, `history.jsonl`, the training curve, a model
    card, and the checkpoints asked for. A run that SIGTERM ends leaves its checkpoint alone, to go on from.

    Args:
        args: model, data, seed and output.
        optimization: optimizer, schedule and length of the run.
        documents: `train`, which may be a stream, and `validation`, with a document a row.

    Returns:
        The scores of `validation`, and the figures of `train`, which stand alone after SIGTERM.

    Raises:
        ValueError: if the documents, the tokenizer and the model do not fit together; before anything is trained.
    """
    accelerator = start_run(args, optimization)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name or args.model_name_or_path)
    config = _config(args, tokenizer)
    longest = config.max_position_embeddings
    if args.max_length is None:
        args.max_length = longest
    elif args.max_length > longest:
        raise ValueError(
            f"--max_length {args.max_length} is more than the {longest} tokens that the model takes: lower it, or "
            f"give --config_overrides max_position_embeddings={args.max_length}."
        )
    tokenizer.model_max_length = longest
    with accelerator.main_process_first():
        examples = {what: _examples(args, rows, tokenizer, what) for what, rows in documents.items()}

    model = _model(args, config)
    prepare_model(model, args)
    # Logits at the tokens to predict alone; how many those are is data, for which a compiled model has no shape.
    sparse = config.sparse_prediction
    model.config.sparse_prediction = not args.torch_compile
    accelerator.print(f"{type(model).__name__} of {model.num_parameters():,} parameters")
    collator = PretrainingCollator(
        tokenizer,
        args.mlm_probability,
        args.whole_word_mask,
        pad_to_multiple_of=args.pad_to_multiple_of,
        seed=args.seed,
    )
    batch_size, workers = optimization.per_device_train_batch_size, args.dataloader_num_workers
    if isinstance(examples["train"], IterableDataset):
        loader = stream_dataloader(examples["train"], collator, batch_size, num_workers=workers)
    else:
        total = batch_size * accelerator.num_processes * optimization.gradient_accumulation_steps
        loader = train_dataloader(examples["train"], collator, batch_size, total, args.seed, num_workers=workers)
    # Held-out examples are masked the same in every evaluation.
    held_out = accelerator.prepare(
        eval_dataloader(
            examples["validation"],
            PretrainingCollator(tokenizer, args.mlm_probability, args.whole_word_mask, seed=args.seed),
            optimization.per_device_eval_batch_size,
        )
    )
    state = train(
        accelerator,
        model,
        PretrainingObjective(),
        loader,
        optimization,
        args.logging_steps,
        "Pretraining",
        args,
        evaluation=lambda model: held_out_scores(accelerator, model, held_out),
        eval_every=args.eval_every,
    )
    results: dict[str, dict[str, Any]] = {"train": state.figures()}
    if state.interrupted:
        accelerator.print(f"Stopped after step {state.step}; --resume_from_checkpoint latest goes on.")
        return results
    model.config.sparse_prediction = sparse
    # Saved first: what follows cannot cost the training.
    save_pretrained(accelerator, state.model, tokenizer, args.output_dir)

    results["validation"] = held_out_scores(accelerator, state.model, held_out)
    log_figures(accelerator, state, {f"eval_{name}": value for name, value in results["validation"].items()})
    num_documents = len(documents["train"]) if isinstance(documents["train"], Dataset) else None
    finish_run(
        accelerator,
        state,
        results,
        (args, optimization),
        metrics={name: value for name, value in results["validation"].items() if not name.endswith("_loss")},
        data=(
            f"Pretrained on {f'{num_documents:,} documents' if num_documents else 'a stream of documents'} of "
            f"{args.data_source()}, with masked tokens and sentence order; evaluated on "
            f"{len(documents['validation']):,} documents that were held out."
        ),
        base_model=args.model_name_or_path,
        dataset_name=args.hub_dataset()[0],
        dataset_config_name=args.hub_dataset()[1],
    )
    return results
