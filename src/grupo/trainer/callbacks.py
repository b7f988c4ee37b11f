"""Callbacks of every run."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback

from grupo.models.peft_io import parameter_checksums
from grupo.utils.messages import pluralize

logger = logging.getLogger("grupo")


class LogLastStep(TrainerCallback):
    """What came after the last multiple of `logging_steps` would be in no log."""

    priority = 1
    """See `RestoreAtTrainBegin`."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_training_stop and args.logging_strategy != "no":
            control.should_log = True


class WarnIfWeightsUnchanged(TrainerCallback):
    """Says so where training has left every weight as it was: the saved model would be the one that was loaded."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._start, self._first_step = parameter_checksums(model), state.global_step

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        steps = state.global_step - self._first_step
        if steps and parameter_checksums(model) == self._start:
            reason = (
                "learning_rate is 0" if not args.learning_rate else "no step had a gradient (see frac_reward_zero_std)"
            )
            logger.warning(
                "%s changed none of the %s: %s. The saved model is the one that training began with.",
                pluralize(steps, "optimizer step"),
                pluralize(len(self._start), "trainable parameter"),
                reason,
            )
