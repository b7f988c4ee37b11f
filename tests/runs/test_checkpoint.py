"""Checkpoints on disk: whole or not there, whatever happens to the process, the disk, or the files later."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import TrainerCallback

from grupo import GRPOTrainer
from grupo.errors import ConfigError, TrainingError
from grupo.runs.checkpoint import MARKER, UNFINISHED, checkpoint_problems, recover_finished, write_checkpoint
from grupo.runs.folder import RunFolder
from tiny import tiny_model
from tiny_trainer import make_trainer, weights

LORA = LoraConfig(task_type="CAUSAL_LM", r=2)


def make(folder: Path, **settings: Any) -> GRPOTrainer:
    """4 steps with replayed completions, and a checkpoint behind each."""
    return make_trainer(
        folder, **{"max_steps": 4, "save_strategy": "steps", "save_steps": 1, "peft_config": LORA, **settings}
    )


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


# ---- damaged files ---------------------------------------------------------------------------------------------------


def missing(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def one_bit_flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    place = random.Random(path.name).randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


@pytest.mark.parametrize("spoil", [missing, empty, cut_short, one_bit_flipped])
def test_every_file_of_a_checkpoint_is_checked(spoil: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, max_steps=2).train()
    newest, older = tmp_path / "checkpoint-2", tmp_path / "checkpoint-1"
    trainer = make(tmp_path)
    names = sorted(path.name for path in newest.iterdir())
    assert {"adapter_model.safetensors", "optimizer.pt", "rng_state.pth", "grupo_state_0.pt", MARKER} <= set(names)
    for name in names:
        whole = (newest / name).read_bytes()
        spoil(newest / name)
        caplog.clear()
        with pytest.raises(ConfigError, match=f"cannot be resumed from: {name} "):
            trainer.checkpoint_to_resume(str(newest))
        assert trainer.checkpoint_to_resume(True) == str(older)
        (said,) = caplog.messages
        assert said.startswith(f"{newest} is damaged ({name} ") and said.endswith(f"the run continues from {older}.")
        (newest / name).write_bytes(whole)
    assert trainer.checkpoint_to_resume(True) == str(newest)


def test_without_a_whole_checkpoint_nothing_is_begun_anew_in_silence(tmp_path: Path) -> None:
    make(tmp_path, max_steps=2).train()
    for folder in tmp_path.glob("checkpoint-*"):
        (folder / "optimizer.pt").unlink()
    with pytest.raises(ConfigError, match=r"no checkpoint that is whole: .*checkpoint-2 is damaged .*checkpoint-1 is"):
        make(tmp_path).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(("name", "said"), [("checkpoint-9", "folder does not exist"), (".", "is missing or damaged")])
def test_a_folder_that_is_no_checkpoint(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        make(tmp_path).train(resume_from_checkpoint=str(tmp_path / name))


def test_weights_alone_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint to resume from"):
        make(tmp_path).train(resume_from_checkpoint=True)
    make(tmp_path, max_steps=1, save_only_model=True).train()
    assert not checkpoint_problems(tmp_path / "checkpoint-1") and not list(tmp_path.glob("checkpoint-1/*.pt*"))
    with pytest.raises(ConfigError, match=r"checkpoint-1 holds only weights: .*save_only_model=True"):
        make(tmp_path).train(resume_from_checkpoint=True)


# ---- the end of the process while a checkpoint is written ------------------------------------------------------------


class Dies(BaseException):
    """As SIGKILL would end it: nothing that handles errors runs."""


def test_a_process_that_dies_while_it_writes_leaves_the_earlier_checkpoint(tmp_path: Path) -> None:
    make(tmp_path, max_steps=1).train()
    first = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-1").iterdir()}
    for written in range(5):

        def dies(folder: Path, count: int = written) -> None:
            for number in range(count):
                (folder / f"file-{number}").write_text("some")
            raise Dies

        with pytest.raises(Dies):
            write_checkpoint(tmp_path / "checkpoint-2", dies, about={}, is_writer=True, all_gather=lambda item: [item])
        assert checkpoints(tmp_path) == ["checkpoint-1"] and (tmp_path / UNFINISHED).is_dir()
        assert make(tmp_path).checkpoint_to_resume(True) == str(tmp_path / "checkpoint-1")
        assert not (tmp_path / UNFINISHED).exists()
    assert first == {path.name: path.read_bytes() for path in (tmp_path / "checkpoint-1").iterdir()}


def test_a_sealed_checkpoint_is_put_in_place(tmp_path: Path) -> None:
    """The process ended between the marker and the renaming, also where one of the same step was moved away for it."""
    make(tmp_path, max_steps=2).train()
    (tmp_path / UNFINISHED).mkdir()
    (tmp_path / "checkpoint-2").rename(tmp_path / UNFINISHED / "checkpoint-2")
    shutil.copytree(tmp_path / "checkpoint-1", tmp_path / UNFINISHED / "checkpoint-2-older")
    recover_finished(tmp_path)
    assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-2"] and not checkpoint_problems(
        tmp_path / "checkpoint-2"
    )
    assert not (tmp_path / UNFINISHED).exists()


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    for content in ("old", "new"):
        problem = write_checkpoint(
            tmp_path / "checkpoint-1", lambda folder, text=content: (folder / "file").write_text(text),
            about={"step": 1}, is_writer=True, all_gather=lambda item: [item],
        )  # fmt: skip
        assert problem is None
    assert (tmp_path / "checkpoint-1" / "file").read_text() == "new" and not checkpoint_problems(
        tmp_path / "checkpoint-1"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


# ---- a disk that takes nothing ---------------------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to write more into any file, as a full disk would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def on_a_full_disk(trainer: GRPOTrainer, size: int, steps: set[int]) -> GRPOTrainer:
    """While the checkpoints of these steps are written, and not while anything else is."""
    write = trainer._write_checkpoint

    def limited(folder: Path) -> None:
        with files_of_at_most(size) if trainer.state.global_step in steps else nullcontext():
            write(folder)

    trainer._write_checkpoint = limited  # type: ignore[method-assign]
    return trainer


@pytest.mark.parametrize(
    ("size", "settings", "error"),
    [
        (10, {}, "OSError"),  # the configuration of the adapter
        (50_000, {"peft_config": None}, "SafetensorError"),  # the weights
        (150_000, {"peft_config": None, "optim": "adamw_torch"}, "RuntimeError"),  # the optimizer's state, by torch
    ],
)
def test_on_a_full_disk_the_run_goes_on_and_the_last_checkpoint_stays(
    size: int, settings: Any, error: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever file is the first that does not fit."""
    trainer = on_a_full_disk(make(tmp_path, save_total_limit=1, **settings), size, {2, 3})
    trainer.train()
    failed = [record for record in caplog.records if "could not be written" in record.message]
    assert len(failed) == 2 and all(f": {error}: " in record.message for record in failed)
    assert all("with checkpoint-1 as its last one" in record.message for record in failed)
    assert checkpoints(tmp_path) == ["checkpoint-4"] and not checkpoint_problems(tmp_path / "checkpoint-4")
    assert not (tmp_path / UNFINISHED).exists()
    assert trainer.state.global_step == 4


def test_until_the_next_checkpoint_is_whole_the_last_one_is_not_deleted(tmp_path: Path) -> None:
    on_a_full_disk(make(tmp_path, save_total_limit=1), 10, {2, 3, 4}).train()
    assert checkpoints(tmp_path) == ["checkpoint-1"] and not checkpoint_problems(tmp_path / "checkpoint-1")


def test_where_nothing_can_be_written_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = make(tmp_path, max_steps=2)
    (tmp_path / UNFINISHED).write_text("a file, so that no folder can be made")
    trainer.train()
    assert (
        "The checkpoint of step 1 could not be written" in caplog.text
        and "free some space, or allow writing" in caplog.text
    )
    assert trainer.state.global_step == 2 and not checkpoints(tmp_path)


def test_a_file_that_does_not_fit_leaves_the_one_before_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_json("manifest.json", {"model_step": 3})
    with pytest.raises(TrainingError, match=r"manifest\.json cannot be written"), files_of_at_most(10):
        folder.update_json("manifest.json", {"model_step": 4})
    assert folder.read_json("manifest.json") == {"model_step": 3}


@pytest.mark.parametrize("name", ["metrics.jsonl", "completions.jsonl"])
def test_records_that_cannot_be_written_end_the_run_with_a_sentence(name: str, tmp_path: Path) -> None:
    """Not in silence, and not later: what was trained is in the last checkpoint, and the run goes on from there."""
    make(tmp_path, max_steps=2).train()
    whole = weights(make_and_train(tmp_path / "whole").model)
    (tmp_path / name).rename(tmp_path / "kept")
    (tmp_path / name).mkdir()
    trainer = make(tmp_path)
    with pytest.raises(TrainingError, match=f"{name} cannot be written: Is a directory. Free some space"):
        trainer.train(resume_from_checkpoint=True)
    (tmp_path / name).rmdir()
    (tmp_path / "kept").rename(tmp_path / name)
    trainer = make(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert all(torch.equal(tensor, whole[key]) for key, tensor in weights(trainer.model).items())


def make_and_train(folder: Path) -> GRPOTrainer:
    trainer = make(folder)
    trainer.train()
    return trainer


# ---- rotation and the best checkpoint --------------------------------------------------------------------------------


def scripted_scores(scores: dict[int, float]) -> Any:
    def reward(completions: list[str], dead: list[bool], trainer_state: Any, **_: Any) -> list[float]:
        return [scores.get(trainer_state.global_step, 0.0) + len(text) / 100 for text in completions]

    return reward


def test_the_best_checkpoint_is_kept_found_and_loaded(tmp_path: Path) -> None:
    settings = {
        "eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "save_total_limit": 1,
        "eval_dataset": [{"prompt": "a", "dead": False}], "reward_funcs": scripted_scores({2: 9.0}),
    }  # fmt: skip
    trainer = make(tmp_path / "run", max_steps=3, **settings)
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-2")
    assert json.loads((tmp_path / "run/checkpoint-2/trainer_state.json").read_text())["best_model_checkpoint"] == str(
        tmp_path / "run" / "checkpoint-2"
    ), "the name that it has now, not the one that it was written under"
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]
    best = weights(trainer.model)
    # The folder moves to another disk: what was the best there is the best here.
    (tmp_path / "run").rename(tmp_path / "moved")
    trainer = make(tmp_path / "moved", **settings)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4
    assert trainer.state.best_model_checkpoint == str(tmp_path / "moved" / "checkpoint-2")
    assert all(torch.equal(tensor, best[name]) for name, tensor in weights(trainer.model).items())


def test_what_is_only_called_a_checkpoint_is_neither_deleted_nor_counted(tmp_path: Path) -> None:
    """An export of a checkpoint, which lands beside it, and a checkpoint that another program has left."""
    for name in ("checkpoint-1-merged", "checkpoint-500"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("weights")
    make(tmp_path, save_total_limit=1).train()
    assert checkpoints(tmp_path) == ["checkpoint-1-merged", "checkpoint-4", "checkpoint-500"]


@pytest.mark.parametrize("name", ["default", "mine"])
def test_a_run_that_is_stopped_keeps_its_newest_checkpoint_beside_the_best(name: str, tmp_path: Path) -> None:
    def trainer(*callbacks: TrainerCallback) -> GRPOTrainer:
        return make(
            tmp_path, eval_strategy="steps", eval_steps=1, load_best_model_at_end=True, save_total_limit=1,
            eval_dataset=[{"prompt": "a", "dead": False}], reward_funcs=scripted_scores({1: 9.0}),
            model=get_peft_model(tiny_model(), LoraConfig(task_type="CAUSAL_LM", r=2), adapter_name=name),
            peft_config=None, callbacks=list(callbacks),
        )  # fmt: skip

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            stopped.stop_signals.signum = signal.SIGTERM if state.global_step == 3 else None

    stopped = trainer(Stops())
    with pytest.raises(SystemExit):
        stopped.train()
    assert checkpoints(tmp_path) == ["checkpoint-1", "checkpoint-3"]
    best = load_file(tmp_path / "checkpoint-1" / name.replace("default", "") / "adapter_model.safetensors")
    resumed = trainer()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4 and checkpoints(tmp_path) == ["checkpoint-1"]
    found = get_peft_model_state_dict(resumed.model, adapter_name=name)
    assert best.keys() == found.keys() and all(torch.equal(best[key], found[key]) for key in best)


def test_a_callback_that_is_added_later_can_end_the_run(tmp_path: Path) -> None:
    """What came since the last log is logged, and the checkpoint comes behind it, as with one of the constructor."""

    class Ends(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = control.should_save = state.global_step == 3

    trainer = make(tmp_path, logging_steps=10, save_strategy="no")
    trainer.add_callback(Ends())
    trainer.train()
    assert steps(tmp_path / "metrics.jsonl") == [3, 3] and checkpoints(tmp_path) == ["checkpoint-3"]
    state = json.loads((tmp_path / "checkpoint-3" / "trainer_state.json").read_text())
    assert [line["step"] for line in state["log_history"]] == [3]


def test_a_checkpoint_that_was_brought_back_or_lies_elsewhere_is_the_runs_own(tmp_path: Path) -> None:
    first, link, alone = tmp_path / "first", tmp_path / "link", tmp_path / "alone"
    make(first, max_steps=2).train()
    shutil.copytree(first, link)
    (link / "checkpoint-2").rename(tmp_path / "larger disk")
    (link / "checkpoint-2").symlink_to(tmp_path / "larger disk")
    alone.mkdir()
    shutil.copytree(first / "checkpoint-2", alone / "checkpoint-2")
    for folder in (link, alone):
        make(folder, max_steps=3).train(resume_from_checkpoint=True)
        assert not (folder / "earlier").exists() and (folder / "checkpoint-2").is_dir()
        assert json.loads((folder / "manifest.json").read_text())["plan"]
    assert steps(link / "metrics.jsonl") == [1, 2, 3, 3]


def test_a_run_that_goes_on_in_another_folder_has_records_of_its_own(tmp_path: Path) -> None:
    make(tmp_path / "first", max_steps=2).train()
    before = (tmp_path / "first" / "metrics.jsonl").read_bytes()
    make(tmp_path / "second").train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    lines = [json.loads(line) for line in (tmp_path / "second" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [3, 4]
    manifest = json.loads((tmp_path / "second" / "manifest.json").read_text())
    assert manifest["resumed_from"] == str(tmp_path / "first" / "checkpoint-2")
    assert (tmp_path / "first" / "metrics.jsonl").read_bytes() == before


# ---- records behind the checkpoint -----------------------------------------------------------------------------------


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_bytes().split(b"\n")[:-1]]


def test_what_came_after_the_checkpoint_is_cut_and_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"log_completions": True, "num_completions_to_print": 1, "dataset": SEPARATORS}
    make(tmp_path, **settings).train()
    with (tmp_path / "completions.jsonl").open("ab") as file:
        file.write('{"step": 2, "prompt": "ä'.encode()[:-1])  # in the middle of a line, and of a character
    before = (tmp_path / "completions.jsonl").read_bytes()
    (tmp_path / "completions" / "completions_all.parquet").write_text("somebody's own")
    make(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert steps(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 4], "the last one is the summary of the run"
    assert steps(tmp_path / "completions.jsonl") == [step for step in (1, 2, 3, 4) for _ in range(4)]
    cut = (tmp_path / "cut" / "completions.jsonl").read_bytes()
    assert before.endswith(cut[:-1]) and before.startswith((tmp_path / "completions.jsonl").read_bytes()[:99])
    assert steps(tmp_path / "cut" / "metrics.jsonl") == [3, 4, 4]
    tables = sorted(path.name for path in (tmp_path / "cut" / "completions").iterdir())
    assert tables == ["completions_00003.parquet", "completions_00004.parquet"]
    assert checkpoints(tmp_path / "cut") == ["checkpoint-3", "checkpoint-4"]
    assert "(completions.jsonl: 9, metrics.jsonl: 3, completions: 2, checkpoints: 2)" in caplog.text
    assert (tmp_path / "completions" / "completions_all.parquet").is_file()
    with pytest.raises(ConfigError, match="among what was cut"):
        make(tmp_path, **settings).train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-4"))
    assert not (tmp_path / "earlier").exists()
    make(tmp_path, max_steps=1).train()
    assert (tmp_path / "earlier" / "cut" / "metrics.jsonl").is_file() and not (tmp_path / "cut").exists()


SEPARATORS = [{"prompt": f"say \u2028 {index}", "dead": False} for index in range(4)]
"""With a character that some take for the end of a line."""


def test_lines_that_are_lost_are_said_to_be(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path, max_steps=2).train()
    os.truncate(tmp_path / "metrics.jsonl", 100)
    make(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert "metrics.jsonl has 100 bytes, but had" in caplog.text
