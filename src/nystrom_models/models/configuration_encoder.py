# SPDX-License-Identifier: Apache-2.0
"""What the configurations of all families share: fields under Transformers' names, and their validation."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig


@strict
class EncoderConfig(PreTrainedConfig):
    r"""
    Fields of every family.

    Args:
        vocab_size (`int`, defaults to 30000): number of tokens.
        hidden_size (`int`, defaults to 768): width of the hidden states; a multiple of `num_attention_heads`.
        num_hidden_layers (`int`, defaults to 12): number of layers.
        num_attention_heads (`int`, defaults to 12): number of heads.
        intermediate_size (`int`, defaults to 3072): width of the feed-forward layer.
        hidden_act (`str`, defaults to `"gelu_new"`): activation of the feed-forward layer and the heads.
        hidden_dropout_prob (`float`, defaults to 0.1): dropout of embeddings, sub-layer outputs and heads.
        attention_probs_dropout_prob (`float`, defaults to 0.1): dropout of the weights a token attends with.
        max_position_embeddings (`int`, defaults to 512): the longest sequence, in tokens. The table of positions has
            two rows more, and positions start at 2, as in the published Nyströmformer checkpoints.
        type_vocab_size (`int`, defaults to 2): number of token types (segments).
        conv_kernel_size (`int` or `None`): odd kernel of the depthwise convolution of V that is added to the
            attention's output; `None` for none.
        initializer_range (`float`, defaults to 0.02): standard deviation of the initial weights.
        layer_norm_eps (`float`, defaults to 1e-5): epsilon of the layer norms.
        classifier_dropout (`float`, *optional*): dropout of the classification heads; `hidden_dropout_prob` if `None`.
        sparse_prediction (`bool`, defaults to `False`): with labels, compute the masked-language-modelling logits only
            where a label is not `sparse_pred_ignore_index`: logits are then (number of labels, vocab_size).
        sparse_pred_ignore_index (`int`, defaults to -100): the label of tokens that are not predicted.
        tie_word_embeddings (`bool`, defaults to `True`): share the word embeddings with the output layer.
    """

    vocab_size: int = 30000
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu_new"
    hidden_dropout_prob: float | int = 0.1
    attention_probs_dropout_prob: float | int = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    conv_kernel_size: int | None = None
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-5
    classifier_dropout: float | int | None = None
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
        # As `strict` does after this, but it wraps the error in one of its own.
        self.validate_architecture()

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in Transformers; raises ValueError for the configuration of another family."""
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type != cls.model_type:
            raise ValueError(
                f"This is the configuration of model_type={model_type!r}, not of {cls.model_type!r}: load it with "
                "AutoConfig and AutoModel."
            )
        return super().from_dict(config_dict, **kwargs)

    def validate_architecture(self) -> None:
        """Raises ValueError, naming the field and a value that works, if the fields contradict each other."""
        for name in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size", "type_vocab_size"):
            _require_positive(name, getattr(self, name))
        _require_positive("max_position_embeddings", self.max_position_embeddings)
        if self.num_hidden_layers < 0:
            raise ValueError(f"num_hidden_layers={self.num_hidden_layers} must not be negative.")
        heads, width = self.num_attention_heads, self.hidden_size
        if width % heads:
            raise ValueError(
                f"hidden_size={width} is not a multiple of num_attention_heads={heads}: "
                f"use hidden_size={-(-width // heads) * heads} or another number of heads."
            )
        kernel = self.conv_kernel_size
        if kernel is not None and (kernel < 1 or kernel % 2 == 0):
            raise ValueError(
                f"conv_kernel_size={kernel} must be odd and positive, so that the convolution keeps the length: "
                f"use {max(kernel, 0) + 1}, or None for no convolution."
            )
        if self.is_decoder or self.add_cross_attention or getattr(self, "is_causal", False):
            raise ValueError(
                f"{type(self).__name__} describes an encoder: its attention sees the whole sequence. Use "
                "is_decoder=False, add_cross_attention=False and is_causal=False."
            )


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1.")
