# SPDX-License-Identifier: Apache-2.0
"""Refuses wrong inputs, with an error that names what to change.

Legend: B batch, N tokens, C hidden size.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from .configuration_base import BaseConfig
from .losses import require_integers
from .recurrent_cache import CACHE
from .tracing import can_read_values, is_compiling

logger = logging.get_logger(__name__)

# Arguments that Transformers' tools pass to every model, and that the base model does not need. The labels come from
# Seq2SeqTrainer, which passes them to generate(), and thereby to the encoder of an EncoderDecoderModel; skip_logits
# from Trainer with use_liger_kernel=True where only the loss is needed, also for models without such kernels.
_IGNORED_ARGUMENTS = ("num_items_in_batch", "cu_seq_lens_k", "max_length_q", "max_length_k", "labels", "skip_logits")
_CAUSAL_ARGUMENTS = ("cache_position", "is_causal")
_DECODER_ARGUMENTS = (*_CAUSAL_ARGUMENTS, "encoder_hidden_states", "encoder_attention_mask")


def require(condition: Tensor, message: str) -> None:
    """Raises ValueError if a condition on values fails. A GPU asserts it without waiting; a graph ignores it."""
    if not can_read_values(condition):
        return
    if condition.device.type == "cpu":
        if not condition:
            raise ValueError(message)
    else:
        torch._assert_async(condition, message)


def require_tensors(**arguments: Any) -> None:
    """Raises TypeError for an argument that is neither a tensor nor None, such as a list or an array."""
    for name, value in arguments.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(
                f"{name} must be a tensor, but is of type {type(value).__name__}: torch.tensor() makes one of a list "
                'or an array, and model(**tokenizer(texts, padding=True, return_tensors="pt")) gives all tensors.'
            )


def require_labels_of_tokens(labels: Tensor, states: Tensor) -> None:
    """Raises ValueError unless labels are (B, N), one for each of the states or logits (B, N, ...)."""
    require_tensors(labels=labels)
    require_integers("labels", labels)
    if labels.shape != states.shape[:2]:
        raise ValueError(
            f"labels have shape {tuple(labels.shape)}, but must be (batch, length) = {tuple(states.shape[:2])}."
        )


def require_labels_of_rows(labels: Tensor, rows: int, name: str, remedy: str = "") -> None:
    """Raises ValueError, with a message that ends in the remedy, unless each row of a batch has one label."""
    require_tensors(**{name: labels})
    if labels.numel() != rows:
        raise ValueError(
            f"{name} have shape {tuple(labels.shape)}, but must be (batch,) = ({rows},), one a row.{remedy}"
        )
    require_integers(name, labels)


def require_labels(labels: Tensor, size: int, name: str, field: str | None = None, ignore_index: int = -100) -> None:
    """Raises ValueError unless labels lie between 0 and size - 1, or are `ignore_index`.

    field: the field of the configuration that holds the size, if any.
    """
    inside = ((labels >= 0) & (labels < size)) | (labels == ignore_index)
    limit, remedy = ("", "") if field is None else (f"{field} - 1 = ", f"raise {field} or ")
    require(
        inside.all(),
        f"{name} must lie between 0 and {limit}{size - 1}, or be {ignore_index} to be ignored: {remedy}correct the "
        "labels.",
    )


def reject_arguments(name: str, arguments: dict[str, Any], is_decoder: bool) -> None:
    """Raises for arguments that the model called `name` would ignore: a misspelt mask must not go unnoticed."""
    for argument, value in arguments.items():
        if argument in _IGNORED_ARGUMENTS:
            continue
        if argument not in _DECODER_ARGUMENTS:
            hint = "attention_mask marks padding"
            if argument == "next_sentence_label":  # BERT's
                hint = "the order of sentences is learned instead, by sentence_order_label"
            raise TypeError(f"{name}.forward() got an unexpected argument {argument!r}; {hint}.")
        if is_decoder and argument == "is_causal" and value is False:
            raise ValueError(f"{name} has is_decoder=True, and sees no later token: leave is_causal=False out.")
        if value is None or value is False or (is_decoder and argument in _CAUSAL_ARGUMENTS):
            continue
        kind = "other decoders" if is_decoder else "decoders"
        reason = "has no cross-attention" if is_decoder else "is an encoder that sees the whole sequence"
        raise ValueError(f"{argument} is for {kind}; {name} {reason}: leave {argument} out.")


def reject_cache(name: str, cache: Any, use_cache: bool | None, is_decoder: bool) -> None:
    """Raises ValueError if a model called `name`, which has no states of fixed size, is given a cache."""
    reason = "is an encoder that sees the whole sequence"
    if is_decoder:
        reason = "has no layer with a state of fixed size to continue from"
    for argument, value in ((CACHE, cache), ("use_cache", use_cache)):
        if value is not None and value is not False:
            remedy = "use use_cache=False" if is_decoder else f"leave {argument} out"
            if argument == CACHE:
                remedy += " (PEFT's prefix tuning gives it as past_key_values; prompt tuning and LoRA need none)"
            raise ValueError(f"{argument} is for models with recurrent states; {name} {reason}: {remedy}.")


def require_direction(name: str, is_decoder: bool, made_with: bool) -> None:
    """Raises ValueError if `is_decoder` was changed after the model called `name` was made: some of its parts would be
    causal, and others not."""
    if is_decoder != made_with:
        raise ValueError(
            f"config.is_decoder is {is_decoder}, but this {name} was made with is_decoder={made_with}: set it back or "
            f"load the model again with is_decoder={is_decoder}. Models of both kinds need a configuration each."
        )


def require_one_input(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """The input that is given; raises ValueError unless exactly one of the two is."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Give either input_ids or inputs_embeds: exactly one of them.")
    return input_ids if input_ids is not None else inputs_embeds


def require_pairs(inputs: Tensor, dimensions: int) -> None:
    """Raises ValueError unless inputs have two sequences in each row, (B, 2, N) or (B, 2, N, C)."""
    if inputs.dim() != dimensions or inputs.shape[1] != 2:
        raise ValueError(
            f"dual_encoder=True classifies pairs of sequences: input_ids must be (batch, 2, length), but the inputs "
            f"are {tuple(inputs.shape)}. Tokenize the two separately and stack them, or use dual_encoder=False."
        )


def require_choices(inputs: Tensor, dimensions: int) -> None:
    """Raises ValueError unless inputs have several sequences in each row, (B, choices, N) or (B, choices, N, C)."""
    if inputs.dim() != dimensions:
        raise ValueError(
            f"Multiple choice scores several sequences for each row: input_ids must be (batch, choices, length), but "
            f"the inputs are {tuple(inputs.shape)}. Stack the choices of each row."
        )


def input_shape(config: BaseConfig, inputs: Tensor) -> tuple[int, int]:
    """The batch size and length of inputs: token ids (B, N) or embeddings (B, N, C). Raises ValueError for others."""
    # By dtype, too: ids with a dimension too many could pass for embeddings, and embeddings with one too few for ids.
    if inputs.dim() != (3 if inputs.is_floating_point() else 2):
        raise ValueError(
            f"input_ids must be integers (batch, length) and inputs_embeds floats (batch, length, "
            f"{config.embedding_width}): got a tensor of shape {tuple(inputs.shape)} and {inputs.dtype}."
        )
    if inputs.dim() == 3 and inputs.shape[2] != config.embedding_width:
        field = "hidden_size" if config.embedding_size is None else "embedding_size"
        raise ValueError(
            f"inputs_embeds have shape {tuple(inputs.shape)}, but must be as wide as the model's embeddings, "
            f"{field}={config.embedding_width}."
        )
    return inputs.shape[0], inputs.shape[1]


def require_indices(name: str, ids: Tensor) -> None:
    """Raises ValueError for ids of a dtype that no table takes: its own error calls every argument 'indices'."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name} must be int64 or int32, but are {ids.dtype}: use {name}.long().")


def require_ids_of_tokens(name: str, ids: Tensor | None, shape: tuple[int, int]) -> None:
    """Raises ValueError unless ids are None, (B, N), or expand to it, as (N,) and (1, N) do.

    A graph is not checked, because comparing sizes would bind it to them.
    """
    if ids is None or not can_read_values(ids) or ids.shape == shape:
        return
    sizes = zip(reversed(ids.shape), reversed(shape), strict=False)
    if ids.dim() > 2 or any(size not in (1, wanted) for size, wanted in sizes):
        raise ValueError(
            f"{name} has shape {tuple(ids.shape)}, but must be (batch, length) = {shape}, or (1, length) for all rows."
        )


def check_inputs(
    config: BaseConfig,
    inputs: Tensor,
    token_type_ids: Tensor | None,
    position_ids: Tensor | None,
    num_embeddings: int,
    seen: Tensor | None = None,
) -> tuple[int, int]:
    """The batch size and length of inputs. Raises ValueError for those that the model cannot take, but for their
    length, which is checked by `check_length`.

    inputs: (B, N) int64 token ids, or (B, N, C) embeddings.

    num_embeddings: rows of the table of words. seen: (B, 2) int64, the earlier tokens that a cache has counted.
    """
    batch, length = input_shape(config, inputs)
    if inputs.dim() == 2:
        require_indices("input_ids", inputs)
    limit = config.max_position_embeddings
    if seen is not None and seen.shape[0] != batch:
        raise ValueError(
            f"{CACHE} holds the states of {seen.shape[0]} rows, but there are {batch} rows: give the cache "
            "of these rows, or none."
        )
    require_ids_of_tokens("token_type_ids", token_type_ids, (batch, length))
    require_ids_of_tokens("position_ids", position_ids, (batch, length))
    if token_type_ids is not None:
        require_indices("token_type_ids", token_type_ids)
        types = config.type_vocab_size
        require(
            ((token_type_ids >= 0) & (token_type_ids < types)).all(),
            f"token_type_ids must lie between 0 and type_vocab_size - 1 = {types - 1}.",
        )
    if position_ids is not None:
        if getattr(config, "position_embedding_type", "learned") == "learned":  # sines take fractions, too
            require_indices("position_ids", position_ids)
        if config.is_decoder and limit is not None:
            check_positions(position_ids, limit)  # generate() counts on from the prompt
        first = config.first_position
        last = None if limit is None else first + limit - 1
        inside = position_ids >= first if last is None else (position_ids >= first) & (position_ids <= last)
        require(
            inside.all(),
            f"position_ids must {f'be at least {first}' if last is None else f'lie between {first} and {last}'}: the "
            f"first token of a row has {first} in model_type={config.model_type!r}. Leave position_ids out to count "
            "the valid tokens.",
        )
    if inputs.dim() == 2:
        require(
            ((inputs >= 0) & (inputs < num_embeddings)).all(),
            f"input_ids must lie between 0 and vocab_size - 1 = {num_embeddings - 1}: the tokenizer knows more tokens "
            "than the model; call resize_token_embeddings(len(tokenizer)).",
        )
    return batch, length


def check_length(length: int, limit: int | None) -> None:
    """Raises ValueError for a sequence, or a packed document, beyond the longest one."""
    if limit is not None and length > limit:
        raise ValueError(
            f"A sequence of {length} tokens is longer than max_position_embeddings={limit}: truncate it to {limit}"
            f" (truncation=True, max_length={limit}), or raise the limit by resize_position_embeddings({length})."
        )


def check_positions(positions: Tensor, limit: int) -> None:
    """Raises ValueError for tokens (B, ...) that continue a text beyond the longest sequence."""
    require(
        (positions < limit).all(),
        f"With the tokens before, the sequence is longer than max_position_embeddings={limit}: truncate the prompt "
        "(truncation=True with a smaller max_length), generate fewer tokens, or raise the limit by "
        f"resize_position_embeddings(), to {2 * limit} or more.",
    )


def positions_start_again(position_ids: Tensor) -> Tensor:
    """Where positions (..., N) int64 do not rise, (..., N) bool: in packed rows, at the first tokens of documents."""
    return position_ids.diff(dim=-1, prepend=position_ids[..., :1] - 1) < 1


def warn_of_mixed_documents(position_ids: Tensor) -> None:
    """Warns once if positions start again in the rows of an encoder, which may be packed rows: it cannot know."""
    if can_read_values(position_ids) and positions_start_again(position_ids).any():
        logger.warning_once(
            "position_ids start again within a row, and all tokens of the row see each other. If it holds several "
            "documents, give seq_idx: DataCollatorWithFlattening(return_seq_idx=True, return_position_ids=False)."
        )


def reject_earlier_tokens(seen: Tensor | None) -> None:
    """Raises ValueError for attention maps of tokens that continue a cache. seen: None if it has seen none."""
    if seen is not None:
        raise ValueError(
            f"output_attentions needs all tokens at once, but {CACHE} holds only a sum over earlier tokens: use "
            "use_cache=False."
        )


def check_attention_rows(rows: Tensor, batch: int, length: int, output_attentions: bool) -> None:
    """Raises ValueError unless maps are returned, and `attention_rows` are (R,) or (B, R) places in rows of this
    length."""
    if not output_attentions:
        raise ValueError("attention_rows chooses rows of the attention maps: add output_attentions=True.")
    require_indices("attention_rows", rows)
    if rows.dim() not in (1, 2) or (rows.dim() == 2 and rows.shape[0] != batch):
        raise ValueError(
            f"attention_rows has shape {tuple(rows.shape)}, but must be (rows,) or (batch, rows) with batch={batch}."
        )
    require(
        ((rows >= 0) & (rows < length)).all(),
        f"attention_rows must lie between 0 and {length - 1}: rows have {length} tokens.",
    )


def reject_documents(arguments: dict[str, Any], what: str, position_ids: Tensor | None = None) -> None:
    """Raises ValueError for packed rows in a model that predicts `what` for each row.

    position_ids: (..., N), if the model would divide rows where they start again.
    """
    require_tensors(position_ids=position_ids)
    given = [name for name in ("seq_idx", "cu_seq_lens_q") if arguments.get(name) is not None]
    if position_ids is not None and can_read_values(position_ids) and positions_start_again(position_ids).any():
        given.append("position_ids that start again")
    if given:
        raise ValueError(
            f"{given[0]}: there are several documents in a row, but this model predicts one {what} for each row: give "
            "each document a row of its own."
        )


def check_cumulative_lengths(cu_seq_lens: Tensor, shape: tuple[int, int]) -> None:
    """Raises ValueError unless these are the cumulative lengths (D + 1,) of the documents of a batch."""
    tokens = shape[0] * shape[1]
    if cu_seq_lens.dim() != 1:
        raise ValueError(f"cu_seq_lens_q has shape {tuple(cu_seq_lens.shape)}, but must be (documents + 1,).")
    require(
        (cu_seq_lens[0] == 0) & (cu_seq_lens[-1] == tokens) & (cu_seq_lens.diff() >= 0).all(),
        f"cu_seq_lens_q must rise from 0 to the number of tokens, {tokens}: the tokens before each document, and all.",
    )


def check_documents(seq_idx: Tensor, shape: tuple[int, int], has_cache: bool, output_attentions: bool) -> None:
    """Raises ValueError for packed documents in calls that cannot keep them apart."""
    if seq_idx.shape != shape:
        raise ValueError(f"seq_idx has shape {tuple(seq_idx.shape)}, but must be (batch, length) = {shape}.")
    if has_cache or output_attentions:
        raise ValueError(
            "seq_idx, cu_seq_lens_q, or position_ids that restart, make a row of each document, so that caches and "
            "attention maps do not fit: use use_cache=False and output_attentions=False, or one document in each row."
        )
    if not can_read_values(seq_idx) and not is_compiling():
        raise ValueError(
            "The documents of packed rows (seq_idx, cu_seq_lens_q) must be read, which exported graphs and "
            "torch.func.vmap cannot do: give them rows of one document."
        )


def check_same_documents(seq_idx: Tensor, others: Tensor) -> None:
    """Raises ValueError unless both divide a batch into the same documents. Another shape of `seq_idx` is refused by
    `check_documents`."""
    if others.shape != seq_idx.shape:
        return
    same = (seq_idx.diff(dim=-1) != 0) == (others.diff(dim=-1) != 0).to(seq_idx.device)
    require(same.all(), "seq_idx and cu_seq_lens_q divide the rows into different documents: leave out one of them.")


def key_mask(attention_mask: Tensor | None, batch: int, length: int, seen: Tensor | None = None) -> Tensor | None:
    """The (B, N) bool mask of an `attention_mask` of ones and zeros of any dtype; None for None.

    seen: (B, 2) int64, the tokens and the columns that a cache has seen; None if it has seen none. The mask may then
        begin with these columns, which are cut off.

    Raises ValueError for a mask of another shape, or with other numbers.
    """
    if attention_mask is None:
        return None
    shape = tuple(attention_mask.shape)
    if len(shape) != 2 or shape[0] != batch or not (shape[1] == length or (seen is not None and shape[1] > length)):
        raise ValueError(
            f"attention_mask has shape {shape}, but must be (batch, length) = {(batch, length)}: 1 at tokens and 0 at "
            "padding. This attention takes no masks for pairs of tokens, such as causal masks."
        )
    if seen is not None and shape[1] > length:
        require(
            seen[0, 1] == shape[1] - length,
            f"attention_mask has {shape[1]} columns, but must have those of the {length} new tokens, or before them "
            "one for each column that the cache has seen.",
        )
    attention_mask = attention_mask[:, -length:]
    mask = attention_mask != 0
    if attention_mask.dtype != torch.bool:
        require(
            (attention_mask == mask).all(),
            "attention_mask must hold 1 at tokens and 0 at padding: neither scores to be added nor numbers of "
            "documents (seq_idx).",
        )
    return mask
