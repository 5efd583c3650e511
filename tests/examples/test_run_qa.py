# SPDX-License-Identifier: Apache-2.0
import json
import re
from pathlib import Path

import pytest
import run_qa
from datasets import Dataset
from transformers import AutoModelForQuestionAnswering, AutoTokenizer, BertConfig, BertForQuestionAnswering

from tests.training import processes

OPTIONS = "--learning_rate 4e-3 --per_device_train_batch_size 16 --max_train_steps 70 --eval_strategy no".split()


def arguments(checkpoint, folder, *options):
    paths = ["--model_name_or_path", checkpoint, "--output_dir", f"{folder}/output", "--cache_dir", f"{folder}/cache"]
    return [*paths, *OPTIONS, "--doc_stride", "8", *options]


def run(checkpoint, folder, *options):
    return run_qa.main(arguments(checkpoint, folder, *options))


@pytest.fixture(scope="module")
def squad(filler, tmp_path_factory):
    """SQuAD's own files; the answer is the one word of verdict, or there is none in every third question."""

    def make(size, length=20, seed=0, version_2=False):
        data = []
        for i in range(size):
            words = filler(length, seed + i).split()
            place, verdict = (7 * i) % length, ("good", "bad")[i % 2]
            there = not (version_2 and i % 3 == 0)
            words[place:place] = [verdict] if there else []
            context = " ".join(words)
            answers = [{"text": verdict, "answer_start": context.index(verdict)}] if there else []
            question = {"id": f"q{seed + i}", "question": "was the film seen", "answers": answers}
            if version_2:
                question["is_impossible"] = not there
            data.append({"title": str(i), "paragraphs": [{"context": context, "qas": [question]}]})
        path = tmp_path_factory.mktemp("squad") / "squad.json"
        path.write_text(json.dumps({"version": "1.1", "data": data}), encoding="utf-8")
        return str(path)

    return make


def written(folder, name):
    return json.loads(Path(folder, "output", name).read_text())


def right(file):
    data = json.loads(Path(file).read_text())["data"]
    questions = [document["paragraphs"][0]["qas"][0] for document in data]
    return {question["id"]: [answer["text"] for answer in question["answers"]] for question in questions}


def answers_by_card(folder, file, monkeypatch, capsys):
    """What the lines of a card print for all questions of a file."""
    monkeypatch.chdir(folder.parent)
    lines = (folder / "README.md").read_text().split("```python\n")[1].split("```")[0]
    example, found = '"What is the question?", "The answer stands in this text."', {}
    assert example in lines
    for document in json.loads(Path(file).read_text())["data"]:
        [paragraph] = document["paragraphs"]
        [question] = paragraph["qas"]
        capsys.readouterr()
        exec(lines.replace(example, f"{question['question']!r}, {paragraph['context']!r}"), {})
        found[question["id"]] = capsys.readouterr().out.removesuffix("\n")
    return found


@pytest.fixture(scope="module")
def trained(checkpoint, squad, tmp_path_factory):
    folder = tmp_path_factory.mktemp("qa")
    dev = squad(40, seed=500, version_2=True)
    files = ["--train_file", squad(200, version_2=True), "--validation_file", dev]
    return folder, run(checkpoint, folder, *files, "--version_2_with_negative"), dev


def test_answers_and_their_absence(trained):
    folder, results, dev = trained
    scores = results["validation"]
    assert scores["has_answer_exact_match"] > 0.95 and scores["no_answer_accuracy"] > 0.95
    assert scores["best_f1"] >= scores["f1"] > 0.95
    found, answers = written(folder, "validation_predictions.json"), right(dev)
    assert found.keys() == answers.keys()
    exact = [text == (answers[name] or [""])[0] for name, text in found.items()]
    assert sum(exact) / len(exact) == pytest.approx(scores["exact_match"])
    odds = written(folder, "validation_null_odds.json")
    assert [odds[name] <= 0 for name in found] == [text != "" for text in found.values()]
    # The places of the answers are those of the text.
    contexts = {
        p["qas"][0]["id"]: p["context"] for d in json.loads(Path(dev).read_text())["data"] for p in d["paragraphs"]
    }
    for name, entries in written(folder, "validation_nbest_predictions.json").items():
        assert sum(entry["probability"] for entry in entries) == pytest.approx(1)
        for entry in entries:
            assert contexts[name][entry["start"] : entry["end"]].strip() == entry["text"]


def test_impossible_questions_of_a_data_set_have_no_answers(trained, tmp_path):
    """A data set may keep plausible answers, here the first word, beside `is_impossible`."""
    folder, results, dev = trained
    rows = []
    for document in json.loads(Path(dev).read_text())["data"]:
        [paragraph] = document["paragraphs"]
        [question] = paragraph["qas"]
        found = question["answers"] or [{"text": paragraph["context"].split()[0], "answer_start": 0}]
        answers = {field: [answer[field] for answer in found] for field in ("text", "answer_start")}
        rows.append(question | {"context": paragraph["context"], "answers": answers})
    (tmp_path / "data").mkdir()
    Dataset.from_list(rows).to_parquet(tmp_path / "data" / "validation.parquet")
    options = ["--no_do_train", "--dataset_name", f"{tmp_path}/data", "--version_2_with_negative"]
    scores = run(f"{folder}/output", tmp_path, *options)["validation"]
    assert scores == pytest.approx(results["validation"], rel=1e-4)


def test_a_threshold_moves_answers_to_none(trained, tmp_path):
    folder, results, dev = trained
    options = ["--no_do_train", "--validation_file", dev, "--test_file", dev, "--version_2_with_negative"]
    never = run(
        f"{folder}/output", tmp_path, *options, "--null_score_diff_threshold", "-1000000", "--n_best_size", "2"
    )
    assert set(written(tmp_path, "validation_predictions.json").values()) == {""}
    assert never["test"] == never["validation"]
    assert never["validation"]["no_answer_accuracy"] == 1 and never["validation"]["has_answer_f1"] == 0
    assert never["validation"]["loss"] == pytest.approx(results["validation"]["loss"], rel=1e-4)
    assert never["validation"]["best_f1"] == pytest.approx(results["validation"]["best_f1"])
    # No answer is always among the best ones, besides two answers if it is not one of the best two.
    for entries in written(tmp_path, "test_nbest_predictions.json").values():
        texts = [entry["text"] for entry in entries]
        assert texts.count("") == 1 and len(texts) == (2 if "" in texts[:2] else 3)


def test_contexts_that_are_longer_than_the_model_are_read_in_windows(trained, squad, tmp_path, capsys):
    folder, _, _ = trained
    dev = squad(12, length=150, seed=800)
    results = run(f"{folder}/output", tmp_path, "--no_do_train", "--validation_file", dev)
    assert "12 of 12 questions have a context that does not fit into 64 tokens; it is read in 36 windows." in (
        capsys.readouterr().out
    )
    assert results["validation"]["exact_match"] > 0.9 and results["validation"].keys() == {"loss", "exact_match", "f1"}
    # Half as long, it is the same text in more windows.
    halves = run(
        f"{folder}/output", tmp_path / "half", "--no_do_train", "--validation_file", dev, "--max_seq_length", "32"
    )
    assert halves["validation"]["exact_match"] > 0.9


def test_the_card_says_how_to_ask(trained, squad, tmp_path, monkeypatch, capsys):
    """Its lines give what the script predicts: also of contexts longer than the model, and without an answer."""
    card = (trained[0] / "output" / "README.md").read_text()
    assert "pipeline_tag: question-answering" in card and "| f1 | " in card and "200 rows of squad.json" in card
    # Their last windows are full ones, as the script reads them.
    files = [trained[2], squad(9, length=105, seed=300), squad(9, length=106, seed=400, version_2=True)]
    options = ["--no_do_train", "--version_2_with_negative", "--test_file"]
    for number, file in enumerate(files):
        run(f"{trained[0]}/output", tmp_path / str(number), *options, file)
        found = answers_by_card(trained[0] / "output", file, monkeypatch, capsys)
        assert found == written(tmp_path / str(number), "test_predictions.json")
        assert len({*found.values()} & {"", "good", "bad"}) >= 2


def test_the_card_of_a_model_that_always_answers(checkpoint, squad, tmp_path, monkeypatch, capsys):
    """After one step, the best first and last tokens are often in the question, or in the wrong order."""
    file = squad(24, length=105, seed=50)
    options = ["--max_train_steps", "1", "--learning_rate", "1e-9", "--max_answer_length", "7"]
    run(checkpoint, tmp_path, "--train_file", file, "--validation_file", file, *options)
    found = answers_by_card(tmp_path / "output", file, monkeypatch, capsys)
    assert found == written(tmp_path, "validation_predictions.json")
    assert len(set(found.values())) > 9


def test_a_hidden_test_set_is_only_answered(trained, write_rows, tmp_path):
    rows = [{"question": "was the film seen", "context": f"the old {word} town"} for word in ("good", "bad")]
    results = run(f"{trained[0]}/output", tmp_path, "--no_do_train", "--test_file", write_rows(rows))
    assert results == {} and written(tmp_path, "test_predictions.json") == {"0": "good", "1": "bad"}


def test_a_model_of_transformers_own_and_a_run_that_was_stopped(checkpoint, squad, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    BertForQuestionAnswering(
        BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, **sizes)
    ).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    file = squad(32, length=60)
    options = ["--train_file", file, "--validation_file", file, "--max_train_steps", "4", "--checkpointing_steps", "2"]
    whole = run(f"{tmp_path}/bert", tmp_path, *options)
    resume = ["--resume_from_checkpoint", f"{tmp_path}/output/checkpoint-2", "--max_answer_length", "5"]
    resumed = run(f"{tmp_path}/bert", tmp_path, *options, *resume)
    assert resumed["validation"]["loss"] == whole["validation"]["loss"]
    assert type(AutoModelForQuestionAnswering.from_pretrained(tmp_path / "output")) is BertForQuestionAnswering
    with pytest.raises(ValueError, match="--max_seq_length was 64 and is 40"):
        run(f"{tmp_path}/bert", tmp_path, *options, *resume[:2], "--max_seq_length", "40")


ROW = {"question": "who", "context": "the film", "answers": {"text": ["film"], "answer_start": [4]}}
WRONG = ROW | {"answers": {"text": ["film"], "answer_start": [3]}}
NONE = ROW | {"answers": {"text": [], "answer_start": []}}
LONG = ROW | {"question": "who was " * 30}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([ROW, WRONG], "", "Row 2 of the train set: 'answers.answer_start' is 3, .* it is at 4"),
        ([ROW, NONE], "", "Row 2 of the train set has no answer: give --version_2_with_negative"),
        ([ROW, LONG], "", "Row 2 of the train set: the question has 120 tokens.*--max_seq_length 64"),
        ([{"question": "who", "context": "a"}], "", "The train set has no column 'answers'"),
        ([ROW], "--max_seq_length 65", "--max_seq_length 65 is more than the 64 tokens"),
        (
            [ROW] * 8,
            "--metric_for_best_model best_f1",
            r"best_f1 is not measured; use one of loss, exact_match, f1\.$",
        ),
        ([ROW], "--n_best_size 0", "--n_best_size must be at least 1"),
        ([ROW], "--no_do_train", "was fine-tuned: .* has no qa_outputs"),
    ],
)
def test_faults_are_named_before_training(rows, options, message, checkpoint, write_rows, tmp_path):
    file = write_rows(rows)
    with pytest.raises(ValueError, match=message):
        run(checkpoint, tmp_path, "--train_file", file, "--validation_file", file, *options.split())
    assert not (tmp_path / "output" / "model.safetensors").exists()


@pytest.mark.parametrize(
    "answers", [{"text": ["film"]}, {"text": ["film"], "answer_start": []}, ["film"], "film"], ids=str
)
def test_answers_of_a_test_set_in_another_form(answers, checkpoint, write_rows, tmp_path):
    file, test = write_rows([ROW]), write_rows([ROW | {"answers": answers}])
    with pytest.raises(ValueError, match="'answers' of the test set must hold an object with the lists 'text' and"):
        run(checkpoint, tmp_path, "--train_file", file, "--validation_file", file, "--test_file", test)


@pytest.mark.slow
def test_two_processes_give_what_one_gives(trained, checkpoint, squad, tmp_path):
    folder, results, dev = trained
    files = ["--train_file", squad(200, version_2=True), "--validation_file", dev, "--version_2_with_negative"]
    half = ["--per_device_train_batch_size", "8", "--per_device_eval_batch_size", "3"]
    codes, log = processes.run(
        run_qa.main, arguments(checkpoint, tmp_path, *files, *half), folder=tmp_path, num_processes=2
    )
    assert codes == [0, 0], log[-3000:]
    two = written(tmp_path, "all_results.json")["results"]
    assert two["validation"] == pytest.approx(results["validation"], rel=1e-3)
    assert written(tmp_path, "validation_predictions.json") == written(folder, "validation_predictions.json")


def test_a_short_model_reads_long_contexts_without_a_stride(trained, squad, tmp_path, capsys):
    """SQuAD's usual 128 shared tokens would leave a short model no room: by default it is a third of a row."""
    folder, _, _ = trained
    long = squad(12, length=150, seed=900)
    options = ["--no_do_train", "--validation_file", long, "--max_seq_length", "48", "--output_dir", str(tmp_path)]
    windows = []
    for stride in ([], ["--doc_stride", "16"]):
        results = run_qa.main(["--model_name_or_path", f"{folder}/output", *options, *stride])
        windows.append(re.search(r"read in (\d+) windows", capsys.readouterr().out)[1])
        assert results["validation"]["f1"] > 0.5
    assert windows[0] == windows[1]
