# SPDX-License-Identifier: Apache-2.0
"""The identity of a run: settings, data and model; and which of them may change on resuming."""

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from datasets import Dataset, IterableDataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase

# Paths, and flags of how a run is shown, saved, published and accelerated: no result depends on them.
HOUSEKEEPING = frozenset(
    "output_dir overwrite_output_dir cache_dir overwrite_cache checkpointing_steps checkpoints_total_limit"
    " resume_from_checkpoint logging_steps with_tracking report_to project_name run_name push_to_hub hub_model_id"
    " hub_token hub_private_repo hub_strategy preprocessing_num_workers dataloader_num_workers dataloader_pin_memory"
    " grid keep_best_only language license".split()
)

# Names and paths of data and models: their content is compared, so they may be moved.
PLACES = frozenset(
    "train_file validation_file test_file validation_mismatched_file test_mismatched_file test_ax_file dataset_name"
    " dataset_config_name data_dir model_name_or_path teacher_model_name_or_path config_name tokenizer_name"
    " trust_remote_code".split()
)

# Flags that change the training data or the model's configuration, which are compared directly.
SHOWN_BY_CONTENT = PLACES | frozenset(
    "task_name config_overrides max_train_samples text_column_names text_column_name label_column_name label_names"
    " label_all_tokens label_delimiter do_regression multi_label ignore_mismatched_sizes truncation_strategy"
    " doc_stride validation_split validation_split_percentage short_seq_prob start_from_mnli task attention data_seed"
    " generated_rows".split()
)

# Flags that may change on resuming: the length of the run, how a step is divided, when and on what it is evaluated.
MAY_CHANGE = frozenset(
    "max_train_steps num_train_epochs per_device_train_batch_size per_device_eval_batch_size"
    " gradient_accumulation_steps gradient_checkpointing torch_compile torch_compile_backend pad_to_multiple_of"
    " max_skipped_steps max_eval_samples max_predict_samples eval_strategy eval_steps metric_for_best_model"
    " greater_is_better load_best_model_at_end early_stopping_patience early_stopping_threshold do_train"
    " return_entity_level_metrics n_best_size max_answer_length null_score_diff_threshold"
    " version_2_with_negative".split()
)

# How a step is divided: its rows are the product of these and the number of processes.
DIVISION = ("per_device_train_batch_size", "gradient_accumulation_steps")

# Settings without which evaluations cannot be compared; they may change, too.
EVALUATED_BY = ("the metric of the best model", "the validation data")

# The weights that a run started from. On resuming, all weights come from the checkpoint: only the record of the run
# depends on these.
BEGAN_WITH = "the model that it began with"

# Flags that users change on purpose after a run diverged, and what changes unnoticed: they cause a warning.
WARNED = frozenset(
    "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_ratio num_warmup_steps max_grad_norm mixed_precision"
    " versions".split()
) | {BEGAN_WITH}

# Fields of a configuration that follow from the class, or say how a model was saved.
NOT_OF_THE_MODEL = frozenset("transformers_version _name_or_path architectures auto_map dtype torch_dtype".split())

# The behaviour of runs before a flag existed.
BEFORE_THE_FLAG = {"optim": "adamw"}

_PACKAGES = ("transformers", "accelerate")
_SAMPLED_BLOCKS, _ROWS_OF_A_BLOCK = 250, 1000


def flags(*arguments: Any, leave_out: Iterable[str] = HOUSEKEEPING) -> dict[str, Any]:
    """The fields of dataclasses by name, without some, and without secret ones, whose names end in `_token`."""
    return {
        name: value
        for part in arguments
        for name, value in asdict(part).items()
        if name not in set(leave_out) and not name.endswith("_token")
    }


def data_digest(dataset: Dataset | IterableDataset) -> str:
    """A digest of the content of a data set: of all rows, or of 250,000 evenly spread rows of a larger one; of a
    stream, of its first hundred rows."""
    digest = hashlib.sha256()
    if isinstance(dataset, IterableDataset):
        for row in islice(dataset, 100):
            digest.update(repr(sorted(row.items())).encode())
        return digest.hexdigest()
    digest.update(repr((len(dataset), dataset.column_names)).encode())
    starts = range(0, len(dataset), _ROWS_OF_A_BLOCK)
    arrow = dataset.with_format("arrow")
    for i in np.unique(np.linspace(0, len(starts) - 1, _SAMPLED_BLOCKS).astype(int)) if len(starts) else ():
        block = arrow[starts[i] : starts[i] + _ROWS_OF_A_BLOCK]
        for column in block.itercolumns():
            _add(digest, column.combine_chunks())
    return digest.hexdigest()


def _add(digest: Any, values: pa.Array) -> None:
    if pa.types.is_list(values.type) and values.null_count == 0:
        digest.update(values.value_lengths().to_numpy().tobytes())
        _add(digest, values.flatten())
    elif (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)) and values.null_count == 0:
        digest.update(values.to_numpy().tobytes())
    else:
        digest.update(repr(values.to_pylist()).encode())


def weights_digest(model_name_or_path: str, config: PretrainedConfig) -> str:
    """A digest of the weights of a local model, or the commit of one on the Hub."""
    folder = Path(model_name_or_path)
    if not folder.is_dir():
        return f"{model_name_or_path}@{getattr(config, '_commit_hash', None)}"
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".bin"):
            digest.update(file_digest(path).encode())
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of all tokens and their ids."""
    return hashlib.sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


# Case, accents, numbers, punctuation, white space, other writing systems, and a combined character.
_PROBE = "The NAÏVE café's 3,141.59 costs\tdon't—“quoted”  e\u0301 東京 Москва \U0001f642\n[x]_y/z-w "


def encoding_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of how a tokenizer encodes a text and a pair of texts: of its normalization, its way of dividing words,
    its merges and its special tokens."""
    texts = ((_PROBE,), (_PROBE, _PROBE.upper()))
    encoded = [tokenizer(*text, truncation=False, verbose=False)["input_ids"] for text in texts]
    return hashlib.sha256(repr(encoded).encode()).hexdigest()


def model_settings(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The configuration and the vocabulary of a model, for the settings of a run."""
    fields = {name: value for name, value in config.to_dict().items() if name not in NOT_OF_THE_MODEL}
    # In the form that JSON returns: keys of dictionaries are strings.
    fields = {name: _text_keys(value) for name, value in fields.items()}
    return {"the model's configuration": fields, "the tokenizer's vocabulary": vocabulary_digest(tokenizer)}


def _text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _text_keys(item) for key, item in value.items()}
    return [_text_keys(item) for item in value] if isinstance(value, list | tuple) else value


def run_settings(*arguments: Any, **content: Any) -> dict[str, Any]:
    """The settings that are compared on resuming: flags that determine training, data and model, and versions.

    Args:
        arguments: the dataclasses of the flags.
        content: other settings that must be the same, by a descriptive name.
    """
    return {
        **flags(*arguments, leave_out=HOUSEKEEPING | SHOWN_BY_CONTENT),
        **content,
        "versions": {"torch": torch.__version__, **{name: version(name) for name in _PACKAGES}},
    }


def compare(saved: Mapping[str, Any], current: Mapping[str, Any], where: str) -> None:
    """Refuses to resume with settings that must match and differ; warns of other differences that matter.

    Args:
        saved, current: results of [`run_settings`].
        where: the checkpoint, for messages.

    Raises:
        ValueError: if settings differ that must match; the message names all of them.
    """
    refused: list[str] = []
    warned: list[str] = []
    for name in dict.fromkeys([*saved, *current]):
        before, now = saved.get(name, BEFORE_THE_FLAG.get(name)), current.get(name)
        if before == now or name in MAY_CHANGE or name in EVALUATED_BY:
            continue
        if name == BEGAN_WITH and not (name in saved and name in current):
            continue
        (warned if name in WARNED else refused).extend(_differences(name, before, now))
    if refused:
        raise ValueError(
            f"{where} was saved by a run with other settings: {'; '.join(refused)}. A resumed run must have the same "
            "settings: use these again, or begin a new run in another --output_dir, without --resume_from_checkpoint."
        )
    if warned:
        warnings.warn(f"Since {where} was saved, settings have changed: {'; '.join(warned)}.", stacklevel=2)


def _differences(name: str, before: Any, now: Any) -> list[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        return [
            difference
            for key in dict.fromkeys([*before, *now])
            if before.get(key) != now.get(key)
            for difference in _differences(f"{name}: {key}", before.get(key), now.get(key))
        ]
    if " " in name:
        before, now = (value[:12] if isinstance(value, str) and len(value) == 64 else value for value in (before, now))
    else:
        name = f"--{name}"
    return [f"{name} was {before} and is {now}"]
