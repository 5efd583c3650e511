# SPDX-License-Identifier: Apache-2.0
"""FSDP2 as in its launch file, by the function with which Accelerate divides a model: it does not call it on CPUs."""

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForPreTraining, AutoTokenizer, BertConfig, BertForPreTraining

from nystrom_models.data import PretrainingCollator, RowLoader, load_files, pretraining_dataset
from nystrom_models.training import (
    OptimizationArguments,
    PretrainingObjective,
    create_accelerator,
    create_optimizer,
    create_scheduler,
    loop,
)
from nystrom_models.training.optimization import set_schedule_step
from nystrom_models.training.saving import load_weights
from nystrom_models.training.sharding import remove_second_names
from tests.training import processes
from tests.training.models import FAMILIES, tiny_model

STEPS, SAVED_AFTER = 20, 11
LAUNCH = yaml.safe_load((Path(__file__).parents[2] / "configs" / "accelerate" / "fsdp2.yaml").read_text())
# For float64 models.
TOLERANCE = 1e-9


def shard(model):
    """Shards as Accelerate does with the launch file, but for the precision: the layers that it names, the output
    layer with the embeddings, and the rest."""
    config = LAUNCH["fsdp_config"]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=config["fsdp_version"],
        auto_wrap_policy=config["fsdp_auto_wrap_policy"],
        transformer_cls_names_to_wrap=[config["fsdp_transformer_layer_cls_to_wrap"]],
        reshard_after_forward=config["fsdp_reshard_after_forward"],
        cpu_ram_efficient_loading=config["fsdp_cpu_ram_efficient_loading"],
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("shards",)),
        parallelism_config=SimpleNamespace(fsdp_dim_names=("shards",)),
        mixed_precision="no",
        is_main_process=torch.distributed.get_rank() == 0,
        device=torch.device("cpu"),
    )
    remove_second_names(model)
    fsdp2_prepare_model(accelerator, model)
    layers = [module for module in model.modules() if type(module).__name__.endswith("TransformerLayer")]
    assert len(layers) == model.config.num_hidden_layers
    assert all(isinstance(layer, FSDPModule) for layer in layers)
    return model


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(family, data, folder, sharded, resume=False):
    """Losses and gradient norms of the steps; an intermediate checkpoint and the final model are saved."""
    accelerator = create_accelerator()
    tokenizer = AutoTokenizer.from_pretrained(data)
    model = tiny_model(family, tokenizer, num_hidden_layers=2).double()
    model = shard(model) if sharded else model
    args = OptimizationArguments(8 // accelerator.num_processes, learning_rate=1e-3, max_train_steps=STEPS)
    optimizer = create_optimizer(model, args)
    scheduler = create_scheduler(optimizer, args, STEPS)
    rows = pretraining_dataset(load_files(f"{data}/texts.txt", cache_dir=f"{data}/cache"), tokenizer, 40)
    loader = RowLoader(rows, PretrainingCollator(tokenizer), args.per_device_train_batch_size)
    first, position = 0, None
    if resume:
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=f"{folder}/{family}-checkpoint")
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        first, position = SAVED_AFTER, {"rows": 8 * SAVED_AFTER}
        set_schedule_step(scheduler, first)
    objective, figures = PretrainingObjective(), []
    steps = loader.steps(accelerator.num_processes, accelerator.process_index, position)
    for number, step in enumerate(islice(steps, STEPS - first), start=first + 1):
        [batch] = step.batches
        counts = objective.num_targets(batch)
        totals = accelerator.reduce(dict(counts), "sum")
        losses = objective.losses(model(**batch))
        loss = sum(torch.where(counts[name] > 0, losses[name], 0.0) * counts[name] / totals[name] for name in losses)
        (loss * accelerator.num_processes).backward()
        norm = full(torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        figures.append([float(accelerator.reduce(loss.detach(), "sum")), float(norm)])
        if number == SAVED_AFTER and sharded and not resume:
            states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(states, checkpoint_id=f"{folder}/{family}-checkpoint")
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if accelerator.is_main_process:
        name = f"{family}-{accelerator.num_processes}{'-resumed' if resume else ''}"
        tiny_model(family, tokenizer, num_hidden_layers=2).double().save_pretrained(
            f"{folder}/{name}", state_dict=weights
        )
        Path(folder, f"{name}.json").write_text(json.dumps(figures))


def load_saved(data, folder):
    """Loads the saved weights of both families into other models, as a run does with its best one at the end."""
    tokenizer = AutoTokenizer.from_pretrained(data)
    create_accelerator()
    for family in FAMILIES:
        model = tiny_model(family, tokenizer, num_hidden_layers=2).double()
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        model = shard(model).eval()
        inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
        with torch.no_grad():
            before = model(**inputs).prediction_logits  # an evaluation leaves some parameters whole
        load_weights(model, f"{folder}/{family}-2")
        expected = AutoModelForPreTraining.from_pretrained(f"{folder}/{family}-2", dtype=torch.float64).eval()
        with torch.no_grad():
            after, wanted = model(**inputs).prediction_logits, expected(**inputs).prediction_logits
        torch.testing.assert_close(after, wanted, rtol=TOLERANCE, atol=TOLERANCE)
        assert not torch.allclose(before, after)
        weights = {name: full(weight) for name, weight in model.state_dict().items()}
        assert all(torch.equal(weight, expected.state_dict()[name]) for name, weight in weights.items())


def train_both(data, folder):
    for family in FAMILIES:
        train(family, data, folder, sharded=True)
        train(family, data, folder, sharded=True, resume=True)


@pytest.fixture(scope="module")
def runs(texts, tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharding")
    tokenizer.save_pretrained(folder)
    (folder / "texts.txt").write_text("\n\n".join(texts))
    for family in FAMILIES:
        train(family, str(folder), str(folder), sharded=False)
    codes, log = processes.run(train_both, str(folder), str(folder), folder=folder, num_processes=2)
    assert codes == [0, 0], log[-3000:]
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_two_processes_that_share_the_weights_train_as_one_that_has_them(family, runs):
    one, two = (json.loads((runs / f"{family}-{number}.json").read_text()) for number in (1, 2))
    assert len(one) == STEPS and one[-1][0] < one[0][0]
    for figures, others in zip(one, two, strict=True):
        assert others == pytest.approx(figures, rel=TOLERANCE)
    models = [AutoModelForPreTraining.from_pretrained(runs / f"{family}-{number}") for number in (1, 2)]
    for (name, weight), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(other, weight, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_they_go_on_from_what_each_saved(family, runs):
    whole, resumed = (json.loads((runs / f"{family}-2{kind}.json").read_text()) for kind in ("", "-resumed"))
    assert resumed == whole[SAVED_AFTER:]
    models = [AutoModelForPreTraining.from_pretrained(runs / f"{family}-2{kind}") for kind in ("", "-resumed")]
    for (name, weight), other in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(other, weight), name


def test_saved_weights_are_loaded_into_a_model_that_is_divided(runs):
    codes, log = processes.run(load_saved, str(runs), str(runs), folder=runs, num_processes=2)
    assert codes == [0, 0], log[-3000:]


def test_saved_weights_are_loaded_into_parameters_that_share_memory(tokenizer, tmp_path):
    """As those of DeepSpeed's ZeRO, stage 2, which are parts of one buffer."""
    saved, model = (tiny_model("nystromformer", tokenizer) for _ in range(2))
    saved.save_pretrained(tmp_path)
    buffer = torch.zeros_like(torch.nn.utils.parameters_to_vector(model.parameters()))
    torch.nn.utils.vector_to_parameters(buffer, model.parameters())
    load_weights(model, tmp_path)
    assert all(torch.equal(weight, saved.state_dict()[name]) for name, weight in model.state_dict().items())
    assert torch.equal(buffer, torch.nn.utils.parameters_to_vector(saved.parameters()))


def test_a_model_whose_biases_have_one_name_is_the_same_after_it_was_loaded(tokenizer, tmp_path):
    """Also a BERT, and in Transformers' own classes."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=len(tokenizer), **sizes)
    for model in (tiny_model("nystromformer", tokenizer).eval(), BertForPreTraining(config).eval()):
        with torch.no_grad():
            model.cls.predictions.bias.normal_()
        inputs = tokenizer(["one two", "three"], padding=True, return_tensors="pt")
        expected = model(**inputs)[0]
        remove_second_names(model)
        assert not any("predictions.bias" in name for name in model.state_dict())
        model.tie_weights()
        assert torch.equal(model(**inputs)[0], expected)
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert torch.equal(loaded(**inputs)[0], expected)
        assert loaded.cls.predictions.bias is loaded.cls.predictions.decoder.bias


def test_the_loop_leaves_biases_one_name_before_weights_are_divided(examples, tokenizer, monkeypatch):
    accelerator, model = create_accelerator(), tiny_model("nystromformer", tokenizer)

    def prepare(model, optimizer):
        raise RuntimeError(f"given {[name for name in model.state_dict() if name.endswith('decoder.bias')]}")

    loader = RowLoader(examples, PretrainingCollator(tokenizer), 4)
    monkeypatch.setattr(accelerator, "prepare", prepare)
    monkeypatch.setattr(type(accelerator), "distributed_type", DistributedType.FSDP)
    with pytest.raises(RuntimeError, match=r"given \['cls\.predictions\.decoder\.bias'\]"):
        loop.train(accelerator, model, PretrainingObjective(), loader, OptimizationArguments(4, max_train_steps=2))
    assert model.cls.predictions.bias is None
