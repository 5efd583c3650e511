# SPDX-License-Identifier: Apache-2.0
"""The beginning and the end of a run, shared by pretraining and fine-tuning."""

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType, ProjectConfiguration, TorchDynamoPlugin
from torch import nn
from transformers import AutoConfig, PreTrainedModel, set_seed

from ..data.loading import TrainingLoader
from ..models.configuration_base import BaseConfig
from .arguments import RunArguments
from .checkpoints import BEST, BestModel, list_checkpoints, make_way
from .curve import plot_history
from .folder_lock import folder_lock
from .hub import IGNORED_OF_CHECKPOINTS, check_metadata, create_repository, push
from .identity import HOUSEKEEPING, PLACES, flags, run_settings
from .launch import create_accelerator
from .loop import Evaluation, num_training_steps, train
from .model_card import write_model_card
from .objectives import Objective
from .optimization import OptimizationArguments
from .results import discard_results, read_results, write_results
from .scores import score_line
from .selection import Goal
from .state import TrainingState, log_evaluation

Scores = Callable[[nn.Module], Mapping[str, float]]

# The argument that names a run, by tracker. Other trackers use the project's name.
_RUN_NAMES = {
    "wandb": "name",
    "trackio": "name",
    "mlflow": "run_name",
    "clearml": "task_name",
    "swanlab": "experiment_name",
}


@contextmanager
def start_run(args: RunArguments) -> Iterator[Accelerator]:
    """Creates `--output_dir` and the accelerator, sets the seed, and silences all processes but the main one. Until
    the block ends, no other run can write to the folder.

    Raises:
        ValueError: if `--output_dir` has checkpoints of an earlier run, or another run is writing to it; with
            `--no_do_train`, if it has results of a training.
        NotADirectoryError, PermissionError: if `--output_dir` cannot be a folder to write to.
        PermissionError, ConnectionError: if the Hub would refuse the upload of `--push_to_hub`.
        ImportError: if a tracker is not installed.
    """
    options: dict[str, Any] = {}
    compiler: AbstractContextManager[Any] = nullcontext()
    if args.torch_compile:
        # Batches differ in length: one graph for all lengths.
        options["dynamo_plugin"] = TorchDynamoPlugin(backend=args.torch_compile_backend.upper(), dynamic=True)
        # Only lengths vary. Numbers such as a dropout must not: PyTorch 2.13 then cannot compile checkpointed layers.
        compiler = torch._dynamo.config.patch(specialize_float=True)
    if args.with_tracking:
        known = {str(LoggerType(tracker)) for tracker in get_available_trackers()} | {"all"}
        if missing := [name for name in args.report_to if name not in known]:
            raise ImportError(f"--report_to {' '.join(missing)} is not installed: pip install {' '.join(missing)}.")
        logs = ProjectConfiguration(args.output_dir, logging_dir=os.path.join(args.output_dir, "logs"))
        options |= {"log_with": args.report_to, "project_config": logs}
    accelerator = create_accelerator(args.mixed_precision, **options)
    create_folder(args.output_dir)
    with compiler, folder_lock(args.output_dir) if accelerator.is_main_process else nullcontext():
        if args.do_train:
            # What is wrong with the folder is said at once. An earlier run in it is removed when training begins:
            # until then, a misspelled name or a refused token leaves it as it is.
            make_way(args, remove=False)
        else:
            _refuse_to_replace(args)
        if args.push_to_hub and accelerator.is_main_process:
            # Before training: otherwise a wrong token would be found only at the end.
            # The full name, for the model card.
            args.hub_model_id = create_repository(str(args.hub_model_id), args.hub_token, args.hub_private_repo)
            check_metadata(args.language, args.license)
        if not accelerator.is_main_process:
            datasets.disable_progress_bars()
            transformers.logging.disable_progress_bar()
            transformers.logging.set_verbosity_error()
        set_seed(args.seed)
        yield accelerator


def create_folder(path: str) -> None:
    """Creates `--output_dir`; raises a NotADirectoryError or a PermissionError that names the flag."""
    try:
        os.makedirs(path, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"--output_dir {path} is a file or lies in one: give a folder.") from error
    except OSError as error:
        raise PermissionError(f"--output_dir {path} cannot be created: {error.strerror}. Give another.") from error
    if not os.access(path, os.W_OK):
        raise PermissionError(f"--output_dir {path} is not writable: give another.")


def _refuse_to_replace(args: RunArguments) -> None:
    """Raises a ValueError if results without training would replace those of a training, such as the model's own."""
    saved = read_results(args.output_dir)
    if saved is not None and saved.get("arguments", {}).get("do_train", True) and not args.overwrite_output_dir:
        raise ValueError(
            f"--output_dir {args.output_dir} has the all_results.json of a training, which --no_do_train would "
            "replace: give another --output_dir, or --overwrite_output_dir."
        )


def start_trackers(accelerator: Accelerator, args: RunArguments, *arguments: Any) -> None:
    """Starts the trackers and sends them the hyper-parameters: numbers as numbers, so that they can be sorted."""
    if not args.with_tracking:
        return
    known = (bool, int, float, str)
    hyperparameters = {
        name: value if isinstance(value, known) else json.dumps(value)
        for name, value in _hyperparameters(args, *arguments).items()
    }
    name = args.run_name or Path(args.output_dir).resolve().name
    accelerator.init_trackers(
        args.project_name,
        config=hyperparameters,
        init_kwargs={tracker: {option: name} for tracker, option in _RUN_NAMES.items()},
    )


def prepare_model(model: PreTrainedModel, args: RunArguments) -> None:
    """Applies flags to the model, such as gradient checkpointing."""
    if args.gradient_checkpointing:
        # Newer versions of Transformers have another name for it, and warn of the older one.
        older = model.gradient_checkpointing_enable
        getattr(model, "activation_checkpointing_enable", older)({"use_reentrant": False})


def prepare_to_evaluate(accelerator: Accelerator, model: PreTrainedModel) -> nn.Module:
    """The model on this process's device, for an evaluation alone, in which no weights are divided over processes:
    FSDP2 does not divide a model without its optimizer."""
    prepared: nn.Module = accelerator.prepare_model(model, device_placement=True, evaluation_mode=True)
    return prepared


def train_model(
    accelerator: Accelerator,
    model: PreTrainedModel,
    objective: Objective,
    loader: TrainingLoader,
    args: RunArguments,
    optimization: OptimizationArguments,
    scores: Scores,
    goal: Goal,
    desc: str,
    save_model: Callable[[nn.Module, Path], None],
    settings: Mapping[str, Any],
) -> TrainingState:
    """Trains as the flags say, and saves the last model, or the best one, in `--output_dir`.

    Args:
        accelerator: from [`start_run`].
        model: not yet prepared by the accelerator.
        objective, loader: see [`train`].
        args, optimization: the flags.
        scores: computes the held-out figures of the prepared model.
        goal: metric and direction by which models are compared.
        desc: label of the progress bar.
        save_model: writes the prepared model and the tokenizer to a folder.
        settings: further settings that must be the same on resuming, besides the flags.

    Returns:
        The position of the run. After a signal it is interrupted, and only a checkpoint has been saved.
    """
    processes = accelerator.num_processes
    where = accelerator.device.type
    if accelerator.mixed_precision != "no":
        where += f", {accelerator.mixed_precision}"
    steps = num_training_steps(loader, optimization, processes)
    accelerator.print(
        f"Training for {steps:,} steps of {loader.step_size(processes)} on {processes} "
        f"process{'es' if processes > 1 else ''} ({where}): {loader.summary(steps, processes)}"
    )
    upload = args.push_to_hub and args.hub_strategy == "every_save" and accelerator.is_main_process
    state = train(
        accelerator,
        model,
        objective,
        loader,
        optimization,
        args.seed,
        args.logging_steps,
        desc,
        checkpoints=args,
        evaluation=Evaluation(
            scores,
            args.eval_every,
            goal,
            BestModel(accelerator, args.output_dir, save_model) if args.load_best_model_at_end else None,
            args.early_stopping_patience,
            args.early_stopping_threshold,
        ),
        save_model=save_model,
        on_save=(lambda checkpoint: _push_checkpoint(args, checkpoint)) if upload else None,
        settings=run_settings(args, optimization, **settings),
    )
    if state.interrupted:
        accelerator.print(f"Stopped after step {state.step}; --resume_from_checkpoint latest continues.")
        return state
    if accelerator.is_main_process:
        # Those of an earlier run must not describe this model if this run does not live to write its own.
        discard_results(args.output_dir)
    # Saved first, so that a later failure cannot lose the training.
    with _clear_failure_of_the_end(args):
        save_model(state.model, Path(args.output_dir))
    return state


@contextmanager
def _clear_failure_of_the_end(args: RunArguments) -> Iterator[None]:
    """After a failure to write the final model, whose error may come from any library, says what is left."""
    try:
        yield
    except FloatingPointError:  # of weights, which room does not mend
        raise
    except Exception as error:
        checkpoints, best = list_checkpoints(args.output_dir), Path(args.output_dir, BEST)
        what = "nothing of the training is left, because --checkpointing_steps was not given."
        if checkpoints:
            what = f"{checkpoints[-1]} is complete, and --resume_from_checkpoint latest continues."
        elif best.is_dir():
            what = f"{best} is complete: move it to another folder, because a new run here removes it."
        raise OSError(
            f"Saving the model to --output_dir {args.output_dir} failed: {error}. Make room; {what}"
        ) from error


def final_scores(
    accelerator: Accelerator,
    state: TrainingState,
    args: RunArguments,
    scores: Scores,
    goal: Goal,
    save_model: Callable[[nn.Module, Path], None],
) -> dict[str, float]:
    """The held-out figures of the final model. With `--load_best_model_at_end`, that may be the model of an earlier
    step; the history has the figures of each step's own model."""
    metrics = dict(scores(state.model))
    log_evaluation(accelerator, state, metrics, args.output_dir)
    best = state.best
    if best.value is None:
        return metrics
    if goal.is_better(goal.value(metrics), best.value):
        best.value, best.step = goal.value(metrics), state.step
    elif args.load_best_model_at_end:
        kept = BestModel(accelerator, args.output_dir, save_model)
        accelerator.print(f"The model of step {kept.step()} is the best one, by {goal.metric}")
        kept.load(state.model)
        with _clear_failure_of_the_end(args):
            save_model(state.model, Path(args.output_dir))
        metrics = dict(scores(state.model))
    return metrics


def _push_checkpoint(args: RunArguments, folder: Path) -> None:
    """Uploads the model of a checkpoint; if this fails, the run continues."""
    step = folder.name.removeprefix("checkpoint-")
    try:
        push(
            folder,
            str(args.hub_model_id),
            args.hub_token,
            args.hub_private_repo,
            f"Step {step}",
            list(IGNORED_OF_CHECKPOINTS),
        )
    except (OSError, ValueError) as error:
        warnings.warn(f"The model of step {step} was not uploaded: {error}", stacklevel=2)


def _hyperparameters(*arguments: Any) -> dict[str, Any]:
    """The flags that were given, without paths and housekeeping."""
    found = flags(*arguments, leave_out=HOUSEKEEPING | PLACES)
    for number, overridden in (("max_train_steps", "num_train_epochs"), ("num_warmup_steps", "warmup_ratio")):
        if found.get(number) is not None:
            found.pop(overridden, None)
    return {name: value for name, value in found.items() if value is not None and value is not False}


def finish_run(
    accelerator: Accelerator,
    state: TrainingState | None,
    results: Mapping[str, Any],
    arguments: Sequence[Any],
    identity: Mapping[str, Any],
    metrics: Mapping[str, float],
    **card: Any,
) -> None:
    """Writes the files of a run besides its model, and uploads them on request; called by all processes.

    `all_results.json`, `training_curve.png`, and, for models of this package, the model card.

    Args:
        accelerator: from [`start_run`].
        state: the state of the finished training, whose model has been saved; None if nothing was trained.
        results: the content of `all_results.json`.
        arguments: the dataclasses of the flags; the first one is the [`RunArguments`].
        identity: digests of the data and of the initial weights.
        metrics: scores for the card.
        card: further fields of [`model_card`].
    """
    args: RunArguments = arguments[0]
    if accelerator.is_main_process:
        for split, scores in results.items():
            if split != "train":
                accelerator.print(f"{split}: {score_line(scores)}")
        write_results(args.output_dir, results, *arguments, identity=identity)
        if state is not None:
            _describe(accelerator, state, arguments, metrics, **card)
            if args.push_to_hub:
                url = push(args.output_dir, str(args.hub_model_id), args.hub_token, args.hub_private_repo)
                accelerator.print(f"Uploaded: {url}")
    accelerator.wait_for_everyone()
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.free_memory()


def _describe(
    accelerator: Accelerator,
    state: TrainingState,
    arguments: Sequence[Any],
    metrics: Mapping[str, float],
    **card: Any,
) -> None:
    """Draws the training curve and writes the model card."""
    args: RunArguments = arguments[0]
    name = Path(args.output_dir).resolve().name
    try:
        plot_history({name: state.history}, Path(args.output_dir, "training_curve.png"))
    except (ImportError, OSError) as error:
        accelerator.print(f"No training curve was drawn: {error}")
    config = AutoConfig.from_pretrained(args.output_dir, trust_remote_code=args.trust_remote_code)
    if not isinstance(config, BaseConfig):
        return
    hyperparameters = {**_hyperparameters(*arguments), "steps": state.step}
    if accelerator.num_processes > 1:
        hyperparameters["processes"] = accelerator.num_processes
    try:
        write_model_card(
            args.output_dir,
            hub_model_id=args.hub_model_id,
            metrics={name: value for name, value in metrics.items() if math.isfinite(value)},
            hyperparameters=hyperparameters,
            language=args.language,
            license=args.license,
            **card,
        )
    except OSError as error:
        accelerator.print(f"No model card was written: {error}")
