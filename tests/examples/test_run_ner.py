# SPDX-License-Identifier: Apache-2.0
import gzip
import json
from pathlib import Path

import pytest
import run_ner
import torch
from transformers import (
    AutoConfig,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
    pipeline,
)

from nystrom_models import LinformerConfig
from nystrom_models.data import train_byte_level_tokenizer, train_character_tokenizer
from tests.training import processes

OPTIONS = "--learning_rate 1e-2 --per_device_train_batch_size 8 --max_train_steps 120 --eval_strategy no".split()


def arguments(checkpoint, folder, *options):
    paths = ["--model_name_or_path", checkpoint, "--output_dir", f"{folder}/output", "--cache_dir", f"{folder}/cache"]
    return [*paths, *OPTIONS, *options]


def run(checkpoint, folder, *options):
    return run_ner.main(arguments(checkpoint, folder, *options))


@pytest.fixture(scope="module")
def rows(filler):
    """Texts of about 80 words, more than the model takes at once, with entities of one and of two words."""

    def make(size, length=70, seed=0):
        found = []
        for i in range(size):
            words = filler(length, seed + i).split()
            for k in range(5):
                place = 13 * k + 5 * i % 11
                words[place:place] = [("good", "bad old")[(i + k) % 2]]
            words = " ".join(words).split()
            tags, previous = [], ""
            for word in words:
                tags.append({"good": "B-praise", "bad": "B-blame"}.get(word, "O"))
                if previous == "bad" and word == "old":
                    tags[-1] = "I-blame"
                previous = word
            found.append({"tokens": words, "ner_tags": tags})
        return found

    return make


def new_model(folder, tokenizer, length):
    """The flags of a small model with these tokens that nobody has trained."""
    tokenizer.save_pretrained(folder / "tokens")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 16}
    LinformerConfig(max_position_embeddings=length, projected_dim=8, **sizes).save_pretrained(folder / "config")
    return ["--config_name", f"{folder}/config", "--tokenizer_name", f"{folder}/tokens"]


def predictions(folder, split="test"):
    return [json.loads(line) for line in Path(folder, "output", f"{split}_predictions.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def trained(checkpoint, rows, write_rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ner")
    test = rows(7, seed=900)
    hidden = [{"tokens": row["tokens"]} for row in test]
    files = ["--train_file", write_rows(rows(60)), "--validation_file", write_rows(rows(20, seed=500))]
    options = [*files, "--task_name", "ner", "--text_column_name", "tokens", "--label_column_name", "ner_tags"]
    results = run(checkpoint, folder, *options, "--test_file", write_rows(hidden), "--label_all_tokens")
    return folder, results, test


def test_entities_are_found_in_texts_that_are_longer_than_the_model(trained):
    folder, results, test = trained
    assert results["validation"].keys() == {"loss", "precision", "recall", "f1", "accuracy"}
    assert results["validation"]["f1"] > 0.98 and "test" not in results
    # Every word of every text, in the order of the file.
    found = predictions(folder)
    assert [row["tokens"] for row in found] == [row["tokens"] for row in test]
    pairs = [pair for a, b in zip(found, test, strict=True) for pair in zip(a["ner_tags"], b["ner_tags"], strict=True)]
    assert sum(a == b for a, b in pairs) / len(pairs) > 0.99


@pytest.mark.usefixtures("launched_with_fsdp2")
def test_a_model_is_evaluated_where_training_would_divide_its_weights(trained, rows, write_rows, tmp_path):
    options = ["--validation_file", write_rows(rows(20, seed=500)), "--label_all_tokens", "--no_do_train"]
    results = run(f"{trained[0]}/output", tmp_path, *options)
    assert results["validation"] == pytest.approx(trained[1]["validation"], rel=1e-5)


def test_what_was_divided_is_said(trained, checkpoint, rows, write_rows, tmp_path, capsys):
    file = write_rows([*rows(3, length=5), {"tokens": [], "ner_tags": []}, *rows(2)])
    run(f"{trained[0]}/output", tmp_path, "--validation_file", file, "--no_do_train", "--max_seq_length", "40")
    assert (
        "The validation set: 2 of 6 texts are longer than 40 tokens, and were divided between words into 6 rows"
        in (capsys.readouterr().out)
    )


def test_the_card_and_the_pipeline(trained):
    folder = trained[0] / "output"
    card = (folder / "README.md").read_text()
    assert "pipeline_tag: token-classification" in card and "| f1 | " in card and "60 rows of rows.jsonl" in card
    model = AutoModelForTokenClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tag = pipeline("token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="simple")
    found = [(entity["entity_group"], entity["word"]) for entity in tag("the film was good that bad old town")]
    assert found == [("praise", "good"), ("blame", "bad old")]


def test_the_lines_of_the_card_give_the_labels_of_the_script(rows, write_rows, tmp_path, capsys):
    """Words of several tokens, of which only the first is trained."""
    data = rows(24, length=8)
    tokens = "".join(sorted({letter for row in data for word in row["tokens"] for letter in word}))
    tokenizer = train_character_tokenizer([" ".join(tokens)] * 2, 60, model_max_length=512, show_progress=False)
    start = new_model(tmp_path, tokenizer, 512)
    files = ["--train_file", write_rows(data), "--validation_file", write_rows(data[:2])]
    files += ["--test_file", write_rows([{"tokens": row["tokens"]} for row in data[:4]])]
    more = ["--output_dir", f"{tmp_path}/output", "--max_train_steps", "60", "--learning_rate", "3e-2"]
    run_ner.main([*start, *files, *more, "--per_device_train_batch_size", "8"])
    card = (tmp_path / "output" / "README.md").read_text()
    snippet = card.split("```python\n")[1].split("```")[0].replace('"output"', repr(f"{tmp_path}/output"))
    replaced = '["Replace", "these", "words", "by", "your", "own", "."]'
    assert replaced in snippet
    for row in predictions(tmp_path):
        assert len(set(row["ner_tags"])) > 1
        capsys.readouterr()
        exec(snippet.replace(replaced, repr(row["tokens"])), {})
        labelled = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert labelled == [list(pair) for pair in zip(row["tokens"], row["ner_tags"], strict=True)]


@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, RobertaTokenizer])
def test_a_byte_level_tokenizer_reads_words_with_the_space_before_them(kind, rows, write_rows, tmp_path):
    """As in the texts that a pipeline gets."""
    data = rows(16, length=8)
    tokenizer = train_byte_level_tokenizer([" ".join(row["tokens"]) for row in data], 400, show_progress=False)
    if kind is RobertaTokenizer:
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        new = {token: len(tokenizer) + i for i, token in enumerate(("<unk>", "<mask>"))}
        tokenizer = kind(vocab=model["vocab"] | new, merges=[tuple(pair) for pair in model["merges"]])
    start = new_model(tmp_path, tokenizer, 128)
    files = ["--train_file", write_rows(data), "--validation_file", write_rows(data[:2])]
    run_ner.main([*start, *files, "--output_dir", f"{tmp_path}/output", "--per_device_train_batch_size", "8"])
    saved = AutoTokenizer.from_pretrained(tmp_path / "output")
    assert type(saved) is type(AutoTokenizer.from_pretrained(tmp_path / "tokens"))
    for row in data:
        words, text = saved(row["tokens"], is_split_into_words=True), saved(" ".join(row["tokens"]))
        assert words["input_ids"] == text["input_ids"]


@pytest.mark.parametrize("words", [["ab", "cd", "ef"], list("acg")], ids=["words", "characters"])
def test_tokens_for_spaces_that_no_word_has_are_said(words, write_rows, tmp_path, capsys):
    """A tokenizer of characters reads words without spaces, and a text with them; not if words are characters."""
    data = [{"tokens": words, "ner_tags": ["O", "B-x", "O"]}] * 8
    tokenizer = train_character_tokenizer([" ".join(words)] * 2, 30, model_max_length=64, show_progress=False)
    start = new_model(tmp_path, tokenizer, 64)
    files = ["--train_file", write_rows(data), "--validation_file", write_rows(data[:2])]
    more = ["--output_dir", f"{tmp_path}/output", "--max_train_steps", "1", "--per_device_train_batch_size", "8"]
    run_ner.main([*start, *files, *more])
    said = "The train set: This tokenizer has other tokens for a text with spaces than for its words"
    assert (said in capsys.readouterr().out) == (len(words[0]) > 1)


def test_a_finished_model_scores_its_own_predictions_as_right(trained, tmp_path):
    folder = trained[0]
    file = f"{folder}/output/test_predictions.jsonl"
    options = ["--no_do_train", "--test_file", file, "--return_entity_level_metrics"]
    results = run(f"{folder}/output", tmp_path, *options)
    assert results["test"]["f1"] == results["test"]["blame_recall"] == results["test"]["praise_precision"] == 1.0
    assert predictions(tmp_path) == predictions(folder)


def test_a_finished_model_that_is_trained_on_keeps_the_order_of_its_labels(
    trained, rows, write_rows, tmp_path, capsys
):
    """As models of the Hub have it: O first."""
    model = AutoModelForTokenClassification.from_pretrained(trained[0] / "output")
    names = list(model.config.id2label.values())
    turned = sorted(names, reverse=True)
    with torch.no_grad():
        for parameter in model.classifier.parameters():
            parameter.copy_(parameter[[names.index(name) for name in turned]])
    model.config.id2label = dict(enumerate(turned))
    model.save_pretrained(tmp_path / "turned")
    AutoTokenizer.from_pretrained(trained[0] / "output").save_pretrained(tmp_path / "turned")
    options = ["--train_file", write_rows(rows(60)), "--validation_file", write_rows(rows(20, seed=500))]
    options += (
        "--text_column_name tokens --label_column_name ner_tags --max_train_steps 1 --learning_rate 1e-9".split()
    )
    results = run(str(tmp_path / "turned"), tmp_path, *options)
    assert results["validation"]["f1"] == pytest.approx(trained[1]["validation"]["f1"], abs=1e-3)
    assert list(AutoConfig.from_pretrained(tmp_path / "output").id2label.values()) == turned
    assert "names the classes" not in capsys.readouterr().out
    others = {name: name.replace("praise", "joy") for name in names}
    renamed = [{**row, "ner_tags": [others[tag] for tag in row["ner_tags"]]} for row in rows(60)]
    options[1] = options[3] = write_rows(renamed)
    run(str(tmp_path / "turned"), tmp_path / "others", *options)
    assert f"turned names the classes {', '.join(turned)}: if it has a classifier" in capsys.readouterr().out


def test_a_conll_file_of_words_alone_is_predicted(trained, tmp_path):
    folder = f"{trained[0]}/output"
    words = tmp_path / "words.conll"
    words.write_text("the\nfilm\n\ngood\n")
    results = run(folder, tmp_path, "--no_do_train", "--test_file", str(words))
    assert results == {} and [len(row["ner_tags"]) for row in predictions(tmp_path)] == [2, 1]
    with pytest.raises(ValueError, match="line 1: 1 columns, but a word and its label are needed"):
        run(folder, tmp_path, "--no_do_train", "--validation_file", str(words))


def test_conll_files_and_a_label_of_the_validation_set_alone(checkpoint, tmp_path, capsys):
    """As in WNUT 2017, where I-x of a rare type may be missing in a part."""
    train, dev = tmp_path / "eng.train", tmp_path / "emerging.dev.conll.gz"
    train.write_text("-DOCSTART- -X- O\n\ngood NN B-x\nfilm NN O\n\n" + "the DT O\nbad JJ B-y\n\n" * 15)
    dev.write_bytes(gzip.compress(b"good\tB-x\nfilm\tI-z\n\nthe\tO\nbad\tB-y\n"))
    files = ["--train_file", str(train), "--validation_file", str(dev)]
    results = run(checkpoint, tmp_path, *files, "--max_train_steps", "1", "--return_entity_level_metrics")
    assert "Labels of the validation set that are not in the train set, and cannot be learned: I-z." in (
        capsys.readouterr().out
    )
    assert results["validation"]["z_f1"] == 0.0 and results["validation"]["accuracy"] < 1
    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "output")
    assert model.config.label2id == {"B-x": 0, "B-y": 1, "O": 2, "I-z": 3}


def test_a_stopped_run_goes_on_and_a_grid_names_the_best(checkpoint, rows, write_rows, tmp_path, capsys):
    file = write_rows(rows(16, length=20))
    options = ["--train_file", file, "--validation_file", file, "--max_train_steps", "4", "--checkpointing_steps", "2"]
    whole = run(checkpoint, tmp_path, *options)
    (tmp_path / "output" / "all_results.json").unlink()
    resume = ["--resume_from_checkpoint", f"{tmp_path}/output/checkpoint-2"]
    # Which metrics are given may change; the rows may not.
    resumed = run(checkpoint, tmp_path, *options, *resume, "--return_entity_level_metrics")
    assert resumed["validation"].items() > whole["validation"].items()
    with pytest.raises(ValueError, match="--max_seq_length was 64 and is 32"):
        run(checkpoint, tmp_path, *options, *resume, "--max_seq_length", "32")
    outcome = run(checkpoint, tmp_path / "grid", *options[:4], "--max_train_steps", "1", "--grid", "seed=0")
    assert outcome["metric"] == "f1" and outcome["best_run"] == "seed=0"


@pytest.mark.parametrize(
    ("train", "options", "message"),
    [
        ([{"tokens": ["a", "b"], "ner_tags": ["O"]}], "", "Row 1 of the train set has 2 words .* but 1 labels"),
        ([{"tokens": ["a"], "ner_tags": ["O"]}], "", "only one label"),
        ([{"tokens": ["a"], "ner_tags": [1]}], "", "--label_names O B-person"),
        ([{"tokens": ["a"], "pos_tags": ["O"]}], "", "no column 'ner_tags'.*: give --label_column_name"),
        ([{"words": ["a"], "ner_tags": ["O"]}], "", "no column 'tokens'.*: give --text_column_name"),
        (
            [{"tokens": ["a", "b"], "ner_tags": ["O", "B-x"]}],
            "--max_seq_length 65",
            "--max_seq_length 65 is more than the 64 tokens",
        ),
        (
            [{"tokens": ["a", "b"], "ner_tags": ["O", "B-x"]}] * 8,
            "--metric_for_best_model y_f1 --greater_is_better true --return_entity_level_metrics",
            r"y_f1 is not measured; use one of loss, precision, recall, f1, accuracy, x_precision, x_recall, x_f1\.$",
        ),
        ([{"tokens": ["a"], "ner_tags": ["O"]}], "--label_names O O", "--label_names must all differ"),
        # A space of no width has no token.
        ([{"tokens": ["\u200b"] * 2, "ner_tags": ["O", "B-x"]}], "", "No text of the train set has a token"),
        (
            [{"tokens": ["a"], "ner_tags": ["O"]}],
            "--no_do_train --label_names O",
            "was fine-tuned|not among the labels",
        ),
    ],
)
def test_faults_are_named_before_training(train, options, message, checkpoint, write_rows, tmp_path):
    file = write_rows(train)
    with pytest.raises(ValueError, match=message):
        run(checkpoint, tmp_path, "--train_file", file, "--validation_file", file, *options.split())
    assert not (tmp_path / "output" / "model.safetensors").exists()


@pytest.mark.slow
def test_two_processes_give_what_one_gives(trained, checkpoint, rows, write_rows, tmp_path):
    folder, results, test = trained
    files = ["--train_file", write_rows(rows(60)), "--validation_file", write_rows(rows(20, seed=500))]
    hidden = write_rows([{"tokens": row["tokens"]} for row in test])
    half = ["--test_file", hidden, "--label_all_tokens", "--per_device_train_batch_size", "4"]
    more = [*half, "--per_device_eval_batch_size", "3"]
    codes, log = processes.run(
        run_ner.main, arguments(checkpoint, tmp_path, *files, *more), folder=tmp_path, num_processes=2
    )
    assert codes == [0, 0], log[-3000:]
    two = json.loads((tmp_path / "output" / "all_results.json").read_text())["results"]
    assert two["validation"] == pytest.approx(results["validation"], rel=1e-3)
    assert predictions(tmp_path) == predictions(folder)
