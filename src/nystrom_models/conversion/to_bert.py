# SPDX-License-Identifier: Apache-2.0
"""From a Nyströmformer with softmax attention to a BERT of Transformers' own class, which computes the same."""

from typing import Any

import transformers
from transformers import BertConfig
from transformers.modeling_utils import PreTrainedModel

from ..models.configuration_nystromformer import NystromformerConfig

# The heads that BERT has, too.
_HEADS = (
    "Model",
    "ForPreTraining",
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
# BERT's pooler and classifier are this package's head for sequence classification.
_CLASSIFIER = {"classifier.dense.": "bert.pooler.dense.", "classifier.out_proj.": "classifier."}
# Fields with the same name and meaning.
_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "max_position_embeddings",
    "type_vocab_size",
    "initializer_range",
    "layer_norm_eps",
    "classifier_dropout",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "id2label",
    "label2id",
    "problem_type",
)


def to_bert(model: PreTrainedModel) -> PreTrainedModel:
    """A BERT of Transformers' own class with the weights of `model`, for tools that know only BERT.

    It computes the same, up to rounding, for every text of up to `max_position_embeddings` tokens, and
    [`convert`] takes it back. The classes of the sentence-order head are those of BERT's next-sentence head
    (0: in order).

    Args:
        model: a Nyströmformer (`NystromformerModel`, or `...ForPreTraining`, `ForMaskedLM`,
            `ForSequenceClassification`, `ForTokenClassification`, `ForQuestionAnswering`) with `num_landmarks=None`
            and `conv_kernel_size=None`.

    Returns:
        The `transformers.Bert...` model with the same head, in evaluation mode, with copies of the weights in their
        dtype and on their device.

    Raises:
        TypeError: if `model` is not a Nyströmformer with one of these heads.
        ValueError: if a field of its configuration has no counterpart in BERT; the message names the field.
    """
    config = model.config
    head = type(model).__name__.removeprefix("Nystromformer")
    if not isinstance(config, NystromformerConfig) or head not in _HEADS:
        raise TypeError(f"{type(model).__name__} has no counterpart in BERT: give a Nystromformer with {_or(_HEADS)}.")
    _check(config, head)
    bert_config = BertConfig(**{name: getattr(config, name) for name in _FIELDS})
    bert = getattr(transformers, f"Bert{head}")(bert_config)
    bert.load_state_dict(
        {_name(name, head): _weight(name, weight, config) for name, weight in model.state_dict().items()}
    )
    return bert.to(device=model.device, dtype=model.dtype).eval()


def _check(config: NystromformerConfig, head: str) -> None:
    """Raises ValueError unless BERT computes what a configuration describes."""
    expected: dict[str, Any] = {
        "conv_kernel_size": None,
        "layer_norm_position": "post",
        "embedding_size": None,
    }
    if head == "ForSequenceClassification":
        expected |= {"classifier_activation": "tanh", "classifier_pooling": "first", "dual_encoder": False}
    longest = config.max_position_embeddings
    if not all(number is None or number >= longest for number in config.landmarks_by_layer):
        raise ValueError(
            f"BERT has softmax attention, the model num_landmarks={config.num_landmarks}: load it with "
            "num_landmarks=None, if it shall attend exactly."
        )
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise ValueError(f"BERT has no counterpart of {name}={getattr(config, name)!r}, only of {value!r}.")


def _name(name: str, head: str) -> str:
    """The name in a BERT of a weight."""
    if head == "Model":
        return name
    renamed = {"nystromformer.": "bert."} | (_CLASSIFIER if head == "ForSequenceClassification" else {})
    return next((new + name.removeprefix(old) for old, new in renamed.items() if name.startswith(old)), name)


def _weight(name: str, weight: Any, config: NystromformerConfig) -> Any:
    """BERT's positions begin in the first row of their table."""
    return weight[config.first_position :] if name.endswith("embeddings.position_embeddings.weight") else weight


def _or(names: tuple[str, ...]) -> str:
    return ", ".join(names[:-1]) + " or " + names[-1]
