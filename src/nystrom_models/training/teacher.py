# SPDX-License-Identifier: Apache-2.0
"""A teacher: the encoder that a model was converted from. It gives its attention, hidden states and logits.

Legend: B rows, N tokens of a row, W windows, L tokens of a window, C hidden size, V vocabulary, T chosen tokens.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedTokenizerBase
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from ..analysis.substitution import attending_by
from ..checkpoint import load_tokenizer
from ..conversion.reading import without_load_report
from ..conversion.sources import source_fields, source_kind
from ..data.special_tokens import Template
from ..models.modeling_base import BasePreTrainedModel
from ..models.self_attention import SelfAttention
from .identity import vocabulary_digest, weights_digest
from .objectives import Batch
from .teacher_windows import Cutter, Windows

FLAG = "--teacher_model_name_or_path"


@dataclass
class TeacherOutputs:
    """The outputs of a teacher for a batch.

    logits: (T, V), of the chosen tokens; None if they were not requested.
    hidden_states: the output of each layer, (B, N, C), undefined at padding and at tokens that are in no window;
        empty if they were not requested.
    """

    logits: Tensor | None
    hidden_states: tuple[Tensor, ...]


@dataclass
class TeacherAttention:
    """The attention of a teacher for the windows of a batch.

    windows: the teacher's inputs.
    inputs: the hidden states that enter each layer, (W, L, C).
    outputs: of each layer's attention, the concatenated heads before the linear layer that follows, (W, L, C).
    """

    windows: Windows
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class Teacher:
    """A trained encoder in evaluation mode, run without gradients.

    It is not an `nn.Module`, so that nothing saves, prepares or trains it. It reads rows that are too long for it in
    windows, see [`Cutter`].

    Args:
        name: a folder or a name on the Hub, with a tokenizer: an encoder that [`convert`] takes, of its own class.
        tokenizer: of the model that is trained.
        with_logits: whether logits will be requested. If not, it needs no head that predicts tokens.

    Raises:
        ValueError: if it is of another kind, its vocabulary is another than `tokenizer`'s, or it has no head that
            predicts tokens.
    """

    def __init__(self, name: str, tokenizer: PreTrainedTokenizerBase, with_logits: bool = True):
        self.name = name
        self.config = AutoConfig.from_pretrained(name)
        try:
            kind = source_kind(self.config)
        except ValueError as error:
            raise ValueError(f"{FLAG} {name} cannot be a teacher. {error}") from error
        if getattr(self.config, "is_decoder", False):
            raise ValueError(f"{FLAG} {name} is a causal model, which sees only the tokens before: give an encoder.")
        _check_vocabulary(name, tokenizer)
        with without_load_report():
            # Half precision is that of the run, by autocast: a checkpoint's own would not be the trained model's.
            # Feed-forward layers in parts would give the same, but only for lengths that are multiples of a part.
            model, info = AutoModelForMaskedLM.from_pretrained(
                name, dtype=torch.float32, output_loading_info=True, chunk_size_feed_forward=0
            )
        if info["missing_keys"] and with_logits:
            raise ValueError(
                f"{FLAG} {name} has no trained head that predicts tokens: the checkpoint lacks "
                f"{', '.join(sorted(info['missing_keys'])[:3])}. Give one saved from a ForMaskedLM or ForPreTraining "
                "class or, in a training, leave out its logits: --alpha_ce 0."
            )
        if isinstance(model, BasePreTrainedModel):
            # Otherwise hidden states would be packed, without padding.
            model.config.unpad_inputs = False
        self.model: Any = model.eval().requires_grad_(False)
        self.longest = kind.longest(self.config)
        self.num_types = getattr(self.config, "type_vocab_size", 0)
        before, after = Template(tokenizer, 1).special
        self.cutter = Cutter(self.longest, before, after, tokenizer.pad_token_id)
        self.vocab_size = len(tokenizer)
        self.digest = weights_digest(name, self.config)
        self._arguments = inspect.signature(model.forward).parameters

    def to(self, device: torch.device) -> "Teacher":
        """Moves it to a device."""
        self.model.to(device)
        return self

    @torch.no_grad()
    def __call__(self, batch: Batch, chosen: Tensor | None = None, with_states: bool = False) -> TeacherOutputs:
        """Its outputs for a batch.

        Args:
            batch: as for `Cutter.cut`.
            chosen: (B, N) bool, the tokens whose logits are returned, in the order of the batch as given. All of them
                must be in a window (`Cutter.seen`).
            with_states: whether to return the hidden states.
        """
        windows = self.cutter.cut(batch)
        if chosen is None:
            outputs = self._run(self.model.base_model, windows, with_states)
            logits = None
        else:
            wanted = windows.bring(chosen).bool() & windows.own
            with _states_of(self.model.base_model, wanted):
                outputs = self._run(self.model, windows, with_states)
            # Windows are in the order of their rows, so the tokens are, too.
            logits = outputs.logits.flatten(0, -2)
        states = tuple(windows.take_back(state) for state in outputs.hidden_states[1:]) if with_states else ()
        return TeacherOutputs(logits, states)

    @torch.no_grad()
    def attention(self, batch: Batch) -> TeacherAttention:
        """Its attention for a batch, layer by layer."""
        windows = self.cutter.cut(batch)
        found: list[Tensor] = []
        with _caught_attention(self.model, found):
            outputs = self._run(self.model.base_model, windows, True)
        self._require_layers(len(found), "--attention_matching_steps 0")
        return TeacherAttention(windows, outputs.hidden_states[:-1], tuple(found))

    def _require_layers(self, number: int, instead: str) -> None:
        """Raises ValueError if the outputs are not those of all layers."""
        layers = source_fields(self.config)["num_hidden_layers"]
        if number != layers:
            raise ValueError(
                f"{FLAG} {self.name} has {layers} layers, but Transformers returns the outputs of {number}. Leave out "
                f"what compares them: {instead}."
            )

    def _run(self, model: Any, windows: Windows, with_states: bool) -> Any:
        inputs = dict(windows.inputs)
        types = inputs.pop("token_type_ids")
        if "token_type_ids" in self._arguments and self.num_types > 1:
            inputs["token_type_ids"] = types
        outputs = model(**inputs, output_hidden_states=with_states)
        if with_states:
            self._require_layers(
                len(outputs.hidden_states) - 1, "--attention_matching_steps 0 --alpha_mse 0 --alpha_cos 0"
            )
        return outputs


def _check_vocabulary(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    try:
        theirs = load_tokenizer(name)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{FLAG} {name} has no tokenizer ({error}): save its tokenizer in that folder by "
            "tokenizer.save_pretrained()."
        ) from error
    if vocabulary_digest(theirs) != vocabulary_digest(tokenizer):
        raise ValueError(
            f"{FLAG} {name} has a tokenizer of {len(theirs)} tokens, and the model's has {len(tokenizer)}"
            f"{'' if len(theirs) != len(tokenizer) else ', but they differ'}: a teacher and its model "
            "need the same vocabulary. Give the encoder that --model_name_or_path was converted from, and leave out "
            "--tokenizer_name."
        )


@contextmanager
def _states_of(base_model: nn.Module, chosen: Tensor) -> Iterator[None]:
    """Passes only the states of the chosen tokens, (W, L) bool, to the head, as (1, T, C)."""

    def choose(module: nn.Module, inputs: Any, outputs: Any) -> Any:
        outputs["last_hidden_state"] = outputs.last_hidden_state[chosen][None]
        if "token_places" in outputs:
            outputs["token_places"] = None
        return outputs

    handle = base_model.register_forward_hook(choose)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _caught_attention(model: Any, found: list[Tensor]) -> Iterator[None]:
    """Collects the output of each layer's attention, (W, L, C), in the order of the layers."""
    if isinstance(model, BasePreTrainedModel):

        def catch(module: nn.Module, inputs: Any, output: Tensor) -> None:
            found.append(output)

        layers = [module for module in model.modules() if isinstance(module, SelfAttention)]
        handles = [layer.register_forward_hook(catch) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        return

    def attention(module: nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, None]:
        context, _ = sdpa_attention_forward(module, *inputs, **options)
        found.append(context.flatten(2))
        return context, None

    with attending_by(model, attention):
        yield
