# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: complete or absent, checked before they are used."""

import hashlib
import json
import os
import re
import shutil
import signal
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from accelerate import Accelerator

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
_NAME = re.compile(r"checkpoint-(\d+)")


@dataclass
class CheckpointArguments:
    """When a run is saved, and from where it goes on."""

    output_dir: str = field(default="outputs", metadata={"help": "Everything is written here."})
    checkpointing_steps: int | None = field(
        default=None, metadata={"help": "Save a checkpoint every so many optimizer steps; none if not given."}
    )
    checkpoints_total_limit: int | None = field(
        default=None, metadata={"help": "Keep only the newest so many checkpoints; all if not given."}
    )
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "A checkpoint folder to go on from, or 'latest' for the newest whole one."}
    )

    def __post_init__(self):
        for name in ("checkpointing_steps", "checkpoints_total_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, but is {value}.")


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
        if _digest(path) != digest:
            return f"{path} is damaged: it is not what was saved"
    return None


def list_checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    if not os.path.isdir(output_dir):
        return []
    numbered = [(int(match[1]), path) for path in Path(output_dir).iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(numbered)]


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


def save_checkpoint(
    accelerator: Accelerator, args: CheckpointArguments, step: int, progress: Mapping[str, Any]
) -> Path:
    """Saves models, optimizers, schedules and random state as `checkpoint-{step}`; called by all processes.

    It is written aside, synced, and renamed: whatever happens, a folder of that name is whole. Afterwards the oldest
    beyond `checkpoints_total_limit` are removed.

    Args:
        progress: JSON values that say where the run stands, of the main process.

    Raises:
        OSError: if it cannot be written, for example because the disk is full; the checkpoints before it stay.
    """
    output_dir = Path(args.output_dir)
    final = output_dir / f"checkpoint-{step}"
    partial = output_dir / f".{final.name}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    try:
        accelerator.save_state(str(partial), safe_serialization=True)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (partial / PROGRESS).write_text(json.dumps(dict(progress)))
            files = sorted(path for path in partial.rglob("*") if path.is_file())
            for path in files:
                _sync(path)
            manifest = {path.relative_to(partial).as_posix(): _digest(path) for path in files}
            (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
            _sync(partial / MANIFEST)
            _sync(partial)
            _remove(final)  # of a run that was resumed from before it
            partial.rename(final)
            _sync(output_dir)
    except Exception as error:
        # Whatever library wrote the file that failed, the reader is told what it means and what is left.
        shutil.rmtree(partial, ignore_errors=True)
        kept = list_checkpoints(output_dir)
        raise OSError(
            f"Saving {final} failed: {error}. {f'{kept[-1]} is whole' if kept else 'No checkpoint was saved before'}. "
            "Make room in --output_dir, and go on with --resume_from_checkpoint latest."
        ) from error
    if accelerator.is_main_process and args.checkpoints_total_limit is not None:
        for old in list_checkpoints(output_dir)[: -args.checkpoints_total_limit]:
            if old != final:
                _remove(old)
    accelerator.wait_for_everyone()
    return final


def _remove(checkpoint: Path) -> None:
    """Removes a checkpoint, of which no part remains under its name at any moment."""
    if checkpoint.exists():
        aside = checkpoint.with_name(f".{checkpoint.name}.removed")
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        shutil.rmtree(aside)


def load_checkpoint(accelerator: Accelerator, checkpoint: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Loads what [`save_checkpoint`] saved into the prepared objects, and returns its progress.

    Args:
        settings: what must be the same as when it was saved, by flag; compared with `progress["settings"]`.

    Raises:
        ValueError: if a setting differs.
    """
    progress = json.loads((checkpoint / PROGRESS).read_text())
    for name, value in settings.items():
        saved = progress["settings"].get(name)
        if saved != value:
            raise ValueError(
                f"{checkpoint} was saved with {name} = {saved}, and this run has {value}: a resumed run must go on as "
                f"it began. Use {saved} again, or another --output_dir without --resume_from_checkpoint."
            )
    accelerator.load_state(str(checkpoint))
    return progress


class StopSignal:
    """Within a `with` block, SIGTERM no longer ends the process: it is noted in `received`.

    Only the main thread can handle signals; elsewhere nothing changes.
    """

    received = False
    _previous: Any = None

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = True
