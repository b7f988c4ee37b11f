"""The vocabulary of grupo: what flows from a dataset row to an optimizer step. Read this first.

    row ──▶ Prompt ──engine──▶ Completion ──rewards──▶ Rollout ──advantages──▶ Group ──▶ MicroBatch ──▶ loss

Left of `MicroBatch` everything is a plain Python record; `MicroBatch` and what follows are tensors.

Log-probs are named by who computed them:
    behavior_logprobs   by the engine, of each sampled token under the tempered full softmax
    sampled_logprobs    by the engine, of each sampled token under the truncated distribution (top-k, top-p, min-p,
                        repetition penalty) that it was really drawn from
    old_logprobs        by the trainer, the policy at the start of the rollout window: the ratio's denominator
    policy_logprobs     by the trainer, the policy now, with gradient
    reference_logprobs  by the trainer, the frozen reference, for the KL term
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def content_text(content: Any) -> str | None:
    """The text of a chat message's content: a string itself, the joined texts of a list of parts, else None."""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else None


class FinishReason(str, Enum):
    """Why a completion ended."""

    STOP = "stop"
    """A stop token was sampled; it is the last token of the completion."""
    LENGTH = "length"
    """The completion reached its cap without a stop token: it is truncated."""


class RewardStatus(str, Enum):
    """What became of one reward function on one completion."""

    SCORED = "scored"
    """A finite number came back."""
    ABSTAINED = "abstained"
    """The function returned None: not applicable to this completion."""
    FAILED = "failed"
    """An exception, a time-out or a value that is no finite number. Never a zero: the completion is masked."""


@dataclass(frozen=True)
class Prompt:
    """One drawn prompt. Two draws of the same dataset row are two prompts with two ids."""

    id: int
    """Number of this draw in the run; what groups are keyed by."""
    row: int
    """Index of the dataset row."""
    token_ids: tuple[int, ...]
    """What the engine continues and the trainer scores: the same ids everywhere."""
    content: str | list[dict[str, Any]]
    """The prompt as the dataset gave it: text, or a list of messages."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The other columns of the row, handed to reward functions by name."""

    @property
    def is_conversational(self) -> bool:
        return not isinstance(self.content, str)


@dataclass(frozen=True)
class Completion:
    """One sampled answer. The stop token, if one was sampled, is the last of `token_ids`."""

    token_ids: tuple[int, ...]
    text: str
    """Decoded without the stop token, which need not be a special one, and without special tokens."""
    finish_reason: FinishReason
    behavior_logprobs: tuple[float, ...] | None = None
    """(T,) nats; None where the engine replays given tokens."""
    sampled_logprobs: tuple[float, ...] | None = None
    """(T,) nats; equal to `behavior_logprobs` where nothing was truncated."""
    entropies: tuple[float, ...] | None = None
    """(T,) nats, of the tempered full softmax at each step."""

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True)
class Rollout:
    """One completion with what the reward functions said about it."""

    prompt: Prompt
    completion: Completion
    scores: tuple[float | None, ...]
    """(K,) one per reward function; None where it abstained or failed."""
    statuses: tuple[RewardStatus, ...]
    """(K,) beside `scores`."""

    @property
    def is_scored(self) -> bool:
        """No reward failed and at least one scored: the total reward is known."""
        return RewardStatus.FAILED not in self.statuses and RewardStatus.SCORED in self.statuses


@dataclass(frozen=True)
class Group:
    """All completions of one prompt, with the advantages that they got from each other."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    rewards: tuple[float | None, ...]
    """(G,) weighted totals; None where the total is unknown."""
    advantages: tuple[float, ...]
    """(G,) 0 where the total is unknown."""


@dataclass(frozen=True)
class Sample:
    """One completion on its way into a micro-batch: token ids and the numbers the loss needs, nothing else."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    advantage: float
    has_loss: bool
    """False for masked truncations and for failed or abstained rewards: no token of the row is in the loss."""
    group_is_live: bool
    behavior_logprobs: tuple[float, ...] | None
    entropies: tuple[float, ...] | None = None
    old_logprobs: tuple[float, ...] | None = None
    """(T,) set when the window outlives its first optimizer step; otherwise the ratio is 1 by definition."""
    reference_logprobs: tuple[float, ...] | None = None
    """(T,) set when the loss has a KL term."""


@dataclass(frozen=True)
class GroupSpan:
    """A prompt and all completions behind it, in a packed row: prompt, then completion after completion."""

    start: int
    """Position of the prompt's first token in the row."""
    prompt_length: int
    completion_lengths: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.prompt_length + sum(self.completion_lengths)


@dataclass(frozen=True)
class PackedLayout:
    """Which tokens of a packed row see which: a completion sees its prompt and itself, never another completion."""

    groups: tuple[GroupSpan, ...]
    """In order, without gaps."""
    windows: set[int | None] = field(default_factory=set)
    """Filled in by the attention function: the sliding windows that the model's layers ask for."""


@dataclass(frozen=True)
class MicroBatch:
    """Completions that share one forward pass. B completions, T = longest completion, N completion tokens.

    Padded: R = B rows of prompt and completion without a gap, padded on the right; a causal model cannot see the
    padding. Packed: R = 1 row, in which completions of one prompt share it; there is a `layout`.
    """

    input_ids: torch.Tensor
    """(R, S) int64."""
    position_ids: torch.Tensor | None
    """(1, S) int64 where the row is packed: positions of a completion go on from those of its prompt."""
    layout: PackedLayout | None
    predictors: torch.Tensor
    """(N,) int64: where in the R * S tokens stands the one before each completion token, row after row of
    `completion_mask`."""
    lengths: torch.Tensor
    """(B,) int64, tokens of prompt and completion."""
    prompt_lengths: torch.Tensor
    """(B,) int64."""
    num_tokens: int
    """Of `input_ids`, without padding."""
    completion_ids: torch.Tensor
    """(B, T) int64, padded on the right."""
    completion_mask: torch.Tensor
    """(B, T) bool, True on completion tokens, stop token included."""
    loss_mask: torch.Tensor
    """(B, T) bool, `completion_mask` without the rows that have no loss."""
    advantages: torch.Tensor
    """(B,) float."""
    live_groups: torch.Tensor
    """(B,) bool, True where the row's group carries a signal."""
    behavior_logprobs: torch.Tensor | None
    """(B, T) float, 0 on padding."""
    old_logprobs: torch.Tensor | None
    """(B, T) float, 0 on padding; None: on-policy, the ratio is 1 by definition."""
    reference_logprobs: torch.Tensor | None
    """(B, T) float, 0 on padding; None: no KL term."""


def group_by_prompt(rollouts: Sequence[Rollout]) -> dict[int, list[int]]:
    """Positions of the rollouts of each prompt id, in order of first appearance."""
    positions: dict[int, list[int]] = {}
    for position, rollout in enumerate(rollouts):
        positions.setdefault(rollout.prompt.id, []).append(position)
    return positions


def group_record(group: Group, reward_names: Sequence[str]) -> dict[str, Any]:
    """A group as people and other programs read it."""
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
