# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: complete or absent, checked before they are used, and each a model by itself."""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from .identity import file_digest
from .results import write_json
from .saving import bare_model, load_weights

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
HISTORY = "history.jsonl"
BEST = "best_model"
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass
class CheckpointArguments:
    """When a run is saved, and from where it goes on."""

    output_dir: str = field(default="outputs", metadata={"help": "Everything is written here."})
    checkpointing_steps: int | None = field(
        default=None, metadata={"help": "Save a checkpoint every this many optimizer steps; by default none."}
    )
    checkpoints_total_limit: int | None = field(
        default=None, metadata={"help": "Keep only this many checkpoints, the newest ones; by default all."}
    )
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={"help": "Checkpoint to resume from: a folder, or 'latest' for the newest complete one."},
    )
    overwrite_output_dir: bool = field(
        default=False,
        metadata={"help": "Remove the checkpoints of an earlier run from --output_dir and start from the beginning."},
    )

    def __post_init__(self):
        for name in ("checkpointing_steps", "checkpoints_total_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, but is {value}.")
        if self.overwrite_output_dir and self.resume_from_checkpoint is not None:
            raise ValueError("--overwrite_output_dir begins anew, --resume_from_checkpoint goes on: give one of them.")


def _sync(path: Path) -> None:
    """Waits until what was written to a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None: every file must be there with the content that was written."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return f"{checkpoint / MANIFEST} cannot be read ({error})"
    for name, digest in manifest.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{path} is missing"
        if file_digest(path) != digest:
            return f"{path} is damaged: it is not what was saved"
    return None


def list_checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    if not os.path.isdir(output_dir):
        return []
    numbered = [(int(match[1]), path) for path in Path(output_dir).iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


def make_way(args: CheckpointArguments, remove: bool = True) -> None:
    """Makes sure that a fresh start meets no checkpoints of an earlier run, which would later be taken for its own.

    Args:
        remove: whether this process removes them, with `--overwrite_output_dir`.

    Raises:
        ValueError: if there are some, and neither to go on from nor to be removed.
    """
    found = list_checkpoints(args.output_dir)
    if args.resume_from_checkpoint is not None and (found or args.resume_from_checkpoint != "latest"):
        return
    if found and not args.overwrite_output_dir:
        raise ValueError(
            f"--output_dir {args.output_dir} holds checkpoints of an earlier run, {', '.join(p.name for p in found)}. "
            "Go on with it (--resume_from_checkpoint latest), remove them (--overwrite_output_dir), or give another "
            "--output_dir."
        )
    if remove:
        remove_checkpoints(args.output_dir)
        _remove(Path(args.output_dir, HISTORY))


def remove_checkpoints(output_dir: str | os.PathLike) -> None:
    """Removes what a run keeps to go on from, and the best model that it kept aside."""
    for path in (*list_checkpoints(output_dir), Path(output_dir, BEST)):
        _remove(path)


def find_checkpoint(args: CheckpointArguments) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` means; None to start anew.

    `"latest"` takes the newest whole one, with a warning that names each damaged one before it, and starts anew where
    there is none.

    Raises:
        FileNotFoundError: if a named folder does not exist.
        ValueError: if a named checkpoint is damaged, or all are.
    """
    if args.resume_from_checkpoint is None:
        return None
    if args.resume_from_checkpoint != "latest":
        checkpoint = Path(args.resume_from_checkpoint)
        if not checkpoint.is_dir():
            known = ", ".join(str(path) for path in list_checkpoints(args.output_dir)) or "none"
            raise FileNotFoundError(
                f"--resume_from_checkpoint {checkpoint} does not exist; the checkpoints of --output_dir are: {known}."
            )
        if problem := damage(checkpoint):
            raise ValueError(f"{problem}. Use another checkpoint, or --resume_from_checkpoint latest.")
        return checkpoint
    problems = []
    for checkpoint in reversed(list_checkpoints(args.output_dir)):
        problem = damage(checkpoint)
        if problem is None:
            return checkpoint
        problems.append(problem)
        warnings.warn(f"{problem}. Taking the checkpoint before it.", stacklevel=2)
    if problems:
        raise ValueError("No whole checkpoint is left: " + "; ".join(problems) + ". Remove them to start anew.")
    return None


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """Where the run stood that saved a checkpoint."""
    return json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8"))


def save_checkpoint(
    accelerator: Accelerator,
    args: CheckpointArguments,
    step: int,
    progress: Mapping[str, Any],
    save_model: Callable[[Path], None],
) -> Path:
    """Saves model, optimizer and random state as `checkpoint-{step}`; called by all processes.

    It is written aside, synced, and renamed: whatever happens, a folder of that name is whole. Afterwards the oldest
    beyond `checkpoints_total_limit` are removed.

    Args:
        progress: JSON values that say where the run stands, of the main process.
        save_model: writes the model as `from_pretrained` loads it; called by all processes.

    Raises:
        FloatingPointError: if a weight is not finite.
        OSError: if it cannot be written, for example because the disk is full; the checkpoints before it stay.
    """
    output_dir = Path(args.output_dir)
    final = output_dir / f"checkpoint-{step}"
    partial = output_dir / f".{final.name}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    # The weights are in the model's folder; those that are divided among processes are also saved as they lie.
    hook = accelerator.register_save_state_pre_hook(lambda models, states, folder: states.clear())
    try:
        save_model(partial)
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (partial / PROGRESS).write_text(json.dumps(dict(progress)), encoding="utf-8")
            if (output_dir / HISTORY).is_file():
                shutil.copyfile(output_dir / HISTORY, partial / HISTORY)
            files = sorted(path for path in partial.rglob("*") if path.is_file())
            for path in files:
                _sync(path)
            manifest = {path.relative_to(partial).as_posix(): file_digest(path) for path in files}
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
            _sync(partial / MANIFEST)
            _sync(partial)
            _remove(final)  # of a run that was resumed from before it
            partial.rename(final)
            _sync(output_dir)
    except FloatingPointError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    except Exception as error:
        # Whatever library wrote the file that failed, the reader is told what it means and what is left.
        shutil.rmtree(partial, ignore_errors=True)
        kept = list_checkpoints(output_dir)
        raise OSError(
            f"Saving {final} failed: {error}. {f'{kept[-1]} is whole' if kept else 'No checkpoint was saved before'}. "
            "Make room in --output_dir, and go on with --resume_from_checkpoint latest."
        ) from error
    finally:
        hook.remove()
    if accelerator.is_main_process and args.checkpoints_total_limit is not None:
        for old in list_checkpoints(output_dir)[: -args.checkpoints_total_limit]:
            if old != final:
                _remove(old)
    accelerator.wait_for_everyone()
    return final


class BestModel:
    """The model of a run's best evaluation, in a folder `best_model` of `output_dir`: complete or absent.

    Args:
        accelerator: of the run.
        output_dir: of the run.
        save_model: writes a prepared model into a folder; called by all processes.
    """

    def __init__(
        self, accelerator: Accelerator, output_dir: str | os.PathLike, save_model: Callable[[nn.Module, Path], None]
    ):
        self.accelerator, self.folder, self.save_model = accelerator, Path(output_dir, BEST), save_model

    def step(self) -> int | None:
        """The step whose model is kept."""
        path = self.folder / "best.json"
        return json.loads(path.read_text())["step"] if path.is_file() else None

    def save(self, model: nn.Module, **why: Any) -> None:
        """Keeps a prepared model in place of the one before, and JSON values that say why, its `step` among them."""
        partial = self.folder.with_name(f".{BEST}.partial")
        self.save_model(model, partial)
        if self.accelerator.is_main_process:
            write_json(partial / "best.json", why)
            _remove(self.folder)
            partial.rename(self.folder)
        self.accelerator.wait_for_everyone()

    def load(self, model: nn.Module) -> None:
        """Loads what is kept into the prepared model."""
        load_weights(bare_model(self.accelerator, model), self.folder)


def _remove(path: Path) -> None:
    """Removes a file, or a folder of which no part remains under its name at any moment."""
    if path.is_dir():
        aside = path.with_name(f".{path.name}.removed")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside)
    else:
        path.unlink(missing_ok=True)


def load_checkpoint(accelerator: Accelerator, checkpoint: Path) -> None:
    """Loads the weights, the optimizer's and the random state that [`save_checkpoint`] saved, into what `accelerator`
    prepared. On other processes than those that saved it, random states are left as they are."""

    def load_models(models: list, folder: str) -> None:
        while models:
            load_weights(bare_model(accelerator, models.pop()), folder)

    hook = accelerator.register_load_state_pre_hook(load_models)
    try:
        accelerator.load_state(str(checkpoint))
    finally:
        hook.remove()
