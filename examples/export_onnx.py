# SPDX-License-Identifier: Apache-2.0
"""Export a model to ONNX, quantize it, and measure its size, speed and accuracy on a CPU.

    python examples/export_onnx.py --model_name_or_path MODEL --output_dir outputs/onnx --quantize

writes model.onnx and model_quantized.onnx with the configuration and the tokenizer, and prints a table that compares
PyTorch and ONNX Runtime. With --validation_file, both also evaluate a classifier or a regression model.
"""

import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from nystrom_models.checkpoint import load_tokenizer
from nystrom_models.data import ClassificationCollator, classification_dataset
from nystrom_models.data.classification import TextTask
from nystrom_models.data.files import load_files
from nystrom_models.deployment.folder import TASKS, export_folder, load_for_export, model_inputs
from nystrom_models.deployment.onnx import shape_of_inputs
from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.causal import NO_LIMIT
from nystrom_models.training.finetuning import class_names
from nystrom_models.training.results import read_results, write_results
from nystrom_models.training.text_classification import evaluate_predictions, ids_of_classes

Engine = Callable[[dict[str, Tensor]], Tensor]

# Names of the table's rows, by the kind of file.
ENGINES = {"onnx": "ONNX Runtime", "int8": "ONNX Runtime, int8"}


@dataclass(kw_only=True)
class ExportArguments:
    """The model to export, and the data to measure it on."""

    model_name_or_path: str = field(metadata={"help": "Folder or Hub name of the model."})
    output_dir: str = field(metadata={"help": "Folder to write to."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer, if not the model's."})
    task: str | None = field(
        default=None, metadata={"help": f"{', '.join(TASKS)}; by default, what the model was saved for."}
    )
    opset_version: int = field(default=20, metadata={"help": "Version of ONNX's operators, 18 to 22."})
    quantize: bool = field(default=False, metadata={"help": "Also write a model with 8-bit weights."})
    lengths: list[int] | None = field(
        default=None, metadata={"help": "Lengths of rows to time; by default, 1/4 and all of what the model takes."}
    )
    batch_size: int = field(default=4, metadata={"help": "Rows of a batch."})
    repeats: int = field(default=5, metadata={"help": "Batches to time; the median is reported."})
    validation_file: list[str] | None = field(
        default=None, metadata={"help": "Files to evaluate on: .json, .jsonl, .csv, .tsv or .parquet, each also .gz."}
    )
    text_column_names: list[str] | None = field(
        default=None, metadata={"help": "Column of the text, or the two columns of a pair."}
    )
    label_column_name: str = field(default="label", metadata={"help": "Column of the label."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on this many random rows."})
    cache_dir: str | None = field(default=None, metadata={"help": "Folder where prepared data are cached."})

    def __post_init__(self):
        if self.task is not None and self.task not in TASKS:
            raise ValueError(f"--task must be one of {', '.join(TASKS)}, but is {self.task}.")
        for name in ("batch_size", "repeats", "max_eval_samples"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, but is {value}.")


def onnx_engine(path: Path) -> Engine:
    """Returns a function that runs a file with as many threads as PyTorch and returns its first output."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]

    def run(inputs: dict[str, Tensor]) -> Tensor:
        return torch.from_numpy(session.run(None, {name: inputs[name].numpy() for name in names})[0])

    return run


def evaluation_batches(args: ExportArguments, model: PreTrainedModel, tokenizer, max_length: int):
    """The task and the batches of --validation_file."""
    if not type(model).__name__.endswith("ForSequenceClassification"):
        raise ValueError(f"--validation_file is for --task text-classification; this is a {type(model).__name__}.")
    names = class_names(model.config)
    kind = model.config.problem_type
    if kind == "multi_label_classification" or (kind == "regression" and len(names) > 1):
        raise ValueError("--validation_file needs one label for each row, but this model gives several: leave it out.")
    task = TextTask(tuple(args.text_column_names or ("text",)), args.label_column_name, regression=len(names) == 1)
    if task.regression:
        task = TextTask(task.text_columns, task.label_column, regression=True, metric="regression")
    apart = model.config.dual_encoder
    rows = load_files(args.validation_file, "--validation_file", args.cache_dir)
    if args.max_eval_samples is not None and args.max_eval_samples < len(rows):
        rows = rows.shuffle(seed=0).select(range(args.max_eval_samples))
    dataset = classification_dataset(
        rows,
        tokenizer,
        max_length,
        task.text_columns,
        task.label_column,
        None if task.regression else ids_of_classes(names),
        task.regression,
        # The tokenizer of a model that was trained on the ends of long texts cuts their beginnings.
        "tail" if tokenizer.truncation_side == "left" and (apart or len(task.text_columns) == 1) else "head",
        where="the validation set",
        apart=apart,
    )
    return task, list(DataLoader(dataset, args.batch_size, collate_fn=ClassificationCollator(tokenizer)))


def milliseconds(engine: Engine, inputs: dict[str, Tensor], repeats: int) -> float:
    """The median time of a batch."""
    engine(inputs)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        engine(inputs)
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)


def print_table(results: dict[str, dict[str, Any]], lengths: Sequence[int], batch_size: int) -> None:
    metrics = [name for name in ("accuracy", "pearson") if name in results["PyTorch"]]
    heads = ["MB", *(f"ms at {length}" for length in lengths), "difference", *metrics]
    print(f"\n{batch_size} rows per batch, {torch.get_num_threads()} threads; difference: the largest from PyTorch's")
    print(f"outputs, whose largest value is {results['PyTorch']['largest_output']:.3g}")
    print(f"{'':<20}" + "".join(f"{head:>12}" for head in heads))
    for name, row in results.items():
        cells = [f"{row['megabytes']:,.1f}", *(f"{row[f'milliseconds_{length}']:,.1f}" for length in lengths)]
        cells.append(f"{row['difference']:.1e}" if "difference" in row else "")
        cells.extend(f"{row[metric]:.1%}" if metric == "accuracy" else f"{row[metric]:.4f}" for metric in metrics)
        print(f"{name:<20}" + "".join(f"{cell:>12}" for cell in cells))


def random_inputs(args: ExportArguments, model: PreTrainedModel, names: Sequence[str], lengths: Sequence[int]):
    """Batches of random tokens without padding, by their length."""
    generator = torch.Generator().manual_seed(0)
    inputs = {}
    for length in lengths:
        shape = shape_of_inputs(model, args.batch_size, length)
        ids = torch.randint(model.config.vocab_size, shape, generator=generator)
        tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
        inputs[length] = {name: tensors[name] for name in names}
    return inputs


def compare(
    engines: dict[str, Engine], inputs: dict[int, dict[str, Tensor]], repeats: int
) -> dict[str, dict[str, Any]]:
    """The times of each engine at each length, and the largest difference from the first engine's outputs."""
    reference, *others = engines
    expected = {length: engines[reference](tensors) for length, tensors in inputs.items()}
    results: dict[str, dict[str, Any]] = {}
    for name, engine in engines.items():
        results[name] = {
            f"milliseconds_{length}": milliseconds(engine, tensors, repeats) for length, tensors in inputs.items()
        }
    results[reference]["largest_output"] = max(output.abs().max().item() for output in expected.values())
    for name in others:
        results[name]["difference"] = max(
            (engines[name](tensors) - expected[length]).abs().max().item() for length, tensors in inputs.items()
        )
    return results


@torch.no_grad()
def main(args: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Runs the script with command-line arguments, and returns the figures of `all_results.json`."""
    (arguments,) = parse_arguments((ExportArguments,), args, __doc__)
    saved = read_results(arguments.output_dir)
    if saved is not None and "opset_version" not in saved.get("arguments", {}):
        raise ValueError(
            f"--output_dir {arguments.output_dir} has the all_results.json of another run, which this script would "
            "replace: give a new folder."
        )
    model = load_for_export(arguments.model_name_or_path, arguments.task)
    tokenizer = load_tokenizer(arguments.tokenizer_name or arguments.model_name_or_path)
    limit = min(model.config.max_position_embeddings or tokenizer.model_max_length, tokenizer.model_max_length)
    if limit >= NO_LIMIT and arguments.lengths is None:
        raise ValueError("The model takes rows of any length: give the --lengths to time, such as 512 4096.")
    lengths = arguments.lengths or [max(1, limit // 4), limit]
    if not 1 <= min(lengths) <= max(lengths) <= limit:
        raise ValueError(
            f"--lengths must lie between 1 and {limit}, the most that the model takes, but are {lengths}."
        )
    task, batches = None, []
    if arguments.validation_file is not None:
        task, batches = evaluation_batches(arguments, model, tokenizer, limit)

    print(f"Exporting a {type(model).__name__} of {model.num_parameters():,} parameters", flush=True)
    written = export_folder(
        model, tokenizer, arguments.output_dir, opset_version=arguments.opset_version, quantize=arguments.quantize
    )
    files = {ENGINES[name]: path for name, path in written.items()}
    engines: dict[str, Engine] = {"PyTorch": lambda inputs: model(**inputs, return_dict=False)[0]}
    engines |= {name: onnx_engine(path) for name, path in files.items()}
    names = model_inputs(tokenizer)
    results = compare(engines, random_inputs(arguments, model, names, lengths), arguments.repeats)
    for name, engine in engines.items():
        size = os.path.getsize(files[name]) if name in files else sum(weight.nbytes for weight in model.parameters())
        results[name]["megabytes"] = size / 1e6
        if task is not None:
            logits = torch.cat([engine({name: batch[name] for name in names}) for batch in batches])
            labels = torch.cat([batch["labels"] for batch in batches])
            results[name] |= evaluate_predictions(task, logits, labels)
    print_table(results, lengths, arguments.batch_size)
    write_results(arguments.output_dir, results, arguments)
    print(f"Written to {arguments.output_dir}/")
    return results


if __name__ == "__main__":
    main()
