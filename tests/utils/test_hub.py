"""Names on the Hub while it cannot be reached: one sentence, without waiting, and nothing else."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import close_session, constants, set_client_factory
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils._http import default_client_factory
from peft import LoraConfig, get_peft_model

from grupo.cli import main
from grupo.models.load import load_policy, load_tokenizer
from grupo.models.peft_io import find_adapter, load_with_adapter, save_adapter
from grupo.utils import hub
from tiny import tiny_model, tiny_tokenizer

NAME = "nobody/has-made-this-1b"
COMMIT = "0123456789" * 4


# The HTTP library of the Hub's client, under whichever name this version of it uses.
httpx: Any = importlib.import_module(HfHubHTTPError.__bases__[0].__module__.partition(".")[0])


@pytest.fixture
def hub_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[Any], Any]], None]]:
    """Replaces what the Hub's client receives."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hub._answers.cache_clear()
    yield lambda answer: set_client_factory(
        lambda: httpx.Client(transport=httpx.MockTransport(answer), follow_redirects=True)
    )
    hub._answers.cache_clear()
    close_session()
    set_client_factory(default_client_factory)


@pytest.fixture
def offline(hub_client: Any) -> list[str]:
    """No answer from the Hub; the list has the address of every request."""
    asked: list[str] = []

    def refuse(request: Any) -> Any:
        asked.append(str(request.url))
        raise httpx.ConnectError("Name or service not known")

    hub_client(refuse)
    return asked


def asked_once(requests: list[str]) -> bool:
    """The Hub was tried once, and no file of a model or dataset was asked for."""
    return requests.count(constants.ENDPOINT) == 1 and not any("nobody" in url for url in requests)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([f"model={NAME}"], f"The model '{NAME}' is not a local folder, the Hub cannot be reached"),
        (
            ["task=null", f"dataset.path={NAME}", "rewards=[number_match]"],
            f"dataset.path='{NAME}' is not a local file or folder, and the Hub cannot be reached",
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
    assert asked_once(offline)


def test_what_is_in_the_cache_is_used(offline: list[str], tmp_path: Path) -> None:
    snapshot = tmp_path / f"models--{NAME.replace('/', '--')}" / "snapshots" / "abc"
    tiny_model().save_pretrained(snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    model = load_policy(NAME, {"cache_dir": str(tmp_path)})
    assert sum(parameter.numel() for parameter in model.parameters()) > 20000
    tiny_tokenizer().save_pretrained(snapshot)
    assert len(load_tokenizer(model, {"cache_dir": str(tmp_path)})) == len(tiny_tokenizer())
    assert asked_once(offline)


def test_local_folders_ask_nobody(offline: list[str], tmp_path: Path) -> None:
    assert not hub.is_unreachable(str(tmp_path)) and not hub.is_unreachable("/no/such/folder")
    assert not hub.is_unreachable("rows.jsonl/") and offline == []


@pytest.mark.parametrize(
    ("answer", "reachable"),
    [
        (lambda request: httpx.Response(200), True),
        (lambda request: httpx.Response(503), True),
        (lambda request: httpx.Response(307, headers={"location": "http://elsewhere"}), True),
        (pytest.param(httpx.ReadTimeout, False, id="timeout")),
        (pytest.param(httpx.ConnectError, False, id="certificate")),
        (pytest.param(httpx.RemoteProtocolError, False, id="not HTTP")),
    ],
)
def test_any_answer_counts(answer: Any, reachable: bool, hub_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def respond(request: Any) -> Any:
        asked.append((request.method, request.extensions["timeout"]["connect"]))
        if isinstance(answer, type):
            raise answer("of the test")
        return answer(request)

    hub_client(respond)
    for _ in range(3):
        assert hub.is_unreachable(NAME) is not reachable
    assert asked == [("HEAD", hub.TIMEOUT)], "once, for a minute, and no redirect is followed"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert hub.is_unreachable(NAME) and len(asked) == 1
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub.time, "monotonic", lambda: 1e9)
    assert hub.is_unreachable(NAME) is not reachable and len(asked) == 2


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
    offline[:] = [constants.ENDPOINT]  # peft itself looks for the base model's configuration when it saves
    assert json.loads((folder / "adapter_config.json").read_text())["revision"] == COMMIT
    found = find_adapter("nobody/adapter", {"cache_dir": str(tmp_path)})
    assert found is not None and found.base == NAME and found.tokenizer() is None
    loaded = load_with_adapter(found, {"cache_dir": str(tmp_path)})
    ids = torch.arange(5, 20)[None]
    torch.testing.assert_close(loaded(input_ids=ids).logits, adapter(input_ids=ids).logits)
    tiny_tokenizer().save_pretrained(folder)
    assert len(found.tokenizer()) == len(tiny_tokenizer()) and asked_once(offline)
