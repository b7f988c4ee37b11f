"""The losses: which per-token term each one sums, how it averages, and which settings it reads. Imports no torch.

A new loss is one function in terms.py and one entry here. The choices of `loss_type`, the errors for settings that a
loss does not read, and the table in docs/config.md all come from `LOSSES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LossSpec:
    """One value of `loss_type`."""

    term: str
    """Name of the per-token term, a function in terms.py."""
    aggregation: str
    """Name of the aggregation over tokens and completions, in `AGGREGATIONS` of losses.py."""
    reads: frozenset[str] = frozenset()
    """Settings that this loss reads and others do not; fields of `LossSettings`. Where nothing reads a setting, it is
    refused."""
    level: str | None = None
    """The only `importance_sampling_level` that the loss has, and accepts; None: it has both."""
    note: str = ""
    """Description for docs/config.md."""
    cautions: Mapping[str, str] = field(default_factory=dict)
    """`importance_sampling_level` -> why it is unusual with this loss; logged as a warning."""


_CLIP = frozenset({"epsilon", "epsilon_high", "delta"})
_LEVEL = frozenset({"importance_sampling_level"})
_VESPO = frozenset({"vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"})
_LENGTH_WEIGHTED = {
    "sequence": "each completion is weighted by its length; loss_type='gspo' weights all completions equally (arXiv "
    "2507.18071)"
}

LOSSES: dict[str, LossSpec] = {
    "grpo": LossSpec("clipped_surrogate", "sequence_mean", _CLIP | _LEVEL, note="GRPO, arXiv 2402.03300"),
    "bnpo": LossSpec(
        "clipped_surrogate",
        "token_mean",
        _CLIP | _LEVEL,
        note="the same as dapo here; in TRL the mean over a micro-batch",
        cautions=_LENGTH_WEIGHTED,
    ),
    "dr_grpo": LossSpec(
        "clipped_surrogate",
        "fixed_length",
        _CLIP | _LEVEL,
        note="Dr. GRPO, arXiv 2503.20783",
        cautions=_LENGTH_WEIGHTED,
    ),
    "dapo": LossSpec(
        "clipped_surrogate", "token_mean", _CLIP | _LEVEL, note="DAPO, arXiv 2503.14476", cautions=_LENGTH_WEIGHTED
    ),
    "cispo": LossSpec(
        "cispo",
        "token_mean",
        frozenset({"epsilon_high"}) | _LEVEL,
        note="CISPO of MiniMax-M1, arXiv 2506.13585",
        cautions=_LENGTH_WEIGHTED,
    ),
    "sapo": LossSpec(
        "sapo",
        "sequence_mean",
        frozenset({"sapo_temperature_neg", "sapo_temperature_pos"}) | _LEVEL,
        note="SAPO, arXiv 2511.20347",
    ),
    "luspo": LossSpec(
        "clipped_surrogate",
        "sequence_sum",
        _CLIP | _LEVEL,
        note="LUSPO, arXiv 2602.05261",
        cautions={"token": "LUSPO is defined with the sequence-level ratio (arXiv 2602.05261)"},
    ),
    "vespo": LossSpec(
        "vespo", "token_mean", _VESPO, note="VESPO, arXiv 2602.10693; always weights by its own sequence ratio"
    ),
    "gspo": LossSpec(
        "clipped_surrogate",
        "sequence_mean",
        _CLIP | _LEVEL,
        level="sequence",
        note="grpo with the sequence-level ratio, arXiv 2507.18071",
    ),
}


def losses_reading(setting: str) -> list[str]:
    """Names of the losses that read `setting`."""
    return [name for name, spec in LOSSES.items() if setting in spec.reads]
