# SPDX-License-Identifier: Apache-2.0
"""From a Nyströmformer with softmax attention to a BERT of Transformers' own class, which computes the same."""

from typing import Any

import transformers
from transformers import BertConfig
from transformers.modeling_utils import PreTrainedModel

from ..models.configuration_nystromformer import NystromformerConfig
from .configurations import HEAD_FIELDS
from .sources import HEADS, source_fields, source_kind

# Converted to BERT's class of the same name.
_HEADS = tuple(head for head in HEADS if head != "ForCausalLM")


def to_bert(model: PreTrainedModel) -> PreTrainedModel:
    """A BERT of Transformers' own class with the weights of `model`, for tools that know only BERT.

    It computes the same, up to rounding, for every text of up to `max_position_embeddings` tokens, and
    [`convert`] takes it back. The classes of the sentence-order head are those of BERT's next-sentence head
    (0: in order).

    Args:
        model: a Nyströmformer (`NystromformerModel`, or `...ForPreTraining`, `ForMaskedLM`,
            `ForSequenceClassification`, `ForTokenClassification`, `ForQuestionAnswering`, `ForMultipleChoice`) with
            `num_landmarks=None` and `conv_kernel_size=None`; the classifiers of sequences and choices with
            `classifier_activation="tanh"`.

    Returns:
        The `transformers.Bert...` model with the same head, in evaluation mode, with copies of the weights in their
        dtype and on their device.

    Raises:
        TypeError: if `model` is not a Nyströmformer with one of these heads, or has an adapter of PEFT.
        ValueError: if a field of its configuration has no counterpart in BERT; the message names the field.
    """
    if hasattr(model, "merge_and_unload"):
        raise TypeError(f"A {type(model).__name__} is not converted to a BERT: give model.merge_and_unload().")
    config = model.config
    head = type(model).__name__.removeprefix("Nystromformer")
    if not isinstance(config, NystromformerConfig) or head not in _HEADS:
        raise TypeError(
            f"{type(model).__name__} is not converted to a BERT: give a Nystromformer with one of {', '.join(_HEADS)}."
        )
    _check(config, head)
    shared = source_fields(config) | {name: getattr(config, name) for name in HEAD_FIELDS}
    known = BertConfig()
    bert_config = BertConfig(**{name: value for name, value in shared.items() if hasattr(known, name)})
    options = {"add_pooling_layer": model.pooler is not None} if head == "Model" else {}
    bert = getattr(transformers, f"Bert{head}")(bert_config, **options)
    names, prefix = _names(bert, head), model.base_model_prefix + "."
    weights = {names[name.removeprefix(prefix)]: weight for name, weight in model.state_dict().items()}
    if "cls.predictions.decoder.bias" in weights:  # without tied weights, ours has only this one of BERT's two
        weights.setdefault("cls.predictions.bias", weights["cls.predictions.decoder.bias"])
    positions = names["embeddings.position_embeddings.weight"]
    weights[positions] = weights[positions][config.first_position :]
    bert.load_state_dict(weights)
    return bert.to(device=model.device, dtype=model.dtype).eval()


def _names(bert: PreTrainedModel, head: str) -> dict[str, str]:
    """BERT's names of weights by those of this package without prefix, as [`convert`] translates them."""
    kind, prefix = source_kind(bert.config), bert.base_model_prefix + "."
    names = {}
    for name in bert.state_dict():
        plain = name.removeprefix(prefix)
        # `convert` drops the next-sentence head, which here is the sentence-order head under the same name.
        [ours] = kind.targets(plain, head, bert.config) or [plain]
        names[ours] = name
    return names


def _check(config: NystromformerConfig, head: str) -> None:
    """Raises ValueError unless BERT computes what a configuration describes."""
    expected: dict[str, Any] = {
        "conv_kernel_size": None,
        "layer_norm_position": "post",
        "embedding_size": None,
    }
    if head in ("ForSequenceClassification", "ForMultipleChoice"):
        expected |= {"classifier_activation": "tanh", "classifier_pooling": "first"}
    if head == "ForSequenceClassification":
        expected |= {"dual_encoder": False}
    longest = config.max_position_embeddings
    if not all(number is None or number >= longest for number in config.landmarks_by_layer):
        raise ValueError(
            f"A BERT has softmax attention, but the model has num_landmarks={config.num_landmarks}: load it with "
            "num_landmarks=None."
        )
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise ValueError(f"BERT has no counterpart of {name}={getattr(config, name)!r}, only of {value!r}.")
