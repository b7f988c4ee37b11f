"""A prompt stream that depends on what came of earlier prompts: replacements out of turn, and levels of difficulty.

Its state is a few numbers, which belong to the checkpoint; the order itself stays a function of the seed.
"""

from __future__ import annotations

import logging
import math
import numbers
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from grupo.data.prompts import Outcome, PromptStream, Rows, TokenizedRow, column_names
from grupo.errors import ConfigError, DataError
from grupo.types import Prompt
from grupo.utils.messages import did_you_mean, pluralize

logger = logging.getLogger("grupo")


def is_success(reward: float, success_reward: float) -> bool:
    """Whether a total reward reaches that of a success, up to rounding: 0.1 + 0.2 + 0.7 is not 1 in every order."""
    return reward >= success_reward - 1e-6


class Curriculum:
    """Levels of difficulty, the lowest value first; the next one is unlocked when the newest is answered well enough.

    Args:
        rows: the training prompts; `column` has the level of each.
        threshold: success rate of the newest level that unlocks the next one.
        window: prompts of the newest level over which the rate is measured; of a smaller level, all its prompts.
        success_reward: total reward from which on a completion is a success.
        prompts_per_window: the first level must fill a rollout window.

    Raises:
        DataError: a level is no number, there is one level only, or the first one has too few prompts.
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
        """(level, number of its prompts), easy first."""
        self._check_levels(prompts_per_window)
        self.unlocked = 1
        """Number of levels that prompts are drawn from."""
        self.recent: list[float] = []
        """Success rates of the last prompts of the newest level."""

    def drawn_from(self) -> list[int]:
        """Positions of the rows of all unlocked levels."""
        newest, _ = self.sizes[self.unlocked - 1]
        return [position for position, level in enumerate(self.level_of_row) if level <= newest]

    def report(self, outcomes: Sequence[Outcome]) -> dict[str, float]:
        """Measures the newest level, and unlocks the next one where it is time; returns metrics."""
        newest, size = self.sizes[self.unlocked - 1]
        for prompt, rewards in outcomes:
            known = [reward for reward in rewards if reward is not None]
            if known and prompt.columns[self.column] == newest:
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
            "Curriculum: level %d of %d (%s=%g) is unlocked at a success rate of %.2f; %d of %d prompts are now drawn.",
            self.unlocked, len(self.sizes), self.column, self.sizes[self.unlocked - 1][0], rate,
            len(self.drawn_from()), len(self.level_of_row),
        )  # fmt: skip

    def _check_levels(self, prompts_per_window: int) -> None:
        (first, size), *others = self.sizes
        if not others:
            raise DataError(
                f"curriculum_column='{self.column}' is {first:g} in all {size} training prompts: there is nothing to "
                "unlock. Choose a column that differs, or leave curriculum_column unset."
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
            "together: give them one value, for example by rounding the column, or make the rollout smaller."
        )


class AdaptiveStream(PromptStream):
    """Draws prompts one after the other: for windows, and out of turn for groups that are sampled again.

    As long as nothing is drawn out of turn and there is no curriculum, the windows are those of `PromptStream`. What
    an epoch has left over when it does not fill a window is left out; replacements take it to its last prompt. A level
    that is unlocked starts a new epoch over all levels that are.
    """

    def __init__(
        self,
        rows: Sequence[TokenizedRow],
        *,
        prompts_per_window: int,
        seed: int,
        shuffle: bool = True,
        curriculum: Curriculum | None = None,
    ) -> None:
        super().__init__(rows, prompts_per_window=prompts_per_window, seed=seed, shuffle=shuffle)
        self.curriculum = curriculum
        self._epoch = 0
        self._position = 0
        """In the order of the epoch."""
        self._draws = 0
        """Of the run so far: the id of the next prompt."""

    def window(self, index: int) -> list[Prompt]:
        """The prompts of the next rollout window; `index` is not needed."""
        if self._position + self.prompts_per_window > len(self._order(self._epoch)):
            self._start_epoch()
        return self.draw(self.prompts_per_window)

    def draw(self, count: int) -> list[Prompt]:
        """The next prompts, from the next epoch where this one is used up."""
        prompts = []
        for _ in range(count):
            if self._position == len(self._order(self._epoch)):
                self._start_epoch()
            row = self._order(self._epoch)[self._position]
            prompts.append(self.rows[row].draw(self._draws))
            self._position += 1
            self._draws += 1
        return prompts

    def report(self, outcomes: Sequence[Outcome]) -> dict[str, float]:
        if self.curriculum is None:
            return {}
        before = self.curriculum.unlocked
        metrics = self.curriculum.report(outcomes)
        if self.curriculum.unlocked != before:
            self._start_epoch()
        return metrics

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self._epoch, "position": self._position, "draws": self._draws}
        if self.curriculum is not None:
            state |= {"unlocked": self.curriculum.unlocked, "recent": list(self.curriculum.recent)}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._position, self._draws = state["epoch"], state["position"], state["draws"]
        if self.curriculum is not None:
            self.curriculum.unlocked, self.curriculum.recent = state["unlocked"], list(state["recent"])
        self._order_of = (-1, [])

    def _start_epoch(self) -> None:
        self._epoch += 1
        self._position = 0

    def _drawn_from(self) -> list[int]:
        return super()._drawn_from() if self.curriculum is None else self.curriculum.drawn_from()


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
            f"curriculum_column='{column}' is no column of the training data, which have {sorted(known)} beside the "
            f"prompt.{did_you_mean(column, known)} For prompts of unknown difficulty, grupo.evals.pass_rates measures "
            "it."
        )


def _level(row: TokenizedRow, column: str) -> float:
    value = row.columns[column]
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise DataError(
            f"curriculum_column='{column}' is {value!r} in row {row.row}; a level must be a finite number, as text "
            "would put 'hard' before 'medium' and 'level 10' before 'level 2'. Map it, for example with "
            f"dataset.map(lambda row: {{'{column}': ['easy', 'medium', 'hard'].index(row['{column}'])}})."
        )
    return float(value)
