# SPDX-License-Identifier: Apache-2.0
"""The one skeleton of all families: embeddings, layers, stack, heads, losses, and the checks of their inputs.

A BERT-style encoder with post-norm residuals. A family's modeling file brings its attention and names the classes.

Legend: B batch, N tokens, C hidden size, H heads, V vocabulary, T valid tokens of a batch, W width of its shortened
rows. Parameters carry the names of Transformers' own Nyströmformer, so that checkpoints are exchanged with it.

Padding is not computed: from the embeddings to the last layer, states are those of the valid tokens alone, (1, T, C),
and attention brings them into rows (`Unpadding`). Not so in a graph, whose sizes must not depend on values, and for
attention maps: there, states are (B, N, C). Either way, what is returned is (B, N, C), and zero at padding.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPooling,
    MaskedLMOutput,
    MultipleChoiceModelOutput,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutput,
    TokenClassifierOutput,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import ModelOutput
from transformers.utils.generic import can_return_tuple

from .attention_ops import (
    BLOCK_TOKENS,
    Unpadding,
    find_unpadding,
    is_tracing,
    keep_freed_memory,
    merge_heads,
    pad_tokens,
    split_heads,
    unpad_tokens,
)
from .configuration_encoder import EncoderConfig

# Positions start here, after the two rows that the published Nyströmformer checkpoints leave unused.
FIRST_POSITION = 2

# Bringing a token's logits to their place takes about as long as this many multiplications for each of them.
COPIED_LOGIT = 128

# The Auto classes a family is registered with, and the ending of the class each one gives.
AUTO_CLASSES = {
    "AutoModel": "Model",
    "AutoModelForTextEncoding": "Model",
    "AutoModelForPreTraining": "ForPreTraining",
    "AutoModelForMaskedLM": "ForMaskedLM",
    "AutoModelForSequenceClassification": "ForSequenceClassification",
    "AutoModelForTokenClassification": "ForTokenClassification",
    "AutoModelForQuestionAnswering": "ForQuestionAnswering",
    "AutoModelForMultipleChoice": "ForMultipleChoice",
}

# Arguments that Transformers' tools hand to any model, and that mean nothing to an encoder.
_IGNORED_ARGUMENTS = ("num_items_in_batch",)
_DECODER_ARGUMENTS = (
    "use_cache",
    "past_key_values",
    "cache_position",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "is_causal",
)


# ---- checks of the inputs ----


def _require(condition: Tensor, message: str) -> None:
    """Raise ValueError where a condition on values fails. On a GPU, assert without waiting; in a graph, skip."""
    if is_tracing() or condition.is_meta:
        return
    if condition.device.type == "cpu":
        if not condition:
            raise ValueError(message)
    else:
        torch._assert_async(condition, message)


def _require_labels(labels: Tensor, size: int, name: str, field: str, ignore_index: int = -100) -> None:
    inside = ((labels >= 0) & (labels < size)) | (labels == ignore_index)
    _require(
        inside.all(),
        f"{name} must lie between 0 and {field} - 1 = {size - 1}, or be {ignore_index} to be ignored: raise {field} "
        "or correct the labels.",
    )


def _reject_arguments(model: nn.Module, arguments: dict[str, Any]) -> None:
    """An argument that would be dropped is refused: a misspelt mask must not go unnoticed."""
    for name, value in arguments.items():
        if name in _IGNORED_ARGUMENTS or (name in _DECODER_ARGUMENTS and (value is None or value is False)):
            continue
        if name in _DECODER_ARGUMENTS:
            raise ValueError(
                f"{name} is for decoders; {type(model).__name__} is an encoder that sees the whole sequence: leave "
                f"{name} out."
            )
        raise TypeError(
            f"{type(model).__name__}.forward() got an unexpected argument {name!r}; padding is told by attention_mask."
        )


def key_mask(attention_mask: Tensor | None, batch: int, length: int) -> tuple[Tensor | None, Unpadding | None]:
    """The (B, N) bool mask of an `attention_mask` of ones and zeros of any dtype; None if every token is valid.

    And where the valid tokens lie, if it pays to compute them alone.
    """
    if attention_mask is None:
        return None, None
    if attention_mask.shape != (batch, length):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, but must be (batch, length) = {(batch, length)}"
            ": 1 at tokens and 0 at padding. Masks by pair of tokens, as causal ones, do not exist for this attention."
        )
    mask = attention_mask != 0
    if attention_mask.is_floating_point():
        _require(
            (attention_mask == mask).all(), "attention_mask must hold 1 at tokens and 0 at padding, not added scores."
        )
    return (mask, None) if is_tracing() or mask.is_meta else find_unpadding(mask)


def first_token(hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """(B, C): the state of the first valid token of each row ([CLS]), wherever the padding is."""
    if attention_mask is None:
        return hidden_states[:, 0]
    index = (attention_mask != 0).long().argmax(dim=-1)
    return hidden_states[torch.arange(hidden_states.shape[0], device=hidden_states.device), index]


# ---- layers ----


def activation(config: EncoderConfig) -> nn.Module:
    """The module of `config.hidden_act`."""
    # The same function in one operation instead of seven: in float32, a quarter of the time of a layer.
    return ACT2FN["gelu_pytorch_tanh" if config.hidden_act == "gelu_new" else config.hidden_act]


def is_unobserved(*modules: nn.Module) -> bool:
    """Whether nobody can tell if inner states of these modules are overwritten or computed in parts: there is neither
    gradient nor graph nor hook that keeps them, and no weight that Accelerate would load anew for every part."""
    if torch.is_grad_enabled() or is_tracing():
        return False
    parts = [part for module in modules for part in module.modules()]
    return not any(part._forward_hooks or part._forward_pre_hooks or hasattr(part, "_hf_hook") for part in parts)


class EncoderEmbeddings(nn.Module):
    """Sum of word, position and token type embeddings, normalised."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings + FIRST_POSITION, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        inputs: Tensor,
        mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        unpadding: Unpadding | None = None,
    ) -> Tensor:
        """inputs: token ids (B, N) or word embeddings (B, N, C). mask: (B, N) bool.

        Returns (B, N, C), or with `unpadding` the states of the valid tokens alone.

        Where no `position_ids` are given, they count the valid tokens, so that padding on the left keeps them.
        """
        shape = inputs.shape[:2]
        embeddings = self.word_embeddings(inputs) if inputs.dim() == 2 else inputs
        if position_ids is None:
            if mask is None:
                position_ids = torch.arange(shape[1], device=inputs.device)[None]
            else:
                position_ids = (mask.long().cumsum(dim=-1) - 1).clamp_min(0)
            position_ids = position_ids + FIRST_POSITION
        if token_type_ids is None:
            token_type_ids = torch.zeros(shape, dtype=torch.long, device=inputs.device)
        if unpadding is not None:
            # Words are looked up before: what is hooked to that module (NEFTune's noise) goes by their (B, N, C).
            embeddings = unpad_tokens(embeddings, unpadding)
            token_type_ids = unpad_tokens(token_type_ids.expand(shape), unpadding)
            position_ids = unpad_tokens(position_ids.expand(shape), unpadding)
        embeddings = embeddings + self.token_type_embeddings(token_type_ids) + self.position_embeddings(position_ids)
        return self.dropout(self.LayerNorm(embeddings))


class EncoderSelfAttention(nn.Module):
    """Projections to queries, keys and values, and the convolution skip; a family adds what is done with them."""

    def __init__(self, config: EncoderConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.num_heads = config.num_attention_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout_p = config.attention_probs_dropout_prob
        self.conv = None
        if config.conv_kernel_size is not None:
            self.conv = nn.Conv2d(
                self.num_heads,
                self.num_heads,
                kernel_size=(config.conv_kernel_size, 1),
                padding=(config.conv_kernel_size // 2, 0),
                groups=self.num_heads,
                bias=False,
            )

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        tokens: Tensor | None,
        shared: Any,
        output_attentions: bool,
        attention_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (B, N, C), mask (B, N) bool -> context (B, N, C), attention map (B, H, R, N) or None.

        With `tokens`, (T,) int64, the places of the valid tokens in the flattened mask (B, W), states and context are
        those of these tokens, (1, T, C).
        """
        query = split_heads(self.in_rows(self.query(hidden_states), mask, tokens), self.num_heads)
        context, attentions = self.attend(
            query, hidden_states, mask, tokens, shared, output_attentions, attention_rows
        )
        context = merge_heads(context)
        if tokens is not None:
            context = context.flatten(0, 1).index_select(0, tokens)[None]
        return context, attentions

    @staticmethod
    def in_rows(states: Tensor, mask: Tensor | None, tokens: Tensor | None) -> Tensor:
        """States of the tokens (1, T, C) in the rows of the mask, (B, W, C); others are in rows already."""
        return states if mask is None or tokens is None else pad_tokens(states, tokens, mask.shape)

    def attend(
        self,
        query: Tensor,
        hidden_states: Tensor,
        mask: Tensor | None,
        tokens: Tensor | None,
        shared: Any,
        output_attentions: bool,
        attention_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """query (B, H, N, D) and the layer's input -> context (B, H, N, D) and the map, if it is asked for.

        With `tokens`, the input is that of the valid tokens alone (see `forward`), and N is W.
        """
        raise TypeError(f"{type(self).__name__} must define attend().")

    @property
    def conv_weight(self) -> Tensor | None:
        return None if self.conv is None else self.conv.weight

    @property
    def dropout(self) -> float:
        return self.dropout_p if self.training else 0.0

    @property
    def is_eager(self) -> bool:
        return self.config._attn_implementation == "eager"


class ResidualOutput(nn.Module):
    """LayerNorm(x + Dropout(W h)): the end of both sub-layers."""

    def __init__(self, config: EncoderConfig, width: int):
        super().__init__()
        self.dense = nn.Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden_states: Tensor, residual: Tensor) -> Tensor:
        hidden_states = self.dropout(self.dense(hidden_states))
        if hidden_states.dtype == residual.dtype and is_unobserved(self.dense, self.dropout):
            return self.LayerNorm(hidden_states.add_(residual))
        return self.LayerNorm(hidden_states + residual)


class AttentionBlock(nn.Module):
    def __init__(self, config: EncoderConfig, layer_idx: int, self_attention_class: type[EncoderSelfAttention]):
        super().__init__()
        self.self = self_attention_class(config, layer_idx)
        self.output = ResidualOutput(config, config.hidden_size)


class Intermediate(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.intermediate_act_fn = activation(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.intermediate_act_fn(self.dense(hidden_states))


class EncoderLayer(GradientCheckpointingLayer):
    def __init__(self, config: EncoderConfig, layer_idx: int, self_attention_class: type[EncoderSelfAttention]):
        super().__init__()
        self.chunk_size_feed_forward = config.chunk_size_feed_forward
        self.attention = AttentionBlock(config, layer_idx, self_attention_class)
        self.intermediate = Intermediate(config)
        self.output = ResidualOutput(config, config.intermediate_size)

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        tokens: Tensor | None = None,
        shared: Any = None,
        output_attentions: bool = False,
        attention_rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        context, attentions = self.attention.self(
            hidden_states, mask, tokens, shared, output_attentions, attention_rows
        )
        if self.pays_in_blocks(context, hidden_states):
            keep_freed_memory()
            output = context.flatten(0, 1)
            for block, inputs in zip(
                output.split(BLOCK_TOKENS), hidden_states.flatten(0, 1).split(BLOCK_TOKENS), strict=True
            ):
                block.copy_(self.feed_forward_chunk(self.attention.output(block[None], inputs[None]))[0])
            return output.view_as(hidden_states), attentions
        hidden_states = self.attention.output(context, hidden_states)
        if self.chunk_size_feed_forward == 0:
            return self.feed_forward_chunk(hidden_states), attentions
        # As many tokens a chunk as `chunk_size_feed_forward` columns of the batch hold; the last chunk may have fewer.
        size = self.chunk_size_feed_forward * (1 if mask is None or tokens is None else mask.shape[0])
        chunks = [self.feed_forward_chunk(chunk) for chunk in hidden_states.split(size, dim=1)]
        return torch.cat(chunks, dim=1), attentions

    def pays_in_blocks(self, context: Tensor, hidden_states: Tensor) -> bool:
        """Whether all after the attention is applied to blocks of tokens, whose inner states stay in a CPU's caches.

        The output takes the place of the context: the system hands large memory out slowly, page by page.
        """
        if is_tracing() or hidden_states.device.type != "cpu" or hidden_states.shape[:2].numel() <= BLOCK_TOKENS:
            return False
        # With dropout, a checkpointed layer must draw the same numbers when it is computed again, with gradients.
        if self.training or self.chunk_size_feed_forward or context.dtype != hidden_states.dtype:
            return False
        return is_unobserved(*self.children())

    def feed_forward_chunk(self, hidden_states: Tensor) -> Tensor:
        return self.output(self.intermediate(hidden_states), hidden_states)


class EncoderStack(nn.Module):
    """The layers. A family may compute in `shared_inputs`, once for all layers, what its attention needs."""

    def __init__(self, config: EncoderConfig, self_attention_class: type[EncoderSelfAttention]):
        super().__init__()
        self.config = config
        self.layer = nn.ModuleList(
            [EncoderLayer(config, layer_idx, self_attention_class) for layer_idx in range(config.num_hidden_layers)]
        )
        self.gradient_checkpointing = False

    def shared_inputs(self, mask: Tensor | None, length: int) -> Any:
        return None

    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None,
        output_attentions: bool,
        output_hidden_states: bool,
        attention_rows: Tensor | None,
        unpadding: Unpadding | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...] | None, tuple[Tensor, ...] | None]:
        """hidden_states (B, N, C), with `unpadding` those of the valid tokens alone; mask (B, N) bool.

        Returns the last state (B, N, C), all states if asked for, the attention maps if asked for.
        """

        def whole(states: Tensor) -> Tensor:
            if unpadding is not None:
                return pad_tokens(states, unpadding.tokens, unpadding.shape)
            return states if mask is None else states.masked_fill(~mask[..., None], 0)

        row_mask, tokens = (mask, None) if unpadding is None else (unpadding.row_mask, unpadding.row_tokens)
        shared = self.shared_inputs(row_mask, hidden_states.shape[1] if row_mask is None else row_mask.shape[1])
        states, maps = [], []
        for layer in self.layer:
            if output_hidden_states:
                states.append(whole(hidden_states))
                # On through the state that is returned, so that gradients reach it.
                hidden_states = states[-1] if unpadding is None else unpad_tokens(states[-1], unpadding)
            hidden_states, attentions = layer(
                hidden_states, row_mask, tokens, shared, output_attentions, attention_rows
            )
            maps.append(attentions)
        states.append(whole(hidden_states))
        return (
            states[-1],
            tuple(states) if output_hidden_states else None,
            tuple(maps) if output_attentions else None,
        )


# ---- parts of the heads ----


class Pooler(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.activation(self.dense(first_token(hidden_states, attention_mask)))


class PredictionHeadTransform(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.transform_act_fn = activation(config)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.LayerNorm(self.transform_act_fn(self.dense(hidden_states)))


class LMPredictionHead(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.transform = PredictionHeadTransform(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
        # The same tensor as decoder.bias, under the name that published checkpoints use.
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.decoder(self.transform(hidden_states))


class PretrainingHeads(nn.Module):
    """Masked language modelling and, with `sentence_order`, the order of the two segments."""

    def __init__(self, config: EncoderConfig, sentence_order: bool = False):
        super().__init__()
        self.predictions = LMPredictionHead(config)
        if sentence_order:
            self.seq_relationship = nn.Linear(config.hidden_size, 2)


class ClassificationHead(nn.Module):
    def __init__(self, config: EncoderConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.dropout = nn.Dropout(_classifier_dropout(config))
        self.activation = activation(config)
        self.out_proj = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.activation(self.dense(self.dropout(features)))
        return self.out_proj(self.dropout(hidden))


def _classifier_dropout(config: EncoderConfig) -> float:
    return config.hidden_dropout_prob if config.classifier_dropout is None else config.classifier_dropout


def without_padding(labels: Tensor, attention_mask: Tensor | None, ignore_index: int = -100) -> Tensor:
    """The labels (B, N) of tokens, none at padding: what stands there must not matter."""
    return labels if attention_mask is None else labels.masked_fill(attention_mask == 0, ignore_index)


def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Mean cross entropy of logits (..., classes) over the labels (...) that count; 0 if none does."""
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=ignore_index, reduction="sum")
    return total / (labels != ignore_index).sum().clamp_min(1)


# ---- models ----


@dataclass
class EncoderModelOutput(BaseModelOutputWithPooling):
    """As in Transformers; for the heads it carries, beside its entries, where the tokens of a padded batch lie."""

    # Without an annotation, which would make it an entry.
    unpadding = cast("Unpadding | None", None)


@dataclass
class EncoderForPreTrainingOutput(ModelOutput):
    r"""
    loss (`torch.Tensor`, *optional*): sum of the losses whose labels were given.
    mlm_loss (`torch.Tensor`, *optional*): mean cross entropy of the masked tokens.
    sop_loss (`torch.Tensor`, *optional*): mean cross entropy of the order of the segments.
    prediction_logits (`torch.Tensor`): (batch, length, vocab_size), before the softmax; with labels and
        `config.sparse_prediction`, (number of labels that count, vocab_size).
    sop_logits (`torch.Tensor`): (batch, 2), before the softmax; class 1 = the segments are swapped.
    hidden_states, attentions: as in Transformers, on request.
    """

    loss: Tensor | None = None
    mlm_loss: Tensor | None = None
    sop_loss: Tensor | None = None
    prediction_logits: Tensor | None = None
    sop_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None


class EncoderPreTrainedModel(PreTrainedModel):
    """Initialisation, loading and saving of every family."""

    supports_gradient_checkpointing = True
    accepts_loss_kwargs = False
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _no_split_modules = ["EncoderEmbeddings", "EncoderLayer"]
    _input_embed_layer = "word_embeddings"

    self_attention_class: ClassVar[type[EncoderSelfAttention]]
    stack_class: ClassVar[type[EncoderStack]] = EncoderStack
    base_model_class: ClassVar[type[PreTrainedModel]]

    def __init__(self, config: EncoderConfig, *args: Any, **kwargs: Any):
        # Fields may have been set after the configuration was made.
        config.validate_architecture()
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, LMPredictionHead):
            init.zeros_(module.bias)

    def add_base_model(self, add_pooling_layer: bool = False) -> None:
        setattr(self, self.base_model_prefix, self.base_model_class(self.config, add_pooling_layer=add_pooling_layer))

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """As in Transformers; raises ValueError for a checkpoint that does not hold the whole encoder."""
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        model, info = loaded
        prefix = model.base_model_prefix + "."
        encoder = {
            name for name in model.state_dict() if name.removeprefix(prefix).startswith(("embeddings.", "encoder."))
        }
        missing = sorted(encoder.intersection(info["missing_keys"]))
        if missing and (len(missing) < len(encoder) or info["unexpected_keys"]):
            raise ValueError(
                f"The checkpoint {pretrained_model_name_or_path!r} lacks {len(missing)} weights of the encoder of "
                f"{cls.__name__}, such as {missing[0]!r}: it belongs to another family, or was saved with other "
                "options. Load it with its own configuration, or make the model with from_config()."
            )
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As in Transformers. The family's code travels along, for every Auto class, where it is not installed."""
        if type(self)._auto_class is not None:
            module = type(self).__module__.rsplit(".", 1)[-1]
            family = type(self.config).__name__.removesuffix("Config")
            self.config.auto_map = {auto: f"{module}.{family}{ending}" for auto, ending in AUTO_CLASSES.items()}
        return super().save_pretrained(save_directory, *args, **kwargs)


class EncoderModel(EncoderPreTrainedModel):
    """The encoder with, by default, a pooler over its first token."""

    def __init__(self, config: EncoderConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.embeddings = EncoderEmbeddings(config)
        self.encoder = self.stack_class(config, self.self_attention_class)
        self.pooler = Pooler(config) if add_pooling_layer else None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        attention_rows: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple | EncoderModelOutput:
        """
        Args:
            input_ids: (B, N) int64, N at most `max_position_embeddings`. inputs_embeds: (B, N, C) instead.
            attention_mask: (B, N), 1 at tokens and 0 at padding, anywhere in a row; all tokens if None.
            token_type_ids: (B, N) int64, the segment of each token; 0 if None.
            position_ids: (B, N) int64, rows of the position table, whose first token is 2; if None, they count the
                valid tokens.
            output_attentions: return the N×N map of each head, which takes memory quadratic in N.
            attention_rows: (R,) or (B, R) int64; with `output_attentions`, only the rows of the map of these tokens,
                in memory linear in N.

        Returns: last_hidden_state (B, N, C), pooler_output (B, C), and on request hidden_states and attentions
            (B, H, N or R, N). Hidden states are zero at padding.
        """
        _reject_arguments(self, kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds: not both, and not neither.")
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        inputs = input_ids if input_ids is not None else inputs_embeds
        batch, length = self._check_shapes(inputs, token_type_ids)
        if input_ids is not None:
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)

        mask, unpadding = key_mask(attention_mask, batch, length)
        # A map has rows and columns of all N tokens.
        in_layers = None if output_attentions else unpadding
        embeddings = self.embeddings(inputs, mask, token_type_ids, position_ids, in_layers)
        last, states, attentions = self.encoder(
            embeddings, mask, bool(output_attentions), bool(output_hidden_states), attention_rows, in_layers
        )
        outputs = EncoderModelOutput(
            last_hidden_state=last,
            pooler_output=None if self.pooler is None else self.pooler(last, mask),
            hidden_states=states,
            attentions=attentions,
        )
        if unpadding is not None:
            outputs.unpadding = unpadding
        return outputs

    def _check_shapes(self, inputs: Tensor, token_type_ids: Tensor | None) -> tuple[int, int]:
        if inputs.dim() not in (2, 3):
            raise ValueError(
                f"input_ids must be (batch, length) and inputs_embeds (batch, length, hidden_size): got a tensor of "
                f"shape {tuple(inputs.shape)}."
            )
        batch, length = inputs.shape[:2]
        limit = self.config.max_position_embeddings
        if length > limit:
            raise ValueError(
                f"A sequence of {length} tokens is longer than max_position_embeddings={limit}: truncate it to {limit}"
                f" (truncation=True, max_length={limit}), or make the model with max_position_embeddings={length}."
            )
        if token_type_ids is not None:
            types = self.config.type_vocab_size
            _require(
                ((token_type_ids >= 0) & (token_type_ids < types)).all(),
                f"token_type_ids must lie between 0 and type_vocab_size - 1 = {types - 1}.",
            )
        if inputs.dim() == 2:
            size = self.embeddings.word_embeddings.num_embeddings
            _require(
                ((inputs >= 0) & (inputs < size)).all(),
                f"input_ids must lie between 0 and vocab_size - 1 = {size - 1}: the tokenizer knows more tokens than "
                "the model; call resize_token_embeddings(len(tokenizer)).",
            )
        return batch, length


class MaskedLMHeadMixin(EncoderPreTrainedModel):
    """What the two models that predict tokens share: output embeddings, tying, logits and loss."""

    cls: PretrainingHeads

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        prefix = getattr(cls, "base_model_prefix", "")
        cls._tied_weights_keys = {
            "cls.predictions.decoder.weight": f"{prefix}.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        }

    def get_output_embeddings(self) -> nn.Linear:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias

    def predict_tokens(
        self, outputs: EncoderModelOutput, attention_mask: Tensor | None, labels: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The encoder's outputs, labels (B, N) -> logits (B, N, V), or (counted labels, V) if sparse, and loss."""
        hidden_states = outputs.last_hidden_state
        ignore = self.config.sparse_pred_ignore_index
        if labels is not None:
            if labels.shape != hidden_states.shape[:2]:
                raise ValueError(
                    f"labels have shape {tuple(labels.shape)}, but must be (batch, length) = "
                    f"{tuple(hidden_states.shape[:2])}."
                )
            _require_labels(labels, self.config.vocab_size, "labels", "vocab_size", ignore)
            labels = without_padding(labels, attention_mask, ignore)
            if self.config.sparse_prediction:
                counted = labels.flatten() != ignore
                hidden_states, labels = hidden_states.flatten(0, 1)[counted], labels.flatten()[counted]
                logits = self.cls.predictions(hidden_states)
                return logits, cross_entropy(logits, labels, ignore)
        # Wrappers that rebuild an output lose where the tokens lie: all are computed then.
        unpadding = outputs.unpadding
        if unpadding is None or not self._leaving_padding_out_pays(unpadding):
            logits = self.cls.predictions(hidden_states)
            return logits, None if labels is None else cross_entropy(logits, labels, ignore)
        states = hidden_states.flatten(0, 1).index_select(0, unpadding.tokens)
        # Padding has the logits of its state, which is zero: one more token.
        logits = self.cls.predictions(F.pad(states, (0, 0, 0, 1)))
        loss = None
        if labels is not None:
            loss = cross_entropy(logits[:-1], labels.flatten()[unpadding.tokens], ignore)
        count = len(unpadding.tokens)
        place = torch.full_like(hidden_states[..., 0], count, dtype=torch.long)
        place.view(-1).index_copy_(0, unpadding.tokens, torch.arange(count, device=place.device))
        return F.embedding(place, logits), loss

    def _leaving_padding_out_pays(self, unpadding: Unpadding) -> bool:
        batch, length = unpadding.shape
        padding = 1 - len(unpadding.tokens) / (batch * length)
        # The backward pass has two more products of the forward pass's size.
        products = 3 if torch.is_grad_enabled() else 1
        return products * self.config.hidden_size * padding > COPIED_LOGIT


class EncoderForMaskedLM(MaskedLMHeadMixin):
    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.add_base_model()
        self.cls = PretrainingHeads(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> tuple | MaskedLMOutput:
        """labels: (B, N) int64, the tokens to predict, -100 where none is; at padding, none is.
        The others: see the base model.

        Returns: loss, logits (B, N, V) and what the base model gives on request.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.base_model(*inputs, output_attentions, output_hidden_states, return_dict=True, **kwargs)
        logits, loss = self.predict_tokens(outputs, attention_mask, labels)
        return MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class EncoderForPreTraining(MaskedLMHeadMixin):
    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.add_base_model(add_pooling_layer=True)
        self.cls = PretrainingHeads(config, sentence_order=True)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        sentence_order_label: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> tuple | EncoderForPreTrainingOutput:
        """
        Args:
            labels: (B, N) int64, the tokens to predict, -100 where none is; at padding, none is.
            sentence_order_label: (B,) int64, 0 for segments in their order and 1 for swapped ones, as in ALBERT.
            The others: see the base model.

        Returns: `EncoderForPreTrainingOutput`.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.base_model(*inputs, output_attentions, output_hidden_states, return_dict=True, **kwargs)
        prediction_logits, mlm_loss = self.predict_tokens(outputs, attention_mask, labels)
        sop_logits = self.cls.seq_relationship(outputs.pooler_output)
        sop_loss = None
        if sentence_order_label is not None:
            _require_labels(sentence_order_label, 2, "sentence_order_label", "the number of orders")
            sop_loss = cross_entropy(sop_logits, sentence_order_label.view(-1))
        losses = [loss for loss in (mlm_loss, sop_loss) if loss is not None]
        return EncoderForPreTrainingOutput(
            loss=torch.stack(losses).sum() if losses else None,
            mlm_loss=mlm_loss,
            sop_loss=sop_loss,
            prediction_logits=prediction_logits,
            sop_logits=sop_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


class EncoderForSequenceClassification(EncoderPreTrainedModel):
    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.add_base_model()
        self.classifier = ClassificationHead(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> tuple | SequenceClassifierOutput:
        """
        Args:
            labels: (B,) int64 classes; (B,) or (B, num_labels) floats for regression; (B, num_labels) floats of 0 and
                1 for several labels at once. Which one, `config.problem_type` says; if it is None, the labels' dtype
                and `num_labels` do, at every call anew.
            The others: see the base model.

        Returns: loss, logits (B, num_labels) and what the base model gives on request.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.base_model(*inputs, output_attentions, output_hidden_states, return_dict=True, **kwargs)
        logits = self.classifier(first_token(outputs.last_hidden_state, attention_mask))
        return SequenceClassifierOutput(
            loss=None if labels is None else self._classification_loss(logits, labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _classification_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        problem_type = self.config.problem_type
        if problem_type is None:
            if self.num_labels == 1:
                problem_type = "regression"
            elif labels.is_floating_point():
                problem_type = "multi_label_classification"
            else:
                problem_type = "single_label_classification"
        if problem_type == "single_label_classification":
            _require_labels(labels, self.num_labels, "labels", "num_labels")
            return cross_entropy(logits, labels.view(-1))
        labels = labels.to(logits.dtype).view_as(logits)
        if problem_type == "regression":
            return F.mse_loss(logits, labels)
        return F.binary_cross_entropy_with_logits(logits, labels)


class EncoderForTokenClassification(EncoderPreTrainedModel):
    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.add_base_model()
        self.dropout = nn.Dropout(_classifier_dropout(config))
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> tuple | TokenClassifierOutput:
        """labels: (B, N) int64, -100 where a token has none; padding has none. The others: see the base model.

        Returns: loss, logits (B, N, num_labels) and what the base model gives on request.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.base_model(*inputs, output_attentions, output_hidden_states, return_dict=True, **kwargs)
        logits = self.classifier(self.dropout(outputs.last_hidden_state))
        loss = None
        if labels is not None:
            _require_labels(labels, self.num_labels, "labels", "num_labels")
            loss = cross_entropy(logits, without_padding(labels, attention_mask))
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class EncoderForQuestionAnswering(EncoderPreTrainedModel):
    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.add_base_model()
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> tuple | QuestionAnsweringModelOutput:
        """
        Args:
            start_positions, end_positions: (B,) int64, the first and the last token of the answer; a position outside
                the sequence is ignored.
            The others: see the base model.

        Returns: loss, start_logits and end_logits (B, N) and what the base model gives on request.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds)
        outputs = self.base_model(*inputs, output_attentions, output_hidden_states, return_dict=True, **kwargs)
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(dim=-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            start_loss = self._position_loss(start_logits, start_positions, attention_mask)
            end_loss = self._position_loss(end_logits, end_positions, attention_mask)
            loss = (start_loss + end_loss) / 2
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits.contiguous(),
            end_logits=end_logits.contiguous(),
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @staticmethod
    def _position_loss(logits: Tensor, positions: Tensor, attention_mask: Tensor | None) -> Tensor:
        if attention_mask is not None:
            # Padding is no candidate: the loss must not depend on how much of it there is.
            logits = logits.masked_fill(attention_mask == 0, torch.finfo(logits.dtype).min)
        positions = positions.view(-1)
        outside = (positions < 0) | (positions >= logits.shape[1])
        return cross_entropy(logits, positions.masked_fill(outside, -100))


class EncoderForMultipleChoice(EncoderPreTrainedModel):
    def __init__(self, config: EncoderConfig):
        super().__init__(config)
        self.add_base_model()
        self.pre_classifier = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.ReLU()
        self.classifier = nn.Linear(config.hidden_size, 1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> tuple | MultipleChoiceModelOutput:
        """
        Args:
            input_ids, attention_mask, token_type_ids, position_ids: (B, choices, N).
            inputs_embeds: (B, choices, N, C).
            labels: (B,) int64, the right choice.

        Returns: loss, logits (B, choices) and what the base model gives on request.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds: not both, and not neither.")
        choices = (input_ids if input_ids is not None else inputs_embeds).shape[1]
        inputs = [input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds]
        # A choice is a row of the batch.
        inputs = [None if tensor is None else tensor.flatten(0, 1) for tensor in inputs]
        outputs = self.base_model(*inputs, output_attentions, output_hidden_states, return_dict=True, **kwargs)
        hidden = self.activation(self.pre_classifier(first_token(outputs.last_hidden_state, inputs[1])))
        logits = self.classifier(hidden).view(-1, choices)
        loss = None
        if labels is not None:
            _require_labels(labels, choices, "labels", "the number of choices")
            loss = cross_entropy(logits, labels.view(-1))
        return MultipleChoiceModelOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )
