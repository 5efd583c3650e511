# SPDX-License-Identifier: Apache-2.0
"""Configuration of Linformer models."""

from typing import Any

from huggingface_hub.dataclasses import strict

from .configuration_base import BaseConfig, entry_of_layer, require_odd_kernel, require_one_of

SHARING_MODES = ("none", "headwise", "key_value", "layerwise")
PROJECTION_TYPES = ("linear", "mean_pool", "max_pool", "conv")


@strict
class LinformerConfig(BaseConfig):
    r"""
    Configuration of a Linformer (Wang et al. 2020, arXiv:2006.04768).

    Args:
        projected_dim (`int`, `list[int]` or `list[list[int]]`, defaults to 256): slots k that keys and values are
            projected to. A list has a number for each layer, and needs projections that layers do not share. A list of
            lists has a number for each head of each layer ("nonuniform projected dimension" in section 4 of the
            paper), and needs `share_projection="none"` and `projection_type="linear"`.
        share_projection (`str`, defaults to `"layerwise"`): which projections are shared (section 4 of the paper).
            `"none"`: each head of each layer has its own E and F; `"headwise"`: the heads of a layer share E, and
            share F; `"key_value"`: a layer has one E = F; `"layerwise"`: the model has one E = F. For 12 layers of 12
            heads these are 288, 24, 12 and 1 projections.
        projection_type (`str`, defaults to `"linear"`): `"linear"` (a k×N matrix), `"mean_pool"`, `"max_pool"` or
            `"conv"`; the last three have kernel = stride = ceil(N / k), with N = `max_position_embeddings`. Pooling
            has no parameters, and nothing to share.
        conv_kernel_size (`int` or `None`, defaults to `None`): odd kernel of a depthwise convolution of V along the
            tokens, which is added to the attention's output, as in a Nyströmformer; `None` for none.
        max_position_embeddings (`int`, defaults to 512): the longest sequence, and the projections' N.
        The others: see `BaseConfig`.

    Raises `ValueError` for fields that contradict each other.

    Example:

    ```python
    >>> from nystrom_models import LinformerConfig, LinformerModel

    >>> model = LinformerModel(LinformerConfig(max_position_embeddings=1024, projected_dim=128))
    ```
    """

    model_type = "linformer"

    projected_dim: int | list[int] | list[list[int]] = 256
    share_projection: str = "layerwise"
    projection_type: str = "linear"
    conv_kernel_size: int | None = None

    def validate_architecture(self) -> None:
        """As `BaseConfig.validate_architecture`, with this family's own fields."""
        super().validate_architecture()
        require_odd_kernel(self.conv_kernel_size)
        require_one_of("share_projection", self.share_projection, SHARING_MODES)
        require_one_of("projection_type", self.projection_type, PROJECTION_TYPES)
        slots = self.projected_dim
        if isinstance(slots, list) and len(slots) != self.num_hidden_layers:
            raise ValueError(
                f"projected_dim={slots} has {len(slots)} entries for num_hidden_layers={self.num_hidden_layers}: give "
                "one for each layer, or a single number for all."
            )
        by_layer = slots if isinstance(slots, list) else [slots]
        for k in by_layer:
            self._validate_layer(k)
        if any(k != by_layer[0] for k in by_layer) and self.share_projection == "layerwise":
            raise ValueError(
                f"projected_dim={slots} differs between layers, which cannot share one projection: use "
                'share_projection="key_value", or a single number.'
            )

    def _validate_layer(self, slots: int | list[int]) -> None:
        """The number of a layer, or those of its heads."""
        if isinstance(slots, list):
            if len(slots) != self.num_attention_heads:
                raise ValueError(
                    f"projected_dim has {len(slots)} numbers for a layer, {slots}, with "
                    f"num_attention_heads={self.num_attention_heads}: give one for each head, or one for the layer."
                )
            if self.share_projection != "none":
                raise ValueError(
                    f'projected_dim has a number for each head, but with share_projection="'
                    f'{self.share_projection}" heads share a projection: use share_projection="none", '
                    "or a number for each layer."
                )
            if self.projection_type != "linear":
                raise ValueError(
                    "projected_dim has a number for each head, which only linear projections may have, and not "
                    f'projection_type="{self.projection_type}": use "linear", or a number for each layer.'
                )
        for k in slots if isinstance(slots, list) else [slots]:
            if not 1 <= k <= self.max_position_embeddings:
                raise ValueError(
                    f"projected_dim={k} must lie between 1 and max_position_embeddings={self.max_position_embeddings}."
                )

    @property
    def has_projection_weights(self) -> bool:
        """Whether the projections have parameters; pooling has none."""
        return self.projection_type in ("linear", "conv")

    @property
    def shares_projection_between_layers(self) -> bool:
        """Whether all layers use one projection."""
        return self.has_projection_weights and self.share_projection == "layerwise"

    def slot_size(self, layer_idx: int) -> int | None:
        """Tokens of a slot in the layer `layer_idx`: ceil(N / k); None for "linear"."""
        if self.projection_type == "linear":
            return None
        return -(-self.max_position_embeddings // self.layer_projected_dim(layer_idx))

    def layer_projected_dim(self, layer_idx: int) -> Any:
        """k of the layer `layer_idx`: a number, or a list with one for each of its heads."""
        return entry_of_layer("projected_dim", self.projected_dim, layer_idx)


__all__ = ["LinformerConfig"]
