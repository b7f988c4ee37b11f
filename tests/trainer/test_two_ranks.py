"""Two gloo processes through the real trainer give the results of one process on the same global batch.

One launch of `two_ranks_worker.py` runs all scenarios; each test compares one of them with the same scenario here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import two_ranks_worker
from grupo.cli import main
from grupo.errors import ConfigError
from tiny import tiny_model, tiny_tokenizer
from tiny_trainer import distance, make_trainer

pytestmark = pytest.mark.slow

TIMEOUT = 400
"""Seconds for all scenarios together; about 20 when nothing else runs, 100 on one busy core."""

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

# Scenarios that have a gradient to compare.
COMPARED = (
    "even",
    "uneven",
    "uneven with checkpointing",
    "one rank without gradient",
    "every option",
    "every option with adapter",
    "all truncated on rank 1",
    "overlapped log-probs",
    "real engine",
    "real engine with adapter",
    *(name for name in two_ranks_worker.SCENARIOS if name.startswith("group over two ranks")),
    *(name for name in two_ranks_worker.SCENARIOS if name.startswith(("replaced groups", "chosen completions"))),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the files of both ranks."""
    target = tmp_path_factory.mktemp("two_ranks")
    tests = Path(__file__).parents[1] / "support"
    paths = [str(tests), *(path for path in sys.path if path)]
    process = subprocess.Popen(
        [*LAUNCH, str(tests / "two_ranks_worker.py"), str(target)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        stdout=(target / "output.txt").open("w"), stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        code = process.wait(TIMEOUT)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its workers
        process.wait(30)
        code = -1
    assert code == 0, (
        f"exit code {code} (-1: {TIMEOUT} s were not enough):\n{(target / 'output.txt').read_text()[-4000:]}"
    )
    return target


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The same scenarios in this process, each run once."""
    target = tmp_path_factory.mktemp("one_process")
    outcomes: dict[str, dict[str, Any]] = {}

    def outcome(name: str) -> dict[str, Any]:
        if name not in outcomes:
            outcomes[name] = two_ranks_worker.run_scenario(name, target)
        return outcomes[name]

    yield outcome


def both(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    first, second = (torch.load(folder / f"{name}.{rank}.pt", weights_only=True) for rank in (0, 1))
    return first, second


def training_logs(outcome: dict[str, Any]) -> list[dict[str, float]]:
    """Without timings, and without padding and computed tokens, which depend on the micro-batches."""
    clock = ("time/", "step_time", "tokens_per_second", "padding_share", "computed_tokens")
    return [
        {name: value for name, value in log.items() if not name.startswith(clock)}
        for log in outcome["logs"]
        if "loss" in log
    ]


@pytest.mark.parametrize("name", COMPARED)
def test_gradients_weights_and_metrics_equal_those_of_one_process(folder: Path, one_process: Any, name: str) -> None:
    first, second = both(folder, name)
    alone = one_process(name)
    assert len(first["gradients"]) == len(second["gradients"]) == len(alone["gradients"]) > 0
    for on_first, on_second, wanted in zip(first["gradients"], second["gradients"], alone["gradients"], strict=True):
        assert all(torch.equal(on_first[parameter], on_second[parameter]) for parameter in wanted)
        assert distance(on_first, wanted) < 1e-5
    assert distance(first["weights"], alone["weights"]) < 1e-5
    for here, there in zip(training_logs(first), training_logs(alone), strict=True):
        assert here == pytest.approx(there, rel=1e-3, abs=1e-5)


def test_the_scenarios_are_uneven(folder: Path) -> None:
    """Uneven micro-batches and tokens, and a rank without samples: otherwise the comparison would prove little."""
    first, second = both(folder, "uneven")
    rows = [sum(outcome["passes"]) for outcome in (first, second)]
    tokens = [sum(len(s["completion_ids"]) for s in outcome["samples"][0]) for outcome in (first, second)]
    assert rows[0] > rows[1] > 0 and len(set(tokens)) == 2
    assert len(first["passes"]) == len(second["passes"]), "ranks with different numbers of passes would hang"
    first, second = both(folder, "one rank without gradient")
    assert sum(first["passes"]) > 0 and sum(second["passes"]) == 0
    first, second = both(folder, "all truncated on rank 1")
    assert sum(first["threshold_passes"]) > 0 and sum(second["threshold_passes"]) == 0
    assert sum(second["passes"]) == 0


def test_a_step_without_any_signal_has_zero_gradients_on_both_ranks(folder: Path, one_process: Any) -> None:
    alone = one_process("no rank with gradient")
    for outcome in (*both(folder, "no rank with gradient"), alone):
        assert outcome["passes"] == []
        assert all(gradient is not None and not gradient.any() for gradient in outcome["gradients"][0].values())
        for name, tensor in outcome["weights"].items():
            assert torch.equal(tensor, alone["weights"][name])


@pytest.mark.parametrize("loss_type, scale", two_ranks_worker.GROUPS_OVER_TWO_RANKS)
def test_a_group_on_two_ranks_has_the_advantages_of_the_whole_group(folder: Path, loss_type: str, scale: str) -> None:
    """Rewards 0, 1 and 1, 0: Bessel's standard deviation of the four is 0.577 (NousResearch/torchtitan PR #69)."""
    outcomes = both(folder, f"group over two ranks, {loss_type}, {scale}")
    advantages = [[sample["advantage"] for sample in outcome["samples"][0]] for outcome in outcomes]
    assert advantages == [pytest.approx([-0.86588, 0.86588], abs=1e-5), pytest.approx([0.86588, -0.86588], abs=1e-5)]
    assert [[len(s["completion_ids"]) for s in outcome["samples"][0]] for outcome in outcomes] == [[2, 2], [6, 6]]
    for outcome in outcomes:
        (log,) = training_logs(outcome)
        assert log["reward"] == 0.5 and log["completions/mean_length"] == 4.0


def test_groups_are_replaced_on_both_ranks(folder: Path) -> None:
    """A round without prompts on one rank, and selected completions on one rank only."""
    first, second = both(folder, "replaced groups")
    prompts = [[sample["prompt_ids"] for sample in outcome["samples"][0]] for outcome in (first, second)]
    assert [len(set(of_rank)) for of_rank in prompts] == [2, 2]
    assert training_logs(first)[0]["dynamic_sampling/rounds"] == 3
    first, second = both(folder, "chosen completions, groups over two ranks")
    chosen = [[s["has_loss"] for step in outcome["samples"] for s in step] for outcome in (first, second)]
    counts = {
        (sum(a), sum(b)) for a, b in zip(*([c[i : i + 2] for i in range(0, len(c), 2)] for c in chosen), strict=True)
    }
    assert {a + b for a, b in counts} == {2} and len(counts) > 1 and counts & {(0, 2), (2, 0)}


def test_a_resumed_run_with_every_signal_option(folder: Path) -> None:
    for outcome in both(folder, "all signal, resumed"):
        assert all(torch.equal(outcome["parts"][name], outcome["whole"][name]) for name in outcome["whole"])
        rounds = [log["dynamic_sampling/rounds"] for log in outcome["logs"] if "dynamic_sampling/rounds" in log]
        levels = [log["curriculum/level"] for log in outcome["logs"] if "curriculum/level" in log]
        assert max(rounds) > 1 and levels[0] < levels[-1]


def test_pass_rates_do_not_depend_on_the_number_of_ranks(folder: Path, one_process: Any) -> None:
    first, second = (outcome["rates"] for outcome in both(folder, "pass rates"))
    assert first == second == one_process("pass rates")["rates"] and len(set(first)) > 1


@pytest.mark.parametrize("name", ["real engine", "real engine with adapter"])
def test_sampled_completions_do_not_depend_on_the_number_of_ranks(folder: Path, one_process: Any, name: str) -> None:
    alone = one_process(name)
    first, second = both(folder, name)
    for step, wanted in enumerate(alone["samples"]):
        sampled = [*first["samples"][step], *second["samples"][step]]
        assert [s["completion_ids"] for s in sampled] == [s["completion_ids"] for s in wanted]
        assert [s["advantage"] for s in sampled] == [s["advantage"] for s in wanted]
        assert len({s["prompt_ids"] for s in sampled}) == 1, "one group, on both ranks"


def test_a_resumed_run_of_two_ranks_ends_with_the_same_weights(folder: Path) -> None:
    for outcome in both(folder, "resumed"):
        assert all(torch.equal(outcome["parts"][name], outcome["whole"][name]) for name in outcome["whole"])
        assert outcome["same_records"]


def test_another_number_of_ranks_is_refused_with_both_numbers(folder: Path) -> None:
    trainer = make_trainer(folder / "resumed" / "parts", script=None)
    with pytest.raises(ConfigError, match=r"was written by 2 processes, and this run has 1: .* Start it with 2\."):
        trainer.train(resume_from_checkpoint=True)


def test_ranks_decide_together_when_to_stop(folder: Path) -> None:
    for outcome in both(folder, "stopped on one rank"):
        assert outcome["code"] == 143
        assert all(torch.equal(outcome["parts"][name], outcome["whole"][name]) for name in outcome["whole"])
        assert outcome["same_records"]


def test_a_checkpoint_that_one_rank_cannot_write_is_discarded(folder: Path) -> None:
    first, second = both(folder, "full disk on one rank")
    assert first["while writing"] == [[], ["checkpoint-1"], ["checkpoint-1"]]
    assert second["while writing"] == [[], ["checkpoint-1"]]
    assert first["at the end"] == second["at the end"] == ["checkpoint-3"]


def test_logging_on_one_rank_alone_is_no_deadlock(folder: Path) -> None:
    """huggingface/trl #7310. The values are those of the calls that logged, and both ranks log the same."""
    outcomes = both(folder, "logs on one rank")
    for outcome in outcomes:
        (log,) = training_logs(outcome)
        assert log["seen"] == 3.0
    import pandas as pd

    table = pd.read_parquet(folder / "logs on one rank" / "completions" / "completions_00003.parquet")
    assert table["step"].tolist() == [1] * 8 + [2] * 8 + [3] * 8
    assert table["length"].isna().tolist() == [False] * 8 + [True] * 8 + [False] * 8


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reward error on one rank", ("RewardError", "returns_too_few", "8")),
        ("failed rewards on one rank", ("RewardError", "8 of 16 completions", "ZeroDivisionError: of rank 1")),
        ("nan on one rank", ("TrainingError", "2 optimizer steps in a row")),
    ],
)
def test_an_error_of_one_rank_ends_both_with_its_message(folder: Path, name: str, words: tuple[str, ...]) -> None:
    for outcome in both(folder, name):
        assert outcome["seconds"] < 30
        for word in words:
            assert word in outcome["error"]


@pytest.mark.parametrize(
    ("name", "rank"),
    [("engine error on one rank", 1), ("engine error in a late round", 0), ("engine error before log-probs", 1)],
)
def test_an_error_of_the_engine_on_one_rank_ends_the_other(folder: Path, name: str, rank: int) -> None:
    outcomes = both(folder, name)
    assert outcomes[rank]["error"] == "MemoryError: too many tokens"
    assert outcomes[1 - rank]["error"] == (
        f"TrainingError: Process {rank} could not sample or score its completions: MemoryError: too many tokens"
    )
    assert all(outcome["seconds"] < 30 for outcome in outcomes)


@pytest.mark.parametrize(("name", "prompts"), [("3x1", "abc"), ("3x2", "aabbcc"), ("1x1", "a")])
def test_evaluation_counts_every_prompt_once(folder: Path, one_process: Any, name: str, prompts: str) -> None:
    first, second = (outcome[name] for outcome in both(folder, "evaluated"))
    alone = one_process("evaluated")[name]
    assert "".join(first["seen"] + second["seen"]) == "".join(alone["seen"]) == prompts
    for metric in ("eval_reward", "eval_prompts", "eval_completions/mean_length", "eval_rewards/reward/std"):
        assert (
            first["metrics"][metric] == second["metrics"][metric] == pytest.approx(alone["metrics"][metric], abs=1e-12)
        )


def test_rank_files_hold_every_completion_once(folder: Path) -> None:
    run = folder / "real engine"
    groups = [
        json.loads(line) for path in sorted(run.glob("completions*.jsonl")) for line in path.read_text().splitlines()
    ]
    counts: dict[int, int] = {}
    for group in groups:
        counts[group["prompt_id"]] = counts.get(group["prompt_id"], 0) + len(group["completions"])
    assert set(counts.values()) == {4} and len(counts) == 8


def test_the_command_line_prints_once_and_shares_the_evaluation(tmp_path: Path, monkeypatch: Any) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)

    def arguments(batch: int, *more: str) -> list[str]:
        settings = (
            f"model={tmp_path / 'model'}", f"training.per_device_train_batch_size={batch}", "training.max_steps=1",
            "training.gradient_accumulation_steps=1", "training.num_generations=4", "training.use_cpu=true",
            "training.max_completion_length=6", "eval.max_prompts=5", "eval.samples_per_prompt=2", *more,
        )  # fmt: skip
        return ["train", *(part for setting in settings for part in ("--set", setting))]

    logs = tmp_path / "logs"
    subprocess.run(
        [*LAUNCH, "--log-dir", str(logs), "--redirects", "3", "-m", "grupo", *arguments(4)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=True, timeout=TIMEOUT,
    )  # fmt: skip
    said = {path.parent.name: path.read_text() for path in logs.rglob("stdout.log")}
    assert said["0"].count("held-out before training") == 1 and said["1"] == ""
    assert "is now in" not in "".join(path.read_text() for path in logs.rglob("stderr.log")), "one folder for both"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["times-tables"]
    assert main(arguments(8, "training.output_dir=alone")) == 0
    for when in ("before", "after"):
        shared, alone = (
            json.loads((folder / f"eval_{when}.json").read_text())
            for folder in (tmp_path / "runs/times-tables", tmp_path / "alone")
        )
        assert len(shared["groups"]) == 5 and shared["n"] == 10
        assert [group["prompt"] for group in shared["groups"]] == [group["prompt"] for group in alone["groups"]]
        if when == "before":
            assert shared == alone


def test_the_supervised_phase_is_that_of_one_process(tmp_path: Path) -> None:
    """On the same demonstrations in the same order, if they fill the batches of both processes."""
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")

    def arguments(folder: str, batch: int) -> list[str]:
        settings = (
            f"model={tmp_path / 'model'}", f"training.output_dir={tmp_path / folder}", "training.use_cpu=true",
            "sft.answer='=[{answer}]'", "sft.rows=20", "sft.training.max_steps=2",
            "sft.training.learning_rate=0.01",
            f"sft.training.per_device_train_batch_size={batch}",
        )  # fmt: skip
        return ["sft", *(part for setting in settings for part in ("--set", setting))]

    logs = tmp_path / "logs"
    subprocess.run(
        [*LAUNCH, "--log-dir", str(logs), "--redirects", "3", "-m", "grupo", *arguments("shared", 4)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        check=True, timeout=TIMEOUT,
    )  # fmt: skip
    said = {path.parent.name: path.read_text() for path in logs.rglob("stdout.log")}
    assert "20 demonstrations, 2 optimizer steps" in said["0"] and said["1"] == ""
    assert "each epoch repeats 4 of them" in said["0"]
    assert main(arguments("alone", 8)) == 0
    weights: list[Any] = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("shared", "alone")]
    assert distance(*weights) < 1e-4
    losses = [
        [json.loads(line).get("loss", 0.0) for line in (tmp_path / name / "sft.jsonl").read_text().splitlines()]
        for name in ("shared", "alone")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
