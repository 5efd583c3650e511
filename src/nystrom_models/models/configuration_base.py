# SPDX-License-Identifier: Apache-2.0
"""The shared part of all families' configurations: fields under Transformers' names, and their validation."""

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

LAYER_NORM_POSITIONS = ("post", "pre")
POOLINGS = ("first", "mean", "last")


@strict
class BaseConfig(PreTrainedConfig):
    r"""
    The fields of every family. A family also defines:

    - `first_position`: the position id of a row's first token.
    - `may_be_causal`: whether the family's attention can be causal (`is_decoder=True`).

    Args:
        vocab_size (`int`, defaults to 30000): number of tokens.
        hidden_size (`int`, defaults to 768): width of the hidden states; a multiple of `num_attention_heads`.
        embedding_size (`int`, *optional*): width of the embeddings of words, positions and token types, whose sum a
            linear layer projects to `hidden_size`, as in ALBERT and ELECTRA; `inputs_embeds` then have this width. If
            `None`, they are as wide as the hidden states, and there is no such layer.
        num_hidden_layers (`int`, defaults to 12): number of layers.
        num_attention_heads (`int`, defaults to 12): number of heads.
        intermediate_size (`int`, defaults to 3072): width of the feed-forward layer.
        hidden_act (`str`, defaults to `"gelu_new"`): activation of the feed-forward layer and the heads.
        hidden_dropout_prob (`float`, defaults to 0.1): dropout of embeddings, sub-layer outputs and heads.
        attention_probs_dropout_prob (`float`, defaults to 0.1): dropout of the attention weights.
        max_position_embeddings (`int`, defaults to 512): the longest sequence, in tokens.
        type_vocab_size (`int`, defaults to 2): number of token types (segments).
        initializer_range (`float`, defaults to 0.02): standard deviation of the initial weights.
        layer_norm_eps (`float`, defaults to 1e-5): epsilon of the layer norms.
        layer_norm_position (`str`, defaults to `"post"`): `"post"` normalises after each sub-layer and its residual,
            as in BERT; `"pre"` normalises the input of each sub-layer, and the output of the last layer (Xiong et al.
            2020, arXiv:2002.04745).
        unpad_inputs (`bool`, defaults to `True`): compute only the valid tokens of padded batches, if there is enough
            padding to save time. Inside the encoder, and for hooks on its layers, hidden states are then (1, number of
            valid tokens, hidden_size). With `False` they are always (batch, length, hidden_size), with the valid
            tokens first in each row. The model's outputs are the same.
        classifier_dropout (`float`, *optional*): dropout of the classification heads; `hidden_dropout_prob` if `None`.
        classifier_activation (`str`, *optional*): activation in the heads that classify sequences and choices; if
            `None`, `hidden_act` for sequences and `"relu"` for choices, as in Transformers' own Nyströmformer.
        classifier_pooling (`str`, defaults to `"first"`): the state by which a sequence is classified: that of its
            `"first"` or `"last"` valid token, or the `"mean"` of all valid tokens.
        dual_encoder (`bool`, defaults to `False`): sequences are classified in pairs: the encoder reads the two
            separately, as rows of (batch, 2, length), and the head classifies their pooled states a and b by
            [a, b, a * b, a - b], as in the Long Range Arena's Retrieval (Tay et al. 2021, arXiv:2011.04006).
        sparse_prediction (`bool`, defaults to `False`): with labels, compute the masked-language-modelling logits only
            where a label is not `sparse_pred_ignore_index`: logits are then (number of labels, vocab_size).
        sparse_pred_ignore_index (`int`, defaults to -100): the label of tokens that are not predicted.
        pad_token_id (`int` or `None`, defaults to 1): the padding token, whose embedding is not trained; `None` for
            none.
        bos_token_id (`int` or `None`, defaults to 0): the token that begins a text, for generation.
        eos_token_id (`int`, `list[int]` or `None`, defaults to 2): the token or tokens that end one.
        tie_word_embeddings (`bool`, defaults to `True`): share the word embeddings with the output layer.
    """

    first_position: ClassVar[int] = 0
    may_be_causal: ClassVar[bool] = False
    # For a cache's layers in causal families: the number of members of `recurrent_cache.State`.
    number_of_conv_states: ClassVar[int] = 3
    # The losses that ForPreTraining returns with its logits are not predictions.
    keys_to_ignore_at_inference = ["cache", "past_key_values", "mlm_loss", "sop_loss"]

    vocab_size: int = 30000
    hidden_size: int = 768
    embedding_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu_new"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    layer_norm_position: str = "post"
    unpad_inputs: bool = True
    classifier_dropout: float | int | None = None
    classifier_activation: str | None = None
    classifier_pooling: str = "first"
    dual_encoder: bool = False
    sparse_prediction: bool = False
    sparse_pred_ignore_index: int = -100
    pad_token_id: int | None = 1
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 2
    is_decoder: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        # `strict` also validates, after this, but wraps the error in one of its own.
        self.validate_architecture()

    @property
    def has_states(self) -> bool:
        """Whether the model reads a sequence in parts, through states of fixed size."""
        return self.is_decoder

    @property
    def layer_types(self) -> list[str]:
        """The names by which Transformers creates the layers of a cache, for causal families."""
        return ["linear_attention"] * self.num_hidden_layers

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings of words, positions and token types."""
        return self.hidden_size if self.embedding_size is None else self.embedding_size

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in Transformers; raises ValueError for the configuration of another family."""
        model_type = config_dict.get("model_type", cls.model_type)
        # A user's own configuration reads that of the family from which it derives.
        if model_type not in {base.model_type for base in cls.__mro__ if issubclass(base, BaseConfig)}:
            raise ValueError(
                f"This is the configuration of model_type={model_type!r}, not of {cls.model_type!r}: load it with "
                "AutoConfig and AutoModel."
            )
        if model_type != cls.model_type:
            config_dict = config_dict | {"model_type": cls.model_type}
        return super().from_dict(config_dict, **kwargs)

    def validate_architecture(self) -> None:
        """Raises ValueError, naming the field and a value that works, if the fields contradict each other."""
        for name in (
            "vocab_size",
            "hidden_size",
            "num_attention_heads",
            "intermediate_size",
            "type_vocab_size",
        ):
            require_positive(name, getattr(self, name))
        if self.pad_token_id is not None and not 0 <= self.pad_token_id < self.vocab_size:
            raise ValueError(
                f"pad_token_id={self.pad_token_id} is not a token of vocab_size={self.vocab_size}: use one from 0 to "
                f"{self.vocab_size - 1}, or None for no padding token."
            )
        if self.layer_norm_eps < 0:
            raise ValueError(f"layer_norm_eps={self.layer_norm_eps} must not be negative.")
        if self.max_position_embeddings is not None:
            require_positive("max_position_embeddings", self.max_position_embeddings)
        if self.embedding_size is not None:
            require_positive("embedding_size", self.embedding_size)
        if self.num_hidden_layers < 0:
            raise ValueError(f"num_hidden_layers={self.num_hidden_layers} must not be negative.")
        heads, width = self.num_attention_heads, self.hidden_size
        if width % heads:
            raise ValueError(
                f"hidden_size={width} is not a multiple of num_attention_heads={heads}: "
                f"use hidden_size={-(-width // heads) * heads} or another number of heads."
            )
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout"):
            require_probability(name, getattr(self, name))
        require_one_of("layer_norm_position", self.layer_norm_position, LAYER_NORM_POSITIONS)
        require_one_of("classifier_pooling", self.classifier_pooling, POOLINGS)
        if self.add_cross_attention:
            raise ValueError(
                f"{type(self).__name__} has no cross-attention: use add_cross_attention=False. EncoderDecoderModel "
                "and the like set it for their decoder, which must be another model, such as a BERT or GPT-2."
            )
        if not self.may_be_causal and (self.is_decoder or getattr(self, "is_causal", False)):
            raise ValueError(
                f"{type(self).__name__} describes an encoder: its attention sees the whole sequence. Use "
                "is_decoder=False and is_causal=False."
            )
        if self.is_decoder and self.embedding_size is not None:
            raise ValueError(
                f"embedding_size={self.embedding_size} is for encoders: a causal model predicts words by their "
                "embeddings, which must be as wide as its states. Use embedding_size=None with is_decoder=True."
            )
        if self.is_decoder and self.classifier_pooling == "first":
            raise ValueError(
                'classifier_pooling="first" does not fit is_decoder=True, where the first token sees no other: '
                'use "last" or "mean".'
            )


def entry_of_layer(name: str, value: Any, layer_idx: int) -> Any:
    """A layer's entry of the field `name`, whose value is a list with one for each layer, or the same for all.

    Raises ValueError for a layer without an entry, which a model may have that was changed by hand.
    """
    if not isinstance(value, list):
        return value
    if layer_idx >= len(value):
        raise ValueError(
            f"{name}={value} has {len(value)} entries, and none for layer_idx={layer_idx}, counted from 0: give one "
            "for each layer_idx of the model, or a single number for all."
        )
    return value[layer_idx]


def require_positive(name: str, value: int) -> None:
    """Raises ValueError for a field that must be at least 1."""
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1.")


def require_probability(name: str, value: float | None) -> None:
    """Raises ValueError for a field that is neither None nor from 0 to 1."""
    if value is not None and not 0 <= value <= 1:
        raise ValueError(f"{name}={value} must lie between 0 and 1.")


def require_one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError for a field whose value is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown: use one of {', '.join(choices)}.")


def require_odd_kernel(kernel_size: int | None) -> None:
    """Raises ValueError for a `conv_kernel_size` with which a convolution would not keep the length."""
    if kernel_size is not None and (kernel_size < 1 or kernel_size % 2 == 0):
        raise ValueError(
            f"conv_kernel_size={kernel_size} must be odd and positive, so that the convolution keeps the length: "
            f"use {max(kernel_size, 0) + 1}, or None for no convolution."
        )
