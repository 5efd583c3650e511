# SPDX-License-Identifier: Apache-2.0
"""Configuration of linear transformers."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from .configuration_base import BaseConfig, require_odd_kernel, require_one_of

FEATURE_MAPS = ("elu", "relu", "hedgehog")
POSITION_EMBEDDING_TYPES = ("learned", "sinusoidal")


@strict
class LinearTransformerConfig(BaseConfig):
    r"""
    Configuration of a linear transformer (Katharopoulos et al. 2020, arXiv:2006.16236): an encoder, or with
    `is_decoder=True` a causal model, which reads and generates with states of fixed size.

    Args:
        is_decoder (`bool`, defaults to `False`): causal attention: a token sees itself and the tokens before it.
        feature_map (`str` or `None`, defaults to `"elu"`): φ of queries and keys: `"elu"` (elu + 1, the paper's),
            `"relu"`, or `"hedgehog"`, learned for each head (softmax of ±Wx; Zhang et al. 2024, arXiv:2402.04347),
            with twice as many features. `None`: exact softmax attention in the same model, for comparison. It has no
            state of fixed size: a causal model then generates without a cache.
        position_embedding_type (`str`, defaults to `"learned"`): `"learned"`, or `"sinusoidal"`, which does not limit
            the length.
        max_position_embeddings (`int`, *optional*): the longest sequence, in tokens; if `None`, 512 with learned
            positions and no limit with sinusoidal ones. A model that reads in parts counts the tokens of all parts.
        conv_kernel_size (`int` or `None`, defaults to `None`): odd kernel of a depthwise convolution of V along the
            tokens, which is added to the attention's output, as in a Nyströmformer; with `is_decoder=True`, over a
            token and those before it. `None` for none.
        projected_dim (`int`, *optional*): for encoders, the number of slots that φ(K) and V are projected to along the
            tokens, by one learned projection for each layer, as in a Linformer. It costs time instead of saving it,
            and nothing keeps the normaliser positive. It exists for comparison.
        layer_norm_position (`str`, *optional*): as in `BaseConfig`; if `None`, `"pre"` with `is_decoder=True`, else
            `"post"`.
        classifier_pooling (`str`, *optional*): as in `BaseConfig`; if `None`, `"last"` with `is_decoder=True`, else
            `"first"`.
        attention_probs_dropout_prob (`float`, defaults to 0): must be 0: there are no attention weights to drop.
        use_cache (`bool`, *optional*): whether the causal model returns its states when it is not trained; if `None`,
            it does if it has states: if `feature_map` is not `None`, and it has layers.
        The others: see `BaseConfig`.

    Raises `ValueError` for fields that contradict each other.

    Example:

    ```python
    >>> from nystrom_models import LinearTransformerConfig, LinearTransformerForCausalLM

    >>> config = LinearTransformerConfig(is_decoder=True, position_embedding_type="sinusoidal")
    >>> model = LinearTransformerForCausalLM(config)
    ```
    """

    model_type = "linear_transformer"
    may_be_causal: ClassVar[bool] = True

    feature_map: str | None = "elu"
    position_embedding_type: str = "learned"
    max_position_embeddings: int | None = None
    conv_kernel_size: int | None = None
    projected_dim: int | None = None
    layer_norm_position: str | None = None
    classifier_pooling: str | None = None
    attention_probs_dropout_prob: float | int = 0.0
    use_cache: bool | None = None

    def __post_init__(self, **kwargs):
        if self.max_position_embeddings is None and self.position_embedding_type == "learned":
            self.max_position_embeddings = 512
        if self.layer_norm_position is None:
            self.layer_norm_position = "pre" if self.is_decoder else "post"
        if self.classifier_pooling is None:
            self.classifier_pooling = "last" if self.is_decoder else "first"
        if self.use_cache is None:
            self.use_cache = self.feature_map is not None and self.num_hidden_layers > 0
        super().__post_init__(**kwargs)

    @property
    def has_states(self) -> bool:
        return self.is_decoder and self.feature_map is not None and self.num_hidden_layers > 0

    def validate_architecture(self) -> None:
        """As `BaseConfig.validate_architecture`, with this family's own fields."""
        super().validate_architecture()
        if self.feature_map is not None:
            require_one_of("feature_map", self.feature_map, FEATURE_MAPS)
        elif self.use_cache:
            raise ValueError(
                "feature_map=None is exact attention, which has no state of fixed size to return: use use_cache=False."
            )
        elif self.projected_dim is not None:
            raise ValueError("projected_dim projects φ(K), so it needs a feature_map: use None, or a Linformer.")
        require_one_of("position_embedding_type", self.position_embedding_type, POSITION_EMBEDDING_TYPES)
        require_odd_kernel(self.conv_kernel_size)
        if self.max_position_embeddings is None and self.position_embedding_type == "learned":
            raise ValueError(
                'position_embedding_type="learned" has a table of max_position_embeddings rows: give a number, or use '
                '"sinusoidal".'
            )
        if self.attention_probs_dropout_prob:
            raise ValueError(
                f"attention_probs_dropout_prob={self.attention_probs_dropout_prob} is not possible: the attention of "
                "this family drops no weights. Use 0, and hidden_dropout_prob instead."
            )
        if self.projected_dim is None:
            return
        if self.is_decoder:
            raise ValueError(
                f"projected_dim={self.projected_dim} mixes tokens with later tokens: use None with is_decoder=True."
            )
        if self.max_position_embeddings is None or not 1 <= self.projected_dim <= self.max_position_embeddings:
            raise ValueError(
                f"projected_dim={self.projected_dim} must lie between 1 and max_position_embeddings="
                f"{self.max_position_embeddings}: set both to numbers."
            )


__all__ = ["LinearTransformerConfig"]
