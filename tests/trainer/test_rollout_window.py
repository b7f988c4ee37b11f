"""Log-probs that need no reward are computed while rewards that wait for something are awaited."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_trainer
from grupo.errors import RewardError
from grupo.rewards import exclusive, overlap_with_logprobs
from tiny_trainer import Spy, make_trainer, weights

OFF_POLICY = {"num_iterations": 2, "beta": 0.1, "max_steps": 4}
PATIENCE = 20.0
"""Seconds until a reward that waits for the scoring gives up; a test that gets there fails."""


class Events:
    """Writes down when a trainer scores a window and what its rewards do."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.scored = threading.Event()

    def watch(self, trainer: Any) -> Any:
        add_fixed_logprobs = trainer.forward_backward.add_fixed_logprobs

        def watched(*args: Any, **keywords: Any) -> Any:
            samples = add_fixed_logprobs(*args, **keywords)
            self.seen.append("scored")
            self.scored.set()
            return samples

        trainer.forward_backward.add_fixed_logprobs = watched
        return trainer

    async def judge(self, **columns: Any) -> list[float]:
        """Does not come to an end before the scoring does."""
        self.seen.append("judge begins")
        assert await asyncio.get_running_loop().run_in_executor(None, self.scored.wait, PATIENCE)
        self.scored.clear()
        self.seen.append("judge ends")
        return tiny_trainer.reward(**columns)

    def waiting(self, **columns: Any) -> list[float]:
        self.seen.append("judge begins")
        assert self.scored.wait(PATIENCE)
        self.scored.clear()
        self.seen.append("judge ends")
        return tiny_trainer.reward(**columns)

    def quick(self, completions: list[str], **columns: Any) -> list[float]:
        self.seen.append("quick")
        return [0.0] * len(completions)

    async def prompt(self, **columns: Any) -> list[float]:
        self.seen.append("judge")
        return tiny_trainer.reward(**columns)


@pytest.mark.parametrize("is_async", [True, False])
def test_a_reward_that_waits_goes_on_while_the_window_is_scored(tmp_path: Path, is_async: bool) -> None:
    events = Events()
    judge = events.judge if is_async else overlap_with_logprobs(lambda **columns: events.waiting(**columns))
    trainer = events.watch(make_trainer(tmp_path, reward_funcs=[judge, events.quick], **OFF_POLICY))
    trainer.train()
    # Two windows; the quick function computes, so it is done before.
    assert sorted(events.seen[:2]) == sorted(events.seen[4:6]) == ["judge begins", "quick"]
    assert events.seen[2:4] == events.seen[6:8] == ["scored", "judge ends"] and len(events.seen) == 8


def test_results_are_the_same_to_the_last_bit(tmp_path: Path) -> None:
    async def judge(**columns: Any) -> list[float]:
        return tiny_trainer.reward(**columns)

    outcomes = []
    for name, reward in (("before", tiny_trainer.reward), ("beside", judge)):
        trainer = make_trainer(tmp_path / name, reward_funcs=reward, mask_truncated_completions=True, **OFF_POLICY)
        spy = Spy(trainer)
        trainer.train()
        outcomes.append(([(step.samples, step.loss) for step in spy.steps], weights(trainer.model)))
    (steps, trained), (steps_beside, trained_beside) = outcomes
    assert steps == steps_beside and any(sample.old_logprobs for samples, _ in steps for sample in samples)
    assert all(torch.equal(trained[name], trained_beside[name]) for name in trained)


@pytest.mark.parametrize(
    "settings",
    [
        {},  # on-policy and without a reference
        {**OFF_POLICY, "num_generations_trained": 2},
        {**OFF_POLICY, "dynamic_sampling": True},
    ],
)
def test_nothing_is_scored_that_need_not_be(tmp_path: Path, settings: dict[str, Any]) -> None:
    events = Events()
    dataset = [{"prompt": letter, "dead": False} for letter in "abcdefgh"]
    trainer = events.watch(make_trainer(tmp_path, reward_funcs=events.prompt, dataset=dataset, **settings))
    trainer.train()
    assert events.seen[:2] == ["judge", "scored"] and events.seen.count("judge") == events.seen.count("scored")


def test_the_last_of_several_rollouts_overlaps_with_the_scoring_of_all(tmp_path: Path) -> None:
    events = Events()
    count = 0

    async def judge(**columns: Any) -> list[float]:
        nonlocal count
        count += 1
        return await (events.judge(**columns) if count == 2 else events.prompt(**columns))

    trainer = events.watch(
        make_trainer(
            tmp_path, reward_funcs=judge, beta=0.1, per_device_train_batch_size=4, gradient_accumulation_steps=4,
            steps_per_generation=2,
        )
    )  # fmt: skip
    trainer.train()
    assert events.seen == ["judge", "judge begins", "scored", "judge ends"]


def test_what_runs_alone_is_done_before_the_scoring(tmp_path: Path) -> None:
    """So says a function that uses the model that is trained."""
    events = Events()

    async def alone(**columns: Any) -> list[float]:
        return await events.prompt(**columns)

    trainer = events.watch(make_trainer(tmp_path, reward_funcs=[exclusive(alone), events.quick], beta=0.1))
    trainer.train()
    assert events.seen == ["judge", "quick", "scored"]


def test_errors_of_rewards_and_of_the_scoring_are_what_they_were(tmp_path: Path) -> None:
    async def too_few(**columns: Any) -> list[float]:
        return [0.0]

    with pytest.raises(RewardError, match="returned 1 reward for 16 completions"):
        make_trainer(tmp_path / "too few", reward_funcs=too_few, beta=0.1).train()

    async def stuck(**columns: Any) -> list[float]:
        await asyncio.sleep(PATIENCE)
        return []

    trainer = make_trainer(tmp_path / "stuck", reward_funcs=[stuck], beta=0.1, reward_timeout=0.2)
    with pytest.raises(RewardError, match=r"stuck: timeout.*0\.2 s"):
        trainer.train()

    async def fine(**columns: Any) -> list[float]:
        return tiny_trainer.reward(**columns)

    trainer = make_trainer(tmp_path / "scoring", reward_funcs=[fine], beta=0.1)

    def runs_out(*args: Any, **keywords: Any) -> Any:
        raise MemoryError("of the scoring")

    trainer.forward_backward.add_fixed_logprobs = runs_out  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="of the scoring"):
        trainer.train()


def test_waiting_is_not_counted_twice(tmp_path: Path) -> None:
    events = Events()
    trainer = events.watch(make_trainer(tmp_path, reward_funcs=events.judge, beta=0.1))
    slow = trainer.forward_backward.add_fixed_logprobs

    def slowly(*args: Any, **keywords: Any) -> Any:
        threading.Event().wait(0.5)
        return slow(*args, **keywords)

    trainer.forward_backward.add_fixed_logprobs = slowly
    trainer.train()
    assert trainer.training_log.seconds["logprobs"] > 0.5 > trainer.training_log.seconds["rewarding"]
