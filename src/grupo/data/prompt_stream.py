"""The order in which prompts are drawn: for rollout windows, and for groups that are sampled again."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from grupo.data.curriculum import Curriculum
from grupo.data.prompts import PromptOutcome, TokenizedRow
from grupo.types import Prompt


class PromptStream:
    """An order of prompts that is a pure function of the seed and the index of the rollout window.

    Each epoch has its own permutation. Prompts at its end that do not fill a window are left out, which `StepPlan`
    reports. The stream has no state, so a checkpoint holds none.
    """

    def __init__(
        self, rows: Sequence[TokenizedRow], *, prompts_per_window: int, seed: int, shuffle: bool = True
    ) -> None:
        self.rows = rows
        self.prompts_per_window = prompts_per_window
        self.seed = seed
        self.shuffle = shuffle
        self._order_of: tuple[int, list[int]] = (-1, [])
        """The last used epoch and its order, which is the same for all of its windows."""

    def window(self, index: int) -> list[Prompt]:
        """The prompts of rollout window `index`, from 0 over all epochs."""
        epoch, position = divmod(index, len(self.rows) // self.prompts_per_window)
        start = position * self.prompts_per_window
        first_draw = index * self.prompts_per_window
        return [
            self.rows[row].to_prompt(first_draw + offset)
            for offset, row in enumerate(self._order(epoch)[start : start + self.prompts_per_window])
        ]

    def update(self, outcomes: Sequence[PromptOutcome]) -> dict[str, float]:
        """Adapts the stream to the outcomes of a rollout and returns metrics; this one does not adapt."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the state of `state_dict`."""

    def _order(self, epoch: int) -> list[int]:
        if self._order_of[0] != epoch:
            order = self._eligible_rows()
            if self.shuffle:
                random.Random(f"prompt order, seed {self.seed}, epoch {epoch}").shuffle(order)
            self._order_of = (epoch, order)
        return self._order_of[1]

    def _eligible_rows(self) -> list[int]:
        """Positions of the rows of an epoch."""
        return list(range(len(self.rows)))


class StatefulPromptStream(PromptStream):
    """Draws prompts one after the other: for windows, and in between for groups that are sampled again.

    Unless such groups are drawn or there is a curriculum, the windows are those of `PromptStream`. An epoch whose rest
    does not fill a window ends there; replacements use that rest up. A level that is unlocked starts a new epoch over
    all unlocked levels. The state is a few numbers, which belong to the checkpoint.
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
        """Position of the next prompt in the order of the epoch."""
        self._draws = 0
        """Prompts drawn in the run so far, and so the id of the next one."""

    def window(self, index: int) -> list[Prompt]:
        """The prompts of the next rollout window; `index` is not needed."""
        if self._position + self.prompts_per_window > len(self._order(self._epoch)):
            self._start_epoch()
        return self.draw(self.prompts_per_window)

    def draw(self, count: int) -> list[Prompt]:
        """The next prompts, from the next epoch once this one is used up."""
        prompts = []
        for _ in range(count):
            if self._position == len(self._order(self._epoch)):
                self._start_epoch()
            row = self._order(self._epoch)[self._position]
            prompts.append(self.rows[row].to_prompt(self._draws))
            self._position += 1
            self._draws += 1
        return prompts

    def update(self, outcomes: Sequence[PromptOutcome]) -> dict[str, float]:
        """Updates the curriculum, and returns its metrics."""
        if self.curriculum is None:
            return {}
        before = self.curriculum.unlocked
        metrics = self.curriculum.update(outcomes)
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

    def _eligible_rows(self) -> list[int]:
        return super()._eligible_rows() if self.curriculum is None else self.curriculum.eligible_rows()
