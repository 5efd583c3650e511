# SPDX-License-Identifier: Apache-2.0
"""The command `convert` and its results."""

import errno
import gzip
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    pipeline,
)

from nystrom_models.checkpoint import load_config, load_tokenizer
from nystrom_models.command_line import convert as command
from nystrom_models.command_line.convert import TABLES, read_texts
from nystrom_models.command_line.main import main
from nystrom_models.conversion.report import REPORT_NAME, ConversionReport
from nystrom_models.data import train_tokenizer
from nystrom_models.data.files import FORMATS
from tests.fasta import needs_fasta
from tests.models.options import TINY, enlarge

SENTENCES = (
    "Return a list of the names of all columns. Raise an error if the file does not exist. Open the file. Read every "
    "line. Close the file at the end."
)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A classifier of three classes, with its tokenizer, and a file of text."""
    folder = tmp_path_factory.mktemp("source")
    tokenizer = train_tokenizer([SENTENCES] * 4, vocab_size=120, model_max_length=32, show_progress=False)
    labels = {"id2label": {0: "calm", 1: "storm", 2: "fog"}, "label2id": {"calm": 0, "storm": 1, "fog": 2}}
    fields = TINY | labels | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)  # whatever test comes first
    enlarge(BertForSequenceClassification(BertConfig(**fields, max_position_embeddings=32))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "text.txt").write_text("\n\n".join([SENTENCES] * 12), encoding="utf-8")
    return folder


def test_a_classifier_becomes_longer_and_says_the_same(source, tmp_path, capsys):
    options = ["--max_length", "64", "--num_landmarks", "16", "--sample_file", f"{source}/text.txt"]
    assert main(["convert", str(source), f"{tmp_path}/out", *options]) == 0
    printed = capsys.readouterr().out
    assert "NystromformerForSequenceClassification from BertForSequenceClassification" in printed
    assert "32 rows repeated to 64" in printed and "Largest difference from the source, on texts" in printed
    report = json.loads((tmp_path / "out" / REPORT_NAME).read_text(encoding="utf-8"))
    short, long = report["differences"]
    assert (short["tokens"], long["tokens"]) == (16, 32)
    assert short["largest"] < 1e-6 * short["scale"] < long["largest"]

    both = [pipeline("text-classification", str(folder), top_k=None) for folder in (source, tmp_path / "out")]
    texts = ["Open the file.", "Read every line."]
    theirs, ours = (one(texts) for one in both)
    for one, other in zip(theirs, ours, strict=True):
        assert [found["label"] for found in one] == [found["label"] for found in other]
        assert [found["score"] for found in other] == pytest.approx([found["score"] for found in one], abs=1e-6)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    inputs = AutoTokenizer.from_pretrained(tmp_path / "out")(SENTENCES * 9, truncation=True, return_tensors="pt")
    assert inputs["input_ids"].shape == (1, 64)
    assert model(**inputs).logits.isfinite().all()


@torch.no_grad()
def test_layers_stay_exact(source, tmp_path):
    """Landmarks in the layers of the list alone, as in a model with exact attention whose list is changed."""
    for name, landmarks in (("some", "4,none"), ("exact", "none")):
        assert main(["convert", str(source), str(tmp_path / name), "--num_landmarks", landmarks]) == 0
    inputs = AutoTokenizer.from_pretrained(source)(SENTENCES, truncation=True, return_tensors="pt")
    some, exact = (AutoModelForSequenceClassification.from_pretrained(tmp_path / name) for name in ("some", "exact"))
    theirs = BertForSequenceClassification.from_pretrained(source)(**inputs).logits
    torch.testing.assert_close(exact(**inputs).logits, theirs)
    assert some.config.num_landmarks == [4, None]
    found = some(**inputs).logits
    assert (found - theirs).norm() > 1e-3 * theirs.norm()
    exact.config.num_landmarks = [4, None]
    assert torch.equal(exact(**inputs).logits, found)
    exact.config.num_landmarks = 4
    assert (exact(**inputs).logits - found).norm() > 1e-3 * theirs.norm()


@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("linformer", ["--projected_dim", "8", "--share_projection", "key_value"], "principal directions"),
        ("linear_transformer", ["--matching_steps", "5"], "cross entropy before"),
    ],
)
def test_other_families_start_from_the_text(family, options, expected, source, tmp_path, capsys):
    arguments = ["convert", source, tmp_path / "out", "--family", family, "--head", "ForMaskedLM", *options]
    arguments += ["--sample_file", source / "text.txt", "--positions", "interpolate", "--max_length", 40]
    assert main(list(map(str, arguments))) == 0
    printed = capsys.readouterr().out
    assert expected in printed and "32 rows interpolated to 40" in printed
    report = json.loads((tmp_path / "out" / REPORT_NAME).read_text(encoding="utf-8"))
    assert report["projections" if family == "linformer" else "feature_maps"]
    model, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert model.config.model_type == family and not info["missing_keys"]
    assert len(report["origins"]) == len(list(model.parameters()))
    assert model(torch.randint(5, 99, (1, 40))).logits.isfinite().all()


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("linear_transformer", [], "give sample (--sample_file)"),
        ("linear_transformer", ["--feature_map", "elu", "--sample_file", "{file}"], 'feature_map="hedgehog"'),
        ("nystromformer", ["--sample_file", "{file}"], "--family linear_transformer"),
    ],
)
def test_steps_that_train_nothing_are_refused(family, options, message, source, tmp_path, capsys):
    options = [option.format(file=source / "text.txt") for option in options]
    arguments = [str(source), str(tmp_path / "out"), "--family", family, "--matching_steps", "5", *options]
    assert main(["convert", *arguments]) != 0
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_sample_is_any_file_of_documents(source, tmp_path):
    documents = (source / "text.txt").read_text(encoding="utf-8").split("\n\n")
    text = "\n\n".join(documents).encode()
    (tmp_path / "sample.txt.gz").write_bytes(gzip.compress(text))
    (tmp_path / "sample.md").write_bytes(text)
    (tmp_path / "sample.jsonl").write_text("\n".join(json.dumps({"text": text, "label": 0}) for text in documents))
    (tmp_path / "sample.json").write_text(json.dumps([{"review": text, "text": 0} for text in documents]))
    weights = {}
    for file in (source / "text.txt", *tmp_path.glob("sample.*")):
        arguments = [source, tmp_path / f"from {file.name}", "--family", "linear_transformer", "--matching_steps", 2]
        arguments += ["--text_column_name", "review"] if file.suffix == ".json" else []
        assert main(["convert", *map(str, arguments), "--sample_file", str(file)]) == 0
        weights[file.name] = load_file(tmp_path / f"from {file.name}" / "model.safetensors")
    expected = weights.pop("text.txt")
    assert len(weights) == 4
    for name, found in weights.items():
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[weight], expected[weight]) for weight in expected), name


def test_paragraphs_are_separated_by_empty_lines(tmp_path):
    (tmp_path / "text.txt").write_text("One\nline.\n\n\n\n  \n\nTwo.\n", encoding="utf-8")
    assert read_texts(str(tmp_path / "text.txt")) == ["One\nline.", "Two.\n"]
    (tmp_path / "ROWS.JSONL").write_text('{"text": "One"}\n{"text": "Two"}\n')
    assert list(read_texts(str(tmp_path / "ROWS.JSONL"))) == ["One", "Two"]


@pytest.mark.parametrize(
    ("family", "flags", "fields"),
    [
        ("nystromformer", "--conv_kernel_size 5 --num_landmarks 8", {"conv_kernel_size": 5, "num_landmarks": 8}),
        (
            "nystromformer",
            "--conv_kernel_size none --num_landmarks NONE",
            {"conv_kernel_size": None, "num_landmarks": None},
        ),
        (
            "linformer",
            "--share_projection none --projected_dim [[8,4,2,1],[3,3,3,3]]",
            {"share_projection": "none", "projected_dim": [[8, 4, 2, 1], [3, 3, 3, 3]]},
        ),
        ("linear_transformer", "--feature_map none", {"feature_map": None}),
        (
            "linear_transformer",
            "--feature_map relu --conv_kernel_size 3",
            {"feature_map": "relu", "conv_kernel_size": 3},
        ),
    ],
    ids=["kernel", "no kernel", "by head", "softmax", "feature map"],
)
def test_flags_are_fields_of_the_configuration(family, flags, fields, source, tmp_path):
    assert main(["convert", str(source), str(tmp_path / "out"), "--family", family, *flags.split()]) == 0
    config = AutoConfig.from_pretrained(tmp_path / "out")
    assert {name: getattr(config, name) for name in fields} == fields and config.model_type == family


def test_flags_reach_the_conversion(source, tmp_path, monkeypatch, capsys):
    calls, revisions = [], []

    def convert(*arguments, **options):
        calls.append((arguments, options))
        return None, "the report"

    def read(name, **files):
        revisions.append(files)
        return load_config(name)

    monkeypatch.setattr(command, "convert_checkpoint", convert)
    monkeypatch.setattr(command, "load_config", read)
    flags = "--family linear_transformer --head ForMaskedLM --positions interpolate --matching_steps 7 --revision v2"
    file = ["--sample_file", str(source / "text.txt")]
    logger = logging.getLogger("nystrom_models.conversion")
    monkeypatch.setattr(logger, "level", logging.INFO)
    assert main(["convert", str(source), str(tmp_path / "out"), *flags.split(), *file]) == 0
    [(arguments, options)] = calls
    assert arguments[:2] == (str(source), str(tmp_path / "out")) and options.pop("matching").steps == 7
    assert len(options.pop("sample")) == 12
    assert options == {
        "head": "ForMaskedLM",
        "positions": "interpolate",
        "revision": "v2",
        "return_report": True,
        "save_report": True,
    }
    assert revisions == [{"revision": "v2"}] and capsys.readouterr().out == "the report\n"
    assert logger.level == logging.INFO  # for warnings of later conversions in the same program


@needs_fasta
def test_a_sample_of_sequences(tmp_path):
    (tmp_path / "genome.fna.gz").write_bytes(gzip.compress(b">chr1 first\nACGT\nAC\n>chr2\nTT\n"))
    assert list(read_texts(str(tmp_path / "genome.fna.gz"))) == ["ACGTAC", "TT"]


def test_tables_are_the_formats_of_data_sets():
    assert {*TABLES, ".txt"} == set(FORMATS)


def test_text_is_read_without_the_extras(source, tmp_path):
    code = (
        "import sys\n"
        "sys.modules['datasets'] = sys.modules['accelerate'] = None\n"
        "from nystrom_models.command_line.main import main\n"
        "for file in sys.argv[3:]:\n"
        "    print('status', main(['convert', *sys.argv[1:3], '--num_landmarks', '8', '--sample_file', file]))\n"
    )
    (tmp_path / "out.jsonl").write_text('{"text": "Open the file."}')
    command = [sys.executable, "-c", code, source, tmp_path / "out", tmp_path / "out.jsonl", source / "text.txt"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "needs datasets: pip install '.[train]'" in done.stderr, done.stderr
    assert re.findall(r"status (\d)", done.stdout) == ["1", "0"] and "on texts" in done.stdout, done.stderr


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize(
    ("where", "method", "error"),
    [
        (PreTrainedModel, "save_pretrained", SafetensorError("I/O error: No space left on device")),  # no OSError
        (ConversionReport, "save", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        (ConversionReport, "save", KeyboardInterrupt()),
    ],
)
def test_a_full_disk_or_ctrl_c_leaves_no_part_of_a_model(
    source, tmp_path, capsys, monkeypatch, where, method, error, existed
):
    out, write = tmp_path / "new" / "out", getattr(where, method)
    if existed:
        out.mkdir(parents=True)

    def fail(self, folder, *args, **kwargs):
        write(self, folder, *args, **kwargs)
        Path(folder, "folder").mkdir()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(where, method, fail)
        status = main(["convert", str(source), str(out)])
    shown = capsys.readouterr().err
    if isinstance(error, KeyboardInterrupt):
        assert status == 130
    else:
        assert status == 1 and f"Writing the model to {out} failed" in shown and "No space left" in shown, shown
    assert list(out.iterdir()) == [] if existed else not out.parent.exists()
    # The same command can be given again.
    assert main(["convert", str(source), str(out)]) == 0
    AutoModelForSequenceClassification.from_pretrained(out)


def test_what_a_killed_conversion_left_is_replaced(source, tmp_path):
    partial = tmp_path / ".partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    assert main(["convert", str(source), str(tmp_path)]) == 0
    assert not partial.exists()
    AutoModelForSequenceClassification.from_pretrained(tmp_path)


def test_a_failure_keeps_what_was_put_there_during_the_conversion(source, tmp_path, monkeypatch):
    out = tmp_path / "out"

    def read(*arguments, **options):
        """Reads the tokenizer, after the folder was found to be new and before the model is converted."""
        out.mkdir()
        (out / "notes.txt").write_text("mine")
        return load_tokenizer(*arguments, **options)

    def fail(self, folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(sys.modules["nystrom_models.conversion.convert"], "load_tokenizer", read)
    monkeypatch.setattr(ConversionReport, "save", fail)
    assert main(["convert", str(source), str(out)]) == 1
    assert {path.name: path.read_text() for path in out.iterdir()} == {"notes.txt": "mine"}


def test_what_cannot_be_is_one_line(source, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text")[:-3])
    flipped = bytearray(gzip.compress(b"text " * 99))
    flipped[10:14] = b"\xff" * 4
    (tmp_path / "flipped.txt.gz").write_bytes(flipped)
    (tmp_path / "ids.jsonl").write_text('{"ids": 1}')
    wrong = [
        ([source, tmp_path / "full"], "not an empty folder"),
        ([source, source], "not an empty folder"),
        ([source, tmp_path / "out", "--sample_file", tmp_path / "latin.txt"], "not UTF-8"),
        ([source, tmp_path / "out", "--sample_file", tmp_path / "cut.txt.gz"], "cut.txt.gz is damaged"),
        ([source, tmp_path / "out", "--sample_file", tmp_path / "flipped.txt.gz"], "flipped.txt.gz is damaged"),
        (
            [source, tmp_path / "out", "--sample_file", tmp_path / "ids.jsonl"],
            "has no column 'text'; its columns are ['ids']: give --text_column_name.",
        ),
        ([source, tmp_path / "out", "--text_column_name", "ids"], "give both, or neither"),
        (
            [source, tmp_path / "out", "--sample_file", source / "text.txt", "--text_column_name", "ids"],
            "is text, without columns: leave out --text_column_name",
        ),
        ([source, tmp_path / "out", "--sample_file", tmp_path / "none.txt"], "none.txt is not a file"),
        ([source, tmp_path / "out", "--family", "linformer", "--num_landmarks", 8], "no field num_landmarks"),
        ([source, tmp_path / "out", "--head", "ForCausalLM"], "head='ForMaskedLM'"),
        ([tmp_path / "nothing", tmp_path / "out"], "nothing"),
    ]
    for arguments, expected in wrong:
        assert main(["convert", *map(str, arguments)]) == 1
        # Without the progress bar of a table and its blank line.
        lines = capsys.readouterr().err.splitlines()
        error = [line for line in lines if line and "Generating train split" not in line]
        assert len(error) == 1 and expected in error[0], error
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit):
        main(["convert", str(source), str(tmp_path / "out"), "--num_landmarks", "many"])
