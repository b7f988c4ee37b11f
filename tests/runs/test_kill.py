"""SIGKILL at random moments of a run: it goes on, and ends with the weights and the records of the run left alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 10
TIMEOUT = 400
"""Seconds; about 30 when nothing else runs."""


@pytest.mark.slow
def test_a_killed_run_ends_with_the_hash_of_the_run_that_was_left_alone(tmp_path: Path) -> None:
    worker = Path(__file__).parents[1] / "support" / "kill_worker.py"
    paths = os.pathsep.join([str(worker.parent), *(path for path in sys.path if path)])
    result = subprocess.run(
        [sys.executable, str(worker), str(tmp_path), str(KILLS)], capture_output=True, text=True, timeout=TIMEOUT,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-4000:]
    report = json.loads((tmp_path / "outcomes.json").read_text())
    assert len(report["outcomes"]) == KILLS
    for outcome in report["outcomes"]:
        assert outcome["killed"] and outcome["exit_code"] == 0, outcome
        assert outcome["hash"] == report["hash"], outcome
    # In the middle of each of them, or the test would prove little.
    assert {outcome["died_in"] for outcome in report["outcomes"]} >= {"rollout", "backward", "checkpoint"}
