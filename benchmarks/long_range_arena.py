# SPDX-License-Identifier: Apache-2.0
"""The models of the Long Range Arena's Text task, from bytes (B, N) to the logits of two classes, random weights.

Tay et al. 2021 (arXiv:2011.04006, table 2) compare the steps per second and the memory of their models on this task:
with --backward, so does this. Two layers of 64; of the sizes of a setting, only the length and the rows are used.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from benchmarks.models import OWN_WEIGHTS, count_tokens, seeded
from benchmarks.registry import Inputs, Prepared, Setting, Workload, register
from nystrom_models.data.lra import ARENA_TASKS
from nystrom_models.training.long_range_arena import arena_config

TASK = "text"
# By contender: the attention of run_lra.py, and its implementation.
CONTENDERS = {
    "nystrom": ("nystrom", None),
    "linformer": ("linformer", None),
    "linear": ("linear", None),
    "softmax-sdpa": ("softmax", "sdpa"),
    "softmax-stored": ("softmax", "eager"),
}


def draw_bytes(setting: Setting, generator: torch.Generator) -> Inputs:
    tokenizer = ARENA_TASKS[TASK].tokenizer(setting.length)
    shape = (setting.batch_size, setting.length)
    return {"input_ids": torch.randint(len(tokenizer) - 256, len(tokenizer), shape, generator=generator)}


def classifier(setting: Setting, attention: str, implementation: str | None) -> nn.Module:
    """A new model of the arena's size, for sequences of the setting's length."""
    config = arena_config(TASK, attention, ARENA_TASKS[TASK].tokenizer(setting.length), setting.length)
    return AutoModelForSequenceClassification.from_config(config, attn_implementation=implementation)


def step(attention: str, implementation: str | None) -> Callable[[Setting, Inputs], Prepared]:
    def build(setting: Setting, inputs: Inputs) -> Prepared:
        model = seeded(setting, lambda: classifier(setting, attention, implementation))
        model.requires_grad_(setting.backward)
        return Prepared(lambda: model(**inputs).logits, tuple(model.parameters()) if setting.backward else ())

    return build


def in_float64(attention: str) -> Callable[[Setting, Inputs], Tensor]:
    """The same weights with the reference attention, in float64."""

    def reference(setting: Setting, inputs: Inputs) -> Tensor:
        # Without gradients, which are not compared: softmax attention would keep its matrices.
        model = seeded(setting, lambda: classifier(setting, attention, "eager"), torch.float64)
        return model.requires_grad_(False)(**inputs).logits

    return reference


workload = register(
    Workload(
        name="lra-text",
        kind="model",
        title="Long Range Arena, Text: 2 layers of 64 (Nyström-64, Linformer-256, batch {batch_size})",
        inputs=draw_bytes,
        reference=None,
        baseline="nystrom",
        tokens=count_tokens,
        num_layers=2,
    )
)
REFERENCES = {attention: in_float64(attention) for attention, _ in CONTENDERS.values()}
for name, (attention, implementation) in CONTENDERS.items():
    options = {"ours": attention != "softmax", "reference": REFERENCES[attention], "judged": OWN_WEIGHTS}
    workload.contender(name, **options)(step(attention, implementation))
