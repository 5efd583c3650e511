# SPDX-License-Identifier: Apache-2.0
"""FSDP2 as in its launch file, by PyTorch's `fully_shard`, because Accelerate does not shard on CPUs."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForPreTraining, AutoTokenizer

from nystrom_models.data import PretrainingCollator, RowLoader, load_files, pretraining_dataset
from nystrom_models.training import (
    OptimizationArguments,
    PretrainingObjective,
    create_accelerator,
    create_optimizer,
    create_scheduler,
)
from nystrom_models.training.optimization import set_schedule_step
from tests.training import processes
from tests.training.models import FAMILIES, tiny_model

STEPS, SAVED_AFTER = 20, 11
LAUNCH = yaml.safe_load((Path(__file__).parents[2] / "configs" / "accelerate" / "fsdp2.yaml").read_text())
# For float64 models.
TOLERANCE = 1e-9


def shard(model):
    """Shards as Accelerate does with the launch file: first the layers it names, then the rest."""
    wrapped = LAUNCH["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"]
    reshard = LAUNCH["fsdp_config"]["fsdp_reshard_after_forward"]
    layers = [module for module in model.modules() if type(module).__name__ == wrapped]
    assert len(layers) == model.config.num_hidden_layers
    for layer in layers:
        fully_shard(layer, reshard_after_forward=reshard)
    return fully_shard(model, reshard_after_forward=reshard)


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
