"""The records that carry a dataset row to an optimizer step. Read this file first.

    row ──▶ Prompt ──engine──▶ Completion ──rewards──▶ Rollout ──advantages──▶ Group
        ──▶ TrainingSample ──▶ MicroBatch ──▶ loss

Everything before `MicroBatch` is a plain Python record; `MicroBatch` and everything after it are tensors.

Log-probs are named by who computed them:
    behavior_logprobs   engine: sampled tokens under the full softmax at the sampling temperature
    sampled_logprobs    engine: sampled tokens under the truncated distribution (top-k, top-p, min-p, repetition
                        penalty) that they were drawn from
    old_logprobs        trainer: policy at the start of the rollout window; the denominator of the ratio
    policy_logprobs     trainer: current policy, with gradient
    reference_logprobs  trainer: frozen reference policy, for the KL term
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def content_text(content: Any) -> str | None:
    """Text of a chat message's content: the string itself, the joined texts of a list of parts, or None."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else None


class FinishReason(str, Enum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token was sampled and is the last token of the completion."""
    LENGTH = "length"
    """The completion reached the maximum length without a stop token: it is truncated."""


class RewardStatus(str, Enum):
    """Outcome of one reward function for one completion."""

    SCORED = "scored"
    """The function returned a finite number."""
    ABSTAINED = "abstained"
    """The function returned None: it does not apply to this completion."""
    FAILED = "failed"
    """The function raised, timed out or returned a non-finite value. Never counted as 0: the completion is masked."""


@dataclass(frozen=True)
class Prompt:
    """One drawn prompt. Two draws of one dataset row are two prompts with different ids."""

    id: int
    """Number of this draw in the run; groups are keyed by it."""
    row: int
    """Index of the dataset row."""
    token_ids: tuple[int, ...]
    """Token ids that the engine continues and the trainer computes log-probs for: the same everywhere."""
    content: str | list[dict[str, Any]]
    """The prompt as it is in the dataset: text, or a list of messages."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Other columns of the dataset row, passed to reward functions by name."""

    @property
    def is_conversational(self) -> bool:
        return not isinstance(self.content, str)


@dataclass(frozen=True)
class Completion:
    """One sampled completion. A sampled stop token is the last of `token_ids`."""

    token_ids: tuple[int, ...]
    text: str
    """Decoded text without special tokens and without the stop token, which need not be a special token."""
    finish_reason: FinishReason
    behavior_logprobs: tuple[float, ...] | None = None
    """(T,) nats; None where the engine replays fixed tokens."""
    sampled_logprobs: tuple[float, ...] | None = None
    """(T,) nats; equal to `behavior_logprobs` where nothing was truncated."""
    entropies: tuple[float, ...] | None = None
    """(T,) nats, entropy of the full softmax at the sampling temperature, per token."""

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True)
class Rollout:
    """One completion with the scores of its reward functions."""

    prompt: Prompt
    completion: Completion
    scores: tuple[float | None, ...]
    """(K,) one per reward function; None where the function abstained or failed."""
    statuses: tuple[RewardStatus, ...]
    """(K,) one per reward function."""

    @property
    def is_scored(self) -> bool:
        """Whether the total reward is known: no reward function failed and at least one returned a number."""
        return RewardStatus.FAILED not in self.statuses and RewardStatus.SCORED in self.statuses


@dataclass(frozen=True)
class Group:
    """All completions of one prompt with their group-relative advantages."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: tuple[float | None, ...]
    """(G,) weighted total rewards; None where the total is unknown."""
    advantages: tuple[float, ...]
    """(G,) 0 where the total reward is unknown."""


@dataclass(frozen=True)
class TrainingSample:
    """One completion to train on: token ids and the numbers that the loss needs, nothing else."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    advantage: float
    has_loss: bool
    """False for masked truncations and for unknown rewards: no token of the completion is in the loss."""
    group_has_signal: bool
    """The group has a non-zero advantage (it is not a zero-variance group)."""
    behavior_logprobs: tuple[float, ...] | None
    entropies: tuple[float, ...] | None = None
    old_logprobs: tuple[float, ...] | None = None
    """(T,) set where the rollout window spans several optimizer steps; otherwise the ratio is 1 by definition."""
    reference_logprobs: tuple[float, ...] | None = None
    """(T,) set where the loss has a KL term."""


@dataclass(frozen=True)
class GroupSpan:
    """Part of a packed row: one prompt, followed by its completions one after another."""

    start: int
    """Position in the row of the first prompt token."""
    prompt_length: int
    completion_lengths: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.prompt_length + sum(self.completion_lengths)


@dataclass(frozen=True)
class PackedLayout:
    """Attention structure of a packed row: a completion attends to its prompt and itself, not to other completions."""

    groups: tuple[GroupSpan, ...]
    """Groups in row order, without gaps."""
    windows: set[int | None] = field(default_factory=set)
    """Sliding-window sizes that the model's layers request; filled in by the attention function."""


@dataclass(frozen=True)
class MicroBatch:
    """Completions that share one forward pass. B completions, T = longest completion, N completion tokens.

    Padded: R = B rows of prompt and completion without a gap, padded on the right, where a causal model does not see
    the padding. Packed: R = 1 row with a `layout`, in which the completions of a prompt share its tokens.
    """

    input_ids: torch.Tensor
    """(R, S) int64."""
    position_ids: torch.Tensor | None
    """(1, S) int64, packed rows only: the positions of a completion continue those of its prompt."""
    layout: PackedLayout | None
    logit_indices: torch.Tensor
    """(N,) int64: indices into the R * S tokens whose logits predict the completion tokens, in the row-major order of
    `completion_mask`."""
    lengths: torch.Tensor
    """(B,) int64, tokens of prompt and completion together."""
    prompt_lengths: torch.Tensor
    """(B,) int64."""
    num_tokens: int
    """Tokens in `input_ids` without padding."""
    completion_ids: torch.Tensor
    """(B, T) int64, padded on the right."""
    completion_mask: torch.Tensor
    """(B, T) bool, True on completion tokens, including the stop token."""
    loss_mask: torch.Tensor
    """(B, T) bool, `completion_mask` without the completions that have no loss."""
    advantages: torch.Tensor
    """(B,) float."""
    has_signal: torch.Tensor
    """(B,) bool, True where the group has a non-zero advantage."""
    behavior_logprobs: torch.Tensor | None
    """(B, T) float, 0 on padding."""
    old_logprobs: torch.Tensor | None
    """(B, T) float, 0 on padding; None: on-policy, so the ratio is 1 by definition."""
    reference_logprobs: torch.Tensor | None
    """(B, T) float, 0 on padding; None: no KL term."""


def group_by_prompt(rollouts: Sequence[Rollout]) -> dict[int, list[int]]:
    """Prompt id -> positions of its rollouts, in order of first appearance."""
    positions: dict[int, list[int]] = {}
    for position, rollout in enumerate(rollouts):
        positions.setdefault(rollout.prompt.id, []).append(position)
    return positions


def group_record(group: Group, reward_names: Sequence[str]) -> dict[str, Any]:
    """The group as a JSON-serialisable record, for completion logs."""
    return {
        "prompt_id": group.prompt.id,
        "row": group.prompt.row,
        "prompt": group.prompt.content,
        "completions": [
            {
                "text": rollout.completion.text,
                "tokens": len(rollout.completion.token_ids),
                "finish_reason": rollout.completion.finish_reason.value,
                "rewards": dict(zip(reward_names, rollout.scores, strict=True)),
                "statuses": {name: status.value for name, status in zip(reward_names, rollout.statuses, strict=True)},
                "reward": reward,
                "advantage": advantage,
            }
            for rollout, reward, advantage in zip(group.rollouts, group.rewards, group.advantages, strict=True)
        ],
    }
