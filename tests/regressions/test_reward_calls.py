"""How reward functions are called, and what happens if one raises, hangs or logs.

As in TRL #6533: a fault in a reward function is named, counted and kept out of the weights. All forms of functions and
faults are in tests/rewards/execution/test_runner.py; these tests cover their effect on a run.
"""

from __future__ import annotations

import asyncio
import functools

import numpy as np
import pytest
import torch

from grupo.errors import ConfigError, RewardError
from harness import (
    SCORES,
    SCRIPT,
    advantages_of,
    all_finite,
    completions_of,
    given,
    logs_of,
    make_trainer,
    snapshot,
    train,
    unchanged,
)


def length(completions, bonus=0.0, **columns):
    return [float(len(text)) + bonus for text in completions]


async def waiting_length(completions, **columns):
    await asyncio.sleep(0.01)
    return length(completions)


class Judge:
    def __init__(self, answers):
        self.answers = answers

    def __call__(self, completions, **columns):
        return self.answers


KINDS = {
    "partial of a partial": (functools.partial(functools.partial(length), bonus=0.0), "length"),
    "partial of a coroutine": (functools.partial(waiting_length), "waiting_length"),
    "object": (Judge([1.0, 2, 1, 2, 1, 2, 1, 2]), "Judge"),
}


@pytest.mark.parametrize("reward, name", KINDS.values(), ids=KINDS)
def test_every_kind_of_callable(tmp_path, reward, name):
    trainer = make_trainer(tmp_path, reward, script=SCRIPT)
    train(trainer)
    assert logs_of(trainer)[0][f"rewards/{name}/mean"] == 1.5
    torch.testing.assert_close(advantages_of(trainer).abs(), torch.full((8,), 0.5 / (3**-0.5 + 1e-4)).double())


def test_same_names_are_two_metrics(tmp_path):
    trainer = make_trainer(tmp_path, [given([1.0] * 8), functools.partial(given([10.0] * 8))], script=SCRIPT)
    train(trainer)
    (line,) = logs_of(trainer)
    assert (line["rewards/reward/mean"], line["rewards/reward_2/mean"], line["reward"]) == (1, 10, 11)


def test_asynchronous_rewards_train_inside_a_running_loop(tmp_path):
    trainer = make_trainer(tmp_path, [waiting_length, given(SCORES)], script=SCRIPT)

    async def notebook():
        trainer.train()

    asyncio.run(notebook())
    assert logs_of(trainer)[0]["rewards/waiting_length/mean"] == 1.5


# ---- exceptions, time-outs -------------------------------------------------------------------------------------------


class Trouble:
    """Calls `what` in call number `at`, counted from 1, and returns scores otherwise."""

    def __init__(self, at, what):
        self.at, self.what, self.calls = at, what, 0

    def __call__(self, completions, **columns):
        self.calls += 1
        return self.what() if self.calls == self.at else SCORES


def explode():
    return {"a": 1}["gold"]


def test_an_exception_in_the_middle_of_a_run_stops_it_before_the_step(tmp_path, caplog):
    trouble = Trouble(3, explode)
    trainer = make_trainer(tmp_path, [given(SCORES), trouble], script=SCRIPT, max_steps=5)
    with pytest.raises(RewardError, match=r"8 of 8 completions .*100%.*'Trouble' raised KeyError: 'gold'"):
        trainer.train()
    assert trainer.state.global_step == 2 and len(logs_of(trainer)) == 2
    assert 'return {"a": 1}["gold"]' in caplog.text, "the log shows the line that raised"
    again = make_trainer(
        tmp_path / "two", [given(SCORES), given(SCORES)], script=SCRIPT, max_steps=2, lr_scheduler_type="constant"
    )
    reference = make_trainer(
        tmp_path / "five",
        [given(SCORES), Trouble(3, explode)],
        script=SCRIPT,
        max_steps=5,
        lr_scheduler_type="constant",
    )
    train(again)
    with pytest.raises(RewardError):
        reference.train()
    assert unchanged(reference.model, snapshot(again.model)), "the weights are those after the second step"


def test_a_tolerated_exception_costs_its_step_only(tmp_path):
    settings = {"max_failed_reward_share": 1.0, "max_steps": 3, "beta": 0.1, "optim": "sgd"}
    trainer = make_trainer(tmp_path, Trouble(2, explode), script=SCRIPT, **settings)
    watch = train(trainer)
    assert trainer.state.global_step == 3 and all_finite(trainer.model)
    first, second, third = logs_of(trainer)
    assert "reward" not in second and second["rewards/Trouble/failed_share"] == 1 and second["loss"] == 0
    assert first["reward"] == third["reward"] == sum(SCORES) / 8
    before, after = watch.parameters[1:]
    assert all(torch.equal(before[name], after[name]) for name in before), "no gradient, no step"


def test_a_coroutine_that_hangs_is_left_behind_and_the_others_count(tmp_path):
    async def sleeping(completions, **columns):
        await asyncio.sleep(60)

    settings = {"reward_timeout": 0.2, "max_failed_reward_share": 1.0}
    trainer = make_trainer(tmp_path, [sleeping, waiting_length], script=SCRIPT, **settings)
    train(trainer)
    statuses = [completion["statuses"] for completion in completions_of(trainer)]
    assert statuses == [{"sleeping": "failed", "waiting_length": "scored"}] * 8
    assert logs_of(trainer)[0]["rewards/waiting_length/mean"] == 1.5


@pytest.mark.parametrize("ending", [StopIteration(), asyncio.CancelledError()], ids=repr)
def test_unusual_exceptions_do_not_end_the_process(tmp_path, ending):
    def reward(completions, **columns):
        raise ending

    with pytest.raises(RewardError, match=type(ending).__name__):
        make_trainer(tmp_path, reward, script=SCRIPT).train()


@pytest.mark.parametrize(
    "rewards, error, message",
    [
        (None, ConfigError, "needs reward_funcs"),
        (["./no-such-reward-model"], ConfigError, "reward model './no-such-reward-model' cannot be loaded"),
        ([torch.nn.Linear(1, 1)], ConfigError, "a Linear, which is not a transformers model"),
    ],
)
def test_unusable_rewards_are_refused_at_the_start(tmp_path, rewards, error, message):
    with pytest.raises(error, match=message):
        make_trainer(tmp_path, rewards)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], [], np.ones(1)], ids=str)
def test_weights_must_fit_the_functions(tmp_path, weights):
    with pytest.raises(
        ConfigError, match=rf"reward_weights has {len(weights)} numbers? for 2 reward functions \(length, Judge\)"
    ):
        make_trainer(tmp_path, [length, Judge(SCORES)], reward_weights=weights)


# ---- what a function logs --------------------------------------------------------------------------------------------


def test_logged_columns_and_metrics(tmp_path):
    def reward(completions, log_extra, log_metric, trainer_state, **columns):
        log_extra("shouted", [text.upper() for text in completions])
        log_metric("mine/number", 1.0 + trainer_state.global_step)
        return SCORES

    trainer = make_trainer(
        tmp_path,
        [reward, reward],
        script=SCRIPT,
        max_steps=4,
        logging_steps=2,
        log_completions=True,
        eval_rows=[{"prompt": "ab"}],
    )
    train(trainer)
    assert [line["mine/number"] for line in logs_of(trainer)] == [1.5, 3.5], "mean over the calls since the last log"
    table = pytest.importorskip("pandas").read_parquet(tmp_path / "completions" / "completions_00002.parquet")
    assert list(table.columns) == [
        "step",
        "prompt",
        "completion",
        "reward",
        "reward_2",
        "shouted",
        "reward_2/shouted",
        "advantage",
    ]
    assert list(table["shouted"]) == [text.upper() for text in table["completion"]] and len(table) == 16
    assert list(table["step"]) == [1] * 8 + [2] * 8


@pytest.mark.parametrize("name", ["loss", "rewards/reward/mean"])
def test_a_metric_of_the_trainer_cannot_be_overwritten(tmp_path, name):
    def reward(completions, log_metric, **columns):
        log_metric(name, 1e6)
        return SCORES

    with pytest.raises(RewardError, match=rf"log_metric\('{name}', ...\), but the trainer logs"):
        make_trainer(tmp_path, reward, script=SCRIPT).train()


def test_a_reward_error_raised_inside_a_function_ends_the_run_as_it_is(tmp_path):
    def reward(completions, **columns):
        raise RewardError("the judge has no key")

    with pytest.raises(RewardError, match=r"^the judge has no key$"):
        make_trainer(tmp_path, reward, script=SCRIPT, max_failed_reward_share=1.0).train()
