# SPDX-License-Identifier: Apache-2.0
"""Convert a trained encoder to a linear-time model, and report where each weight comes from.

SOURCE is a checkpoint of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, ELECTRA, ALBERT or of a family of this
package. The model, the tokenizer and conversion_report.json are written to OUT. Fields of the configuration that no
flag sets are taken from the source.
"""

import argparse
import gzip
import json
import logging
import os
import zlib
from collections.abc import Sequence
from typing import Any

from ..checkpoint import load_config
from ..conversion import Matching, convert_checkpoint, converted_config
from ..conversion.convert import check_output_dir
from ..conversion.positions import METHODS
from ..conversion.sources import HEADS
from ..models.configuration_linear_transformer import FEATURE_MAPS
from ..models.configuration_linformer import SHARING_MODES
from ..registration import FAMILIES

FAMILY_NAMES = tuple(family.config_class.model_type for family in FAMILIES)

# The text column of files that `datasets` reads, which is an extra; files with other endings are text.
TABLES = dict.fromkeys((".json", ".jsonl", ".csv", ".tsv", ".parquet"), "text") | dict.fromkeys(
    (".fa", ".fasta", ".fna", ".ffn", ".faa", ".frn"), "sequence"
)


def number_or_none(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def by_layer(text: str) -> Any:
    """ "64", "none", "64,32" for each layer, or JSON for each head of each layer."""
    try:
        if text.startswith("["):
            return json.loads(text)
        numbers = [number_or_none(part) for part in text.split(",")]
    except ValueError:
        forms = "64, none, a list by layer like 64,32, or JSON like [64, 32]"
        raise argparse.ArgumentTypeError(f"{text!r} is none of {forms}") from None
    return numbers[0] if len(numbers) == 1 else numbers


def feature_map(text: str) -> str | None:
    return None if text.lower() == "none" else text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SOURCE", help="A folder or a name on the Hub.")
    parser.add_argument("out", metavar="OUT", help="A folder that is new or empty.")
    parser.add_argument(
        "--family",
        choices=FAMILY_NAMES,
        help="The family to convert to (default: the source's own, or nystromformer for other models).",
    )
    parser.add_argument("--max_length", type=int, metavar="N", help="Tokens of the longest sequence.")
    parser.add_argument(
        "--num_landmarks",
        type=by_layer,
        metavar="M",
        default=argparse.SUPPRESS,
        help="Landmarks of a Nyströmformer: a number, a list by layer (64,32,16), or none for softmax attention.",
    )
    parser.add_argument(
        "--conv_kernel_size",
        type=number_or_none,
        metavar="S",
        default=argparse.SUPPRESS,
        help="Kernel size of the convolution of the values, odd; none for no convolution.",
    )
    parser.add_argument(
        "--projected_dim",
        type=by_layer,
        metavar="K",
        default=argparse.SUPPRESS,
        help="Slots of a Linformer: a number, a list by layer (64,32), or JSON lists by head.",
    )
    parser.add_argument(
        "--share_projection",
        choices=SHARING_MODES,
        default=argparse.SUPPRESS,
        help="Which projections of a Linformer are shared.",
    )
    parser.add_argument(
        "--feature_map",
        type=feature_map,
        choices=(*FEATURE_MAPS, None),
        metavar="{elu,relu,hedgehog,none}",
        default=argparse.SUPPRESS,
        help="Feature map of a linear transformer: hedgehog is learned, and the default; none for softmax attention.",
    )
    parser.add_argument(
        "--head", choices=HEADS, metavar="HEAD", help=f"Head of the model (default: the source's): {', '.join(HEADS)}."
    )
    parser.add_argument(
        "--positions",
        choices=METHODS,
        default=METHODS[0],
        help="How to make more positions than the source has (default: %(default)s).",
    )
    parser.add_argument(
        "--sample_file",
        metavar="FILE",
        help="Text to start projections and feature maps from, and to measure differences on: any text file, "
        "JSONL, JSON, CSV, TSV or Parquet with a column text, or FASTA; each also .gz. Its beginning is used.",
    )
    parser.add_argument(
        "--text_column_name",
        metavar="COLUMN",
        help="Column of --sample_file, if it is a table (default: text; of FASTA: sequence).",
    )
    parser.add_argument(
        "--matching_steps", type=int, metavar="STEPS", help="Training steps for each layer's feature map."
    )
    parser.add_argument("--revision", metavar="REVISION", help="Branch, tag or commit of a source on the Hub.")


def run(arguments: argparse.Namespace) -> None:
    check_output_dir(arguments.out)
    files: dict[str, Any] = {} if arguments.revision is None else {"revision": arguments.revision}
    given = vars(arguments)
    fields = ("num_landmarks", "conv_kernel_size", "projected_dim", "share_projection", "feature_map")
    overrides = {name: given[name] for name in fields if name in given}
    if arguments.max_length is not None:
        overrides["max_position_embeddings"] = arguments.max_length
    source_config = load_config(arguments.source, **files)
    config = converted_config(source_config, arguments.family, **overrides)
    matching = None if arguments.matching_steps is None else Matching(steps=arguments.matching_steps)
    if arguments.text_column_name is not None and arguments.sample_file is None:
        raise ValueError("--text_column_name is a column of --sample_file: give both, or neither.")
    sample = None if arguments.sample_file is None else read_texts(arguments.sample_file, arguments.text_column_name)
    # The report, which is printed, contains all warnings.
    logger = logging.getLogger("nystrom_models.conversion")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        _, report = convert_checkpoint(
            arguments.source,
            arguments.out,
            config,
            head=arguments.head,
            positions=arguments.positions,
            sample=sample,
            matching=matching,
            return_report=True,
            save_report=True,
            **files,
        )
    finally:
        logger.setLevel(level)
    print(report)


def read_texts(path: str, column: str | None = None) -> Sequence[str]:
    """A column of a table, by default `text`, or `sequence` of a FASTA file; or the paragraphs of a text file, which
    are separated by empty lines.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if a table is given, and `datasets` is not installed.
        ValueError: if the file is not UTF-8 or damaged, a table lacks the column or has a row without text, or a
            column of a text file is given.
    """
    usual_column = TABLES.get(os.path.splitext(path.removesuffix(".gz"))[1].lower())
    if usual_column is not None:
        return _read_table(path, column or usual_column)
    if column is not None:
        raise ValueError(f"--sample_file {path} is text, without columns: leave out --text_column_name.")
    if not os.path.isfile(path):
        raise FileNotFoundError(f"--sample_file {path} is not a file.")
    try:
        with (gzip.open if path.endswith(".gz") else open)(path, "rt", encoding="utf-8") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"--sample_file {path} is not UTF-8 ({error.reason} at byte {error.start}).") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"--sample_file {path} is damaged: {error}.") from error
    return [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]


def _read_table(path: str, column: str) -> Sequence[str]:
    try:
        from ..data.classification import require_texts
        from ..data.files import load_files
    except ImportError as error:
        raise ImportError(
            f"--sample_file {path} needs {error.name}: pip install '.[train]' in the repository, or give a text file."
        ) from error
    rows = load_files(path, "--sample_file")
    require_texts(rows, column, f"the file of --sample_file, {path},", "--text_column_name")
    return rows[column]
