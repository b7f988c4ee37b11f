"""Checkpoints that are whole or not there, and resumed runs that end exactly as an uninterrupted run would.

`Checkpointer` decides what a checkpoint holds and which one a run continues from; `runs/checkpoint.py` writes it to
disk. `CheckpointScheduler` decides when one is made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import TrainerCallback

from grupo.errors import ConfigError
from grupo.metrics import AllGather
from grupo.runs.checkpoint import (
    checkpoint_problems,
    checkpoint_steps,
    delete_old_checkpoints,
    read_marker,
    recover_finished,
    write_checkpoint,
)
from grupo.runs.folder import DISCARDED, RunFolder
from grupo.runs.manifest import manifest, model_hash
from grupo.runs.resume_check import check_resume_compatible
from grupo.utils.messages import pluralize

logger = logging.getLogger("grupo")

FORMAT = 2
"""Version of the state in a checkpoint; raised when a field of it changes its name or meaning."""


class ResumableRun(Protocol):
    """What a checkpoint needs to know about a run."""

    def state_dict(self) -> dict[str, Any]:
        """The state of this process, in plain values and tensors."""
        ...

    def resume_fingerprint(self) -> dict[str, Any]:
        """Name -> plain value of everything that has to be equal for a resumed run to be the interrupted one."""
        ...

    def manifest_fields(self) -> dict[str, Any]:
        """The run's entries in `manifest.json`."""
        ...


class Checkpointer:
    """Saves, finds, checks and restores the checkpoints of one run.

    Args:
        config: read for `output_dir`, `save_total_limit`, `save_only_model` and `world_size`.
        should_save: whether this process makes folders: one of all, or one on each machine.
        all_gather: one object from each rank, in rank order.
    """

    def __init__(
        self, run_folder: RunFolder, *, run: ResumableRun, config: Any, should_save: bool, all_gather: AllGather
    ) -> None:
        self.run_folder = run_folder
        self.run = run
        self.config = config
        self.should_save = should_save
        self.all_gather = all_gather
        self.resumed_from: Path | None = None
        """The checkpoint that the current call of `train` continues from."""
        self._last: Path | None = None
        self._checked: str | None = None
        self._start_hash: str | None = None

    # ---- a run -----------------------------------------------------------------------------------------------------

    def begin(self, checkpoint: str | None) -> None:
        self.resumed_from = None if checkpoint is None else Path(checkpoint)
        self._last = self._checked = None

    def end(self, *, stopped: bool, state: Any) -> None:
        """Deletes what `save_total_limit=1` deletes at the end, and logs where a stopped run can be resumed."""
        best = self._best_to_keep(state)
        # A stopped run is resumed from its newest checkpoint, which is therefore kept.
        if self.config.save_total_limit == 1 and best and self.should_save and not stopped:
            delete_old_checkpoints(self.run_folder.path, 1, kept=best)
        if stopped and state.is_world_process_zero:
            logger.warning(
                "The run was stopped after step %d; %s.",
                state.global_step,
                f"its last checkpoint is {self._last}" if self._last else "it has no checkpoint",
            )

    def open_run_folder(self, checkpoint: str | None, *, model: nn.Module, keeping: Collection[str] = ()) -> None:
        """Moves an earlier run aside and writes the manifest, unless the folder is open already."""
        if self.run_folder.is_open:
            return
        resumed = checkpoint is not None and self._is_own(Path(checkpoint))
        self.run_folder.open(resumed=resumed, keeping=keeping)
        # A checkpoint that was brought back from elsewhere has no manifest next to it.
        if resumed and (self.run_folder.path / "manifest.json").is_file():
            return
        if checkpoint is None:
            self._start_hash = None  # a second run of this trainer begins with other weights
        about = {**self.run.manifest_fields(), "model_hash": self.start_hash(model)}
        if checkpoint is not None:
            about["resumed_from"] = checkpoint
        self.run_folder.write_json("manifest.json", manifest(**about))

    def start_hash(self, model: nn.Module) -> str:
        """Hash of the model that the run began with; see `model_hash`."""
        if self._start_hash is None:
            self._start_hash = model_hash(model)
        return self._start_hash

    # ---- saving ----------------------------------------------------------------------------------------------------

    def save(self, target: Path, write: Callable[[Path], None], state: Any) -> bool:
        """Writes a checkpoint; returns whether it is there. All processes call it together.

        Where it cannot be written the run continues, with one sentence: the next checkpoint is another attempt, and
        the earlier ones are still there.

        Args:
            write: puts the files of this process into the folder that it is given.
            state: the trainer's state; its best checkpoint is updated.
        """
        best = state.best_model_checkpoint
        state.best_model_checkpoint = self._best_checkpoint(target.parent, state, coming=target) or best
        about = {
            "format": FORMAT,
            "step": state.global_step,
            "world_size": self.config.world_size,
            "can_be_resumed": not self.config.save_only_model,
            "settings": self.run.resume_fingerprint(),
        }
        problem = write_checkpoint(target, write, about=about, is_writer=self.should_save, all_gather=self.all_gather)
        if problem is not None:
            state.best_model_checkpoint = best
            logger.error(
                "The checkpoint of step %d could not be written to %s: %s. The run continues%s, and tries again at the "
                "next one: free some space, or allow writing.",
                state.global_step,
                target.parent,
                problem,
                f" with {self._last.name} as its last one" if self._last else "",
            )
            return False
        self._last = target
        return True

    def rotate(self, folder: Path, state: Any) -> None:
        """Deletes the oldest checkpoints beyond `save_total_limit`; the newest and the best one stay."""
        if self.should_save:
            kept: list[str | Path] = [*([] if self._last is None else [self._last]), *self._best_to_keep(state)]
            delete_old_checkpoints(folder, self.config.save_total_limit, kept=kept)

    def write_state(self, folder: Path, **more: Any) -> None:
        """Writes the state of this process: that of the run, positions in the run's files, and `more`."""
        state = {**self.run.state_dict(), "positions": self.run_folder.positions(), **more}
        torch.save(state, folder / self._state_file())

    def _best_checkpoint(self, folder: Path, state: Any, coming: Path | None = None) -> str | None:
        """The checkpoint of the best evaluation, which is there or `coming`."""
        if not state.best_global_step:
            return None
        best = folder / f"checkpoint-{state.best_global_step}"
        return str(best) if best == coming or best.is_dir() else None

    def _best_to_keep(self, state: Any) -> list[str]:
        return [] if state.best_model_checkpoint is None else [state.best_model_checkpoint]

    def _state_file(self) -> str:
        return f"grupo_state_{self.run_folder.rank}.pt"

    # ---- resuming --------------------------------------------------------------------------------------------------

    def find(self, wanted: str | bool | None, *, accept_changes: str | Sequence[str] = ()) -> str | None:
        """The checked checkpoint that a run continues from; None for a fresh run.

        Args:
            wanted: a checkpoint's folder, or True for the newest whole one in `output_dir`.
            accept_changes: settings in which the run may differ from the one that made the checkpoint.

        Raises:
            ConfigError: there is none, it is damaged, or it belongs to another run.
        """
        if not wanted or wanted == self._checked:
            return self._checked if wanted else None
        folder = self._newest() if wanted is True else Path(wanted)
        if wanted is not True:
            self._check_not_discarded(folder)
            self._check_whole(folder)
        marker = read_marker(folder)
        assert marker is not None
        self._check_marker(folder, marker)
        check_resume_compatible(folder, marker["settings"], self.run.resume_fingerprint(), accept_changes)
        self._checked = str(folder)
        return self._checked

    def has_any(self) -> bool:
        """Whether the run has reached its first checkpoint, for all processes."""
        run = self.run_folder.path
        if self.should_save:
            recover_finished(run)
        return any(self.all_gather(bool(checkpoint_steps(run))))

    def restore(self, checkpoint: Path, trainer_state: Any) -> dict[str, Any]:
        """The state of this process in a checkpoint; cuts the run's files back to where they were when it was made."""
        trainer_state.best_model_checkpoint = self._best_checkpoint(checkpoint.parent, trainer_state)
        state: dict[str, Any] = torch.load(checkpoint / self._state_file(), map_location="cpu", weights_only=True)
        if self._is_own(checkpoint):
            self.run_folder.truncate_to(trainer_state.global_step, state["positions"], logged_step=state["logged_step"])
        self._last = checkpoint
        return state

    def _check_marker(self, folder: Path, marker: dict[str, Any]) -> None:
        if marker.get("format") != FORMAT:
            raise ConfigError(
                f"The checkpoint {folder} was made by another version of grupo (state format "
                f"{marker.get('format', 1)}; this version reads {FORMAT}). Resume it with the "
                "version in its run's manifest.json, or start a new run with the checkpoint's folder as its model."
            )
        if not marker["can_be_resumed"]:
            raise ConfigError(f"The checkpoint {folder} holds only weights: it was made with save_only_model=True.")
        if marker["world_size"] != self.config.world_size:
            raise ConfigError(
                f"The checkpoint {folder} was written by {pluralize(marker['world_size'], 'process')}, and this run "
                f"has {self.config.world_size}: each process continues with its own completions. Start it with "
                f"{marker['world_size']}."
            )

    def _newest(self) -> Path:
        """The newest checkpoint that is whole on every machine."""
        run = self.run_folder.path
        if not self.has_any():
            raise ConfigError(
                f"{run} has no checkpoint to resume from. Leave resume_from_checkpoint out to start again; checkpoints "
                "are made with save_strategy='steps', and can be resumed from unless save_only_model=True."
            )
        damaged: list[str] = []
        for number in sorted({n for numbers in self.all_gather(checkpoint_steps(run)) for n in numbers})[::-1]:
            folder = run / f"checkpoint-{number}"
            problems = self._problems(folder)
            if not problems:
                if damaged:
                    logger.warning("%s; the run continues from %s.", "; ".join(damaged), folder)
                return folder
            damaged.append(f"{folder} is damaged ({', '.join(problems)})")
        raise ConfigError(
            f"{run} has no checkpoint that is whole: {'; '.join(damaged)}. Bring one back from a copy, or move the "
            "folder away to start again."
        )

    def _check_not_discarded(self, folder: Path) -> None:
        discarded = self.run_folder.path / DISCARDED
        if discarded.resolve() in folder.resolve().parents:
            raise ConfigError(
                f"The checkpoint {folder} is among what was cut from the run in {self.run_folder.path}, and would be "
                "moved away with it when another run begins there. Move it elsewhere first, or choose another "
                "output_dir."
            )

    def _check_whole(self, folder: Path) -> None:
        problems = self._problems(folder)
        if problems:
            raise ConfigError(
                f"The checkpoint {folder} cannot be resumed from: {', '.join(problems)}. grupo did not finish writing "
                "it, or it was damaged later. Name an earlier one, or take the newest whole one with "
                "resume_from_checkpoint=True."
            )

    def _problems(self, folder: Path) -> list[str]:
        """What is wrong with a checkpoint; one process of each machine reads it."""
        found = self.all_gather(checkpoint_problems(folder) if self.should_save else [])
        return list(dict.fromkeys(text for texts in found for text in texts))

    def _is_own(self, checkpoint: Path) -> bool:
        """Whether the checkpoint was made next to the files in the run's folder; it may be a link."""
        return self.run_folder.path.resolve() in (checkpoint.resolve().parent, checkpoint.parent.resolve())


class RestoreAtTrainBegin(TrainerCallback):
    """Calls `restore` when training begins, before all other callbacks: the base class resets some of it until then."""

    priority = -1
    """Callbacks of a lower one are called first; those of others count as 0."""

    def __init__(self, restore: Callable[[], None]) -> None:
        self.restore = restore

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.restore()


class CheckpointScheduler(TrainerCallback):
    """Decides at the end of a step, after all other callbacks, when a checkpoint is made.

    One that is due at the end of an epoch or of the run waits for what else is due then; otherwise a run that is
    resumed from it would never log and evaluate it. One that a signal asks for waits for nothing; what is due is done
    when the run is resumed.

    Args:
        stop_requested: whether a signal asked for the end, on any process.
    """

    priority = 2

    def __init__(
        self,
        *,
        stop_requested: Callable[[], bool],
        steps_per_epoch: Callable[[], int],
        evaluate_due: Callable[[], None],
    ) -> None:
        self.stop_requested = stop_requested
        self.steps_per_epoch = steps_per_epoch
        self.evaluate_due = evaluate_due
        self.due_evaluation = False
        """Whether the step at which the run was stopped still has to be evaluated."""
        self.resumed_evaluation = False
        """`due_evaluation` of the checkpoint that the run continues from."""
        self._stops = False
        self._waits = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stops = self._waits = self.due_evaluation = False
        if self.resumed_evaluation:
            self.resumed_evaluation = False
            self.evaluate_due()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stops = self.stop_requested()
        if self._stops:
            self.due_evaluation = control.should_evaluate
            control.should_evaluate = False
            control.should_save = control.should_training_stop = True
        ends = control.should_training_stop and not self._stops
        self._waits = control.should_save and (self._is_last_of_epoch(state) or ends)
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
        return bool(state.global_step % self.steps_per_epoch() == 0)
