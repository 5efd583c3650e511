# SPDX-License-Identifier: Apache-2.0
"""A converted model that is trained with its source as the teacher, by examples/run_pretraining.py."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForPreTraining

from nystrom_models.conversion.weights import is_of_a_family
from nystrom_models.training.identity import weights_digest
from nystrom_models.training.lora import LoraArguments, add_lora, load_trained, merged_weights, save_trained
from tests.training import processes
from tests.training.teachers import EXACT, save_student, save_teacher, train_taught

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import run_pretraining

OPTIONS = "--per_device_train_batch_size 4 --learning_rate 1e-3 --eval_strategy no --logging_steps 1".split()
OPTIONS += "--max_train_steps 8 --checkpointing_steps 3 --max_length 44 --validation_split_percentage 10".split()
TEACHER = "--attention_matching_steps 4 --alpha_cos 0.5".split()


@pytest.fixture(scope="module")
def folder(tokenizer, texts, tmp_path_factory):
    """A BERT, a model made of it for longer rows, and documents."""
    folder = tmp_path_factory.mktemp("recovery")
    (folder / "train.txt").write_text("\n\n".join(texts[:60]) + "\n", encoding="utf-8")
    save_teacher(folder / "bert", "Bert", tokenizer)
    save_student(folder / "student", folder / "bert", "linear_transformer", max_position_embeddings=64)
    return folder


def run_script(folder, output, *options, teacher="bert", model="student"):
    AcceleratorState._reset_state(reset_partial_state=True)
    paths = ["--train_file", f"{folder}/train.txt", "--cache_dir", f"{folder}/cache", "--output_dir", str(output)]
    paths += ["--model_name_or_path", str(Path(folder, model))]
    paths += ["--teacher_model_name_or_path", f"{folder}/{teacher}"] if teacher else []
    return run_pretraining.main([*paths, *OPTIONS, *options])


def run(folder, output, *options, **names):
    results = run_script(folder, output, *options, **names)
    history = [json.loads(line) for line in Path(output, "history.jsonl").read_text().splitlines()]
    for row in history:
        row.pop("tokens_per_second", None)
    return results, history


@pytest.fixture(scope="module", params=["all", "lora"])
def recovered(request, folder, tmp_path_factory):
    options = [*TEACHER, *(["--lora_r", "2"] if request.param == "lora" else [])]
    output = tmp_path_factory.mktemp(request.param) / "run"
    return request.param, options, output, *run(folder, output, *options)


def test_what_is_trained_logged_and_saved(recovered, folder):
    kind, _, output, results, history = recovered
    names = [set(row) - {"step", "num_input_tokens_seen", "grad_norm", "learning_rate"} for row in history]
    assert names[:4] == [{"attention_loss", "attention_error"}] * 4
    losses = {"mlm_loss", "sop_loss", "ce_loss", "mse_loss", "cos_loss"}
    assert names[4:8] == [losses | {"mlm_accuracy", "sop_accuracy"}] * 4
    rates = [row["learning_rate"] for row in history[:8]]
    assert rates[:3] == [1e-3] * 3 and rates[-1] == 0.0

    # A model as any other, without the teacher and without LoRA's matrices.
    model, info = AutoModelForPreTraining.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    before = AutoModelForPreTraining.from_pretrained(folder / "student").state_dict()
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}
    assert {name for name in changed if "_features." in name} and {n for n in changed if ".query.weight" in n}
    outside = {name for name in changed if ".intermediate." in name or "word_embeddings" in name}
    assert outside if kind == "all" else not outside
    for checkpoint in ("checkpoint-3", "checkpoint-6"):
        assert AutoModelForPreTraining.from_pretrained(output / checkpoint).state_dict().keys() == before.keys()
    # The scores of the run are those of the saved model.
    AcceleratorState._reset_state(reset_partial_state=True)
    arguments = ["--model_name_or_path", str(output), "--train_file", f"{folder}/train.txt", *OPTIONS]
    scored = run_pretraining.main([*arguments, "--no_do_train", "--output_dir", str(output / "scored")])
    assert scored["validation"] == pytest.approx(results["validation"], rel=1e-4, nan_ok=True)

    digest = weights_digest(str(folder / "bert"), AutoConfig.from_pretrained(folder / "bert"))
    assert json.loads((output / "all_results.json").read_text())["identity"]["teacher"] == digest
    card = (output / "README.md").read_text()
    assert "The teacher was bert: the model was trained to match its attention for 4 steps, its predictions" in card
    assert str(folder) not in card


@pytest.mark.parametrize("step", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_a_run_goes_on_bit_for_bit(recovered, step, folder):
    """From within the steps that match attention, and from later."""
    _, options, output, results, history = recovered
    weights = load_file(output / "model.safetensors")
    again, repeated = run(folder, output, *options, "--resume_from_checkpoint", f"{output}/checkpoint-{step}")
    assert repeated == history and again["validation"] == results["validation"]
    for name, weight in load_file(output / "model.safetensors").items():
        assert torch.equal(weight, weights[name]), name


def test_a_teacher_is_scored_beside_the_model(folder, tmp_path):
    """On the same masked tokens: a model that computes what the teacher does has the teacher's scores."""
    save_student(tmp_path / "equal", folder / "bert", **EXACT)
    # Flags that only a training uses, such as those of a recipe, change nothing.
    short = ["--no_do_train", "--max_length", "30", *TEACHER]
    scores = run_script(folder, tmp_path / "short", *short, model=tmp_path / "equal")["validation"]
    assert scores["teacher_mlm_accuracy"] == scores["mlm_accuracy"] > 0
    assert scores["teacher_mlm_loss"] == pytest.approx(scores["mlm_loss"], rel=1e-5)
    written = json.loads((tmp_path / "short" / "all_results.json").read_text())
    digest = weights_digest(str(folder / "bert"), AutoConfig.from_pretrained(folder / "bert"))
    assert written["identity"]["teacher"] == digest

    # Longer rows are read in windows. The model's scores are those without a teacher.
    scores = run_script(folder, tmp_path / "beside", "--no_do_train")["validation"]
    alone = run_script(folder, tmp_path / "alone", "--no_do_train", teacher=None)["validation"]
    theirs = {name: scores.pop(name) for name in ("teacher_mlm_accuracy", "teacher_mlm_loss")}
    assert scores == pytest.approx(alone, rel=1e-6) and 1 < theirs["teacher_mlm_loss"] != scores["mlm_loss"]


def test_a_teacher_without_a_head_changes_no_random_numbers(folder, tmp_path):
    """Its head would be random, but with --alpha_ce 0 nothing uses it. LoRA's matrices start from random numbers."""
    bare = AutoModelForMaskedLM.from_pretrained(folder / "bert").base_model
    shutil.copytree(folder / "bert", folder / "bare")
    bare.save_pretrained(folder / "bare")
    options = "--alpha_ce 0 --lora_r 2 --max_train_steps 2".split()
    histories = [run(folder, tmp_path / name, *options, teacher=name)[1] for name in ("bert", "bare")]
    assert histories[0] == histories[1]


def test_another_teacher_or_none_is_refused(recovered, folder, tokenizer):
    kind, options, output, *_ = recovered
    resume = ["--resume_from_checkpoint", "latest"]
    if kind == "lora":
        # Checkpoints hold only what is trained.
        other = folder / "other"
        shutil.copytree(folder / "student", other)
        weights = load_file(other / "model.safetensors")
        save_file(
            {name: weight + 1 for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"}
        )
        with pytest.raises(ValueError, match="the initial weights was"):
            run(folder, output, *options, *resume, model="other")
        return
    save_teacher(folder / "bert-2", "Bert", tokenizer, initializer_range=0.03)
    with pytest.raises(ValueError, match="the teacher's weights was"):
        run(folder, output, *options, *resume, teacher="bert-2")
    with pytest.raises(ValueError, match="--attention_matching_steps was 4 and is None"):
        run(folder, output, *resume, teacher=None)


@pytest.mark.parametrize("sentence_order", [True, False])
def test_what_lora_trains_and_by_how_much(sentence_order, folder):
    model = AutoModelForPreTraining.from_pretrained(folder / "student")
    added = {name for name, _ in model.named_parameters() if is_of_a_family(name)}
    heads = {name for name, _ in model.named_parameters() if "pooler" in name or "seq_relationship" in name}
    add_lora(model, 2, 6.0, sentence_order)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    matrices = {name for name in trained if ".lora_" in name}
    assert added and len(heads) == 4 and len(matrices) == 2 * 4 * 2
    assert trained - matrices == added | (heads if sentence_order else set())
    with torch.no_grad():
        for name in matrices:
            model.get_parameter(name).normal_()
    layer = model.base_model.encoder.layer[1].attention.output.dense
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    merged = merged_weights(model)[f"{model.base_model_prefix}.encoder.layer.1.attention.output.dense.weight"]
    torch.testing.assert_close(merged, layer.base_layer.weight + 3 * product)


def test_the_scale_of_lora_is_two_unless_it_is_given():
    assert LoraArguments(lora_r=4).lora_alpha == 8 and LoraArguments(lora_r=4, lora_alpha=3.0).lora_alpha == 3


def test_what_another_training_trained_is_refused(folder, tmp_path):
    models = [AutoModelForPreTraining.from_pretrained(folder / "student") for _ in range(2)]
    for model, sentence_order in zip(models, (True, False), strict=True):
        add_lora(model, 2, 4.0, sentence_order)
    save_trained(models[0], tmp_path)
    with pytest.raises(RuntimeError, match=r"this run trains: they differ in .*(pooler|seq_relationship)"):
        load_trained(models[1], tmp_path)


@pytest.mark.parametrize("lora_r", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_several_processes_train_the_same_model(lora_r, folder):
    for number in (1, 2):
        codes, log = processes.run(train_taught, str(folder), lora_r, folder=folder, num_processes=number)
        assert codes == [0] * number, log[-3000:]
    histories = [json.loads((folder / f"{number}-{lora_r}" / "history.json").read_text()) for number in (1, 2)]
    assert len(histories[0]) == 6 and "attention_loss" in histories[0][0] and "ce_loss" in histories[0][5]
    for one, two in zip(*histories, strict=True):
        one.pop("tokens_per_second"), two.pop("tokens_per_second")
        assert two == pytest.approx(one, rel=1e-5, nan_ok=True)
    one, two = (load_file(folder / f"{number}-{lora_r}" / "model.safetensors") for number in (1, 2))
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--attention_matching_steps 8", "first 8 steps match the teacher's attention, and the run has 8"),
        ("--lora_r 0", "--lora_r must be at least 1"),
        ("--lora_alpha 2", "also give --lora_r"),
        ("--lora_r 2 --lora_alpha inf", "--lora_alpha must be positive and finite, but is inf"),
        ("--lora_r 2 --lora_alpha 0", "--lora_alpha must be positive and finite, but is 0"),
        ("--lora_r 2 --optim muon", "--optim adamw"),
    ],
)
def test_faults_are_named_before_training(options, message, folder, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(folder, tmp_path / "run", *options.split())
    assert not (tmp_path / "run" / "model.safetensors").exists()
