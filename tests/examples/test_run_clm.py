# SPDX-License-Identifier: Apache-2.0
import json
import math
import os
import random
import signal
from pathlib import Path

import context_lengths
import pytest
import run_clm
import torch
import train_tokenizer
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, DistilBertConfig, GPT2Config
from transformers import pipeline as hf_pipeline

from nystrom_models import LinearTransformerConfig, LinearTransformerForCausalLM
from nystrom_models.command_line.main import main as nystrom_models_main
from nystrom_models.training.loop import TrainingLoop
from nystrom_models.training.splits import load_documents
from tests.training import processes

CONFIG = {
    "model_type": "linear_transformer",
    "is_decoder": True,
    "position_embedding_type": "sinusoidal",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.1,
}
OPTIONS = "--per_device_train_batch_size 8 --per_device_eval_batch_size 4 --learning_rate 1e-2 --logging_steps 5"
OPTIONS += " --block_size 48 --validation_split_percentage 20"


def document(number):
    """Sentences that name each animal and each place twice."""
    choices = random.Random(number).choices
    animals, places = choices("cat dog cow hen fox".split(), k=3), choices("barn yard field".split(), k=2)
    return " ".join(
        [
            f"First the {animals[0]} was seen in the {places[0]}.",
            f"Then the {animals[1]} came after it.",
            f"Last of all the {animals[2]} left the {places[1]}."[: 24 + number % 20],
        ]
    )


DOCUMENTS = list(dict.fromkeys(document(i) for i in range(200)))[:150]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A text file of documents separated by blank lines, tokenizers like BERT's and GPT-2's, and a configuration."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "train.txt").write_text("\n\n".join(DOCUMENTS) + "\n", encoding="utf-8")
    options = ["--train_file", f"{folder}/train.txt", "--vocab_size", "300", "--max_length", "64"]
    for kind in ("wordpiece", "byte_level_bpe"):
        paths = ["--output_dir", f"{folder}/{kind}", "--cache_dir", f"{folder}/cache"]
        train_tokenizer.main([*options, "--tokenizer_type", kind, *paths])
    (folder / "causal.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def arguments(corpus, output, *options, steps=10):
    paths = ["--config_name", f"{corpus}/causal.json", "--tokenizer_name", f"{corpus}/byte_level_bpe"]
    paths += ["--train_file", f"{corpus}/train.txt", "--cache_dir", f"{corpus}/cache", "--output_dir", str(output)]
    return [*paths, *OPTIONS.split(), "--max_train_steps", str(steps), *options]


def history(output):
    return [json.loads(line) for line in Path(output, "history.jsonl").read_text().splitlines()]


def run(corpus, output, *options, steps=10):
    # Accelerate keeps the precision for the whole process, so it is reset for each run.
    AcceleratorState._reset_state(reset_partial_state=True)
    return run_clm.main(arguments(corpus, output, *options, steps=steps)), history(output)


def losses(rows):
    return [row["loss"] for row in rows if "loss" in row]


@pytest.fixture(scope="module", params=["wordpiece", "byte_level_bpe"])
def trained(request, corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("causal") / request.param
    options = [
        "--tokenizer_name",
        f"{corpus}/{request.param}",
        "--max_train_samples",
        "100",
        "--eval_strategy",
        "steps",
        "--eval_steps",
        "50",
    ]
    options += ["--load_best_model_at_end", "--metric_for_best_model", "bits_per_byte"]
    return output, *run(corpus, output, *options, steps=120)


def test_it_learns_and_leaves_everything(trained):
    output, results, rows = trained
    scores = results["validation"]
    assert scores["accuracy"] > 0.7 and losses(rows)[-1] < 0.4 * losses(rows)[0]
    assert [row["step"] for row in rows if "eval_loss" in row] == [50, 100, 120]
    measured = {row["step"]: row["eval_bits_per_byte"] for row in rows if "eval_loss" in row}
    assert measured[results["train"]["best_step"]] == min(measured.values())
    written = json.loads((output / "all_results.json").read_text())
    assert written["results"] == results and written["arguments"]["block_size"] == 48
    assert (output / "training_curve.png").read_bytes().startswith(b"\x89PNG")
    card = (output / "README.md").read_text()
    assert "pipeline_tag: text-generation" in card and "bits_per_byte" in card and "any number of tokens" in card
    assert "100 documents of train.txt" in card and "30 documents that were held out" in card
    model, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert type(model) is LinearTransformerForCausalLM and not info["missing_keys"] and not info["unexpected_keys"]


@torch.no_grad()
def test_scores_are_those_of_the_held_out_documents_alone(trained, corpus):
    """Each document is scored alone, in parts of 48 tokens: the scores agree, and all bytes are counted."""
    output, results, _ = trained
    options = run_clm.CausalArguments(
        output_dir=str(output),
        config_name="x",
        tokenizer_name="x",
        train_file=[f"{corpus}/train.txt"],
        validation_split_percentage=20,
    )
    texts = load_documents(options)["validation"]["text"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    nats = tokens = 0
    cuts = 0
    place = 0  # in the row
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        while ids.shape[1]:
            part = ids[:, : 48 - place]
            if part.shape[1] > 1:
                nats += float(model(part, labels=part, num_items_in_batch=1).loss)
                tokens += part.shape[1] - 1
            place += part.shape[1]
            ended = part.shape[1] == ids.shape[1]
            if place == 48:
                place, cuts = 0, cuts + (not ended)
            ids = ids[:, :0] if ended else ids[:, part.shape[1] - 1 :]
    expected = {
        "loss": nats / tokens,
        "perplexity": math.exp(nats / tokens),
        "bits_per_byte": nats / math.log(2) / sum(len(text.encode()) for text in texts),
    }
    assert cuts > 5 and {name: results["validation"][name] for name in expected} == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_bits_per_byte_over_the_length_of_the_context(trained, tmp_path):
    """The longest rows hold whole documents, each of which is scored alone here."""
    output = trained[0]
    texts = [document(number) for number in range(500, 506)]
    file = tmp_path / "unseen.txt"
    file.write_text("\n\n".join(texts), encoding="utf-8")
    options = ["--models", str(output), str(output), "--labels", "one", "again", "--validation_file", str(file)]
    options += ["--output_dir", str(tmp_path / "context"), "--lengths", "4", "300"]
    found = context_lengths.main(options)
    assert [row["length"] for row in found["one"]] == [4, 300] and found["one"] == found["again"]
    short, whole = (row["bits_per_byte"] for row in found["one"])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(output), AutoTokenizer.from_pretrained(output)
    nats = 0.0
    for text in texts:
        ids = torch.tensor([[*tokenizer(text)["input_ids"], tokenizer.eos_token_id]])
        nats += float(model(ids, labels=ids, num_items_in_batch=1).loss)
    first = sum(len(tokenizer.decode(tokenizer(text)["input_ids"][0])) for text in texts)  # predicted by nothing
    bos = tokenizer.bos_token_id is not None and tokenizer(texts[0])["input_ids"][0] == tokenizer.bos_token_id
    num_bytes = sum(map(len, texts)) - (0 if bos else first)
    assert whole == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5) and short > whole
    written = json.loads((tmp_path / "context" / "context_lengths.json").read_text())
    assert written["results"] == found and "torch" in written["versions"]
    assert (tmp_path / "context" / "context_lengths.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="--labels must be 2 different names"):
        context_lengths.main([*options, "--labels", "one", "one"])


@pytest.mark.parametrize(
    "config",
    [
        DistilBertConfig(vocab_size=9),
        LinearTransformerConfig(vocab_size=9),
        # It would see the documents before, in the same row.
        GPT2Config(vocab_size=500, n_embd=8, n_layer=1, n_head=1),
    ],
    ids=lambda config: config.model_type,
)
def test_contexts_need_a_causal_model_of_this_package(trained, tmp_path, config):
    AutoModel.from_config(config).save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(trained[0]).save_pretrained(tmp_path / "other")
    (tmp_path / "unseen.txt").write_text(document(500), encoding="utf-8")
    options = ["--validation_file", str(tmp_path / "unseen.txt"), "--output_dir", str(tmp_path), "--lengths", "8"]
    with pytest.raises(ValueError, match=f"is a {config.model_type}, but must be a causal model of this package"):
        context_lengths.main(["--models", str(tmp_path / "other"), *options])


def test_contexts_are_measured_in_float32_and_without_random_weights(trained, tmp_path):
    (tmp_path / "unseen.txt").write_text(document(500), encoding="utf-8")
    options = ["--validation_file", str(tmp_path / "unseen.txt"), "--output_dir", str(tmp_path), "--lengths", "8"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(trained[0]), AutoTokenizer.from_pretrained(trained[0])
    for name, dtype in (("half", torch.bfloat16), ("rounded", torch.float32)):
        model.to(torch.bfloat16).to(dtype).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    found = context_lengths.main(["--models", str(tmp_path / "half"), str(tmp_path / "rounded"), *options])
    assert found["half"] == found["rounded"]
    config = LinearTransformerConfig.from_dict({**model.config.to_dict(), "tie_word_embeddings": False})
    LinearTransformerForCausalLM(config).base_model.save_pretrained(tmp_path / "headless")
    tokenizer.save_pretrained(tmp_path / "headless")
    with pytest.raises(ValueError, match=r"lacks .* weights of LinearTransformerForCausalLM.*give models of run_clm"):
        context_lengths.main(["--models", str(tmp_path / "headless"), *options])


def test_the_pipeline_generates(trained):
    generate = hf_pipeline("text-generation", model=str(trained[0]))
    [answer] = generate("First the fox was", max_new_tokens=40, do_sample=False)
    # WordPiece does not store whether a space precedes a piece that begins a word.
    space = "" if trained[0].name == "wordpiece" else " "
    assert answer["generated_text"].startswith(f"First the fox was{space}seen in the")
    assert len(generate.tokenizer(answer["generated_text"])["input_ids"]) < 40  # it has learned to end a document
    together = generate(["First", "Then the cow came"], max_new_tokens=8, do_sample=False, batch_size=2)
    assert together[1] == generate(["Then the cow came"], max_new_tokens=8, do_sample=False)[0]


@pytest.mark.usefixtures("launched_with_fsdp2")
def test_a_model_is_evaluated_where_training_would_divide_its_weights(trained, corpus, tmp_path):
    output, results, _ = trained
    arguments = ["--model_name_or_path", str(output), "--train_file", f"{corpus}/train.txt", *OPTIONS.split()]
    arguments += ["--cache_dir", f"{corpus}/cache", "--output_dir", str(tmp_path), "--no_do_train"]
    AcceleratorState._reset_state(reset_partial_state=True)
    assert run_clm.main(arguments)["validation"] == pytest.approx(results["validation"], rel=1e-5)


def test_a_model_is_evaluated_and_trained_on(trained, corpus, tmp_path):
    output, results, _ = trained
    shared = ["--model_name_or_path", str(output), "--train_file", f"{corpus}/train.txt", *OPTIONS.split()]
    shared += ["--cache_dir", f"{corpus}/cache"]
    AcceleratorState._reset_state(reset_partial_state=True)
    scored = run_clm.main([*shared, "--output_dir", f"{tmp_path}/scored", "--no_do_train"])
    assert scored == {"validation": pytest.approx(results["validation"], rel=1e-5)}
    held_out = [*shared[:2], "--validation_file", f"{corpus}/train.txt", "--cache_dir", f"{corpus}/cache"]
    assert run_clm.main([*held_out, "--output_dir", f"{tmp_path}/held-out", "--no_do_train"]).keys() == {"validation"}
    further = run_clm.main([*shared, "--output_dir", f"{tmp_path}/further", "--max_train_steps", "5"])
    assert losses(history(tmp_path / "further"))[0] < 1.5 * results["validation"]["loss"]
    assert further["validation"]["loss"] < 1.5 * results["validation"]["loss"]


def train_until(killed_after, arguments):
    take_step = TrainingLoop.take_step

    def take_steps(loop, step):
        if loop.state.step == killed_after:
            os.kill(os.getpid(), signal.SIGKILL)
        take_step(loop, step)

    TrainingLoop.take_step = take_steps
    run_clm.main(arguments)


@pytest.mark.filterwarnings("ignore:Since .* versions")
@pytest.mark.parametrize(
    "streaming", [pytest.param(False, id="rows", marks=pytest.mark.slow), pytest.param(True, id="stream")]
)
def test_a_run_killed_and_resumed_is_the_unstopped_one(streaming, corpus, tmp_path):
    """In processes of their own, past the end of an epoch; the weights are bitwise equal."""
    options = ["--checkpointing_steps", "4", "--logging_steps", "1", "--max_train_samples", "60"]
    options += ["--streaming", "--max_eval_samples", "10"] if streaming else ["--eval_strategy", "no"]
    whole, killed = (arguments(corpus, tmp_path / name, *options, steps=12) for name in ("whole", "killed"))
    for killed_after, flags in ((None, whole), (7, killed), (None, [*killed, "--resume_from_checkpoint", "latest"])):
        codes, log = processes.run(train_until, killed_after, flags, folder=tmp_path)
        assert codes == [-signal.SIGKILL if killed_after else 0], log[-3000:]
    assert losses(history(tmp_path / "killed")) == losses(history(tmp_path / "whole"))
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        (["--gradient_checkpointing"], 1e-5),
        pytest.param(["--torch_compile", "--torch_compile_backend", "eager"], 1e-5, marks=pytest.mark.slow),
        (["--mixed_precision", "bf16"], 2e-2),
        (["--dataloader_num_workers", "2"], 0),
        (["--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "4"], 1e-5),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_keep_the_losses(options, tolerance, corpus, tmp_path):
    quiet = ["--eval_strategy", "no", "--config_overrides", "hidden_dropout_prob=0.0"]
    _, plain = run(corpus, tmp_path / "plain", *quiet)
    _, rows = run(corpus, tmp_path / "option", *quiet, *options)
    assert losses(rows) == pytest.approx(losses(plain), rel=tolerance, abs=0)


def test_a_pretrained_model_is_made_longer_as_the_message_says(corpus, tmp_path):
    config = LinearTransformerConfig(**CONFIG | {"position_embedding_type": "learned", "max_position_embeddings": 32})
    LinearTransformerForCausalLM(config).save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(f"{corpus}/byte_level_bpe").save_pretrained(tmp_path / "model")
    shared = ["--model_name_or_path", f"{tmp_path}/model"]
    shared += ["--train_file", f"{corpus}/train.txt", *OPTIONS.split(), "--output_dir", f"{tmp_path}/longer"]
    with pytest.raises(ValueError, match=r"max_position_embeddings=48: weights of .* have other shapes"):
        run_clm.main([*shared, "--config_overrides", "max_position_embeddings=48"])
    with pytest.raises(ValueError, match=" or less, or make the model longer first: ") as error:
        run_clm.main(shared)
    # The message's command is a remedy.
    command = str(error.value).partition("python -m nystrom_models ")[2].replace("OUT", f"{tmp_path}/converted")
    assert nystrom_models_main(command.removesuffix(".").split()) == 0
    results = run_clm.main([*shared, "--model_name_or_path", f"{tmp_path}/converted", "--max_train_steps", "1"])
    assert results["train"]["steps"] == 1


def test_what_cannot_be_trained_is_refused(corpus, tmp_path):
    encoder = {name: value for name, value in CONFIG.items() if name != "is_decoder"}
    others = {"encoder": encoder, "nystromformer": {"model_type": "nystromformer"}, "bert": {"model_type": "bert"}}
    for name, config in others.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match="--config_name must name a linear transformer with is_decoder=True"):
            run(corpus, tmp_path / name, "--config_name", f"{tmp_path}/{name}.json")
    (tmp_path / "short.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 32}))
    with pytest.raises(ValueError, match="--block_size 48 is more than the 32 tokens"):
        run(corpus, tmp_path / "short", "--config_name", f"{tmp_path}/short.json")
    with pytest.raises(
        ValueError, match=r"f1 is not measured; use one of loss, accuracy, perplexity, bits_per_byte\.$"
    ):
        run(corpus, tmp_path / "metric", "--metric_for_best_model", "f1")
    with pytest.raises(ValueError, match="--tokens_per_step needs rows that can be counted"):
        options = ["--streaming", "--max_eval_samples", "10", "--tokens_per_step", "400"]
        run(corpus, tmp_path / "stream", *options)


def test_steps_of_tokens(corpus, tmp_path, capsys):
    run(corpus, tmp_path, "--tokens_per_step", "400", "--eval_strategy", "no", steps=5)
    assert "5 steps of 400 tokens" in capsys.readouterr().out
