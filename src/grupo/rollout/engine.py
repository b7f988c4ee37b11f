"""The interface of an engine, which samples completions and reports their log-probs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from grupo.sampling import SamplingSpec
from grupo.types import Completion, Prompt


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt, and one seed for each completion to sample.

    A completion depends on its own seed and on nothing else, so batching requests or distributing them over ranks does
    not change the samples.
    """

    prompt: Prompt
    seeds: tuple[int, ...]
    group_indices: tuple[int, ...] | None = None
    """Index of each completion within its group, of which this request may be a part; None: 0, 1, 2 and so on."""


class Engine(Protocol):
    """Samples completions from the current policy."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> list[list[Completion]]:
        """Returns one list of completions per request, with one completion per seed, in order."""
        ...


def completion_seed(run_seed: int, seed_scope: str, prompt_id: int, group_index: int) -> int:
    """Seed of one completion: 63 bits that depend on the arguments only."""
    key = f"{run_seed}/{seed_scope}/{prompt_id}/{group_index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
