"""Dynamic sampling, training on the completions that vary most, and the curriculum, through GRPOTrainer.

Two ranks are compared with one in `test_two_ranks.py`, and the choice of a subset with brute force in
`algo/test_selection.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from transformers import TrainerCallback

from grupo import GRPOConfig
from grupo.algo.advantages import compute_advantages
from grupo.algo.selection import max_variance_subset
from grupo.data.prompt_stream import PromptStream, StatefulPromptStream
from grupo.data.prompts import IndexedRows
from grupo.errors import ConfigError, RewardError
from grupo.evals.pass_rates import estimate_pass_rates
from grupo.policy.logprob_model import LogprobModel
from tiny import tiny_model
from tiny_trainer import EOS, TOKENIZER, Spy, distance, gradients, make_trainer, reward, weights


def rows(text: str) -> list[dict[str, Any]]:
    """One prompt per letter; groups of capital letters have zero variance."""
    return [{"prompt": letter, "dead": letter.isupper()} for letter in text]


def prompts_of(samples: Any, group_size: int = 4) -> str:
    """The letter of each group's prompt, in order of the groups."""
    letters = TOKENIZER.decode([sample.prompt_ids[0] for sample in samples])
    assert len(letters) == len(samples)
    groups = [set(letters[start : start + group_size]) for start in range(0, len(letters), group_size)]
    assert all(len(group) == 1 for group in groups), "completion indices of one group have one prompt"
    return "".join(group.pop() for group in groups)


def trained(folder: Path, **settings: Any) -> tuple[Any, Spy]:
    trainer = make_trainer(folder, **settings)
    spy = Spy(trainer)
    trainer.train()
    return trainer, spy


def training_logs(trainer: Any) -> list[dict[str, float]]:
    return [line for line in trainer.state.log_history if "loss" in line]


def groups_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


# ---- dynamic sampling ------------------------------------------------------------------------------------------------

DYNAMIC = {"dynamic_sampling": True}
# The window is aBcD. B and D are replaced by E and f, and E by g.
MIXED = rows("aBcDEfgh")


def test_zero_variance_groups_are_replaced(tmp_path: Path) -> None:
    trainer, spy = trained(tmp_path, dataset=MIXED, **DYNAMIC)
    assert prompts_of(spy.steps[0].samples) == "agcf"
    assert all(sample.group_has_signal for sample in spy.steps[0].samples)
    (line,) = training_logs(trainer)
    assert line["dynamic_sampling/rounds"] == 3
    assert line["dynamic_sampling/groups"] == 7
    assert line["dynamic_sampling/kept_share"] == pytest.approx(4 / 7)
    assert line["dynamic_sampling/zero_variance_share"] == 0.0


def test_everything_that_was_sampled_is_recorded_and_counted(tmp_path: Path) -> None:
    trainer, _ = trained(tmp_path, dataset=MIXED, **DYNAMIC)
    groups = groups_in(tmp_path)
    assert "".join(group["prompt"] for group in groups if not group.get("replaced")) == "agcf"
    assert sorted(group["prompt"] for group in groups if group.get("replaced")) == ["B", "D", "E"]
    assert len({group["prompt_id"] for group in groups}) == 7
    completions = [completion for group in groups for completion in group["completions"]]
    (line,) = training_logs(trainer)
    assert line["reward"] == pytest.approx(sum(c["reward"] for c in completions) / len(completions))
    assert line["frac_reward_zero_std"] == pytest.approx(3 / 7)
    assert line["completions/mean_length"] == pytest.approx(sum(c["tokens"] for c in completions) / len(completions))
    assert line["num_tokens"] == sum(c["tokens"] + 1 for c in completions), "completions and prompts of one token each"


def test_zero_variance_groups_stay_after_the_last_round(tmp_path: Path) -> None:
    trainer, spy = trained(tmp_path, dataset=MIXED, **DYNAMIC, dynamic_sampling_max_rounds=1)
    assert prompts_of(spy.steps[0].samples) == "aEcf"
    (line,) = training_logs(trainer)
    assert line["dynamic_sampling/rounds"] == 2 and line["dynamic_sampling/zero_variance_share"] == 0.25


def test_data_without_any_signal_end_after_the_last_round(tmp_path: Path) -> None:
    """Replacements continue into the next epochs, with new ids and therefore new completions."""
    trainer, spy = trained(tmp_path, dataset=rows("ABCDEF"), **DYNAMIC)
    assert all(not gradient.any() for gradient in spy.steps[0].gradients.values())
    assert [group["prompt_id"] for group in groups_in(tmp_path)] == [12, 13, 14, 15, *range(12)]
    assert training_logs(trainer)[0]["dynamic_sampling/zero_variance_share"] == 1.0


def test_advantages_over_the_batch_are_those_of_the_final_groups(tmp_path: Path) -> None:
    _, spy = trained(tmp_path, dataset=MIXED, **DYNAMIC, scale_rewards="batch")
    samples = spy.steps[0].samples
    scores = torch.tensor([reward([sample.completion_ids], [False]) for sample in samples])
    expected = compute_advantages(scores, [number // 4 for number in range(16)], scale="batch").advantages
    assert [sample.advantage for sample in samples] == pytest.approx(expected.tolist())
    with_dead = torch.cat([scores, torch.full((12, 1), 0.5)])
    other = compute_advantages(with_dead, [number // 4 for number in range(28)], scale="batch").advantages[:16]
    assert [sample.advantage for sample in samples] != pytest.approx(other.tolist())


def without_clock(line: dict[str, float]) -> dict[str, float]:
    names = ("time/", "step_time", "tokens_per_second", "dynamic_sampling/", "train_")
    return {name: value for name, value in line.items() if not name.startswith(names)}


def test_without_zero_variance_groups_nothing_changes(tmp_path: Path) -> None:
    """Over several epochs with one leftover prompt each."""
    settings = {
        "dataset": rows("abcdefg"), "per_device_train_batch_size": 8, "max_steps": 8, "shuffle_dataset": True,
    }  # fmt: skip
    plain, _ = trained(tmp_path / "plain", **settings)
    dynamic, _ = trained(tmp_path / "dynamic", **settings, **DYNAMIC)
    assert type(plain.window.stream) is PromptStream and type(dynamic.window.stream) is StatefulPromptStream
    for name, tensor in weights(dynamic.model).items():
        assert torch.equal(tensor, weights(plain.model)[name])
    assert list(map(without_clock, training_logs(dynamic))) == list(map(without_clock, training_logs(plain)))
    assert groups_in(tmp_path / "dynamic") == groups_in(tmp_path / "plain")


def test_a_fully_masked_group_counts_as_zero_variance(tmp_path: Path) -> None:
    """Its rewards differ, but all its completions are truncated and left out of the loss."""

    def script(prompt: Any, place: int) -> list[int]:
        return [10 + place] * 9 if prompt.content == "b" else [10 + place, 20 + prompt.row, EOS]

    settings = {
        "dataset": rows("abcdef"), "script": script, "mask_truncated_completions": True,
        "reward_funcs": lambda completion_ids, **_: [float(ids[0]) for ids in completion_ids],
    }  # fmt: skip
    _, spy = trained(tmp_path / "a", **settings, **DYNAMIC)
    assert prompts_of(spy.steps[0].samples) == "aecd"
    _, spy = trained(tmp_path / "b", **{**settings, "mask_truncated_completions": False}, **DYNAMIC)
    assert prompts_of(spy.steps[0].samples) == "abcd"


def test_failed_rewards_count_over_all_rounds(tmp_path: Path) -> None:
    """Failures of half a replacement are a tenth of everything that was sampled."""

    def failing(completion_ids: list[list[int]], prompts: list[str], dead: list[bool], **_: Any) -> list[float]:
        values = reward(completion_ids, dead)
        return [
            float("nan") if p in "fg" and i % 2 else v for i, (p, v) in enumerate(zip(prompts, values, strict=True))
        ]

    settings = {"dataset": rows("abcDfh"), "reward_funcs": failing, **DYNAMIC}
    _, spy = trained(tmp_path / "a", **settings, max_failed_reward_share=0.11)
    assert prompts_of(spy.steps[0].samples) == "abcf"
    assert [sample.has_loss for sample in spy.steps[0].samples[12:]] == [True, False, True, False]
    with pytest.raises(RewardError, match="2 of 20 completions"):
        trained(tmp_path / "b", **settings, max_failed_reward_share=0.09)


def test_logged_columns_stay_with_their_completions(tmp_path: Path) -> None:
    """`log_extra` is called in the second round only; the table has the completions that are trained on."""
    calls: list[int] = []

    def logging(prompts: list[str], completion_ids: list[list[int]], dead: list[bool], log_extra: Any, log_metric: Any,
                **_: Any) -> list[float]:  # fmt: skip
        calls.append(len(prompts))
        log_metric("calls", 1.0 * len(calls))
        if len(calls) == 2:
            log_extra("letter", prompts)
        return reward(completion_ids, dead)

    trainer, _ = trained(
        tmp_path,
        dataset=rows("aBcdef"),
        reward_funcs=logging,
        log_completions=True,
        num_completions_to_print=1,
        **DYNAMIC,
    )
    assert calls == [16, 4]
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert "".join(table["prompt"][::4]) == "aecd"
    assert table["letter"].fillna("-").tolist() == ["-"] * 4 + ["e"] * 4 + ["-"] * 8
    assert training_logs(trainer)[0]["calls"] == 1.5


# ---- training on the completions that vary most ----------------------------------------------------------------------


class Computed:
    """Completions whose log-probs are computed, with and without gradient."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.with_gradient: list[tuple[int, ...]] = []
        self.without: list[tuple[int, ...]] = []
        logprobs = LogprobModel.logprobs

        def spying(logprob_model: Any, model: Any, batch: Any, **keywords: Any) -> Any:
            seen = self.with_gradient if torch.is_grad_enabled() else self.without
            lengths = batch.completion_mask.sum(1).tolist()
            seen += [tuple(ids[:n]) for ids, n in zip(batch.completion_ids.tolist(), lengths, strict=True)]
            return logprobs(logprob_model, model, batch, **keywords)

        monkeypatch.setattr(LogprobModel, "logprobs", spying)


LIVE = rows("abcd")


@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_the_gradient_is_that_of_the_selected_completions(tmp_path: Path, loss_type: str) -> None:
    """Advantages are computed over all four of a group, the loss over the two with the largest variance."""
    _, whole = trained(tmp_path / "whole", dataset=LIVE, loss_type=loss_type)
    _, spy = trained(tmp_path / "two", dataset=LIVE, loss_type=loss_type, num_generations_trained=2)
    all_samples, samples = whole.steps[0].samples, spy.steps[0].samples
    assert [sample.advantage for sample in samples] == [sample.advantage for sample in all_samples]
    kept = []
    for start in range(0, 16, 4):
        group = all_samples[start : start + 4]
        rewards = [reward([sample.completion_ids], [False])[0] for sample in group]
        kept += [start + place for place in max_variance_subset(rewards, 2)]
    assert [index for index, sample in enumerate(samples) if sample.has_loss] == kept
    alone = make_trainer(tmp_path / "alone", dataset=LIVE, loss_type=loss_type)
    alone.forward_backward(alone.model, [all_samples[index] for index in kept])
    assert distance(spy.steps[0].gradients, gradients(alone.model)) < 1e-6
    assert distance(spy.steps[0].gradients, whole.steps[0].gradients) > 0.1


def test_other_completions_are_never_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the gradient nor for the log-probs of the reference and of the start of the window."""
    computed = Computed(monkeypatch)
    settings = {"beta": 0.1, "num_iterations": 2, "max_steps": 2, "num_generations_trained": 2}
    _, spy = trained(tmp_path, dataset=LIVE, **settings)
    chosen = sorted(sample.completion_ids for sample in spy.steps[0].samples if sample.has_loss)
    assert len(chosen) == 8
    assert sorted(computed.with_gradient) == sorted(2 * chosen)
    # The check at the start computes log-probs of tokens of its own.
    sampled = {sample.completion_ids for sample in spy.steps[0].samples}
    assert set(computed.without) & sampled == set(chosen) < sampled
    assert all(sample.old_logprobs and sample.reference_logprobs for sample in spy.steps[0].samples)


def test_metrics_are_those_of_all_completions(tmp_path: Path) -> None:
    whole, _ = trained(tmp_path / "whole", dataset=LIVE)
    subset, _ = trained(tmp_path / "subset", dataset=LIVE, num_generations_trained=2)
    for name, value in training_logs(whole)[0].items():
        if name.startswith(("reward", "completions/", "frac_", "num_tokens")):
            assert training_logs(subset)[0][name] == value
    assert training_logs(subset)[0]["effective_tokens"] < training_logs(whole)[0]["effective_tokens"]


def test_unknown_and_masked_completions_are_never_selected(tmp_path: Path) -> None:
    def some(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None, 9.0, 0.0, 1.0] * (len(completion_ids) // 4)

    def script(prompt: Any, place: int) -> list[int]:
        return [10 + place, 11, EOS] if place != 1 else [10] * 9

    settings = {"dataset": LIVE, "reward_funcs": some, "script": script, "num_generations_trained": 2}
    _, spy = trained(tmp_path / "a", **settings)
    assert [sample.has_loss for sample in spy.steps[0].samples] == [False, True, True, False] * 4
    _, spy = trained(tmp_path / "b", **settings, mask_truncated_completions=True)
    assert [sample.has_loss for sample in spy.steps[0].samples] == [False, False, True, True] * 4


# ---- curriculum ------------------------------------------------------------------------------------------------------


LEVELS = [1] * 4 + [2] * 4


def test_training_starts_with_the_easy_prompts(tmp_path: Path) -> None:
    data = [{"prompt": letter, "dead": False, "level": level} for letter, level in zip("abcdwxyz", LEVELS, strict=True)]

    def graded(completion_ids: list[list[int]], prompts: list[str], **_: Any) -> list[float]:
        return [float(place % 2) for place in range(len(prompts))]

    settings = {
        "dataset": data, "reward_funcs": graded, "curriculum_column": "level", "curriculum_threshold": 0.5,
        "curriculum_window": 4, "per_device_train_batch_size": 8, "max_steps": 6, "shuffle_dataset": True,
    }  # fmt: skip
    trainer, spy = trained(tmp_path, **settings)
    letters = [prompts_of(step.samples) for step in spy.steps]
    assert sorted("".join(letters[:2])) == list("abcd")
    assert sorted("".join(letters[2:])) == list("abcdwxyz")
    lines = training_logs(trainer)
    assert [line["curriculum/level"] for line in lines] == [1, 1, 2, 2, 2, 2]
    assert [line["curriculum/success_rate"] for line in lines[:2]] == [0.5, 0.5]
    _, spy = trained(tmp_path / "b", **{**settings, "curriculum_threshold": 0.51})
    assert set("".join(prompts_of(step.samples) for step in spy.steps)) == set("abcd")


def test_replaced_groups_count_for_the_success_rate(tmp_path: Path) -> None:
    """Otherwise a level that is fully mastered would have no success rate."""
    data = [{"prompt": letter, "level": level} for letter, level in zip("abcdefgh", LEVELS, strict=True)]
    trainer, _ = trained(
        tmp_path, dataset=data, reward_funcs=lambda completion_ids, **_: [1.0] * len(completion_ids),
        shuffle_dataset=True, curriculum_column="level", curriculum_window=4, dynamic_sampling_max_rounds=1, **DYNAMIC,
    )  # fmt: skip
    assert training_logs(trainer)[0]["curriculum/success_rate"] == 1.0
    assert trainer.window.stream.state_dict()["unlocked"] == 2


# ---- resumed runs ----------------------------------------------------------------------------------------------------

RESUMED = {
    "dynamic sampling, two rollouts a step": (
        2, {"steps_per_generation": 1, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 8, **DYNAMIC}
    ),
    "everything, inside a window": (
        3, {"num_iterations": 2, "beta": 0.1, "curriculum_column": "level", "num_generations_trained": 2, **DYNAMIC}
    ),
}  # fmt: skip


def real_run(folder: Path, *, stop_after: int | None = None, resume: Any = None, **settings: Any) -> Any:
    """The model itself samples; every third prompt has zero variance."""

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == stop_after

    if settings.get("curriculum_column"):
        settings = {"curriculum_window": 4, "curriculum_threshold": 0.2, "curriculum_success_reward": 1.0, **settings}
    data = [{"prompt": letter, "dead": i % 3 == 1, "level": i // 6} for i, letter in enumerate("abcdefghijklmnopqr")]
    trainer = make_trainer(
        folder, script=None, dataset=data, callbacks=[Stop()],
        **{
            "per_device_train_batch_size": 8, "max_steps": 8, "shuffle_dataset": True, "learning_rate": 1e-2,
            "optim": "adamw_torch", "lr_scheduler_type": "linear", **settings,
        },
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_is_the_run_that_was_interrupted(tmp_path: Path, name: str) -> None:
    saved_at, settings = RESUMED[name]
    settings = {"save_strategy": "steps", "save_steps": saved_at, **settings}
    whole = real_run(tmp_path / "whole", **settings)
    lines = training_logs(whole)
    for part in (lines[:saved_at], lines[saved_at:]):
        if settings.get("dynamic_sampling"):
            assert any(line.get("dynamic_sampling/rounds", 1) > 1 for line in part), "something to resume"
    if settings.get("curriculum_column"):
        assert (
            lines[0]["curriculum/level"]
            < [line for line in lines if "curriculum/level" in line][-1]["curriculum/level"]
        )
    real_run(tmp_path / "parts", stop_after=saved_at, **settings)
    resumed = real_run(tmp_path / "parts", resume=True, **settings)
    for weight, tensor in weights(whole.model).items():
        assert torch.equal(weights(resumed.model)[weight], tensor)
    assert resumed.window.stream.state_dict() == whole.window.stream.state_dict()
    assert resumed.state.num_input_tokens_seen == whole.state.num_input_tokens_seen
    assert groups_in(tmp_path / "parts") == groups_in(tmp_path / "whole")


def test_a_second_call_of_train_starts_a_new_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, dataset=MIXED, **DYNAMIC)
    trainer.train()
    first = [group["prompt_id"] for group in groups_in(tmp_path)]
    trainer.train()
    assert [group["prompt_id"] for group in groups_in(tmp_path)] == first


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    settings = {"dataset": MIXED, "save_strategy": "steps", "save_steps": 1}
    make_trainer(tmp_path, **settings).train()
    with pytest.raises(ConfigError, match="dynamic_sampling was False and is True"):
        make_trainer(tmp_path, **settings, **DYNAMIC, max_steps=2).train(resume_from_checkpoint=True)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_generations_trained": 8}, ("num_generations=8", "below 8")),
        (
            {"num_generations_trained": 4, "steps_per_generation": 4, "per_device_train_batch_size": 2},
            ("step of 2 completions contains a partial group", "multiple of 8"),
        ),
        ({"curriculum_column": "x", "shuffle_dataset": False}, ("no effect", "random order")),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOConfig(**settings)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_missing_column_is_noticed_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\['dead', 'level'\].*Did you mean 'level'"):
        make_trainer(
            tmp_path, model="no/such-model", dataset=[{"prompt": "a", "dead": False, "level": 1}] * 4,
            curriculum_column="levels", shuffle_dataset=True,
        )  # fmt: skip


# ---- measured difficulty ---------------------------------------------------------------------------------------------


def test_pass_rates_are_the_shares_of_successes(tmp_path: Path) -> None:
    def by_place(prompt: Any, place: int) -> list[int]:
        return [10 + place, EOS]

    def solved(completion_ids: list[list[int]], hardness: list[int], **_: Any) -> list[float | None]:
        return [None if h > 9 else float(ids[0] - 10 >= h) for ids, h in zip(completion_ids, hardness, strict=True)]

    data = [
        *({"prompt": "a", "hardness": 0}, {"prompt": "b", "hardness": 1}, {"prompt": "too long", "hardness": 0}),
        *({"prompt": "c", "hardness": 4}, {"prompt": "d", "hardness": 99}),
    ]
    trainer = make_trainer(tmp_path, dataset=data[:1] * 4, reward_funcs=solved, script=by_place, max_prompt_length=4)
    before = weights(trainer.model)
    assert estimate_pass_rates(trainer, data) == [1.0, 0.75, None, 0.0, None]
    assert estimate_pass_rates(trainer, data, samples=2) == [1.0, 0.5, None, 0.0, None]
    assert estimate_pass_rates(trainer, data, success_reward=0.0)[3] == 1.0
    assert estimate_pass_rates(trainer, pd.DataFrame(data)) == [1.0, 0.75, None, 0.0, None]
    assert estimate_pass_rates(trainer, IndexedRows([data[3], data[0]], [7, 2])) == [0.0, 1.0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer.model).items())
    assert not (tmp_path / "completions.jsonl").exists()


def test_pass_rates_of_a_real_model_repeat(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, model=tiny_model(), script=None)
    data = rows("abcdef")
    rates = estimate_pass_rates(trainer, data)
    assert rates == estimate_pass_rates(trainer, data) and len(set(rates)) > 1
