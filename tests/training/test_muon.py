# SPDX-License-Identifier: Apache-2.0
"""Muon with AdamW: each updates its own parameters, and both are used as one optimizer."""

import copy

import pytest
import torch
from accelerate.utils import DistributedType
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, BertForMaskedLM

from nystrom_models.data import PretrainingCollator
from nystrom_models.data.loading import RowLoader
from nystrom_models.training import OptimizationArguments, create_accelerator, create_optimizer, muon, train
from nystrom_models.training.checkpoints import CheckpointArguments
from nystrom_models.training.muon import MuonAndAdamW, layer_matrices
from nystrom_models.training.objectives import PretrainingObjective
from tests.models.options import TINY, make_model, relative_error
from tests.training.models import tiny_model

# Of the change of a matrix, against float64; 0.027 and 3.3e-6 were measured.
TOLERANCES = {torch.bfloat16: 0.1, torch.float32: 1e-5}

OPTIONS = {"learning_rate": 1e-2, "weight_decay": 0.1, "optim": "muon"}


def set_gradients(*models):
    """Sets new random gradients, the same for each."""
    for parameters in zip(*(model.parameters() for model in models), strict=True):
        gradient = torch.randn_like(parameters[0])
        for parameter in parameters:
            parameter.grad = gradient.clone()


@pytest.mark.parametrize("option", ["nystromformer-landmarks", "linformer-none", "linear-hedgehog"])
def test_the_matrices_of_the_layers_are_muons(option):
    model = make_model(option, "ForPreTraining")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    chosen = {names[id(parameter)] for parameter in layer_matrices(model)}
    kinds = ("query", "key", "value", "attention.output.dense", "intermediate.dense", "output.dense")
    assert len(chosen) == 2 * len(kinds)
    assert all("encoder.layer." in name and name.removesuffix(".weight").endswith(kinds) for name in chosen)


def test_of_another_package():
    model = BertForMaskedLM(BertConfig(**TINY))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(names[id(parameter)].startswith("bert.encoder.layer.") for parameter in layer_matrices(model))
    assert len(layer_matrices(model)) == 6 * model.config.num_hidden_layers


def test_steps_are_those_of_either_optimizer(monkeypatch):
    """On a processor with bfloat16, to the last bit; also after the state was saved and loaded."""
    monkeypatch.setattr(muon, "has_fast_bfloat16", lambda: True)
    model = make_model("linformer-none", "ForPreTraining")
    alone = copy.deepcopy(model)
    optimizer = create_optimizer(model, OptimizationArguments(**OPTIONS))
    matrices = layer_matrices(alone)
    rest = [p for p in alone.parameters() if not any(p is matrix for matrix in matrices)]
    alone_muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    groups = [
        {"params": [p for p in rest if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2, eps=1e-6, fused=True)
    for step in range(4):
        set_gradients(model, alone)
        rate = 1e-2 / (1 + step)
        for part in (optimizer, alone_muon, adamw):
            for group in part.param_groups:
                group["lr"] = rate
            part.step()
        if step == 1:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = create_optimizer(model, OptimizationArguments(**OPTIONS))
            optimizer.load_state_dict(state)
        for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert torch.equal(ours, theirs), (step, name)
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


class ProductTypes(TorchDispatchMode):
    """Records the dtypes of matrix products."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.bmm, torch.ops.aten.baddbmm):
            self.seen.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_processors_without_bfloat16_orthogonalize_in_float32(fast, dtype, monkeypatch):
    """There, a product in bfloat16 takes up to tens of times as long. The steps differ only by its rounding, and
    gradients stay as they are."""
    monkeypatch.setattr(muon, "has_fast_bfloat16", lambda: fast)
    model = make_model("linformer-none", "ForPreTraining")
    before, exact = copy.deepcopy(model), copy.deepcopy(model)
    set_gradients(model, exact)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    products = ProductTypes()
    with products:
        create_optimizer(model, OptimizationArguments(**OPTIONS)).step()
    assert set(products.seen) == {dtype}
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(model.parameters(), gradients, strict=True))
    reference = torch.optim.Muon(
        layer_matrices(exact.double()), lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # float64
        patch.setattr(torch.Tensor, "to", lambda tensor, **_: tensor.clone())  # from PyTorch 2.15 on
        reference.step()
    for ours, theirs, start in zip(*map(layer_matrices, (model, exact, before)), strict=True):
        assert relative_error(ours - start, theirs - start) < TOLERANCES[dtype]


def test_matrices_of_one_shape_are_computed_together(monkeypatch):
    """Five iterations of three products for each of the three shapes; or, where memory bounds it, for each matrix."""
    model = make_model("linformer-none", "ForPreTraining")
    matrices = layer_matrices(model)
    assert len(matrices) == 12 and len({matrix.shape for matrix in matrices}) == 3
    alone = copy.deepcopy(model)
    set_gradients(model, alone)
    for several, number in ((model, 3), (alone, 12)):
        products = ProductTypes()
        with products:
            create_optimizer(several, OptimizationArguments(**OPTIONS)).step()
        assert len(products.seen) == 15 * number
        monkeypatch.setitem(muon.MOST_NUMBERS, "cpu", 1)
    for ours, theirs in zip(matrices, layer_matrices(alone), strict=True):
        assert relative_error(ours, theirs) < 1e-2


def test_on_a_cpu_few_matrices_are_computed_together():
    """Two of 2**20 numbers: all four would take twice the memory, and longer."""
    matrices = [nn.Parameter(torch.randn(64, 2**14)) for _ in range(4)]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    products = ProductTypes()
    with products:
        muon.BatchedMuon(matrices, adjust_lr_fn="match_rms_adamw").step()
    assert len(products.seen) == 15 * 2


def run(tokenizer, examples, folder, **options):
    torch.manual_seed(0)
    model = tiny_model("nystromformer", tokenizer)
    train(
        create_accelerator(),
        model,
        PretrainingObjective(),
        RowLoader(examples, PretrainingCollator(tokenizer), 8),
        OptimizationArguments(8, max_train_steps=6, optim="muon", learning_rate=1e-3),
        checkpoints=CheckpointArguments(str(folder), 2, **options),
    )
    return model


def test_a_resumed_run_is_the_whole_one(tokenizer, examples, tmp_path):
    expected = run(tokenizer, examples, tmp_path).state_dict()
    resumed = run(tokenizer, examples, tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    for name, tensor in resumed.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_what_it_is_not_for(tokenizer, examples, monkeypatch):
    with pytest.raises(ValueError, match="--optim must be one of adamw, muon, but is sgd"):
        OptimizationArguments(optim="sgd")
    with pytest.raises(ValueError, match=r"--optim muon trains the matrices of layers, but Linear has none"):
        create_optimizer(nn.Linear(2, 2), OptimizationArguments(optim="muon"))
    frozen = make_model("linformer-none")
    for matrix in layer_matrices(frozen)[1:]:
        matrix.requires_grad_(False)
    assert len(create_optimizer(frozen, OptimizationArguments(optim="muon")).param_groups[0]["params"]) == 1
    accelerator = create_accelerator()
    monkeypatch.setattr(type(accelerator), "distributed_type", DistributedType.FSDP)
    with pytest.raises(ValueError, match="--optim muon needs whole matrices, and FSDP divides them: use adamw"):
        train(
            accelerator,
            tiny_model("linformer", tokenizer),
            PretrainingObjective(),
            RowLoader(examples, PretrainingCollator(tokenizer), 8),
            OptimizationArguments(8, max_train_steps=1, optim="muon"),
        )


def test_it_is_one_optimizer():
    optimizer = create_optimizer(make_model("linformer-none"), OptimizationArguments(**OPTIONS))
    assert isinstance(optimizer, MuonAndAdamW) and len(optimizer.param_groups) == 3
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert {group["lr"] for part in optimizer.parts for group in part.param_groups} == {5e-3} and schedule
    losses = []
    assert optimizer.step(lambda: losses.append(1) or 7.0) == 7.0 and losses == [1]
