# SPDX-License-Identifier: Apache-2.0
"""The names and fields of each kind of checkpoint, translated to those of this package.

All of these models have the layers of BERT, as this package has. They differ in the names of the layers, in which
layers are shared, and in the activations that the heads fix.
"""

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from transformers.configuration_utils import PreTrainedConfig

from ..models.configuration_base import BaseConfig

# The heads by the ends of class names; there is an Auto class for each.
HEADS = (
    "Model",
    "ForPreTraining",
    "ForMaskedLM",
    "ForCausalLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
)
# Classes without a counterpart in this package: only their encoder is converted.
_WITHOUT_COUNTERPART = ("ElectraForPreTraining", "ForNextSentencePrediction")

Rules = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class SourceKind:
    """A kind of checkpoint.

    model_types: its `model_type`s.
    is_ours: whether it is a family of this package.
    attends_exactly: given its configuration, whether its attention is softmax attention or approximates it.
    fields: given its configuration, the fields of `BaseConfig` that the source names differently or has fixed.
    first_position: the row of the position table for the first token of a row.
    longest: tokens of the longest sequence; None for no limit.
    names: for a head (None: for every head), pairs of a regular expression and its replacement. The first match
        counts; a name without one stays as it is.
    pretraining_class: the Auto class that reads the heads of pretraining.
    head_activation: the fixed activation of its masked language modelling head; None if that is `hidden_act`.
    """

    model_types: tuple[str, ...]
    is_ours: bool = False
    attends_exactly: Callable[[PreTrainedConfig], bool] = lambda config: True
    fields: Callable[[PreTrainedConfig], dict[str, Any]] = lambda config: {}
    first_position: Callable[[PreTrainedConfig], int] = lambda config: 0
    longest: Callable[[PreTrainedConfig], int | None] = lambda config: config.max_position_embeddings
    names: dict[str | None, Rules] = field(default_factory=dict)
    pretraining_class: str = "AutoModelForMaskedLM"
    head_activation: str | None = None

    def targets(self, name: str, head: str, config: PreTrainedConfig) -> list[str]:
        """The names in this package, without the prefix of the base model, of the source's weight `name`."""
        for pattern, replacement in (*self.names.get(head, ()), *self.names.get(None, ())):
            if re.match(pattern, name):
                return self._repeated(re.sub(pattern, replacement, name, count=1), config)
        return [name]

    @staticmethod
    def _repeated(name: str, config: PreTrainedConfig) -> list[str]:
        """The names, one for each layer, of a weight that layers share, `encoder.layer.{group}.{place}.…`."""
        match = re.match(r"encoder\.layer\.\{(\d+)\.(\d+)\}\.(.*)", name)
        if match is None:
            return [name] if name else []
        group, place, rest = int(match[1]), int(match[2]), match[3]
        layers, inner = config.num_hidden_layers, config.inner_group_num
        groups = [int(layer / (layers / config.num_hidden_groups)) for layer in range(layers)]
        return [f"encoder.layer.{layer * inner + place}.{rest}" for layer in range(layers) if groups[layer] == group]


def approximates_softmax(config: Any) -> bool:
    """Whether a family's attention is softmax attention over the whole sequence, or approximates it with the same
    queries and keys."""
    has_landmarks, is_control = hasattr(config, "num_landmarks"), getattr(config, "feature_map", "") is None
    return (has_landmarks or is_control) and not config.is_decoder


# ---- kinds ----

# The heads for sequence classification and multiple choice are a pooler and a linear layer; other heads have no
# pooler.
_POOLED_HEADS: dict[str | None, Rules] = {
    "ForSequenceClassification": (
        (r"pooler\.dense\.", "classifier.dense."),
        (r"classifier\.", "classifier.out_proj."),
    ),
    "ForMultipleChoice": ((r"pooler\.dense\.", "pre_classifier."),),
}

_BERT = SourceKind(
    model_types=("bert",),
    fields=lambda config: {"classifier_activation": "tanh"},
    names={
        **_POOLED_HEADS,
        # The next-sentence head is dropped. Its classes agree with those of the sentence order (0 = in order), but it
        # was trained to recognise passages of other documents, not the order of two passages of one document: its
        # accuracy there is 52.0 % (ALBERT, Lan et al. 2020, table 5).
        None: ((r"cls\.seq_relationship\..*", ""),),
    },
    pretraining_class="AutoModelForPreTraining",
)

_ROBERTA = SourceKind(
    model_types=("roberta", "xlm-roberta", "camembert"),
    fields=lambda config: {"classifier_activation": "tanh"},
    first_position=lambda config: config.pad_token_id + 1,
    # max_position_embeddings counts the rows before the first position, too (514 for 512 tokens).
    longest=lambda config: config.max_position_embeddings - config.pad_token_id - 1,
    names={
        "ForMultipleChoice": _POOLED_HEADS["ForMultipleChoice"],
        None: (
            (r"lm_head\.dense\.", "cls.predictions.transform.dense."),
            (r"lm_head\.layer_norm\.", "cls.predictions.transform.LayerNorm."),
            (r"lm_head\.", "cls.predictions."),
        ),
    },
    head_activation="gelu",
)

_DISTILBERT = SourceKind(
    model_types=("distilbert",),
    fields=lambda config: {
        "intermediate_size": config.hidden_dim,
        "hidden_act": config.activation,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "classifier_dropout": config.seq_classif_dropout,
        "classifier_activation": "relu",
        "layer_norm_eps": 1e-12,
        # DistilBERT has no token types: one type of zeros.
        "type_vocab_size": 1,
    },
    names={
        "ForSequenceClassification": (
            (r"pre_classifier\.", "classifier.dense."),
            (r"classifier\.", "classifier.out_proj."),
        ),
        None: (
            (r"transformer\.layer\.(\d+)\.attention\.q_lin\.", r"encoder.layer.\1.attention.self.query."),
            (r"transformer\.layer\.(\d+)\.attention\.k_lin\.", r"encoder.layer.\1.attention.self.key."),
            (r"transformer\.layer\.(\d+)\.attention\.v_lin\.", r"encoder.layer.\1.attention.self.value."),
            (r"transformer\.layer\.(\d+)\.attention\.out_lin\.", r"encoder.layer.\1.attention.output.dense."),
            (r"transformer\.layer\.(\d+)\.sa_layer_norm\.", r"encoder.layer.\1.attention.output.LayerNorm."),
            (r"transformer\.layer\.(\d+)\.ffn\.lin1\.", r"encoder.layer.\1.intermediate.dense."),
            (r"transformer\.layer\.(\d+)\.ffn\.lin2\.", r"encoder.layer.\1.output.dense."),
            (r"transformer\.layer\.(\d+)\.output_layer_norm\.", r"encoder.layer.\1.output.LayerNorm."),
            (r"vocab_transform\.", "cls.predictions.transform.dense."),
            (r"vocab_layer_norm\.", "cls.predictions.transform.LayerNorm."),
            (r"vocab_projector\.", "cls.predictions.decoder."),
        ),
    },
)

_ELECTRA = SourceKind(
    model_types=("electra",),
    fields=lambda config: {
        "embedding_size": None if config.embedding_size == config.hidden_size else config.embedding_size,
        "classifier_activation": "gelu",
    },
    names={
        None: (
            (r"embeddings_project\.", "embeddings.projection."),
            (r"generator_predictions\.dense\.", "cls.predictions.transform.dense."),
            (r"generator_predictions\.LayerNorm\.", "cls.predictions.transform.LayerNorm."),
            (r"generator_lm_head\.", "cls.predictions.decoder."),
            (r"sequence_summary\.summary\.", "pre_classifier."),
            (r"discriminator_predictions\..*", ""),
        ),
    },
    head_activation="gelu",
)

_ALBERT_LAYER = r"encoder\.albert_layer_groups\.(\d+)\.albert_layers\.(\d+)\."
_ALBERT = SourceKind(
    model_types=("albert",),
    fields=lambda config: {
        "embedding_size": config.embedding_size,
        "num_hidden_layers": config.num_hidden_layers * config.inner_group_num,
        "classifier_dropout": config.classifier_dropout_prob,
        "classifier_activation": "tanh",
    },
    names={
        "ForSequenceClassification": (
            (r"pooler\.", "classifier.dense."),
            (r"classifier\.", "classifier.out_proj."),
        ),
        "ForMultipleChoice": ((r"pooler\.", "pre_classifier."),),
        None: (
            (r"encoder\.embedding_hidden_mapping_in\.", "embeddings.projection."),
            (_ALBERT_LAYER + r"attention\.(query|key|value)\.", r"encoder.layer.{\1.\2}.attention.self.\3."),
            (_ALBERT_LAYER + r"attention\.(dense|LayerNorm)\.", r"encoder.layer.{\1.\2}.attention.output.\3."),
            (_ALBERT_LAYER + r"ffn\.", r"encoder.layer.{\1.\2}.intermediate.dense."),
            (_ALBERT_LAYER + r"ffn_output\.", r"encoder.layer.{\1.\2}.output.dense."),
            (_ALBERT_LAYER + r"full_layer_layer_norm\.", r"encoder.layer.{\1.\2}.output.LayerNorm."),
            (r"pooler\.", "pooler.dense."),
            (r"predictions\.(dense|LayerNorm)\.", r"cls.predictions.transform.\1."),
            (r"predictions\.", "cls.predictions."),
            (r"sop_classifier\.classifier\.", "cls.seq_relationship."),
        ),
    },
    pretraining_class="AutoModelForPreTraining",
)

_OURS = SourceKind(
    model_types=("nystromformer", "linformer", "linear_transformer"),
    is_ours=True,
    attends_exactly=approximates_softmax,
    first_position=lambda config: config.first_position,
    pretraining_class="AutoModelForPreTraining",
)

_KINDS = (_BERT, _ROBERTA, _DISTILBERT, _ELECTRA, _ALBERT, _OURS)
SOURCE_TYPES = tuple(model_type for kind in _KINDS for model_type in kind.model_types)


def source_kind(config: PreTrainedConfig) -> SourceKind:
    """The kind of checkpoints with this configuration.

    Raises:
        ValueError: if such checkpoints cannot be converted.
    """
    kind = next((kind for kind in _KINDS if config.model_type in kind.model_types), None)
    if kind is None:
        raise ValueError(
            f"Checkpoints with model_type={config.model_type!r} cannot be converted: give one of "
            f"{', '.join(SOURCE_TYPES)}, or keep the model and give it linear attention by "
            "nystrom_models.use_nystrom(model), if it takes that."
        )
    if getattr(config, "add_cross_attention", False) or (getattr(config, "is_decoder", False) and not kind.is_ours):
        raise ValueError(
            "The source is a decoder (is_decoder or add_cross_attention), whose attention is causal: give a "
            "checkpoint with is_decoder=False and add_cross_attention=False."
        )
    if kind is _ROBERTA and config.pad_token_id is None:
        raise ValueError(
            f"The source has pad_token_id=None, but a {config.model_type} counts its positions from the padding token "
            "on: give it the one of its training, which is usually pad_token_id=1, in its config.json."
        )
    return kind


def source_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of `BaseConfig` that a source has, under this package's names; the longest sequence in tokens."""
    kind = source_kind(config)
    inherited = {item.name for item in dataclasses.fields(PreTrainedConfig)}
    # Those of its class alone: config.json may hold others, which its model does not read.
    own = {item.name for item in dataclasses.fields(config)} | set(config.attribute_map)
    names = {item.name for item in dataclasses.fields(BaseConfig)} & own - inherited
    fields = {name: getattr(config, name) for name in names}
    fields |= kind.fields(config)
    return fields | {"max_position_embeddings": kind.longest(config)}


def source_head(config: PreTrainedConfig, default: str | None = None) -> str:
    """The head, one of `HEADS`, of the class that the source was saved from; "Model" if it has no counterpart.

    Args:
        default: the head if config.json does not name the class.

    Raises:
        ValueError: if config.json does not name the class, and there is no default.
    """
    names = config.architectures or []
    if not names and default is not None:
        return default
    if not names:
        raise ValueError(
            f"The source's config.json does not name the class that it was saved from (architectures): give head, one "
            f"of {', '.join(HEADS)}."
        )
    if names[0].endswith(_WITHOUT_COUNTERPART):
        return "Model"
    return next((head for head in HEADS if names[0].endswith(head)), "Model")


def check_head(head: str, config: PreTrainedConfig) -> None:
    """Raises ValueError for a head that is unknown, or whose weights mean something else in this package."""
    if head not in HEADS:
        raise ValueError(f"head={head!r} is unknown: use one of {', '.join(HEADS)}.")
    if head == "ForCausalLM" and not config.is_decoder:
        raise ValueError(
            "head='ForCausalLM' predicts the next token, but the source's attention sees the whole sequence "
            "(is_decoder=False): use head='ForMaskedLM'."
        )
    if config.model_type == "electra" and head == "ForMultipleChoice":
        for name, value in (("summary_type", "first"), ("summary_use_proj", True), ("summary_activation", "gelu")):
            if getattr(config, name) != value:
                raise ValueError(
                    f"The source has {name}={getattr(config, name)!r}, but its multiple choice head has a counterpart "
                    f"only with {value!r}: give head='Model' to convert only the encoder."
                )
