# SPDX-License-Identifier: Apache-2.0
"""The head of causal families: the next token, and generation through recurrent states.

Legend: B batch, N tokens, C hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from .batch import find_documents, first_of_document
from .configuration_base import BaseConfig
from .input_checks import (
    input_shape,
    reject_cache,
    require_labels,
    require_labels_of_tokens,
    require_one_input,
    require_tensors,
)
from .losses import IGNORED, at_least_one, int64_labels
from .modeling_base import BasePreTrainedModel
from .recurrent_cache import CACHE, State, columns_seen, given_cache, read_state, require_recurrent
from .token_layout import positions_by_rank, token_ranks
from .tracing import can_read_values


class BaseForCausalLM(BasePreTrainedModel, GenerationMixin):
    """Predicts the next token, and generates as every model of Transformers does."""

    auto_names = ("AutoModelForCausalLM",)
    # A state cannot go back to earlier tokens. With this attribute, Transformers refuses assisted decoding.
    _is_stateful = True
    tied_weights = {"lm_head.weight": None}

    def __init__(self, config: BaseConfig):
        super().__init__(config)
        if not config.is_decoder:
            raise ValueError(
                f"{type(self).__name__} predicts the next token, but its configuration describes an encoder, which "
                f"sees that token: use {type(config).__name__}(is_decoder=True)."
            )
        self.add_base_model()
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Linear:
        """The output layer, for tying and resizing."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        """Replaces the output layer."""
        self.lm_head = new_embeddings

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple | CausalLMOutputWithPast:
        """
        Args:
            labels: (B, N) int64, the tokens themselves: each is predicted from the valid token before it. -100 for
                tokens that are not predicted; padding never is.
            use_cache: whether to return the states to continue from. If None, where a `cache` is given, and by
                `config.use_cache` outside training.
            logits_to_keep: the number of last tokens to compute the logits of, or the positions of the tokens, (K,)
                int64. 0: all tokens.
            shift_labels: (B, N) int64, instead of labels: for each token the label that it predicts. For sequence
                parallelism, where the next token may be on another device. It is a keyword that is not named, because
                Transformers' Trainer would look for it in every batch.
            seq_idx, cu_seq_lens_q: for rows packed with several documents, see the base model; the first token of a
                document is then not predicted.
            num_items_in_batch: divisor of the sum of the loss; if None, the number of labels that count in this batch.
            The others: see the base model.

        Returns: loss, logits (B, N or K, V), the cache and, on request, the base model's other outputs.
        """
        cache = given_cache(cache, past_key_values)
        shift_labels: Tensor | None = kwargs.pop("shift_labels", None)
        may_restart = attention_mask is None and cache is None and not use_cache
        require_tensors(
            input_ids=input_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            seq_idx=seq_idx,
            cu_seq_lens_q=cu_seq_lens_q,
        )
        shape = input_shape(self.config, require_one_input(input_ids, inputs_embeds))
        seq_idx = find_documents(shape, seq_idx, cu_seq_lens_q, position_ids if may_restart else None)
        if use_cache is None:
            keeps = self.config.use_cache and not self.training and seq_idx is None
            use_cache = keeps or cache is not None
        outputs = self.base_model(
            input_ids,
            attention_mask,
            token_type_ids,
            position_ids,
            inputs_embeds,
            output_attentions,
            output_hidden_states,
            cache=cache,
            use_cache=use_cache,
            return_dict=True,
            seq_idx=seq_idx,
            **kwargs,
        )
        states = outputs.last_hidden_state
        targets = labels if shift_labels is None else shift_labels
        if targets is not None:
            self._check_labels(targets, states, logits_to_keep)
            targets = int64_labels(targets)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(states[:, kept])
        loss = None
        if targets is not None:
            if shift_labels is None:
                if seq_idx is not None:
                    mask = None if attention_mask is None else attention_mask != 0
                    targets = targets.masked_fill(first_of_document(seq_idx, mask), IGNORED)
                targets = next_labels(targets, attention_mask)
            count = at_least_one((targets != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch)
            loss = self.loss_function(
                logits, None, self.config.vocab_size, num_items_in_batch=count, shift_labels=targets
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE: getattr(outputs, CACHE)},
        )

    def _check_labels(self, labels: Tensor, states: Tensor, logits_to_keep: int | Tensor) -> None:
        require_labels_of_tokens(labels, states)
        if not isinstance(logits_to_keep, int) or logits_to_keep:
            raise ValueError("logits_to_keep drops logits that labels need: leave out one of the two.")
        require_labels(labels, self.config.vocab_size, "labels", "vocab_size")

    # ---- generation ----

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        is_first_iteration: bool | None = False,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """As in Transformers, but only the mask of this call's tokens is passed on: the states stand for all earlier
        tokens, so that nothing grows with the sequence."""
        for name in ("tokenizer", "assistant_tokenizer"):  # `generate` uses them for `stop_strings` and passes them on
            kwargs.pop(name, None)
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        inputs[CACHE] = given_cache(cache, past_key_values)
        tokens = inputs["inputs_embeds"] if inputs.get("inputs_embeds") is not None else inputs["input_ids"]
        # A generated token is never padding.
        if attention_mask is not None and (tokens.shape[1] > 1 or is_first_iteration):
            inputs["attention_mask"] = attention_mask[:, -tokens.shape[1] :].contiguous().to(tokens.device)
        return inputs

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        is_first_iteration: bool = True,
    ) -> CausalLMOutputWithPast:
        """Reads the tokens of the prompt that the cache has not seen, in parts of `prefill_chunk_size` if it is given.

        Transformers' own method would ask the cache for its length, which only a cache of keys has.

        Raises ValueError for a prompt that does not continue where the cache ends, and for one that ends in padding.
        """
        embeds = model_kwargs.get("inputs_embeds") if is_first_iteration else None
        if embeds is not None and not self.config.has_states:
            raise ValueError(
                f"{type(self).__name__} with feature_map=None has no states to continue from, which generate() needs "
                "for inputs_embeds: give input_ids."
            )
        given = (input_ids if embeds is None else embeds).shape[1]
        start = self._first_new_token(given, generation_config, model_kwargs)
        mask = model_kwargs.get("attention_mask")
        require_a_token_at_the_end(mask)
        before = 0 if mask is None else mask.shape[1] - given
        size = generation_config.prefill_chunk_size or given - start
        if size < given - start and model_kwargs.get(CACHE) is None:
            raise ValueError(
                "prefill_chunk_size reads the prompt in parts, and only a cache keeps what was read: use "
                "use_cache=True, if the model has states, or prefill_chunk_size=None."
            )
        for first in range(start, given, size):
            last = min(first + size, given)
            part = dict(model_kwargs)
            for name in ("position_ids", "token_type_ids"):
                if part.get(name) is not None:
                    part[name] = part[name][..., : part[name].shape[-1] - given + last]
            part["attention_mask"] = None if mask is None else mask[:, : before + last]
            part["inputs_embeds"] = None if embeds is None else embeds[:, :last]
            inputs = self.prepare_inputs_for_generation(
                input_ids if embeds is not None else input_ids[:, :last],
                next_sequence_length=last - first,
                is_first_iteration=is_first_iteration,
                **part,
            )
            outputs = self(**inputs, return_dict=True)
        return outputs

    def _first_new_token(self, given: int, generation_config: GenerationConfig, model_kwargs: dict[str, Any]) -> int:
        """The index of the first token that the cache has not seen, in a prompt of `given` tokens."""
        cache = model_kwargs.get(CACHE)
        if not self.config.has_states:
            reject_cache(type(self).__name__, cache, None, is_decoder=True)
        elif cache is not None:
            require_recurrent(cache, self.config.num_hidden_layers, type(self).__name__)
        seen = columns_seen(cache)
        mask = model_kwargs.get("attention_mask")
        if seen == 0:
            if mask is not None and mask.shape[1] != given:
                raise ValueError(f"attention_mask has {mask.shape[1]} columns, but there are {given} tokens.")
            return 0
        # Transformers drops a mask of ones, and keeps its length here.
        length = getattr(generation_config, "_mask_length", given) if mask is None else mask.shape[1]
        if length in (given, seen + given) and length > seen:
            self._check_tokens_seen(cache, seen, mask)
            return seen if length == given else 0
        raise ValueError(
            f"{CACHE} has seen {seen} tokens, but the call has {given}: give these {seen} and the new ones, "
            f"or only the new ones, with an attention_mask over the {seen} and the new ones."
        )

    @staticmethod
    def _check_tokens_seen(cache: Cache | None, seen: int, mask: Tensor | None) -> None:
        """Raises ValueError if the mask has another number of tokens in a row than the cache was given."""
        tokens = read_state(cache, 0, State.TOKENS)
        assert tokens is not None  # the cache has seen some
        valid = torch.full_like(tokens[:, 0], seen) if mask is None else (mask[:, :seen] != 0).sum(dim=-1)
        if valid.shape == tokens[:, 0].shape and (rows := (valid != tokens[:, 0]).nonzero()[:, 0].tolist()):
            row = rows[0]
            raise ValueError(
                f"{CACHE} has seen {int(tokens[row, 0])} tokens of row {row}, but attention_mask has "
                f"{int(valid[row])} in these {seen} columns. Tokens that fill up a row after its end "
                f"are in its state and cannot be removed: continue without {CACHE}, or row by row."
            )


def require_a_token_at_the_end(mask: Tensor | None) -> None:
    """Raises ValueError if a row of a prompt ends in padding: `generate` predicts the next token from the last column.

    mask: (B, N), nonzero at valid tokens.
    """
    if mask is None or mask.dim() != 2 or not can_read_values(mask):
        return
    if (mask[:, -1:] == 0).any():
        raise ValueError(
            "attention_mask has padding in its last column, but generate() continues every row after that column: pad "
            'on the left, with tokenizer.padding_side = "left".'
        )


def next_labels(labels: Tensor, attention_mask: Tensor | None) -> Tensor:
    """For each valid token the label of the next valid token, (B, N); -100 elsewhere.

    labels: (B, N) int64. attention_mask: (B, N) or longer, of which the last N columns are used; nonzero at valid
        tokens.
    """
    if attention_mask is None:
        return nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()
    mask = (attention_mask[:, -labels.shape[1] :] != 0).to(labels.device)
    lengths = mask.sum(dim=-1, keepdim=True)
    ranked = labels.gather(1, positions_by_rank(mask))
    ranked = ranked.masked_fill(torch.arange(labels.shape[1], device=labels.device) >= lengths, IGNORED)
    following = nn.functional.pad(ranked[:, 1:], (0, 1), value=IGNORED)
    return following.gather(1, token_ranks(mask)).masked_fill(~mask, IGNORED)
