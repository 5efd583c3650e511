# SPDX-License-Identifier: Apache-2.0
"""Measure the error of linear attention against a model's exact attention, by layer and head.

Takes a model of this package or any encoder of Transformers, and a text file. Writes a page with tables and pictures,
inspection.html; the same as data, inspection.json; and the pictures as PNG.

    nystrom-models inspect google-bert/bert-base-uncased --text_file articles.txt --output_dir outputs/inspection
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoint import load_complete, load_tokenizer
from ..conversion.reading import without_load_report
from ..models.configuration_nystromformer import NystromformerConfig
from ..models.modeling_base import BasePreTrainedModel
from .env import environment

DEFAULT_LENGTH = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="Folder or Hub name of the model.")
    parser.add_argument(
        "--text_file",
        required=True,
        nargs="+",
        help="Text to measure on: .txt with empty lines between documents, .json, .jsonl, .csv, .tsv, .parquet "
        "or FASTA (then with --text_column_name sequence), each also .gz.",
    )
    parser.add_argument("--output_dir", required=True, help="Folder to write to.")
    parser.add_argument("--text_column_name", default="text", help="Column of the text (default: text).")
    parser.add_argument("--tokenizer_name", help="Tokenizer, if not the model's.")
    parser.add_argument(
        "--num_landmarks",
        type=int,
        nargs="+",
        help="Numbers of landmarks to try (default: 16 32 64 128 256). A Nyströmformer's own is always tried.",
    )
    parser.add_argument(
        "--pinv_iterations", type=int, nargs="+", default=[6], help="Steps of the pseudo-inverse to try (default: 6)."
    )
    parser.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        help=f"Lengths of rows in tokens, special tokens included (default: {DEFAULT_LENGTH}, or the most that the "
        "model takes).",
    )
    parser.add_argument("--max_samples", type=int, default=4, help="Texts to measure at each length (default: 4).")
    parser.add_argument(
        "--max_rows",
        type=int,
        default=512,
        help="Rows of each map to measure; of longer maps, this many are drawn at random. Singular values are "
        "measured on texts of at most this many tokens (default: 512).",
    )
    parser.add_argument(
        "--error",
        type=float,
        default=0.1,
        help="Report how many landmarks, or what rank, this relative error needs (default: 0.1).",
    )
    parser.add_argument("--layers", type=int, nargs="+", help="Attention layers to measure, from 0 (default: all).")
    parser.add_argument(
        "--token", type=int, help="Show what the token at this position attends to, from 0; -1 is the last."
    )
    parser.add_argument(
        "--mlm_accuracy",
        action="store_true",
        help="Also measure the accuracy on masked tokens with each number of landmarks. A larger --max_samples makes "
        "it more precise.",
    )
    parser.add_argument(
        "--mlm_accuracy_by_layer",
        type=int,
        metavar="NUM_LANDMARKS",
        help="With --mlm_accuracy: also measure it with exact attention in one layer at a time, then in more and more "
        "layers, and this many landmarks in all others. It shows which layers should stay exact.",
    )
    parser.add_argument("--device", help="Device, such as cuda or cpu (default: cuda if available).")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the rows that are drawn (default: 0).")


def _check(arguments: argparse.Namespace) -> None:
    for name in ("num_landmarks", "pinv_iterations", "lengths"):
        numbers = getattr(arguments, name)
        if numbers is not None and min(numbers) < 1:
            raise ValueError(f"--{name} must be numbers of at least 1, but is {' '.join(map(str, numbers))}.")
    for name, least in (("max_samples", 1), ("max_rows", 2)):
        if getattr(arguments, name) < least:
            raise ValueError(f"--{name} must be at least {least}, but is {getattr(arguments, name)}.")
    if not 0 < arguments.error < 1:
        raise ValueError(f"--error must lie between 0 and 1, but is {arguments.error}.")
    number = arguments.mlm_accuracy_by_layer
    if number is not None and not arguments.mlm_accuracy:
        raise ValueError("--mlm_accuracy_by_layer needs --mlm_accuracy.")
    if number is not None and number < 1:
        raise ValueError(f"--mlm_accuracy_by_layer is a number of landmarks of at least 1, but is {number}.")
    if arguments.layers is not None and min(arguments.layers) < 0:
        raise ValueError(f"--layers are counted from 0, but {min(arguments.layers)} is given.")


def run(arguments: argparse.Namespace) -> None:
    _check(arguments)
    try:
        from tqdm.auto import tqdm

        from ..analysis import NUM_LANDMARKS, inspect_attention
        from ..analysis.report import attended, content, write_report
        from ..analysis.texts import longest_row
        from ..data.classification import require_texts
        from ..data.files import load_files
        from ..data.unknown_text import check_known_documents
    except ImportError as error:
        raise ImportError(f"inspect needs {error.name}: pip install '.[train]' in the repository.") from error
    device = _device(arguments.device)
    documents = load_files(arguments.text_file, "--text_file")
    texts = _column(documents, arguments.text_column_name)
    require_texts(documents, arguments.text_column_name, "--text_file")
    tokenizer = load_tokenizer(arguments.tokenizer_name or arguments.checkpoint)
    # The attention of unknown tokens, which are all alike, says nothing about the texts.
    check_known_documents(documents, [arguments.text_column_name], tokenizer, "--text_file")
    whole, model = _model(arguments, tokenizer, device)
    calls = _calls(arguments, texts, tokenizer, longest_row(model, tokenizer))
    longest = [call for call in calls if call["input_ids"].shape[1] == calls[-1]["input_ids"].shape[1]]

    layers = getattr(model.config, "num_hidden_layers", 1)
    with tqdm(total=len(calls) * layers, unit="layer", desc="Inspecting", disable=None) as bar:
        inspection = inspect_attention(
            model,
            (_on(device, call) for call in calls),
            num_landmarks=arguments.num_landmarks or NUM_LANDMARKS,
            pinv_iterations=arguments.pinv_iterations,
            max_rows=arguments.max_rows,
            layers=arguments.layers,
            token=arguments.token,
            seed=arguments.seed,
            on_layer=bar.update,
        )
    if arguments.mlm_accuracy:
        rows = [_on(device, call) for call in longest]
        with tqdm(unit="row", desc="Masked tokens", disable=None) as bar:
            _mlm_accuracy(inspection, whole, tokenizer, rows, arguments, bar)
    token = None
    if arguments.token is not None:
        ids = longest[0]["input_ids"][0]
        token = attended(inspection, arguments.token, ids, lambda number: str(tokenizer.convert_ids_to_tokens(number)))
    found = content(
        inspection,
        error=arguments.error,
        model={"name": arguments.checkpoint, "model_type": model.config.model_type},
        settings={
            "texts": len(longest),
            "max_rows": arguments.max_rows,
            "seed": arguments.seed,
            "device": str(device),
        },
        command=arguments.command_line,
        versions=environment(),
        token=token,
    )
    paths = write_report(inspection, found, arguments.output_dir)
    for line in summary(found):
        print(line)
    print(f"Written to {paths[0]}, {paths[1].name} and {len(paths) - 2} pictures")


def _device(name: str | None) -> torch.device:
    """The device, after a first tensor on it."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=device)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"--device {name} cannot be used here: {error}") from error
    return device


def _on(device: torch.device, call: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in call.items()}


def _column(documents: Any, name: str) -> Sequence[str]:
    if name not in documents.column_names:
        raise ValueError(
            f"--text_column_name {name} is not a column of --text_file, which has {', '.join(documents.column_names)}."
        )
    return documents[name]


def _model(
    arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, device: torch.device
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The model, with its head if masked tokens are to be predicted, and its encoder; in float32, so that the error of
    the approximation is measured and not that of rounding."""
    model_class = AutoModelForMaskedLM if arguments.mlm_accuracy else AutoModel
    with without_load_report():
        whole = load_complete(
            model_class,
            arguments.checkpoint,
            "give a complete checkpoint, and one with a masked language modelling head for --mlm_accuracy.",
        ).to(device)
    if arguments.mlm_accuracy:
        if tokenizer.mask_token_id is None or whole.config.is_encoder_decoder:
            raise ValueError("--mlm_accuracy needs an encoder, and a tokenizer with a mask token.")
        if isinstance(whole, BasePreTrainedModel) and not isinstance(whole.config, NystromformerConfig):
            raise ValueError(f"--mlm_accuracy measures attention with landmarks, and {type(whole).__name__} has none.")
    if whole.config.is_encoder_decoder:
        return whole, whole.get_encoder()
    if len(parts := sorted(whole.config.sub_configs)) > 1:
        raise ValueError(
            f"{type(whole).__name__} has several parts ({', '.join(parts)}), and not all of them read text: give one "
            "of them to inspect_attention in Python, such as model.text_model."
        )
    return whole, whole.base_model


def _calls(
    arguments: argparse.Namespace, texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, limit: int
) -> list[dict[str, Tensor]]:
    """The inputs of the model, which takes `limit` tokens: rows of every length, the longest last."""
    from ..analysis.texts import token_rows

    lengths = sorted(set(arguments.lengths or [min(DEFAULT_LENGTH, limit)]))
    if lengths[-1] > limit:
        raise ValueError(f"--lengths has {lengths[-1]}, but the model takes at most {limit} tokens.")
    if arguments.token is not None and not -lengths[-1] <= arguments.token < lengths[-1]:
        raise ValueError(f"--token {arguments.token} is not in a row of {lengths[-1]} tokens.")
    # Singular values need a length of at most max_rows.
    wanted = lengths if lengths[0] <= arguments.max_rows else [arguments.max_rows, *lengths]
    calls = []
    for length in wanted:
        try:
            calls += token_rows(texts, tokenizer, length, arguments.max_samples)
        except ValueError as error:
            if length not in lengths:
                raise ValueError(
                    f"--max_rows {length}: {error} Raise it, or give more text in --text_file."
                ) from error
            raise ValueError(
                f"--lengths {length}: {error} Give shorter --lengths, or more text in --text_file."
            ) from error
    return calls


def _mlm_accuracy(
    inspection: Any,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Mapping[str, Tensor]],
    arguments: argparse.Namespace,
    bar: Any,
) -> None:
    """`masked_accuracy` with exact attention and with each number of landmarks that was inspected; and by layer."""
    from ..analysis.masked_accuracy import masked_accuracy, masked_accuracy_by_layer

    options = {
        "mask_token_id": tokenizer.mask_token_id,
        "special_ids": tokenizer.all_special_ids,
        "pinv_iterations": inspection.main.pinv_iterations or 6,
        "seed": arguments.seed,
        "on_row": bar.update,
    }
    numbers = {setting.num_landmarks for setting in inspection.settings if setting.num_landmarks is not None}
    inspection.mlm = masked_accuracy(model, rows, [None, *sorted(numbers)], **options)
    if arguments.mlm_accuracy_by_layer is not None:
        number = arguments.mlm_accuracy_by_layer
        inspection.mlm_by_layer = masked_accuracy_by_layer(model, rows, number, **options)


def summary(found: dict) -> list[str]:
    """The main figures: the errors of each layer, and the numbers that the given error needs."""
    main, needed = found["main_setting"], found["needed"]
    rows = [row for row in found["errors"] if all(row[name] == value for name, value in main.items())]
    lines = [", ".join(f"{name} {value}" for name, value in main.items() if value is not None)]
    lines.append(f"{'layer':>5} {'output error':>13} {'map error':>10}")
    lines += [f"{row['layer']:>5} {row['output_error']:>13.4f} {row['map_error']:>10.4f}" for row in rows]
    for row in [*(found["mlm"] or []), *(found["mlm_by_layer"] or [])]:
        number = row["num_landmarks"]
        what = f"num_landmarks={number}" if isinstance(number, list) else f"{number} landmarks"
        what = "exact attention" if number is None else what
        lines.append(f"Masked tokens with {what}: {row['mlm_accuracy']:.1%} ± {row['standard_error']:.1%}")
    lines.append(f"An error of {needed['error']:g} needs")
    for name in ("num_landmarks", "projected_dim"):
        if needed[name]["by_layer"]:
            lines.append(f"  {name}={needed[name]['by_layer']}, at {needed[name]['length']:,} tokens")
    return lines
