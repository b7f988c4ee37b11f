"""A trainer whose uploads can fail without taking the run with them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from grupo.adapter_trainer import AdapterTrainer
from grupo.errors import ConfigError, GrupoError, first_line
from grupo.export.upload import check_hub_answers, command, failures, is_refusal, push, retried
from grupo.runs.card import TAGS

logger = logging.getLogger("grupo")


class HubTrainer(AdapterTrainer):
    """Uploads of the run are warnings when they fail, with the command that makes up for them.

    The base class makes the repository when it is constructed and raises where the Hub is out of reach, and it never
    looks at what became of the uploads at checkpoints.
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
                    f"push_to_hub=True, and the Hub does not take {self._repo_name()!r}: {first_line(error)} Set "
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
        kwargs["tags"] = list(dict.fromkeys([*([tags] if isinstance(tags, str) else tags), *TAGS]))
        self.save_model(_internal_call=True)  # whatever becomes of the upload

        def upload() -> Any:
            check_hub_answers()
            return super(HubTrainer, self).push_to_hub(
                commit_message, blocking, token=token, revision=revision, private=private, **kwargs
            )

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
        """Private in the base class, and called by it after each checkpoint; it must not end the run."""
        if not self.is_world_process_zero():
            return
        self._tell_failures()
        if self.hub_model_id is None:
            self.init_hf_repo()
        if self.hub_model_id is None:
            return
        try:
            super()._push_from_checkpoint(checkpoint_folder)
        except failures() as error:
            self._warn(f"{Path(checkpoint_folder).name} is saved here and not on the Hub", error)

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
            "%s: %s The run does not need it; later, `%s` uploads what it left.", what, first_line(error), again
        )
