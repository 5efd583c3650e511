# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a training run: complete or absent, checked before use, and each a model that can be loaded."""

import contextlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import nn

from .identity import file_digest
from .results import write_json
from .saving import bare_model, load_weights
from .selection import Best

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
HISTORY = "history.jsonl"
BEST = "best_model"
_NAME = re.compile(r"checkpoint-(\d+)")
_SUPERSEDED = "superseded-"

# Flags that name a folder, which may be of an earlier run, or a repository on the Hub; --config_name also a file.
SOURCES = ("model_name_or_path", "teacher_model_name_or_path", "config_name", "tokenizer_name")


@dataclass
class CheckpointArguments:
    """When checkpoints are saved, and from which one a run resumes."""

    output_dir: str = field(default="outputs", metadata={"help": "Folder to write to."})
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
        metadata={
            "help": "Remove the checkpoints of an earlier run from --output_dir and start from the beginning; with "
            "--no_do_train, replace the results of a training."
        },
    )

    def __post_init__(self):
        for name in ("checkpointing_steps", "checkpoints_total_limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, but is {value}.")
        if self.overwrite_output_dir and self.resume_from_checkpoint is not None:
            raise ValueError(
                "--overwrite_output_dir starts again, --resume_from_checkpoint resumes: give only one of them."
            )


def _sync(path: Path) -> None:
    """Waits until a file or folder has been written to the disk. Windows cannot wait for what is open for reading."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None if every file has the content that was written."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return f"{checkpoint / MANIFEST} cannot be read ({error})"
    for name, digest in manifest.items():
        path = checkpoint / name
        if not path.is_file():
            return f"{path} is missing"
        if file_digest(path) != digest:
            return f"{path} is damaged: its content is not what was saved"
    return None


def _numbered_checkpoints(output_dir: str | os.PathLike) -> list[tuple[int, Path]]:
    if not os.path.isdir(output_dir):
        return []
    paths = Path(output_dir).iterdir()
    return sorted((int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name)))


def list_checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return [path for _, path in _numbered_checkpoints(output_dir)]


def make_way(args: CheckpointArguments, remove: bool = True) -> None:
    """Makes sure that a new run finds no checkpoints of an earlier run, which it could later mistake for its own.

    Args:
        remove: whether this process removes them, with `--overwrite_output_dir`, and what a killed run has left.

    Raises:
        ValueError: if there are checkpoints and the flags neither resume from them nor remove them.
    """
    if remove:
        remove_leftovers(args.output_dir)
    found = list_checkpoints(args.output_dir)
    if args.resume_from_checkpoint is not None and (found or args.resume_from_checkpoint != "latest"):
        return
    if found and not args.overwrite_output_dir:
        raise ValueError(
            f"--output_dir {args.output_dir} has checkpoints of an earlier run, {', '.join(p.name for p in found)}. "
            "Resume it (--resume_from_checkpoint latest), remove them (--overwrite_output_dir), or give another "
            "--output_dir."
        )
    for name in SOURCES:
        source = getattr(args, name, None)
        for folder in _of_a_run(args.output_dir):
            if source is not None and Path(source).resolve().is_relative_to(folder.resolve()):
                raise ValueError(
                    f"--{name} {source} is of an earlier run in --output_dir {args.output_dir}, whose checkpoints and "
                    "best model are removed: give another --output_dir."
                )
    if remove:
        remove_checkpoints(args.output_dir)
        _remove(Path(args.output_dir, HISTORY))


def remove_checkpoints(output_dir: str | os.PathLike) -> None:
    """Removes the checkpoints of a run and its best model."""
    for path in _of_a_run(output_dir):
        _remove(path)


def _of_a_run(output_dir: str | os.PathLike) -> list[Path]:
    superseded = Path(output_dir).glob(f"{_SUPERSEDED}checkpoint-*")
    return [*list_checkpoints(output_dir), *superseded, Path(output_dir, BEST)]


def remove_leftovers(output_dir: str | os.PathLike) -> None:
    """Removes the parts of checkpoints and of best models that a killed run has left."""
    for name in ("*checkpoint-*", BEST):  # superseded checkpoints, too
        for end in ("partial", "removed"):
            for path in Path(output_dir).glob(f".{name}.{end}"):
                shutil.rmtree(path, ignore_errors=True)


def supersede_checkpoints(output_dir: str | os.PathLike, step: int) -> list[Path]:
    """Renames the checkpoints after a step, from which a run resumes, to `superseded-checkpoint-{step}`, and returns
    them: otherwise "latest" would name them later, and `checkpoints_total_limit` would count them as the newest."""
    renamed = []
    for number, path in _numbered_checkpoints(output_dir):
        if number > step:
            new = path.with_name(_SUPERSEDED + path.name)
            _remove(new)
            renamed.append(path.rename(new))
    return renamed


def find_checkpoint(args: CheckpointArguments) -> Path | None:
    """The checkpoint that `resume_from_checkpoint` names; None to start from the beginning.

    `"latest"` is the newest complete checkpoint. A warning names each newer one that is damaged. Without any
    checkpoint, the run starts from the beginning.

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
        warnings.warn(f"{problem}. Using the previous checkpoint.", stacklevel=2)
    if problems:
        raise ValueError("No complete checkpoint is left: " + "; ".join(problems) + ". Remove them to start again.")
    return None


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """The position of the run when it saved a checkpoint."""
    return json.loads((checkpoint / PROGRESS).read_text(encoding="utf-8"))


def save_checkpoint(
    accelerator: Accelerator,
    args: CheckpointArguments,
    step: int,
    progress: Mapping[str, Any],
    save_model: Callable[[Path], None],
) -> Path:
    """Saves model, optimizer and random state as `checkpoint-{step}`; called by all processes.

    It is written to a temporary folder, synced, and renamed, so that a folder of that name is always complete. Then
    the oldest checkpoints beyond `checkpoints_total_limit` are removed.

    Args:
        progress: the position of the run as JSON values, from the main process.
        save_model: writes the model as `from_pretrained` loads it; called by all processes.

    Raises:
        FloatingPointError: if a weight is not finite.
        OSError: if it cannot be written, for example because the disk is full. Earlier checkpoints stay.
    """
    output_dir = Path(args.output_dir)
    final = output_dir / f"checkpoint-{step}"
    partial = output_dir / f".{final.name}.partial"
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    # `save_model` saves the weights; sharded weights are also saved by Accelerate, in parts.
    hook = accelerator.register_save_state_pre_hook(lambda models, states, folder: states.clear())
    with _clear_failure(partial, final), contextlib.ExitStack() as at_the_end:
        at_the_end.callback(hook.remove)
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
            _remove(final)
            partial.rename(final)
            _sync(output_dir)
    if accelerator.is_main_process and args.checkpoints_total_limit is not None:
        for old in list_checkpoints(output_dir)[: -args.checkpoints_total_limit]:
            if old != final:
                _remove(old)
    accelerator.wait_for_everyone()
    return final


@contextlib.contextmanager
def _clear_failure(partial: Path, final: Path) -> Iterator[None]:
    """Removes the partial folder after a failure, whose error may come from any library, and says what it means for
    the run and which checkpoint is left."""
    try:
        yield
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, FloatingPointError):  # of weights, which room does not mend
            raise
        raise OSError(f"Saving {final} failed: {error}. {how_to_go_on(final.parent)}") from error


def how_to_go_on(output_dir: str | os.PathLike) -> str:
    """What is left of a run whose files could not be written, and what to do."""
    kept = list_checkpoints(output_dir)
    return (
        f"{f'{kept[-1]} is complete' if kept else 'There is no checkpoint'}. Make room in --output_dir, and resume by "
        "--resume_from_checkpoint latest."
    )


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
        """The step of the saved model; None if there is none."""
        return self._why().get("step")

    def save(self, model: nn.Module, **why: Any) -> None:
        """Saves a prepared model in place of the previous best one, with JSON values such as its `step`.

        Raises FloatingPointError and OSError as [`save_checkpoint`] does.
        """
        with self._replacement() as partial:
            self.save_model(model, partial)
            if self.accelerator.is_main_process:
                write_json(partial / "best.json", why)
        self.accelerator.wait_for_everyone()

    def adopt(self, output_dir: Path, best: Best) -> bool:
        """Takes over the best model of a run from another folder, if it is that of this evaluation. Returns whether
        this folder now has it: it may also have been here, or have that of yet another run."""
        source = BestModel(self.accelerator, output_dir, self.save_model)
        if self.accelerator.is_main_process and source._is_of(best):
            with self._replacement() as partial:
                shutil.copytree(source.folder, partial, dirs_exist_ok=True)
        self.accelerator.wait_for_everyone()
        return self._is_of(best)

    def _is_of(self, best: Best) -> bool:
        why = self._why()
        return (why.get("step"), why.get("value")) == (best.step, best.value)

    def _why(self) -> dict[str, Any]:
        """What was saved beside the model; nothing if there is none."""
        path = self.folder / "best.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    @contextlib.contextmanager
    def _replacement(self) -> Iterator[Path]:
        """The folder to write in, which then takes the place of the previous one."""
        partial = self.folder.with_name(f".{BEST}.partial")
        with _clear_failure(partial, self.folder):
            yield partial
            if self.accelerator.is_main_process:
                _remove(self.folder)
                partial.rename(self.folder)

    def load(self, model: nn.Module) -> None:
        """Loads the saved weights into the prepared model."""
        load_weights(bare_model(self.accelerator, model), self.folder)


def _remove(path: Path) -> None:
    """Removes a file; or a folder, which is renamed first, so that no incomplete folder ever has its name."""
    if path.is_dir():
        aside = path.with_name(f".{path.name}.removed")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        shutil.rmtree(aside)
    else:
        path.unlink(missing_ok=True)


def load_checkpoint(accelerator: Accelerator, checkpoint: Path) -> None:
    """Loads the weights, the optimizer state and the random state of a checkpoint into the objects that `accelerator`
    has prepared. If the number of processes has changed, additional processes keep their random states."""

    def load_models(models: list, folder: str) -> None:
        while models:
            load_weights(bare_model(accelerator, models.pop()), folder)

    hook = accelerator.register_load_state_pre_hook(load_models)
    try:
        accelerator.load_state(str(checkpoint))
    finally:
        hook.remove()
