# SPDX-License-Identifier: Apache-2.0
"""Which unchanged architectures of Transformers work with Nyström attention: `python -m benchmarks architectures`.

Each is compared, with random weights, with the same weights and `sdpa`. For one that refuses, the table has its
message. One whose output does not change at all does not use the attention, and does not count as running.
"""

import contextlib
import dataclasses
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.architectures import ARCHITECTURES, Architecture, Inputs
from nystrom_models import use_nystrom

LANDMARKS, MANY_LANDMARKS = 8, 64
# Relative to the largest entry, in float32.
TOLERANCE = 1e-5
# The smallest difference between few landmarks and exact attention that shows that Nyström attention was used.
CHANGE = 1e-3


@dataclasses.dataclass
class Answer:
    """The results of an architecture: largest differences, relative to the largest entry.

    refusal: why it does not run; None if it runs.
    exact: output, from `sdpa`, with more landmarks than tokens. exact_gradient: the same for the gradients of all
        parameters.
    change: output, from `sdpa`, with few landmarks.
    padding: between a row alone and padded, and between two contents of padding; None for models that take no mask.
    own_padding: the same with `sdpa`: in some models padding has an effect outside attention, by convolutions over the
        tokens.
    gradients: with few landmarks, the number of parameters whose gradients are finite and not all zero, and the number
        with `sdpa`.
    loading: between the model and its copy that was saved and loaded.
    """

    refusal: str | None = None
    exact: float | None = None
    exact_gradient: float | None = None
    change: float | None = None
    padding: float | None = None
    own_padding: float | None = None
    gradients: tuple[int, int] | None = None
    loading: float | None = None

    @property
    def lets_padding_in(self) -> bool:
        """Whether padding changes the states of tokens with any attention."""
        return self.own_padding is not None and self.own_padding > TOLERANCE

    def faults(self) -> list[str]:
        """What is wrong with an architecture that runs."""
        if self.refusal is not None:
            return []
        assert self.gradients is not None and self.change is not None
        differences = {
            name: getattr(self, name)
            for name in ("exact", "exact_gradient", "padding", "loading")
            if getattr(self, name) is not None and not (name == "padding" and self.lets_padding_in)
        }
        found = [f"{name} differs by {value:.1e}" for name, value in differences.items() if not value <= TOLERANCE]
        if self.change < CHANGE:
            found.append("few landmarks change nothing: the attention is not used")
        if self.gradients[0] != self.gradients[1]:
            found.append(f"{self.gradients[0]} of {self.gradients[1]} parameters have gradients")
        return found


def difference(left: Tensor, right: Tensor) -> float:
    return ((left - right).abs().max() / right.abs().max()).item()


def gradients_of(architecture: Architecture, model: PreTrainedModel, inputs: Inputs) -> dict[str, Tensor]:
    """The gradients of a weighted sum of the outputs, by the parameters' names, without those that are all zero."""
    output = architecture.output(model, inputs)
    weights = torch.linspace(-1, 1, output.numel()).view_as(output)
    model.zero_grad()
    (output * weights).sum().backward()
    found = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    return {name: gradient for name, gradient in found.items() if gradient.any()}


def gradient_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """The largest difference, relative to the largest entry of all gradients: some are zero except for rounding."""
    if left.keys() != right.keys():
        return float("inf")
    scale = max(gradient.abs().max() for gradient in right.values())
    return max(((left[name] - right[name]).abs().max() / scale).item() for name in right)


def padding_difference(architecture: Architecture, model: PreTrainedModel, inputs: Inputs) -> float:
    """The difference between a row alone and in a batch that pads it, and between two contents of the padding."""
    assert architecture.padded is not None
    name, per_token = architecture.padded
    padded = dict(inputs)
    main = next(iter(inputs))
    length = inputs[main].shape[1]
    keep = length * 3 // 4 // per_token * per_token
    mask = torch.ones(inputs[main].shape[:2], dtype=torch.long)
    mask[1, keep:] = 0
    padded[name] = mask
    padded[main] = inputs[main].masked_fill(~mask.bool().view(*mask.shape, *[1] * (inputs[main].dim() - 2)), 0)
    row = {key: value[1:2] for key, value in padded.items()}
    row |= {key: row[key][:, :keep] for key in (name, main)}
    if "spatial_shapes" in padded:
        padded["spatial_shapes"] = torch.tensor([[5, length // 5], [5, keep // 5]])
        row["spatial_shapes"] = padded["spatial_shapes"][1:]
    together = architecture.output(model, padded)
    alone = architecture.output(model, row)
    differences = [difference(together[1:, : alone.shape[1]], alone)]
    other = dict(padded)
    other[main] = torch.where(padded[main] == inputs[main], padded[main], inputs[main])
    if per_token == 1:
        other_states = architecture.output(model, other)[1:, : alone.shape[1]]
        differences.append(difference(other_states, together[1:, : alone.shape[1]]))
    return max(differences)


def loaded(architecture: Architecture, model: PreTrainedModel) -> PreTrainedModel:
    """The model saved and loaded, with its attention named as a user does."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        if architecture.part is not None and architecture.key is None:
            copy = type(model).from_pretrained(folder)
            use_nystrom(architecture.part_of(copy))
        else:
            name = "nystrom" if architecture.key is None else {architecture.key: "nystrom"}
            copy = type(model).from_pretrained(folder, attn_implementation=name)
    return copy.eval()


def try_out(architecture: Architecture) -> Answer:
    """The results of an architecture with Nyström attention."""
    torch.manual_seed(0)
    model = architecture.build()
    inputs = architecture.inputs(2)
    part = architecture.part_of(model)
    expected = architecture.output(model, inputs).detach()
    expected_gradients = gradients_of(architecture, model, inputs)
    answer = Answer()
    if architecture.padded is not None:
        with torch.no_grad():
            answer.own_padding = padding_difference(architecture, model, inputs)
    try:
        use_nystrom(part, MANY_LANDMARKS)
        answer.exact = difference(architecture.output(model, inputs).detach(), expected)
        answer.exact_gradient = gradient_difference(gradients_of(architecture, model, inputs), expected_gradients)
        use_nystrom(part, LANDMARKS)
        few = architecture.output(model, inputs).detach()
    except ValueError as error:
        return Answer(refusal=str(error))
    answer.change = difference(few, expected)
    found = gradients_of(architecture, model, inputs)
    usable = [name for name in expected_gradients if name in found and found[name].isfinite().all()]
    answer.gradients = (len(usable), len(expected_gradients))
    with torch.no_grad():
        if architecture.padded is not None:
            answer.padding = padding_difference(architecture, model, inputs)
        answer.loading = difference(architecture.output(loaded(architecture, model), inputs), few)
    return answer


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses warnings about configurations that differ from those of trained models."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
        transformers.logging.enable_progress_bar()


Answers = dict[str, Answer]


def measure(
    architectures: Iterable[Architecture] = ARCHITECTURES, report: Callable[[str], None] = lambda line: None
) -> Answers:
    answers = {}
    with quiet():
        for architecture in architectures:
            answers[architecture.name] = answer = try_out(architecture)
            said = answer.refusal or ", ".join(answer.faults()) or "runs"
            report(f"{architecture.name}: {said}")
    return answers


def table(answers: Answers) -> str:
    """The Markdown tables: first of those that run, then of those that refuse, with the reason."""
    kinds = {architecture.name: architecture.kind for architecture in ARCHITECTURES}
    lines = [
        "Small models with random weights, float32 on a CPU. Differences are relative to the largest entry.",
        f"Short rows have fewer tokens than the {MANY_LANDMARKS} landmarks. Few landmarks are {LANDMARKS}. Padding:",
        "with few landmarks, a row alone against the same row padded, and two contents of the padding.",
        "",
        "| architecture | kind | short rows against `sdpa`: output, gradients | few landmarks change the output by "
        "| padding | gradients | saved and loaded |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    running = {name: answer for name, answer in answers.items() if answer.refusal is None}
    for name, answer in running.items():
        padding = "not padded" if answer.padding is None else f"{answer.padding:.0e}"
        if answer.lets_padding_in:
            padding = f"seen outside attention, {answer.own_padding:.0e} with `sdpa`"
        given, wanted = answer.gradients or (0, 0)
        cells = [
            name,
            kinds[name],
            ", ".join(f"{value:.0e}" if value else "equal" for value in (answer.exact, answer.exact_gradient)),
            f"{answer.change:.0%}",
            padding,
            f"{given} of {wanted}",
            "equal" if answer.loading == 0 else f"{answer.loading:.0e}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    refusing = {name: answer.refusal for name, answer in answers.items() if answer.refusal is not None}
    lines += [
        "",
        f"{len(running)} run, {len(refusing)} refuse.",
        "",
        "| refuses | kind | its message |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {name} | {kinds[name]} | {reason} |" for name, reason in refusing.items()]
    return "\n".join(lines)


def failures(answers: Answers) -> list[str]:
    return [f"{name}: {fault}" for name, answer in answers.items() for fault in answer.faults()]
