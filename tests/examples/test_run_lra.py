# SPDX-License-Identifier: Apache-2.0
"""The tasks of the Long Range Arena end to end, in small."""

import json
from pathlib import Path

import pytest
import run_lra
from transformers import AutoModelForSequenceClassification, pipeline

import nystrom_models  # noqa: F401 - registers the families


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


def run(folder, cache, *options, steps=2):
    shared = ["--output_dir", str(folder), "--cache_dir", cache, "--max_train_steps", str(steps)]
    return run_lra.main([*shared, "--per_device_train_batch_size", "8", *options])


LISTOPS = "--task listops --max_length 48 --generated_rows 120 40 40".split()


@pytest.mark.parametrize("attention", ["softmax", "nystrom", "linformer", "linear"])
def test_listops(attention, cache, tmp_path):
    options = ["--attention", attention]
    if attention == "nystrom":
        options += ["--config_overrides", "num_landmarks=8", "--grid", "seed=0,1"]
    results = run(tmp_path, cache, *LISTOPS, *options)
    folder = tmp_path
    if attention == "nystrom":
        folder = tmp_path / results["best_run"]
        # Each seed draws weights of its own.
        first, second = (
            AutoModelForSequenceClassification.from_pretrained(tmp_path / f"seed={seed}") for seed in (0, 1)
        )
        weights = [model.nystromformer.embeddings.word_embeddings.weight for model in (first, second)]
        assert (weights[0] - weights[1]).abs().max() > 0.05
        results = json.loads(Path(folder, "all_results.json").read_text())["results"]
    assert results["test"].keys() == {"loss", "accuracy", "macro_f1"}
    classify = pipeline("text-classification", model=str(folder))
    config = classify.model.config
    assert classify("[MAX 2 9 [MIN 4 7 ] 0 ]")[0]["label"] in "0123456789"
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (2, 64, 128)
    assert (config.layer_norm_position, config.classifier_pooling) == ("pre", "mean")
    assert config.vocab_size == 18 and config.max_position_embeddings == 48
    expected = {"softmax": None, "nystrom": 8}.get(attention, "absent")
    assert getattr(config, "num_landmarks", "absent") == expected
    card = (folder / "README.md").read_text()
    assert "ListOps" in card and "[MAX 2 9 [MIN 4 7 ] 0 ]" in card
