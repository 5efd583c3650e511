# SPDX-License-Identifier: Apache-2.0
"""Configuration of Nyströmformer models."""

from typing import ClassVar

from huggingface_hub.dataclasses import strict

from .configuration_base import BaseConfig, entry_of_layer, require_odd_kernel, require_positive


@strict
class NystromformerConfig(BaseConfig):
    r"""
    Configuration of a Nyströmformer (Xiong et al. 2021, arXiv:2102.03902). The fields of Transformers' own
    `NystromformerConfig` keep their names and meaning, so that checkpoints move both ways; the defaults are those of
    [uw-madison/nystromformer-512](https://huggingface.co/uw-madison/nystromformer-512).

    Args:
        num_landmarks (`int`, `list[int | None]` or `None`, defaults to 64): landmarks M of the Nyström approximation;
            a list has a number, or `None`, for each layer. Sequences of at most M tokens get exact attention. `None`:
            exact softmax attention at every length, in the same model.
        segment_means_seq_len (`int`, defaults to 64): kept and written back for Transformers' own class. It is not
            needed here: landmarks are found for any length.
        conv_kernel_size (`int` or `None`, defaults to 65): odd kernel of the depthwise convolution of V along the
            tokens, which is added to the attention's output; `None` for none.
        pinv_iterations (`int`, defaults to 6): steps of the iterative pseudo-inverse (eq. 14). More than 20 are of no
            use: where segments are similar, every step makes rounding errors about three times as large, up to NaN.
        inv_coeff_init_option (`bool`, defaults to `False`): kept for Transformers' own class. Here the iteration
            always starts from each matrix's own norm (the paper's rule). A norm taken over the whole batch would make
            the result of a row depend on the other rows.
        max_position_embeddings (`int`, defaults to 510): the longest sequence. The table of positions has two more
            rows: a row's first token has the position id 2, as in Transformers' own class and the published
            checkpoints, which leave rows 0 and 1 unused.
        The others: see `BaseConfig`.

    Raises `ValueError` for fields that contradict each other.

    Example:

    ```python
    >>> from nystrom_models import NystromformerConfig, NystromformerModel

    >>> model = NystromformerModel(NystromformerConfig(num_landmarks=32, max_position_embeddings=4096))
    ```
    """

    model_type = "nystromformer"
    first_position: ClassVar[int] = 2

    max_position_embeddings: int = 510
    segment_means_seq_len: int = 64
    num_landmarks: int | list[int | None] | None = 64
    conv_kernel_size: int | None = 65
    pinv_iterations: int = 6
    inv_coeff_init_option: bool = False

    def validate_architecture(self) -> None:
        """As `BaseConfig.validate_architecture`, with this family's own fields."""
        super().validate_architecture()
        require_odd_kernel(self.conv_kernel_size)
        landmarks = self.num_landmarks
        if isinstance(landmarks, list) and len(landmarks) != self.num_hidden_layers:
            raise ValueError(
                f"num_landmarks={landmarks} has {len(landmarks)} numbers for num_hidden_layers="
                f"{self.num_hidden_layers}: give one for each layer, or a single number for all."
            )
        require_positive("segment_means_seq_len", self.segment_means_seq_len)
        self.validate_numbers()

    def validate_numbers(self) -> None:
        """Raises ValueError for numbers of landmarks or iterations below 1, which may be set for a model after it was
        made."""
        landmarks = self.num_landmarks
        numbers = landmarks if isinstance(landmarks, list) else [landmarks]
        if any(number is not None and number < 1 for number in numbers):
            raise ValueError(f"num_landmarks={landmarks} must be at least 1 (64 in the paper), or None for softmax.")
        if self.pinv_iterations < 1:
            raise ValueError(f"pinv_iterations={self.pinv_iterations} must be at least 1 (6 in the paper).")

    @property
    def landmarks_by_layer(self) -> list[int | None]:
        """M of each layer."""
        return [self.layer_num_landmarks(index) for index in range(self.num_hidden_layers)]

    def layer_num_landmarks(self, layer_idx: int) -> int | None:
        """M of the layer `layer_idx`; None for exact attention."""
        return entry_of_layer("num_landmarks", self.num_landmarks, layer_idx)


__all__ = ["NystromformerConfig"]
