# SPDX-License-Identifier: Apache-2.0
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    pipeline,
)

from nystrom_models import LinformerForMaskedLM, NystromformerForMaskedLM

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import quickstart

TINY = (
    "--packages accelerate datasets huggingface_hub --max_bytes_per_package 600000 --max_train_steps 60"
    " --finetune_steps 30 --tokens_per_step 500 --max_length 48 --vocab_size 1500 --hidden_size 32"
    " --num_hidden_layers 1 --num_landmarks 8 --num_classes 3 --preprocessing_num_workers 1"
).split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quickstart")
    verbosity = transformers.logging.get_verbosity()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        results = quickstart.main([*TINY, "--output_dir", "output"])
        assert [path.name for path in folder.iterdir()] == ["output"], "something was written beside --output_dir"
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()
    return folder / "output", results


def test_results(run):
    folder, results = run
    assert results.keys() == {"nystromformer", "linformer"}
    for result in results.values():
        for name in ("mlm_accuracy", "sop_accuracy", "package_accuracy", "mlm_baseline", "package_baseline"):
            assert 0 < result[name] < 1
        assert 0.5 <= result["sop_baseline"] < 0.7
        assert result["tokens_per_second"] > 0
    summary = json.loads((folder / "all_results.json").read_text())
    assert summary["results"] == results
    assert sorted(summary["classes"]) == summary["classes"] == ["accelerate", "datasets", "huggingface_hub"]


@pytest.mark.parametrize(
    ("family", "model_class"), [("nystromformer", NystromformerForMaskedLM), ("linformer", LinformerForMaskedLM)]
)
def test_checkpoints_are_loaded_by_the_auto_classes(run, family, model_class):
    folder = run[0] / family
    model, info = AutoModelForMaskedLM.from_pretrained(folder / "pretrained", output_loading_info=True)
    assert type(model) is model_class and not info["missing_keys"]
    tokenizer = AutoTokenizer.from_pretrained(folder / "pretrained")
    batch = tokenizer("Return the mean of the [MASK].", return_tensors="pt")
    with torch.no_grad():
        assert model(**batch, labels=batch["input_ids"]).logits.shape == (
            1,
            batch["input_ids"].shape[1],
            len(tokenizer),
        )
    classifier, info = AutoModelForSequenceClassification.from_pretrained(
        folder / "classifier", output_loading_info=True
    )
    assert not info["missing_keys"]
    classify = pipeline("text-classification", model=classifier, tokenizer=tokenizer)
    assert classify("Push the model to the hub.")[0]["label"] in ("accelerate", "datasets", "huggingface_hub")


def test_rows_are_longer_than_the_landmarks():
    defaults = quickstart.QuickstartArguments()
    assert defaults.max_length >= 4 * defaults.num_landmarks


def test_seen_sentences_are_not_asked():
    documents = Dataset.from_dict({"text": ["It is short. return A LIST of the names of all columns, sorted."]})
    sentences = ["Return a [MASK] of the names of all columns.", "Return a [MASK] of the sizes of all rows."]
    assert quickstart.unseen(sentences, documents) == sentences[1:]
