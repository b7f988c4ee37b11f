"""The prompt stream with a curriculum: order, ids, and its state."""

from __future__ import annotations

import json
from typing import Any

from grupo.data.curriculum import Curriculum
from grupo.data.prompt_stream import StatefulPromptStream
from grupo.data.prompts import PromptOutcome, TokenizedRow


def tokenized(*levels: int) -> list[TokenizedRow]:
    return [TokenizedRow(10 + i, (1,), "x", {"level": level}) for i, level in enumerate(levels)]


def curriculum(rows: list[TokenizedRow]) -> Curriculum:
    return Curriculum(rows, column="level", threshold=0.5, window=2, success_reward=1.0, prompts_per_window=2)


def test_the_stream_draws_unlocked_prompts_and_never_repeats_an_id() -> None:
    rows = tokenized(1, 2, 1, 2, 1, 1)
    stream = StatefulPromptStream(rows, prompts_per_window=2, seed=0, curriculum=curriculum(rows))
    drawn = [*stream.window(0), *stream.window(1)]
    assert sorted(prompt.row for prompt in drawn) == [10, 12, 14, 15]
    refilled = stream.draw(3)
    assert {prompt.row for prompt in refilled} < {10, 12, 14, 15}
    stream.update([PromptOutcome(prompt, (1.0,)) for prompt in drawn])
    everything = [prompt for index in range(3) for prompt in stream.window(index)]
    assert sorted(prompt.row for prompt in everything) == [10, 11, 12, 13, 14, 15], "an epoch over both levels"
    assert [prompt.id for prompt in (*drawn, *refilled, *everything)] == list(range(13))


def test_a_saved_stream_continues() -> None:
    def stream() -> StatefulPromptStream:
        rows = tokenized(1, 2, 1, 2, 1, 1, 3)
        return StatefulPromptStream(rows, prompts_per_window=2, seed=0, curriculum=curriculum(rows))

    def use(one: StatefulPromptStream, windows: range, passes: bool = True) -> list[Any]:
        drawn: list[Any] = []
        for index in windows:
            prompts = [*one.window(index), *one.draw(index % 2)]
            outcomes = [PromptOutcome(prompt, (float(passes and prompt.id % 3 > 0),)) for prompt in prompts]
            drawn += [*prompts, one.update(outcomes)]
        return drawn

    whole = use(stream(), range(12))
    assert whole[-1]["curriculum/level"] == 3
    for saved_at in range(1, 12):
        first, second = stream(), stream()
        part = use(first, range(saved_at))
        # The second stream has another history: the same number of windows, without a success.
        use(second, range(saved_at), passes=False)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert second.state_dict() == first.state_dict()
        assert part + use(second, range(saved_at, 12)) == whole
