# SPDX-License-Identifier: Apache-2.0
"""Encoders of Transformers with `attn_implementation="nystrom"` compared with `sdpa`, with the same weights.

Base size: 12 layers (or `--num_layers`), 768 wide, without a pooler. BERT and ESM-2 read token ids (B, N), ViT reads
an image of N patches of 16×16 pixels and adds a token.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from benchmarks.models import OWN_WEIGHTS, draw_inputs, hidden_states, prepare, seeded, sizes
from benchmarks.registry import Inputs, Setting, Workload, register
from nystrom_models import use_nystrom
from nystrom_models.models.attention_nystrom import nystrom_attention_reference

PATCH = 16
REFERENCE = "nystrom-reference"


def image_size(length: int) -> tuple[int, int]:
    """Height and width, in pixels, of the image of `length` patches that is nearest to a square."""
    rows = next(rows for rows in range(math.isqrt(length), 0, -1) if length % rows == 0)
    return rows * PATCH, length // rows * PATCH


def draw_images(setting: Setting, generator: torch.Generator) -> Inputs:
    return {"pixel_values": torch.randn(setting.batch_size, 3, *image_size(setting.length), generator=generator)}


def bert(setting: Setting) -> PreTrainedModel:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**sizes(setting)), add_pooling_layer=False)


def esm(setting: Setting) -> PreTrainedModel:
    from transformers import EsmConfig, EsmModel

    options = {"position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 2, "token_dropout": False}
    return EsmModel(EsmConfig(**sizes(setting), **options), add_pooling_layer=False)


def vit(setting: Setting) -> PreTrainedModel:
    from transformers import ViTConfig, ViTModel

    fields = {
        name: value for name, value in sizes(setting).items() if name not in ("vocab_size", "max_position_embeddings")
    }
    return ViTModel(
        ViTConfig(**fields, image_size=image_size(setting.length), patch_size=PATCH), add_pooling_layer=False
    )


def attend_in_the_papers_order(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None = None,
    scaling: float = 1.0,
    **options: object,
) -> tuple[Tensor, None]:
    """The reference attention, with the signature of Transformers' `AttentionInterface`, for rows without padding."""
    query = query * (scaling * query.shape[-1] ** 0.5)
    num_landmarks = module.config.nystrom["num_landmarks"]
    return nystrom_attention_reference(query, key, value, num_landmarks=num_landmarks).transpose(1, 2), None


AttentionInterface.register(REFERENCE, attend_in_the_papers_order)


def count_tokens(inputs: Inputs) -> int:
    if "pixel_values" in inputs:
        rows, _, height, width = inputs["pixel_values"].shape
        return rows * (height // PATCH) * (width // PATCH)
    return inputs["input_ids"].numel()


def workload(name: str, title: str, build: Callable[[Setting], PreTrainedModel], inputs: Callable) -> None:
    """Registers a model with its own attention and with Nyström attention."""

    def with_nystrom(setting: Setting) -> PreTrainedModel:
        return use_nystrom(build(setting), setting.num_landmarks)

    def reference(setting: Setting, given: Inputs) -> Tensor:
        model = seeded(setting, lambda: with_nystrom(setting), torch.float64)
        model.set_attn_implementation(REFERENCE)
        return hidden_states(model, given)

    made = register(
        Workload(
            name=name,
            kind="model",
            title=f"{title} ({{num_layers}} layers, {{num_heads}} heads of {{head_dim}}, {{num_landmarks}} landmarks, "
            "batch {batch_size})",
            inputs=inputs,
            reference=None,
            baseline="nystrom",
            tokens=count_tokens,
        )
    )
    made.contender("nystrom", ours=True, reference=reference, judged=OWN_WEIGHTS)(
        lambda setting, given: prepare(setting, given, with_nystrom)
    )
    made.contender("sdpa")(lambda setting, given: prepare(setting, given, build))


workload("bert", "BERT with Nyström attention and with its own", bert, draw_inputs)
workload("esm", "ESM-2 with Nyström attention and with its own", esm, draw_inputs)
workload("vit", "ViT with Nyström attention and with its own", vit, draw_images)
