# SPDX-License-Identifier: Apache-2.0
"""A short pretraining run in bfloat16, with the script that users run: tokens per second, and the model FLOPs
utilization (MFU, Chowdhery et al. 2022, arXiv:2204.02311), the share of the GPU's peak operations.

The text is the docstrings of the installed packages, and the tokenizer is trained on them. Nothing is downloaded.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import environment

ROOT = Path(__file__).parents[1]

# Operations per second in bfloat16 with float32 sums, without sparsity, from NVIDIA's data sheets, by the GPU's name.
DATA_SHEETS = {
    r"A100": 312e12,
    r"H100 PCIe": 756e12,
    r"H100 NVL": 835e12,
    r"H100|H200|GH200": 989e12,
    r"B200": 2250e12,
    r"L40S": 362e12,
    r"L4$": 121e12,
    r"A10$|A10G": 125e12,
    r"RTX 4090": 165e12,
    r"RTX 3090": 71e12,
}

# The number of steps that are not timed, in which kernels are compiled and data prepared, and of those that are timed.
STEPS = {"cuda": (10, 300), "cpu": (2, 4)}
SETTINGS = {
    "cuda": {
        "config_name": "configs/nystromformer/base-512.json",
        "per_device_train_batch_size": 64,
        "dataloader_num_workers": 8,
        "mixed_precision": "bf16",
    },
    "cpu": {
        "config_name": "configs/nystromformer/tiny-256.json",
        "per_device_train_batch_size": 4,
        "mixed_precision": "bf16",
    },
}
MAX_BYTES_PER_PACKAGE = {"cuda": 8_000_000, "cpu": 100_000}


def operations_per_token(config: Any) -> int:
    """Additions and multiplications of a training step per token, with a backward pass counted as two forward passes.

    Linear layers, the attention's four products with the landmarks, the convolution, and the head over the vocabulary
    are counted, the last at the masked tokens, where alone the script computes it. Recomputation, norms, and the
    pseudo-inverse, which does not depend on the length, are not.
    """
    from nystrom_models.training.pretraining import PretrainingArguments

    width = config.hidden_size
    layer = 4 * width**2 + 2 * width * config.intermediate_size + width * (config.conv_kernel_size or 0)
    landmarks = 4 * width * sum(config.landmarks_by_layer)
    head = PretrainingArguments.mlm_probability * (width**2 + width * config.vocab_size)
    return round(3 * 2 * (config.num_hidden_layers * layer + landmarks + head))


def data_sheet(gpu: str) -> float | None:
    """Operations per second of a GPU by its name; None if it is not in the table."""
    return next((peak for pattern, peak in DATA_SHEETS.items() if re.search(pattern, gpu)), None)


def prepare(folder: Path, device: str) -> None:
    """Writes corpus.jsonl, and a tokenizer of at most 30,000 tokens to tokenizer/."""
    from nystrom_models.data import TextBatches, load_docstrings, train_tokenizer

    packages = None if device == "cuda" else ["stdlib"]
    docstrings = load_docstrings(MAX_BYTES_PER_PACKAGE[device], cache_dir=folder / "cache", packages=packages)["train"]
    docstrings.select_columns(["text"]).to_json(folder / "corpus.jsonl")
    train_tokenizer(TextBatches(docstrings), 30_000, 512, show_progress=False).save_pretrained(folder / "tokenizer")


def pretrain(folder: Path, device: str, steps: int, name: str) -> dict[str, Any]:
    """Runs examples/run_pretraining.py; returns the content of its all_results.json, with its history."""
    output = folder / name
    flags = SETTINGS[device] | {
        "train_file": folder / "corpus.jsonl",
        "tokenizer_name": folder / "tokenizer",
        "output_dir": output,
        "cache_dir": folder / "cache",
        "max_train_steps": steps,
        "num_warmup_steps": max(1, steps // 10),
        "learning_rate": 1e-4 if device == "cuda" else 1e-3,
        "eval_strategy": "no",
        "max_eval_samples": 64,
        "logging_steps": max(1, steps // 10),
    }
    words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
    done = subprocess.run(
        [sys.executable, "examples/run_pretraining.py", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"examples/run_pretraining.py failed:\n{done.stderr[-3000:]}")
    results = json.loads((output / "all_results.json").read_text(encoding="utf-8"))
    history = (output / "history.jsonl").read_text(encoding="utf-8").splitlines()
    return results | {"history": [json.loads(line) for line in history]}


def table(device: str, report: Callable[[str], None]) -> str:
    """The figures of the run as a Markdown table."""
    from transformers import AutoConfig

    warm_up, steps = STEPS[device]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report("collecting docstrings and training a tokenizer")
        prepare(folder, device)
        report(f"a first run of {warm_up} steps, which compiles kernels and prepares data")
        pretrain(folder, device, warm_up, "first")
        report(f"{steps} steps")
        found = pretrain(folder, device, steps, "run")
        config = AutoConfig.from_pretrained(folder / "run")
    rate = found["results"]["train"]["tokens_per_second"]
    operations = rate * operations_per_token(config)
    reached = environment.ceilings(device, torch.bfloat16)["operations_per_second"]
    losses = [row["mlm_loss"] for row in found["history"] if "mlm_loss" in row]
    rows = {
        "configuration": SETTINGS[device]["config_name"],
        "rows a step": SETTINGS[device]["per_device_train_batch_size"],
        "steps": steps,
        "MLM loss, first and last steps": f"{losses[0]:.3f}, {losses[-1]:.3f}" if losses else "not logged",
        "tokens a second, without padding": f"{rate:,.0f}",
        "operations a token": f"{operations_per_token(config):.3g}",
        "operations a second": f"{operations:.3g}",
        "of what a product of large matrices reaches here": f"{100 * operations / reached:.1f} %",
    }
    if device == "cuda":
        peak = data_sheet(torch.cuda.get_device_name())
        rows["of the data sheet's (MFU)"] = (
            f"{100 * operations / peak:.1f} %" if peak else "the GPU is not in the table"
        )
    return "\n".join(["| | |", "| --- | ---: |", *(f"| {name} | {value} |" for name, value in rows.items())])
