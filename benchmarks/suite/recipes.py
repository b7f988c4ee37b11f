"""The prompts and sizes of the two recipes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

GROUP_SIZE = 8
FORMAT = (
    "Work the problem out step by step, then state the result. Write in this form and in no other:\n"
    "<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>"
)


@dataclass(frozen=True)
class Recipe:
    """One optimizer step: `accumulation` groups of 8 completions, each of exactly `completion_tokens`."""

    title: str
    system: str | None
    question: Callable[[random.Random], str]
    accumulation: int
    completion_tokens: int

    def rows(self, count: int = 64) -> list[dict[str, Any]]:
        chance = random.Random(0)
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [{"prompt": [*system, {"role": "user", "content": self.question(chance)}]} for _ in range(count)]


def arithmetic_question(chance: random.Random) -> str:
    terms = [str(chance.randint(-99, 99))]
    for _ in range(chance.randint(1, 3)):
        terms += [chance.choice("+-*"), str(chance.randint(2, 99))]
    return f"Calculate {' '.join(terms)}. Give the answer as a whole number, without commas."


def word_problem(chance: random.Random) -> str:
    name, friend = chance.sample(["Ada", "Boris", "Carmen", "Dilip", "Esra", "Femi", "Greta", "Hugo"], 2)
    things = chance.choice(["apples", "stamps", "marbles", "pencils", "shells", "cards"])
    boxes, each, given, more = (chance.randint(3, 20) for _ in range(4))
    return (
        f"{name} has {boxes} boxes with {each} {things} in each. {name} gives {given} {things} to {friend}, who had "
        f"{more} before, and then buys {more} new boxes of {each} {things}, of which {given} are broken and are "
        f"thrown away. {friend} loses half of what {friend} has now. How many {things} does {name} have in the end?"
    )


RECIPES = {
    "arithmetic": Recipe("arithmetic", None, arithmetic_question, accumulation=2, completion_tokens=96),
    "word-problems": Recipe("word problems", FORMAT, word_problem, accumulation=1, completion_tokens=200),
}
