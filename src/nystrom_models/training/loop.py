# SPDX-License-Identifier: Apache-2.0
"""The training loop, shared by pretraining and fine-tuning."""

import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object, set_seed
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..data.loading import Step, TrainingLoader
from .checkpoints import (
    HISTORY,
    BestModel,
    CheckpointArguments,
    find_checkpoint,
    load_checkpoint,
    make_way,
    read_progress,
    save_checkpoint,
    supersede_checkpoints,
)
from .folder_lock import folder_lock
from .gradients import add_gradients
from .identity import EVALUATED_BY, compare, run_settings
from .memory import return_free_memory
from .objectives import Objective
from .optimization import OptimizationArguments, create_optimizer, create_scheduler, set_schedule_step
from .results import read_json_lines, write_json
from .saving import save_pretrained
from .scores import Sums, score_line
from .selection import Best, Goal
from .sharding import SHARDED, remove_second_names
from .signals import Signals
from .state import TrainingState, log_evaluation, log_figures

_STEPS_BETWEEN_RETURNS = 50  # of free memory


@dataclass
class Evaluation:
    """When and how a run is evaluated, and whether it keeps the best model or stops early."""

    function: Callable[[nn.Module], Mapping[str, float]]  # the held-out figures of the prepared model
    every: int | Literal["epoch"] | None = None  # optimizer steps
    goal: Goal | None = None  # metric and direction; needed for the fields below
    best_model: BestModel | None = None  # saves the best model so far
    patience: int | None = None  # stop after this many evaluations without an improvement
    threshold: float = 0.0  # smallest change that counts as an improvement


def num_training_steps(loader: TrainingLoader, args: OptimizationArguments, num_processes: int = 1) -> int:
    """Optimizer steps of a run."""
    if args.max_train_steps is not None:
        return args.max_train_steps
    # 1.1 epochs of 50 steps are 55 steps, but 1.1 * 50 is a little more.
    return max(1, math.ceil(args.num_train_epochs * loader.steps_per_epoch(num_processes) - 1e-6))


class TrainingLoop:
    """The parts of a run, which [`train`] calls in turn; its arguments are those of [`train`]."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        objective: Objective,
        loader: TrainingLoader,
        args: OptimizationArguments,
        seed: int,
        logging_steps: int,
        desc: str,
        checkpoints: CheckpointArguments | None,
        evaluation: Evaluation | None,
        save_model: Callable[[nn.Module, Path], None] | None,
        on_save: Callable[[Path], None] | None,
        settings: Mapping[str, Any] | None,
    ):
        if accelerator.gradient_accumulation_steps != 1:
            raise ValueError(
                f"The accelerator accumulates over {accelerator.gradient_accumulation_steps} micro-batches, which is "
                "set by --gradient_accumulation_steps: make the accelerator with create_accelerator()."
            )
        self.accelerator, self.objective, self.loader, self.args = accelerator, objective, loader, args
        self.seed, self.logging_steps, self.checkpoints = seed, logging_steps, checkpoints
        self.evaluation, self.save_model, self.on_save = evaluation, save_model, on_save
        self.output_dir = None if checkpoints is None else checkpoints.output_dir
        processes = accelerator.num_processes
        self.total_steps = num_training_steps(loader, args, processes)
        every = None if evaluation is None else evaluation.every
        self.eval_every = loader.steps_per_epoch(processes) if every == "epoch" else every
        self.settings = settings if settings is not None else run_settings(args)
        self.settings = {"an optimizer step": loader.step_size(processes), **self.settings}
        if evaluation is not None and evaluation.goal is not None:
            self.settings["the metric of the best model"] = asdict(evaluation.goal)

        if args.optim == "muon" and accelerator.distributed_type in SHARDED:
            raise ValueError(
                f"--optim muon needs whole matrices, and {accelerator.distributed_type.value} divides them: use adamw."
            )
        if objective.preparation is not None and objective.preparation.steps >= self.total_steps:
            raise ValueError(
                f"The first {objective.preparation.steps} steps match the teacher's attention, and the run has "
                f"{self.total_steps}: give more --max_train_steps, or fewer --attention_matching_steps."
            )
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            # DeepSpeed needs the number of rows of a micro-batch, which it cannot see, and clips gradients itself.
            config = accelerator.state.deepspeed_plugin.deepspeed_config
            config["train_micro_batch_size_per_gpu"] = args.per_device_train_batch_size
            config["gradient_clipping"] = args.max_grad_norm
        if accelerator.distributed_type == DistributedType.FSDP:
            remove_second_names(model)
        self.model, self.optimizer = accelerator.prepare(model, create_optimizer(model, args))
        self.scheduler = create_scheduler(self.optimizer, args, self.total_steps, objective.preparation)
        self.state = TrainingState(self.model)
        self.window = Sums(accelerator)  # since the last log
        self.num_tokens = torch.zeros((), dtype=torch.int64, device=accelerator.device)
        self.position: Mapping[str, Any] | None = None  # of the next step in the data
        self.signals = Signals(enabled=checkpoints is not None)  # without checkpoints, there is nothing to save
        self.stop = self.save_now = False  # what all processes have agreed to do after the current step
        self.bar = tqdm(total=self.total_steps, desc=desc, unit=" steps", disable=not accelerator.is_main_process)

    def run(self) -> TrainingState:
        """Trains to the end, or until a signal or early stopping ends the run."""
        if self.checkpoints is None:
            return self._run()
        Path(self.checkpoints.output_dir).mkdir(parents=True, exist_ok=True)
        with folder_lock(self.checkpoints.output_dir) if self.accelerator.is_main_process else nullcontext():
            return self._run()

    def _run(self) -> TrainingState:
        # Otherwise all processes would draw the same dropout. It adds their number, and NumPy takes seeds below 2**32.
        set_seed(self.seed % (2**32 - self.accelerator.num_processes), device_specific=True)
        self.restore()
        self.model.train()
        self.started = time.perf_counter() - self.state.seconds
        self.logged = self.state.seconds, self.state.num_tokens  # at the last log
        with self.signals, self.bar:
            if self.state.step > 0 and not (self.state.is_evaluated or self.state.stopped_early):
                self.evaluate()  # this was the last step of a shorter run, which does not evaluate it before saving
            if self.state.step < self.total_steps and not self.state.stopped_early:
                for step in self.steps():
                    self.take_step(step)
                    self.log()
                    self.evaluate()
                    self.save()
                    if self.accelerator.device.type == "cpu" and self.state.step % _STEPS_BETWEEN_RETURNS == 0:
                        return_free_memory()
                    if self.state.interrupted or self.state.stopped_early or self.state.step == self.total_steps:
                        break
            if not self.state.interrupted and self.any_process(self.signals.stop):
                self.signals.end_late()
        return self.state

    def any_process(self, flag: bool) -> bool:
        """Whether the flag is true on any process; all of them call it equally often."""
        if self.accelerator.num_processes == 1:
            return flag
        return bool(self.accelerator.reduce(torch.tensor(float(flag), device=self.accelerator.device), "sum"))

    def steps(self):
        """The steps of this process, from the current position of the run."""
        processes, index = self.accelerator.num_processes, self.accelerator.process_index
        return self.loader.steps(processes, index, self.position, self.any_process)

    def restore(self) -> None:
        """Resumes from the checkpoint that the flags name, if any."""
        if self.checkpoints is None:
            return
        make_way(self.checkpoints, remove=self.accelerator.is_main_process)
        checkpoint = find_checkpoint(self.checkpoints)
        if checkpoint is None:
            return
        progress = read_progress(checkpoint)
        settings = json.loads(json.dumps(self.settings))
        compare(progress["settings"], settings, str(checkpoint))
        if progress["step"] > self.total_steps:
            raise ValueError(
                f"{checkpoint} has taken {progress['step']:,} steps, and this run has {self.total_steps:,}: give "
                f"--max_train_steps {progress['step']} or more, or resume from an earlier checkpoint."
            )
        # Before later checkpoints are renamed and the history is cut: a run that is refused leaves them as they are.
        self.loader.check_position(progress["position"], self.accelerator.num_processes)
        load_checkpoint(self.accelerator, checkpoint)
        rate = self.optimizer.param_groups[0]["lr"]
        set_schedule_step(self.scheduler, progress["step"])
        for name in ("step", "seconds", "num_tokens", "skipped_steps"):
            setattr(self.state, name, progress[name])
        same_rate = math.isclose(rate, self.scheduler.get_last_lr()[0])
        # Older checkpoints do not have these settings.
        changed = [name for name in EVALUATED_BY if progress["settings"].get(name) not in (None, settings.get(name))]
        self.state.best = self._best_before(checkpoint, Best(**progress["best"]), changed, same_rate)
        # It may have been stopped while the final model was scored.
        self.state.stopped_early = self._is_out_of_patience()
        self.position = progress["position"]
        self.num_tokens += progress["num_tokens"] * self.accelerator.is_main_process  # a sum over all processes
        self.window.load(progress["window"])
        self.bar.initial = self.bar.n = self.state.step
        self.accelerator.print(f"Resuming from {checkpoint}")
        if self.accelerator.is_main_process:
            for path in supersede_checkpoints(self.checkpoints.output_dir, self.state.step):
                self.accelerator.print(f"A later checkpoint is now {path}")
        self.accelerator.wait_for_everyone()
        if not same_rate:
            self.accelerator.print(f"The learning rate was {rate:g} and is now {self.scheduler.get_last_lr()[0]:g}")
        self.state.history = read_json_lines(checkpoint / HISTORY)
        if self.accelerator.is_main_process:
            write_json(Path(self.checkpoints.output_dir, HISTORY), self.state.history, lines=True)

    def _best_before(self, checkpoint: Path, best: Best, changed: list[str], same_rate: bool) -> Best:
        """The best evaluation before a checkpoint, if it can be compared with later ones and its model is still there.

        Args:
            best: as the checkpoint has it.
            changed: the settings that evaluations depend on, and that changed since it was saved.
            same_rate: whether the run goes on at its learning rate.
        """
        if best.value is None:
            return best
        if changed:
            self.accelerator.print(
                f"Since {checkpoint} was saved, {' and '.join(changed)} changed: earlier evaluations are not compared "
                "with later ones, and the best model is one of the later ones"
            )
            return Best()
        kept = None if self.evaluation is None else self.evaluation.best_model
        if kept is None:
            return best
        assert self.checkpoints is not None
        if checkpoint.resolve().parent != Path(self.checkpoints.output_dir).resolve():
            if kept.adopt(checkpoint.parent, best):
                return best
        else:
            last = kept.step() or 0
            if last == best.step:
                return best
            # Saved after the checkpoint, before the run was killed. Its evaluation comes again, unless the length of
            # the run, its evaluations or its schedule changed.
            if same_rate and last >= self.state.step and self._is_due(last):
                return replace(best, step=None)
        which = "" if best.step is None else f", that of step {best.step},"
        self.accelerator.print(
            f"The best model so far{which} is not in {checkpoint.parent}: the best model will be one of the later ones"
        )
        return Best()

    def _is_out_of_patience(self) -> bool:
        """Whether the run has had as many evaluations without an improvement as it waits for."""
        patience = None if self.evaluation is None else self.evaluation.patience
        return patience is not None and self.state.best.evaluations_since >= patience

    def take_step(self, step: Step) -> None:
        """Computes the gradient over all micro-batches of all processes, and updates the weights."""
        loss, scores, num_tokens = add_gradients(
            self.accelerator, self.model, self.objective.at_step(self.state.step), step
        )
        self.num_tokens += num_tokens
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
        self._update_weights(loss, norm, step.where, scores)
        self.position = step.position
        self.state.step += 1
        self.bar.update()

    def _update_weights(self, loss: Tensor, norm: Any, where: str, scores: Sums) -> None:
        """Steps the optimizer, and counts the scores, if loss and gradient are finite; always steps the schedule."""
        accelerator, signals = self.accelerator, self.signals
        flags = [torch.full_like(loss, flag) for flag in (signals.stop, signals.take_save())]
        sums = accelerator.reduce(torch.stack([loss, *flags]), "sum")
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        if isinstance(norm, Tensor):
            # Read together, because the host waits for a GPU at each reading.
            dtype = self.window.dtype
            total_loss, stop, save, norm = torch.cat([sums.to(dtype), norm.to(sums.device, dtype).view(1)]).tolist()
        else:  # from DeepSpeed
            total_loss, stop, save = sums.tolist()
        # All processes act after the same step, whichever of them got the signal. A later signal counts for the next.
        self.stop, self.save_now = stop > 0, save > 0
        if not math.isfinite(total_loss):
            self._skip_step("loss", where)
            if accelerator.scaler is not None:
                accelerator.scaler.update()  # otherwise it would refuse to unscale the next gradient
        elif not math.isfinite(norm) and accelerator.scaler is None:
            self._skip_step(f"gradient (though not the loss, {total_loss:.4g})", where)
        else:
            self.optimizer.step()  # in float16 the scaler skips steps that overflow
            self.window.merge(scores)
            if math.isfinite(norm):
                one = torch.ones((), device=accelerator.device) * accelerator.is_main_process
                self.window.add({"grad_norm": (one * norm, one)})
        self.optimizer.zero_grad()
        self.scheduler.step()

    def _skip_step(self, what: str, where: str) -> None:
        """Skips a step, if `max_skipped_steps` allows it."""
        self.state.skipped_steps += 1
        what = f"The {what} of step {self.state.step + 1} is not finite ({where})"
        if self.accelerator.distributed_type == DistributedType.DEEPSPEED:
            raise FloatingPointError(
                f"{what}, and DeepSpeed has already taken the step: resume from the last checkpoint."
            )
        if self.state.skipped_steps > self.args.max_skipped_steps:
            raise FloatingPointError(
                f"{what}. The weights are those after step {self.state.step}, and saved files are not affected. Lower "
                f"--learning_rate, now {self.args.learning_rate:g}, or --max_grad_norm, now "
                f"{self.args.max_grad_norm:g}; or allow such steps to be skipped: --max_skipped_steps is now "
                f"{self.args.max_skipped_steps}."
            )
        self.accelerator.print(f"{what}: skipped, {self.state.skipped_steps} so far.")

    def log(self) -> None:
        """Shows and logs means over the steps since the last log, every `logging_steps` and at the end."""
        state = self.state
        if state.step % self.logging_steps and state.step != self.total_steps and not state.stopped_early:
            return
        self._measure()
        seconds, num_tokens = self.logged
        rate = (state.num_tokens - num_tokens) / (state.seconds - seconds)
        self.logged = state.seconds, state.num_tokens
        figures = self.window.means()
        shown = [f"{name} {value:.3f}" for name, value in figures.items() if not math.isnan(value)]
        self.bar.set_postfix_str(", ".join([*shown, f"{rate:,.0f} tokens/s"]))
        figures["learning_rate"] = float(self.scheduler.get_last_lr()[0])
        figures["tokens_per_second"] = rate
        log_figures(self.accelerator, state, figures, self.output_dir)
        self.window = Sums(self.accelerator)

    def _measure(self) -> None:
        self.state.seconds = time.perf_counter() - self.started
        self.state.num_tokens = int(self.accelerator.reduce(self.num_tokens, "sum"))

    def _is_due(self, step: int) -> bool:
        """Whether a step before the last one is followed by an evaluation."""
        if not self.eval_every or step >= self.total_steps:
            return False
        # An epoch may end within a step. The tolerance is for rounding of the quotients.
        done, before = (math.floor(number / self.eval_every + 1e-9) for number in (step, step - 1))
        return done != before

    def evaluate(self) -> None:
        """Evaluates if it is time, except after the last step, when the caller evaluates after saving the model."""
        state, evaluation = self.state, self.evaluation
        if evaluation is None or not self._is_due(state.step):
            return
        self._measure()
        paused = time.perf_counter()
        metrics = evaluation.function(self.model)
        log_evaluation(self.accelerator, state, metrics, self.output_dir)
        if self.accelerator.is_main_process:
            self.bar.write(f"Step {state.step}: {score_line(metrics)}")
        if evaluation.goal is not None:
            value = evaluation.goal.value(metrics)
            if state.best.update(evaluation.goal, value, state.step, evaluation.threshold) and evaluation.best_model:
                evaluation.best_model.save(self.model, metric=evaluation.goal.metric, value=value, step=state.step)
            state.stopped_early = self._is_out_of_patience()
            if state.stopped_early:
                never = state.best.value is None  # such as the correlation with a constant
                found = "was NaN in every evaluation" if never else f"was best at step {state.best.step}"
                self.accelerator.print(f"Stopping after step {state.step}: {evaluation.goal.metric} {found}.")
        self.started += time.perf_counter() - paused
        if state.stopped_early and state.step % self.logging_steps and self.window.sums:
            self.log()  # the last steps

    def save(self) -> None:
        """Saves a checkpoint if it is time, or if a signal requested it."""
        checkpoints, state = self.checkpoints, self.state
        if checkpoints is None:
            return
        every = checkpoints.checkpointing_steps
        if self.stop or self.save_now or (every is not None and state.step % every == 0):
            self._measure()
            progress = {
                "settings": self.settings,
                "step": state.step,
                "position": self.loader.merge(gather_object([self.position])),
                "seconds": state.seconds,
                "num_tokens": state.num_tokens,
                "skipped_steps": state.skipped_steps,
                "best": asdict(state.best),
                "window": self.window.reduced(),
            }
            path = save_checkpoint(self.accelerator, checkpoints, state.step, progress, self._save_model)
            if self.on_save is not None:
                self.on_save(path)
        state.interrupted = self.stop and state.step < self.total_steps and not state.stopped_early
        if state.interrupted:
            self.signals.end_run()

    def _save_model(self, folder: Path) -> None:
        if self.save_model is not None:
            self.save_model(self.model, folder)
        else:
            save_pretrained(self.accelerator, self.model, None, folder)


def train(
    accelerator: Accelerator,
    model: nn.Module,
    objective: Objective,
    loader: TrainingLoader,
    args: OptimizationArguments,
    seed: int = 0,
    logging_steps: int = 10,
    desc: str = "Training",
    checkpoints: CheckpointArguments | None = None,
    evaluation: Evaluation | None = None,
    save_model: Callable[[nn.Module, Path], None] | None = None,
    on_save: Callable[[Path], None] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> TrainingState:
    """Trains `model`, in place.

    The loss of a step is the mean over the targets of all its micro-batches on all processes, so that the division of
    a batch does not matter. The main process shows a progress bar with losses, accuracies and tokens per second.

    Args:
        accelerator: made by [`create_accelerator`].
        model: not prepared yet.
        objective: losses and scores.
        loader: a [`RowLoader`] or a [`StreamLoader`].
        args: optimizer, schedule and length of the run.
        seed: of dropout; each process draws its own.
        logging_steps: figures that are shown and sent to trackers are means over this many steps.
        desc: label of the progress bar.
        checkpoints: where and when to save, and from where to resume. A resumed run takes the same steps as one that
            was never stopped. SIGTERM and SIGINT save a checkpoint after the current step and end the run; SIGUSR1
            saves a checkpoint.
        evaluation: when and how to evaluate, and whether to stop early. There is no evaluation at the end: the caller
            evaluates after saving the model.
        save_model: writes the prepared model into a folder, for checkpoints; [`save_pretrained`] without a tokenizer
            by default.
        on_save: called with the folder of every complete checkpoint.
        settings: compared on resuming, from [`run_settings`]; by default the flags of `args`.

    Returns:
        The prepared model, the position of the run and the logged figures in `history`.

    Raises:
        ValueError: if a checkpoint was saved with other settings, or the folder holds checkpoints of an earlier run.
        FloatingPointError: if loss or gradient are not finite in more than `max_skipped_steps` steps. The weights are
            then those of the previous step.
        OSError: if a checkpoint cannot be written. Earlier checkpoints stay.
    """
    return TrainingLoop(
        accelerator,
        model,
        objective,
        loader,
        args,
        seed,
        logging_steps,
        desc,
        checkpoints,
        evaluation,
        save_model,
        on_save,
        settings,
    ).run()
