# SPDX-License-Identifier: Apache-2.0
import importlib
import json
import math
import os
from pathlib import Path

import pytest
import run_clm
import run_glue
import run_imdb
import run_ner
import run_pretraining
import run_qa
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForPreTraining, AutoTokenizer, BertConfig

import nystrom_models
from nystrom_models import NystromformerConfig
from nystrom_models.data import train_tokenizer
from nystrom_models.models.modeling_base import BasePreTrainedModel
from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.causal import CausalArguments
from nystrom_models.training.finetuning import FinetuningOptimizationArguments
from nystrom_models.training.grid import parse_grid
from nystrom_models.training.long_range_arena import ArenaArguments
from nystrom_models.training.optimization import OptimizationArguments
from nystrom_models.training.pretraining import PretrainingArguments
from nystrom_models.training.question_answering import QuestionAnsweringArguments
from nystrom_models.training.token_classification import TokenClassificationArguments

FOLDER = Path(nystrom_models.__file__).parents[2] / "configs"
# Width and layers; causal models of size mini have one layer more.
SIZES = {"base": (768, 12), "small": (512, 4), "mini": (256, 3), "tiny": (128, 2)}
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.glob("*former/*.json"))


@pytest.mark.parametrize("name", FILES)
def test_configuration_gives_the_model_its_name_says(name):
    config = AutoConfig.from_pretrained(FOLDER / name)
    family, stem = name.removesuffix(".json").split("/")
    size, length, *options = stem.split("-")
    assert type(config).__module__.startswith("nystrom_models.") and config.model_type == family
    layers = config.num_hidden_layers - (size == "mini" and config.is_decoder)
    assert (config.hidden_size, layers) == SIZES[size]
    # Positions are n - 2 as in the published Nyströmformers, or n as in the Linformer paper. The name of a causal
    # model has the length of its training rows.
    expected = (None,) if config.is_decoder else (int(length) - 2, int(length))
    assert config.max_position_embeddings in expected
    if family == "nystromformer":
        number = 32 if size in ("mini", "tiny") else 64
        landmarks = {"": number, "softmax": None, "exact-last": [number] * (layers - 1) + [None]}
        assert config.num_landmarks == landmarks["-".join(options)]
    elif family == "linear_transformer":
        assert config.feature_map == (None if "softmax" in options else "elu") and config.projected_dim is None
        assert options == ["causal"] * config.is_decoder + ["softmax"] * (config.feature_map is None)
    else:
        assert config.projected_dim == int(options[0].removeprefix("k"))
        assert config.share_projection == "_".join(options[1:])
    with torch.device("meta"):
        model = (AutoModelForCausalLM if config.is_decoder else AutoModelForPreTraining).from_config(config)
    assert (model.num_parameters() > 100e6) == (size == "base")


def projections(name):
    with torch.device("meta"):
        model = AutoModelForPreTraining.from_config(AutoConfig.from_pretrained(FOLDER / "linformer" / name))
    shapes = [weight.shape for parameter, weight in model.named_parameters() if "projection" in parameter]
    return sum(shape[0] if len(shape) == 3 else 1 for shape in shapes)


def test_sharing_modes_have_the_number_of_projections_of_the_paper():
    """288, 24, 12 and 1 for 12 layers of 12 heads (section 4 of arXiv:2006.04768)."""
    names = [f"base-512-k256-{mode}.json" for mode in ("none", "headwise", "key-value", "layerwise")]
    assert [projections(name) for name in names] == [288, 24, 12, 1]


@pytest.mark.parametrize("path", sorted((FOLDER / "recipes").iterdir()), ids=lambda path: path.stem)
def test_recipe_is_taken_by_its_script(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # paths in a recipe are relative to it, not to the current folder
    script = path.read_text().split(maxsplit=2)[1].rstrip(",:")
    flags = ["--recipe", os.path.relpath(path), "--output_dir", "x", "--tokenizer_name", "x"]
    if script == "examples/run_pretraining.py":
        arguments, optimization = parse_arguments((PretrainingArguments, OptimizationArguments), flags)
        config = AutoConfig.from_pretrained(arguments.config_name)
        if arguments.config_overrides is not None:
            config.update_from_string(arguments.config_overrides)
        assert arguments.streaming is False and optimization.max_train_steps is not None
    elif script == "examples/run_lra.py":
        flags = ["--recipe", os.path.relpath(path), "--output_dir", "x", "--attention", "nystrom"]
        arguments, optimization = parse_arguments((ArenaArguments, OptimizationArguments), flags)
        assert arguments.load_best_model_at_end and optimization.weight_decay == 0
        rates = {f"lra-{arguments.task}": ("adamw", 1e-4), f"lra-{arguments.task}-muon": ("muon", 3e-3)}
        assert (optimization.optim, optimization.learning_rate) == rates[path.stem]
        assert optimization.num_warmup_steps < optimization.max_train_steps
    elif script == "examples/run_clm.py":
        arguments, optimization = parse_arguments((CausalArguments, OptimizationArguments), flags)
        config = AutoConfig.from_pretrained(arguments.config_name)
        assert config.is_decoder and optimization.max_train_steps is not None
        assert arguments.block_size == int(path.stem.split("-")[-1])
    else:
        types = {
            "examples/run_glue.py": run_glue.GlueArguments,
            "examples/run_imdb.py": run_imdb.ImdbArguments,
            "examples/run_ner.py": TokenClassificationArguments,
            "examples/run_qa.py": QuestionAnsweringArguments,
        }
        flags += ["--model_name_or_path", "x"]
        arguments, optimization = parse_arguments((types[script], FinetuningOptimizationArguments), flags)
        points = parse_grid(arguments.grid or [], arguments, optimization)
        if "tiny" in path.stem or "mini" in path.stem:
            assert points == {"seed": [0, 1, 2]}
        elif script in ("examples/run_ner.py", "examples/run_qa.py"):
            assert optimization.learning_rate == 5e-5 or points["learning_rate"] == [2e-5, 3e-5, 5e-5]
        else:
            assert optimization.num_train_epochs == 4
            assert optimization.learning_rate == 3e-5 or "learning_rate" in points


def test_the_grid_of_mrpc_is_the_papers():
    """Section 5.1 of arXiv:2102.03902."""
    line = (FOLDER / "recipes" / "finetuning-mrpc-grid.args").read_text().splitlines()[-1]
    grid = parse_grid(line.split()[1:], OptimizationArguments())
    assert grid == {"per_device_train_batch_size": [8, 16, 32], "learning_rate": [2e-5, 3e-5, 4e-5, 5e-5]}


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """A corpus, rows to fine-tune on, a tokenizer, a small model and a small BERT."""
    folder = tmp_path_factory.mktemp("recipes")
    texts = [f"Sentence {i} is here. Another one, too. A last one." for i in range(60)]
    (folder / "corpus.txt").write_text("\n\n".join(texts))
    rows = [
        {"sentence": text, "text": text, "sentence1": text, "sentence2": "Another one.", "label": i % 2}
        | {
            "tokens": ["Another", "one"],
            "ner_tags": ["O", "B-number"],
            "question": "Which?",
            "context": "Another one.",
        }
        | {"answers": {"text": ["one"], "answer_start": [8]}}
        for i, text in enumerate(texts)
    ]
    (folder / "rows.json").write_text(json.dumps(rows))
    tokenizer = train_tokenizer(texts, 100, 64, show_progress=False)
    small = {"vocab_size": len(tokenizer), **SMALL}
    for name, config in (
        ("model", NystromformerConfig(**small)),
        ("bert", BertConfig(pad_token_id=tokenizer.pad_token_id, **small)),
    ):
        AutoModelForPreTraining.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize(
    "path",
    # Those of the Long Range Arena, whose data are not of this form, are run by tests/examples/test_run_lra.py.
    [path for path in sorted((FOLDER / "recipes").iterdir()) if not path.stem.startswith("lra-")],
    ids=lambda path: path.stem,
)
def test_recipe_runs(path, material, tmp_path, monkeypatch, no_precision_yet):
    """Each recipe runs from another folder, unchanged except for small sizes and a single step."""
    monkeypatch.chdir(tmp_path)
    script = importlib.import_module(
        path.read_text().split(maxsplit=2)[1].rstrip(",:")[len("examples/") : -len(".py")]
    )
    flags = ["--recipe", os.path.relpath(path), "--output_dir", "output", "--cache_dir", f"{material}/cache"]
    flags += ["--max_train_steps", "1", "--per_device_train_batch_size", "4"]
    lengths = {run_clm: "--block_size", run_ner: "--max_seq_length", run_qa: "--max_seq_length"}
    flags += [lengths.get(script, "--max_length"), "24"]
    if script in (run_pretraining, run_clm):
        size = ",".join(f"{name}={value}" for name, value in SMALL.items())
        flags += ["--train_file", f"{material}/corpus.txt", "--tokenizer_name", f"{material}/model"]
        if "bert" in path.stem:
            vocabulary = len(AutoTokenizer.from_pretrained(material / "bert"))
            size += f",vocab_size={vocabulary},hidden_act=gelu,layer_norm_eps=1e-12"
            flags += ["--model_name_or_path", f"{material}/bert"]
        if "recovery" in path.stem:
            # One step is one with the teacher.
            flags += ["--teacher_model_name_or_path", f"{material}/bert", "--attention_matching_steps", "0"]
        results = script.main([*flags, "--config_overrides", size])
        assert results["train"]["steps"] == 1 and math.isfinite(results["validation"]["perplexity"])
        config = AutoConfig.from_pretrained("output")
        family = "linformer" if "linformer" in path.stem else "nystromformer"
        family = "linear_transformer" if script is run_clm else family
        assert config.model_type == family and config.hidden_size == 32
    else:
        flags += ["--model_name_or_path", f"{material}/model", "--train_file", f"{material}/rows.json"]
        flags += ["--validation_file", f"{material}/rows.json"]
        flags += ["--task_name", "sst2"] * (path.stem == "finetuning-glue")
        flags += ["--grid", "seed=0,1"] * any(word in path.stem for word in ("grid", "tiny", "mini"))
        results = script.main(flags)
        scores = results["best"]["validation"] if "best" in results else results["validation"]
        assert ("exact_match" if script is run_qa else "accuracy") in scores


@pytest.mark.parametrize("path", sorted((FOLDER / "accelerate").iterdir()), ids=lambda path: path.stem)
def test_launch_file_is_what_accelerate_reads(path):
    launch = load_config_from_file(str(path))  # refuses unknown keys
    content = yaml.safe_load(path.read_text())
    assert launch.distributed_type == content["distributed_type"] and launch.mixed_precision == "bf16"
    if "fsdp_config" in content:
        wrapped = content["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"]
        assert wrapped in BasePreTrainedModel._no_split_modules
