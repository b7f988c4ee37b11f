"""Logged rewards are those of the reward functions, and the best checkpoint is the one with the best reward.

TRL #5352 / PR #5353 (weights ignored in the total), #3384 / PR #5811 and modelscope/ms-swift #8030 (best checkpoint by
loss).
"""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import LlamaForCausalLM

from grupo.errors import ConfigError, RewardError
from harness import given, logs_of, make_trainer, snapshot, train

SCRIPT = {"ab": ["a</s>", "bb</s>", "ccc</s>", "dddd</s>"], "cde": ["</s>", "ff</s>", "ggg</s>", "hh</s>"]}


def two(completions, **columns):
    return [2.0] * len(completions)


def ten(completions, **columns):
    return [10.0] * len(completions)


class Parity:
    """1 for texts of even length; records its scores."""

    __name__ = "parity"

    def __init__(self):
        self.given = []

    def __call__(self, completions, **columns):
        scores = [float(len(text) % 2 == 0) for text in completions]
        self.given.extend(scores)
        return scores


def test_the_total_is_weighted_and_the_means_are_not(tmp_path):
    trainer = make_trainer(tmp_path, [two, ten], script=SCRIPT, reward_weights=[0.5, 0.1], max_steps=2)
    train(trainer)
    for line in logs_of(trainer):
        assert line["reward"] == pytest.approx(2.0) and line["reward_std"] == pytest.approx(0, abs=1e-12)
        assert (line["rewards/two/mean"], line["rewards/ten/mean"]) == (2.0, 10.0)
        assert line["rewards/two/std"] == line["rewards/ten/std"] == 0


@pytest.mark.parametrize(
    "settings", [{}, {"scale_rewards": "none"}, {"multi_objective_aggregation": "normalize_then_sum"}], ids=str
)
def test_the_total_does_not_depend_on_how_advantages_are_made(tmp_path, settings):
    parity = Parity()
    trainer = make_trainer(tmp_path, [two, ten, parity], script=SCRIPT, reward_weights=[0.5, 0.1, -1.0], **settings)
    train(trainer)
    share = sum(parity.given) / 8
    assert logs_of(trainer)[0]["reward"] == pytest.approx(2 - share)
    assert logs_of(trainer)[0]["rewards/parity/mean"] == pytest.approx(share) and 0 < share < 1


@pytest.mark.parametrize(
    "weights, total", [([1.0, -1.0], -8.0), (None, 12.0), (np.array([0.5, 0.1]), 2.0), (torch.tensor([0.5, 0.5]), 6.0)]
)
def test_weights_of_any_sign(tmp_path, weights, total):
    trainer = make_trainer(tmp_path, [two, ten], script=SCRIPT, reward_weights=weights)
    train(trainer)
    assert logs_of(trainer)[0]["reward"] == pytest.approx(total)


@pytest.mark.parametrize("logging_steps", [1, 2])
def test_the_mean_is_that_of_the_completions_since_the_last_log(tmp_path, logging_steps):
    parity = Parity()
    trainer = make_trainer(tmp_path, parity, max_steps=4, logging_steps=logging_steps, max_completion_length=5)
    train(trainer)
    size = 8 * logging_steps
    wanted = [torch.tensor(parity.given[start : start + size]).mean() for start in range(0, 32, size)]
    assert [line["rewards/parity/mean"] for line in logs_of(trainer)] == pytest.approx([float(mean) for mean in wanted])


def test_rows_that_abstain_are_not_in_the_mean(tmp_path):
    half = [None, 4.0] * 4
    trainer = make_trainer(tmp_path, [given(half), two], script=SCRIPT)
    train(trainer)
    (line,) = logs_of(trainer)
    assert line["rewards/reward/mean"] == 4 and line["rewards/reward/std"] == 0
    assert line["rewards/reward/abstained_share"] == 0.5 and line["reward"] == 4  # 2 and 6, half each


def test_evaluation_has_its_own_names_and_leaves_training_alone(tmp_path):
    def by_split(completions, split, **columns):
        return [100.0 if name == "eval" else float(index % 2) for index, name in enumerate(split)]

    runs = {}
    for name, settings in (
        ("without", {}),
        ("with", {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}),
    ):
        trainer = make_trainer(
            tmp_path / name,
            by_split,
            [{"prompt": "ab", "split": "train"}, {"prompt": "cde", "split": "train"}],
            eval_rows=[{"prompt": "x", "split": "eval"}],
            max_steps=4,
            logging_steps=2,
            **settings,
        )
        train(trainer)
        timed = ("time/", "step_time", "tokens_per_second")
        runs[name] = [{k: v for k, v in line.items() if not k.startswith(timed)} for line in logs_of(trainer)]
        evaluations = [line for line in trainer.state.log_history if "eval_reward" in line]
        assert len(evaluations) == (5 if name == "with" else 0)
        for line in evaluations:
            assert line["eval_reward"] == 100 and line["eval_rewards/by_split/mean"] == 100
            assert all(key.startswith("eval_") or key in ("epoch", "step", "num_tokens") for key in line)
    assert runs["with"] == runs["without"], "evaluation changes neither numbers nor random draws of training"


def test_the_same_numbers_in_log_history_and_metrics_file(tmp_path):
    trainer = make_trainer(
        tmp_path, Parity(), max_steps=3, eval_rows=[{"prompt": "x"}], eval_strategy="steps", eval_steps=2
    )
    train(trainer)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines][:3] == [1, 2, 2]
    for written, logged in zip(lines, trainer.state.log_history, strict=True):
        assert {key: written[key] for key in written if key != "epoch"} == {
            key: logged[key] for key in written if key != "epoch"
        }


# ---- the best checkpoint ---------------------------------------------------------------------------------------------


def scripted_evaluation(scores):
    """Evaluation rewards by step; training rewards do not follow them."""

    def reward(completions, split, trainer_state, **columns):
        if split[0] == "eval":
            return [scores[trainer_state.global_step - 1]] * len(completions)
        return [float(index % 2) for index in range(len(completions))]

    return reward


def best_run(folder, scores, settings):
    trainer = make_trainer(
        folder,
        scripted_evaluation(scores),
        [{"prompt": "ab", "split": "train"}, {"prompt": "cde", "split": "train"}],
        eval_rows=[{"prompt": "x", "split": "eval"}],
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        **{"load_best_model_at_end": True, **settings},
    )
    return trainer, train(trainer)


BEST = {
    "eval_reward": ({"metric_for_best_model": "eval_reward"}, [-3.0, -0.5, -1.0], 2),
    "one function": ({"metric_for_best_model": "rewards/reward/mean"}, [0.9, 0.2, 0.4], 1),
    "smaller is better": ({"metric_for_best_model": "reward", "greater_is_better": False}, [0.2, 0.9, 0.1], 3),
    "zeros": ({}, [0.0, 0.0, 0.0], 1),
}


@pytest.mark.parametrize("settings, scores, best", BEST.values(), ids=BEST)
def test_the_best_model_is_the_one_with_the_best_reward(tmp_path, settings, scores, best):
    trainer, watch = best_run(tmp_path, scores, settings)
    assert trainer.state.best_global_step == best and trainer.state.best_metric == pytest.approx(scores[best - 1])
    kept = LlamaForCausalLM.from_pretrained(tmp_path / f"checkpoint-{best}")
    after = snapshot(trainer.model)
    assert all(torch.equal(after[name], tensor) for name, tensor in kept.named_parameters())
    if best < 3:
        assert all(torch.equal(after[name], watch.parameters[best][name]) for name in after), (
            "the weights after that step"
        )


def test_the_best_adapter(tmp_path):
    peft_config = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")
    trainer, watch = best_run(tmp_path, [0.2, 0.9, 0.4], {"peft_config": peft_config})
    after = snapshot(trainer.model)
    assert trainer.state.best_global_step == 2
    assert all(torch.equal(after[name], watch.parameters[2][name]) for name in after)


def test_the_default_is_logged(tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    best_run(tmp_path, [0.2, 0.9, 0.4], {})
    assert "metric_for_best_model is not set" in caplog.text


@pytest.mark.parametrize("metric", ["eval_loss"])
def test_a_loss_that_is_never_computed_is_refused_at_the_start(tmp_path, metric):
    with pytest.raises(ConfigError, match=f"metric_for_best_model='{metric}'.*no eval_loss.*'reward'"):
        best_run(tmp_path, [0.2, 0.9, 0.4], {"metric_for_best_model": metric})


@pytest.mark.parametrize("metric", [None, "eval_reward", "third_reward"])
def test_with_several_evaluation_sets_the_metric_must_name_one(tmp_path, metric):
    """At the start, not after the first evaluation."""
    settings = {} if metric is None else {"metric_for_best_model": metric}
    sets = {"one": [{"prompt": "x"}], "other": [{"prompt": "y"}]}
    with pytest.raises(ConfigError, match="'one_reward'"):
        make_trainer(
            tmp_path,
            Parity(),
            eval_rows=sets,
            eval_strategy="steps",
            save_strategy="steps",
            load_best_model_at_end=True,
            **settings,
        )


def test_one_of_several_evaluation_sets_selects_the_model(tmp_path):
    scores = scripted_evaluation([0.2, 0.9, 0.4])

    def reward(completions, split, **columns):
        return scores(completions, ["eval"] if split[0] == "other" else ["train"], **columns)

    trainer = make_trainer(
        tmp_path,
        reward,
        [{"prompt": "ab", "split": "train"}, {"prompt": "cde", "split": "train"}],
        eval_rows={"one": [{"prompt": "x", "split": "one"}], "other": [{"prompt": "y", "split": "other"}]},
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="other_reward",
    )
    train(trainer)
    assert trainer.state.best_global_step == 2


@pytest.mark.parametrize(
    ("metric", "error", "message", "settings"),
    [
        ("reward", RewardError, "no completion of it was scored", {"load_best_model_at_end": True}),
        ("rewards/reward/mean", RewardError, "abstained on all of them", {"lr_scheduler_type": "reduce_lr_on_plateau"}),
        ("accuracy", ConfigError, "'accuracy' .*eval_frac_reward", {"lr_scheduler_type": "reduce_lr_on_plateau"}),
    ],
)
def test_an_evaluation_without_the_watched_metric_is_refused(tmp_path, metric, error, message, settings):
    settings = {"load_best_model_at_end": False, "metric_for_best_model": metric, **settings}
    with pytest.raises(error, match=message):
        best_run(tmp_path, [None] * 3, settings)


def test_predict_is_an_evaluation_of_another_dataset(tmp_path):
    trainer, _ = best_run(tmp_path, [0.2, 0.9, 0.4], {})
    told = []
    trainer.callback_handler.on_predict = lambda args, state, control, metrics: told.append(metrics) or control
    found = trainer.predict([{"prompt": "yy", "split": "eval"}])
    assert found.metrics["test_reward"] == pytest.approx(0.4) and told == [found.metrics]
    assert found.predictions is None and "test_reward" in trainer.state.log_history[-1]
    lines = (tmp_path / "completions.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["split"] == "test"


def test_a_learning_rate_that_watches_the_reward(tmp_path):
    trainer = make_trainer(
        tmp_path,
        scripted_evaluation([1.0, 0.5, 0.5]),
        [{"prompt": "ab", "split": "train"}, {"prompt": "cde", "split": "train"}],
        eval_rows=[{"prompt": "x", "split": "eval"}],
        max_steps=3,
        eval_strategy="steps",
        eval_steps=1,
        lr_scheduler_type="reduce_lr_on_plateau",
        metric_for_best_model="reward",
        lr_scheduler_kwargs={"mode": "max", "patience": 0, "factor": 0.5},
    )
    train(trainer)
    assert [line["learning_rate"] for line in logs_of(trainer)] == pytest.approx([1e-2, 1e-2, 5e-3])
