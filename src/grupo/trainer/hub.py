"""Uploads of a run to the Hub that can fail without taking the run with them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.trainer_utils import HubStrategy
from transformers.utils.hub import hf_api

from grupo.errors import ConfigError, GrupoError, summarize_error
from grupo.export.upload import NOT_UPLOADED, check_hub_answers, command, failures, is_refusal, push, retried
from grupo.runs.model_card import TAGS

logger = logging.getLogger("grupo")


class HubUploader:
    """Uploads of one run. A failed upload is a warning with the command that makes up for it.

    The base trainer makes the repository when it is constructed and raises where the Hub is unreachable, never looks at
    what became of the uploads at checkpoints, and uploads everything in the run's folder. This class does none of that.

    Args:
        args: the trainer's arguments; `hub_*` and `output_dir` are read at each upload.
    """

    attempts = 5
    retry_wait = 2.0
    """Seconds until the second attempt; they double with every attempt."""

    def __init__(self, args: Any, *, is_main_process: bool) -> None:
        self.args = args
        self.is_main_process = is_main_process
        self.repository: str | None = None
        """Its full name; None until the Hub has created or found it."""
        self._pending: list[Future[Any]] = []

    def create_repository(self, token: str | None = None, private: bool | None = None) -> str | None:
        """Creates the repository, or finds it; returns its full name, or None where the Hub is unreachable.

        Raises:
            ConfigError: the Hub refuses, most likely for want of a token.
        """
        if not self.is_main_process:
            return None
        try:
            check_hub_answers()
            self.repository = (
                hf_api()
                .create_repo(
                    self._repo_name(),
                    token=self.args.hub_token if token is None else token,
                    private=self.args.hub_private_repo if private is None else private,
                    exist_ok=True,
                )
                .repo_id
            )
        except failures() as error:
            if is_refusal(error):
                raise ConfigError(
                    f"push_to_hub=True, and the Hub does not take {self._repo_name()!r}: {summarize_error(error)} Set "
                    "hub_token, or log in by `hf auth login`; without push_to_hub the run needs no Hub."
                ) from error
            self.warn("There is no repository to upload to", error)
        return self.repository

    def upload_model(
        self,
        message: str | None,
        write_card: Callable[[], None],
        *,
        blocking: bool,
        token: str | None,
        revision: str | None,
        private: bool | None,
    ) -> Any:
        """Uploads the run's folder, retrying several times.

        Raises:
            ConfigError, ExportError: the Hub refuses the upload, or was not reached.
        """

        def upload() -> Any:
            check_hub_answers()
            if self.repository is None:
                self.create_repository(token, private)
            if self.repository is None:
                raise ConnectionError("There is no repository to upload to.")
            write_card()
            self.finish()
            given = {"token": token, "revision": revision}
            where = {name: value for name, value in given.items() if value is not None}
            return self._upload(self.args.output_dir, message, run_as_future=not blocking, **where)

        return retried(upload, self.args.output_dir, self._repo_name(), attempts=self.attempts, wait=self.retry_wait)

    def upload_checkpoint(self, checkpoint: Path, *, step: int, save_model: Callable[[], None]) -> None:
        """Starts the uploads that `hub_strategy` asks for after a checkpoint: the model and what may be public of the
        run, and the checkpoint. A failure is a warning.

        Args:
            save_model: saves the model into the run's folder.
        """
        strategy = self.args.hub_strategy
        if not self.is_main_process or strategy == HubStrategy.END:
            return
        self.report_failures()
        is_busy = any(not job.done() for job in self._pending)
        if is_busy and not self.args.hub_always_push:
            return
        if self.repository is None and self.create_repository() is None:
            return
        message = f"Training in progress, step {step}"
        errors: tuple[type[Exception], ...] = (*failures(), SafetensorError)
        try:
            save_model()
            jobs: Any = [self._upload(self.args.output_dir, message, run_as_future=True)]
            if strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
                target = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else checkpoint.name
                more = {"path_in_repo": target, "ignore_patterns": [], "run_as_future": True}
                jobs.append(self._upload(checkpoint, f"{message}, checkpoint", **more))
        except errors as error:
            self.warn(f"{checkpoint.name} is saved here and not on the Hub", error)
            return
        self._pending.extend(jobs)

    def upload_run(self) -> None:
        """Uploads the run folder with the card that is in it; a failure is a warning."""
        if not self.is_main_process:
            return
        self.finish()
        try:
            push(
                self.args.output_dir,
                self.repository or self._repo_name(),
                token=self.args.hub_token,
                private=self.args.hub_private_repo,
                revision=self.args.hub_revision,
                attempts=self.attempts,
                wait=self.retry_wait,
            )
        except GrupoError as error:
            self.warn("The run is saved here and not on the Hub", error)

    def card_fields(self, model: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of `create_model_card`, from those of `push_to_hub`."""
        fields = dict(given)
        if (dataset := fields.pop("dataset_name", None)) is not None:
            fields = {"dataset": dataset, "dataset_tags": dataset, **fields}
        tags = fields.get("tags") or []
        tags = [*([tags] if isinstance(tags, str) else tags), *TAGS, *(getattr(model, "model_tags", None) or ())]
        return {"model_name": self._repo_name().rpartition("/")[2], **fields, "tags": list(dict.fromkeys(tags))}

    def report_failures(self) -> None:
        """Warns of background uploads that failed; the base trainer drops their errors."""
        for job in [job for job in self._pending if job.done()]:
            self._pending.remove(job)
            if (error := job.exception()) is not None:
                self.warn("An upload during training failed", error)

    def warn(self, what: str, error: BaseException) -> None:
        again = command(self.args.output_dir, self.repository or self._repo_name())
        logger.warning("%s: %s The run does not need it; `%s` uploads it later.", what, summarize_error(error), again)

    def finish(self) -> None:
        """Waits for uploads in the background, and warns of those that failed."""
        if any(not job.done() for job in self._pending):
            logger.info("Waiting for the current upload to finish.")
            wait(self._pending)
        self.report_failures()

    def _upload(self, folder: str | Path, message: str | None, **how: Any) -> Any:
        usual = {"token": self.args.hub_token, "revision": self.args.hub_revision}
        how = {**usual, "ignore_patterns": list(NOT_UPLOADED), **how}
        return hf_api().upload_folder(repo_id=str(self.repository), folder_path=folder, commit_message=message, **how)

    def _repo_name(self) -> str:
        return str(self.args.hub_model_id or Path(self.args.output_dir).absolute().name)
