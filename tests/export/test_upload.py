"""Uploads against a stand-in for the Hub that breaks off, refuses and forgets nothing."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig
from safetensors.torch import save_file
from transformers.trainer_utils import HubStrategy

import grupo
from grupo.cli import main
from grupo.errors import ConfigError, ExportError
from grupo.export import push
from stub_hub import Fault, stub_hub
from tiny import tiny_model, tiny_tokenizer
from tiny_trainer import make_trainer


class Hub:
    """Faults of the stand-in, and what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.fault: Fault = lambda method, path: None

    def __call__(self, method: str, path: str) -> int | None:
        self.asked.append((method, path))
        return self.fault(method, path)

    def count(self, method: str, part: str) -> int:
        return sum(asked == method and part in path for asked, path in self.asked)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in, which writes to `tmp_path/hub`."""
    found = Hub()
    (tmp_path / "hub").mkdir()
    with stub_hub(tmp_path / "hub", fault=found) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # the stand-in speaks HTTP only
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_stub")
        monkeypatch.setattr("transformers.trainer.hf_api", _fresh_api)
        monkeypatch.setattr("grupo.trainer.hub.hf_api", _fresh_api)
        yield found


def _fresh_api() -> Any:
    from huggingface_hub import HfApi

    return HfApi()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder as `grupo train` leaves it."""
    trainer = make_trainer(tmp_path / "sums", max_steps=3, peft_config=LoraConfig(target_modules=["q_proj"]))
    trainer.train()
    trainer.save_model()
    (tmp_path / "sums" / "recipe.yaml").write_text("task: sums\n", encoding="utf-8")
    return tmp_path / "sums"


def test_a_run_is_uploaded_with_card_curve_and_tags(hub: Hub, run: Path, tmp_path: Path) -> None:
    (run / "checkpoint-9").mkdir()
    (run / "checkpoint-9" / "optimizer.pt").write_text("large")
    assert push(run, "sums", tags=["arithmetic"]).endswith("/someone/sums")
    there = tmp_path / "hub" / "sums"
    files = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    assert {"adapter_config.json", "adapter_model.safetensors", "metrics.jsonl", "reward.svg", "README.md"} <= files
    assert {"recipe.yaml", "tokenizer.json"} <= files
    assert not [name for name in files if name.startswith(("checkpoint", "completions", "manifest", "training_args"))]
    assert (there / "adapter_model.safetensors").read_bytes() == (run / "adapter_model.safetensors").read_bytes()
    card = ModelCard((there / "README.md").read_text(encoding="utf-8"))
    assert card.data.tags == ["grpo", "grupo", "lora", "arithmetic"]
    assert card.data.get("base_model") is None, "the Hub refuses a card with a local path as its base model"
    assert "![mean reward by step](reward.svg)" in card.text and "| step | reward |" in card.text
    assert "task: sums" in card.text and "More Information Needed" not in card.text
    assert "More Information Needed" in (run / "README.md").read_text(), "the folder itself is left as it is"
    assert (there / "reward.svg").read_text().count("<circle") == 3


def test_it_is_tried_again_when_the_hub_has_an_error(
    hub: Hub, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    answers = [500, 0, None]
    hub.fault = lambda method, path: answers.pop(0) if "/commit/" in path and answers else None
    push(run, "sums", wait=0.01)
    assert hub.count("POST", "/commit/") == 3 and "try 2 of 5" in caplog.text
    assert hub.count("PUT", "/large/") == 1, "the weights went there once"
    assert (tmp_path / "hub" / "sums" / "adapter_model.safetensors").is_file()


def test_it_gives_up_with_the_command_that_goes_on(hub: Hub, run: Path) -> None:
    hub.fault = lambda method, path: 500 if "/commit/" in path else None
    again = f"`grupo export {run} --to hub --repo sums` continues where it stopped"
    with pytest.raises(ExportError, match=f"failed 3 times.*{again}"):
        push(run, "sums", attempts=3, wait=0.01)
    hub.fault = lambda method, path: None
    assert main(["export", str(run), "--to", "hub", "--repo", "sums"]) == 0


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_not_tried_again(hub: Hub, run: Path, status: int) -> None:
    hub.fault = lambda method, path: status if "create" in path else None
    with pytest.raises(ConfigError, match="The Hub refuses the upload to 'sums'"):
        push(run, "sums", wait=100)
    assert hub.count("POST", "create") == 1
    with pytest.raises(ConfigError, match="refuses the upload to 'a/b/c'"):
        push(run, "a/b/c", wait=100)
    with pytest.raises(ConfigError, match="is not a folder with files"):
        push(run / "nowhere", "sums")


UPLOAD = "import sys\nfrom grupo.export import push\nprint(push(sys.argv[1], 'large', wait=0.1))"


def test_a_killed_upload_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed while the second of three weight files is on its way; the first one is not sent again."""
    folder = tmp_path / "model"
    folder.mkdir()
    for number in range(3):
        save_file({"weight": torch.randn(1000, generator=torch.Generator().manual_seed(number))},
                  folder / f"model-{number}.safetensors")  # fmt: skip
    (tmp_path / "hub").mkdir()
    arrived, hold = Counter[str](), threading.Event()

    def fault(method: str, path: str) -> int | None:
        if method == "PUT":
            if arrived and not hold.is_set():
                hold.wait(60)
                return 0  # the client is dead by then
            arrived[path] += 1
        return None

    with stub_hub(tmp_path / "hub", fault=fault) as address:
        environment = {
            **os.environ, "HF_ENDPOINT": address, "HF_TOKEN": "hf_of_the_stub", "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(Path(grupo.__file__).parents[1]),
        }  # fmt: skip
        command = [sys.executable, "-c", UPLOAD, str(folder)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
            deadline = time.monotonic() + 60
            while not arrived and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(0.2)
            first.send_signal(signal.SIGKILL)
        hold.set()
        assert len(arrived) == 1
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    assert sorted(arrived.values()) == [1, 1, 1], "each file went there once"


# ---- training with push_to_hub ---------------------------------------------------------------------------------------

PUSHING: dict[str, Any] = {"push_to_hub": True, "hub_model_id": "sums", "hub_token": "hf_of_the_stub"}


def test_a_run_without_the_hub_is_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("grupo.trainer.hub.HubUploader.retry_wait", 0.01)
    trainer = make_trainer(tmp_path / "sums", max_steps=2, save_strategy="steps", save_steps=1, **PUSHING)
    trainer.train()
    trainer.save_model()
    assert trainer.state.global_step == 2 and (tmp_path / "sums" / "model.safetensors").is_file()
    assert (tmp_path / "sums" / "checkpoint-2").is_dir()
    assert f"`grupo export {tmp_path / 'sums'} --to hub --repo sums` uploads it later" in caplog.text
    with pytest.raises(ExportError, match="--to hub --repo sums` continues where it stopped"):
        trainer.push_to_hub()


def test_the_hub_comes_back_and_goes_away(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("grupo.trainer.hub.HubUploader.retry_wait", 0.01)
    hub.fault = lambda method, path: 503 if "create" in path else None
    trainer = make_trainer(tmp_path / "sums", max_steps=2, save_strategy="steps", save_steps=1, **PUSHING)
    assert trainer.hub_model_id is None and "There is no repository to upload to" in caplog.text
    hub.fault = lambda method, path: 500 if "/commit/" in path else None
    trainer.train()
    assert trainer.hub_model_id == "someone/sums", "made at the first checkpoint"
    assert "An upload during training failed" in caplog.text
    hub.fault = lambda method, path: None
    trainer.args.hub_strategy = HubStrategy.CHECKPOINT
    trainer.train()
    there = tmp_path / "hub" / "sums"
    assert {path.name for path in there.iterdir()} >= {"model.safetensors", "tokenizer.json", "last-checkpoint"}
    assert (there / "last-checkpoint" / "optimizer.pt").is_file()
    trainer.push_to_hub(dataset_name="someone/numbers", tags=["mine"])
    public = {path.name for path in there.iterdir()}
    assert not public & {"completions.jsonl", "manifest.json", "earlier", "training_args.bin"}
    assert b"hf_of_the_stub" not in (tmp_path / "sums" / "training_args.bin").read_bytes()
    card = ModelCard((tmp_path / "hub" / "sums" / "README.md").read_text(encoding="utf-8"))
    assert {"mine", "grpo", "grupo"} <= set(card.data.tags) and card.data.datasets == ["someone/numbers"]
    assert (tmp_path / "hub" / "sums" / "model.safetensors").is_file()


def test_a_token_that_the_hub_refuses_is_an_error_before_the_run(hub: Hub, tmp_path: Path) -> None:
    hub.fault = lambda method, path: 401 if "create" in path else None
    with pytest.raises(ConfigError, match=r"push_to_hub=True, and the Hub does not take 'sums'.*hf auth login"):
        make_trainer(tmp_path / "sums", **PUSHING)


def test_the_command_uploads_a_finished_run_with_its_card(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    settings = [
        f"model={tmp_path / 'model'}", f"training.output_dir={tmp_path / 'run'}", "training.max_steps=2",
        "training.max_completion_length=8", "training.push_to_hub=true", "training.hub_model_id=tables",
        "eval.max_prompts=2",
    ]  # fmt: skip
    sets = [part for setting in settings for part in ("--set", setting)]
    assert main(["train", *sets]) == 0
    there = tmp_path / "hub" / "tables"
    card = (there / "README.md").read_text(encoding="utf-8")
    assert "## Recipe" in card and "held-out" in card and "reward.svg" in card
    assert (there / "reward.svg").is_file() and not (there / "completions.jsonl").exists()
    assert main(["export", str(tmp_path / "run"), "--to", "merged", "--output", str(tmp_path / "merged")]) == 0
    merged = (tmp_path / "merged" / "README.md").read_text(encoding="utf-8")
    assert "held-out" in merged and "\nlibrary_name: transformers\n" in merged and "reward.svg" in merged
    assert json.loads((there / "summary.json").read_text())["steps"] == 2
    hub.fault = lambda method, path: 500 if "/commit/" in path else None
    monkeypatch.setattr("grupo.trainer.hub.HubUploader.retry_wait", 0.01)
    again = [part.replace(str(tmp_path / "run"), str(tmp_path / "second")) for part in sets]
    with _logged() as lines:
        assert main(["train", *again]) == 0, "a failing upload is no failing run"
    assert any("The run is saved here and not on the Hub" in line for line in lines)
    assert (tmp_path / "second" / "adapter_model.safetensors").is_file()


class _logged(logging.Handler):
    """Lines of grupo's log while the block lasts, whatever the command line has set up."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> list[str]:
        logging.getLogger("grupo").addHandler(self)
        return self.lines

    def __exit__(self, *_: object) -> None:
        logging.getLogger("grupo").removeHandler(self)
