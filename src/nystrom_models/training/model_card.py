# SPDX-License-Identifier: Apache-2.0
"""Model cards: the README.md of a saved model, with results that the Hub reads."""

import importlib.metadata
import json
import math
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from safetensors import safe_open
from transformers import AutoConfig

from ..data.question_answering import usual_stride
from ..models.configuration_base import BaseConfig
from ..models.configuration_linear_transformer import LinearTransformerConfig
from ..models.configuration_linformer import LinformerConfig
from ..models.configuration_nystromformer import NystromformerConfig
from .results import markdown_cell

# Inside the package, so that it is found after installation, too.
TEMPLATE = Path(__file__).parents[1] / "model_cards" / "template.md"

FAMILIES = {"nystromformer": "Nyströmformer", "linformer": "Linformer", "linear_transformer": "linear transformer"}

PACKAGES = ("nystrom-models", "torch", "transformers", "tokenizers", "datasets", "accelerate")


@dataclass(frozen=True)
class _Task:
    """What a pipeline of Transformers does with a head; `example` is Python, the argument of the pipeline's call."""

    pipeline_tag: str
    purpose: str
    example: str = '"Replace this text by your own."'
    call: str = "model({})"
    snippet: str | None = None  # where a pipeline does not serve: Python with {name}, {example}, {options} and others


_MASKED = 'f"One {model.tokenizer.mask_token} is missing here."'

# Transformers 5 has no pipeline for it. The answer is chosen as by `answer_spans.py`.
_ANSWER = """\
# Needs tokenizers 0.23.3 or newer: 0.23.1 and 0.23.2 leave windows out.
import torch
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name}{options})
model = AutoModelForQuestionAnswering.from_pretrained({name}{options})
question, context = {example}
windows = tokenizer(
    question,
    context,
    truncation="only_second",
    max_length={length},
    stride={stride},
    return_overflowing_tokens=True,
    return_offsets_mapping=True,
    padding=True,
    return_tensors="pt",
)
del windows["overflow_to_sample_mapping"]
places = windows.pop("offset_mapping")
in_context = torch.tensor([[part == 1 for part in windows.sequence_ids(i)] for i in range(len(places))])
with torch.no_grad():
    outputs = model(**windows)
start, end = (outputs[name].masked_fill(~in_context, -torch.inf) for name in ("start_logits", "end_logits"))
# An answer has at most {longest} tokens. The last window may be shorter than in training.
ends = torch.nn.functional.pad(end, (0, {longest} - 1), value=-torch.inf).unfold(1, {longest}, 1)
scores = start[:, :, None] + ends
window, first, more = torch.unravel_index(scores.argmax(), scores.shape)
answer = context[places[window, first, 0] : places[window, first + more, 1]].strip()
{no_answer}print(answer)"""

_NO_ANSWER = """\
null = (outputs.start_logits + outputs.end_logits)[windows["input_ids"] == tokenizer.cls_token_id].min()
if null - scores.max() > {threshold}:
    answer = ""  # the text has none
"""

# A pipeline joins tokens to entities without regard to words, whose first token alone may be trained.
_WORDS = """\
from transformers import AutoModelForTokenClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name}{options})
model = AutoModelForTokenClassification.from_pretrained({name}{options})
words = {example}
tokens = tokenizer(words, is_split_into_words=True, return_tensors="pt")
labels = model(**tokens).logits[0].argmax(-1).tolist()
first = dict(zip(reversed(tokens.word_ids()), reversed(labels)))  # the label of each word's first token
for i, word in enumerate(words):
    print(word, model.config.id2label[first[i]] if i in first else "O")"""

# A pipeline joins the texts of a pair.
_PAIR = """\
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name}{options})
model = AutoModelForSequenceClassification.from_pretrained({name}{options})
texts = tokenizer({example}, padding=True, return_tensors="pt")
logits = model(**{{name: tensor[None] for name, tensor in texts.items()}}).logits[0]
print(dict(zip(model.config.id2label.values(), logits.tolist())))"""

# A pipeline reads no windows.
_WINDOWS = """\
# Needs tokenizers 0.23.3 or newer: 0.23.1 and 0.23.2 leave windows out.
from transformers import AutoModelForSequenceClassification, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({name}{options})
model = AutoModelForSequenceClassification.from_pretrained({name}{options})
windows = tokenizer(
    {example},
    truncation=True,
    max_length={length},
    stride={stride},
    return_overflowing_tokens=True,
    padding=True,
    return_tensors="pt",
)
del windows["overflow_to_sample_mapping"]
logits = model(**windows).logits.mean(0)  # of all windows; the last one may be shorter than in training
print(dict(zip(model.config.id2label.values(), logits.tolist())))"""

# Tasks by the last part of the architecture's name.
TASKS = {
    "ForPreTraining": _Task("fill-mask", "pretrained on masked tokens", _MASKED),
    "ForMaskedLM": _Task("fill-mask", "that fills in masked tokens", _MASKED),
    "ForCausalLM": _Task(
        "text-generation",
        "that continues texts",
        '"Replace this beginning by your own."',
        call="model({}, max_new_tokens=20)",
    ),
    "ForSequenceClassification": _Task("text-classification", "that classifies texts"),
    "ForTokenClassification": _Task(
        "token-classification",
        "that classifies tokens",
        '["Replace", "these", "words", "by", "your", "own", "."]',
        snippet=_WORDS,
    ),
    "ForQuestionAnswering": _Task(
        "question-answering",
        "that finds the answer to a question in a text",
        '"What is the question?", "The answer stands in this text."',
        snippet=_ANSWER,
    ),
    "Model": _Task(
        "feature-extraction", "that gives the hidden states of texts", call="model({}, return_tensors=True).shape"
    ),
}


def _task(architecture: str) -> _Task:
    for ending, task in TASKS.items():
        if architecture.endswith(ending):
            return task
    raise ValueError(f"There is no model card for {architecture}: save a model that ends in one of {list(TASKS)}.")


def _usage(
    task: _Task,
    name: str,
    example: str | tuple[str, str] | None,
    options: str = "",
    apart: bool = False,
    **values: Any,
) -> str:
    """The snippet of a card. apart: whether the model reads the two texts of a pair apart. values: those of its other
    fields."""
    name = json.dumps(name, ensure_ascii=False)
    if apart:
        task, argument = replace(task, snippet=_PAIR), json.dumps(example, ensure_ascii=False)
    elif isinstance(example, tuple) and task.snippet is _ANSWER:
        argument = ", ".join(json.dumps(text, ensure_ascii=False) for text in example)
    elif isinstance(example, tuple):
        argument = json.dumps(dict(zip(("text", "text_pair"), example, strict=True)), ensure_ascii=False)
    else:
        argument = task.example if example is None else json.dumps(example, ensure_ascii=False)
    if task.snippet is not None:
        return task.snippet.format(name=name, example=argument, options=options, **values)
    return (
        "from transformers import pipeline\n\n"
        f'model = pipeline("{task.pipeline_tag}", model={name}{options})\n'
        f"print({task.call.format(argument)})"
    )


def _num_parameters(output_dir: Path) -> int:
    files = sorted(output_dir.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{output_dir} has no *.safetensors file: save the model there with save_pretrained.")
    count = 0
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            names = tensors.keys()
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    return count


def span(value: int | Sequence[int] | Sequence[Sequence[int]]) -> str:
    """A number, or the minimum and maximum of a list or of lists: "5 to 8"."""
    if isinstance(value, int):
        return str(value)
    numbers = [number for item in value for number in ([item] if isinstance(item, int) else item)]
    return f"{min(numbers)} to {max(numbers)}" if len(set(numbers)) > 1 else str(numbers[0])


def _approximations(config: NystromformerConfig) -> list[int]:
    """The landmarks of the layers that approximate attention, at lengths that the model takes."""
    longest = config.max_position_embeddings
    return [number for number in config.landmarks_by_layer if number is not None and number < longest]


def cost_of_attention(config: BaseConfig) -> str:
    """What attention takes, in the number of tokens; exact attention stores no weights, but with `eager`."""
    if isinstance(config, NystromformerConfig):
        exact = len(_approximations(config)) < config.num_hidden_layers
    else:
        exact = getattr(config, "feature_map", "") is None
    return f"time {'quadratic, and memory linear,' if exact else 'and memory linear'} in their number"


def _in_the_built_in_class(config: NystromformerConfig) -> str:
    """What Transformers' own class makes of this configuration."""
    if not isinstance(config.num_landmarks, int):
        return "takes only one number as `num_landmarks`, and refuses to load"
    if config.num_landmarks == config.segment_means_seq_len:
        return "with these values computes exact attention instead, in quadratic time"
    return (
        "with these values raises an error, or gives a result of a wrong shape, for inputs of other than "
        f"{config.segment_means_seq_len} tokens"
    )


def limits_of(config: BaseConfig) -> list[str]:
    """Sentences about what a model of this configuration cannot do, with any training."""
    limits = []
    if config.max_position_embeddings is not None:
        limits.append(
            f"Inputs of more than {config.max_position_embeddings} tokens are refused: truncate or split them."
        )
    if isinstance(config, NystromformerConfig):
        if numbers := _approximations(config):
            where = "" if len(numbers) == config.num_hidden_layers else f", in {len(numbers)} layers,"
            limits.append(
                f"Inputs of more than {min(numbers)} tokens get{where} an approximation of softmax attention through "
                f"{span(numbers)} landmarks; shorter ones get it exactly."
            )
        limits.append(
            "Loaded without `nystrom_models` and without `trust_remote_code=True`, it becomes Transformers' own class "
            f"of this name, which {_in_the_built_in_class(config)}."
        )
    elif isinstance(config, LinformerConfig):
        number = span(config.projected_dim)
        limits.append(f"Keys and values are projected to {number} slots, whatever the length of the input.")
    elif isinstance(config, LinearTransformerConfig):
        limits.append(
            "Attention takes time quadratic in the tokens, and text is generated without a cache."
            if config.feature_map is None
            else "Each head stores a text of any length in a sum of fixed size: it recalls single distant tokens less "
            "precisely than softmax attention."
        )
    return limits


def _hardware() -> str:
    if torch.cuda.is_available():
        devices = Counter(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return ", ".join(f"{count} × {name}" for name, count in devices.items())
    number = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = f"{number} CPU cores ({platform.machine()})"
    device = torch.accelerator.current_accelerator(check_available=True)
    # Such as Apple's MPS, whose devices have no names.
    return cores if device is None else f"{torch.accelerator.device_count()} × {device.type.upper()}, {cores}"


def _versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        if package == "torch":
            found.append(f"torch {torch.__version__}")  # with the build, such as +cu130, which its metadata may lack
            continue
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _saved_config(folder: Path) -> BaseConfig:
    """The configuration of the model in a folder."""
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder} has no config.json: save the model there with save_pretrained.")
    config = AutoConfig.from_pretrained(folder)
    if not isinstance(config, BaseConfig):
        raise ValueError(f"{folder} has a {config.model_type!r} model, but cards are for {list(FAMILIES)}.")
    return config


def longest_of(config: BaseConfig) -> str:
    """How many tokens the model takes, as a phrase."""
    limit = config.max_position_embeddings
    return "any number of" if limit is None else f"up to {limit}"


def _eval_results(metrics: Mapping[str, float], **where: Any) -> list[EvalResult] | None:
    """Results in the form of the Hub, all of one task and data set; None if there are none."""
    for metric, value in metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"The metric {metric!r} is {value}: a card lists only finite numbers, so omit it.")
    results = [EvalResult(**where, metric_type=metric, metric_value=float(value)) for metric, value in metrics.items()]
    return results or None


def _public(hyperparameters: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The entries of the table of hyperparameters, without those that are None, and without secret ones."""
    return [
        (key, markdown_cell(value))
        for key, value in hyperparameters.items()
        if value is not None and not key.endswith("_token")
    ]


def model_card(
    output_dir: str | os.PathLike,
    *,
    data: str,
    hub_model_id: str | None = None,
    base_model: str | None = None,
    dataset_name: str | None = None,
    dataset_config_name: str | None = None,
    dataset_split: str = "validation",
    metrics: Mapping[str, float] | None = None,
    hyperparameters: Mapping[str, Any] | None = None,
    hardware: str | None = None,
    limits: Sequence[str] = (),
    example: str | tuple[str, str] | None = None,
    windows: tuple[int, int] | None = None,
    max_answer_length: int = 30,
    null_threshold: float | None = None,
    language: str | list[str] | None = None,
    license: str | None = None,
) -> ModelCard:
    """The card of a saved model. Family, task, size and limits are read from what was saved.

    Args:
        output_dir: contains a model, and the tokenizer that the usage snippet needs.
        data: sentences that say what the model was trained and evaluated on.
        hub_model_id: the repository that the usage snippet loads; if None, the folder's name, a relative path.
        base_model: the repository or the local folder of the model that was fine-tuned.
        dataset_name, dataset_config_name, dataset_split: the data set on the Hub, its configuration and the split
            that `metrics` are of. Without a name, results are listed under "local files".
        metrics: finite numbers by the name of their metric, such as `{"accuracy": 0.9, "f1": 0.92}`.
        hyperparameters: the entries of a table, without those that are None and those whose name ends in `_token`,
            because a card is public.
        hardware: what the model was trained on; if None, the devices, or the CPU cores, that this process sees.
        limits: sentences added to those that follow from the configuration.
        example: the input of the usage snippet; a pair of texts for a classifier of pairs, or question and text. For
            "fill-mask" it must contain the mask token.
        windows: for a classifier that reads a single text in windows, their tokens and those that neighbours share; a
            model that answers questions always has windows, by default as long as it takes, or of 512 tokens.
        max_answer_length: the largest number of tokens of an answer.
        null_threshold: there is no answer if its score exceeds that of the best answer by more than this; None if
            every question has one.
        language: ISO 639-1 codes of the texts.
        license: as on the Hub, such as "apache-2.0".

    Raises:
        FileNotFoundError: if `output_dir` has no saved model.
        ValueError: if the model has a head without a pipeline, or a metric is not finite.
    """
    folder = Path(output_dir)
    config = _saved_config(folder)
    architecture = (config.architectures or ["none"])[0]
    task = _task(architecture)
    name = hub_model_id or folder.resolve().name
    model_name = name.rsplit("/", 1)[-1]
    if task.pipeline_tag == "text-classification" and config.problem_type == "multi_label_classification":
        # A pipeline gives only the most probable class, unless it is asked for all.
        task = replace(task, call="model({}, top_k=None)")
    apart = config.dual_encoder and isinstance(example, tuple)
    values: dict[str, Any] = {}
    if task.snippet is _ANSWER:
        length = config.max_position_embeddings or 512
        windows = windows or (length, usual_stride(length))
        no_answer = "" if null_threshold is None else _NO_ANSWER.format(threshold=null_threshold)
        values = {"longest": max_answer_length, "no_answer": no_answer}
    elif windows is not None:
        task = replace(task, snippet=_WINDOWS)
    if windows is not None:
        values |= dict(zip(("length", "stride"), windows, strict=True))
    local_base = base_model is not None and os.path.isdir(base_model)
    evaluated_on = dataset_name or "local files"
    if dataset_config_name:
        evaluated_on += f" ({dataset_config_name})"
    card_data = ModelCardData(
        language=language,
        license=license,
        library_name="transformers",
        pipeline_tag=task.pipeline_tag,
        tags=["nystrom_models", config.model_type],
        base_model=None if local_base else base_model,
        datasets=dataset_name,
        metrics=list(metrics) if metrics else None,
        model_name=model_name,
        eval_results=_eval_results(
            metrics or {},
            task_type=task.pipeline_tag,
            dataset_type=dataset_name or "local",
            dataset_name=evaluated_on,
            dataset_config=dataset_config_name,
            dataset_split=dataset_split,
        ),
    )
    return ModelCard.from_template(
        card_data,
        template_path=str(TEMPLATE),
        model_name=model_name,
        family=FAMILIES[config.model_type],
        architecture=architecture,
        purpose=task.purpose,
        base_model=os.path.basename(os.path.abspath(base_model)) if base_model and local_base else base_model,
        local_base=local_base,
        num_parameters=f"{_num_parameters(folder):,}",
        max_length=longest_of(config),
        cost=cost_of_attention(config),
        usage=_usage(task, name, example, "", apart, **values),
        remote_usage=_usage(task, name, example, ", trust_remote_code=True", apart, **values),
        data=data,
        evaluated_on=f"{evaluated_on}, split {dataset_split}",
        metrics=[(markdown_cell(metric), round(float(value), 4)) for metric, value in (metrics or {}).items()],
        hyperparameters=_public(hyperparameters or {}),
        hardware=hardware or _hardware(),
        versions=_versions(),
        limits=[
            *limits_of(config),
            "It repeats the errors and biases of the data it was trained on; they were not examined.",
            *limits,
        ],
    )


def write_model_card(output_dir: str | os.PathLike, **fields: Any) -> Path:
    """Writes [`model_card`] with these fields to README.md in `output_dir`, and returns its path."""
    path = Path(output_dir) / "README.md"
    model_card(output_dir, **fields).save(path)
    return path
