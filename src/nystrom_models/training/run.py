# SPDX-License-Identifier: Apache-2.0
"""The beginning and the end of a run: the same for pretraining and fine-tuning."""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import datasets
import transformers
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, TorchDynamoPlugin
from transformers import AutoConfig, PreTrainedModel, set_seed

from ..models.configuration_base import BaseConfig
from .arguments import RunArguments
from .curve import plot_history
from .hub import push
from .loop import TrainingState, create_accelerator
from .model_card import write_model_card
from .optimization import OptimizationArguments
from .results import write_json, write_results

# What is no hyper-parameter: where things lie, and how the run is shown, saved and published.
_HOUSEKEEPING = {
    *("output_dir", "cache_dir", "checkpointing_steps", "checkpoints_total_limit", "resume_from_checkpoint"),
    *("train_file", "validation_file", "test_file", "validation_mismatched_file", "test_mismatched_file"),
    *("with_tracking", "report_to", "push_to_hub", "hub_model_id", "hub_token", "hub_private_repo", "logging_steps"),
    *("preprocessing_num_workers", "dataloader_num_workers", "eval_strategy", "eval_steps"),
}


def start_run(args: RunArguments, optimization: OptimizationArguments) -> Accelerator:
    """Makes `--output_dir` and the accelerator, starts the trackers, sets the seed, and quiets all but one process."""
    os.makedirs(args.output_dir, exist_ok=True)
    options: dict[str, Any] = {}
    if args.torch_compile:
        # Batches differ in length: one graph for all of them.
        options["dynamo_plugin"] = TorchDynamoPlugin(backend=args.torch_compile_backend.upper(), dynamic=True)
    if args.with_tracking:
        options |= {"log_with": args.report_to, "project_dir": args.output_dir}
    accelerator = create_accelerator(
        optimization.gradient_accumulation_steps,
        args.mixed_precision,
        # Processes read a stream side by side: batches of different lengths cannot be dispatched from one.
        dataloader_config=DataLoaderConfiguration(dispatch_batches=False),
        **options,
    )
    if not accelerator.is_main_process:
        datasets.disable_progress_bars()
        transformers.logging.disable_progress_bar()
        transformers.logging.set_verbosity_error()
    if args.with_tracking:
        config = {name: str(value) for name, value in _hyperparameters(args, optimization).items()}
        accelerator.init_trackers("logs", config=config)
    set_seed(args.seed)
    return accelerator


def prepare_model(model: PreTrainedModel, args: RunArguments) -> None:
    """Sets in `model` what the flags ask for."""
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def _hyperparameters(*arguments: Any) -> dict[str, Any]:
    return {
        name: value
        for part in arguments
        for name, value in asdict(part).items()
        if name not in _HOUSEKEEPING and value is not None and value is not False
    }


def finish_run(
    accelerator: Accelerator,
    state: TrainingState,
    results: Mapping[str, Any],
    arguments: Sequence[Any],
    metrics: Mapping[str, float],
    **card: Any,
) -> None:
    """Writes what a run leaves beside its model, and uploads it if asked to; called by all processes.

    `all_results.json`, `history.jsonl` with the logged figures, `training_curve.png`, and, for models of this
    package, the model card.

    Args:
        accelerator: of [`start_run`].
        state: of the finished training; the model is saved already.
        results: what `all_results.json` holds.
        arguments: the dataclasses of the flags; the first one is the [`RunArguments`].
        metrics: what the card reports.
        card: further fields of [`model_card`].
    """
    args: RunArguments = arguments[0]
    if accelerator.is_main_process:
        write_results(args.output_dir, results, *arguments)
        write_json(Path(args.output_dir, "history.jsonl"), state.history, lines=True)
        plot_history(
            {Path(args.output_dir).resolve().name: state.history}, Path(args.output_dir, "training_curve.png")
        )
        if isinstance(AutoConfig.from_pretrained(args.output_dir), BaseConfig):
            hyperparameters = {**_hyperparameters(*arguments), "steps": state.step}
            if accelerator.num_processes > 1:
                hyperparameters["processes"] = accelerator.num_processes
            write_model_card(
                args.output_dir,
                hub_model_id=args.hub_model_id,
                metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
                hyperparameters={
                    name: Path(value).name if isinstance(value, str) and os.path.exists(value) else value
                    for name, value in hyperparameters.items()
                },
                **card,
            )
        if args.push_to_hub:
            assert args.hub_model_id is not None
            url = push(args.output_dir, args.hub_model_id, args.hub_token, args.hub_private_repo)
            accelerator.print(f"Uploaded: {url}")
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.free_memory()
