"""What is watched while a run goes on, and stops it where going on would be worse."""

from __future__ import annotations

import logging

from torch import nn

from grupo.errors import TrainingError
from grupo.metrics import MetricAccumulator
from grupo.utils.messages import pluralize

logger = logging.getLogger("grupo")

ROLLOUTS_WITH_GAP = 3
"""So many rollouts running must be off before the run stops."""
ROLLOUTS_WITHOUT_SIGNAL = 5
"""So many rollouts running must teach nothing, or be cut off, before it is said."""
CUT_SHARE = 0.9
"""Of the completions of a rollout: above, the cap and not the model ends them."""


class GradientGuard:
    """Drops NaN and infinite gradients before the optimizer sees them, and stops after too many such steps in a row."""

    def __init__(self, *, max_steps: int, learning_rate: float) -> None:
        self.max_steps = max_steps
        self.learning_rate = learning_rate
        self.in_a_row = 0
        """Steps with non-finite gradients."""

    def check(self, model: nn.Module, step: int) -> bool:
        """Whether all gradients are finite; where not, they are removed.

        Raises:
            TrainingError: `max_steps` optimizer steps in a row had non-finite gradients, or nothing has a gradient.
        """
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if not gradients:
            # With checkpointing, backward runs even where no trainable parameter takes part.
            raise TrainingError(
                "None of the trainable parameters has a gradient: they take no part in the model's output, so training "
                "would change nothing. Set requires_grad on parameters that do, or pass a peft_config."
            )
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        self.in_a_row = 0 if finite else self.in_a_row + 1
        if finite:
            return True
        # Missing gradients, not zeros: the optimizer then leaves weights, momentum and decay as they are.
        model.zero_grad(set_to_none=True)
        logger.warning("Step %d has non-finite gradients; they are dropped.", step)
        if self.in_a_row >= self.max_steps:
            raise TrainingError(
                f"{pluralize(self.in_a_row, 'optimizer step')} in a row had NaN or infinite gradients "
                f"(max_nonfinite_steps={self.max_steps}); the weights are those before them. Lower learning_rate (now "
                f"{self.learning_rate}), keep scale_rewards='group', and check that the model computes finite logits "
                "in its dtype."
            )
        return False


class SamplerCheck:
    """The sampler must be the policy: warns, then stops, when its log-probs are not those of the trainer."""

    def __init__(self, *, warn_above: float, stop_above: float) -> None:
        self.warn_above = warn_above
        self.stop_above = stop_above
        self.in_a_row = 0
        """Rollouts with a gap above `stop_above`."""

    def check(self, metrics: MetricAccumulator) -> None:
        """Call once per rollout, with the metrics of its first optimizer step. The gap is in nats a token.

        Raises:
            TrainingError: the gap was above `stop_above` in three rollouts running.
        """
        gap = metrics.means().get("sampling/logprob_gap")
        if gap is None:
            return
        self.in_a_row = self.in_a_row + 1 if gap > self.stop_above else 0
        if self.in_a_row >= ROLLOUTS_WITH_GAP:
            raise TrainingError(
                f"In three rollouts running the engine's log-probs were off by {gap:.2f} nats a token on average, more "
                f"than logprob_gap_stop={self.stop_above}: the completions do not come from the policy that is "
                "trained. Usual causes: stale weights or a missing adapter in the engine, another temperature, or a "
                "lower precision there."
            )
        if gap > self.warn_above:
            logger.warning(
                "The engine's log-probs are off by %.3f nats a token on average (logprob_gap_warn=%s): rollouts and "
                "scoring differ in precision, dropout or weights.",
                gap,
                self.warn_above,
            )


class SignalCheck:
    """Says, once each, why a reward may stay where it is (TRL issues #5697, #3452): a run goes on either way."""

    def __init__(self, *, max_completion_length: int) -> None:
        self.max_completion_length = max_completion_length
        self.in_a_row = (0, 0)
        """Rollouts without a signal, and rollouts whose completions were cut off."""

    def check(self, metrics: MetricAccumulator) -> None:
        """Call once per rollout, with its metrics."""
        means = metrics.means()
        without_signal, cut_off = self.in_a_row
        without_signal = without_signal + 1 if means["frac_reward_zero_std"] == 1 else 0
        cut_off = cut_off + 1 if means["completions/clipped_ratio"] > CUT_SHARE else 0
        self.in_a_row = without_signal, cut_off
        if without_signal == ROLLOUTS_WITHOUT_SIGNAL:
            logger.warning(
                "In %d rollouts running the completions of each prompt all had the same reward, so nothing was learned "
                "from them: the prompts are too hard or too easy, or a reward function gives the same to everything. "
                "Read some in completions.jsonl, and call the functions on them.",
                ROLLOUTS_WITHOUT_SIGNAL,
            )
        if cut_off == ROLLOUTS_WITHOUT_SIGNAL:
            logger.warning(
                "In %d rollouts running more than %.0f%% of the completions were cut off at max_completion_length=%d "
                "before a stop token. Raise it, or see whether the model's stop token is the one that it was taught.",
                ROLLOUTS_WITHOUT_SIGNAL,
                100 * CUT_SHARE,
                self.max_completion_length,
            )
