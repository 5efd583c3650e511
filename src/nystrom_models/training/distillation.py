# SPDX-License-Identifier: Apache-2.0
"""Training with a teacher: first its attention is matched, layer by layer; then its hidden states and logits.

The first part follows LoLCATs (Zhang et al. 2024, arXiv:2410.10254, section 3.2), the second DistilBERT
(Sanh et al. 2019, arXiv:1910.01108, section 2), whose flags are used here.

Legend: B rows, N tokens of a row, C hidden size, V vocabulary, T masked tokens.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..conversion.sources import source_fields
from ..conversion.weights import is_of_a_family
from ..models.batch import make_batch
from ..models.self_attention import SelfAttention
from .objectives import Batch, Objective, Preparation, PretrainingObjective, classification_scores
from .saving import bare_model
from .sharding import SHARDED
from .teacher import FLAG, Teacher, TeacherAttention, TeacherOutputs

# The defaults of flags that need a teacher. Without a teacher, these flags are None.
_DEFAULTS: dict[str, Any] = {
    "attention_matching_steps": 0,
    "attention_matching_parameters": "all",
    "temperature": 2.0,
    "alpha_ce": 1.0,
    "alpha_mlm": 1.0,
    "alpha_mse": 1.0,
    "alpha_cos": 0.0,
}


@dataclass(kw_only=True)
class TeacherArguments:
    """The teacher and the weights of its losses. The flags have the names of DistilBERT's training script."""

    teacher_model_name_or_path: str | None = field(
        default=None,
        metadata={
            "help": "Teacher: the encoder that the model was converted from, such as a BERT or RoBERTa, or another "
            "encoder with the same vocabulary. It is not trained. It reads rows that are too long for it in windows, "
            "each of which begins and ends with the special tokens of a row. With --no_do_train, its predictions of "
            "the same masked tokens are scored beside the model's."
        },
    )
    attention_matching_steps: int | None = field(
        default=None,
        metadata={
            "help": "With a teacher: number of first steps that train only the attention. Each layer gets the "
            "teacher's input to that layer and is trained to give the teacher's output (mean squared error). "
            "0 by default. --max_train_steps includes these steps; the schedule begins after them."
        },
    )
    attention_matching_parameters: Literal["all", "added"] | None = field(
        default=None,
        metadata={
            "help": "What these steps train: 'all' parameters of the attention (the default), or 'added': only those "
            "that the source's attention does not have (feature maps, projections of the tokens, convolutions)."
        },
    )
    attention_matching_learning_rate: float | None = field(
        default=None,
        metadata={"help": "Constant learning rate of these steps; by default 1e-3 for 'all' and 1e-2 for 'added'."},
    )
    temperature: float | None = field(
        default=None,
        metadata={"help": "With a teacher: temperature of both softmaxes in the loss of --alpha_ce; 2 by default."},
    )
    alpha_ce: float | None = field(
        default=None,
        metadata={
            "help": "With a teacher: weight of the Kullback-Leibler divergence between its predictions of masked "
            "tokens and the model's, times the square of the temperature; 1 by default."
        },
    )
    alpha_mlm: float | None = field(
        default=None, metadata={"help": "With a teacher: weight of the loss of masked tokens; 1 by default."}
    )
    alpha_mse: float | None = field(
        default=None,
        metadata={
            "help": "With a teacher: weight of the mean squared error of the hidden states, over all layers; 1 by "
            "default. It needs a teacher of the same width and depth."
        },
    )
    alpha_cos: float | None = field(
        default=None,
        metadata={
            "help": "With a teacher: weight of 1 - cosine between hidden states, over all layers; 0 by default. It "
            "needs a teacher of the same width and depth."
        },
    )

    def __post_init__(self):
        rate = "attention_matching_learning_rate"
        given = [name for name in (*_DEFAULTS, rate) if getattr(self, name) is not None]
        if self.teacher_model_name_or_path is None:
            if given:
                raise ValueError(f"--{given[0]} needs a teacher: also give {FLAG}.")
            return
        for name, value in _DEFAULTS.items():
            if getattr(self, name) is None:
                setattr(self, name, value)
        if self.attention_matching_learning_rate is None:
            self.attention_matching_learning_rate = 1e-2 if self.attention_matching_parameters == "added" else 1e-3
        for name in ("attention_matching_steps", "alpha_ce", "alpha_mlm", "alpha_mse", "alpha_cos"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"--{name} must be at least 0, but is {getattr(self, name)}.")
        for name in ("temperature", rate):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name} must be positive, but is {getattr(self, name)}.")
        if self.attention_matching_parameters not in ("all", "added"):
            raise ValueError(
                f"--attention_matching_parameters must be all or added, but is {self.attention_matching_parameters}."
            )
        if not (self.attention_matching_steps or self.alpha_ce or self.alpha_mse or self.alpha_cos):
            raise ValueError(
                f"{FLAG} teaches nothing: give --alpha_ce, --alpha_mse, --alpha_cos or --attention_matching_steps a "
                "value above 0."
            )


@dataclass
class Taught:
    """The model's outputs for a batch, and the losses that the teacher adds: tensors of shape (), by name."""

    outputs: Any
    losses: dict[str, Tensor]


class DistillationObjective(Objective):
    """Adds the losses of hidden states and logits to another objective.

    - `ce_loss`: Kullback-Leibler divergence of the model's predictions from the teacher's, both at the temperature,
      times its square (Hinton et al. 2015, arXiv:1503.02531, section 2), mean over the masked tokens.
    - `mse_loss`: mean squared error of the outputs of all layers, mean over tokens, layers and units.
    - `cos_loss`: 1 - cosine between them, mean over tokens and layers.

    Args:
        objective: the losses of the data.
        teacher: on the accelerator's device.
        accelerator: of the run; the teacher runs in its precision.
        args: the weights of the losses. A loss of weight 0 is not computed.
    """

    def __init__(self, objective: Objective, teacher: Teacher, accelerator: Accelerator, args: TeacherArguments):
        self.objective, self.teacher, self.accelerator = objective, teacher, accelerator
        self.temperature = args.temperature or 1.0
        added = {"ce_loss": args.alpha_ce, "mse_loss": args.alpha_mse, "cos_loss": args.alpha_cos}
        self.added = {name: weight for name, weight in added.items() if weight}
        mlm = 1.0 if args.alpha_mlm is None else args.alpha_mlm
        self.weights: Mapping[str, float] = {**objective.weights, "mlm_loss": mlm, **self.added}

    def num_targets(self, batch: Batch) -> dict[str, Tensor]:
        """As `Objective.num_targets`."""
        seen = self.teacher.cutter.seen(batch["attention_mask"])
        masked = seen & (batch["labels"] != -100)
        counts = {name: (masked if name == "ce_loss" else seen).sum() for name in self.added}
        return {**self.objective.num_targets(batch), **counts}

    def forward(self, model: nn.Module, batch: Batch) -> Taught:
        """As `Objective.forward`."""
        with_states = "mse_loss" in self.added or "cos_loss" in self.added
        seen = self.teacher.cutter.seen(batch["attention_mask"])
        masked = batch["labels"] != -100
        with self.accelerator.autocast():
            theirs = self.teacher(batch, masked & seen if "ce_loss" in self.added else None, with_states)
        outputs = model(**batch, output_hidden_states=with_states)
        return Taught(outputs, self._compare(outputs, theirs, masked, seen))

    def losses(self, outputs: Taught) -> dict[str, Tensor]:
        """As `Objective.losses`."""
        return {**self.objective.losses(outputs.outputs), **outputs.losses}

    def scores(self, outputs: Taught, batch: Batch, with_loss: bool = True) -> dict[str, tuple[Tensor, Tensor]]:
        """As `Objective.scores`: those of the data."""
        return self.objective.scores(outputs.outputs, batch, with_loss)

    def _compare(self, outputs: Any, theirs: TeacherOutputs, masked: Tensor, seen: Tensor) -> dict[str, Tensor]:
        losses = {}
        if theirs.logits is not None:
            logits = outputs.prediction_logits
            logits = logits[masked & seen] if logits.dim() == 3 else logits[seen[masked]]
            losses["ce_loss"] = divergence(logits, theirs.logits, self.temperature, self.teacher.vocab_size)
        if theirs.hidden_states:
            states = outputs.hidden_states[1:]
            pairs = [
                (own[seen].float(), their[seen].float())
                for own, their in zip(states, theirs.hidden_states, strict=True)
            ]
            if "mse_loss" in self.added:
                losses["mse_loss"] = torch.stack([F.mse_loss(own, their) for own, their in pairs]).mean()
            if "cos_loss" in self.added:
                cosines = [F.cosine_similarity(own, their, dim=-1).mean() for own, their in pairs]
                losses["cos_loss"] = 1 - torch.stack(cosines).mean()
        return losses


class ScoresBesideTeacher(PretrainingObjective):
    """The scores of MLM + SOP, and `teacher_mlm_loss` and `teacher_mlm_accuracy`: the teacher's scores for the same
    masked tokens. The few tokens that are in none of its windows count only for the model, see [`Cutter`].

    Args:
        teacher: on the accelerator's device.
        accelerator: of the run.
    """

    def __init__(self, teacher: Teacher, accelerator: Accelerator):
        self.teacher, self.accelerator = teacher, accelerator

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Any, Tensor]:
        """As `Objective.forward`: the model's outputs, and the teacher's logits (T, V) for the tokens that count."""
        with self.accelerator.autocast():
            theirs = self.teacher(batch, self._labels(batch) != -100)
        assert theirs.logits is not None
        return model(**batch), theirs.logits

    def scores(
        self, outputs: tuple[Any, Tensor], batch: Batch, with_loss: bool = True
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """As `Objective.scores`."""
        own, logits = outputs
        names = ("teacher_mlm_loss", "teacher_mlm_accuracy")
        theirs = classification_scores(logits, self._labels(batch), *names, with_loss)
        return {**super().scores(own, batch, with_loss), **theirs}

    def _labels(self, batch: Batch) -> Tensor:
        """(B, N), -100 also for tokens that are in no window of the teacher."""
        return batch["labels"].masked_fill(~self.teacher.cutter.seen(batch["attention_mask"]), -100)


def divergence(logits: Tensor, teacher_logits: Tensor, temperature: float, vocab_size: int) -> Tensor:
    """The Kullback-Leibler divergence of a model's predictions (T, V) from its teacher's, both at a temperature, times
    its square: in nats, the mean over the tokens, (). If the vocabularies are padded to different
    sizes, only the first `vocab_size` tokens are compared."""
    if logits.shape[-1] != teacher_logits.shape[-1]:
        logits, teacher_logits = logits[..., :vocab_size], teacher_logits[..., :vocab_size]
    own, their = ((part.float() / temperature).log_softmax(dim=-1) for part in (logits, teacher_logits))
    return F.kl_div(own, their, reduction="batchmean", log_target=True) * temperature**2


class AttentionMatchingObjective(Objective):
    """Trains the attention of each layer to give the teacher's output for the teacher's input.

    - `attention_loss`: mean squared error of the concatenated heads, before the linear layer that follows; mean over
      tokens, layers and units. Dropout is off.
    - `attention_error`, a score: the sum of the squared errors, divided by the sum of the teacher's squares.

    Model and teacher read the same windows. Only the attention is computed, and only it gets gradients.

    Args:
        teacher: on the accelerator's device.
        accelerator: of the run.
        only_added: whether to train only the parameters that the source does not have, see [`is_of_a_family`].
    """

    is_partial = True

    def __init__(self, teacher: Teacher, accelerator: Accelerator, only_added: bool):
        self.teacher, self.accelerator, self.only_added = teacher, accelerator, only_added

    def num_targets(self, batch: Batch) -> dict[str, Tensor]:
        """As `Objective.num_targets`."""
        return {"attention_loss": self.teacher.cutter.seen(batch["attention_mask"]).sum()}

    def forward(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """As `Objective.forward`: the sum of the squared errors, the sum of the teacher's squares, and the number of
        values in each."""
        with self.accelerator.autocast():
            theirs = self.teacher.attention(batch)
            outputs = self._outputs(bare_model(self.accelerator, model), theirs)
        own = theirs.windows.own
        errors, squares = torch.zeros((), device=own.device), torch.zeros((), device=own.device)
        for ours, their in zip(outputs, theirs.outputs, strict=True):
            wanted = their[own].float()
            errors = errors + (ours[own].float() - wanted).square().sum()
            squares = squares + wanted.square().sum()
        return errors, squares, own.sum() * sum(their.shape[-1] for their in theirs.outputs)

    def losses(self, outputs: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
        """As `Objective.losses`."""
        errors, _, count = outputs
        return {"attention_loss": errors / count}

    def scores(
        self, outputs: tuple[Tensor, Tensor, Tensor], batch: Batch, with_loss: bool = True
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """As `Objective.scores`."""
        errors, squares, _ = outputs
        return {"attention_error": (errors, squares)}

    def _outputs(self, model: PreTrainedModel, theirs: TeacherAttention) -> list[Tensor]:
        """The output of each layer's attention for the teacher's inputs, (W, L, C)."""
        encoder: Any = model.base_model.encoder
        mask = theirs.windows.inputs["attention_mask"].bool()
        batch = make_batch(mask, (mask.shape[0], mask.shape[1]), mask.device, pack=False)
        outputs = []
        with self._trained(model):
            batch.plan = encoder.plan(batch)
            for layer, states in zip(encoder.layer, theirs.inputs, strict=True):
                block = layer.attention
                states = states if block.LayerNorm is None else block.LayerNorm(states).detach()
                outputs.append(block.self(states, batch))
        return outputs

    @contextmanager
    def _trained(self, model: PreTrainedModel) -> Iterator[None]:
        """Switches dropout off, and keeps gradients from parameters that are not trained."""
        attentions = [module for module in model.modules() if isinstance(module, SelfAttention)]
        training = attentions[0].training
        frozen = [
            parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and self.only_added and not is_of_a_family(name)
        ]
        for attention in attentions:
            attention.eval()
        for parameter in frozen:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(True)
            for attention in attentions:
                attention.train(training)


def with_teacher(
    objective: Objective,
    teacher: Teacher,
    model: PreTrainedModel,
    accelerator: Accelerator,
    args: TeacherArguments,
) -> Objective:
    """Adds the losses of a teacher to an objective.

    Args:
        objective: the losses of the data.
        teacher: see [`Teacher`]; it is moved to the accelerator's device.
        model: the model that is trained.
        accelerator: of the run.
        args: the flags.

    Raises:
        ValueError: if layers should be compared and the teacher has others than the model, if the first steps would
            train nothing, or if weights are divided over processes (FSDP, DeepSpeed).
    """
    if accelerator.distributed_type in SHARDED:
        raise ValueError(
            f"{FLAG} needs whole layers, but {accelerator.distributed_type.value} divides them: use a launch file of "
            "configs/accelerate/ without sharding."
        )
    steps = args.attention_matching_steps or 0
    _check_layers(teacher, model, [name for name in ("alpha_mse", "alpha_cos") if getattr(args, name)], steps)
    only_added = args.attention_matching_parameters == "added"
    if steps and only_added and not any(is_of_a_family(name) for name, _ in model.named_parameters()):
        raise ValueError(
            f"--attention_matching_parameters added: the attention of {type(model).__name__} has no parameters "
            "that its source does not have. Use all, or a configuration with a convolution (conv_kernel_size)."
        )
    teacher.to(accelerator.device)
    taught = DistillationObjective(objective, teacher, accelerator, args)
    if steps:
        matching = AttentionMatchingObjective(teacher, accelerator, only_added)
        taught.preparation = Preparation(steps, args.attention_matching_learning_rate or 0.0, matching)
    return taught


def _check_layers(teacher: Teacher, model: PreTrainedModel, compared: list[str], steps: int) -> None:
    """Raises ValueError if layers should be compared and differ in number or width."""
    flags = [f"--{name} 0" for name in compared] + (["--attention_matching_steps 0"] if steps else [])
    theirs, own = source_fields(teacher.config), model.config.to_dict()
    names = ("num_hidden_layers", "hidden_size", *(("num_attention_heads",) if steps else ()))
    if flags and (wrong := [name for name in names if theirs[name] != own[name]]):
        found = ", ".join(f"{name}={theirs[name]}, and the model {own[name]}" for name in wrong)
        raise ValueError(
            f"{FLAG} {teacher.name} has {found}: each layer is compared with that of the same number. Give the "
            f"encoder that the model was converted from, or use only the logits: {' '.join(flags)}."
        )
