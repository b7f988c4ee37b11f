"""What is monitored during a run, and stops it where continuing would be worse."""

from __future__ import annotations

import logging
from typing import Any

from torch import nn

from grupo.errors import TrainingError
from grupo.metrics import MetricAccumulator
from grupo.utils.messages import pluralize

logger = logging.getLogger("grupo")

MAX_MISMATCHED_ROLLOUTS = 3
"""Consecutive rollouts with a log-prob mismatch after which the run stops."""
WARN_AFTER_ROLLOUTS = 5
"""Consecutive rollouts without a signal, or truncated, after which a warning is logged."""
TRUNCATED_SHARE = 0.9
"""Share of truncated completions above which a rollout counts as truncated: the cap ends them, and not the model."""


class NonFiniteGradientMonitor:
    """Drops NaN and infinite gradients before the optimizer sees them, and stops after too many consecutive ones."""

    def __init__(self, *, max_steps: int, learning_rate: float) -> None:
        self.max_steps = max_steps
        self.learning_rate = learning_rate
        self.consecutive = 0
        """Consecutive steps with non-finite gradients."""

    def check(self, model: nn.Module, step: int) -> bool:
        """Returns whether all gradients are finite; where they are not, removes them.

        Raises:
            TrainingError: `max_steps` consecutive optimizer steps had non-finite gradients, or nothing has a gradient.
        """
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if not gradients:
            # With checkpointing, backward runs even where no trainable parameter takes part.
            raise TrainingError(
                "None of the trainable parameters has a gradient: they take no part in the model's output, so training "
                "would change nothing. Set requires_grad on parameters that do, or pass a peft_config."
            )
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        self.consecutive = 0 if finite else self.consecutive + 1
        if finite:
            return True
        # Missing gradients, not zeros: the optimizer then leaves weights, momentum and decay as they are.
        model.zero_grad(set_to_none=True)
        logger.warning("Step %d has non-finite gradients; they are dropped.", step)
        if self.consecutive >= self.max_steps:
            raise TrainingError(
                f"{pluralize(self.consecutive, 'optimizer step')} in a row had NaN or infinite gradients "
                f"(max_nonfinite_steps={self.max_steps}); the weights are those before them. Lower learning_rate (now "
                f"{self.learning_rate}), keep scale_rewards='group', and check that the model computes finite logits "
                "in its dtype."
            )
        return False


class LogprobMismatchMonitor:
    """Warns, then stops, when the log-probs of the sampler are not those of the policy."""

    def __init__(self, *, warn_above: float, stop_above: float) -> None:
        self.warn_above = warn_above
        self.stop_above = stop_above
        self.consecutive = 0
        """Consecutive rollouts with a gap above `stop_above`."""

    def check(self, metrics: MetricAccumulator) -> None:
        """Call once per rollout, with the metrics of its first optimizer step. The gap is in nats per token.

        Raises:
            TrainingError: the gap was above `stop_above` in three consecutive rollouts.
        """
        gap = metrics.means().get("sampling/logprob_gap")
        if gap is None:
            return
        self.consecutive = self.consecutive + 1 if gap > self.stop_above else 0
        if self.consecutive >= MAX_MISMATCHED_ROLLOUTS:
            raise TrainingError(
                f"In three consecutive rollouts the engine's log-probs were off by {gap:.2f} nats per token on "
                f"average, more than logprob_gap_stop={self.stop_above}: the completions do not come from the policy "
                "that is trained. Usual causes: stale weights or a missing adapter in the engine, another temperature, "
                "or a lower precision there."
            )
        if gap > self.warn_above:
            logger.warning(
                "The engine's log-probs are off by %.3f nats per token on average (logprob_gap_warn=%s): sampling and "
                "training differ in precision, dropout or weights.",
                gap,
                self.warn_above,
            )


class NoSignalMonitor:
    """Warns, once each, of reasons why the reward may not move (TRL issues #5697, #3452); the run continues."""

    def __init__(self, *, max_completion_length: int) -> None:
        self.max_completion_length = max_completion_length
        self.consecutive = (0, 0)
        """Consecutive rollouts without a signal, and with mostly truncated completions."""

    def check(self, metrics: MetricAccumulator) -> None:
        """Call once per rollout, with its metrics."""
        means = metrics.means()
        no_signal, truncated = self.consecutive
        no_signal = no_signal + 1 if means["frac_reward_zero_std"] == 1 else 0
        truncated = truncated + 1 if means["completions/clipped_ratio"] > TRUNCATED_SHARE else 0
        self.consecutive = no_signal, truncated
        if no_signal == WARN_AFTER_ROLLOUTS:
            logger.warning(
                "In %d consecutive rollouts the completions of each prompt all had the same reward, so nothing was "
                "learned from them: the prompts are too hard or too easy, or a reward function returns the same value "
                "for everything. Read some in completions.jsonl, and call the functions on them.",
                WARN_AFTER_ROLLOUTS,
            )
        if truncated == WARN_AFTER_ROLLOUTS:
            logger.warning(
                "In %d consecutive rollouts more than %.0f%% of the completions were truncated at "
                "max_completion_length=%d, before a stop token. Raise it, or check whether the model's stop token is "
                "the one that it was taught.",
                WARN_AFTER_ROLLOUTS,
                100 * TRUNCATED_SHARE,
                self.max_completion_length,
            )


class HealthMonitors:
    """The monitors of one call of `train`."""

    def __init__(self, config: Any) -> None:
        self.gradients = NonFiniteGradientMonitor(
            max_steps=config.max_nonfinite_steps, learning_rate=config.learning_rate
        )
        self.mismatch = LogprobMismatchMonitor(warn_above=config.logprob_gap_warn, stop_above=config.logprob_gap_stop)
        self.signal = NoSignalMonitor(max_completion_length=config.sampling_spec().max_new_tokens)

    def state_dict(self) -> list[Any]:
        return [self.gradients.consecutive, self.mismatch.consecutive, self.signal.consecutive]

    def load_state_dict(self, state: list[Any]) -> None:
        self.gradients.consecutive, self.mismatch.consecutive, self.signal.consecutive = state
