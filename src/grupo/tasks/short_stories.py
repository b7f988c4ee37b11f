"""Open questions for rewards on the length of the answer; the task of the recipe `length`."""

from __future__ import annotations

import random

from grupo.tasks import Task, user_prompt

SUBJECTS = (
    "a lighthouse", "the sea", "a lost key", "an old bicycle", "the first snow", "a night train", "a paper boat",
    "a garden", "a clock", "the moon", "a market", "a storm", "a letter", "a bridge", "a violin", "a fox",
    "a map", "a river", "a kite", "an island", "a mirror", "a library", "a candle", "a stone",
)  # fmt: skip
QUESTIONS = ("Tell me about {}.", "Write a short story about {}.", "Describe {} to a child.", "Why do people like {}?")
HELD_OUT = 16


def short_stories(seed: int) -> Task:
    """Open questions, to be answered at a given length."""
    rows = [{"prompt": user_prompt(question.format(subject))} for subject in SUBJECTS for question in QUESTIONS]
    random.Random(f"short-stories, seed {seed}").shuffle(rows)
    return Task(
        name="short-stories",
        description="Open questions; meant for a reward on the length of the answer.",
        train=rows[HELD_OUT:],
        held_out=rows[:HELD_OUT],
        rewards={"token_length": {"target": 50}},
    )
