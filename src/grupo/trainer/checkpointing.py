"""`ResumableTrainer`: checkpoints that are whole or not there, and resumed runs that go on as if nothing had been.

What a checkpoint holds, and where a run stops, is decided here; what GRPO is, in `trainer.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from peft import PeftModel
from torch import nn
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from grupo.errors import ConfigError
from grupo.runs.checkpoint import (
    checkpoint_problems,
    checkpoint_steps,
    delete_old_checkpoints,
    read_marker,
    recover_finished,
    write_checkpoint,
)
from grupo.runs.completions_table import CompletionTable
from grupo.runs.folder import DISCARDED, RunFolder
from grupo.runs.manifest import manifest, model_hash
from grupo.runs.resume_check import check_resume_compatible
from grupo.runs.stop_signals import StopSignals
from grupo.trainer.hub import HubTrainer
from grupo.trainer.rollout_window import load_state, save_state
from grupo.utils.messages import pluralize

logger = logging.getLogger("grupo")


class ResumableTrainer(HubTrainer):
    """`transformers.Trainer` with whole checkpoints and exact resumption, for one optimizer step per batch.

    A subclass says what its run consists of beyond the base class: `run_settings`, `run_state`, `load_run_state`.
    """

    model: Any  # optional in the base class
    run_folder: RunFolder
    completion_table: CompletionTable

    def __init__(self, *, callbacks: Sequence[TrainerCallback] = (), **keywords: Any) -> None:
        self.stop_signals = StopSignals()
        self._end_of_step = EndOfStep(self)
        self._resumed_state: dict[str, Any] | None = None
        self._last_checkpoint: Path | None = None
        self._checked: str | None = None
        self._hash_of_start: str | None = None
        super().__init__(callbacks=[*callbacks, self._end_of_step], **keywords)

    def add_callback(self, callback: Any) -> None:
        """As in the base class, but in front of those that decide by what all others have asked for."""
        super().add_callback(callback)
        self.callback_handler.callbacks.sort(key=lambda one: getattr(one, "place", 0))

    # ---- what a subclass says --------------------------------------------------------------------------------------

    def about_run(self) -> dict[str, Any]:
        """What the manifest says about the run."""
        raise NotImplementedError

    def run_settings(self) -> dict[str, Any]:
        """Name -> plain value of all that must be the same for a resumed run to be the one that was interrupted."""
        raise NotImplementedError

    def steps_per_epoch(self) -> int:
        raise NotImplementedError

    def run_state(self) -> dict[str, Any]:
        """The state of this process, in plain values, tensors and `window`."""
        raise NotImplementedError

    def load_run_state(self, state: dict[str, Any]) -> None:
        """Takes up what `run_state` gave."""
        raise NotImplementedError

    # ---- training --------------------------------------------------------------------------------------------------

    def _train_to_the_end(self, checkpoint: str | None, *args: Any, **kwargs: Any) -> Any:
        """The base class's `train`, until it is done or a signal asks for the end.

        Raises:
            KeyboardInterrupt, SystemExit: Ctrl-C or SIGTERM, after a checkpoint was saved.
        """
        self._last_checkpoint = self._checked = None
        eval_on_start = self.args.eval_on_start
        # A resumed run has been evaluated at its start.
        self.args.eval_on_start = eval_on_start and checkpoint is None
        try:
            with self.stop_signals.watched():
                output = super().train(checkpoint, *args, **kwargs)
        finally:
            self.args.eval_on_start = eval_on_start
        if self.stop_signals.signum is not None and self.is_world_process_zero():
            logger.warning(
                "The run was stopped behind step %d; %s.",
                self.state.global_step,
                f"its last checkpoint is {self._last_checkpoint}" if self._last_checkpoint else "it has no checkpoint",
            )
        self.stop_signals.raise_if_received()
        # The base class divides by the steps of this call alone.
        return output._replace(training_loss=output.metrics["train_loss"])

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """Private in the base class, which would train one step more from the checkpoint of a run that was done."""
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Private in the base class, which deletes all checkpoints but the best one where one is to be kept; and with
        them the newest one, which a run that was stopped is to go on from."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            output = super()._finalize_training(*args, **kwargs)
        finally:
            self.args.save_total_limit = limit
        best = self._kept_as_best()
        if limit == 1 and best and self.args.should_save and self.stop_signals.signum is None:
            delete_old_checkpoints(Path(str(self.args.output_dir)), limit, kept=best)
        return output

    def _kept_as_best(self) -> list[str]:
        return [] if self.state.best_model_checkpoint is None else [self.state.best_model_checkpoint]

    def _load_best_model(self) -> None:
        """Private in the base class, which looks for an adapter with a name of its own where that is not saved."""
        best = str(self.state.best_model_checkpoint)
        if isinstance(self.model, PeftModel) and (Path(best) / self.model.active_adapter).is_dir():
            self._load_from_checkpoint(best)
        else:
            super()._load_best_model()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_loss" in logs:
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        super().log(logs, start_time)

    def _stop_is_asked_for(self) -> bool:
        """Whether a signal came to any process; all of them decide alike, and end with its exit code."""
        received = [number for number in self._all_gather(self.stop_signals.signum) if number is not None]
        if received:
            self.stop_signals.signum = received[0]
        return bool(received)

    def _all_gather(self, item: Any) -> list[Any]:
        return list(gather_object([item])) if self.args.world_size > 1 else [item]

    def open_run_folder(self, checkpoint: str | None = None, *, keeping: Collection[str] = ()) -> None:
        """Moves an earlier run aside and writes the manifest. `train` calls it, unless it was called before.

        Args:
            checkpoint: that the run goes on from.
            keeping: names of what stays of the earlier run.
        """
        if self.run_folder.is_open:
            return
        resumed = checkpoint is not None and self._is_own(Path(checkpoint))
        self.run_folder.open(resumed=resumed, keeping=keeping)
        # Beside a checkpoint that was brought back there is none.
        if resumed and (self.run_folder.path / "manifest.json").is_file():
            return
        if checkpoint is None:
            self._hash_of_start = None  # a second run of this trainer begins with other weights
        about = {**self.about_run(), "model_hash": self.hash_of_start()}
        if checkpoint is not None:
            about["resumed_from"] = checkpoint
        self.run_folder.write_json("manifest.json", manifest(**about))

    def hash_of_start(self) -> str:
        """Of the model that the run began with; see `model_hash`."""
        if self._hash_of_start is None:
            assert self.model is not None
            self._hash_of_start = model_hash(self.model)
        return self._hash_of_start

    # ---- saving ----------------------------------------------------------------------------------------------------

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Private in the base class, but `on_save` fires only after rotation and upload: too late to add a file.

        Where it cannot be written the run goes on, with one sentence: the next checkpoint is another try, and the
        earlier ones are still there.
        """
        self.store_flos()
        folder = Path(self._get_output_dir(trial))
        target = folder / f"checkpoint-{self.state.global_step}"
        best = self.state.best_model_checkpoint
        self.state.best_model_checkpoint = self._best_checkpoint(folder, coming=target) or best
        about = {
            "step": self.state.global_step,
            "world_size": self.args.world_size,
            "can_be_resumed": not self.args.save_only_model,
            "settings": self.run_settings(),
        }
        problem = write_checkpoint(
            target, self._write_checkpoint, about=about, is_writer=self.args.should_save, all_gather=self._all_gather
        )
        if problem is not None:
            self.state.best_model_checkpoint = best
            logger.error(
                "The checkpoint of step %d could not be written to %s: %s. The run goes on%s, and tries again at the "
                "next one: make room, or allow it.",
                self.state.global_step,
                folder,
                problem,
                f" with {self._last_checkpoint.name} as the last one" if self._last_checkpoint else "",
            )
            return
        self._last_checkpoint = target
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))
            # It may have copied this checkpoint's model into the folder, or an earlier push that of an earlier one.
            self.run_folder.record_saved_step(self.state.global_step - 1)
        if self.args.should_save:
            delete_old_checkpoints(folder, self.args.save_total_limit, kept=[target, *self._kept_as_best()])

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in the base class; the manifest of a run says of which step the model in its folder is."""
        super().save_model(output_dir, _internal_call)
        if Path(output_dir or str(self.args.output_dir)).resolve() == self.run_folder.path.resolve():
            self.run_folder.record_saved_step(self.state.global_step)

    def _best_checkpoint(self, folder: Path, coming: Path | None = None) -> str | None:
        """The checkpoint of the best evaluation, which is there or `coming`."""
        if not self.state.best_global_step:
            return None
        best = folder / f"checkpoint-{self.state.best_global_step}"
        return str(best) if best == coming or best.is_dir() else None

    def _write_checkpoint(self, folder: Path) -> None:
        """The files of this process. No collective: another process may have failed at its own."""
        self.save_model(str(folder), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(folder))
            self._save_scaler(str(folder))
            self._save_rng_state(str(folder))
            save_state(
                folder,
                rank=self.args.process_index,
                due_evaluation=self._end_of_step.due_evaluation,
                positions=self.run_folder.positions(),
                logged_step=self._globalstep_last_logged,
                losses=(float(self._tr_loss), self._total_loss_scalar),
                **self.run_state(),
            )
            self.completion_table.save(folder)
        if self.args.should_save:
            states: Any = self.state.stateful_callbacks
            for callback in [*self.callback_handler.callbacks, self.control]:
                if isinstance(callback, ExportableState):
                    name, now = type(callback).__name__, callback.state()
                    states[name] = [*states[name], now] if isinstance(states[name], list) else now
            self.state.save_to_json(str(folder / "trainer_state.json"))

    # ---- resuming --------------------------------------------------------------------------------------------------

    def checkpoint_to_resume(
        self, wanted: str | bool | None, *, accept_changes: str | Sequence[str] = ()
    ) -> str | None:
        """The checkpoint that a run goes on from, checked; None for a fresh run.

        Args:
            wanted: a checkpoint's folder, or True for the newest one in `output_dir` that is whole.
            accept_changes: settings that may be others than those that it was made with.

        Raises:
            ConfigError: there is none, it is damaged, or it belongs to another run.
        """
        if not wanted or wanted == self._checked:
            return self._checked if wanted else None
        folder = self._newest_checkpoint(Path(str(self.args.output_dir))) if wanted is True else Path(wanted)
        if wanted is not True:
            self._check_stays(folder)
            self._check_whole(folder)
        marker = read_marker(folder)
        assert marker is not None
        if not marker["can_be_resumed"]:
            raise ConfigError(f"The checkpoint {folder} has weights alone: it was made with save_only_model=True.")
        if marker["world_size"] != self.args.world_size:
            raise ConfigError(
                f"The checkpoint {folder} was written by {pluralize(marker['world_size'], 'process')}, and this run "
                f"has {self.args.world_size}: each process goes on with its own completions. Start it with "
                f"{marker['world_size']}."
            )
        check_resume_compatible(folder, marker["settings"], self.run_settings(), accept_changes)
        self._checked = str(folder)
        return self._checked

    def has_checkpoint(self) -> bool:
        """Whether a run in `output_dir` has come to its first checkpoint, for all processes."""
        run = Path(str(self.args.output_dir))
        if self.args.should_save:
            recover_finished(run)
        return any(self._all_gather(bool(checkpoint_steps(run))))

    def _newest_checkpoint(self, run: Path) -> Path:
        """The newest checkpoint that is whole on every machine."""
        if not self.has_checkpoint():
            raise ConfigError(
                f"{run} has no checkpoint to resume from. Leave resume_from_checkpoint out to start again; checkpoints "
                "are made with save_strategy='steps', and can be resumed from unless save_only_model=True."
            )
        damaged: list[str] = []
        for number in sorted({n for numbers in self._all_gather(checkpoint_steps(run)) for n in numbers})[::-1]:
            folder = run / f"checkpoint-{number}"
            wrong = self._damage(folder)
            if not wrong:
                if damaged:
                    logger.warning("%s; the run goes on from %s.", "; ".join(damaged), folder)
                return folder
            damaged.append(f"{folder} is damaged ({', '.join(wrong)})")
        raise ConfigError(
            f"{run} has no checkpoint that is whole: {'; '.join(damaged)}. Bring one back from a copy, or move the "
            "folder away to start again."
        )

    def _check_stays(self, folder: Path) -> None:
        cut = self.run_folder.path / DISCARDED
        if cut.resolve() in folder.resolve().parents:
            raise ConfigError(
                f"The checkpoint {folder} is among what was cut from the run in {self.run_folder.path}, and would be "
                "moved away with it when another run begins there. Move it to a place of its own first, or choose "
                "another output_dir."
            )

    def _check_whole(self, folder: Path) -> None:
        wrong = self._damage(folder)
        if wrong:
            raise ConfigError(
                f"The checkpoint {folder} cannot be resumed from: {', '.join(wrong)}. It was not written to its end by "
                "grupo, or was damaged later. Name an earlier one, or take the newest whole one with "
                "resume_from_checkpoint=True."
            )

    def _damage(self, folder: Path) -> list[str]:
        """What is wrong with a checkpoint; one process of each machine reads it."""
        found = self._all_gather(checkpoint_problems(folder) if self.args.should_save else [])
        return list(dict.fromkeys(text for texts in found for text in texts))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Private in the base class, but no public method learns which checkpoint a run goes on from."""
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        # Those of the checkpoint would win over what is set now.
        self.state.compute_steps(self.args, self.state.max_steps)
        self.state.best_model_checkpoint = self._best_checkpoint(Path(checkpoint).parent)
        state = load_state(Path(checkpoint), rank=self.args.process_index)
        if self._is_own(Path(checkpoint)):
            self.run_folder.truncate_to(self.state.global_step, state["positions"], logged_step=state["logged_step"])
        self.completion_table.load(Path(checkpoint))
        self.load_run_state(state)
        self._last_checkpoint = Path(checkpoint)
        self._resumed_state = state

    def _is_own(self, checkpoint: Path) -> bool:
        """Whether the files in the run's folder are those that the checkpoint was made beside; it may be a link."""
        return self.run_folder.path.resolve() in (checkpoint.resolve().parent, checkpoint.parent.resolve())

    def _go_on(self) -> None:
        """What the base class sets anew after it has loaded a checkpoint, and what was left to do there."""
        state, self._resumed_state = self._resumed_state, None
        if state is None:
            return
        since_log, self._total_loss_scalar = state["losses"]
        self._tr_loss += since_log
        self._globalstep_last_logged = state["logged_step"]
        if state["due_evaluation"]:
            self.control.should_log = self.control.should_save = False
            self.control.should_evaluate = True
            self._maybe_log_save_evaluate(
                self._tr_loss, None, self.model_wrapped, None, self.state.epoch or 0.0, None, 0.0
            )


class EndOfStep(TrainerCallback):
    """Decides at the end of a step, behind all other callbacks, when a checkpoint is made.

    One that is due at the end of an epoch, or of the run, waits for what else is due then, or a run that goes on from
    it would never log and evaluate it. One that a signal asks for waits for nothing; what is due is done after it.
    """

    place = 2
    """Behind callbacks of a lower one; those of others have none."""

    def __init__(self, trainer: ResumableTrainer) -> None:
        self.trainer = trainer
        self.due_evaluation = False
        """Whether the step should have been evaluated, and the run stopped before."""
        self._stops = False
        self._waits = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stops = self._waits = self.due_evaluation = False
        self.trainer._go_on()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stops = self.trainer._stop_is_asked_for()
        if self._stops:
            self.due_evaluation = control.should_evaluate
            control.should_evaluate = False
            control.should_save = control.should_training_stop = True
        self._waits = control.should_save and (self._is_last_of_epoch(state) or self._ends(control))
        if self._waits:
            control.should_save = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stops:
            at_end = self._is_last_of_epoch(state)
            self.due_evaluation = self.due_evaluation or (at_end and control.should_evaluate)
            control.should_evaluate = False
            control.should_log = control.should_log and at_end
            control.should_save = self._waits
        elif self._waits:
            control.should_save = True
        self._waits = False

    def _is_last_of_epoch(self, state: Any) -> bool:
        return bool(state.global_step % self.trainer.steps_per_epoch() == 0)

    def _ends(self, control: Any) -> bool:
        return bool(control.should_training_stop) and not self._stops
