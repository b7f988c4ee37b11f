"""Uploads of model folders to the Hub: retried when the connection fails, and continued where they stopped."""

from __future__ import annotations

import logging
import shlex
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from grupo.errors import ConfigError, ExportError, summarize_error
from grupo.export.source import ADAPTER_CONFIG
from grupo.runs.model_card import card_for_hub, card_from_files, is_filled_in
from grupo.runs.plots import REWARD_CURVE, reward_svg, training_log
from grupo.utils.files import read_json
from grupo.utils.hub import hub_is_reachable

logger = logging.getLogger("grupo")

T = TypeVar("T")

NOT_UPLOADED = (
    *("checkpoint-*", "earlier*", "cut/*", "completions*", "eval_*.json", "manifest.json"),
    *("training_args.bin", "runs/*", "_*", ".*", "trainer_state.json", "optimizer.pt", "scheduler.pt", "scaler.pt"),
    *("rng_state*", "grupo_state*", "grupo_checkpoint.json", "unfinished/*", "sft*"),
)
"""Files of a run or checkpoint that are kept local: they resume it, hold its texts, or name paths of this machine."""


def push(
    folder: str | Path,
    repo_id: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    tags: Sequence[str] = (),
    message: str = "Upload with grupo",
    attempts: int = 5,
    wait: float = 2.0,
) -> str:
    """Uploads the folder of a run, an adapter, a merged model or a GGUF file, and returns the repository's address.

    The folder's README.md is its card; without one, a card is written for the upload. A folder with `metrics.jsonl`
    also gets a plot of the reward. Files that the Hub already has are not sent again, so that an interrupted upload
    continues when it is repeated.

    Args:
        repo_id: "NAME" or "OWNER/NAME"; created if it does not exist.
        token: with write access; by default that of `hf auth login` or HF_TOKEN.
        private: whether a new repository is private.
        revision: branch; created if it does not exist.
        tags: tags of the card, in addition to "grpo" and "grupo".
        attempts: total number of tries when the Hub does not answer or has an internal error.
        wait: seconds before the second try; doubled for each further try.

    Raises:
        ConfigError: there is nothing to upload, or the Hub refuses it, so that a retry would not help.
        ExportError: the Hub could not be reached in all tries.
    """
    folder = Path(folder)
    if not folder.is_dir() or not any(folder.iterdir()):
        raise ConfigError(f"{folder} is not a folder with files, so there is nothing to upload.")

    def upload() -> str:
        return _upload(staged, repo_id, token=token, private=private, revision=revision, message=message)

    with tempfile.TemporaryDirectory() as scratch:
        staged = _staged(folder, Path(scratch), tags)
        return retried(upload, folder, repo_id, attempts=attempts, wait=wait)


def retried(upload: Callable[[], T], folder: str | Path, repo_id: str, *, attempts: int, wait: float) -> T:
    """Result of the first successful call of `upload`; pauses between tries double. Errors as in `push`."""
    for attempt in range(1, attempts + 1):
        try:
            return upload()
        except failures() as error:
            reason = summarize_error(error)
            if is_refusal(error):
                raise ConfigError(f"The Hub refuses the upload to {repo_id!r}: {reason}") from error
            if attempt == attempts:
                raise ExportError(
                    f"The upload to {repo_id!r} failed {attempts} times: {reason} Nothing is lost: "
                    f"`{command(folder, repo_id)}` continues where it stopped."
                ) from error
            logger.warning(
                "Upload to %s, try %d of %d: %s The next try is in %g s.", repo_id, attempt, attempts, reason, wait
            )
            time.sleep(wait)
            wait *= 2
    raise ConfigError(f"attempts={attempts}: it must be at least 1.")


def command(folder: str | Path, repo_id: str) -> str:
    """Shell command that uploads a folder again."""
    return shlex.join(["grupo", "export", str(folder), "--to", "hub", "--repo", repo_id])


def _upload(
    folder: Path, repo_id: str, *, token: str | None, private: bool | None, revision: str | None, message: str
) -> str:
    from huggingface_hub import HfApi

    check_hub_answers()
    api = HfApi(token=token)
    url = api.create_repo(repo_id, private=private, exist_ok=True)
    if revision is not None:
        api.create_branch(url.repo_id, branch=revision, exist_ok=True)
    api.upload_folder(
        repo_id=url.repo_id, folder_path=folder, commit_message=message, revision=revision,
        ignore_patterns=list(NOT_UPLOADED),
    )  # fmt: skip
    return str(url)


def check_hub_answers() -> None:
    """Raises a ConnectionError within seconds; the Hub's client would take half a minute."""
    if not hub_is_reachable():
        raise ConnectionError("The Hub does not answer, or HF_HUB_OFFLINE is set.")


def _staged(folder: Path, scratch: Path, tags: Sequence[str]) -> Path:
    """The folder as links, with card and reward plot in the form in which they are uploaded."""
    for entry in folder.rglob("*"):
        if entry.is_file():
            link = scratch / entry.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(entry.resolve())
    # A checkpoint belongs to the run in its parent folder.
    run = folder.resolve().parent if (folder / "trainer_state.json").is_file() else folder
    card, drawing = scratch / "README.md", reward_svg(training_log(run / "metrics.jsonl"))
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    if not is_filled_in(text):
        adapter = folder / ADAPTER_CONFIG
        base = read_json(adapter).get("base_model_name_or_path")
        text = card_from_files(folder, run, base_model=base, is_adapter=adapter.is_file())
    card.unlink(missing_ok=True)
    card.write_text(card_for_hub(text, tags), encoding="utf-8")
    if drawing is not None and not (scratch / REWARD_CURVE).exists():
        (scratch / REWARD_CURVE).write_text(drawing, encoding="utf-8")
    return scratch


def failures() -> tuple[type[Exception], ...]:
    """Errors of the Hub's client; `OSError` comes from the network, `RuntimeError` from hf_xet."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The HTTP library below is one of several names, and its base error the first of the client's own error.
    return (*HfHubHTTPError.__bases__, OSError, RuntimeError, HFValidationError)


def is_refusal(error: Exception) -> bool:
    """Whether a retry would get the same answer: missing token, missing permission, or a wrong name."""
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    if isinstance(error, LocalTokenNotFoundError | HFValidationError):
        return True
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status is not None and 400 <= status < 500 and status not in (408, 409, 412, 429)
