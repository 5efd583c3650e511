# SPDX-License-Identifier: Apache-2.0
"""The table of architectures: those listed as running do run; those that would be wrong are refused with a reason."""

import re

import pytest

from benchmarks import architecture_table, cli
from benchmarks.architectures import ARCHITECTURES

REFUSALS = {
    "BART, whole (causal decoder)": "decoder.* is causal.*get_encoder",
    "CLIP, whole (causal text)": "model_type='clip_text_model' needs a causal mask",
    "T5 encoder": "relative_attention_bias of .* is a position bias",
    "GPT-2": "is causal",
    "Llama": "is causal",
    "DeBERTa-v2": "computes its attention itself",
    "MPNet": "computes its attention itself",
    "RoFormer": "computes its attention itself",
    "Longformer": "computes its attention itself",
    "WavLM": "computes its attention itself",
    "BEiT with relative positions": "relative_position_bias of .* is a position bias",
    "Swin": "relative_position_bias of .* is a position bias",
}


@pytest.mark.parametrize(
    "architecture", ARCHITECTURES, ids=lambda architecture: re.sub(r"\W+", "_", architecture.name)
)
def test_architecture(architecture):
    with architecture_table.quiet():
        answer = architecture_table.try_out(architecture)
    if architecture.name in REFUSALS:
        assert answer.refusal is not None and re.search(REFUSALS[architecture.name], answer.refusal), answer
    else:
        assert answer.refusal is None and answer.faults() == []


def test_faults_are_found():
    """A model that does not use its attention, and one with a wrong output, do not count as running."""
    wrong = architecture_table.Answer(
        exact=1e-3, exact_gradient=0.0, change=0.0, padding=1.0, gradients=(1, 2), loading=0.0
    )
    assert len(wrong.faults()) == 4
    assert architecture_table.failures({"wrong": wrong})


def test_the_table_is_printed(capsys, monkeypatch):
    chosen = [architecture for architecture in ARCHITECTURES if architecture.name in ("BERT", "MPNet")]
    monkeypatch.setattr(architecture_table.measure, "__defaults__", (chosen, lambda line: None))
    assert cli.main(["architectures"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^\| BERT \| text \| \S+, \S+ \|", out, re.MULTILINE)
    assert "| MPNet | text | MPNetModel computes its attention itself" in out and "1 run, 1 refuse." in out
