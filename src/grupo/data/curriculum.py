"""A curriculum: the easy prompts first, harder levels once the current ones are solved often enough."""

from __future__ import annotations

import logging
import math
import numbers
from collections import Counter
from collections.abc import Sequence

from grupo.data.prompts import PromptOutcome, Rows, TokenizedRow, column_names
from grupo.errors import ConfigError, DataError
from grupo.utils.messages import did_you_mean, pluralize

logger = logging.getLogger("grupo")


def is_success(reward: float, success_reward: float) -> bool:
    """Whether a total reward counts as a success, up to rounding: 0.1 + 0.2 + 0.7 is not 1 in every order."""
    return reward >= success_reward - 1e-6


class Curriculum:
    """Levels of difficulty from the lowest value up; success on the newest level unlocks the next one.

    Args:
        rows: training prompts; `column` has the level of each.
        threshold: success rate of the newest level that unlocks the next one.
        window: last prompts of the newest level over which the rate is measured; all prompts of a smaller level.
        success_reward: lowest total reward of a successful completion.
        prompts_per_window: prompts of a rollout window, which the first level must fill.

    Raises:
        DataError: a level is not a number, there is only one level, or the first level has too few prompts.
    """

    def __init__(
        self,
        rows: Sequence[TokenizedRow],
        *,
        column: str,
        threshold: float,
        window: int,
        success_reward: float,
        prompts_per_window: int,
    ) -> None:
        self.column = column
        self.threshold = threshold
        self.window = window
        self.success_reward = success_reward
        self.level_of_row = [_level(row, column) for row in rows]
        self.sizes = sorted(Counter(self.level_of_row).items())
        """(level, number of its prompts), the easiest first."""
        self._check_levels(prompts_per_window)
        self.unlocked = 1
        """Number of unlocked levels."""
        self.recent: list[float] = []
        """Success rates of the last prompts of the newest level, each a share of its completions."""

    def eligible_rows(self) -> list[int]:
        """Positions of the rows of all unlocked levels."""
        newest, _ = self.sizes[self.unlocked - 1]
        return [position for position, level in enumerate(self.level_of_row) if level <= newest]

    def update(self, outcomes: Sequence[PromptOutcome]) -> dict[str, float]:
        """Measures the newest level, unlocks the next one if it is time, and returns metrics."""
        newest, size = self.sizes[self.unlocked - 1]
        for outcome in outcomes:
            known = [reward for reward in outcome.rewards if reward is not None]
            if known and outcome.prompt.columns[self.column] == newest:
                self.recent.append(sum(is_success(reward, self.success_reward) for reward in known) / len(known))
        needed = min(self.window, size)
        del self.recent[:-needed]
        metrics = {"curriculum/level": float(self.unlocked)}
        if self.recent:
            rate = sum(self.recent) / len(self.recent)
            metrics["curriculum/success_rate"] = rate
            if len(self.recent) == needed and rate >= self.threshold and self.unlocked < len(self.sizes):
                self._unlock(rate)
        return metrics

    def _unlock(self, rate: float) -> None:
        self.unlocked += 1
        self.recent = []
        logger.info(
            "Curriculum: level %d of %d (%s=%g) is unlocked at a success rate of %.2f; %d of %d prompts are now used.",
            self.unlocked, len(self.sizes), self.column, self.sizes[self.unlocked - 1][0], rate,
            len(self.eligible_rows()), len(self.level_of_row),
        )  # fmt: skip

    def _check_levels(self, prompts_per_window: int) -> None:
        (first, size), *others = self.sizes
        if not others:
            raise DataError(
                f"curriculum_column='{self.column}' is {first:g} in all {size} training prompts: there is no "
                "level to unlock. Choose a column with several values, or leave curriculum_column unset."
            )
        if size >= prompts_per_window:
            return
        together, last = size, first
        for level, count in others:
            together, last = together + count, level
            if together >= prompts_per_window:
                break
        raise DataError(
            f"The first level of the curriculum ({self.column}={first:g}) has {pluralize(size, 'prompt')}, and a "
            f"rollout window needs {prompts_per_window}. The levels up to {self.column}={last:g} have {together} "
            "together: give them one value, for example by rounding the column, or use a smaller rollout."
        )


def check_curriculum_column(column: str | None, dataset: Rows | None) -> None:
    """
    Raises:
        ConfigError: the training data have no such column.
    """
    if column is None or dataset is None:
        return
    known = column_names(dataset)
    if column not in known:
        raise ConfigError(
            f"curriculum_column='{column}' is not a column of the training data, which have {sorted(known)} besides "
            f"the prompt.{did_you_mean(column, known)} If difficulties are unknown, estimate_pass_rates of "
            "grupo.evals.pass_rates measures them."
        )


def _level(row: TokenizedRow, column: str) -> float:
    value = row.columns[column]
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise DataError(
            f"curriculum_column='{column}' is {value!r} in row {row.row}; a level must be a finite number: text would "
            "sort 'hard' before 'medium' and 'level 10' before 'level 2'. Map it, for example with "
            f"dataset.map(lambda row: {{'{column}': ['easy', 'medium', 'hard'].index(row['{column}'])}})."
        )
    return float(value)
