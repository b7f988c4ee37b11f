"""More of family C: how reward functions are called, and what becomes of one that raises, hangs or logs.

TRL #6533 and its kind: a fault in a reward function is named, counted and kept out of the weights.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time

import numpy as np
import pytest
import torch

from grupo.errors import ConfigError, DataError, RewardError
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


class AsyncJudge:
    async def __call__(self, completions, **columns):
        return await waiting_length(completions)


KINDS = {
    "function": (length, "length"),
    "lambda": (lambda completions, **columns: length(completions), "lambda"),
    "partial": (functools.partial(length, bonus=0.0), "length"),
    "partial of a partial": (functools.partial(functools.partial(length), bonus=0.0), "length"),
    "coroutine": (waiting_length, "waiting_length"),
    "partial of a coroutine": (functools.partial(waiting_length), "waiting_length"),
    "async object": (AsyncJudge(), "AsyncJudge"),
    "bound method": (Judge([]).__class__([1.0, 2, 1, 2, 1, 2, 1, 2]).__call__, "__call__"),
    "object": (Judge([1.0, 2, 1, 2, 1, 2, 1, 2]), "Judge"),
}


@pytest.mark.parametrize("reward, name", KINDS.values(), ids=KINDS)
def test_every_kind_of_callable(tmp_path, reward, name):
    trainer = make_trainer(tmp_path, reward, script=SCRIPT)
    train(trainer)
    assert logs_of(trainer)[0][f"rewards/{name}/mean"] == 1.5
    torch.testing.assert_close(advantages_of(trainer).abs(), torch.full((8,), 0.5 / (3**-0.5 + 1e-4)).double())


def test_same_names_are_two_metrics(tmp_path):
    rewards = [lambda completions, **columns: [1.0] * 8, lambda completions, **columns: [10.0] * 8, given([100.0] * 8)]
    trainer = make_trainer(tmp_path, [*rewards, functools.partial(given([1000.0] * 8))], script=SCRIPT)
    train(trainer)
    (line,) = logs_of(trainer)
    means = {name: line[f"rewards/{name}/mean"] for name in ("lambda", "lambda_2", "reward", "reward_2")}
    assert means == {"lambda": 1, "lambda_2": 10, "reward": 100, "reward_2": 1000} and line["reward"] == 1111


def test_asynchronous_rewards_run_together_also_inside_a_running_loop(tmp_path):
    barrier = {}

    def partner(name, other):
        async def reward(completions, **columns):
            barrier[name] = True
            for _ in range(200):
                if other in barrier:
                    return [1.0] * 8
                await asyncio.sleep(0.01)
            return [0.0] * 8

        return reward

    trainer = make_trainer(tmp_path, [partner("one", "other"), partner("other", "one"), given(SCORES)], script=SCRIPT)

    async def notebook():
        trainer.train()

    asyncio.run(notebook())
    (line,) = logs_of(trainer)
    assert line["rewards/reward/mean"] == line["rewards/reward_2/mean"] == 1, "each saw the other running"


# ---- exceptions, time-outs -------------------------------------------------------------------------------------------


class Trouble:
    """Does something in call `at`, counted from 1; scores otherwise."""

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
    assert 'return {"a": 1}["gold"]' in caplog.text, "the line that raised is shown"
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


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_a_tolerated_exception_costs_its_step_only(tmp_path, beta):
    settings = {"max_failed_reward_share": 1.0, "max_steps": 3, "beta": beta, "optim": "sgd"}
    trainer = make_trainer(tmp_path, Trouble(2, explode), script=SCRIPT, **settings)
    watch = train(trainer)
    assert trainer.state.global_step == 3 and all_finite(trainer.model)
    first, second, third = logs_of(trainer)
    assert "reward" not in second and second["rewards/Trouble/failed_share"] == 1 and second["loss"] == 0
    assert first["reward"] == third["reward"] == sum(SCORES) / 8
    before, after = watch.parameters[1:]
    assert all(torch.equal(before[name], after[name]) for name in before), "no gradient, no step"


def test_a_reward_that_hangs_is_left_behind_and_named(tmp_path):
    released = threading.Event()
    trainer = make_trainer(tmp_path, Trouble(2, released.wait), script=SCRIPT, max_steps=3, reward_timeout=0.2)
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"'Trouble' did not return within 0.2 s"):
        trainer.train()
    released.set()
    assert time.monotonic() - started < 10 and trainer.state.global_step == 1


def test_a_coroutine_that_hangs_is_left_behind_and_the_others_count(tmp_path):
    async def sleeping(completions, **columns):
        await asyncio.sleep(60)

    settings = {"reward_timeout": 0.2, "max_failed_reward_share": 1.0}
    trainer = make_trainer(tmp_path, [sleeping, waiting_length], script=SCRIPT, **settings)
    train(trainer)
    statuses = [completion["statuses"] for completion in completions_of(trainer)]
    assert statuses == [{"sleeping": "failed", "waiting_length": "scored"}] * 8
    assert logs_of(trainer)[0]["rewards/waiting_length/mean"] == 1.5


@pytest.mark.parametrize("ending", [SystemExit(3), StopIteration(), asyncio.CancelledError()], ids=repr)
def test_odd_exceptions_do_not_end_the_process(tmp_path, ending):
    def reward(completions, **columns):
        raise ending

    with pytest.raises(RewardError, match=type(ending).__name__):
        make_trainer(tmp_path, reward, script=SCRIPT).train()


def test_a_plain_function_that_returns_a_coroutine_is_told_so(tmp_path):
    def reward(completions, **columns):
        return waiting_length(completions)

    with pytest.raises(RewardError, match="'async def'"):
        make_trainer(tmp_path, reward, script=SCRIPT).train()


@pytest.mark.parametrize(
    "rewards, error, message",
    [
        ([], ConfigError, "empty"),
        (None, ConfigError, "needs reward_funcs"),
        (["./no-such-reward-model"], ConfigError, "reward model './no-such-reward-model' cannot be loaded"),
        ([torch.nn.Linear(1, 1)], ConfigError, "a Linear, which is no model of transformers"),
        ([Judge], ConfigError, "the class Judge; give an instance"),
        ([3], ConfigError, "cannot be called"),
    ],
)
def test_what_is_no_reward_function_is_refused_at_the_start(tmp_path, rewards, error, message):
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


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda log_extra, log_metric: log_extra("x", [1, 2]),
            r"log_extra\('x', ...\) with 2 values for 8 completions",
        ),
        (lambda log_extra, log_metric: log_extra("x", "12345678"), r"log_extra\('x', ...\) with a str"),
        (lambda log_extra, log_metric: log_metric("x", [1.0]), r"log_metric\('x', ...\) with \[1.0\], not a number"),
    ],
)
def test_wrong_logging_names_the_function(tmp_path, call, message):
    def reward(completions, log_extra, log_metric, **columns):
        call(log_extra, log_metric)
        return SCORES

    with pytest.raises(RewardError, match=f"'reward' called {message}"):
        make_trainer(tmp_path, reward, script=SCRIPT).train()


@pytest.mark.parametrize(
    "name", ["reward", "loss", "completions/mean_length", "rewards/reward/mean", "kl", "epoch", "step"]
)
def test_a_metric_of_ours_cannot_be_overwritten(tmp_path, name):
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


def test_a_data_error_is_an_exception_like_any_other(tmp_path):
    def reward(completions, **columns):
        raise DataError("unreadable")

    with pytest.raises(RewardError, match="'reward' raised DataError: unreadable"):
        make_trainer(tmp_path, reward, script=SCRIPT).train()
