# SPDX-License-Identifier: Apache-2.0
import json
import math
import random
import shutil
from pathlib import Path

import plot_runs
import pytest
import run_pretraining
import torch
import train_tokenizer
import yaml
from accelerate.state import AcceleratorState
from datasets import Dataset
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoTokenizer,
    BertConfig,
    BertForPreTraining,
)
from transformers import pipeline as hf_pipeline

from nystrom_models import LinformerForPreTraining, NystromformerForPreTraining
from nystrom_models.data import PretrainingCollator, eval_dataloader, pretraining_dataset
from nystrom_models.training import create_accelerator
from nystrom_models.training.pretraining import held_out_scores
from nystrom_models.training.splits import load_documents

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.1,
}
OPTIONS = (
    "--per_device_train_batch_size 8 --per_device_eval_batch_size 16 --learning_rate 3e-3 --logging_steps 5".split()
)
OPTIONS += "--max_length 48 --validation_split_percentage 20".split()


def document(number):
    """Sentences whose last words follow from the first ones, in an order that can be learned."""
    choices = random.Random(number).choices
    animals, places = choices("cat dog cow hen fox".split(), k=4), choices("barn yard field".split(), k=2)
    return "\n".join(
        [
            f"First the {animals[0]} and the {animals[0]} were seen in the {places[0]}.",
            f"Then the {animals[1]} and the {animals[1]} came after them.",
            f"Last of all the {animals[2]} and the {animals[2]} left the {places[1]}.",
        ]
    )


DOCUMENTS = list(dict.fromkeys(document(i) for i in range(200)))[:150]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text file of documents separated by blank lines, a tokenizer, and a configuration of each family."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text("\n\n".join(DOCUMENTS) + "\n", encoding="utf-8")
    options = ["--train_file", f"{folder}/train.txt", "--vocab_size", "200", "--max_length", "64"]
    train_tokenizer.main([*options, "--output_dir", f"{folder}/tokenizer", "--cache_dir", f"{folder}/cache"])
    configs = {
        "nystromformer": {"num_landmarks": 8, "conv_kernel_size": 5},
        "linformer": {"projected_dim": 8},
    }
    for family, fields in configs.items():
        config = {"model_type": family, **SIZES, **fields}
        (folder / f"{family}.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def run(corpus, output, *options, family="nystromformer", steps=10):
    paths = ["--config_name", f"{corpus}/{family}.json", "--tokenizer_name", f"{corpus}/tokenizer"]
    paths += ["--train_file", f"{corpus}/train.txt", "--cache_dir", f"{corpus}/cache", "--output_dir", str(output)]
    # Accelerate keeps the precision for the whole process, so it is reset for each run.
    AcceleratorState._reset_state(reset_partial_state=True)
    results = run_pretraining.main([*paths, *OPTIONS, "--max_train_steps", str(steps), *options])
    return results, [json.loads(line) for line in Path(output, "history.jsonl").read_text().splitlines()]


def test_weights_in_half_precision_are_trained_in_float32(corpus, tmp_path):
    config = AutoConfig.from_pretrained(f"{corpus}/nystromformer.json", vocab_size=200)
    AutoModelForPreTraining.from_config(config).bfloat16().save_pretrained(tmp_path / "half")
    options = ["--model_name_or_path", f"{tmp_path}/half", "--tokenizer_name", f"{corpus}/tokenizer"]
    options += ["--train_file", f"{corpus}/train.txt", "--cache_dir", f"{corpus}/cache"]
    run_pretraining.main([*options, *OPTIONS, "--max_train_steps", "2", "--output_dir", f"{tmp_path}/run"])
    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert all(weight.dtype == torch.float32 for weight in weights.values())


def test_padding_beyond_the_model_is_refused(corpus, tmp_path):
    message = "--pad_to_multiple_of 36 pads rows of --max_length 48 to more than the model's 64 tokens: use .* 36"
    with pytest.raises(ValueError, match=message):
        run(corpus, tmp_path, "--pad_to_multiple_of", "36")


def losses(history):
    return [row["mlm_loss"] for row in history if "mlm_loss" in row]


@pytest.fixture(scope="module", params=["nystromformer", "linformer"])
def trained(request, corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp(request.param) / "run"
    options = ["--max_train_samples", "100", "--eval_strategy", "steps", "--eval_steps", "100", "--with_tracking"]
    options += ["--project_name", "figures", "--mlm_probability", "0.25"]
    return request.param, output, *run(corpus, output, *options, family=request.param, steps=250)


def test_it_learns_and_leaves_everything(trained):
    family, output, results, history = trained
    scores = results["validation"]
    measured = {row["step"]: row["eval_mlm_loss"] for row in history if "eval_mlm_loss" in row}
    assert list(measured) == [100, 200, 250] and results["train"]["best_step"] == min(measured, key=measured.get)
    assert scores["mlm_accuracy"] > 0.5 and scores["sop_accuracy"] > 0.8
    assert scores["perplexity"] == pytest.approx(torch.tensor(scores["mlm_loss"]).exp().item())
    written = json.loads((output / "all_results.json").read_text())
    assert written["results"] == results and written["arguments"]["max_length"] == 48
    assert (output / "training_curve.png").read_bytes().startswith(b"\x89PNG")
    card = (output / "README.md").read_text()
    assert "100 documents of train.txt" in card and "30 documents that were held out" in card
    assert str(output.parent) not in card and "perplexity" in card
    assert type(AutoModelForPreTraining.from_pretrained(output)).__name__.lower() == f"{family}forpretraining"


def test_curves_and_a_table_of_two_runs(trained, tmp_path, capsys):
    _, output, results, history = trained
    assert history[-1]["num_input_tokens_seen"] == results["train"]["num_input_tokens_seen"] > 250 * 8 * 20
    runs = ["--runs", str(output), str(output), "--labels", "one", "again", "--output", str(tmp_path / "curves.png")]
    plot_runs.main([*runs, "--x", "num_input_tokens_seen", "--metrics", "mlm_accuracy"])
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out.strip().splitlines()[-4:]
    assert table[0] == "| run | million tokens | hours | mlm_accuracy |"
    cost = f"0.1 | {results['train']['seconds'] / 3600:.2f}"
    assert table[2].startswith(f"| one | {cost} |") and f"{results['validation']['mlm_accuracy']:.4g} |" in table[3]
    running = tmp_path / "running"
    running.mkdir()
    shutil.copy(output / "history.jsonl", running)
    (tmp_path / "curves.png").unlink()
    runs[2] = str(running)
    plot_runs.main(runs)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "not in the table: again." in printed and "| one |" in printed and "| again |" not in printed
    plot_runs.main(["--runs", str(running), "--output", str(tmp_path / "curves.png")])
    assert "|" not in capsys.readouterr().out


def test_scores_over_a_setting_and_a_table(trained, tmp_path, capsys):
    """Two runs with the same label, which differ in the seed."""
    _, output, results, _ = trained
    other = tmp_path / "other"
    other.mkdir()
    content = json.loads((output / "all_results.json").read_text())
    content["arguments"]["seed"] = 5
    (other / "all_results.json").write_text(json.dumps(content))
    shutil.copy(output / "config.json", other)
    runs = ["--runs", str(output), str(other), "--labels", "mine", "mine", "--metrics", "mlm_accuracy"]
    plot_runs.main([*runs, "--x", "seed", "--output", str(tmp_path / "scores.png")])
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out.strip().splitlines()[-4:]
    assert table[0] == "| run | `seed` | million tokens | hours | mlm_accuracy |"
    assert table[2].startswith(f"| mine, {output} | 0 |") and table[3].startswith(f"| mine, {other} | 5 |")
    assert table[3].endswith(f"{results['validation']['mlm_accuracy']:.4g} |")
    with pytest.raises(ValueError, match="do not differ in 'steps', but in seed"):
        plot_runs.main([*runs, "--x", "steps"])


def documents_of(corpus, **options):
    """The documents of a run with these flags."""
    fields = {"output_dir": "x", "config_name": "x", "tokenizer_name": "x", "train_file": [f"{corpus}/train.txt"]}
    return load_documents(run_pretraining.PretrainingArguments(**fields | options))


def test_scores_are_those_of_the_saved_model_on_the_held_out_documents(trained, corpus):
    _, output, results, _ = trained
    documents = documents_of(corpus, validation_split_percentage=20)
    assert len(documents["validation"]) == 30 and not {*documents["validation"]["text"]} & {
        *documents["train"]["text"]
    }
    tokenizer = AutoTokenizer.from_pretrained(output)
    examples = pretraining_dataset(documents["validation"], tokenizer, 48)
    # Masked at 15 %, independent of the training, so that figures of different runs are comparable.
    loader = eval_dataloader(examples, PretrainingCollator(tokenizer, 0.15), 7)
    scores = held_out_scores(create_accelerator(cpu=True), AutoModelForPreTraining.from_pretrained(output), loader)
    assert scores == pytest.approx(results["validation"], rel=1e-5)


def test_samples_are_drawn_after_documents_were_held_out(corpus):
    whole = documents_of(corpus, validation_split_percentage=20)
    few = documents_of(corpus, validation_split_percentage=20, max_train_samples=7, max_eval_samples=5)
    assert [len(few[split]) for split in ("train", "validation")] == [7, 5]
    for split, documents in few.items():
        assert set(documents["text"]) < set(whole[split]["text"])
    other = documents_of(corpus, validation_split_percentage=20, seed=1)
    assert set(other["validation"]["text"]) != set(whole["validation"]["text"])


def test_a_stream_is_evaluated_on_the_same_sample(corpus):
    files = {"validation_file": [f"{corpus}/train.txt"], "max_eval_samples": 10}
    rows, stream = (documents_of(corpus, **files, streaming=streaming)["validation"] for streaming in (False, True))
    assert list(stream["text"]) == list(rows["text"]) != [text.strip() for text in DOCUMENTS[:10]]


def test_the_model_fills_masks(trained):
    fill = hf_pipeline("fill-mask", model=str(trained[1]))
    assert fill("First the fox and the fox [MASK] seen in the yard.")[0]["token_str"] == "were"


def test_evaluations_stand_in_the_history_and_change_nothing(trained, corpus, tmp_path):
    family, _, _, history = trained
    held_out = [row for row in history if "eval_mlm_loss" in row]
    assert [row["step"] for row in held_out] == [100, 200, 250]
    options = ["--max_train_samples", "100", "--eval_strategy", "no", "--mlm_probability", "0.25"]
    _, alone = run(corpus, tmp_path, *options, family=family, steps=250)
    assert losses(alone) == losses(history)


def test_tensorboard_gets_the_figures(trained):
    folder = trained[1] / "logs" / "figures"
    events = EventAccumulator(str(folder)).Reload()
    logged = {tag: [scalar.step for scalar in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert logged["mlm_loss"] == [*range(5, 251, 5)] and logged["eval_sop_accuracy"] == [100, 200, 250]
    assert logged["grad_norm"] == logged["mlm_loss"]
    # Numbers stay numbers, so that a sweep can be sorted; paths of this machine are not logged.
    [path] = folder.glob("*/hparams.yml")
    hyperparameters = yaml.safe_load(path.read_text())
    assert hyperparameters["learning_rate"] == 3e-3 and hyperparameters["max_length"] == 48
    assert not {"output_dir", "train_file", "cache_dir"} & hyperparameters.keys()


def test_a_stream_is_trained_on_and_resumed(corpus, tmp_path):
    """Also past the end of an epoch, which is unknown for a stream: 20 documents are few steps."""
    options = ["--streaming", "--max_eval_samples", "10", "--max_train_samples", "40", "--checkpointing_steps", "9"]
    _, whole = run(corpus, tmp_path, *options, steps=20)
    _, resumed = run(corpus, tmp_path, *options, "--resume_from_checkpoint", f"{tmp_path}/checkpoint-9", steps=20)
    assert losses(resumed) == losses(whole) and len(whole) == 5
    assert len(set(losses(whole))) == 4
    for changed in (["--short_seq_prob", "0.9"], ["--max_train_samples", "39"]):
        with pytest.raises(ValueError, match=f"the rows of the stream: {changed[0][2:]} was .* and is {changed[1]}"):
            run(corpus, tmp_path, *options, *changed, "--resume_from_checkpoint", "latest", steps=20)


def test_a_stream_is_read_beside_training(corpus, tmp_path):
    options = ["--streaming", "--max_eval_samples", "10", "--max_train_samples", "40"]
    _, here = run(corpus, tmp_path / "here", *options, steps=10)
    _, beside = run(corpus, tmp_path / "beside", *options, "--dataloader_num_workers", "3", steps=10)
    assert losses(beside) == losses(here)


def test_the_held_out_documents_of_a_stream_are_not_trained_on(corpus):
    documents = documents_of(corpus, streaming=True, max_eval_samples=10)
    held_out, rest = documents["validation"]["text"], [row["text"] for row in documents["train"]]
    assert isinstance(documents["validation"], Dataset) and len(held_out) == 10
    assert [text.strip() for text in [*held_out, *rest]] == DOCUMENTS


def test_the_held_out_documents_of_a_stream_may_have_anything_beside_their_texts(corpus, tmp_path):
    rows = [{"text": "a", "id": 1}, {"id": "two", "text": "b"}, {"text": "c", "id": [3]}, {"text": 4}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"train_file": [f"{tmp_path}/rows.jsonl"], "streaming": True}
    documents = documents_of(corpus, **options, max_eval_samples=3)
    assert documents["validation"]["text"][:] == ["a", "b", "c"]
    with pytest.raises(
        ValueError,
        match=r"'text' of document 4, counted among the held-out ones, must hold text, but holds 4: .* as \.jsonl",
    ):
        documents_of(corpus, **options, max_eval_samples=4)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (["--gradient_checkpointing"], 1e-5),
        pytest.param(
            ["--torch_compile", "--torch_compile_backend", "eager", "--checkpointing_steps", "5"],
            1e-6,
            marks=pytest.mark.slow,
        ),
        (["--mixed_precision", "bf16"], 2e-2),
        (["--mlm_probability", "0.3"], None),
        (["--dataloader_num_workers", "2"], 0),
        (["--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "4"], 1e-3),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
@pytest.mark.filterwarnings("error:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_options_keep_the_losses(options, tolerance, corpus, tmp_path):
    # Compiled layers draw other values for dropout.
    without_dropout = "hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0"
    quiet = ["--eval_strategy", "no", "--config_overrides", without_dropout]
    _, plain = run(corpus, tmp_path / "plain", *quiet)
    _, history = run(corpus, tmp_path / "option", *quiet, *options)
    if tolerance is None:
        assert losses(history) != losses(plain)
    else:
        assert losses(history) == pytest.approx(losses(plain), rel=tolerance, abs=0)
        assert len(history) == 3
    # The saved model has none of the wrappers.
    model, info = AutoModelForPreTraining.from_pretrained(tmp_path / "option", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    trained = AutoModelForPreTraining.from_pretrained(tmp_path / "plain").state_dict()
    for name, weight in model.state_dict().items():
        if tolerance == 0:
            torch.testing.assert_close(weight, trained[name], msg=name)
    if "--torch_compile" in options:  # also from a checkpoint, and in a process without a compiler
        resume = ["--resume_from_checkpoint", f"{tmp_path}/option/checkpoint-5"]
        _, resumed = run(corpus, tmp_path / "option", *quiet, *resume)
        assert losses(resumed) == pytest.approx(losses(plain), rel=tolerance, abs=0)


def test_several_compiled_layers_may_be_checkpointed(corpus, tmp_path):
    fields = "num_hidden_layers=2,pinv_iterations=1,hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0"
    quiet = ["--eval_strategy", "no", "--config_overrides", fields, "--max_train_steps", "2", "--logging_steps", "1"]
    both = ["--gradient_checkpointing", "--torch_compile", "--torch_compile_backend", "eager"]
    _, plain = run(corpus, tmp_path / "plain", *quiet)
    _, history = run(corpus, tmp_path / "option", *quiet, *both)
    assert losses(history) == pytest.approx(losses(plain), rel=1e-6, abs=0)


def test_whole_words(corpus, tmp_path):
    _, history = run(corpus, tmp_path, "--whole_word_mask", "--eval_strategy", "no")
    assert all(math.isfinite(loss) for loss in losses(history))


def test_rows_and_masks_are_those_of_the_flags(corpus):
    fields = {"output_dir": "x", "config_name": "x", "tokenizer_name": "x", "max_length": 40, "short_seq_prob": 0.3}
    flags = {"seed": 7, "whole_word_mask": True, "sentence_order": False, "pad_to_multiple_of": 8, "language": "de"}
    args = run_pretraining.PretrainingArguments(**fields, **flags, text_column_name="body")
    collator = args.collator(AutoTokenizer.from_pretrained(corpus / "tokenizer"), 0.3)
    names = ("mlm_probability", "seed", "whole_word_mask", "sentence_order", "pad_to_multiple_of")
    assert [getattr(collator, name) for name in names] == [0.3, 7, True, False, 8]
    assert args.row_options() == {
        "max_length": 40,
        "short_seq_prob": 0.3,
        "seed": 7,
        "text_column": "body",
        "language": "de",
        "with_word_starts": True,
        "sentence_order": False,
    }


def test_a_smaller_buffer_gives_another_order(corpus, tmp_path):
    options = ["--streaming", "--max_eval_samples", "10", "--eval_strategy", "no"]
    _, large = run(corpus, tmp_path / "large", *options)
    _, small = run(corpus, tmp_path / "small", *options, "--shuffle_buffer_size", "9")
    assert losses(large) != losses(small)


def test_steps_of_tokens(corpus, tmp_path, capsys):
    options = ["--tokens_per_step", "400", "--eval_strategy", "no", "--logging_steps", "1"]
    results, history = run(corpus, tmp_path, *options, "--checkpointing_steps", "5")
    assert "10 steps of 400 tokens" in capsys.readouterr().out
    rows = [
        json.loads((tmp_path / f"checkpoint-{n}" / "progress.json").read_text())["position"]["rows"] for n in (5, 10)
    ]
    assert rows[0] > 8 * 5 and rows[1] > rows[0]  # rows are of up to 48 tokens
    _, grouped = run(corpus, tmp_path / "grouped", *options, "--group_by_length")
    assert losses(grouped) != losses(history)
    assert results["train"]["tokens_per_second"] * results["train"]["seconds"] == pytest.approx(4000, abs=3 * 48)


def test_schedules_of_transformers(corpus, tmp_path):
    """With `warmup_stable_decay`, a run can be made longer without a jump of the learning rate."""
    options = ["--lr_scheduler_type", "warmup_stable_decay", "--lr_scheduler_kwargs", '{"num_decay_steps": 5}']
    options += [
        "--num_warmup_steps",
        "2",
        "--logging_steps",
        "1",
        "--checkpointing_steps",
        "5",
        "--eval_strategy",
        "no",
    ]
    _, short = run(corpus, tmp_path / "short", *options, steps=12)
    rates = [row["learning_rate"] for row in short if "learning_rate" in row]
    assert rates[1:7] == [3e-3] * 6 and rates[-1] == pytest.approx(0, abs=1e-9) and rates[8] < 3e-3
    shutil.rmtree(tmp_path / "short" / "checkpoint-10")
    options += ["--resume_from_checkpoint", "latest"]
    _, longer = run(corpus, tmp_path / "short", *options, steps=20)
    later = [row["learning_rate"] for row in longer if "learning_rate" in row]
    assert later[:5] == rates[:5] and later[5:15] == [3e-3] * 10


def test_a_model_is_evaluated_without_training(trained, corpus, tmp_path):
    family, output, results, _ = trained
    arguments = ["--model_name_or_path", str(output), "--train_file", f"{corpus}/train.txt", *OPTIONS]
    arguments += ["--cache_dir", f"{corpus}/cache", "--output_dir", str(tmp_path / "scored"), "--no_do_train"]
    scored = run_pretraining.main(arguments)
    assert scored == {"validation": pytest.approx(results["validation"], rel=1e-5)}
    assert [path.name for path in (tmp_path / "scored").iterdir()] == ["all_results.json"]
    with pytest.raises(ValueError, match="--model_name_or_path"):
        run(corpus, tmp_path, "--no_do_train", family=family)


@pytest.mark.usefixtures("launched_with_fsdp2")
def test_a_model_is_evaluated_where_training_would_divide_its_weights(trained, corpus, tmp_path):
    _, output, results, _ = trained
    arguments = ["--model_name_or_path", str(output), "--train_file", f"{corpus}/train.txt", *OPTIONS]
    arguments += ["--cache_dir", f"{corpus}/cache", "--output_dir", str(tmp_path), "--no_do_train"]
    assert run_pretraining.main(arguments)["validation"] == pytest.approx(results["validation"], rel=1e-5)


def test_masked_tokens_are_scored_without_a_head_for_the_order(trained, corpus, tmp_path):
    """As after the conversion of a BERT that only predicts masked tokens."""
    _, output, _, _ = trained
    AutoModelForMaskedLM.from_pretrained(output).save_pretrained(tmp_path / "masked")
    arguments = ["--model_name_or_path", f"{tmp_path}/masked", "--tokenizer_name", str(output), *OPTIONS]
    arguments += ["--train_file", f"{corpus}/train.txt", "--output_dir", f"{tmp_path}/scored", "--no_do_train"]
    with pytest.raises(ValueError, match=r"has no cls\.seq_relationship.* --no_sentence_order scores masked tokens"):
        run_pretraining.main(arguments)
    scored = run_pretraining.main([*arguments, "--no_sentence_order"])["validation"]
    assert math.isfinite(scored["mlm_loss"]) and math.isnan(scored["sop_loss"])


@pytest.mark.parametrize("source", ["file", "stream", "hub"])
def test_documents_to_evaluate_on_are_enough_without_training(source, trained, corpus, tmp_path):
    _, output, results, _ = trained
    documents = documents_of(corpus, validation_split_percentage=20)["validation"]
    (tmp_path / "held-out").mkdir()
    documents.to_json(tmp_path / "held-out" / "validation.jsonl")
    files = ["--validation_file", str(tmp_path / "held-out" / "validation.jsonl")]
    data = {"file": files, "stream": [*files, "--streaming"], "hub": ["--dataset_name", str(tmp_path / "held-out")]}
    arguments = ["--model_name_or_path", str(output), "--output_dir", str(tmp_path / "scored")]
    arguments += ["--cache_dir", f"{tmp_path}/cache"]
    AcceleratorState._reset_state(reset_partial_state=True)
    scored = run_pretraining.main([*arguments, *data[source], "--no_do_train"])
    assert scored == {"validation": pytest.approx(results["validation"], rel=1e-5)}
    with pytest.raises(ValueError, match="evaluate on are needed: --validation_file"):
        run_pretraining.main([*arguments, "--no_do_train"])
    with pytest.raises(ValueError, match=r"train on are needed: --train_file|no split 'train'"):
        run_pretraining.main([*arguments, *data[source]])


def test_texts_without_an_order_are_refused_and_others_measured(corpus, tmp_path, capsys):
    """A warning for documents of one sentence each; Russian and lower-cased documents have sentences."""
    texts = {
        "one": ["Return the mean", "no end of it", "one more"] * 30,
        "ru": ["Он пришёл. Она ушла! Что делать?"] * 90,
        "lower": ["the film was bad. i left early. it was raining."] * 90,
    }
    for name, lines in texts.items():
        (tmp_path / f"{name}.txt").write_text("\n\n".join(lines), encoding="utf-8")
    short = ["--per_device_train_batch_size", "2", "--short_seq_prob", "0", "--eval_strategy", "no"]
    russian = ["--train_file", f"{tmp_path}/ru.txt", "--cache_dir", f"{tmp_path}/cache"]
    train_tokenizer.main([*russian, "--max_length", "64", "--output_dir", f"{tmp_path}/tokenizer"])
    for name, tokenizer in (("ru", f"{tmp_path}/tokenizer"), ("lower", f"{corpus}/tokenizer")):
        files = ["--train_file", f"{tmp_path}/{name}.txt", "--tokenizer_name", tokenizer]
        run(corpus, tmp_path / name, *short, *files, steps=1)
        assert "100% of the training rows consist of two whole sentences or more" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"0\.0% of the training rows .*--no_sentence_order"):
        run(corpus, tmp_path / "one", *short, "--train_file", f"{tmp_path}/one.txt")
    _, history = run(corpus, tmp_path / "one", *short, "--train_file", f"{tmp_path}/one.txt", "--no_sentence_order")
    assert all(row["sop_loss"] is None for row in history if "sop_loss" in row)
    # Scores that are not defined are not printed.
    out = capsys.readouterr().out
    assert "validation: mlm_accuracy" in out and "sop_loss" not in out


def test_a_split_that_does_not_exist_is_not_held_out_instead(corpus, tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("train", "dev"):
        (folder / f"{name}.txt").write_text((corpus / "train.txt").read_text())
    options = ["--dataset_name", str(folder), "--cache_dir", f"{tmp_path}/cache", "--validation_split"]
    paths = ["--config_name", f"{corpus}/linformer.json", "--tokenizer_name", f"{corpus}/tokenizer"]
    with pytest.raises(ValueError, match=r"no split 'devv', but \['train', 'validation'\]"):
        run_pretraining.main([*paths, *OPTIONS, *options, "devv", "--output_dir", f"{tmp_path}/run"])
    with pytest.raises(ValueError, match="--validation_file"):
        run(corpus, tmp_path / "run", "--validation_split", "validation")


def test_going_on_with_a_model(trained, corpus, tmp_path):
    _, output, results, _ = trained
    paths = [
        "--model_name_or_path",
        str(output),
        "--train_file",
        f"{corpus}/train.txt",
        "--cache_dir",
        f"{corpus}/cache",
    ]
    going_on = run_pretraining.main(
        [*paths, *OPTIONS, "--learning_rate", "1e-9", "--max_train_steps", "1", "--output_dir", str(tmp_path)]
    )
    assert going_on["validation"]["mlm_loss"] == pytest.approx(results["validation"]["mlm_loss"], rel=1e-3)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused_with_what_works(corpus, tmp_path):
    size = len(AutoTokenizer.from_pretrained(f"{corpus}/tokenizer"))
    config = AutoConfig.from_pretrained(f"{corpus}/nystromformer.json", vocab_size=size)
    AutoModelForPreTraining.from_config(config).save_pretrained(tmp_path / "model")
    options = ["--model_name_or_path", f"{tmp_path}/model"]
    # A recipe's --config_name, made for another vocabulary.
    config.vocab_size = 50
    config.save_pretrained(tmp_path / "recipe")
    recipe = [*options, "--config_name", f"{tmp_path}/recipe"]
    with pytest.raises(ValueError, match=f"vocab_size is 50, by .*: set --config_overrides vocab_size={size}, "):
        run(corpus, tmp_path / "refused", *recipe)
    run(corpus, tmp_path / "run", *recipe, "--config_overrides", f"vocab_size={size}", steps=1)
    AutoModelForPreTraining.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="give the model's own tokenizer, by omitting --tokenizer_name"):
        run(corpus, tmp_path / "refused", *options, "--config_name", f"{tmp_path}/model")


def test_beginning_with_a_bert(corpus, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(corpus / "tokenizer")
    config = BertConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SIZES)
    bert = BertForPreTraining(config)
    bert.save_pretrained(tmp_path / "bert")
    same = f"vocab_size={len(tokenizer)},hidden_act=gelu,layer_norm_eps=1e-12,pad_token_id={tokenizer.pad_token_id}"
    options = ["--model_name_or_path", f"{tmp_path}/bert", "--config_overrides", same, "--learning_rate", "1e-9"]
    run(corpus, tmp_path / "run", *options, steps=1)
    begun = AutoModelForPreTraining.from_pretrained(tmp_path / "run")
    assert isinstance(begun, NystromformerForPreTraining)
    torch.testing.assert_close(
        begun.nystromformer.embeddings.word_embeddings.weight, bert.bert.embeddings.word_embeddings.weight
    )


def test_a_recipe_gives_flags_and_the_command_line_others(corpus, tmp_path):
    (tmp_path / "recipe.args").write_text(
        "# tried\n--max_train_steps 3 --mlm_probability 0.4\n--seed 7  # as always\n"
    )
    results, _ = run(corpus, tmp_path / "run", "--recipe", f"{tmp_path}/recipe.args", steps=2)
    arguments = json.loads((tmp_path / "run" / "all_results.json").read_text())["arguments"]
    assert results["train"]["steps"] == 2
    assert (arguments["mlm_probability"], arguments["seed"], arguments["learning_rate"]) == (0.4, 7, 3e-3)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ("--max_length 65", ValueError, "max_position_embeddings=65"),
        (
            "--text_column_name body",
            ValueError,
            r"no column 'body'; its columns are \['text'\]: give --text_column_name",
        ),
        ("--validation_split_percentage 0", ValueError, "--validation_file"),
        ("--dataset_name some/corpus", ValueError, "but not both: --train_file"),
        ("--config_overrides hidden_sise=64", ValueError, "--config_overrides .*hidden_sise"),
        ("--config_overrides num_attention_heads=5", ValueError, "num_attention_heads"),
        (
            "--config_overrides type_vocab_size=1",
            ValueError,
            "2 token types, but the model has type_vocab_size=1: give --config_overrides type_vocab_size=2",
        ),
        (
            f"--config_name {Path(__file__).parents[2]}/configs/linear_transformer/tiny-512-causal.json",
            ValueError,
            "run_clm.py",
        ),
        ("--streaming", ValueError, "--max_eval_samples"),
        ("--streaming --max_eval_samples 150", ValueError, "--max_eval_samples 150 holds out all documents"),
        (
            "--streaming --max_eval_samples 9 --eval_strategy epoch --load_best_model_at_end",
            ValueError,
            "give --eval_strategy steps and --eval_steps N",
        ),
        ("--streaming --max_eval_samples 9 --shuffle_buffer_size 0", ValueError, "must be at least 1, but is 0"),
        ("--pad_to_multiple_of 0", ValueError, "--pad_to_multiple_of must be at least 1, but is 0"),
        ("--seed -1", ValueError, "--seed must lie between 0 and 4294967295, but is -1"),
        ("--learning_rate inf", ValueError, "--learning_rate must be finite"),
        ("--early_stopping_threshold -1", ValueError, "--early_stopping_threshold must be at least 0"),
        ("--eval_strategy steps", ValueError, "--eval_steps"),
        ("--hub_model_id name", ValueError, "--push_to_hub"),
        ("--lr_scheduler_type cosinus", ValueError, "--lr_scheduler_type must be one of linear"),
        ("--lr_scheduler_kwargs x", ValueError, "is not JSON"),
        ('--lr_scheduler_kwargs {"num_cycle":1}', ValueError, "--lr_scheduler_type linear does not take"),
        ("--lr_scheduler_type cosine_with_min_lr", ValueError, "needs --lr_scheduler_kwargs: One of min_lr"),
        ("--tokens_per_step 20", ValueError, "less than the"),
        ("--tokens_per_step 400 --gradient_accumulation_steps 2", ValueError, "omit --gradient_accumulation"),
        ("--streaming --max_eval_samples 9 --tokens_per_step 400", ValueError, "omit --streaming"),
        ("--per_device_train_batch_size 4096", ValueError, "fewer than the 4096"),
        (
            "--no_sentence_order --metric_for_best_model sop_accuracy",
            ValueError,
            r"sop_accuracy is not measured; use one of mlm_loss, mlm_accuracy, perplexity\.$",
        ),
        ("--recipe nowhere.args", FileNotFoundError, "configs/recipes/"),
        ("--train_file nowhere.txt", FileNotFoundError, "--train_file nowhere.txt is not a file"),
        ("--report_to tensorbord --with_tracking", ValueError, "--report_to tensorbord is no tracker"),
        ("--report_to none --with_tracking", ValueError, "for none, omit --with_tracking"),
        ("--report_to wandb", ValueError, "--report_to wandb needs --with_tracking"),
        ("--report_to tensorboard aim --with_tracking", ImportError, "--report_to aim is not installed"),
    ],
)
def test_faults_are_named_before_training(options, error, message, corpus, tmp_path):
    with pytest.raises(error, match=message):
        run(corpus, tmp_path / "run", *options.split())
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_file_is_no_output_folder(corpus, tmp_path):
    (tmp_path / "file").write_text("kept")
    for path in ("file", "file/run"):
        with pytest.raises(NotADirectoryError, match="is a file or lies in one: give a folder"):
            run(corpus, tmp_path / path)
    assert (tmp_path / "file").read_text() == "kept"


def test_a_stream_needs_its_number_of_steps(corpus, tmp_path):
    paths = ["--config_name", f"{corpus}/linformer.json", "--tokenizer_name", f"{corpus}/tokenizer"]
    paths += ["--train_file", f"{corpus}/train.txt", "--output_dir", str(tmp_path)]
    with pytest.raises(ValueError, match="--max_train_steps"):
        run_pretraining.main([*paths, *OPTIONS, "--streaming", "--max_eval_samples", "10"])


def test_what_no_tokenizer_can_be_trained_by(corpus, tmp_path):
    with pytest.raises(ValueError, match="either --train_file or --dataset_name"):
        train_tokenizer.main(["--output_dir", str(tmp_path)])
    (tmp_path / "rows.jsonl").write_text('{"text": "a b"}\n{"text": null}\n')
    options = ["--train_file", f"{tmp_path}/rows.jsonl", "--cache_dir", f"{tmp_path}/cache"]
    for name in ("max_length", "min_frequency", "vocab_size"):
        with pytest.raises(ValueError, match=f"--{name} must be at least 1, but is 0"):
            train_tokenizer.main([*options, "--output_dir", f"{tmp_path}/new", f"--{name}", "0"])
    with pytest.raises(NotADirectoryError, match="is a file or lies in one: give a folder"):
        train_tokenizer.main([*options, "--output_dir", f"{tmp_path}/rows.jsonl"])
    for kind in ("wordpiece", "character", "byte_level_bpe"):
        with pytest.raises(ValueError, match="'text' has a document without a text"):
            train_tokenizer.main(
                [*options, "--streaming", "--tokenizer_type", kind, "--output_dir", f"{tmp_path}/new"]
            )
    with pytest.raises(ValueError, match=r"no column 'body'; the columns of the first one are \['text'\]"):
        train_tokenizer.main(
            [*options, "--streaming", "--text_column_name", "body", "--output_dir", f"{tmp_path}/new"]
        )
    (tmp_path / "rows.jsonl").write_text('{"text": [1, 2]}\n')
    for streaming, held in (([], "List"), (["--streaming"], r"\[1, 2\]")):
        with pytest.raises(ValueError, match=f"'text' .*must hold text, but holds {held}"):
            train_tokenizer.main([*options, *streaming, "--output_dir", f"{tmp_path}/new"])


def test_both_families_are_pretrained(trained):
    classes = {"nystromformer": NystromformerForPreTraining, "linformer": LinformerForPreTraining}
    assert isinstance(AutoModelForPreTraining.from_pretrained(trained[1]), classes[trained[0]])
    assert AutoModelForMaskedLM.from_pretrained(trained[1]).config.sparse_prediction is False


def test_characters_that_were_left_out_are_kept_by_the_flags_that_the_error_names(tmp_path):
    (tmp_path / "corpus.txt").write_text("The Café RAIN falls.\n")
    options = ["--train_file", str(tmp_path / "corpus.txt"), "--tokenizer_type", "character", "--keep_case"]
    options += ["--cache_dir", str(tmp_path / "cache"), "--output_dir", str(tmp_path / "tokenizer")]
    with pytest.raises(ValueError, match=r"replaces 55% .*: give a larger --vocab_size, or --min_frequency 1, which"):
        train_tokenizer.main(options)
    with pytest.raises(ValueError, match="min_frequency=9 leaves out all characters: give one of at most 3"):
        train_tokenizer.main([*options, "--min_frequency", "9"])
    tokenizer = train_tokenizer.main([*options, "--min_frequency", "1"])
    assert tokenizer.decode(tokenizer("The Café", add_special_tokens=False)["input_ids"]) == "The Café"
