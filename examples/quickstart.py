# SPDX-License-Identifier: Apache-2.0
"""Train a Nyströmformer and a Linformer from scratch on two CPU cores, on the docstrings of this machine.

1. Collect the English docstrings of the installed Python packages, and set some source files aside.
2. Train a tokenizer.
3. Pretrain a small model with masked language modeling (MLM) and sentence-order prediction (SOP).
4. Save it, load it with AutoModelForMaskedLM, and fill masks with pipeline("fill-mask").
5. Fine-tune it to tell which package a docstring is from.

Steps 3 to 5 run for both of these models.

6. Train a small causal linear transformer on the same docstrings, and let it continue the beginnings of some.

Everything is written below --output_dir, and nothing is downloaded.
"""

import json
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict
from transformers import AutoModelForMaskedLM, AutoTokenizer, PretrainedConfig, logging, pipeline

from nystrom_models import LinearTransformerConfig, LinformerConfig, NystromformerConfig
from nystrom_models.data import (
    TextBatches,
    eval_dataloader,
    load_docstrings,
    pretraining_dataset,
    train_byte_level_tokenizer,
    train_tokenizer,
)
from nystrom_models.training import OptimizationArguments
from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.causal import CausalArguments, train_causal
from nystrom_models.training.finetuning import finetune
from nystrom_models.training.pretraining import EVAL_MLM_PROBABILITY, PretrainingArguments, pretrain
from nystrom_models.training.signals import end_as_the_signal, no_further_run, run_script
from nystrom_models.training.text_classification import TextClassificationArguments

# Sentences like those of docstrings. Expected words: list; true; number; be; to; of.
SENTENCES = (
    "Return a [MASK] of the names of all columns.",
    "If [MASK], raise an error when the file does not exist.",
    "The [MASK] of samples in each batch.",
    "This method should not [MASK] called by users.",
    "Whether or not [MASK] return the labels as well.",
    "Must be one [MASK] the following names.",
)


# Beginnings of docstrings, to be continued.
BEGINNINGS = ("Return a list of", "If True, the", "Raise an error if")

# The message of a run that Ctrl-C or SIGTERM has stopped.
STOPPED = (
    "The quickstart was stopped. It has no --resume_from_checkpoint: when run again, it starts from the beginning."
)

# The most rows of a batch; the size of a step is given in tokens.
ROWS = 64


@dataclass
class QuickstartArguments:
    """The sizes of the run."""

    output_dir: str = field(default="outputs/quickstart", metadata={"help": "Folder to write to."})
    seed: int = field(default=0, metadata={"help": "Seed of the data, the initial weights and the order."})
    max_train_steps: int = field(default=1800, metadata={"help": "Optimizer steps of pretraining."})
    finetune_steps: int = field(default=400, metadata={"help": "Optimizer steps of fine-tuning."})
    causal_steps: int = field(default=600, metadata={"help": "Optimizer steps of the causal model."})
    tokens_per_step: int = field(default=1000, metadata={"help": "Tokens per step of pretraining."})
    optim: str = field(default="muon", metadata={"help": "Optimizer of pretraining: muon or adamw."})
    learning_rate: float = field(default=3e-3, metadata={"help": "Peak learning rate of pretraining."})
    max_length: int = field(default=128, metadata={"help": "Largest number of tokens of a row."})
    vocab_size: int = field(default=5000, metadata={"help": "Largest size of the vocabulary."})
    causal_vocab_size: int = field(default=2000, metadata={"help": "Largest vocabulary of the causal model."})
    hidden_size: int = field(default=128, metadata={"help": "Width of the models."})
    num_hidden_layers: int = field(default=3, metadata={"help": "Layers of the models."})
    num_attention_heads: int = field(default=2, metadata={"help": "Heads of a layer."})
    num_landmarks: int = field(default=32, metadata={"help": "Landmarks (Nyströmformer) and slots (Linformer)."})
    mlm_probability: float = field(default=0.3, metadata={"help": "Share of tokens predicted in pretraining."})
    num_classes: int = field(default=8, metadata={"help": "Packages that the classifier tells apart."})
    max_bytes_per_package: int = field(
        default=3_000_000, metadata={"help": "Most bytes of source code that are read from one package."}
    )
    packages: list[str] | None = field(default=None, metadata={"help": "Packages to read; by default, all."})
    preprocessing_num_workers: int = field(
        default=min(4, os.cpu_count() or 1), metadata={"help": "Processes that prepare the data."}
    )

    def __post_init__(self):
        # Some of these would be found only after pretraining, under the flags of other scripts.
        least = {"max_train_steps": 1, "finetune_steps": 1, "causal_steps": 1, "num_classes": 2}
        for name, lowest in least.items():
            if (value := getattr(self, name)) < lowest:
                raise ValueError(f"--{name} must be at least {lowest}, but is {value}.")
        if not 1 <= self.num_landmarks <= self.max_length:
            raise ValueError(
                f"--num_landmarks must lie between 1 and {self.max_length}, the --max_length, but is "
                f"{self.num_landmarks}."
            )
        if self.packages is not None and len(set(self.packages)) < 2:
            raise ValueError(f"--packages needs two or more to tell apart, but is {' '.join(self.packages)}.")


def save_config(family: str, args: QuickstartArguments) -> Path:
    """Writes the configuration of a small model. Encoders have fewer landmarks than tokens, so that they are trained
    with the approximation. The vocabulary's size and the special tokens are added from the tokenizer."""
    common = {
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.num_hidden_layers,
        "num_attention_heads": args.num_attention_heads,
        "intermediate_size": 4 * args.hidden_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    encoder = common | {"max_position_embeddings": args.max_length, "conv_kernel_size": 33}
    config: PretrainedConfig
    if family == "nystromformer":
        config = NystromformerConfig(num_landmarks=args.num_landmarks, **encoder)
    elif family == "linformer":
        config = LinformerConfig(projected_dim=args.num_landmarks, **encoder)
    else:
        # Sinusoidal positions, for texts of any length, and a standard deviation of about 1 / √width.
        start = {"position_embedding_type": "sinusoidal", "initializer_range": 0.06}
        config = LinearTransformerConfig(is_decoder=True, conv_kernel_size=9, **start, **common)
    folder = Path(args.output_dir, family, "config")
    config.save_pretrained(folder)
    return folder


def constant_accuracy(values: Sequence[int] | Sequence[str]) -> float:
    """The accuracy of always predicting the most frequent class."""
    counts = Counter(value for value in values if value != -100)
    return counts.most_common(1)[0][1] / counts.total()


def pretraining_arguments(family: str, args: QuickstartArguments) -> PretrainingArguments:
    """The arguments that examples/run_pretraining.py would get from its command line."""
    return PretrainingArguments(
        config_name=str(save_config(family, args)),
        tokenizer_name=str(Path(args.output_dir, "tokenizer")),
        output_dir=str(Path(args.output_dir, family, "pretrained")),
        train_file=["docstrings of the installed packages"],  # for the model card
        short_seq_prob=0.2,
        mlm_probability=args.mlm_probability,
        eval_strategy="no",
        overwrite_output_dir=True,  # of a quickstart that was stopped
        seed=args.seed,
        preprocessing_num_workers=args.preprocessing_num_workers,
    )


def require_finished(results: Mapping[str, Any]) -> None:
    """Ends the quickstart if Ctrl-C or SIGTERM has stopped a run, or came when it was about to finish."""
    if no_further_run(results):
        print(STOPPED, file=sys.stderr)
        end_as_the_signal()


def pretrain_family(family: str, documents: DatasetDict, args: QuickstartArguments) -> dict[str, float]:
    """Pretrains a model, and returns its held-out scores and its speed."""
    print(f"\nPretraining: {family}", flush=True)
    optimization = OptimizationArguments(
        per_device_train_batch_size=ROWS,
        tokens_per_step=args.tokens_per_step,
        group_by_length=True,
        optim=args.optim,
        learning_rate=args.learning_rate,
        max_train_steps=args.max_train_steps,
        adam_beta2=0.98,
    )
    results = pretrain(pretraining_arguments(family, args), optimization, documents)
    require_finished(results)
    return results["validation"] | {"tokens_per_second": results["train"]["tokens_per_second"]}


def pretraining_baselines(documents: Dataset, args: QuickstartArguments) -> dict[str, float]:
    """The scores of constant predictions on the held-out documents."""
    tokenizer = AutoTokenizer.from_pretrained(Path(args.output_dir, "tokenizer"))
    arguments = pretraining_arguments("nystromformer", args)
    rows = pretraining_dataset(documents, tokenizer, **arguments.row_options() | {"max_length": args.max_length})
    loader = eval_dataloader(rows, arguments.collator(tokenizer, EVAL_MLM_PROBABILITY), 64)
    batches = list(loader)
    return {
        "mlm_baseline": constant_accuracy([label for b in batches for label in b["labels"].flatten().tolist()]),
        "sop_baseline": constant_accuracy([label for b in batches for label in b["sentence_order_label"].tolist()]),
    }


def fill_masks(checkpoint: Path, sentences: Sequence[str]) -> None:
    """Loads the checkpoint with the Auto class, and prints the three most probable tokens for every mask."""
    model = AutoModelForMaskedLM.from_pretrained(checkpoint)
    fill = pipeline("fill-mask", model=model, tokenizer=AutoTokenizer.from_pretrained(checkpoint), device="cpu")
    print(f"\nMasks filled by AutoModelForMaskedLM.from_pretrained({str(checkpoint)!r})")
    for sentence in sentences:
        answers = ", ".join(f"{answer['token_str']} ({answer['score']:.0%})" for answer in fill(sentence, top_k=3))
        print(f"  {sentence:<60} {answers}")


def finetune_family(family: str, documents: DatasetDict, args: QuickstartArguments) -> dict[str, float]:
    """Fine-tunes the pretrained model to predict the package of a docstring, and returns its held-out scores."""
    arguments = TextClassificationArguments(
        model_name_or_path=str(Path(args.output_dir, family, "pretrained")),
        output_dir=str(Path(args.output_dir, family, "classifier")),
        train_file=["docstrings of the installed packages"],  # for the model card
        label_column_name="package",
        eval_strategy="no",
        overwrite_output_dir=True,  # of a quickstart that was stopped
        seed=args.seed,
    )
    optimization = OptimizationArguments(
        per_device_train_batch_size=ROWS,
        tokens_per_step=2 * args.tokens_per_step,  # one label per row: more rows make the gradient less noisy
        group_by_length=True,
        learning_rate=args.learning_rate / 4,
        max_train_steps=args.finetune_steps,
    )
    results = finetune(arguments, optimization, arguments.text_task(), documents)
    require_finished(results)
    return {
        "package_accuracy": results["validation"]["accuracy"],
        "package_baseline": constant_accuracy(documents["validation"]["package"]),
    }


def continue_docstrings(documents: DatasetDict, args: QuickstartArguments) -> dict[str, float]:
    """Trains a causal linear transformer, prints how it continues docstrings, and returns its held-out scores and its
    speed."""
    print("\nTraining: causal linear transformer", flush=True)
    folder = Path(args.output_dir, "causal")
    train_byte_level_tokenizer(TextBatches(documents["train"]), args.causal_vocab_size).save_pretrained(
        folder / "tokenizer"
    )
    block_size = 2 * args.max_length
    arguments = CausalArguments(
        config_name=str(save_config("causal", args)),
        tokenizer_name=str(folder / "tokenizer"),
        output_dir=str(folder / "trained"),
        train_file=["docstrings of the installed packages"],  # for the model card
        block_size=block_size,
        eval_strategy="no",
        overwrite_output_dir=True,  # of a quickstart that was stopped
        seed=args.seed,
        preprocessing_num_workers=args.preprocessing_num_workers,
    )
    optimization = OptimizationArguments(
        per_device_train_batch_size=math.ceil(args.tokens_per_step / block_size),
        optim=args.optim,
        learning_rate=args.learning_rate,
        max_train_steps=args.causal_steps,
        adam_beta2=0.98,
    )
    results = train_causal(arguments, optimization, documents)
    require_finished(results)
    write = pipeline("text-generation", model=arguments.output_dir, device="cpu")
    print(f'\nDocstrings continued by pipeline("text-generation", {arguments.output_dir!r})')
    for beginning in BEGINNINGS:
        [answer] = write(beginning, max_new_tokens=16, do_sample=False)
        print(f"  {answer['generated_text']!r}")
    return results["validation"] | {"tokens_per_second": results["train"]["tokens_per_second"]}


def unseen(sentences: Sequence[str], documents: Dataset) -> list[str]:
    """The sentences that no document contains, whatever word replaces the mask."""
    text = "\n".join(documents["text"])
    patterns = {s: r"\S+".join(re.escape(part.rstrip(".")) for part in s.split("[MASK]")) for s in sentences}
    return [sentence for sentence, pattern in patterns.items() if not re.search(pattern, text, re.IGNORECASE)]


def print_table(results: dict[str, dict[str, float]], classes: list[str]) -> None:
    """Prints a row for each family, with each accuracy beside that of a constant prediction."""
    print("\nAccuracy on held-out source files; in brackets, that of always predicting the most frequent class")
    print(f"{'':<15}{'MLM accuracy':>18}{'SOP accuracy':>18}{f'1 of {len(classes)} packages':>18}{'tokens/s':>10}")
    for family, result in results.items():
        cells = [
            f"{result[name]:.1%} ({result[baseline]:.1%})"
            for name, baseline in (
                ("mlm_accuracy", "mlm_baseline"),
                ("sop_accuracy", "sop_baseline"),
                ("package_accuracy", "package_baseline"),
            )
        ]
        print(f"{family:<15}" + "".join(f"{cell:>18}" for cell in cells) + f"{result['tokens_per_second']:>10,.0f}")


def main(args: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Runs the quickstart with command-line arguments, and returns the figures of the final table."""
    (arguments,) = parse_arguments((QuickstartArguments,), args, __doc__)
    start = time.perf_counter()
    # Transformers' reports on every checkpoint would hide the output of this script.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print("Collecting the docstrings of the installed packages", flush=True)
    docstrings = load_docstrings(
        arguments.max_bytes_per_package,
        seed=arguments.seed,
        num_proc=arguments.preprocessing_num_workers,
        cache_dir=Path(arguments.output_dir, "cache"),
        packages=arguments.packages,
    )
    sizes = Counter(docstrings["train"]["package"])
    print(
        f"{len(docstrings['train']):,} docstrings of {len(sizes)} packages to train on, "
        f"{len(docstrings['validation']):,} held out, from other source files"
    )
    tokenizer = train_tokenizer(TextBatches(docstrings["train"]), arguments.vocab_size, arguments.max_length)
    tokenizer.save_pretrained(Path(arguments.output_dir, "tokenizer"))
    classes = sorted(name for name, _ in sizes.most_common(arguments.num_classes))
    labelled = docstrings.filter(
        lambda names: [name in classes for name in names], input_columns="package", batched=True
    )
    if len(labelled["validation"]) == 0:
        # The error of fine-tuning would come only after pretraining, and without a flag of this script.
        raise ValueError(
            f"No docstring of {', '.join(classes)} is held out: "
            "give a larger --max_bytes_per_package or --num_classes."
        )
    sentences = unseen(SENTENCES, docstrings["train"])
    baselines = pretraining_baselines(docstrings["validation"], arguments)

    results = {}
    for family in ("nystromformer", "linformer"):
        scores = pretrain_family(family, docstrings, arguments)
        fill_masks(Path(arguments.output_dir, family, "pretrained"), sentences)
        results[family] = scores | baselines | finetune_family(family, labelled, arguments)
    causal = continue_docstrings(docstrings, arguments)
    print_table(results, classes)
    print(f"causal linear transformer: {causal['bits_per_byte']:.2f} bits per byte of held-out docstrings")
    print(f"{time.perf_counter() - start:.0f} seconds in all. The models are in {arguments.output_dir}/")
    summary = {"arguments": asdict(arguments), "classes": classes, "results": results, "causal": causal}
    Path(arguments.output_dir, "all_results.json").write_text(json.dumps(summary, indent=2))
    return results


if __name__ == "__main__":
    run_script(main)
