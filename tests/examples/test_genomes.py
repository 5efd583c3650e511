# SPDX-License-Identifier: Apache-2.0
"""Genomes: FASTA files, single bases as tokens, masked tokens alone."""

import gzip
import json
import random

import pytest
import run_glue
import run_pretraining
import train_tokenizer
from accelerate.state import AcceleratorState
from transformers import pipeline

from tests.fasta import needs_fasta

pytestmark = needs_fasta

GENES = ["GATTACAC", "CCGTATGA", "TTGCAGTC", "AACCTGGG"]


def sequence(number, length):
    """The genes in turn, from a random one on."""
    first = random.Random(number).randrange(4)
    return "".join(GENES[(first + i) % 4] for i in range(length // 8))


@pytest.fixture(scope="module")
def genome(tmp_path_factory):
    """Two chromosomes, in lines of 60 bases."""
    path = tmp_path_factory.mktemp("genome") / "genome.fna.gz"
    with gzip.open(path, "wt") as file:
        for number in range(2):
            bases = sequence(number, 12_000)
            lines = [bases[i : i + 60] for i in range(0, len(bases), 60)]
            file.write("\n".join([f">chr{number} of nobody", *lines, ""]))
    return path


def options(genome, **more):
    paths = {"train_file": genome, "text_column_name": "sequence", "cache_dir": genome.parent / "cache", **more}
    return [str(word) for name, value in paths.items() for word in (f"--{name}", value)]


def test_words_of_a_genome_are_refused(genome, tmp_path):
    with pytest.raises(ValueError, match=r"replaces 100% of the characters .* --tokenizer_type character"):
        train_tokenizer.main(options(genome, output_dir=tmp_path / "tokenizer"))
    assert not list((tmp_path / "tokenizer").iterdir())


def test_a_genome_is_pretrained_on_and_fills_masks(genome, tmp_path, monkeypatch):
    bases = tmp_path / "bases"
    train_tokenizer.main(options(genome, output_dir=bases, tokenizer_type="character", max_length=128))
    config = {
        "model_type": "nystromformer",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "num_landmarks": 16,
        "conv_kernel_size": 33,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    more = {"config_name": tmp_path / "config.json", "tokenizer_name": bases, "output_dir": tmp_path / "model"}
    more |= {
        "max_train_steps": 150,
        "learning_rate": 5e-3,
        "validation_file": genome,
        "per_device_train_batch_size": 8,
    }
    AcceleratorState._reset_state(reset_partial_state=True)
    results = run_pretraining.main([*options(genome, **more), "--no_sentence_order"])
    assert results["validation"]["mlm_accuracy"] > 0.9
    card = (tmp_path / "model" / "README.md").read_text()
    assert "pretrained on masked tokens.\n" in card and "with masked tokens; evaluated" in card
    monkeypatch.chdir(tmp_path)
    fill = pipeline("fill-mask", model="model")
    gene = GENES[1]
    assert fill(f"{GENES[0]}{gene[:3]}[MASK]{gene[4:]}{GENES[2]}")[0]["token_str"] == gene[3].lower()
    (line,) = [line for line in card.splitlines() if line.startswith("print(model(")][:1]
    assert "[UNK]" not in line and "[MASK]" in line

    # A repeat somewhere in half of the sequences.
    rows = [{"text": sequence(i, 48) + "A" * (i % 2 * 9) + sequence(i, 40), "label": i % 2} for i in range(64)]
    file = tmp_path / "repeats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = ["--model_name_or_path", "model", "--train_file", str(file), "--validation_file", str(file)]
    paths += ["--output_dir", str(tmp_path / "classifier"), "--max_train_steps", "20", "--learning_rate", "5e-3"]
    AcceleratorState._reset_state(reset_partial_state=True)
    scores = run_glue.main([*paths, "--per_device_train_batch_size", "16", "--eval_strategy", "no"])
    assert scores["validation"]["accuracy"] > 0.9
