# SPDX-License-Identifier: Apache-2.0
"""The base model of every family: initialisation, loading, saving, and the encoder with its pooler.

Legend: B batch, N tokens, C hidden size, H heads, R chosen rows of an attention map.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils import logging
from transformers.utils.generic import can_return_tuple

from .batch import AttentionMaps, find_documents, make_batch
from .configuration_base import BaseConfig
from .embeddings import Embeddings, is_sinusoidal, repeat_positions
from .input_checks import (
    check_attention_rows,
    check_documents,
    check_inputs,
    check_length,
    check_positions,
    key_mask,
    reject_arguments,
    reject_cache,
    reject_earlier_tokens,
    require_direction,
    require_one_input,
    require_tensors,
    warn_of_mixed_documents,
)
from .layers import LayerStack
from .pooling import pool
from .recurrent_cache import CACHE, State, add_tokens, given_cache, read_state, require_recurrent
from .self_attention import SelfAttention
from .tracing import can_read_values

logger = logging.get_logger(__name__)


@dataclass
class BaseModelOutput(BaseModelOutputWithPoolingAndCrossAttentions):
    """As in Transformers, without attention to another sequence, and:

    token_places: (T,) int64, only for heads that ask for it: where the valid tokens lie in the flattened batch, if
        only these were computed.
    """

    token_places: Tensor | None = None


def needs_rows(model: nn.Module) -> bool:
    """Whether hooks divide the first dimension of the states into the rows of a batch: those of PEFT, if each row has
    an adapter of its own (`adapter_names`), and those of Opacus, for the gradients of each row."""
    for module in model.modules():
        if any("adapter_names" in getattr(hook, "keywords", ()) for hook in module._forward_pre_hooks.values()):
            return True
        if any(getattr(hook, "__name__", "") == "capture_activations_hook" for hook in module._forward_hooks.values()):
            return True
    return False


class BasePreTrainedModel(PreTrainedModel):
    """Initialisation, loading and saving of every family.

    The file of a family defines its own `...PreTrainedModel`, with `config_class`, and its base model and heads, which
    derive from that class and from the base classes.
    """

    if TYPE_CHECKING:
        # For type checkers only: at run time, Transformers would take these as the configuration of every family.
        config: BaseConfig
        config_class: type[BaseConfig]

    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_compile_fullgraph = True
    _no_split_modules = ["Embeddings", "TransformerLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _input_embed_layer = "word_embeddings"
    # Checkpoints of older versions of Transformers hold these constants.
    _keys_to_ignore_on_load_unexpected = [r"embeddings\.(position_ids|token_type_ids)$"]

    # Set by each family: the classes of its parts, and the name of the attention kernels made for it, if any.
    self_attention_class: ClassVar[type[SelfAttention]]
    stack_class: ClassVar[type[LayerStack]] = LayerStack
    kernels: ClassVar[str | None] = None
    # The Auto classes that load this class; and for a family, the class that each Auto class loads.
    auto_names: ClassVar[tuple[str, ...]] = ()
    auto_classes: ClassVar[dict[str, type[PreTrainedModel]]] = {}
    # Weights of a head that are another's; None for the word embeddings.
    tied_weights: ClassVar[dict[str, str | None]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A family's class; a user's subclass inherits its keys, or has its own.
        if cls.tied_weights and cls.base_model_prefix and cls._tied_weights_keys is None:
            words = f"{cls.base_model_prefix}.embeddings.word_embeddings.weight"
            cls._tied_weights_keys = {name: source or words for name, source in cls.tied_weights.items()}
        # save_pretrained copies the code of classes with this attribute. A user's subclass must not inherit it,
        # because its own file would not be copied.
        if not cls.is_of_the_family():
            cls._auto_class = None
        if cls is cls.family():
            cls.auto_classes = {}
        elif cls.is_of_the_family():
            cls.auto_classes.update(dict.fromkeys(cls.auto_names, cls))

    @classmethod
    def family(cls) -> "type[BasePreTrainedModel] | None":
        """The `...PreTrainedModel` of the family; None for the base classes here."""
        roots = (base for base in cls.__mro__ if BasePreTrainedModel in base.__bases__)
        return next((root for root in roots if getattr(root, "config_class", None) is not None), None)

    @classmethod
    def _config_class_of_the_family(cls) -> type[BaseConfig]:
        """The family's configuration, of which a user's own may be a subclass with another `model_type`."""
        family = cls.family()
        return BaseConfig if family is None else family.config_class

    @classmethod
    def is_of_the_family(cls) -> bool:
        """Whether this class is defined in the file of its family, and not in a user's own."""
        family = cls.family()
        return family is not None and family.__module__ == cls.__module__

    def __init__(self, config: BaseConfig, *args: Any, **kwargs: Any):
        wanted = self.config_class
        # Also by model_type and not only by class: code that travels with a checkpoint is imported more than once.
        same_type = config.model_type == wanted.model_type and hasattr(config, "first_position")
        if not (same_type or isinstance(config, self._config_class_of_the_family())):
            # Of another model, few fields mean the same: `from_dict` refuses them.
            remedy = (
                f"make one by {wanted.__name__}.from_dict(config.to_dict())"
                if config.model_type == wanted.model_type
                else f"AutoModel.from_config(config) makes a model of model_type={config.model_type!r}"
            )
            raise TypeError(
                f"{type(self).__name__} needs a {wanted.__module__}.{wanted.__name__}, but config is a "
                f"{type(config).__module__}.{type(config).__name__}: {remedy}."
            )
        # Fields may have been set after the configuration was made.
        config.validate_architecture()
        super().__init__(config, *args, **kwargs)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # Transformers does not know modules that own bare parameters: they initialise them by this method.
        initialize = getattr(module, "initialize_parameters", None)
        if initialize is not None:
            initialize()

    def add_base_model(self, add_pooling_layer: bool = False) -> None:
        """For heads: adds the family's base model, under its prefix."""
        base_model = self.auto_classes["AutoModel"](self.config, add_pooling_layer=add_pooling_layer)
        setattr(self, self.base_model_prefix, base_model)

    # ---- attention by name ----

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """As in Transformers. By default the family's kernels where they can run on this machine, else "sdpa".

        Raises ValueError for kernels of another family, for this family's where they cannot run, and for "nystrom",
        which is for encoders of Transformers.
        """
        requested = self.kernels if requested_attention is None else requested_attention
        if requested == "nystrom":
            raise ValueError(
                f'attn_implementation="nystrom" is for encoders of Transformers; {type(self).__name__} has the '
                'attention that its configuration describes. Use "sdpa".'
            )
        # Our kernels, unlike the functions of Transformers, have a method that tells where they can run.
        why_not_here = getattr(ALL_ATTENTION_FUNCTIONS.get(requested), "why_not_here", None)
        if why_not_here is None:
            return super().get_correct_attn_implementation(requested_attention, is_init_check)
        reason = why_not_here() if requested == self.kernels else f"it is not made for {type(self).__name__}"
        if reason is None:
            return requested
        if requested_attention is None:
            return super().get_correct_attn_implementation(None, is_init_check)
        raise ValueError(f'attn_implementation="{requested}" cannot be used here: {reason}. Use "sdpa".')

    # ---- positions ----

    def get_position_embeddings(self) -> nn.Embedding:
        """The table of learned positions."""
        embeddings: Any = self.base_model.embeddings
        return embeddings.position_embeddings

    def resize_position_embeddings(self, new_num_position_embeddings: int) -> None:
        """Sets the longest sequence to `new_num_position_embeddings` tokens, by repeating or cutting the table of
        positions.

        Raises ValueError for a number below 1.
        """
        config, table = self.config, self.get_position_embeddings()
        before = config.max_position_embeddings
        config.max_position_embeddings = new_num_position_embeddings
        try:
            config.validate_architecture()
        except ValueError:
            config.max_position_embeddings = before
            raise
        if is_sinusoidal(config):
            return
        with torch.no_grad():
            weight = repeat_positions(table.weight, config.first_position, new_num_position_embeddings)
        table.weight = nn.Parameter(weight, requires_grad=table.weight.requires_grad)
        table.num_embeddings = len(weight)

    # ---- loading and saving ----

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """As in Transformers, which reports missing and unexpected weights.

        Raises ValueError for a checkpoint of another model: some of the encoder's weights are missing, and there are
        unexpected weights of an encoder; or all are missing, and there are any unexpected weights.
        """
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *model_args, output_loading_info=True, **kwargs
        )
        model, info = loaded
        prefix = model.base_model_prefix + "."
        encoder = {
            name for name in model.state_dict() if name.removeprefix(prefix).startswith(("embeddings.", "encoder."))
        }
        missing = sorted(encoder.intersection(info["missing_keys"]))
        left_over = [name for name in info["unexpected_keys"] if {"embeddings", "encoder"} & set(name.split("."))]
        if missing and (left_over or (len(missing) == len(encoder) and info["unexpected_keys"])):
            raise ValueError(
                f"The checkpoint {pretrained_model_name_or_path!r} lacks {len(missing)} weights of the encoder of "
                f"{cls.__name__}, such as {missing[0]!r}: it belongs to another family, or was saved with other "
                "options. Load it with its own configuration, or make the model with from_config()."
            )
        return (model, info) if output_loading_info else model

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in Transformers. The family's code is saved, too, so that every Auto class loads the model where the
        package is not installed."""
        if not self.is_of_the_family():
            # The loaded configuration may name files that do not travel with a user's own class.
            self.config.auto_map = {}
        elif type(self)._auto_class is not None:
            self.config.auto_map = {
                name: f"{member.__module__.rsplit('.', 1)[-1]}.{member.__name__}"
                for name, member in self.auto_classes.items()
            }
        super().save_pretrained(save_directory, *args, **kwargs)


class BaseModel(BasePreTrainedModel):
    """Embeddings and layers and, by default, a pooler over the first token."""

    auto_names = ("AutoModel", "AutoModelForTextEncoding")

    def __init__(self, config: BaseConfig, add_pooling_layer: bool = True):
        super().__init__(config)
        self.is_decoder = config.is_decoder
        self.embeddings = Embeddings(config)
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
        cache: Cache | None = None,
        use_cache: bool | None = None,
        output_token_places: bool = False,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> tuple | BaseModelOutput:
        """
        Args:
            input_ids: (B, N) int64; a row, or a packed document, has at most `max_position_embeddings` tokens.
                inputs_embeds: (B, N, C) instead, or (B, N, embedding_size).
            attention_mask: (B, N), 1 at tokens and 0 at padding, anywhere in a row; all tokens if None. With a cache
                it may be longer than N: the columns of earlier tokens come first, and are ignored.
            token_type_ids: (B, N) int64, the segment of each token; 0 if None.
            position_ids: (B, N) int64, from `config.first_position` on. If None, the valid tokens are counted, from
                the end of a cache on.
            output_attentions: return the N×N map of each head, which takes memory quadratic in N.
            attention_rows: (R,) or (B, R) int64; with `output_attentions`, return only the rows of these tokens, in
                memory linear in N.
            cache, use_cache: for causal families only: the recurrent states to continue from, which this call's
                tokens are added to, and whether to return them. A new cache is made if none is given.
                past_key_values: the same as cache, by the name that it has before Transformers 5.24.
            seq_idx: (B, N) int64, for rows packed with several documents: the number of each token's document. No
                token sees another document, and positions restart in each document. If None, it is found in
                `cu_seq_lens_q`, and by a decoder without a cache and a mask in `position_ids` that restart, but not in
                a graph.
            cu_seq_lens_q: (D + 1,) int32, the same as FlashAttention names it: the tokens before each of D documents,
                and all tokens of the batch. `cu_seq_lens_k`, `max_length_q` and `max_length_k` add nothing to it.
            output_token_places: for heads, see `BaseModelOutput`.

        Returns: last_hidden_state (B, N, C), pooler_output (B, C), and on request hidden_states and attentions
            (B, H, N or R, N). Hidden states are zero at padding.
        """
        require_direction(type(self).__name__, self.config.is_decoder, made_with=self.is_decoder)
        require_tensors(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            attention_rows=attention_rows,
            seq_idx=seq_idx,
            cu_seq_lens_q=cu_seq_lens_q,
        )
        reject_arguments(type(self).__name__, kwargs, self.config.is_decoder)
        cache = self._cache(given_cache(cache, past_key_values), use_cache)
        inputs = require_one_input(input_ids, inputs_embeds)
        seen = read_state(cache, 0, State.TOKENS)
        # Adapters stand in the place of the table, some without its size.
        num_words = getattr(self.embeddings.word_embeddings, "num_embeddings", self.config.vocab_size)
        shape = check_inputs(self.config, inputs, token_type_ids, position_ids, num_words, seen)
        if input_ids is not None and can_read_values(input_ids) and input_ids.numel():
            self.warn_if_padding_and_no_attention_mask(input_ids, attention_mask)
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states

        mask = key_mask(attention_mask, *shape, seen)
        if output_attentions:
            reject_earlier_tokens(seen)
        # Rows with neither a mask nor a cache may hold several documents.
        packed_positions = position_ids if attention_mask is None and cache is None else None
        restarts = packed_positions if self.config.is_decoder else None
        seq_idx = find_documents(shape, seq_idx, cu_seq_lens_q, restarts)
        if seq_idx is not None:
            check_documents(seq_idx, shape, cache is not None, bool(output_attentions))
        elif packed_positions is not None and not self.config.is_decoder:
            warn_of_mixed_documents(packed_positions)
        # A map has rows and columns of all N tokens.
        pack = mask is not None and self.config.unpad_inputs and not output_attentions
        pack = pack and not needs_rows(self)
        batch = make_batch(mask, shape, inputs.device, pack=pack, cache=cache, documents=seq_idx)
        limit = self.config.max_position_embeddings
        # A row of the batch is a document, if rows are packed with them.
        check_length(shape[1] if seq_idx is None else batch.rows[1], limit)
        if seen is not None and position_ids is None and limit is not None:
            check_positions(batch.positions, limit)
        if attention_rows is not None:
            check_attention_rows(attention_rows, *shape, output_attentions=bool(output_attentions))
        if output_attentions:
            batch.maps = AttentionMaps(None if attention_rows is None else batch.rank_of(attention_rows))
        embeddings = self.embeddings(inputs, batch, token_type_ids, position_ids)
        last, states = self.encoder(embeddings, batch, bool(output_hidden_states))
        if cache is not None:
            add_tokens(cache, batch.given_mask, shape, inputs.device)
        returned: dict[str, Any] = {CACHE: None if use_cache is False else cache}
        return BaseModelOutput(
            last_hidden_state=last,
            pooler_output=None if self.pooler is None else self.pooler(last, batch.given_mask),
            hidden_states=states,
            attentions=tuple(batch.maps.collected) if output_attentions else None,
            token_places=batch.sources if output_token_places else None,
            **returned,
        )

    def _cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """The cache to continue with; a new one if a causal model is asked for one."""
        if not self.config.has_states:
            reject_cache(type(self).__name__, cache, use_cache, self.config.is_decoder)
            return None
        # Without gradients no layer runs twice, so that models generate between steps of training.
        checkpointing = self.training and self.encoder.gradient_checkpointing and torch.is_grad_enabled()
        if cache is not None:
            if checkpointing:
                raise ValueError(
                    f"{CACHE} cannot be combined with gradient checkpointing, which adds the tokens twice: leave "
                    f"{CACHE} out, or call gradient_checkpointing_disable()."
                )
            require_recurrent(cache, self.config.num_hidden_layers, type(self).__name__)
            return cache
        if use_cache and checkpointing:
            logger.warning_once("use_cache=True cannot be combined with gradient checkpointing: it is set to False.")
            return None
        return DynamicCache(config=self.config) if use_cache else None


class Pooler(nn.Module):
    """One state for each row: that of its first token; in a causal model that of its last, which has seen all
    tokens."""

    def __init__(self, config: BaseConfig):
        super().__init__()
        self.pooling = "last" if config.is_decoder else "first"
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = nn.Tanh()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None) -> Tensor:
        return self.activation(self.dense(pool(hidden_states, attention_mask, self.pooling)))
