# SPDX-License-Identifier: Apache-2.0
"""The models of the Long Range Arena's Text task, from bytes (B, N) to the logits of two classes, random weights.

Tay et al. 2021 (arXiv:2011.04006, table 2) compare the steps per second and the memory of their models on this task:
with --backward, so does this. Two layers of 64; of the sizes of a setting, only the length and the rows are used.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

from benchmarks.models import OWN_WEIGHTS, count_tokens, in_float64, prepare
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


def classifier(setting: Setting, implementation: str | None = None, *, attention: str) -> nn.Module:
    """A new model of the arena's size, for sequences of the setting's length."""
    config = arena_config(TASK, attention, ARENA_TASKS[TASK].tokenizer(setting.length), setting.length)
    return AutoModelForSequenceClassification.from_config(config, attn_implementation=implementation)


def logits(model: nn.Module, inputs: Inputs) -> Tensor:
    return model(**inputs).logits


def step(attention: str, implementation: str | None) -> Callable[[Setting, Inputs], Prepared]:
    build = partial(classifier, implementation=implementation, attention=attention)
    return lambda setting, inputs: prepare(setting, inputs, build, logits)


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
REFERENCES = {
    attention: in_float64(partial(classifier, attention=attention), logits) for attention, _ in CONTENDERS.values()
}
for name, (attention, implementation) in CONTENDERS.items():
    options = {"ours": attention != "softmax", "reference": REFERENCES[attention], "judged": OWN_WEIGHTS}
    workload.contender(name, **options)(step(attention, implementation))
