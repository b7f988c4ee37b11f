"""Every override of `transformers.Trainer`, and every use of its private attributes. Nothing else in grupo has any.

| override | why | checked with |
|---|---|---|
| `train` | opens the run folder, resumes exactly, and stops on SIGTERM and Ctrl-C after a checkpoint | 5.24 |
| `training_step` | one item of the data loader is one optimizer step | 5.24 |
| `get_train_dataloader` | yields one empty item per optimizer step; prompts come from the rollout window | 5.24 |
| `evaluate`, `predict` | evaluation samples completions; it has no logits and no loss | 5.24 |
| `prediction_step` | quantised layers compute something else in the evaluation mode of the base class | 5.24 |
| `log` | adds our metrics, and writes `metrics.jsonl` | 5.24 |
| `save_model` | saved adapters load elsewhere; the Hub's token is not pickled with the arguments | 5.24 |
| `push_to_hub` | retries, uploads nothing private, and cannot end a run | 5.24 |
| `_save_checkpoint` | a checkpoint is whole or not there; `on_save` fires too late to add a file | 5.24 |
| `_run_epoch` | the base class trains one step too many from the checkpoint of a finished run | 5.24 |
| `_load_best_model` | the base class does not find an adapter that has a name of its own | 5.24 |

Private attributes read or written: `_tr_loss`, `_total_loss_scalar`, `_globalstep_last_logged` (a resumed run continues
the loss it was logging), `_maybe_log_save_evaluate`, `_save_optimizer_and_scheduler`, `_save_scaler`,
`_save_rng_state`, `_get_output_dir`, `_load_from_checkpoint`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from peft import PeftModel
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PredictionOutput, align_special_tokens

from grupo.config import GRPOConfig
from grupo.errors import GrupoError
from grupo.models.load import repair_generation_config
from grupo.models.peft_io import save_adapter
from grupo.runs.folder import RunFolder
from grupo.runs.stop_signals import StopSignals
from grupo.trainer.checkpointing import Checkpointer, CheckpointScheduler, RestoreAtTrainBegin
from grupo.trainer.hub import HubUploader
from grupo.trainer.step_arguments import StepArguments
from grupo.utils.quantized_layers import evaluation_mode, keep_unpacked


class AdapterTrainer(Trainer):
    """`transformers.Trainer` whose saved adapters load elsewhere."""

    args: Any
    model: Any  # optional in the base class

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        align_special_tokens(self.model, self.processing_class)  # as the base class does when training begins
        repair_generation_config(self.model)
        keep_unpacked(self.model)

    def prediction_step(self, model: nn.Module, *args: Any, **keywords: Any) -> Any:
        with evaluation_mode(model):
            return super().prediction_step(model, *args, **keywords)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the adapter of a PEFT model, and otherwise what the base class saves; with `push_to_hub` an upload
        follows unless the call is internal."""
        # The arguments are pickled next to the model, and models go to the Hub.
        token, self.args.hub_token = self.args.hub_token, None
        try:
            if isinstance(self.model, PeftModel):
                self._save_adapter(Path(output_dir or str(self.args.output_dir)))
            else:
                super().save_model(output_dir, _internal_call=True)
        finally:
            self.args.hub_token = token
        if self.args.push_to_hub and not _internal_call:
            self._push_saved_model()

    def _save_adapter(self, folder: Path) -> None:
        if not self.args.should_save:
            return
        folder.mkdir(parents=True, exist_ok=True)  # where this is impossible, peft would not raise an OSError
        save_adapter(self.model, folder)
        assert self.processing_class is not None
        self.processing_class.save_pretrained(str(folder))  # type: ignore[union-attr]
        torch.save(self.args, folder / TRAINING_ARGS_NAME)

    def _push_saved_model(self) -> None:
        self.push_to_hub("Model save", revision=self.args.hub_revision)


class HFTrainer(AdapterTrainer):
    """`transformers.Trainer` for one optimizer step per data loader item, with exact resumption.

    A subclass supplies the step and what its run consists of; see the methods under "supplied by a subclass".
    """

    optimizer: Any
    eval_dataset: Any
    hub_model_id: Any

    def __init__(
        self, *, config: GRPOConfig, args: StepArguments, callbacks: Iterable[TrainerCallback], **keywords: Any
    ):
        self.config = config
        self.stop_signals = StopSignals()
        self.checkpoint_scheduler = CheckpointScheduler(
            stop_requested=self._stop_requested,
            steps_per_epoch=self.steps_per_epoch,
            evaluate_due=self._evaluate_due,
        )
        restore = RestoreAtTrainBegin(self._restore)
        # Without this the base class would make the repository at once, and raise where the Hub is unreachable.
        args.push_to_hub = False
        super().__init__(args=args, callbacks=[*callbacks, restore, self.checkpoint_scheduler], **keywords)
        args.push_to_hub = config.push_to_hub
        # The loss is divided by the denominators of the whole step; nothing is left to divide.
        self.model_accepts_loss_kwargs = False
        self._step_tokens = 0
        self.run_folder = RunFolder(str(config.output_dir), rank=self.args.process_index)
        self.checkpointer = Checkpointer(
            self.run_folder, run=self, config=config, should_save=self.args.should_save, all_gather=self._all_gather
        )
        self.hub = HubUploader(self.args, is_main_process=self.is_world_process_zero())
        if config.push_to_hub:
            self.hub_model_id = self.hub.create_repository()

    # ---- supplied by a subclass ------------------------------------------------------------------------------------

    def steps_per_epoch(self) -> int:
        raise NotImplementedError

    def completions_per_step(self) -> int:
        raise NotImplementedError

    def optimizer_step(self, model: nn.Module) -> tuple[Tensor, int]:
        """Leaves the gradients of one optimizer step in `model`; returns its loss, and this rank's number of tokens."""
        raise NotImplementedError

    def evaluate_dataset(self, dataset: Any, metric_key_prefix: str) -> dict[str, float]:
        """The metrics of an evaluation, which it has logged."""
        raise NotImplementedError

    def begin_run(self) -> None:
        """Resets everything that belongs to one call of `train`."""
        raise NotImplementedError

    def training_metrics(self) -> dict[str, float]:
        """The metrics since the last call, for the log line of the step."""
        raise NotImplementedError

    def check_evaluation(self, metrics: Mapping[str, float]) -> None:
        """Raises where an evaluation during training lacks the metric that something depends on."""

    def manifest_fields(self) -> dict[str, Any]:
        """The run's entries in `manifest.json`."""
        raise NotImplementedError

    def resume_fingerprint(self) -> dict[str, Any]:
        """Name -> plain value of everything that has to be equal for a resumed run to be the interrupted one."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """The state of this process, in plain values and tensors."""
        raise NotImplementedError

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError

    def save_files(self, folder: Path) -> None:
        """Adds files of the run to a checkpoint."""

    def load_files(self, folder: Path) -> None:
        """Reads what `save_files` wrote."""

    # ---- training --------------------------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        *args: Any,
        accept_changes: str | Sequence[str] = (),
        **kwargs: Any,
    ) -> Any:
        """Trains as `transformers.Trainer.train` does. Ctrl-C and SIGTERM end the run after a checkpoint.

        Args:
            resume_from_checkpoint: a checkpoint's folder, or True for the newest whole one in `output_dir`.
            accept_changes: names of settings in which a resumed run may differ from the interrupted one.

        Raises:
            ConfigError: there is no such checkpoint, or it belongs to another run.
            KeyboardInterrupt, SystemExit: Ctrl-C or SIGTERM, after the current step and its checkpoint.
        """
        checkpoint = self.checkpoint_to_resume(resume_from_checkpoint, accept_changes=accept_changes)
        self.open_run_folder(checkpoint)
        self.begin_run()
        self.checkpointer.begin(checkpoint)
        # Callbacks may have been added since; those that depend on what the others decide come last.
        self.callback_handler.callbacks.sort(key=lambda callback: getattr(callback, "priority", 0))
        eval_on_start = self.args.eval_on_start
        self.args.eval_on_start = eval_on_start and checkpoint is None  # a resumed run was evaluated at its start
        try:
            with self.stop_signals.watched():
                output = super().train(checkpoint, *args, **kwargs)
        finally:
            self.args.eval_on_start = eval_on_start
            self.run_folder.is_open = False
        self.hub.finish()
        self.checkpointer.end(stopped=self.stop_signals.signum is not None, state=self.state)
        self.stop_signals.raise_if_received()
        # The base class divides by the steps of this call alone.
        return output._replace(training_loss=output.metrics["train_loss"])

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        loss, tokens = self.optimizer_step(model)
        # From this the base class counts floating-point operations.
        inputs[getattr(self.model, "main_input_name", "input_ids")] = torch.empty(tokens, device="meta")
        return loss

    def get_train_dataloader(self) -> DataLoader[Any]:
        """One empty item per optimizer step of an epoch, the same on every rank; its length counts completions."""
        size = self.completions_per_step()
        return DataLoader(range(self.steps_per_epoch() * size), batch_size=size, collate_fn=_empty_item)  # type: ignore[arg-type]

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, **kwargs)

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if isinstance(self.model, PeftModel) and (Path(best) / self.model.active_adapter).is_dir():
            self._load_from_checkpoint(best)
        else:
            super()._load_best_model()

    def _stop_requested(self) -> bool:
        """Whether a signal reached any process; all of them decide alike, and end with its exit code."""
        received = [signal for signal in self._all_gather(self.stop_signals.signum) if signal is not None]
        if received:
            self.stop_signals.signum = received[0]
        return bool(received)

    def _all_gather(self, item: Any) -> list[Any]:
        return list(gather_object([item])) if self.args.world_size > 1 else [item]

    # ---- evaluation and logging ------------------------------------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Samples and rewards completions for every evaluation prompt, each exactly once.

        The random numbers are the same in every evaluation, so that two of them differ by the policy alone. Group size
        and temperature are `num_generations_eval` and `temperature`.
        """
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = self.eval_dataset[dataset]
        if isinstance(dataset, Mapping):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                metrics.update(self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}"))
        else:
            metrics = self.evaluate_dataset(dataset, metric_key_prefix)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        if eval_dataset is None and self.is_in_train:
            self.check_evaluation(metrics)
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: list[str] | None = None, metric_key_prefix: str = "test"
    ) -> PredictionOutput:
        """The metrics of `evaluate` for another dataset. There are no logits to return: the completions are in the run
        folder, in `completions.jsonl`."""
        metrics = self.evaluate_dataset(test_dataset, metric_key_prefix)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, metrics)
        return PredictionOutput(predictions=None, label_ids=None, metrics=metrics)  # type: ignore[arg-type]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics since the last log to a training log, and writes every log to `metrics.jsonl`."""
        if "loss" in logs:
            logs.update(self.training_metrics())
        if "train_loss" in logs:
            logs["train_loss"] = self._total_loss_scalar / max(self.state.global_step, 1)
        logs["num_tokens"] = float(self.state.num_input_tokens_seen)
        super().log(logs, start_time)
        if self.run_folder.path.is_dir():
            self.run_folder.append_metrics({"step": self.state.global_step, **logs})

    # ---- saving ----------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model; the manifest of a run records the step of the model in its folder."""
        super().save_model(output_dir, _internal_call)
        if Path(output_dir or str(self.args.output_dir)).resolve() == self.run_folder.path.resolve():
            self.run_folder.record_saved_step(self.state.global_step)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.store_flos()
        target = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if not self.checkpointer.save(target, self._write_checkpoint, self.state):
            return
        if self.args.push_to_hub:
            self.callback_handler.on_push_begin(self.args, self.state, self.control)
            self.hub.upload_checkpoint(target, step=self.state.global_step, save_model=self._save_for_hub)
            self.hub_model_id = self.hub.repository
            # It may have copied this checkpoint's model into the folder, or an earlier push that of an earlier one.
            self.run_folder.record_saved_step(self.state.global_step - 1)
        self.checkpointer.rotate(target.parent, self.state)

    def _write_checkpoint(self, folder: Path) -> None:
        """The files of this process. No collective: another process may have failed while writing its own."""
        self.save_model(str(folder), _internal_call=True)
        if not self.args.save_only_model:
            self._save_optimizer_and_scheduler(str(folder))
            self._save_scaler(str(folder))
            self._save_rng_state(str(folder))
            self.checkpointer.write_state(
                folder,
                due_evaluation=self.checkpoint_scheduler.due_evaluation,
                logged_step=self._globalstep_last_logged,
                losses=(float(self._tr_loss), self._total_loss_scalar),
            )
            self.save_files(folder)
        if self.args.should_save:
            states: Any = self.state.stateful_callbacks
            for callback in [*self.callback_handler.callbacks, self.control]:
                if isinstance(callback, ExportableState):
                    name, now = type(callback).__name__, callback.state()
                    states[name] = [*states[name], now] if isinstance(states[name], list) else now
            self.state.save_to_json(str(folder / "trainer_state.json"))

    def _restore(self) -> None:
        """Restores what the base class does not, or resets after it has loaded a checkpoint; at the start of training,
        before any other callback."""
        checkpoint = self.checkpointer.resumed_from
        if checkpoint is None:
            return
        # Those of the checkpoint would win over what is set now.
        self.state.compute_steps(self.args, self.state.max_steps)
        state = self.checkpointer.restore(checkpoint, self.state)
        self.load_files(checkpoint)
        self.load_state_dict(state)
        since_log, self._total_loss_scalar = state["losses"]
        self._tr_loss += since_log
        self._globalstep_last_logged = state["logged_step"]
        self.checkpoint_scheduler.resumed_evaluation = bool(state["due_evaluation"])

    def _evaluate_due(self) -> None:
        """Makes up for the evaluation of the step at which an interrupted run was stopped."""
        self.control.should_log = self.control.should_save = False
        self.control.should_evaluate = True
        self._maybe_log_save_evaluate(self._tr_loss, None, self.model_wrapped, None, self.state.epoch or 0.0, None, 0.0)

    # ---- run folder and checkpoints, for callers from outside -------------------------------------------------------

    def open_run_folder(self, checkpoint: str | None = None, *, keeping: Collection[str] = ()) -> None:
        """Moves an earlier run aside and writes the manifest. `train` calls it, unless it was called before.

        Args:
            checkpoint: the one that the run continues from.
            keeping: names of what stays of the earlier run.
        """
        self.checkpointer.open_run_folder(checkpoint, model=self.model, keeping=keeping)

    def checkpoint_to_resume(
        self, wanted: str | bool | None, *, accept_changes: str | Sequence[str] = ()
    ) -> str | None:
        """The checked checkpoint that a run continues from; None for a fresh run. See `Checkpointer.find`."""
        return self.checkpointer.find(wanted, accept_changes=accept_changes)

    def has_checkpoint(self) -> bool:
        """Whether the run in `output_dir` has reached its first checkpoint, for all processes."""
        return self.checkpointer.has_any()

    # ---- Hub -------------------------------------------------------------------------------------------------------

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Uploads the model with a card, retrying several times; `dataset_name` is TRL's name for the card's dataset.

        Raises:
            ConfigError, ExportError: the Hub refuses the upload, or was not reached; the model is saved all the same.
        """
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)  # whatever becomes of the upload
        if not self.is_world_process_zero():
            return None

        def write_card() -> None:
            self.hub_model_id = self.hub.repository
            self.create_model_card(**self.hub.card_fields(self.model, kwargs))

        return self.hub.upload_model(
            commit_message, write_card, blocking=blocking, token=token, revision=revision, private=private
        )

    def upload_run(self) -> None:
        """Uploads the run folder with the card that is in it; a failure is a warning."""
        self.hub.upload_run()

    def _push_saved_model(self) -> None:
        try:
            super()._push_saved_model()
        except GrupoError as error:
            self.hub.warn("The model is saved here and not on the Hub", error)

    def _save_for_hub(self) -> None:
        super().save_model(self.args.output_dir, _internal_call=True)


def _empty_item(_: list[int]) -> dict[str, Any]:
    return {}
