"""The share of answers that solve each prompt: a difficulty for data without one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from grupo.algo.advantages import AdvantageSettings
from grupo.data.curriculum import is_success
from grupo.data.prompts import as_row_dataset, original_indices
from grupo.rollout.schedule import rank_slice

if TYPE_CHECKING:
    from grupo.trainer import GRPOTrainer

logger = logging.getLogger("grupo")


def estimate_pass_rates(
    trainer: GRPOTrainer, dataset: Any, *, samples: int = 4, success_reward: float = 1.0
) -> list[float | None]:
    """The share of successes among `samples` answers of the trainer's model to every prompt of `dataset`.

    Answers are sampled as in training and scored with the trainer's rewards; nothing is trained or written. Each rank
    samples its share, and all ranks get the same rates. As many answers are sampled together as a rollout has.

    Args:
        trainer: the trainer of the model; it needs no `train_dataset`.
        dataset: rows with the columns that training would use.
        samples: answers per prompt; rates are multiples of 1 / samples.
        success_reward: lowest total reward of a success, as `curriculum_success_reward`.

    Returns:
        One rate per row, in order; None for a prompt that is too long, or without an answer of known reward.

    Raises:
        DataError: `dataset` cannot be used.
        RewardError: a reward function broke the contract, or failed on more answers than `max_failed_reward_share`.
    """
    config, world_size = trainer.config, trainer.args.world_size
    dataset = as_row_dataset(dataset)
    prompts = [row.to_prompt(row.row) for row in trainer.tokenized_rows(dataset, "measured")]
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
    positions = {index: position for position, index in enumerate(original_indices(dataset))}
    for outcome in result.outcomes:
        known = [is_success(reward, success_reward) for reward in outcome.rewards if reward is not None]
        if known:
            rates[positions[outcome.prompt.row]] = sum(known) / len(known)
    return rates


def measured_pass_rates(*args: Any, **kwargs: Any) -> list[float | None]:
    """The earlier name of `estimate_pass_rates`."""
    logger.warning("measured_pass_rates is now called estimate_pass_rates.")
    return estimate_pass_rates(*args, **kwargs)
