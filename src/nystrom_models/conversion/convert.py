# SPDX-License-Identifier: Apache-2.0
"""Converts a trained encoder to a model of this package, with any number of positions.

Where the result computes exact attention, it is the same function as the source: it has the same sub-layers with the
same weights.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from ..checkpoint import load_config, load_tokenizer, save_tokenizer
from ..complete_folder import PARTIAL, moved_when_complete
from ..models.configuration_base import BaseConfig
from .comparison import ROWS, compared_lengths, measure_differences
from .configurations import check_config
from .exact_attention import exact_model
from .feature_maps import Matching, start_feature_maps
from .positions import check_method
from .principal_directions import start_projections
from .projections import projection_places
from .reading import SourceModel, read_source
from .report import ConversionReport
from .sample import MOST_TOKENS, Sample
from .sources import check_head, source_head
from .weights import take_over

logger = logging.get_logger(__name__)

# Arguments of from_pretrained that say where files are; they also apply to the configuration and the tokenizer.
_FILE_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def convert(
    model_name_or_path: str | os.PathLike,
    config: BaseConfig,
    *,
    head: str | None = None,
    positions: str = "repeat",
    sample: Sequence[str] | Tensor | None = None,
    matching: Matching | None = None,
    return_report: bool = False,
    compare: bool = True,
    **kwargs: Any,
) -> Any:
    """Converts a trained encoder to a linear-time model.

    Sources are checkpoints of BERT, RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT, ELECTRA, ALBERT and of this package's
    families (a Nyströmformer also of Transformers' own class), with any head. Embeddings, all layers and the head are
    copied in the source's dtype. A Nyströmformer then computes the same as the source for every sequence of at most
    `num_landmarks` tokens, and for all sequences with `num_landmarks=None`. For longer sequences, and in the other
    families at any length, it is a different function, which needs further training.

    - **Positions** are repeated or interpolated up to `max_position_embeddings`, or cut. A row's first token has the
      source's first position, with padding at any position. (BERT itself counts padding on the left as tokens.)
    - **Convolution.** A convolution of a family of this package is copied. Otherwise it starts at zero, and not at
      random as in the Nyströmformer paper: the model then starts as the same function as the source, and a kernel of
      zeros still gets gradients.
    - **Heads.** The sentence order head of a family of this package and of ALBERT is copied; BERT's next-sentence head
      and ELECTRA's discriminator have no counterpart. A causal model keeps the source's `generation_config`.
    - **ALBERT's** shared layers become separate layers, which may diverge in training.
    - **Token types.** `type_vocab_size` may be larger than the source's (RoBERTa has one type); new types start as
      copies of type 0. DistilBERT has no types: the model gets one type of zeros.
    - **Linformer's projections** are those of a source Linformer, of any sizes and sharing. Otherwise they start as
      segment means; with a `sample`, also groups of positions by the principal directions of keys and values are
      tried, and the start that approximates the attention's output better on held-out rows is used.
    - **Learned feature maps** (`feature_map="hedgehog"`) start as in a new model, or matched to the source's attention
      if a `sample` is given.

    What is new, changed or dropped is logged as a warning.

    Args:
        model_name_or_path: a folder or a name on the Hub, with weights in `safetensors`, or in `pytorch_model.bin`,
            which Transformers reads by `torch.load(weights_only=True)`: tensors and nothing that runs.
        config: configuration of the new model. Fields that the source's weights depend on (`vocab_size`,
            `hidden_size`, `hidden_act`, ...) must equal the source's: [`converted_config`] makes such a configuration.
        head: head of the new model: "Model", "ForPreTraining", "ForMaskedLM", "ForCausalLM",
            "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering" or "ForMultipleChoice"; None
            for the source's own, or "Model" if that has no counterpart. A head that the source does not have is new.
        positions: "repeat" or "interpolate": how additional positions are made, see [`fit_positions`].
        sample: texts, or token ids (rows, length) int64 without padding, to start projections and feature maps from
            and to measure on; some 30,000 tokens are used. None: they start as in a new model, and the report's
            differences are measured on random token ids.
        matching: how feature maps are matched; None for [`Matching`]'s defaults.
        return_report: whether to return the report, too.
        compare: whether the report compares the outputs of the model and the source.
        kwargs: of `from_pretrained`, for the source: `revision`, `token`, `cache_dir`, `dtype` and so on.

    Returns:
        The model in evaluation mode; every Auto class reads what its `save_pretrained` writes. With
        `return_report=True`, the model and a [`ConversionReport`].

    Raises:
        TypeError: if `config` is not a configuration of this package.
        ValueError: if a field of `config` does not fit the source; if the source is a model of another kind, lacks
            weights of its encoder or has weights in it that this package's layers lack; if the head has no
            counterpart; or if the sample is too small.
    """
    measure = return_report and compare
    model, report = _convert(model_name_or_path, config, head, positions, sample, matching, measure, None, kwargs)
    return (model, report) if return_report else model


def _convert(
    model_name_or_path: str | os.PathLike,
    config: BaseConfig,
    head: str | None,
    positions: str,
    sample: Sequence[str] | Tensor | None,
    matching: Matching | None,
    measure: bool,
    tokenizer: PreTrainedTokenizerBase | None,
    kwargs: dict[str, Any],
) -> tuple[PreTrainedModel, ConversionReport]:
    check_method(positions)
    files = {name: kwargs[name] for name in _FILE_ARGUMENTS if name in kwargs}
    source_config = load_config(model_name_or_path, **files)
    head = source_head(source_config) if head is None else head
    check_head(head, source_config)
    check_config(config, source_config, head)
    if matching is not None and sample is None:
        raise ValueError("matching (--matching_steps) trains feature maps on text: give sample (--sample_file), too.")
    if matching is not None and getattr(config, "feature_map", None) != "hedgehog":
        raise ValueError(
            'matching (--matching_steps) trains feature_map="hedgehog", which only linear transformers (--family '
            "linear_transformer) have: convert to one, or leave it out."
        )
    rows = None
    if isinstance(sample, Tensor):
        rows = Sample.of_rows(sample, source_config.vocab_size)
    elif sample is not None:
        if isinstance(sample, str):
            raise TypeError("sample is one text: give a list of texts.")
        tokenizer = tokenizer or load_tokenizer(model_name_or_path, **files)
        # Texts beyond the rows that are used are not tokenized.
        most_tokens = max(MOST_TOKENS, ROWS * (config.max_position_embeddings or 0))
        rows = Sample.of_texts(sample, tokenizer, most_tokens)

    source = read_source(model_name_or_path, source_config, head, kwargs)
    model, report = take_over(source, config, head, positions)
    if rows is not None:
        report.sample = rows.kind
        _start_from(rows, model, source, report, positions, matching or Matching())
    if measure:
        if rows is None:
            longest = max(compared_lengths(model, source))
            rows = Sample.random(source_config.vocab_size, ROWS * longest, source_config.pad_token_id)
        report.differences = measure_differences(model, source, rows, report)
    if warnings := report.warnings():
        logger.warning("\n".join([f"{report.model} from {report.source}:", *(f"- {line}" for line in warnings)]))
    return model, report


def _start_from(
    sample: Sample,
    model: PreTrainedModel,
    source: SourceModel,
    report: ConversionReport,
    positions: str,
    matching: Matching,
) -> None:
    """Starts projections and feature maps that the source does not have from a sample, and adds this to the report."""
    prefix = "" if model.base_model is model else model.base_model_prefix + "."
    new = set(report.new)
    projections = {prefix + place.name for place in projection_places(model)} & new
    # Only the projections of a Linformer are started this way, not that of a causal linear transformer.
    projections = projections if hasattr(model.config, "share_projection") else set()
    feature_maps = {name for name in new if "_features." in name}
    if not (projections or feature_maps):
        return
    if not source.kind.attends_exactly(source.config):
        report.notes.append(
            f"nothing was started from the sample: model_type={source.config.model_type!r} has no softmax attention"
        )
        return
    exact = exact_model(source, model.config, positions)
    how: dict[str, str] = {}
    if projections:
        report.projections = start_projections(model, exact, sample)
        for place in projection_places(model):
            layers = [None, *place.layers]
            start = next((start for start in report.projections if start.layer in layers), None)
            if start is not None and start.start == "principal_directions":
                how[prefix + place.name] = "principal directions of keys and values, to be trained"
    if feature_maps:
        report.feature_maps = start_feature_maps(model, exact, sample, matching)
        matched = [f".layer.{start.layer}." for start in report.feature_maps if start.after < start.before]
        names = [name for name in feature_maps if any(layer in name for layer in matched)]
        how |= dict.fromkeys(names, "matched to the source's attention, to be trained")
    report.origins = [dataclasses.replace(origin, how=how.get(origin.name, origin.how)) for origin in report.origins]


def convert_checkpoint(
    model_name_or_path: str | os.PathLike,
    output_dir: str | os.PathLike,
    config: BaseConfig,
    *,
    head: str | None = None,
    positions: str = "repeat",
    sample: Sequence[str] | Tensor | None = None,
    matching: Matching | None = None,
    return_report: bool = False,
    save_report: bool = False,
    **kwargs: Any,
) -> Any:
    """[`convert`], and saves the model with the source's tokenizer, ready for any Auto class and `pipeline`.

    The tokenizer's `model_max_length` becomes `config.max_position_embeddings`: with the source's value, long texts
    would be truncated to the source's length without a message. Weights are written as `safetensors`.

    Args:
        model_name_or_path, config, head, positions, sample, matching, return_report, kwargs: see [`convert`]. The
            source must come with a tokenizer.
        output_dir: a folder that is new or empty.
        save_report: whether to write the report to the same folder, as conversion_report.json.

    Returns:
        What [`convert`] returns.

    Raises:
        TypeError, ValueError: see [`convert`]; ValueError also if `output_dir` is not empty, or if the source has no
            fast tokenizer.
        OSError: if the model cannot be written, for example because the disk is full. What was written is removed.
    """
    check_output_dir(output_dir)
    files = {name: kwargs[name] for name in _FILE_ARGUMENTS if name in kwargs}
    tokenizer = load_tokenizer(model_name_or_path, **files)
    if not tokenizer.is_fast:
        raise ValueError(
            f"The source's tokenizer, {type(tokenizer).__name__}, is not fast, and AutoTokenizer loads only fast "
            "tokenizers for a model of this package: use convert(), and load the tokenizer by its class."
        )
    measure = return_report or save_report
    model, report = _convert(model_name_or_path, config, head, positions, sample, matching, measure, tokenizer, kwargs)
    if config.max_position_embeddings is not None:
        tokenizer.model_max_length = config.max_position_embeddings
    try:
        with moved_when_complete(Path(output_dir)) as partial:
            model.save_pretrained(partial)
            save_tokenizer(tokenizer, partial)
            if save_report:
                report.save(partial)
    except Exception as error:  # of any library
        raise OSError(f"Writing the model to {output_dir} failed, and nothing of it is left there: {error}") from error
    return (model, report) if return_report else model


def check_output_dir(output_dir: str | os.PathLike) -> None:
    """Raises ValueError unless a folder is new or empty, but for what a conversion that was killed has left."""
    folder = Path(output_dir)
    if folder.exists() and (not folder.is_dir() or any(path.name != PARTIAL for path in folder.iterdir())):
        raise ValueError(f"output_dir={str(output_dir)!r} exists and is not an empty folder: choose another.")
