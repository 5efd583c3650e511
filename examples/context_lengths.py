# SPDX-License-Identifier: Apache-2.0
"""Measure the bits per byte that causal models need for held-out documents, over the length of the context they see.

    python examples/context_lengths.py --models outputs/linear outputs/softmax \\
        --validation_file validation.txt.gz --output_dir outputs/context

For each length, the documents are cut into rows of so many tokens, as run_clm.py does. Each model thus predicts the
same tokens at every length, from at most so many tokens of the same document. --models takes models of run_clm.py.
The script writes context_lengths.json and context_lengths.png.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import Accelerator
from datasets import Dataset
from transformers import AutoModelForCausalLM

import nystrom_models  # noqa: F401, registers the models
from nystrom_models.checkpoint import load_complete, load_config, load_tokenizer
from nystrom_models.data import CausalCollator, causal_dataset, causal_tokenizer, eval_dataloader
from nystrom_models.data.files import load_files
from nystrom_models.models.configuration_base import BaseConfig
from nystrom_models.training import create_accelerator
from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.causal import NO_LIMIT, held_out_scores
from nystrom_models.training.comparison import labels_of
from nystrom_models.training.results import results_content, write_json
from nystrom_models.training.splits import sample


@dataclass(kw_only=True)
class ContextArguments:
    """The models, the documents and the lengths."""

    models: list[str] = field(metadata={"help": "Folders or Hub names of causal models."})
    labels: list[str] | None = field(default=None, metadata={"help": "Their names; by default, those of the folders."})
    validation_file: list[str] = field(metadata={"help": "Files of documents that no model was trained on."})
    lengths: list[int] = field(
        default_factory=lambda: [128, 256, 512, 1024, 2048, 4096, 8192],
        metadata={"help": "Lengths of rows in tokens."},
    )
    max_eval_samples: int | None = field(default=None, metadata={"help": "Documents to read; by default, all."})
    tokens_per_batch: int = field(default=8192, metadata={"help": "Tokens of a batch, but at least one row."})
    output_dir: str = field(metadata={"help": "Folder to write to."})
    seed: int = field(default=0, metadata={"help": "Seed of the sample of documents."})

    def __post_init__(self):
        self.labels = labels_of(self.models, self.labels, "model")
        if min(self.lengths) < 2:
            raise ValueError(f"--lengths must be 2 or more, but one is {min(self.lengths)}.")


def measure(name: str, documents: Dataset, args: ContextArguments, accelerator: Accelerator) -> list[dict[str, float]]:
    """The scores of a model at each length. A length beyond `max_position_embeddings` is left out, with a message."""
    config = load_config(name)
    if not (isinstance(config, BaseConfig) and config.is_decoder):
        # Other causal models take no `seq_idx`: they would also see the documents before, in the same row.
        raise ValueError(
            f"--models {name} is a {config.model_type}, but must be a causal model of this package: give models of "
            "run_clm.py."
        )
    tokenizer = causal_tokenizer(load_tokenizer(name))
    model = load_complete(AutoModelForCausalLM, name, "give models of run_clm.py.")
    tokenizer.model_max_length = longest = model.config.max_position_embeddings or NO_LIMIT
    model = accelerator.prepare(model)
    found = []
    for length in sorted(set(args.lengths)):
        if length > longest:
            print(f"{name}: {length:,} tokens are left out, because max_position_embeddings is {longest:,}.")
            continue
        rows = causal_dataset(documents, tokenizer, length, desc=f"Rows of {length:,} tokens")
        loader = eval_dataloader(rows, CausalCollator.of(tokenizer), max(1, args.tokens_per_batch // length))
        scores = held_out_scores(accelerator, model, loader)
        print(f"{name}: {length:,} tokens, {scores['bits_per_byte']:.4f} bits per byte", flush=True)
        found.append({"length": length, **scores})
    return found


def plot(results: Mapping[str, Sequence[Mapping[str, float]]], path: Path) -> None:
    """Draws bits per byte over the length, a line for each model."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for label, rows in results.items():
        axes.plot([row["length"] for row in rows], [row["bits_per_byte"] for row in rows], "o-", label=label)
    axes.set_xscale("log", base=2)
    lengths = sorted({row["length"] for rows in results.values() for row in rows})
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
    axes.set(xlabel="tokens of a row", ylabel="bits per byte, held out")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=100)


def main(args: Sequence[str] | None = None) -> dict[str, list[dict[str, float]]]:
    """Runs the script with command-line arguments, and returns the scores of each model by its label."""
    (arguments,) = parse_arguments((ContextArguments,), args, __doc__)
    documents = sample(
        load_files(arguments.validation_file, "--validation_file"), arguments.max_eval_samples, arguments.seed
    )
    accelerator = create_accelerator()
    results = {
        label: measure(name, documents, arguments, accelerator)
        for label, name in zip(arguments.labels, arguments.models, strict=True)
    }
    folder = Path(arguments.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "context_lengths.json", results_content(results, arguments))
    plot(results, folder / "context_lengths.png")
    print(f"Written to {folder}/: context_lengths.json and context_lengths.png")
    return results


if __name__ == "__main__":
    main()
