"""Batch sizes that do not fit are refused at once with values that do; dropped prompts are logged.

TRL #2858, #2876, PR #3199, PR #4682; huggingface/open-r1 #249; modelscope/ms-swift #3980, #3561; Video-R1 #31.
"""

from __future__ import annotations

import collections
import re
import time

import datasets
import pytest

from grupo import GRPOConfig
from grupo.errors import ConfigError, DataError
from harness import completions_of, logs_of, make_trainer, train


class Counting:
    """Counts the completions of each prompt, per call."""

    def __init__(self):
        self.calls = []

    def __call__(self, prompts, **columns):
        self.calls.append(collections.Counter(prompts))
        return [float(index) for index in range(len(prompts))]

    @property
    def total(self):
        return sum(self.calls, collections.Counter())


def rows(count):
    return [{"prompt": chr(ord("a") + index)} for index in range(count)]


MISFITS = {
    "micro 5, G 6": {"per_device_train_batch_size": 5, "num_generations": 6},
    "micro 4, G 8, GAS 3": {"per_device_train_batch_size": 4, "num_generations": 8, "gradient_accumulation_steps": 3},
    "micro 3, G 2, GAS 3": {"per_device_train_batch_size": 3, "num_generations": 2, "gradient_accumulation_steps": 3},
    "rollout 12, G 8": {"per_device_train_batch_size": 4, "num_generations": 8, "steps_per_generation": 3},
    "generation batch 12, G 8": {"per_device_train_batch_size": 4, "num_generations": 8, "generation_batch_size": 12},
    "G 16, batch 8 x 3": {"per_device_train_batch_size": 8, "num_generations": 16, "gradient_accumulation_steps": 3},
}


@pytest.mark.parametrize("settings", MISFITS.values(), ids=MISFITS)
def test_a_misfit_is_refused_at_once_with_settings_that_work(tmp_path, settings):
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], **settings)
    assert time.monotonic() - started < 2
    message = str(caught.value)
    assert str(settings["num_generations"]) in message and str(settings["per_device_train_batch_size"]) in message
    changes = re.findall(r"(\w+)=(\d+)", message.split("fits: ")[1])
    assert changes
    for name, value in changes:
        GRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to=[], **{**settings, name: int(value)})


def test_one_completion_per_forward_holds_a_whole_group(tmp_path):
    counting = Counting()
    trainer = make_trainer(
        tmp_path,
        counting,
        rows(3),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=6,
        num_generations=6,
        max_steps=3,
    )
    train(trainer)
    assert counting.calls == [{"a": 6}, {"b": 6}, {"c": 6}] and trainer.state.global_step == 3


def test_a_batch_of_one_without_accumulation_is_raised_to_one_group(tmp_path, caplog):
    counting = Counting()
    trainer = make_trainer(
        tmp_path,
        counting,
        rows(2),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        num_generations=8,
        max_steps=2,
    )
    train(trainer)
    assert counting.calls == [{"a": 8}, {"b": 8}] and trainer.state.global_step == 2
    assert "gradient_accumulation_steps raised from 1 to 8" in caplog.text, "visible without configured logging"


@pytest.mark.parametrize("group", [1, 0, -2])
def test_a_group_of_one_is_refused(tmp_path, group):
    with pytest.raises(ConfigError, match="must be at least 2"):
        GRPOConfig(output_dir=str(tmp_path), num_generations=group)


@pytest.mark.parametrize("group, micro, accumulation", [(2, 2, 1), (3, 6, 2), (16, 4, 4)])
def test_other_group_sizes_train(tmp_path, group, micro, accumulation):
    counting = Counting()
    trainer = make_trainer(
        tmp_path,
        counting,
        rows(8),
        num_generations=group,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
    )
    train(trainer)
    assert all(set(call.values()) == {group} for call in counting.calls)
    assert sum(counting.total.values()) == 2 * micro * accumulation


@pytest.mark.parametrize("count, kind", [(3, list), (1, list), (3, datasets.Dataset.from_list)])
def test_too_few_prompts_are_an_error_not_a_run_of_no_steps(tmp_path, count, kind):
    with pytest.raises(
        ConfigError, match=rf"dataset has {count} prompts?, and one rollout needs 4 .*This fits|Any one of these fits"
    ):
        make_trainer(tmp_path, Counting(), kind(rows(count)), num_generations=2, per_device_train_batch_size=8)


def test_an_empty_dataset_is_an_error(tmp_path):
    with pytest.raises((ConfigError, DataError), match=r"0 prompts|no rows"):
        make_trainer(tmp_path, Counting(), [])
    with pytest.raises(DataError, match="no rows"):
        make_trainer(tmp_path / "eval", Counting(), eval_rows=[])


def test_a_stream_without_length_is_refused_with_a_way_out(tmp_path):
    stream = datasets.Dataset.from_list(rows(4)).to_iterable_dataset()
    with pytest.raises(ConfigError, match=r"no length.*dataset\.take"):
        make_trainer(tmp_path, Counting(), stream)


def test_leftover_prompts_of_an_epoch_are_dropped_and_logged(tmp_path, caplog):
    counting = Counting()
    trainer = make_trainer(tmp_path, counting, rows(5), max_steps=-1, num_train_epochs=1)
    train(trainer)
    assert trainer.state.global_step == 2
    assert counting.total == {"a": 4, "b": 4, "c": 4, "d": 4}, "no group is split"
    assert "1 of 5 prompts left over and dropped" in caplog.text, "visible without configured logging"


def test_nothing_is_logged_when_nothing_is_changed(tmp_path, caplog):
    train(make_trainer(tmp_path, Counting(), rows(4)))
    assert "dropped" not in caplog.text and "raised" not in caplog.text


@pytest.mark.parametrize("epochs, steps", [(2, 6), (0.5, 2), (1.5, 5)])
def test_epochs_are_whole_passes_over_the_prompts(tmp_path, epochs, steps):
    counting = Counting()
    trainer = make_trainer(tmp_path, counting, rows(6), max_steps=-1, num_train_epochs=epochs, shuffle_dataset=True)
    train(trainer)
    assert trainer.state.global_step == steps
    first_epoch = sum(counting.calls[:3], collections.Counter())
    assert set(first_epoch.values()) == {4}
    if epochs >= 1:
        assert len(first_epoch) == 6, "every prompt once before any is repeated"


def test_several_rollouts_per_step_and_several_steps_per_rollout(tmp_path):
    for settings, calls, steps in (
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "steps_per_generation": 2}, 4, 2),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "steps_per_generation": 8}, 2, 8),
        ({"per_device_train_batch_size": 4, "num_iterations": 3, "gradient_accumulation_steps": 2}, 2, 6),
    ):
        counting = Counting()
        trainer = make_trainer(
            tmp_path / str(steps),
            counting,
            rows(8),
            **settings,
            max_steps=steps,
            num_train_epochs=1,
            logprob_gap_stop=9.0,
        )
        train(trainer)
        assert len(counting.calls) == calls and trainer.state.global_step == steps
        assert all(set(call.values()) == {4} for call in counting.calls)


# ---- evaluation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group, batch", [(3, 4), (1, 4), (4, None)])
def test_every_evaluation_prompt_is_counted_once_whatever_the_batch(tmp_path, group, batch):
    def share_of_a(prompts, **columns):
        return [1.0 if prompt == "a" else 0.0 for prompt in prompts]

    counting = Counting()
    settings = {} if batch is None else {"per_device_eval_batch_size": batch}
    trainer = make_trainer(
        tmp_path,
        [counting, share_of_a],
        eval_rows=rows(3),
        num_generations_eval=group,
        reward_weights=[0.0, 1.0],
        **settings,
    )
    metrics = trainer.evaluate()
    assert counting.total == {"a": group, "b": group, "c": group}
    assert len(completions_of(trainer, split="eval")) == 3 * group
    assert metrics["eval_reward"] == pytest.approx(1 / 3) and metrics["eval_prompts"] == 3


def test_several_evaluation_sets_and_one_passed_to_evaluate(tmp_path):
    counting = Counting()
    sets = {"short": rows(2), "long": [{"prompt": letter * 30} for letter in "xyz"]}
    trainer = make_trainer(
        tmp_path, counting, eval_rows=sets, eval_strategy="steps", eval_steps=1, num_generations_eval=2
    )
    train(trainer)
    assert counting.total == {"ab": 4, "cde": 4, **{row["prompt"]: 2 for part in sets.values() for row in part}}
    evaluations = [line for line in trainer.state.log_history if any(name.startswith("eval_") for name in line)]
    assert [sorted(name for name in line if name.endswith("_prompts")) for line in evaluations] == [
        ["eval_short_prompts"],
        ["eval_long_prompts"],
    ]
    assert trainer.evaluate("short").keys() >= {"eval_reward", "eval_prompts"}
    assert trainer.evaluate(rows(5), metric_key_prefix="test")["test_prompts"] == 5
    assert "reward" in logs_of(trainer)[0]


def test_evaluating_without_a_training_set(tmp_path):
    trainer = make_trainer(tmp_path, Counting(), None, eval_rows=rows(3))
    assert trainer.evaluate()["eval_prompts"] == 3
    with pytest.raises(ConfigError, match="train_dataset"):
        trainer.train()
