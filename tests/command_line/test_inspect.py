# SPDX-License-Identifier: Apache-2.0
"""`nystrom-models inspect` from a checkpoint and a text file to a report."""

import json
import shutil
import struct

import pytest
from transformers import AutoModelForMaskedLM, BartConfig, BartModel, CLIPConfig, CLIPModel
from transformers.utils import logging

from nystrom_models.analysis import inspect_attention
from nystrom_models.analysis.masked_accuracy import masked_accuracy
from nystrom_models.analysis.report import attended
from nystrom_models.analysis.texts import token_rows
from nystrom_models.command_line.inspect import summary
from nystrom_models.command_line.main import main
from nystrom_models.data import train_tokenizer
from tests.analysis.models import make_model

TEXT = "Return a list of the names of all columns . Raise an error if the file does not exist . " * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two checkpoints, and a text of two documents."""
    folder = tmp_path_factory.mktemp("inspect")
    tokenizer = train_tokenizer([TEXT] * 4, vocab_size=99, model_max_length=64, show_progress=False)
    for family, fields in (("Bert", {}), ("Linformer", {"projected_dim": 8})):
        fields |= {"vocab_size": len(tokenizer), "max_position_embeddings": 64}
        make_model(family, "ForMaskedLM", **fields).save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
    (folder / "text.txt").write_text(f"{TEXT}\n\n{TEXT[40:]}\n", encoding="utf-8")
    return folder


def inspect(folder, family, *arguments):
    files = ["--text_file", str(folder / "text.txt"), "--output_dir", str(folder / "out" / family)]
    return ["inspect", str(folder / family), *files, *arguments]


def test_a_report_of_a_bert_is_written(folder, capsys):
    flags = "--num_landmarks 4 8 --pinv_iterations 4 6 --lengths 24 48 --max_rows 32 --max_samples 2 --token 3".split()
    assert main(inspect(folder, "Bert", *flags)) == 0
    printed = capsys.readouterr().out
    out = folder / "out" / "Bert"
    found = json.loads((out / "inspection.json").read_text(encoding="utf-8"))
    assert found["schema_version"] == 1 and found["model"]["model_type"] == "bert"
    assert found["command"].startswith("nystrom-models inspect") and "--max_rows 32" in found["command"]
    assert {"torch", "transformers", "nystrom_models"} <= found["versions"].keys()
    assert len(found["errors"]) == 2 * 2 * 2 * 2 and found["settings"]["texts"] == 2
    assert found["main_setting"] == {"length": 48, "method": "nystrom", "num_landmarks": 8, "pinv_iterations": 6}
    assert {spectrum["length"] for spectrum in found["spectra"]} == {24}
    assert len(found["needed"]["projected_dim"]["by_head"]) == 2
    assert [found["needed"][name]["length"] for name in ("num_landmarks", "projected_dim")] == [48, 24]
    assert found["token"]["index"] == 3 and found["token"]["length"] == 48 and len(found["token"]["layers"]) == 2
    for row in found["token"]["layers"]:
        weights = [token["weight"] for token in row["exact"]]
        assert weights == sorted(weights, reverse=True) and 0 < sum(weights) <= 1.001
    pictures = sorted(out.glob("*.png"))
    assert {"error_by_layer", "error_by_head", "maps_layer_00"} <= {path.stem for path in pictures}
    for path in pictures:
        width, height = struct.unpack(">II", path.read_bytes()[16:24])
        assert width > 300 and height > 300
    needed = f"num_landmarks={found['needed']['num_landmarks']['by_layer']}"
    assert "output error" in printed and needed in printed
    page = (out / "inspection.html").read_text(encoding="utf-8")
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page


def test_masked_tokens_are_counted_with_fewer_and_fewer_landmarks(folder, capsys):
    flags = "--num_landmarks 2 16 64 --lengths 40 --max_samples 3 --mlm_accuracy --layers 1".split()
    flags += ["--mlm_accuracy_by_layer", "2"]
    assert main(inspect(folder, "Bert", *flags)) == 0
    found = json.loads((folder / "out" / "Bert" / "inspection.json").read_text(encoding="utf-8"))
    assert [row["num_landmarks"] for row in found["mlm"]] == [None, 2, 16, 64]
    exact, *_, all_tokens = (dict(row, num_landmarks=0) for row in found["mlm"])
    assert all_tokens == exact and len({row["mlm_loss"] for row in found["mlm"]}) == 3
    assert [row["exact_layers"] for row in found["mlm_by_layer"]] == [[0], [1]]
    assert len({row["mlm_loss"] for row in [*found["mlm"], *found["mlm_by_layer"]]}) == 5
    printed = capsys.readouterr().out
    assert "Masked tokens with 2 landmarks" in printed and "Masked tokens with num_landmarks=[2, None]: " in printed
    assert (folder / "out" / "Bert" / "mlm_accuracy.png").is_file()
    page = (folder / "out" / "Bert" / "inspection.html").read_text(encoding="utf-8")
    assert "Masked tokens with exact layers" in page and "[None, 2]" in page
    assert [layer["layer"] for layer in found["layers"]] == [1]
    assert main(inspect(folder, "Linformer", "--mlm_accuracy")) == 1
    assert "--mlm_accuracy measures attention with landmarks" in capsys.readouterr().err


def test_what_the_flags_say_is_measured(folder, tmp_path):
    """The figures are those of the functions in Python with the same arguments, none of them a default."""
    tokenizer = train_tokenizer([TEXT] * 4, vocab_size=40, model_max_length=64, show_progress=False)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    texts = [TEXT[start:] for start in (7, 30, 90)]
    rows = [{"text": TEXT, "body": text} for text in texts]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = "--text_column_name body --num_landmarks 2 4 --pinv_iterations 3 --lengths 30 --max_samples 2 --max_rows 8"
    flags += " --error 0.7 --layers 1 --token -3 --seed 13 --mlm_accuracy"
    files = ["--text_file", tmp_path / "rows.jsonl", "--tokenizer_name", tmp_path / "tokenizer"]
    arguments = ["inspect", folder / "Bert", *files, "--output_dir", tmp_path / "out", *flags.split()]
    assert main(list(map(str, arguments))) == 0
    found = json.loads((tmp_path / "out" / "inspection.json").read_text(encoding="utf-8"))

    model = AutoModelForMaskedLM.from_pretrained(folder / "Bert").eval()
    # Singular values are those of shorter rows, because the others have more than 8 tokens.
    short, calls = (token_rows(texts, tokenizer, length, 2) for length in (8, 30))
    options = {"num_landmarks": [2, 4], "pinv_iterations": [3], "max_rows": 8, "layers": [1], "token": -3, "seed": 13}
    wanted = inspect_attention(model.base_model, [*short, *calls], **options)
    # With this seed, special tokens would be masked in both rows if they counted.
    numbers = {"mask_token_id": tokenizer.mask_token_id, "special_ids": tokenizer.all_special_ids}
    wanted.mlm = masked_accuracy(model, calls, [None, 2, 4], **numbers, pinv_iterations=3, seed=13)
    expected = wanted.to_dict(0.7)
    assert {name: found[name] for name in expected} == json.loads(json.dumps(expected))
    ids = calls[0]["input_ids"][0]
    assert found["token"] == attended(wanted, -3, ids, tokenizer.convert_ids_to_tokens)
    assert [len(row["exact"]) for row in found["token"]["layers"]] == [10]
    assert found["settings"] == {"texts": 2, "max_rows": 8, "seed": 13, "device": found["settings"]["device"]}


def test_rows_are_as_long_as_the_model_takes_but_no_longer_than_512(folder, tmp_path, capsys):
    for most, length in ((64, 64), (600, 512)):
        tokenizer = train_tokenizer([TEXT] * 4, vocab_size=99, model_max_length=600, show_progress=False)
        fields = {"vocab_size": len(tokenizer), "max_position_embeddings": most, "num_hidden_layers": 1}
        make_model("Bert", **fields).save_pretrained(tmp_path / str(most))
        tokenizer.save_pretrained(tmp_path / str(most))
        (tmp_path / "text.txt").write_text(TEXT * 3, encoding="utf-8")
        files = ["--text_file", tmp_path / "text.txt", "--output_dir", tmp_path / "out", "--num_landmarks", 4]
        assert main(list(map(str, ["inspect", tmp_path / str(most), *files]))) == 0
        assert capsys.readouterr().out.startswith(f"length {length}, method nystrom")


def test_of_a_model_with_a_decoder_the_encoder_is_measured(folder, tmp_path):
    small = {"d_model": 16, "vocab_size": 99, "max_position_embeddings": 64}
    for side in ("encoder", "decoder"):
        small |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 16}
    BartModel(BartConfig(**small)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "Bert" / name, tmp_path)
    flags = ["--text_file", str(folder / "text.txt"), "--output_dir", str(tmp_path / "out"), "--lengths", "20"]
    before = logging.get_verbosity()
    assert main(["inspect", str(tmp_path), *flags]) == 0
    found = json.loads((tmp_path / "out" / "inspection.json").read_text(encoding="utf-8"))
    assert [layer["name"] for layer in found["layers"]] == ["layers.0.self_attn", "layers.1.self_attn"]
    assert not found["skipped_layers"] and logging.get_verbosity() == before


def test_the_summary_has_the_errors_of_the_main_setting():
    rows = [
        {
            "length": 48,
            "method": "nystrom",
            "num_landmarks": number,
            "layer": 3,
            "output_error": error,
            "map_error": 0.5,
        }
        for number, error in ((4, 0.25), (8, 0.125))
    ]
    needed = {"num_landmarks": {"length": 1048, "by_layer": [8]}, "projected_dim": {"length": None, "by_layer": []}}
    main_setting = {"length": 48, "method": "nystrom", "num_landmarks": 8}
    found = {"main_setting": main_setting, "errors": rows, "mlm": None, "mlm_by_layer": None}
    assert summary(found | {"needed": needed | {"error": 0.2}})[2:] == [
        "    3        0.1250     0.5000",
        "An error of 0.2 needs",
        "  num_landmarks=[8], at 1,048 tokens",
    ]


def test_a_checkpoint_without_the_weights_is_refused(folder, tmp_path, capsys):
    make_model("Bert", vocab_size=99).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").symlink_to(folder / "Bert" / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").symlink_to(folder / "Bert" / "tokenizer_config.json")
    flags = ["--text_file", str(folder / "text.txt"), "--output_dir", str(tmp_path / "out"), "--mlm_accuracy"]
    assert main(["inspect", str(tmp_path), *flags]) == 1
    assert "weights of BertForMaskedLM, such as cls.predictions" in capsys.readouterr().err


def test_a_model_of_several_parts_is_refused(folder, tmp_path, capsys):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    text, images = small | {"vocab_size": 99}, small | {"image_size": 8, "patch_size": 4}
    CLIPModel(CLIPConfig(text_config=text, vision_config=images)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / "Bert" / name, tmp_path)
    flags = ["--text_file", str(folder / "text.txt"), "--output_dir", str(tmp_path / "out")]
    assert main(["inspect", str(tmp_path), *flags]) == 1
    assert "CLIPModel has several parts (text_config, vision_config)" in capsys.readouterr().err


def test_a_checkpoint_without_a_tokenizer_is_refused(folder, tmp_path, capsys):
    """For a BERT, Transformers makes up a tokenizer that knows only special tokens."""
    make_model("Bert", vocab_size=99).save_pretrained(tmp_path)
    flags = ["--text_file", str(folder / "text.txt"), "--output_dir", str(tmp_path / "out")]
    assert main(["inspect", str(tmp_path), *flags]) == 1
    assert "has no tokenizer: save one there" in capsys.readouterr().err


def test_the_folder_of_an_unfinished_run_is_no_model(folder, tmp_path, capsys):
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    flags = ["--text_file", str(folder / "text.txt"), "--output_dir", str(tmp_path / "out")]
    assert main(["inspect", str(tmp_path / "run"), *flags]) == 1
    error = capsys.readouterr().err
    assert "run' has no model and no tokenizer" in error and "sentencepiece" not in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lengths", "100"], "--lengths has 100, but the model takes at most 64 tokens"),
        (["--lengths", "2"], "--lengths 2: A row of 2 tokens has room only"),
        (["--max_rows", "2", "--lengths", "32"], "--max_rows 2: A row of 2 tokens has room only"),
        (["--num_landmarks", "0"], "--num_landmarks must be"),
        (["--error", "2"], "--error must lie between 0 and 1"),
        (["--max_rows", "1"], "--max_rows must be at least 2"),
        (["--layers", "7"], "layers names [7]"),
        (["--layers", "1", "-1"], "--layers are counted from 0, but -1 is given"),
        (["--mlm_accuracy_by_layer", "4"], "--mlm_accuracy_by_layer needs --mlm_accuracy"),
        (["--mlm_accuracy", "--mlm_accuracy_by_layer", "0"], "--mlm_accuracy_by_layer is a number of landmarks"),
        (["--token", "64"], "--token 64 is not in a row of 64 tokens"),
        (["--device", "nowhere"], "--device nowhere"),
        (["--text_column_name", "body"], "--text_column_name body is not a column"),
        (["--text_file", "missing.txt"], "--text_file missing.txt is not a file"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line_that_names_the_flag(folder, flags, message, capsys):
    assert main(inspect(folder, "Bert", *flags)) == 1
    error = capsys.readouterr().err
    assert message in error and error.splitlines()[-1].startswith("nystrom-models inspect: ")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"text": "a"}\n{"text": null}\n', "The column 'text' of --text_file has no value in row 2"),
        ('{"text": 1}\n', "The column 'text' of --text_file must hold text, but holds int64"),
        (
            '{"text": "自然语言处理"}\n' * 99,
            "The tokenizer replaces 100% of the characters of --text_file by [UNK]",
        ),
    ],
)
def test_documents_without_a_text_or_a_known_token_are_named(rows, message, folder, tmp_path, capsys):
    for name in ("text", "body"):
        (tmp_path / "rows.jsonl").write_text(rows.replace("text", name), encoding="utf-8")
        flags = ["--text_file", str(tmp_path / "rows.jsonl"), "--text_column_name", name]
        assert main(inspect(folder, "Bert", *flags)) == 1
        assert message.replace("'text'", f"'{name}'") in capsys.readouterr().err


def test_the_page_is_readable_in_a_browser_and_its_tables_sort(folder, browser, tmp_path):
    assert main(inspect(folder, "Linformer", "--lengths", "32", "--max_samples", "1")) == 0
    page = folder / "out" / "Linformer" / "inspection.html"
    for width, scheme in ((1280, "light"), (390, "dark")):
        browser.open(page, width=width, color_scheme=scheme)
        browser.check()
    assert browser.run("return document.querySelectorAll('figure svg').length") >= 5
    ink, paper = browser.run("let s = getComputedStyle(document.body); return [s.color, s.backgroundColor]")
    axis = browser.run("return getComputedStyle(document.querySelector('svg text')).fill")
    assert ink == axis and ink != paper  # the text of the pictures has the page's color, light on dark
    cells = (
        "return [...document.querySelector('table').tBodies[0].rows].map(row => Number(row.cells[1].dataset.value))"
    )
    for order in ("ascending", "descending"):
        browser.run("document.querySelectorAll('table th button')[1].click()")
        values = browser.run(cells)
        assert values == sorted(values, reverse=order == "descending") and len(set(values)) > 1
        assert browser.run("return document.querySelectorAll('table th')[1].ariaSort") == order
    assert not browser.errors()
