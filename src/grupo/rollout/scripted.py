"""An engine that replays given token ids: for tests, and for training on completions from another source."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grupo.errors import DataError
from grupo.rollout.engine import GenerationRequest
from grupo.sampling import SamplingSpec
from grupo.types import Completion, FinishReason, Prompt
from grupo.utils.messages import pluralize

Script = Callable[[Prompt, int], Sequence[int]]


class ScriptedEngine:
    """Replays token ids instead of sampling.

    Args:
        script: token ids of each completion: either a function of the prompt and the completion's index within its
            group, or a list that is consumed in order, one entry per completion of this process, group after group.
            Tokens after the first stop token or after `max_new_tokens` are dropped, since sampling would not have
            produced them.
        decode: converts token ids to text without special tokens.
        stop_token_ids: all ids that end a completion.

    Raises:
        DataError: the script has no tokens for a completion.
    """

    def __init__(
        self,
        script: Script | Sequence[Sequence[int]],
        *,
        decode: Callable[[list[int]], str],
        stop_token_ids: Sequence[int],
    ) -> None:
        self.script = script if callable(script) else _in_order(script)
        self.decode = decode
        self.stop_token_ids = tuple(stop_token_ids)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingSpec) -> list[list[Completion]]:
        return [
            [
                self._replay(request.prompt, index, sampling)
                for index in request.group_indices or range(len(request.seeds))
            ]
            for request in requests
        ]

    def _replay(self, prompt: Prompt, group_index: int, sampling: SamplingSpec) -> Completion:
        token_ids = [int(token) for token in self.script(prompt, group_index)]
        stop_ids = {*self.stop_token_ids, *sampling.stop_token_ids}
        end = next((position + 1 for position, token in enumerate(token_ids) if token in stop_ids), None)
        stopped = end is not None and end <= sampling.max_new_tokens
        token_ids = token_ids[: end if stopped else sampling.max_new_tokens]
        if not token_ids:
            raise DataError(
                f"The script returned no tokens for completion {group_index} of prompt {prompt.id}. A completion needs "
                "at least one token; return the stop token for an empty answer."
            )
        return Completion(
            token_ids=tuple(token_ids),
            text=self.decode(token_ids[:-1] if stopped else token_ids),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
        )


def _in_order(completions: Sequence[Sequence[int]]) -> Script:
    remaining = iter(completions)

    def script(prompt: Prompt, group_index: int) -> Sequence[int]:
        try:
            return next(remaining)
        except StopIteration:
            raise DataError(
                f"The script has only {pluralize(len(completions), 'completion')}, and all are used. Give one for "
                "every completion of the run, including evaluations, or a function of the prompt and the completion's "
                "index within its group."
            ) from None

    return script
