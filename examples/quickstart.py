# SPDX-License-Identifier: Apache-2.0
"""From nothing to answers on two CPU cores: train a Nyströmformer and a Linformer on the docstrings of this machine.

1. Collect the English docstrings of the installed Python packages, and set some source files aside.
2. Train a tokenizer.
3. Pretrain a small model with masked language modeling (MLM) and sentence-order prediction (SOP).
4. Save it, load it with AutoModelForMaskedLM, and fill masks with pipeline("fill-mask").
5. Fine-tune it to tell which package a docstring is from.

Steps 3 to 5 run for both families. Everything is written below --output_dir, and nothing is downloaded.
"""

import json
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    HfArgumentParser,
    PreTrainedTokenizerBase,
    logging,
    pipeline,
    set_seed,
)

from nystrom_models import LinformerConfig, NystromformerConfig
from nystrom_models.data import (
    PretrainingCollator,
    TextBatches,
    classification_dataset,
    eval_dataloader,
    load_docstrings,
    pretraining_dataset,
    train_dataloader,
    train_tokenizer,
)
from nystrom_models.training import (
    ClassificationObjective,
    OptimizationArguments,
    PretrainingObjective,
    create_accelerator,
    evaluate,
    save_pretrained,
    train,
)

# In the manner of docstrings. What a reader would fill in: list; true; number; be; to; of.
SENTENCES = (
    "Return a [MASK] of the names of all columns.",
    "If [MASK], raise an error when the file does not exist.",
    "The [MASK] of samples in each batch.",
    "This method should not [MASK] called by users.",
    "Whether or not [MASK] return the labels as well.",
    "Must be one [MASK] the following names.",
)


@dataclass
class QuickstartArguments:
    """The sizes of the run."""

    output_dir: str = field(default="outputs/quickstart", metadata={"help": "Everything is written here."})
    seed: int = field(default=0, metadata={"help": "Of data, initial weights and order."})
    max_train_steps: int = field(default=1600, metadata={"help": "Optimizer steps of pretraining."})
    finetune_steps: int = field(default=400, metadata={"help": "Optimizer steps of fine-tuning."})
    per_device_train_batch_size: int = field(default=16, metadata={"help": "Rows of a batch."})
    learning_rate: float = field(default=1.5e-3, metadata={"help": "Peak learning rate of pretraining."})
    max_length: int = field(default=128, metadata={"help": "Tokens of a row, at most."})
    vocab_size: int = field(default=5000, metadata={"help": "Tokens of the vocabulary, at most."})
    hidden_size: int = field(default=128, metadata={"help": "Width of the models."})
    num_hidden_layers: int = field(default=3, metadata={"help": "Layers of the models."})
    num_attention_heads: int = field(default=2, metadata={"help": "Heads of a layer."})
    num_landmarks: int = field(default=32, metadata={"help": "Landmarks, and projected length of the Linformer."})
    mlm_probability: float = field(default=0.3, metadata={"help": "Share of tokens predicted in pretraining."})
    num_classes: int = field(default=8, metadata={"help": "Packages that the classifier tells apart."})
    max_bytes_per_package: int = field(default=3_000_000, metadata={"help": "Source read from one package, at most."})
    packages: list[str] | None = field(default=None, metadata={"help": "Packages to read; all if not given."})
    preprocessing_num_workers: int = field(
        default=min(4, os.cpu_count() or 1), metadata={"help": "Processes that prepare the data."}
    )


def model_config(family: str, tokenizer: PreTrainedTokenizerBase, args: QuickstartArguments):
    """A small model whose rows are longer than its landmarks, so that the approximation is what trains."""
    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": args.hidden_size,
        "num_hidden_layers": args.num_hidden_layers,
        "num_attention_heads": args.num_attention_heads,
        "intermediate_size": 4 * args.hidden_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": args.max_length,
        "conv_kernel_size": 9,
        "initializer_range": 0.06,  # about 1 / √width, as 0.02 is for the width of BERT
        "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if family == "nystromformer":
        return NystromformerConfig(num_landmarks=args.num_landmarks, **common)
    return LinformerConfig(projected_dim=args.num_landmarks, **common)


def constant_accuracy(values: Sequence[int]) -> float:
    """The accuracy of always giving the most frequent answer."""
    counts = Counter(value for value in values if value != -100)
    return counts.most_common(1)[0][1] / counts.total()


def pretrain(
    family: str, data: DatasetDict, tokenizer: PreTrainedTokenizerBase, accelerator: Accelerator, args
) -> tuple[Path, dict[str, float]]:
    """Pretrains a model, and returns the folder of its checkpoint and its held-out scores."""
    set_seed(args.seed)
    config = model_config(family, tokenizer, args)
    config.sparse_prediction = True  # logits at the masked tokens alone: most of the arithmetic is saved
    model = AutoModelForPreTraining.from_config(config)
    print(f"\nPretraining a {type(model).__name__} of {model.num_parameters():,} parameters", flush=True)
    state = train(
        accelerator,
        model,
        PretrainingObjective(),
        train_dataloader(
            data["train"],
            PretrainingCollator(tokenizer, mlm_probability=args.mlm_probability, seed=args.seed),
            args.per_device_train_batch_size,
            args.per_device_train_batch_size * accelerator.num_processes,
            seed=args.seed,
        ),
        OptimizationArguments(
            per_device_train_batch_size=args.per_device_train_batch_size,
            learning_rate=args.learning_rate,
            max_train_steps=args.max_train_steps,
            adam_beta2=0.98,
        ),
        desc=f"{family}: MLM + SOP",
    )
    loader = eval_dataloader(data["validation"], PretrainingCollator(tokenizer, seed=args.seed), 64)
    scores = evaluate(accelerator, state.model, PretrainingObjective(), loader)
    scores["mlm_baseline"] = constant_accuracy(torch.cat([batch["labels"].flatten() for batch in loader]).tolist())
    scores["sop_baseline"] = constant_accuracy(data["validation"]["sentence_order_label"])
    scores["tokens_per_second"] = state.tokens_per_second

    checkpoint = Path(args.output_dir, family, "pretrained")
    model.config.sparse_prediction = False
    save_pretrained(accelerator, state.model, tokenizer, checkpoint)
    return checkpoint, scores


def fill_masks(checkpoint: Path, sentences: Sequence[str]) -> None:
    """Loads the checkpoint as anyone would, and prints the three most probable tokens for every mask."""
    model = AutoModelForMaskedLM.from_pretrained(checkpoint)
    fill = pipeline("fill-mask", model=model, tokenizer=AutoTokenizer.from_pretrained(checkpoint), device="cpu")
    print(f"\nMasks filled by AutoModelForMaskedLM.from_pretrained({str(checkpoint)!r})")
    for sentence in sentences:
        answers = ", ".join(f"{answer['token_str']} ({answer['score']:.0%})" for answer in fill(sentence, top_k=3))
        print(f"  {sentence:<60} {answers}")


def finetune(
    family: str, checkpoint: Path, data: DatasetDict, classes: list[str], accelerator: Accelerator, args
) -> dict[str, float]:
    """Fine-tunes the pretrained model to name the package of a docstring, and returns its held-out scores."""
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoint, id2label=dict(enumerate(classes)), label2id={name: i for i, name in enumerate(classes)}
    )
    batch_size = 2 * args.per_device_train_batch_size  # one label a row, not many: more rows for a steady gradient
    collator = DataCollatorWithPadding(tokenizer)
    columns = ["input_ids", "token_type_ids", "attention_mask", "labels"]
    batches = {split: rows.select_columns([*columns, "length"]) for split, rows in data.items()}

    def collate(rows):
        return collator([{name: row[name] for name in columns} for row in rows])

    state = train(
        accelerator,
        model,
        ClassificationObjective(),
        train_dataloader(
            batches["train"],
            collate,
            batch_size,
            batch_size * accelerator.num_processes,
            seed=args.seed,
        ),
        OptimizationArguments(
            per_device_train_batch_size=batch_size,
            learning_rate=args.learning_rate / 2,
            max_train_steps=args.finetune_steps,
        ),
        desc=f"{family}: which package",
    )
    loader = eval_dataloader(batches["validation"], collate, 64)
    scores = evaluate(accelerator, state.model, ClassificationObjective(), loader)
    save_pretrained(accelerator, state.model, tokenizer, Path(args.output_dir, family, "classifier"))
    return {"accuracy": scores["accuracy"], "baseline": constant_accuracy(data["validation"]["labels"])}


def unseen(sentences: Sequence[str], documents: Dataset) -> list[str]:
    """The sentences that, with whatever word in place of the mask, stand in none of the documents."""
    text = "\n".join(documents["text"])
    patterns = {s: r"\S+".join(re.escape(part.rstrip(".")) for part in s.split("[MASK]")) for s in sentences}
    return [sentence for sentence, pattern in patterns.items() if not re.search(pattern, text, re.IGNORECASE)]


def print_table(results: dict[str, dict[str, float]], classes: list[str]) -> None:
    """One row a family, every accuracy beside what a constant answer gets."""
    print("\nOn source files that were held out; in brackets, what the most frequent answer gets")
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
    """Runs the quickstart with command-line arguments, and returns the figures of the closing table."""
    (arguments,) = HfArgumentParser(QuickstartArguments).parse_args_into_dataclasses(args)  # type: ignore[arg-type]
    start = time.perf_counter()
    # Transformers' reports on every checkpoint would bury the story.
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    accelerator = create_accelerator()
    print("Collecting the docstrings of the installed packages", flush=True)
    num_proc = arguments.preprocessing_num_workers
    docstrings = load_docstrings(
        arguments.max_bytes_per_package,
        seed=arguments.seed,
        num_proc=num_proc,
        cache_dir=Path(arguments.output_dir, "cache"),
        packages=arguments.packages,
    )
    sizes = Counter(docstrings["train"]["package"])
    print(
        f"{len(docstrings['train']):,} docstrings of {len(sizes)} packages to train on, "
        f"{len(docstrings['validation']):,} from other source files held out"
    )
    tokenizer = train_tokenizer(TextBatches(docstrings["train"]), arguments.vocab_size, arguments.max_length)
    examples = DatasetDict(
        {
            split: pretraining_dataset(
                documents, tokenizer, arguments.max_length, short_seq_prob=0.2, seed=arguments.seed, num_proc=num_proc
            )
            for split, documents in docstrings.items()
        }
    )
    classes = sorted(name for name, _ in sizes.most_common(arguments.num_classes))
    labelled = DatasetDict(
        {
            split: classification_dataset(
                documents.filter(
                    lambda names: [name in classes for name in names], input_columns="package", batched=True
                ),
                tokenizer,
                arguments.max_length,
                label_column="package",
                label_names=classes,
            )
            for split, documents in docstrings.items()
        }
    )
    sentences = unseen(SENTENCES, docstrings["train"])

    results = {}
    for family in ("nystromformer", "linformer"):
        checkpoint, scores = pretrain(family, examples, tokenizer, accelerator, arguments)
        fill_masks(checkpoint, sentences)
        package = finetune(family, checkpoint, labelled, classes, accelerator, arguments)
        results[family] = scores | {f"package_{name}": value for name, value in package.items()}
        accelerator.free_memory()
    print_table(results, classes)
    print(f"{time.perf_counter() - start:.0f} seconds in all. The models are in {arguments.output_dir}/")
    summary = {"arguments": asdict(arguments), "classes": classes, "results": results}
    Path(arguments.output_dir, "all_results.json").write_text(json.dumps(summary, indent=2))
    return results


if __name__ == "__main__":
    main()
