"""How often a model solves each prompt: a difficulty for data that come without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grupo.algo.advantages import AdvantageSettings
from grupo.data.curriculum import is_success
from grupo.data.prompts import plain_rows, row_numbers
from grupo.rollout.schedule import rank_slice

if TYPE_CHECKING:
    from grupo.trainer import GRPOTrainer


def measured_pass_rates(
    trainer: GRPOTrainer, dataset: Any, *, samples: int = 4, success_reward: float = 1.0
) -> list[float | None]:
    """The share of successes among `samples` answers of the trainer's model to every prompt of `dataset`.

    Answers are sampled as in training and scored with the trainer's rewards; nothing is trained or written. On several
    ranks each samples its share, and all get the same rates. As many answers as a rollout has are sampled together.

    Args:
        trainer: of the model to measure; it needs no `train_dataset`.
        dataset: rows with the columns that training would use.
        samples: answers per prompt; rates are multiples of 1 / samples.
        success_reward: total reward from which on an answer is a success, as `curriculum_success_reward`.

    Returns:
        One rate per row, in order; None where the prompt is too long to be used, or no answer has a known reward.

    Raises:
        DataError: `dataset` cannot be used.
        RewardError: a reward function broke the contract, or failed on more answers than `max_failed_reward_share`.
    """
    config, world_size = trainer.config, trainer.args.world_size
    dataset = plain_rows(dataset)
    prompts = [row.draw(row.row) for row in trainer.tokenized_rows(dataset, "measured")]
    result = trainer.collector.collect(
        prompts,
        rank_slice(len(prompts) * samples, world_size, trainer.args.process_index),
        group_size=samples,
        sampling=config.sampling_spec(),
        settings=AdvantageSettings(
            reward_weights=config.reward_weights,
            scale_rewards="none",
            max_failed_reward_share=config.max_failed_reward_share,
        ),
        seed_scope="pass rate",
        completions_at_once=trainer.plan.completions_per_rollout // world_size,
    )
    rates: list[float | None] = [None] * len(dataset)
    place = {number: place for place, number in enumerate(row_numbers(dataset))}
    for prompt, rewards in result.outcomes:
        known = [is_success(reward, success_reward) for reward in rewards if reward is not None]
        if known:
            rates[place[prompt.row]] = sum(known) / len(known)
    return rates
