"""Averages in a log line: token metrics over tokens, completion metrics over completions, step metrics over steps.

TRL #7047, #6380. Everything is recomputed with plain forward passes from the weights before each step, for log
intervals with different numbers of rollouts, completions with rewards, and tokens.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from grupo import GRPOConfig, GRPOTrainer, ScriptedEngine
from grupo.policy.logprob_model import LogprobModel
from harness import (
    EOS,
    SETTINGS,
    TOK,
    Watch,
    advantages_of,
    fed_in,
    logs_of,
    make_trainer,
    recorded_batches,
    token_logprobs,
)
from tiny import tiny_model

STEPS, PER_LOG, PASSES = 6, 3, 2  # rollouts before steps 1, 3 and 5: the logs hold two of them and one
ROWS = [{"prompt": prompt} for prompt in ("ab", "a longer prompt", "c", "defgh", "ij", "klm")]
SCORES = [[0, 1, 3, None, 2, 2, 2, 2], [1, 0, 0, 5, None, None, 4, 1], [2, None, 7, 1, 1, 0, None, 3]]
OFFSET = 0.01


def script(prompt, place):
    """1 to 8 tokens; the longest without a stop token."""
    length = 1 + (5 * prompt.row + 3 * place) % 8
    ids = [20 + (7 * prompt.row + 11 * place + 3 * index) % 80 for index in range(length)]
    return [*ids[:-1], EOS] if length < 7 else ids + [30] * (8 - length)


class Drifting(ScriptedEngine):
    """Reports log-probs that are wrong by 0.01 nats at the first token, 0.02 at the second, and so on."""

    model = None

    def generate(self, requests, sampling):
        return [
            [self._with_logprobs(request.prompt, completion) for completion in group]
            for request, group in zip(requests, super().generate(requests, sampling), strict=True)
        ]

    def _with_logprobs(self, prompt, completion):
        with torch.no_grad():
            logprobs = token_logprobs(self.model, prompt.token_ids, completion.token_ids).tolist()
        shifted = tuple(value - OFFSET * (index + 1) for index, value in enumerate(logprobs))
        return dataclasses.replace(completion, behavior_logprobs=shifted, sampled_logprobs=shifted)


def run(folder, loss_type, **settings):
    def reward(completions, trainer_state, **columns):
        return SCORES[trainer_state.global_step // PASSES]

    model = tiny_model()
    engine = Drifting(script, decode=lambda ids: TOK.decode(ids, skip_special_tokens=True), stop_token_ids=[EOS])
    engine.model = model
    config = {
        **SETTINGS,
        "num_iterations": PASSES,
        "max_steps": STEPS,
        "logging_steps": PER_LOG,
        "beta": 0.1,
        "learning_rate": 0.03,
        "loss_type": loss_type,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "logprob_gap_warn": 9.0,
        "logprob_gap_stop": 9.0,
        **settings,
    }
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(output_dir=str(folder), **config),
        train_dataset=ROWS,
        processing_class=TOK,
        engine=engine,
    )
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    return trainer, watch


@dataclasses.dataclass
class Row:
    """One completion, with values from plain forward passes at each of its two steps."""

    score: float | None
    length: int
    advantage: float
    group: int
    log_ratios: list[torch.Tensor]
    kls: list[torch.Tensor]
    entropies: list[torch.Tensor]


def computed_again(trainer, watch):
    """The completions of each rollout."""
    models = [with_parameters(parameters) for parameters in watch.parameters]
    advantages = advantages_of(trainer).view(3, 8)
    rollouts = []
    for rollout in range(3):
        rows = []
        for number in range(8):
            prompt = trainer.train_rows[2 * rollout + number // 4]
            ids = script(prompt.to_prompt(0), number % 4)
            passes = [2 * rollout, 2 * rollout + 1]
            with torch.no_grad():
                logprobs = {step: token_logprobs(models[step], prompt.token_ids, ids) for step in {0, *passes}}
                entropies = [entropy_of(models[step], prompt.token_ids, ids) for step in passes]
            ratios = [logprobs[step] - logprobs[passes[0]] for step in passes]
            differences = [logprobs[0] - logprobs[step] for step in passes]
            kls = [
                (difference.exp() - difference - 1) * ratio.exp()
                for difference, ratio in zip(differences, ratios, strict=True)
            ]
            rows.append(
                Row(
                    SCORES[rollout][number],
                    len(ids),
                    float(advantages[rollout, number]),
                    number // 4,
                    ratios,
                    kls,
                    entropies,
                )
            )
        rollouts.append(rows)
    return rollouts


def with_parameters(parameters):
    model = tiny_model()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(parameters[name])
    return model


def entropy_of(model, prompt, completion):
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    log_p = torch.log_softmax(logits, -1)
    return -(log_p.exp() * log_p).sum(-1)


def mean(values):
    return float(torch.cat([torch.as_tensor(value, dtype=torch.float64).flatten() for value in values]).mean())


def wanted_metrics(rollouts, steps):
    """Metrics of the log line after `steps`, a range of step numbers from 0."""
    started = [rollouts[step // 2] for step in steps if step % 2 == 0]
    rows = [row for rollout in started for row in rollout]
    trained = [(row, step % 2) for step in steps for row in rollouts[step // 2] if row.score is not None]
    scored = [[row.score for row in rollout if row.score is not None] for rollout in started]
    stds = [float(torch.tensor(scores, dtype=torch.float64).std()) for scores in scored]
    counts = [len(scores) for scores in scored]
    groups = [
        torch.tensor(
            [row.score for row in rollout if row.group == group and row.score is not None], dtype=torch.float64
        )
        for rollout in started
        for group in (0, 1)
    ]
    ended = [row.length for row in rows if row.length < 8]
    std = sum(value * count for value, count in zip(stds, counts, strict=True)) / sum(counts)
    dead = mean([float((group == group[0]).all()) for group in groups])
    gaps = [OFFSET * torch.arange(1, row.length + 1) for row, _ in trained]
    return {
        "reward": mean([row.score for row in rows if row.score is not None]),
        "rewards/reward/mean": mean([row.score for row in rows if row.score is not None]),
        "reward_std": std,
        "rewards/reward/std": std,
        "rewards/reward/abstained_share": mean([float(row.score is None) for row in rows]),
        "rewards/reward/failed_share": 0.0,
        "reward_within_group_std": mean([group.std() for group in groups]),
        "frac_reward_zero_std": dead,
        "completions/mean_length": mean([row.length for row in rows]),
        "completions/min_length": min(row.length for row in rows),
        "completions/max_length": max(row.length for row in rows),
        "completions/mean_terminated_length": mean(ended),
        "completions/min_terminated_length": min(ended),
        "completions/max_terminated_length": max(ended),
        "completions/clipped_ratio": mean([float(row.length == 8) for row in rows]),
        "effective_tokens": sum(row.length for row, _ in trained if row.advantage) / len(steps),
        "entropy": mean([row.entropies[turn] for row, turn in trained]),
        "kl": mean([row.kls[turn] for row, turn in trained]),
        "ratio/mean": mean([row.log_ratios[turn].exp() for row, turn in trained]),
        "sampling/logprob_gap": mean(gaps),
        "nonfinite_step_share": 0.0,
        "step": steps[-1] + 1,
    }


def clip_metrics(rollouts, steps, epsilon):
    low, high, low_rows, high_rows = [], [], [], []
    for step in steps:
        for row in rollouts[step // 2]:
            if row.score is not None:
                ratio = row.log_ratios[step % 2].exp()
                low.append(((ratio < 1 - epsilon) & (row.advantage < 0)).double())
                high.append(((ratio > 1 + epsilon) & (row.advantage > 0)).double())
                low_rows.append(float(low[-1].mean()))
                high_rows.append(float(high[-1].mean()))
    return {
        "clip_ratio/low_mean": mean(low),
        "clip_ratio/high_mean": mean(high),
        "clip_ratio/region_mean": mean(low) + mean(high),
        "clip_ratio/low_min": min(low_rows),
        "clip_ratio/high_max": max(high_rows),
    }


def test_every_average_by_hand(tmp_path):
    trainer, watch = run(tmp_path, "dapo", epsilon=0.05)
    rollouts = computed_again(trainer, watch)
    lines = logs_of(trainer)
    assert [line["step"] for line in lines] == [3, 6]
    for line, steps in zip(lines, (range(3), range(3, 6)), strict=True):
        wanted = {**wanted_metrics(rollouts, steps), **clip_metrics(rollouts, steps, 0.05)}
        assert {name: line[name] for name in wanted} == pytest.approx(wanted, abs=2e-5)
    assert lines[0]["clip_ratio/region_mean"] > 0 and lines[0]["kl"] != pytest.approx(lines[1]["kl"], rel=0.01)


def test_completions_left_out_of_the_update_count_as_not_clipped(tmp_path):
    """Without a KL term, completions without advantage are left out of the forward pass, but not of the shares."""
    trainer, watch = run(tmp_path, "dapo", epsilon=0.05, beta=0.0)
    rollouts = computed_again(trainer, watch)
    assert any(row.advantage == 0 and row.score is not None for rows in rollouts for row in rows)
    for line, steps in zip(logs_of(trainer), (range(3), range(3, 6)), strict=True):
        wanted = clip_metrics(rollouts, steps, 0.05)
        assert {name: line[name] for name in wanted} == pytest.approx(wanted, abs=1e-9)
        assert line["clip_ratio/region_mean"] > 0


def test_the_cap_of_cispo_by_hand(tmp_path):
    trainer, watch = run(tmp_path, "cispo", epsilon_high=1.02)
    rollouts = computed_again(trainer, watch)
    for line, steps in zip(logs_of(trainer), (range(3), range(3, 6)), strict=True):
        capped = [
            ((row.log_ratios[step % 2].exp() > 1.02) & (row.advantage > 0)).double()
            for step in steps
            for row in rollouts[step // 2]
            if row.score is not None
        ]
        assert line["cispo_clip_ratio"] == pytest.approx(mean(capped), abs=1e-9) and mean(capped) > 0


def test_losses_counts_and_times(tmp_path):
    """The same run logged every step and every third step: losses average over steps, token counts add up."""
    every, _ = run(tmp_path / "every", "dapo", logging_steps=1)
    third, _ = run(tmp_path / "third", "dapo")
    single, grouped = logs_of(every), logs_of(third)
    per_prompt = [
        sum(len(row.token_ids) + len(script(row.to_prompt(0), place)) for place in range(4)) for row in third.train_rows
    ]
    per_rollout = [sum(per_prompt[first : first + 2]) for first in (0, 2, 4)]
    sampled = [sum(per_rollout[: 1 + step // 2]) for step in range(STEPS)]
    assert [line["num_tokens"] for line in single] == sampled, "counted once, even if they are trained on twice"
    assert [line["num_tokens"] for line in grouped] == [sampled[2], sampled[5]]
    for index, line in enumerate(grouped):
        part = single[3 * index : 3 * index + 3]
        assert line["loss"] == pytest.approx(mean([one["loss"] for one in part]), abs=1e-7)
        assert line["effective_tokens"] == pytest.approx(mean([one["effective_tokens"] for one in part]))
        assert (
            line["grad_norm"] == pytest.approx(part[-1]["grad_norm"])
            and line["learning_rate"] == part[-1]["learning_rate"]
        )
        tokens = sum(per_rollout[step // 2] for step in range(3 * index, 3 * index + 3))
        assert line["tokens_per_second"] == pytest.approx(tokens / (3 * line["step_time"]))
        rollouts = 2 if index == 0 else 1
        inside = 3 * line["time/updating"] + rollouts * sum(
            line[f"time/{name}"] for name in ("generating", "rewarding", "logprobs")
        )
        assert 0.5 < inside / (3 * line["step_time"]) <= 1


@pytest.mark.parametrize("steps, logging_steps, wanted", [(5, 2, [2, 4, 5]), (3, 10, [3]), (2, 0.5, [1, 2])])
def test_the_last_steps_are_in_a_log_line_too(tmp_path, steps, logging_steps, wanted):
    every, _ = run(tmp_path / "every", "dapo", max_steps=steps, logging_steps=1)
    trainer, _ = run(tmp_path / "window", "dapo", max_steps=steps, logging_steps=logging_steps)
    assert [line["step"] for line in logs_of(trainer)] == wanted
    last = [line for line in logs_of(every) if line["step"] > ([0, *wanted])[-2]]
    assert logs_of(trainer)[-1]["loss"] == pytest.approx(mean([line["loss"] for line in last]), abs=1e-7)
    assert logs_of(trainer)[-1]["effective_tokens"] == pytest.approx(mean([line["effective_tokens"] for line in last]))


def test_no_log_line_with_logging_strategy_no(tmp_path):
    trainer, _ = run(tmp_path, "dapo", max_steps=3, logging_strategy="no")
    assert logs_of(trainer) == []


@pytest.mark.parametrize("packed, multiple", [(True, None), (True, 16), (False, None)])
def test_padding_and_computed_tokens_by_hand(tmp_path, monkeypatch, packed, multiple):
    batches = recorded_batches(monkeypatch)
    monkeypatch.setattr(LogprobModel, "_check_sharing", lambda *_: packed)
    monkeypatch.setattr(
        "grupo.trainer.components.longest_sequence", lambda *_: None
    )  # or more than 2 short rows would fit
    trainer, _ = run(tmp_path, "dapo", max_steps=2, logging_steps=2, pad_to_multiple_of=multiple)
    in_updates = [batch for batch in batches if batch.reference_logprobs is not None and batch.loss_mask.any()]
    assert sorted(len(batch.lengths) for batch in in_updates) == [1, 1, 2, 2, 2, 2, 2, 2], "one row abstained"
    tokens = 0
    for batch in in_updates:
        rows = fed_in(batch)
        once = {tuple(prompt) for prompt, _ in rows} if packed else [prompt for prompt, _ in rows]
        tokens += sum(map(len, once)) + sum(len(completion) for _, completion in rows)
    total = sum(batch.input_ids.numel() for batch in in_updates)
    (line,) = logs_of(trainer)
    assert (tokens < total) == (not packed or multiple is not None)
    assert line["padding_share"] == pytest.approx((total - tokens) / total)
    assert line["computed_tokens"] == total / 2, "a mean over two steps"


def test_the_policy_loss_is_the_loss_without_the_bonus(tmp_path):
    trainer, _ = run(tmp_path, "dapo", entropy_coef=0.3, logging_steps=1)
    for line in logs_of(trainer):
        assert line["loss"] == pytest.approx(line["policy_loss"] - 0.3 * line["entropy"], abs=1e-5)
        assert line["entropy_coef"] == 0.3


def test_means_of_evaluation_are_over_all_its_completions(tmp_path):
    """Uneven: 3 prompts of 5 completions in batches of 4."""
    scores = [float(number % 4) if number % 7 else None for number in range(15)]
    trainer = make_trainer(
        tmp_path,
        lambda completions, **columns: scores,
        eval_rows=ROWS[:3],
        num_generations_eval=5,
        per_device_eval_batch_size=4,
        script=script,
    )
    metrics = trainer.evaluate()
    known = [score for score in scores if score is not None]
    assert metrics["eval_reward"] == pytest.approx(sum(known) / len(known))
    assert metrics["eval_reward_std"] == pytest.approx(float(torch.tensor(known, dtype=torch.float64).std()))
    assert metrics["eval_rewards/lambda/abstained_share"] == pytest.approx(3 / 15)
