# SPDX-License-Identifier: Apache-2.0
"""Causal language modeling of documents packed into rows."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint import load_tokenizer
from ..data.causal import CausalCollator, causal_dataset, causal_stream, causal_tokenizer
from ..data.classification import require_column
from ..data.loading import TrainingLoader, eval_dataloader
from ..models.configuration_base import BaseConfig
from .identity import data_digest, model_settings, weights_digest
from .language_modeling import (
    Documents,
    LanguageModelingArguments,
    data_card,
    load_weights_from,
    read_config,
    row_length,
    row_loader,
    stream_arguments,
    train_and_score,
)
from .objectives import CausalObjective
from .optimization import OptimizationArguments
from .run import finish_run, prepare_model, prepare_to_evaluate, start_run
from .saving import save_pretrained
from .scores import evaluate

# The default length of rows if the model has no limit, as in Transformers' run_clm.py.
DEFAULT_BLOCK_SIZE = 1024

# `model_max_length` of a tokenizer without a limit, as Transformers writes it.
NO_LIMIT = int(1e30)


@dataclass(kw_only=True)
class CausalArguments(LanguageModelingArguments):
    """The flags of run_clm.py."""

    block_size: int | None = field(
        default=None,
        metadata={
            "help": "Tokens of a row, into which documents are packed; by default the model's maximum, or "
            f"{DEFAULT_BLOCK_SIZE} if it has none."
        },
    )


def _config(args: CausalArguments, tokenizer: PreTrainedTokenizerBase) -> BaseConfig:
    pad = tokenizer.pad_token_id
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        # If eos were the padding token, its embedding would not be trained.
        "pad_token_id": None if pad == tokenizer.eos_token_id else pad,
        "eos_token_id": tokenizer.eos_token_id,
    }
    wanted = "a linear transformer with is_decoder=True, such as configs/linear_transformer/tiny-512-causal.json"
    config = read_config(args, tokenizer, ids, wanted)
    if not config.is_decoder:
        raise ValueError(
            f"{args.config_name or args.model_name_or_path} describes an encoder, which sees the tokens to predict: "
            f"--config_name must name {wanted}."
        )
    return config


def _rows(args: CausalArguments, documents: Dataset, tokenizer: PreTrainedTokenizerBase, what: str) -> Dataset:
    require_column(documents, args.text_column_name, f"the {what} set", flag="--text_column_name")
    return causal_dataset(
        documents,
        tokenizer,
        int(args.block_size or 0),
        text_column=args.text_column_name,
        num_proc=args.preprocessing_num_workers,
        load_from_cache_file=not args.overwrite_cache,
        desc=f"Building the {what} rows",
    )


def _loader(
    args: CausalArguments,
    optimization: OptimizationArguments,
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
) -> tuple[TrainingLoader, str]:
    """The training loader, and the digest of its data."""
    collator = CausalCollator.of(tokenizer)
    if isinstance(documents, IterableDataset):
        stream = causal_stream(
            documents,
            tokenizer,
            collator,
            int(args.block_size or 0),
            args.seed,
            args.text_column_name,
            **stream_arguments(args, optimization),
        )
        return stream, data_digest(documents)
    rows = _rows(args, documents, tokenizer, "training")
    return row_loader(args, optimization, rows, collator), data_digest(rows)


def tokens_per_byte(rows: Dataset) -> float:
    """The number of predicted tokens in rows of [`causal_dataset`], divided by the UTF-8 bytes that they stand for;
    NaN if they stand for none."""
    tokens = num_bytes = 0
    columns = rows.select_columns(["length", "document_starts", "num_bytes"]).with_format("numpy")
    for batch in columns.iter(10_000):
        # The first token of a row or of a document is not predicted.
        tokens += int(sum(batch["length"])) - sum(1 + len(starts) for starts in batch["document_starts"])
        num_bytes += int(sum(batch["num_bytes"]))
    return tokens / num_bytes if num_bytes else math.nan


def held_out_scores(accelerator: Accelerator, model: nn.Module, dataloader: DataLoader) -> dict[str, float]:
    """Loss and accuracy of the next token over a whole data set, perplexity, and bits per byte of its text.

    The perplexity of a token also depends on the tokenizer. Bits per byte compare models with different tokenizers, if
    the tokenizers are lossless. End-of-sequence tokens are predicted, and counted.
    """
    scores = evaluate(accelerator, model, CausalObjective(), dataloader)
    bits = scores["loss"] / math.log(2) * tokens_per_byte(dataloader.dataset)
    return {**scores, "perplexity": math.exp(min(scores["loss"], 700.0)), "bits_per_byte": bits}


def _save(accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase) -> Callable[[nn.Module, Path], None]:
    def save(model: nn.Module, folder: Path) -> None:
        save_pretrained(accelerator, model, tokenizer, folder)

    return save


def train_causal(
    args: CausalArguments, optimization: OptimizationArguments, documents: Documents
) -> dict[str, dict[str, Any]]:
    """Trains a causal language model, from scratch or from given weights, and evaluates it on held-out documents.

    It writes the same files as [`pretrain`]; `pipeline("text-generation")` loads the model.

    Args:
        args: model, data, seed and output.
        optimization: optimizer, schedule and length of the run.
        documents: `train`, which may be a stream, and `validation`, with one document in each row.

    Returns:
        The scores of `validation` ([`held_out_scores`]), and the figures of `train`; after a signal, only those of
        `train`.

    Raises:
        ValueError: before training, if the documents, the tokenizer and the model do not fit together.
    """
    with start_run(args) as accelerator:
        tokenizer = causal_tokenizer(
            load_tokenizer(args.tokenizer_name or args.model_name_or_path, trust_remote_code=args.trust_remote_code)
        )
        config = _config(args, tokenizer)
        longest = config.max_position_embeddings
        length = row_length(
            "--block_size", args.block_size, longest, config, DEFAULT_BLOCK_SIZE, pretrained=args.model_name_or_path
        )
        args = replace(args, block_size=length)
        tokenizer.model_max_length = config.max_position_embeddings or NO_LIMIT
        with accelerator.main_process_first():
            rows = _rows(args, documents["validation"], tokenizer, "validation")
        batch_size, collator = optimization.per_device_eval_batch_size, CausalCollator.of(tokenizer)
        held_out = eval_dataloader(rows, collator, batch_size, **args.loader_options())

        def scores(model: nn.Module) -> dict[str, float]:
            return held_out_scores(accelerator, model, held_out)

        model: PreTrainedModel = (
            AutoModelForCausalLM.from_config(config)
            if args.model_name_or_path is None
            else load_weights_from(AutoModelForCausalLM, args, config)
        )
        prepare_model(model, args)
        accelerator.print(f"{type(model).__name__} of {model.num_parameters():,} parameters")
        identity = {"validation": data_digest(rows)}
        if args.model_name_or_path is not None:
            identity["model"] = weights_digest(args.model_name_or_path, config)
        if not args.do_train:
            results: dict[str, dict[str, Any]] = {"validation": scores(prepare_to_evaluate(accelerator, model))}
            finish_run(accelerator, None, results, (args, optimization), identity, {})
            return results

        with accelerator.main_process_first():
            loader, identity["train"] = _loader(args, optimization, documents["train"], tokenizer)
        return train_and_score(
            accelerator,
            model,
            CausalObjective(),
            loader,
            args,
            optimization,
            scores,
            ("loss", "accuracy", "perplexity", "bits_per_byte"),
            "Training",
            _save(accelerator, tokenizer),
            model_settings(config, tokenizer),
            identity,
            data_card(args, documents, f"rows of {args.block_size:,} tokens"),
        )
