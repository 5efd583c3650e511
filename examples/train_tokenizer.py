# SPDX-License-Identifier: Apache-2.0
"""Train a tokenizer on the documents for pretraining: WordPiece, as in BERT; single characters, for genomes and other
texts without words; or for causal models byte-level BPE, as in GPT-2.

    python examples/train_tokenizer.py --train_file corpus.txt --vocab_size 30000 --output_dir outputs/tokenizer
    python examples/train_tokenizer.py --train_file corpus.txt --tokenizer_type byte_level_bpe --output_dir outputs/bpe
    python examples/train_tokenizer.py --train_file genome.fna.gz --text_column_name sequence \\
        --tokenizer_type character --output_dir outputs/bases

--train_file and --dataset_name are the same as in examples/run_pretraining.py and examples/run_clm.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import datasets
from transformers import PreTrainedTokenizerBase

from nystrom_models.data import (
    TextBatches,
    load_files,
    train_byte_level_tokenizer,
    train_character_tokenizer,
    train_tokenizer,
)
from nystrom_models.data.classification import require_texts
from nystrom_models.data.streams import stream_columns
from nystrom_models.data.unknown_text import check_known_documents
from nystrom_models.training.arguments import parse_arguments
from nystrom_models.training.run import create_folder


@dataclass(kw_only=True)
class TokenizerArguments:
    """Data, vocabulary and output."""

    output_dir: str = field(metadata={"help": "Folder to write the tokenizer to."})
    tokenizer_type: Literal["wordpiece", "character", "byte_level_bpe"] = field(
        default="wordpiece",
        metadata={
            "help": "wordpiece for encoders, byte_level_bpe for causal models, character for texts without words."
        },
    )
    dataset_name: str | None = field(default=None, metadata={"help": "Hub data set, or folder that `datasets` reads."})
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of --dataset_name."})
    train_file: list[str] | None = field(
        default=None,
        metadata={
            "help": "Files of documents: .txt, .json, .jsonl, .csv, .tsv, .parquet or FASTA (.fa, .fasta, "
            ".fna, .ffn, .faa, .frn), each also .gz."
        },
    )
    text_column_name: str = field(default="text", metadata={"help": "Column of the documents."})
    streaming: bool = field(default=False, metadata={"help": "Read the documents twice, without storing them."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first documents, this many."})
    vocab_size: int = field(
        default=30_000,
        metadata={"help": "Largest number of tokens; wordpiece has more if all characters need more."},
    )
    min_frequency: int = field(
        default=2,
        metadata={
            "help": "Merge two pieces only if they are adjacent at least this often; character keeps only characters "
            "that occur at least this often."
        },
    )
    max_length: int = field(default=512, metadata={"help": "Largest number of tokens of a row that the model takes."})
    keep_case: bool = field(
        default=False,
        metadata={"help": "Keep capitals and accents, as byte_level_bpe always does; character always keeps accents."},
    )
    cache_dir: str | None = field(default=None, metadata={"help": "Folder where prepared data are cached."})

    def __post_init__(self):
        if (self.dataset_name is None) == (self.train_file is None):
            raise ValueError("Give documents to train on with either --train_file or --dataset_name.")
        for name in ("max_train_samples", "vocab_size", "min_frequency", "max_length"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, but is {value}.")


def main(args: Sequence[str] | None = None) -> PreTrainedTokenizerBase:
    """Runs the script with command-line arguments, and returns the tokenizer that it saved."""
    (arguments,) = parse_arguments((TokenizerArguments,), args, __doc__)
    create_folder(arguments.output_dir)
    if arguments.train_file is not None:
        documents = load_files(arguments.train_file, "--train_file", arguments.cache_dir, arguments.streaming)
    else:
        documents = datasets.load_dataset(
            arguments.dataset_name,
            arguments.dataset_config_name,
            split="train",
            cache_dir=arguments.cache_dir,
            streaming=arguments.streaming,
        )
    column = arguments.text_column_name
    if not arguments.streaming:
        require_texts(documents, column, "the documents")
    elif column not in (columns := stream_columns(documents)):
        raise ValueError(f"The documents have no column {column!r}; the columns of the first one are {columns}.")
    if arguments.max_train_samples is not None:
        documents = documents.take(arguments.max_train_samples)
    texts = TextBatches(documents, column)
    sizes = {"vocab_size": arguments.vocab_size, "model_max_length": arguments.max_length}
    if arguments.tokenizer_type == "byte_level_bpe":
        tokenizer = train_byte_level_tokenizer(texts, **sizes, min_frequency=arguments.min_frequency)
    else:
        train = train_character_tokenizer if arguments.tokenizer_type == "character" else train_tokenizer
        lowercase = not arguments.keep_case
        tokenizer = train(texts, **sizes, lowercase=lowercase, min_frequency=arguments.min_frequency)
    options = {}
    if arguments.tokenizer_type == "character":
        options["remedy"] = "give a larger --vocab_size, or --min_frequency 1, which keeps characters that occur once"
    check_known_documents(documents, [column], tokenizer, "the documents", **options)
    tokenizer.save_pretrained(arguments.output_dir)
    print(f"A tokenizer of {len(tokenizer):,} tokens is in {arguments.output_dir}")
    return tokenizer


if __name__ == "__main__":
    main()
