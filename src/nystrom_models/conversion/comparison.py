# SPDX-License-Identifier: Apache-2.0
"""Compares a converted model with its source: the largest difference of their outputs, on short and long rows.

Legend: R rows, N tokens.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from .reading import SourceModel
from .report import ConversionReport, Difference
from .sample import Sample

# Number of rows of each length, and the longest length that is compared.
ROWS = 4
LONGEST = 4096
# The short length for a model without landmarks.
SHORT = 64


def compared_lengths(model: PreTrainedModel, source: SourceModel) -> list[int]:
    """A short length, up to which a Nyströmformer attends exactly, and the longest that both take."""
    limits = [model.config.max_position_embeddings, source.kind.longest(source.config), LONGEST]
    longest = min(limit for limit in limits if limit is not None)
    landmarks = [number for number in getattr(model.config, "landmarks_by_layer", []) if number is not None]
    return sorted({min([*landmarks, longest] if landmarks else [SHORT, longest]), longest})


def head_is_new(report: ConversionReport, model: PreTrainedModel) -> bool:
    """Whether predictions come from weights that the source does not have; the sentence order head does not count."""
    prefix = model.base_model_prefix + "."
    return any(not name.startswith(prefix) and "seq_relationship" not in name for name in report.new)


def _predictions(outputs: Any, of: str) -> Tensor:
    if of == "hidden states":
        return outputs["last_hidden_state"]
    if "start_logits" in outputs:
        return torch.stack([outputs["start_logits"], outputs["end_logits"]], dim=1)
    return outputs["prediction_logits" if "prediction_logits" in outputs else "logits"]


def _inputs(model: PreTrainedModel, head: str, row: Tensor) -> Tensor:
    """A row (1, N) as the head reads it: as the only choice, (1, 1, N); as a pair with itself backwards, (1, 2, N)."""
    if head == "ForMultipleChoice":
        return row[:, None]
    if head == "ForSequenceClassification" and model.config.dual_encoder:
        return torch.stack([row, row.flip(-1)], dim=1)
    return row


def _run(model: Any, inputs: Tensor) -> Any:
    inputs = inputs.to(model.device)
    return model(inputs, attention_mask=torch.ones_like(inputs), return_dict=True)


@torch.no_grad()
def measure_differences(
    model: PreTrainedModel, source: SourceModel, sample: Sample, report: ConversionReport
) -> list[Difference]:
    """The differences on rows of the sample: of the logits, or of the hidden states where the head is new."""
    of = "hidden states" if report.head == "Model" or head_is_new(report, model) else "logits"
    ours, theirs = (model, source.model) if of == "logits" else (model.base_model, source.model.base_model)
    found = []
    for length in compared_lengths(model, source):
        rows = sample.rows(length, most_tokens=ROWS * length)
        largest = scale = 0.0
        same: list[Tensor] = []
        for row in rows[:, None]:
            inputs = _inputs(model, report.head, row) if of == "logits" else row
            actual, expected = (_predictions(_run(one, inputs), of).float().cpu() for one in (ours, theirs))
            largest = max(largest, (actual - expected).abs().max().item())
            scale = max(scale, expected.abs().max().item())
            if of == "logits" and expected.shape[-1] > 1:
                same.append((actual.argmax(dim=-1) == expected.argmax(dim=-1)).float().flatten())
        agreement = torch.cat(same).mean().item() if same else None
        found.append(Difference(of, len(rows), length, largest, scale, agreement))
    return found
