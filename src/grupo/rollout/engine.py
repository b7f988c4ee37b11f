"""What an engine is: something that continues prompts and says with which probability."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from grupo.sampling import SamplingSpec
from grupo.types import Completion, Prompt


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and the seeds of the completions wanted for it, one seed each.

    A completion depends on its own seed and on nothing else, so how requests are cut into batches or dealt to ranks
    does not change what is sampled.
    """

    prompt: Prompt
    seeds: tuple[int, ...]
    group_indices: tuple[int, ...] | None = None
    """Place of each completion in its group, of which this request may be a part; None: 0, 1, 2 and so on."""


class Engine(Protocol):
    """Continues prompts under the current policy."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> list[list[Completion]]:
        """One list of completions per request, one completion per seed, in order."""
        ...


def completion_seed(run_seed: int, seed_scope: str, prompt_id: int, completion_index: int) -> int:
    """Seed of one completion: 63 bits that depend on the run's seed, the draw and the place in the group only."""
    key = f"{run_seed}/{seed_scope}/{prompt_id}/{completion_index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
