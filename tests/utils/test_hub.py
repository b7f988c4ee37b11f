"""Names on the Hub while it cannot be reached: one sentence, at once, and nothing else."""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from grupo.cli import main
from grupo.models.load import load_policy, load_tokenizer
from grupo.models.peft_io import find_adapter, load_with_adapter, save_adapter
from grupo.utils import hub
from tiny import tiny_model, tiny_tokenizer

NAME = "nobody/has-made-this-1b"
COMMIT = "0123456789" * 4


@pytest.fixture(autouse=True)
def nothing_was_asked() -> Iterator[None]:
    hub._answered.cache_clear()
    yield
    hub._answered.cache_clear()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """No answer from the Hub; the list grows by every question."""
    asked: list[str] = []

    def urlopen(request: Any, timeout: float) -> None:
        asked.append(request.full_url)
        raise urllib.error.URLError(OSError("Name or service not known"))

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    return asked


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([f"model={NAME}"], f"The model '{NAME}' is no folder here, the Hub cannot be reached"),
        (
            ["task=null", f"dataset.path={NAME}", "rewards=[number_match]"],
            f"dataset.path='{NAME}' is no file or folder here, and the Hub cannot be reached",
        ),
    ],
)
def test_one_sentence_at_once(
    settings: list[str], said: str, offline: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    settings = [f"training.output_dir={tmp_path / 'run'}", *settings]
    assert main(["train", *(part for setting in settings for part in ("--set", setting))]) == 2
    assert time.monotonic() - started < 15, "the client of the Hub alone waits for 23 s"
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: ") and said in line
    assert len(offline) == 1


def test_what_is_in_the_cache_is_used(offline: list[str], tmp_path: Path) -> None:
    snapshot = tmp_path / f"models--{NAME.replace('/', '--')}" / "snapshots" / "abc"
    tiny_model().save_pretrained(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    model = load_policy(NAME, {"cache_dir": str(tmp_path)})
    assert sum(parameter.numel() for parameter in model.parameters()) > 20000
    tiny_tokenizer().save_pretrained(snapshot)
    assert len(load_tokenizer(model, {"cache_dir": str(tmp_path)})) == len(tiny_tokenizer())
    assert len(offline) == 1


def test_local_folders_ask_nobody(offline: list[str], tmp_path: Path) -> None:
    assert not hub.is_unreachable(str(tmp_path)) and not hub.is_unreachable("/no/such/folder")
    assert not hub.is_unreachable("rows.jsonl/") and offline == []


@pytest.mark.parametrize(
    "answer",
    [urllib.error.HTTPError("", 503, "busy", {}, None), urllib.error.URLError(ssl.SSLError("own certificates"))],  # type: ignore[arg-type]
)
def test_an_answer_of_any_kind_is_an_answer(answer: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(*args: Any, **kwargs: Any) -> None:
        raise answer

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert not hub.is_unreachable(NAME)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.is_unreachable(NAME)


def in_cache(cache: Path, name: str) -> Path:
    """The folder of a snapshot that the cache takes for the newest one."""
    snapshot = cache / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_an_adapter_in_the_cache_finds_its_base_model_there(
    offline: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    tiny_model().save_pretrained(in_cache(tmp_path, NAME))
    base = load_policy(NAME, {"cache_dir": str(tmp_path)})
    adapter = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], init_lora_weights=False)
    )
    folder = in_cache(tmp_path, "nobody/adapter")
    save_adapter(adapter, folder)
    assert json.loads((folder / "adapter_config.json").read_text())["revision"] == COMMIT
    found = find_adapter("nobody/adapter", {"cache_dir": str(tmp_path)})
    assert found is not None and found.base == NAME and found.tokenizer() is None
    loaded = load_with_adapter(found, {"cache_dir": str(tmp_path)})
    ids = torch.arange(5, 20)[None]
    torch.testing.assert_close(loaded(input_ids=ids).logits, adapter(input_ids=ids).logits)
    tiny_tokenizer().save_pretrained(folder)
    assert len(found.tokenizer()) == len(tiny_tokenizer()) and len(offline) == 1
