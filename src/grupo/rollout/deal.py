"""Which completions of a rollout window belong to which optimizer step and rank."""

from __future__ import annotations


def deal(*, window_size: int, step_size: int, world_size: int, rank: int) -> list[list[int]]:
    """Completion numbers of `rank`, one list per optimizer step.

    Completions are numbered group after group. A step takes the next `step_size` of them and deals contiguous, equal
    shares to the ranks, so that groups stay together in a step, and on a rank, wherever sizes allow.
    """
    share = step_size // world_size
    starts = [first + rank * share for first in range(0, window_size, step_size)]
    return [list(range(start, start + share)) for start in starts]
