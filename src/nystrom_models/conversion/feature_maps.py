# SPDX-License-Identifier: Apache-2.0
"""Learned feature maps, matched to the softmax attention of a source on a sample of text.

Zhang et al. 2024, "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry", arXiv:2402.04347,
section 4.2: only the feature maps are trained, with the cross entropy between the weights of softmax and of linear
attention as the loss.

Legend: R rows, N tokens, Q queries that are trained on, H heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from ..models.attention_linear import hedgehog_features, linear_attention
from ..models.masked_attention import attend, attention_weights
from .exact_attention import AttentionInputs, attention_inputs
from .report import FeatureMapStart
from .sample import Sample

# Length of the rows: attention maps are as wide as a row, so short rows keep them small.
LONGEST_ROW = 512
QUERIES = 64


@dataclass(frozen=True)
class Matching:
    """How feature maps are matched: by AdamW without weight decay; each step takes some queries of some rows."""

    steps: int = 200
    learning_rate: float = 1e-2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 0 or self.learning_rate <= 0:
            raise ValueError(
                f"steps={self.steps} must not be negative, and learning_rate={self.learning_rate} must be positive."
            )


def cross_entropy(
    inputs: AttentionInputs, query_weight: Tensor, key_weight: Tensor, queries: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean cross entropy of linear attention's weights relative to those of softmax attention, and the mean
    entropy of the latter, in nats; over rows, heads and the queries (Q,) int64 of each row. query_weight, key_weight:
    (H, D, D)."""
    query = inputs.query[:, :, queries]
    weights = attention_weights(query, inputs.key, None)
    scores = hedgehog_features(query, query_weight) @ hedgehog_features(inputs.key, key_weight).mT
    log_linear = scores.clamp_min(torch.finfo(scores.dtype).tiny).log() - scores.sum(dim=-1, keepdim=True).log()
    entropy = torch.special.entr(weights).sum(dim=-1).mean()
    return -(weights * log_linear).sum(dim=-1).mean(), entropy


def match_feature_maps(
    inputs: Sequence[AttentionInputs], query_weight: Tensor, key_weight: Tensor, matching: Matching
) -> tuple[Tensor, Tensor]:
    """The feature maps of a layer, (H, D, D) each in float32, trained on `inputs` from the given weights on."""
    generator = torch.Generator().manual_seed(matching.seed)
    weights = [weight.detach().float().clone().requires_grad_() for weight in (query_weight, key_weight)]
    optimizer = torch.optim.AdamW(weights, lr=matching.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, matching.steps))
    for step in range(matching.steps):
        chunk = inputs[step % len(inputs)]
        length = chunk.query.shape[2]
        queries = torch.randperm(length, generator=generator)[:QUERIES].to(chunk.query.device)
        with torch.enable_grad():
            loss, _ = cross_entropy(chunk, weights[0], weights[1], queries)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        schedule.step()
    return weights[0].detach(), weights[1].detach()


@torch.no_grad()
def _scores(inputs: Sequence[AttentionInputs], query_weight: Tensor, key_weight: Tensor) -> tuple[float, float, float]:
    """Cross entropy, entropy and relative error of the output, over all queries."""
    losses, entropies, squares, size = 0.0, 0.0, 0.0, 0.0
    rows = sum(len(chunk.query) for chunk in inputs)
    for chunk in inputs:
        share = len(chunk.query) / rows
        queries = torch.arange(chunk.query.shape[2], device=chunk.query.device)
        loss, entropy = cross_entropy(chunk, query_weight, key_weight, queries)
        losses, entropies = losses + share * loss.item(), entropies + share * entropy.item()
        context = attend(*chunk)
        features = hedgehog_features(chunk.query, query_weight), hedgehog_features(chunk.key, key_weight)
        squares += (linear_attention(*features, chunk.value) - context).square().sum().item()
        size += context.square().sum().item()
    return losses, entropies, (squares / max(size, 1e-30)) ** 0.5


def start_feature_maps(model: Any, exact: Any, sample: Sample, matching: Matching) -> list[FeatureMapStart]:
    """Matches the learned feature maps of a model to softmax attention, layer by layer.

    Args:
        model: a linear transformer with `feature_map="hedgehog"`, as an encoder.
        exact: the source's encoder with softmax attention.
        sample: rows to train on, and held-out rows to measure on.

    Returns: for each layer the loss before and after. A layer whose held-out loss did not fall keeps its old weights.
    """
    fit, held_out = sample.split(min(LONGEST_ROW, model.config.max_position_embeddings or LONGEST_ROW))
    report = []
    layers = zip(
        model.base_model.encoder.layer, attention_inputs(exact, fit), attention_inputs(exact, held_out), strict=True
    )
    progress = logging.tqdm(layers, total=model.config.num_hidden_layers, desc="Matching feature maps", unit="layer")
    for index, (layer, trained_on, measured_on) in enumerate(progress):
        maps = layer.attention.self.query_features, layer.attention.self.key_features
        start = [feature_map.weight.detach().float() for feature_map in maps]
        matched = match_feature_maps(trained_on, start[0], start[1], matching)
        before, least, error_before = _scores(measured_on, start[0], start[1])
        after, _, error_after = _scores(measured_on, *matched)
        if after < before:
            with torch.no_grad():
                for feature_map, weight in zip(maps, matched, strict=True):
                    feature_map.weight.copy_(weight)
        else:
            after, error_after = before, error_before
        report.append(FeatureMapStart(index, before, after, least, error_before, error_after))
    return report
