# SPDX-License-Identifier: Apache-2.0
"""Pretraining with masked language modeling (MLM) and sentence-order prediction (SOP)."""

import math
import os
from collections.abc import Callable
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
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..checkpoint import load_tokenizer
from ..conversion import convert
from ..data.classification import require_column
from ..data.loading import TrainingLoader, eval_dataloader
from ..data.masking import PretrainingCollator
from ..data.pretraining import MIN_ORDERED_SHARE, ordered_share, pretraining_dataset
from ..data.special_tokens import Template
from ..data.streams import pretraining_stream
from ..data.unknown_text import unknown_characters
from ..models.configuration_base import BaseConfig
from .distillation import ScoresBesideTeacher, TeacherArguments, with_teacher
from .identity import data_digest, model_settings, weights_digest
from .language_modeling import (
    Documents,
    LanguageModelingArguments,
    data_card,
    read_config,
    require_pretrained,
    row_length,
    row_loader,
    stream_arguments,
    train_and_score,
)
from .lora import LoraArguments, add_lora
from .objectives import Objective, PretrainingObjective, serves_sentence_order
from .optimization import OptimizationArguments
from .run import finish_run, prepare_model, prepare_to_evaluate, start_run
from .saving import bare_model, save_pretrained
from .scores import evaluate
from .sharding import SHARDED
from .splits import first_documents
from .teacher import Teacher

# Share of held-out tokens that are masked, whatever --mlm_probability is, so that runs can be compared.
EVAL_MLM_PROBABILITY = 0.15


@dataclass(kw_only=True)
class PretrainingArguments(LoraArguments, TeacherArguments, LanguageModelingArguments):
    """The flags of run_pretraining.py."""

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
        LanguageModelingArguments.__post_init__(self)
        TeacherArguments.__post_init__(self)
        LoraArguments.__post_init__(self)
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise ValueError(f"--pad_to_multiple_of must be at least 1, but is {self.pad_to_multiple_of}.")
        if self.lora_r is not None and self.model_name_or_path is None:
            raise ValueError("--lora_r needs a trained model: give --model_name_or_path.")

    def row_options(self) -> dict[str, Any]:
        """Arguments of [`pretraining_dataset`] and [`pretraining_stream`]."""
        return {
            "max_length": self.max_length,
            "short_seq_prob": self.short_seq_prob,
            "seed": self.seed,
            "text_column": self.text_column_name,
            "language": self.language or "en",
            "with_word_starts": self.whole_word_mask,
            "sentence_order": self.sentence_order,
        }

    def collator(self, tokenizer: PreTrainedTokenizerBase, mlm_probability: float) -> PretrainingCollator:
        """The collator of these rows."""
        return PretrainingCollator(
            tokenizer,
            mlm_probability,
            self.whole_word_mask,
            sentence_order=self.sentence_order,
            pad_to_multiple_of=self.pad_to_multiple_of,
            seed=self.seed,
        )


def _config(args: PretrainingArguments, tokenizer: PreTrainedTokenizerBase) -> BaseConfig:
    names = {"bos_token_id": "cls_token_id", "pad_token_id": "pad_token_id", "eos_token_id": "sep_token_id"}
    ids = {field_name: getattr(tokenizer, name) for field_name, name in names.items()}
    known = {field_name: token_id for field_name, token_id in ids.items() if token_id is not None}
    wanted = "an encoder of this package, such as configs/nystromformer/base-512.json"
    config = read_config(args, tokenizer, known, wanted)
    if config.is_decoder:
        raise ValueError(
            f"{args.config_name or args.model_name_or_path} describes a causal model, in which a masked token sees "
            f"only those before it: train it by run_clm.py, or set --config_name to {wanted}."
        )
    return config


def read_model_inputs(
    args: PretrainingArguments,
) -> tuple[PretrainingArguments, BaseConfig, PreTrainedTokenizerBase]:
    """The flags, with the length of rows if they give none, the configuration, and the tokenizer.

    Raises:
        ValueError: if they do not fit together.
    """
    tokenizer = load_tokenizer(
        args.tokenizer_name or args.model_name_or_path, trust_remote_code=args.trust_remote_code
    )
    config = _config(args, tokenizer)
    length = row_length("--max_length", args.max_length, config.max_position_embeddings, config)
    tokenizer.model_max_length = config.max_position_embeddings or length
    return replace(args, max_length=length), config, tokenizer


def _model(args: PretrainingArguments, config: BaseConfig) -> PreTrainedModel:
    """A new model, a model to continue with, or one converted from another architecture."""
    if args.model_name_or_path is None:
        return AutoModelForPreTraining.from_config(config)
    model, report = convert(args.model_name_or_path, config, head="ForPreTraining", return_report=True, compare=False)
    if AutoConfig.from_pretrained(args.model_name_or_path).model_type == config.model_type:
        words = [name for name in report.new if not serves_sentence_order(name)]
        hint = "" if words else " --no_sentence_order scores masked tokens alone."
        require_pretrained(args, report.new if args.sentence_order else words, hint)
    return model.float()  # half precision would round most updates away


def _teacher(
    accelerator: Accelerator,
    args: PretrainingArguments,
    tokenizer: PreTrainedTokenizerBase,
    identity: dict[str, str],
) -> Teacher | None:
    """The teacher, if one is given. It is printed, and its digest added to the identity of the run."""
    if args.teacher_model_name_or_path is None:
        return None
    with_logits = bool(args.alpha_ce) or not args.do_train
    teacher = Teacher(args.teacher_model_name_or_path, tokenizer, with_logits)
    identity["teacher"] = teacher.digest
    _describe_teacher(accelerator, teacher, args)
    return teacher


def _taught_by(args: PretrainingArguments) -> str:
    """A sentence for the model card about the teacher, without folders of this machine; empty if there is none."""
    name = args.teacher_model_name_or_path
    if name is None:
        return ""
    name = Path(name).resolve().name if os.path.isdir(name) else name
    parts = [f"its attention for {args.attention_matching_steps:,} steps"] if args.attention_matching_steps else []
    parts += ["its predictions of masked tokens"] if args.alpha_ce else []
    parts += ["its hidden states"] if args.alpha_mse or args.alpha_cos else []
    return f" The teacher was {name}: the model was trained to match {', '.join(parts)}."


def _masked_example(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """A text with a masked token for the model card; None for its own one, which must be in known characters."""
    if unknown_characters(tokenizer, ["One is missing here."])[0] < 0.5:
        return None
    known = [token for token in range(len(tokenizer)) if token not in tokenizer.all_special_ids]
    text = tokenizer.decode(known[:8])
    return f"{text}{tokenizer.mask_token}{text}"


def _check_padding(args: PretrainingArguments, config: BaseConfig) -> None:
    """Raises ValueError if padding would make rows longer than the model takes."""
    longest, multiple = config.max_position_embeddings, args.pad_to_multiple_of
    assert args.max_length is not None
    if multiple is not None and longest is not None and -(-args.max_length // multiple) * multiple > longest:
        raise ValueError(
            f"--pad_to_multiple_of {multiple} pads rows of --max_length {args.max_length} to more than the model's "
            f"{longest} tokens: use --max_length {longest // multiple * multiple}, or another multiple."
        )


def _check_types(args: PretrainingArguments, config: BaseConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ValueError if the tokenizer gives the segments of a row token types that the model does not have."""
    needed = Template(tokenizer, 2 if args.sentence_order else 1).num_types
    if needed > config.type_vocab_size:
        new = f"--config_overrides type_vocab_size={needed}, or " if args.model_name_or_path is None else ""
        raise ValueError(
            f"The tokenizer gives the two segments of a row {needed} token types, but the model has "
            f"type_vocab_size={config.type_vocab_size}: give {new}--no_sentence_order, or the tokenizer that belongs "
            "to the model (--tokenizer_name)."
        )


def pretraining_rows(
    args: PretrainingArguments, documents: Dataset, tokenizer: PreTrainedTokenizerBase, what: str
) -> Dataset:
    """The rows of documents, as [`pretraining_dataset`] makes them with the flags.

    what: the name of the documents in messages: training, validation or first.
    """
    require_column(documents, args.text_column_name, f"the {what} set", flag="--text_column_name")
    return pretraining_dataset(
        documents,
        tokenizer,
        num_proc=args.preprocessing_num_workers,
        load_from_cache_file=not args.overwrite_cache,
        desc=f"Building the {what} rows",
        **args.row_options(),
    )


def _check_order(args: PretrainingArguments, share: float) -> str:
    """A line that tells how many rows have a sentence order. Raises ValueError if they are too few to learn it."""
    if not args.sentence_order:
        return "Without sentence order: only masked tokens are predicted"
    if share < MIN_ORDERED_SHARE:
        raise ValueError(
            f"{share:.1%} of the training rows consist of two whole sentences or more: there is no sentence order to "
            "learn. Give documents of several sentences, with their punctuation, or a larger --max_length, or train "
            "on masked tokens only (--no_sentence_order)."
        )
    return f"{share:.0%} of the training rows consist of two whole sentences or more, and so have an order"


def held_out_scores(
    accelerator: Accelerator, model: nn.Module, dataloader: DataLoader, objective: Objective | None = None
) -> dict[str, float]:
    """MLM loss, accuracy and perplexity, and SOP loss and accuracy, over a whole data set; others by the objective."""
    scores = evaluate(accelerator, model, objective or PretrainingObjective(), dataloader)
    return {**scores, "perplexity": math.exp(min(scores["mlm_loss"], 700.0))}


def _save(
    accelerator: Accelerator, tokenizer: PreTrainedTokenizerBase, sparse: bool
) -> Callable[[nn.Module, Path], None]:
    """Saves the model with its original value of `sparse_prediction`."""

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
    """The training loader, the share of its rows with a sentence order, and the digest of its data."""
    collator = args.collator(tokenizer, args.mlm_probability)
    if isinstance(documents, IterableDataset):
        options = stream_arguments(args, optimization)
        stream = pretraining_stream(documents, tokenizer, collator, **args.row_options(), **options)
        first = first_documents(documents, 100, args.text_column_name)
        share = ordered_share(pretraining_rows(args, first, tokenizer, "first"))
        return stream, share, data_digest(documents)
    rows = pretraining_rows(args, documents, tokenizer, "training")
    loader = row_loader(args, optimization, rows, collator)
    return loader, ordered_share(rows), data_digest(rows)


# Held-out figures of rows that have a sentence order.
_SOP_SCORES = ("sop_loss", "sop_accuracy")


def _train_lora_alone(
    accelerator: Accelerator, model: PreTrainedModel, args: PretrainingArguments, optimization: OptimizationArguments
) -> None:
    """Adds LoRA as the flags say, and leaves only its parameters to be trained.

    Raises:
        ValueError: if the optimizer or the launcher does not work with it.
    """
    if optimization.optim == "muon":
        raise ValueError("Muon does not support the matrices of --lora_r: use --optim adamw.")
    if accelerator.distributed_type in SHARDED:
        raise ValueError(
            f"--lora_r needs whole matrices, but {accelerator.distributed_type.value} divides them: use a launch file "
            "of configs/accelerate/ without sharding."
        )
    assert args.lora_r is not None
    add_lora(model, args.lora_r, args.lora_alpha or 1.0, args.sentence_order)
    accelerator.print(f"LoRA: {model.num_parameters(only_trainable=True):,} parameters are trained")


def _describe_teacher(accelerator: Accelerator, teacher: Teacher, args: PretrainingArguments) -> None:
    """Prints what the teacher is, and how it reads rows that are longer than it takes."""
    accelerator.print(f"Teacher: {type(teacher.model).__name__} of {teacher.model.num_parameters():,} parameters")
    if teacher.longest is not None and teacher.longest < (args.max_length or 0):
        accelerator.print(
            f"The teacher takes {teacher.longest} tokens: it reads rows of up to {args.max_length} in windows"
        )


def pretrain(
    args: PretrainingArguments,
    optimization: OptimizationArguments,
    documents: Documents,
) -> dict[str, dict[str, Any]]:
    """Pretrains a model, from scratch or from given weights, and evaluates it on held-out documents.

    `--output_dir` gets model and tokenizer, `all_results.json`, `history.jsonl`, the training curve, a model card, and
    the requested checkpoints. A run that a signal ended leaves only its checkpoint, from which it can be resumed. With
    `--no_do_train`, the model is only evaluated, and a teacher beside it.

    Args:
        args: model, data, seed and output.
        optimization: optimizer, schedule and length of the run.
        documents: `train`, which may be a stream, and `validation`, with one document in each row.

    Returns:
        The scores of `validation`, and the figures of `train`; after a signal, only those of `train`.

    Raises:
        ValueError: if the documents, the tokenizer and the model do not fit together, or have no sentence order;
            before anything is trained.
    """
    with start_run(args) as accelerator:
        args, config, tokenizer = read_model_inputs(args)
        _check_padding(args, config)
        _check_types(args, config, tokenizer)
        held_out = _held_out_loader(accelerator, args, optimization, documents["validation"], tokenizer)

        model = _model(args, config)
        prepare_model(model, args)
        accelerator.print(f"{type(model).__name__} of {model.num_parameters():,} parameters")
        identity = {"validation": data_digest(held_out.dataset)}
        if args.model_name_or_path is not None:
            # `config` may come from another place: the commit on the Hub is in the configuration saved with the
            # weights.
            source_config = AutoConfig.from_pretrained(args.model_name_or_path)
            identity["model"] = weights_digest(args.model_name_or_path, source_config)
        if not args.do_train:
            teacher = _teacher(accelerator, args, tokenizer, identity)
            both = None if teacher is None else ScoresBesideTeacher(teacher.to(accelerator.device), accelerator)
            found = held_out_scores(accelerator, prepare_to_evaluate(accelerator, model), held_out, both)
            results: dict[str, dict[str, Any]] = {"validation": found}
            finish_run(accelerator, None, results, (args, optimization), identity, {})
            return results

        objective: Objective = PretrainingObjective()
        settings = model_settings(config, tokenizer)
        if args.lora_r is not None:
            _train_lora_alone(accelerator, model, args, optimization)
            # Checkpoints hold only the trained parameters. The others are read again on resuming.
            settings["the initial weights"] = identity["model"]
        # Only now: if the teacher has no head, a random one would change the random numbers of LoRA's matrices.
        teacher = _teacher(accelerator, args, tokenizer, identity)
        if teacher is not None:
            objective = with_teacher(objective, teacher, model, accelerator, args)
            settings["the teacher's weights"] = teacher.digest
        save_model = _save(accelerator, tokenizer, config.sparse_prediction)
        # Only the logits of masked tokens are computed. How many there are depends on the data, so a compiled model,
        # whose shapes are fixed by its inputs, computes all.
        model.config.sparse_prediction = not args.torch_compile
        with accelerator.main_process_first():
            loader, share, identity["train"] = _loader(args, optimization, documents["train"], tokenizer)
        accelerator.print(_check_order(args, share))
        how = f"masked tokens{' and sentence order' if args.sentence_order else ''}"
        card = data_card(args, documents, how, f", of whose tokens {EVAL_MLM_PROBABILITY:.0%} are masked")
        card["data"] += _taught_by(args)
        card["example"] = _masked_example(tokenizer)

        def scores(model: nn.Module) -> dict[str, float]:
            return held_out_scores(accelerator, model, held_out)

        return train_and_score(
            accelerator,
            model,
            objective,
            loader,
            args,
            optimization,
            scores,
            ("mlm_loss", "mlm_accuracy", "perplexity", *(_SOP_SCORES if args.sentence_order else ())),
            "Pretraining",
            save_model,
            settings,
            identity,
            card,
        )


def _held_out_loader(
    accelerator: Accelerator,
    args: PretrainingArguments,
    optimization: OptimizationArguments,
    documents: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
) -> DataLoader:
    """The rows for evaluation. `--seed` draws their masks, which are the same in every evaluation."""
    collator = args.collator(tokenizer, EVAL_MLM_PROBABILITY)
    with accelerator.main_process_first():
        rows = pretraining_rows(args, documents, tokenizer, "validation")
        return eval_dataloader(rows, collator, optimization.per_device_eval_batch_size, **args.loader_options())
