# SPDX-License-Identifier: Apache-2.0
import ast
import json
from pathlib import Path

import pytest
import run_imdb
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline


def run(checkpoint, folder, *options):
    paths = ["--model_name_or_path", checkpoint, "--output_dir", f"{folder}/output", "--cache_dir", f"{folder}/cache"]
    fast = "--learning_rate 4e-3 --per_device_train_batch_size 16 --max_train_steps 60".split()
    return run_imdb.main([*paths, *fast, *options])


def test_the_default_data_set():
    for given, split in ((None, "test"), ("train", "train")):
        args = run_imdb.ImdbArguments(output_dir="x", model_name_or_path="m", validation_split=given)
        assert (args.dataset_name, args.validation_split) == ("stanfordnlp/imdb", split)
    assert run_imdb.ImdbArguments(output_dir="x", model_name_or_path="m", train_file=["a.csv"]).dataset_name is None


@pytest.fixture(scope="module")
def reviews(filler, write_rows):
    """A file of reviews, negative then positive, whose verdict is at the end of 40 words."""

    def make(size):
        verdicts = ["bad"] * (size // 2) + ["good"] * (size // 2)
        return write_rows(
            [{"review": f"{filler(40, i)} {word}", "verdict": f"{word}!"} for i, word in enumerate(verdicts)]
        )

    return make


@pytest.mark.parametrize("strategy", ["head", "tail", "head_tail"])
def test_what_is_cut_is_not_read(strategy, checkpoint, reviews, filler, tmp_path):
    files = ["--train_file", reviews(200), "--validation_file", reviews(100), "--test_file", reviews(10)]
    columns = ["--text_column_names", "review", "--label_column_name", "verdict"]
    samples = ["--max_train_samples", "96", "--max_eval_samples", "48"]
    options = ["--truncation_strategy", strategy, "--max_length", "20", *columns, *samples]
    # A tokenizer that cuts the other end, and is to be saved as one that cuts as this run does.
    other = AutoTokenizer.from_pretrained(checkpoint, truncation_side="right" if strategy == "tail" else "left")
    other.save_pretrained(tmp_path / "tokenizer")
    results = run(checkpoint, tmp_path, *files, *options, "--tokenizer_name", str(tmp_path / "tokenizer"))
    assert results["validation"].keys() == {"loss", "accuracy", "macro_f1"}
    cut = AutoTokenizer.from_pretrained(tmp_path / "output")("good " + filler(30, 0), truncation=True, max_length=9)
    assert (other.convert_tokens_to_ids("good") in cut["input_ids"]) == (strategy != "tail")
    card = (tmp_path / "output" / "README.md").read_text()
    assert "| `max_train_steps` | 60 |" in card and "num_train_epochs" not in card
    assert ("it was trained on the first and the last ones" in card) == (strategy == "head_tail")
    if strategy == "head":
        assert results["validation"]["accuracy"] < 0.75
        return
    assert results["validation"]["accuracy"] == 1.0
    lines = (tmp_path / "output" / "test_predictions.tsv").read_text().splitlines()
    assert lines[1:] == [f"{i}\t{'bad!' if i < 5 else 'good!'}" for i in range(10)]
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "output")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "output")
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer)
    assert classify(f"{filler(17, 999)} good")[0]["label"] == "good!"
    if strategy == "tail":
        assert "it was trained on the last ones" in card
        for word in ("good", "bad"):
            assert classify(f"{filler(40, 999)} {word}", truncation=True, max_length=20)[0]["label"] == f"{word}!"


def test_all_of_a_document_is_read_in_windows(checkpoint, filler, write_rows, tmp_path, capsys):
    """What reads the head alone cannot know the verdict, which stands anywhere."""

    def rows(size, length):
        for i in range(size):
            words = filler(length, i).split()
            words[7 * i % length] = ("bad", "good")[i // 2 % 2]
            yield {"text": " ".join(words), "label": words[7 * i % length]}

    dev = list(rows(40, 40))
    train, long = write_rows([*rows(120, 12), *dev[:8]]), write_rows(dev)
    files = ["--train_file", train, "--validation_file", long, "--test_file", long, "--max_length", "18"]
    windows = ["--truncation_strategy", "windows", "--doc_stride", "4", "--eval_strategy", "no"]
    results = run(checkpoint, tmp_path, *files, *windows)
    said = capsys.readouterr().out
    assert "The train set: 8 of 128 documents are longer than 18 tokens; all of them make 144 windows, 1.1 per" in said
    # Each prediction is that of the mean logits of three windows of 16 words, of which neighbours share 4.
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "output").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "output")
    lines = (tmp_path / "output" / "test_predictions.tsv").read_text().splitlines()[1:]
    for i, (line, row) in enumerate(zip(lines, dev, strict=True)):
        words = row["text"].split()
        parts = [" ".join(words[start : start + 16]) for start in (0, 12, 24)]
        with torch.no_grad():
            logits = model(**tokenizer(parts, return_tensors="pt")).logits.mean(0)
        assert line == f"{i}\t{model.config.id2label[int(logits.argmax())]}"
    right = [line.split("\t")[1] == row["label"] for line, row in zip(lines, dev, strict=True)]
    assert sum(right) / 40 == pytest.approx(results["validation"]["accuracy"])
    assert results["test"] == results["validation"]
    # The card's snippet reads the windows, too, and prints the mean logits of the last document.
    card = (tmp_path / "output" / "README.md").read_text()
    snippet = card.split("```python\nimport nystrom_models\n")[1].split("```")[0]
    for old, new in (("output", str(tmp_path / "output")), ("Replace this text by your own.", dev[-1]["text"])):
        assert f'"{old}"' in snippet
        snippet = snippet.replace(f'"{old}"', repr(new))
    capsys.readouterr()
    exec(snippet, {})
    shown = ast.literal_eval(capsys.readouterr().out.splitlines()[-1])
    assert list(shown.values()) == pytest.approx(logits.tolist(), abs=1e-4)
    # The same model, when it reads the head alone.
    options = ["--no_do_train", "--validation_file", long, "--max_length", "18"]
    head = run(f"{tmp_path}/output", tmp_path / "head", *options)
    assert head["validation"]["accuracy"] < results["validation"]["accuracy"]
    assert "40 of 40 documents are longer than 18 tokens: only their head is read." in capsys.readouterr().out


def test_rows_are_as_long_as_the_model_takes_by_default(checkpoint, write_rows, filler, tmp_path):
    file = write_rows([{"text": f"{filler(99, i)} {'bad' if i % 2 else 'good'}", "label": i % 2} for i in range(32)])
    run(checkpoint, tmp_path, "--train_file", file, "--validation_file", file, "--max_train_steps", "1")
    written = json.loads(Path(tmp_path, "output", "all_results.json").read_text())
    assert written["arguments"]["max_length"] == 64


def test_any_number_can_be_predicted(checkpoint, write_rows, filler, tmp_path):
    rows = [{"text": f"{'good ' * (i % 4)}{filler(3, i)}", "stars": 100 + i % 4} for i in range(160)]
    file = write_rows(rows)
    options = ["--label_column_name", "stars", "--do_regression", "--max_train_steps", "2"]
    results = run(checkpoint, tmp_path, "--train_file", file, "--validation_file", file, "--test_file", file, *options)
    assert results["validation"].keys() == {"loss", "mse", "pearson", "spearmanr"}
    assert results["validation"]["mse"] == pytest.approx(results["validation"]["loss"], rel=1e-4)
    lines = (tmp_path / "output" / "test_predictions.tsv").read_text().splitlines()[1:]
    predictions = [float(line.split("\t")[1]) for line in lines]
    errors = [(prediction - row["stars"]) ** 2 for prediction, row in zip(predictions, rows, strict=True)]
    assert sum(errors) / len(errors) == pytest.approx(results["validation"]["mse"], rel=1e-3)


@pytest.mark.parametrize(
    ("train", "validation", "message"),
    [
        (["a", "b"], ["a", "c"], r"the validation set contains \['c'\], not among the labels \['a', 'b'\]"),
        (["a", "a"], ["a", "a"], "only one label"),
        ([0.5, 1.5], [0.5, 1.5], "--do_regression"),
        ([0, None], [0, 1], "'label' of the train set has no value in row 2"),
    ],
)
def test_labels_that_cannot_be_learned(train, validation, message, checkpoint, write_rows, tmp_path):
    files = [write_rows([{"text": "a film", "label": label} for label in labels]) for labels in (train, validation)]
    with pytest.raises(ValueError, match=message):
        run(checkpoint, tmp_path, "--train_file", files[0], "--validation_file", files[1])


def test_a_new_model_from_a_configuration(checkpoint, write_rows, filler, tmp_path):
    file = write_rows([{"text": f"{filler(9, i)} {'bad' if i % 2 else 'good'}", "label": i % 2} for i in range(32)])
    new = ["--config_name", f"{checkpoint}/config.json", "--config_overrides", "hidden_size=48,vocab_size=7"]
    data = ["--train_file", file, "--validation_file", file, "--max_train_steps", "1"]
    fast = [*data, "--output_dir", str(tmp_path / "output"), "--cache_dir", str(tmp_path / "cache")]
    run_imdb.main([*new, "--tokenizer_name", checkpoint, *fast])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "output")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "output")
    # The vocabulary is the tokenizer's, whatever the configuration says.
    assert model.config.hidden_size == 48 and model.config.vocab_size == len(tokenizer) > 7
    assert "Trained on 32 rows" in (tmp_path / "output" / "README.md").read_text()
    for options, message in (
        ([], "--model_name_or_path for a pretrained model, or --config_name"),
        ([*new, "--model_name_or_path", checkpoint], "not both"),
        (new, "A new model needs --tokenizer_name"),
        ([*new, "--tokenizer_name", checkpoint, "--no_do_train"], "--no_do_train evaluates a finished model"),
    ):
        with pytest.raises(ValueError, match=message):
            run_imdb.main([*options, *fast])


def test_an_adapter_must_be_merged_first(checkpoint, write_rows, tmp_path):
    file = write_rows([{"text": "a film", "label": "good"}])
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for tokenizer in ([], ["--tokenizer_name", checkpoint]):
        with pytest.raises(ValueError, match=r"holds an adapter of PEFT .*: merge it first"):
            run(str(tmp_path / "adapter"), tmp_path, "--train_file", file, "--validation_file", file, *tokenizer)


def test_a_model_longer_than_its_tokenizer_says(checkpoint, write_rows, filler, tmp_path):
    """A tokenizer made for rows of 64 tokens does not keep a model of 96 from reading 90, nor cut texts afterwards."""
    rows = [{"text": f"{filler(80, i)} {'bad' if i % 2 else 'good'}", "label": i % 2} for i in range(96)]
    files = ["--train_file", write_rows(rows), "--validation_file", write_rows(rows[:32])]
    new = ["--config_name", f"{checkpoint}/config.json", "--tokenizer_name", checkpoint]
    with pytest.raises(ValueError, match="give --config_overrides max_position_embeddings=90"):
        run_imdb.main([*new, *files, "--max_length", "90", "--output_dir", str(tmp_path / "refused")])
    fields = ["--config_overrides", "max_position_embeddings=96,classifier_pooling=last", "--max_length", "90"]
    training = ["--learning_rate", "1e-2", "--num_train_epochs", "8", "--per_device_train_batch_size", "16"]
    output = tmp_path / "output"
    results = run_imdb.main([*new, *fields, *files, *training, "--output_dir", str(output)])
    assert results["validation"]["accuracy"] == 1.0
    classify = pipeline("text-classification", model=str(output), truncation=True)
    assert classify.tokenizer.model_max_length == 96
    labels = [found["label"] for found in classify([row["text"] for row in rows[:8]])]
    assert labels == [classify.model.config.id2label[row["label"]] for row in rows[:8]]
    # A pretrained one, beside a tokenizer that knows less: the length is the model's.
    begin = ["--model_name_or_path", str(output), "--tokenizer_name", checkpoint, "--no_do_train"]
    again = run_imdb.main([*begin, "--validation_file", files[3], "--output_dir", str(tmp_path / "again")])
    assert again["validation"]["accuracy"] == 1.0


def test_fields_of_a_pretrained_model_are_changed(checkpoint, write_rows, filler, tmp_path):
    """Fields without weights are changed, and saved; fields that would need other weights are refused."""
    file = write_rows([{"text": f"{filler(9, i)} {'bad' if i % 2 else 'good'}", "label": i % 2} for i in range(32)])
    data = ["--train_file", file, "--validation_file", file, "--max_train_steps", "1"]
    command = ["--model_name_or_path", checkpoint, *data, "--cache_dir", str(tmp_path / "cache")]
    output = ["--output_dir", str(tmp_path / "output")]
    fields = "classifier_pooling=mean,hidden_dropout_prob=0.25"
    run_imdb.main([*command, *output, "--config_overrides", fields])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "output").eval()
    assert (model.config.classifier_pooling, model.config.hidden_dropout_prob) == ("mean", 0.25)
    ids = torch.randint(5, 20, (1, 8))
    states = model.base_model(ids).last_hidden_state.mean(1)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, model.classifier(states), atol=1e-6)
    for fields, message in (
        ("num_hidden_layers=9", r"--config_overrides num_hidden_layers=9: .* has no weights for nystrom"),
        ("clasifier_pooling=mean", "--config_overrides 'clasifier_pooling=mean'"),
        ("classifier_pooling=max", "classifier_pooling"),
        ("hidden_size=64", r"--config_overrides hidden_size=64: weights of .* have other shapes"),
    ):
        with pytest.raises(ValueError, match=message):
            run_imdb.main([*command, "--output_dir", str(tmp_path / "other"), "--config_overrides", fields])
