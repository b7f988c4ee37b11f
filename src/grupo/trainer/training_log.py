"""What training has measured since the last log line, and the seconds of each phase."""

from __future__ import annotations

import dataclasses
from typing import Any

from grupo.metrics import MetricAccumulator

PHASES = ("generating", "rewarding", "logprobs", "updating")


class TrainingLog:
    """Metrics until the next log line, and seconds of the whole run, on this process."""

    def __init__(self) -> None:
        self.metrics = MetricAccumulator()
        self.seconds = dict.fromkeys(PHASES, 0.0)
        """Seconds of training by phase."""

    def add_time(self, phase: str, seconds: float) -> None:
        """Counts the seconds of a phase, for the next log line and for the whole run."""
        self.metrics.add(f"time/{phase}", seconds)
        self.seconds[phase] += seconds

    def take(self) -> dict[str, float]:
        """The means since the last call."""
        means = self.metrics.means()
        self.metrics.clear()
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"metrics": dataclasses.asdict(self.metrics), "seconds": dict(self.seconds)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.metrics = MetricAccumulator(**state["metrics"])
        self.seconds = dict(state["seconds"])
