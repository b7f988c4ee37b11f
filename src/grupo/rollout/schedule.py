"""Which completions of a rollout window, or prompts of an evaluation, belong to which optimizer step and rank."""

from __future__ import annotations

import math


def schedule_completions(
    *, window_size: int, rollout_size: int, passes: int, step_size: int, world_size: int, rank: int
) -> list[list[int]]:
    """Completion numbers of `rank`, one list per optimizer step of the window, all passes included.

    Completions are numbered group after group, and steps take the next `step_size` of them, pass after pass; a step may
    hold the end of one pass and the start of the next, or several passes. Ranks get contiguous, equal shares of every
    rollout, the same in every pass, so that groups stay together in a step, and on a rank, wherever sizes allow.
    """
    block_size = math.gcd(rollout_size, step_size)
    share = block_size // world_size
    starts = [first + rank * share for first in range(0, window_size, block_size)] * passes
    blocks_per_step = step_size // block_size
    return [
        [number for start in starts[first : first + blocks_per_step] for number in range(start, start + share)]
        for first in range(0, len(starts), blocks_per_step)
    ]


def rank_slice(count: int, world_size: int, rank: int) -> list[int]:
    """The contiguous share of range(count) of one rank; shares differ by one at most."""
    return list(range(count * rank // world_size, count * (rank + 1) // world_size))
