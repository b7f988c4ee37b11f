"""Distribution of completions over optimizer steps and ranks."""

from __future__ import annotations

import math


def schedule_completions(
    *, window_size: int, rollout_size: int, passes: int, step_size: int, world_size: int, rank: int
) -> list[list[int]]:
    """Completion indices of `rank` in a rollout window, one list per optimizer step, all passes included.

    Completions are indexed group after group. Each step takes the next `step_size` of them, pass after pass; a step may
    contain the end of one pass and the start of the next, or several passes. Each rank gets a contiguous, equal share
    of every rollout, the same one in every pass, so that a group stays in one step, and on one rank, wherever sizes
    allow.
    """
    block_size = math.gcd(rollout_size, step_size)
    share = block_size // world_size
    starts = [block + rank * share for block in range(0, window_size, block_size)] * passes
    blocks_per_step = step_size // block_size
    return [
        [index for start in starts[first : first + blocks_per_step] for index in range(start, start + share)]
        for first in range(0, len(starts), blocks_per_step)
    ]


def rank_slice(count: int, world_size: int, rank: int) -> list[int]:
    """Contiguous share of range(count) for one rank; the shares of two ranks differ by at most one."""
    return list(range(count * rank // world_size, count * (rank + 1) // world_size))
