"""A trainer whose uploads can fail without taking the run with them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import PushInProgress, hf_api

from grupo.errors import ConfigError, GrupoError, summarize_error
from grupo.export.upload import NOT_UPLOADED, check_hub_answers, command, failures, is_refusal, push, retried
from grupo.runs.model_card import TAGS
from grupo.trainer.hf_trainer import AdapterTrainer

logger = logging.getLogger("grupo")


class HubTrainer(AdapterTrainer):
    """Uploads of the run are warnings when they fail, with the command that makes up for them.

    The base class makes the repository when it is constructed and raises where the Hub is out of reach, and it never
    looks at what became of the uploads at checkpoints. It also uploads everything that is in the run's folder.
    """

    args: Any
    hub_model_id: Any
    push_in_progress: Any

    upload_attempts = 5
    upload_wait = 2.0
    """Seconds until the second try; they double from try to try."""

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """As in the base class.

        Raises:
            ConfigError: the Hub refuses it, for want of a token most likely.
        """
        self.push_in_progress = None
        if not self.is_world_process_zero():
            return
        try:
            check_hub_answers()
            super().init_hf_repo(token, private)
        except failures() as error:
            if is_refusal(error):
                raise ConfigError(
                    f"push_to_hub=True, and the Hub does not take {self._repo_name()!r}: {summarize_error(error)} Set "
                    "hub_token, or log in by `hf auth login`; without push_to_hub the run needs no Hub."
                ) from error
            self._warn("There is no repository to upload to", error)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in the base class, but tried several times; `dataset_name` is TRL's name for the dataset on the card.

        Raises:
            ConfigError, ExportError: the Hub refuses the upload, or was not reached; the model is saved all the same.
        """
        if (dataset := kwargs.pop("dataset_name", None)) is not None:
            kwargs.setdefault("dataset", dataset)
            kwargs.setdefault("dataset_tags", dataset)
        tags = kwargs.get("tags") or []
        tags = [*([tags] if isinstance(tags, str) else tags), *TAGS, *(getattr(self.model, "model_tags", None) or ())]
        kwargs["tags"] = list(dict.fromkeys(tags))
        kwargs.setdefault("model_name", self._repo_name().rpartition("/")[2])
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)  # whatever becomes of the upload
        if not self.is_world_process_zero():
            return None

        def upload() -> Any:
            check_hub_answers()
            if self.hub_model_id is None:
                self.init_hf_repo(token=token or self.args.hub_token, private=private)
            if self.hub_model_id is None:
                raise ConnectionError("There is no repository to upload to.")
            self.create_model_card(**kwargs)
            self._finish_current_push()
            where = {name: value for name, value in (("token", token), ("revision", revision)) if value is not None}
            return self._upload(self.args.output_dir, commit_message, run_as_future=not blocking, **where)

        return retried(
            upload, self.args.output_dir, self._repo_name(), attempts=self.upload_attempts, wait=self.upload_wait
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in the base class; with `push_to_hub` an upload follows, and its failure is a warning."""
        super().save_model(output_dir, _internal_call=True)
        if self.args.push_to_hub and not _internal_call:
            try:
                self.push_to_hub("Model save", revision=self.args.hub_revision)
            except GrupoError as error:
                self._warn("The model is saved here and not on the Hub", error)

    def upload_run(self) -> None:
        """Uploads the run folder with the card that is in it; failure is a warning."""
        if not self.is_world_process_zero():
            return
        self._finish_current_push()
        try:
            push(
                self.args.output_dir,
                self.hub_model_id or self._repo_name(),
                token=self.args.hub_token,
                private=self.args.hub_private_repo,
                revision=self.args.hub_revision,
                attempts=self.upload_attempts,
                wait=self.upload_wait,
            )
        except GrupoError as error:
            self._warn("The run is saved here and not on the Hub", error)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Private in the base class, and called after each checkpoint; it must not end the run.

        Uploads the model and what may be public of the run, where the base class uploads all that is in its folder.
        """
        strategy = self.args.hub_strategy
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        self._tell_failures()
        is_busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if is_busy and not self.args.hub_always_push:
            return
        if self.hub_model_id is None:
            self.init_hf_repo()
        if self.hub_model_id is None:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        checkpoint, message = Path(checkpoint_folder), f"Training in progress, step {self.state.global_step}"
        errors: tuple[type[Exception], ...] = (*failures(), SafetensorError)
        try:
            self._save(self.args.output_dir)
            jobs: Any = [self._upload(self.args.output_dir, message, run_as_future=True)]
            if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
                place = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else checkpoint.name
                more = {"path_in_repo": place, "ignore_patterns": [], "run_as_future": True}
                jobs.append(self._upload(checkpoint, f"{message}, checkpoint", **more))
        except errors as error:
            self._warn(f"{checkpoint.name} is saved here and not on the Hub", error)
            return
        if is_busy:
            self.push_in_progress.jobs.extend(jobs)
        else:
            self.push_in_progress = PushInProgress(jobs)

    def _upload(self, folder: str | Path, message: str | None, **how: Any) -> Any:
        usual = {"token": self.args.hub_token, "revision": self.args.hub_revision}
        how = {**usual, "ignore_patterns": list(NOT_UPLOADED), **how}
        return hf_api().upload_folder(repo_id=self.hub_model_id, folder_path=folder, commit_message=message, **how)

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self._tell_failures()

    def _tell_failures(self) -> None:
        """The base class starts uploads in the background and drops their errors."""
        jobs: list[Any] = getattr(getattr(self, "push_in_progress", None), "jobs", [])
        for job in [job for job in jobs if job.done()]:
            jobs.remove(job)
            if (error := job.exception()) is not None:
                self._warn("An upload during training failed", error)

    def _repo_name(self) -> str:
        return str(self.args.hub_model_id or Path(self.args.output_dir).absolute().name)

    def _warn(self, what: str, error: BaseException) -> None:
        again = command(self.args.output_dir, self.hub_model_id or self._repo_name())
        logger.warning(
            "%s: %s The run does not need it; later, `%s` uploads what it left.", what, summarize_error(error), again
        )
