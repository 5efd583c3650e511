# SPDX-License-Identifier: Apache-2.0
"""Configuration of Linformer models."""

from huggingface_hub.dataclasses import strict

from .configuration_base import BaseConfig, require_odd_kernel, require_one_of

SHARING_MODES = ("none", "headwise", "key_value", "layerwise")
PROJECTION_TYPES = ("linear", "mean_pool", "max_pool", "conv")


@strict
class LinformerConfig(BaseConfig):
    r"""
    Configuration of a Linformer (Wang et al. 2020, arXiv:2006.04768).

    Args:
        projected_dim (`int` or `list[int]`, defaults to 256): slots k that keys and values are projected to; a list
            has one number a layer.
        share_projection (`str`, defaults to `"layerwise"`): which projections are one and the same, in section 4 of
            the paper. `"none"`: E and F of each head and layer are their own; `"headwise"`: the heads of a layer share
            E, and share F; `"key_value"`: a layer has one E = F; `"layerwise"`: the model has one E = F. For 12 layers
            of 12 heads that makes 288, 24, 12 and 1 projections.
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

    projected_dim: int | list[int] = 256
    share_projection: str = "layerwise"
    projection_type: str = "linear"
    conv_kernel_size: int | None = None

    def validate_architecture(self) -> None:
        super().validate_architecture()
        require_odd_kernel(self.conv_kernel_size)
        require_one_of("share_projection", self.share_projection, SHARING_MODES)
        require_one_of("projection_type", self.projection_type, PROJECTION_TYPES)
        slots = self.projected_dim
        if isinstance(slots, list) and len(slots) != self.num_hidden_layers:
            raise ValueError(
                f"projected_dim={slots} has {len(slots)} numbers for num_hidden_layers={self.num_hidden_layers}: give "
                "one a layer, or a single number for all."
            )
        for k in slots if isinstance(slots, list) else [slots]:
            if not 1 <= k <= self.max_position_embeddings:
                raise ValueError(
                    f"projected_dim={k} must lie between 1 and max_position_embeddings={self.max_position_embeddings}."
                )
        if isinstance(slots, list) and len(set(slots)) > 1 and self.share_projection == "layerwise":
            raise ValueError(
                f"projected_dim={slots} differs between layers, which cannot share one projection: use "
                'share_projection="key_value", or a single number.'
            )

    @property
    def has_projection_weights(self) -> bool:
        return self.projection_type in ("linear", "conv")

    @property
    def shares_projection_between_layers(self) -> bool:
        return self.has_projection_weights and self.share_projection == "layerwise"

    def slot_size(self, layer_idx: int) -> int | None:
        """Tokens of a slot in the layer `layer_idx`: ceil(N / k); None for "linear"."""
        if self.projection_type == "linear":
            return None
        return -(-self.max_position_embeddings // self.layer_projected_dim(layer_idx))

    def layer_projected_dim(self, layer_idx: int) -> int:
        """k of the layer `layer_idx`."""
        return self.projected_dim[layer_idx] if isinstance(self.projected_dim, list) else self.projected_dim


__all__ = ["LinformerConfig"]
