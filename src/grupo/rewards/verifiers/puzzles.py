"""Rewards of puzzles: an expression that reaches a target, a list of numbers, and the scorers of reasoning-gym."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import operator
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from grupo.errors import ConfigError, RewardError
from grupo.rewards.answers.exact_numbers import MAX_BITS
from grupo.rewards.answers.extraction import Extraction, completion_texts, gold_number, quote_value
from grupo.rewards.verifiers.base import (
    AnswerReward,
    AnswerVerifier,
    Verdict,
    VerifierReward,
    keyword_signature,
    match_verdict,
    reward_from,
    unreadable_answer,
)

MAX_EXPRESSION = 300
"""Longest expression in characters; six numbers with their operators and parentheses take fewer than 60."""
MAX_LISTED = 1000
"""Items at the end of an answer that are read as a list of numbers."""

_MARKED = Extraction(("tag", "boxed"))
_IN_LINE = Extraction(("phrase",), strict=False)


def written_answer(text: str, lines: int = 1) -> str:
    """The answer of a completion: its last `<answer>` block, else its last box, else its last `lines`.

    A last line such as `Answer: 3 * 8` counts from after `Answer:`. Math delimiters, bold and code marks, and one full
    stop are removed.
    """
    found = _MARKED.find(text)
    answer = found.answer or ""
    if found.source is None:
        last = "\n".join(text.strip().splitlines()[-lines:])
        answer = (_IN_LINE.find(last).answer if lines == 1 else None) or last
    return answer.strip().strip("*`$ ").removesuffix(".").strip("*`$ ")


# Countdown -----------------------------------------------------------------------------------------------------------

_SYMBOLS = {
    "\\times": "*", "\\cdot": "*", "\\div": "/", "\\left": "", "\\right": "",
    "×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-",
}  # fmt: skip
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def evaluate_expression(text: str) -> tuple[Fraction, list[int]]:
    """The exact value of an expression of whole numbers, from its syntax tree and without running it, and its numbers.

    Raises:
        ValueError: it has anything but numbers, parentheses and + - * / between them, or is longer than
            `MAX_EXPRESSION`.
        ZeroDivisionError: it divides by zero.
    """
    refusal = f"it is not an expression of whole numbers, + - * / and parentheses of up to {MAX_EXPRESSION} characters"
    numbers: list[int] = []

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            numbers.append(node.value)
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return Fraction(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        raise ValueError(refusal)

    for symbol, plain in _SYMBOLS.items():
        text = text.replace(symbol, plain)
    if len(text) > MAX_EXPRESSION or not re.fullmatch(r"[-+*/()0-9\s]*", text):
        raise ValueError(refusal)
    text = re.sub(r"(?<!\d)0+(?=\d)", "", " ".join(text.split()))  # Python has no numbers like 08
    try:
        return value(ast.parse(text, mode="eval").body), numbers
    except (SyntaxError, MemoryError, RecursionError):  # the latter two: parentheses nested too deeply for the parser
        raise ValueError(refusal) from None


def countdown_fault(answer: str, numbers: Sequence[int], target: Fraction | int) -> str | None:
    """The reason why an expression is wrong; None if it reaches `target` with each number used at most once.

    `3 * 8 = 24` counts as `3 * 8`, if the right-hand side is the target. Values are exact: 8 / 3 * 3 is 8. A sign in
    front of a number or parenthesis is refused, because only the operators between numbers are part of the game.
    """
    expression, *results = answer.split("=")
    if len(results) > 1 or (results and gold_number(results[0].strip()) != target):
        return f"the right-hand side of '=' is not {target}"
    try:
        value, used = evaluate_expression(expression)
    except ZeroDivisionError:
        return "it divides by zero"
    except ValueError as error:
        return str(error)
    extra = Counter(used) - Counter(numbers)
    if extra:
        return f"it uses {', '.join(map(str, sorted(extra.elements())))} more often than given"
    return None if value == target else f"its value is {value}, not {target}"


class CountdownVerifier:
    """Right where the answer is an expression with the value of the target; see `countdown`."""

    def __init__(self, numbers_column: str = "numbers", target_column: str = "target") -> None:
        self.__name__ = "countdown"
        self.__signature__ = keyword_signature("completions", numbers_column, target_column)
        self.numbers_column = numbers_column
        self.target_column = target_column
        self._warned = False

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[Verdict]:
        texts = completion_texts(completions)
        rows = zip(texts, columns[self.numbers_column], columns[self.target_column], strict=True)
        return [self.judge(text, numbers, target) for text, numbers, target in rows]

    def judge(self, text: str, numbers: Any, target: Any) -> Verdict:
        """Undecided where the puzzle itself cannot be read."""
        goal = gold_number(target)
        given = [gold_number(number) for number in numbers] if isinstance(numbers, (list, tuple)) else []
        whole = [int(number) for number in given if number is not None and number.denominator == 1]
        is_printable = goal is not None and max(goal.numerator.bit_length(), goal.denominator.bit_length()) <= MAX_BITS
        if goal is not None and is_printable and whole and len(whole) == len(given):
            fault = countdown_fault(written_answer(text), whole, goal)
            return Verdict("right", f"it reaches {goal}") if fault is None else Verdict("wrong", fault)
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"countdown cannot read a puzzle with {self.numbers_column}={quote_value(numbers, 60)} and "
                f"{self.target_column}={quote_value(target, 30)}: it needs a list of whole numbers and a number. It "
                "abstains on such rows.",
                stacklevel=4,
            )
        return Verdict("undecided", "the puzzle cannot be read")


def countdown(numbers_column: str = "numbers", target_column: str = "target") -> VerifierReward:
    """1.0 where the answer is an expression with the value `target` that uses each given number at most once, else 0.0.

    The answer is the last `<answer>` block, else the last box, else the last line; `puzzles.countdown_fault` has the
    rules. Column names are arguments, so that it suits public countdown datasets with `nums` and `target`.
    """
    return reward_from(CountdownVerifier(numbers_column, target_column), right=1.0, wrong=0.0)


# Lists of numbers ----------------------------------------------------------------------------------------------------

_LISTED = re.compile(r"[-+\u2212]?[0-9]+(?:\.[0-9]+)?")


def listed_numbers(answer: str) -> list[Fraction]:
    """The numbers at the end of a text, separated by white space, commas or semicolons; brackets do not matter."""
    numbers: list[Fraction] = []
    for item in reversed(re.split(r"[\s,;]+", answer.strip())[-MAX_LISTED:]):
        bare = item.strip("[](){}*`$.")
        if bare:
            number = gold_number(bare) if _LISTED.fullmatch(bare) else None
            if number is None:
                break
            numbers.append(number)
    return numbers[::-1]


class NumberListVerifier(AnswerVerifier):
    """Right where the answer is the list of gold numbers; see `number_list`."""

    answer_requirement = "A gold answer is a list of numbers, or a text with numbers and nothing else, as in '1, 2, 3'."

    def can_read(self, gold: Any) -> bool:
        return _gold_list(gold) is not None

    def judge(self, text: str, gold: Any) -> Verdict:
        expected = _gold_list(gold)
        if expected is None:
            return unreadable_answer(gold)
        numbers = listed_numbers(written_answer(text))
        return match_verdict(numbers == expected, ", ".join(map(str, numbers)) or "a text without numbers", gold)


def _gold_list(gold: Any) -> list[Fraction] | None:
    items = re.split(r"[\s,;]+", gold.strip().strip("[](){}")) if isinstance(gold, str) else gold
    if not isinstance(items, (list, tuple)) or not items:
        return None
    numbers = [gold_number(item) for item in items]
    return None if None in numbers else [number for number in numbers if number is not None]


def number_list(gold_column: str = "answer") -> AnswerReward:
    """1.0 where the answer is the list of gold numbers, in their order, else 0.0.

    The answer is the last `<answer>` block, else the last box, else the last line. Only the numbers at its end count,
    so `Sorted: 1, 2, 3` is 1, 2, 3.
    """
    return AnswerReward(NumberListVerifier("number_list", gold_column))


# reasoning-gym -------------------------------------------------------------------------------------------------------

_HARMLESS_CALLS = {"sin", "cos", "tan", "exp", "log", "ln", "sqrt", "abs", "Abs"}
_CALL = re.compile(r"([A-Za-z_]\w*)\s*[(\[]|([)\]}\"'])\s*[(\[]")
_POWER = re.compile(r"\*\*|\^")
_SMALL_POWER = re.compile(r"(?:\*\*|\^)\s*\(?-?(?:[0-9]{1,2}|[A-Za-z])(?![\w.])\)?(?!\s*(?:\*\*|\^))")
_CODE = re.compile(r"__|\.\s*[A-Za-z_]|\b(?:lambda|for|import|while|yield)\b|:=|[\"'\])}]\s*\*|\*\s*[\"'\[{]|[0-9]{30}")


def may_run(answer: str) -> bool:
    """Whether an answer could do more than be data if it was evaluated: calls, attributes, loops, large powers."""
    for called, _ in _CALL.findall(answer):
        if called not in _HARMLESS_CALLS:
            return True
    if len(_POWER.findall(answer)) != len(_SMALL_POWER.findall(answer)):
        return True
    # A product of parentheses is arithmetic; a product of texts or lists may fill the memory.
    return _CODE.search(answer.replace(")*", ")").replace(") *", ")")) is not None


class ReasoningGym:
    """See `reasoning_gym`."""

    value_range = (0.0, 1.0)

    def __init__(self, entry_column: str) -> None:
        self.__name__ = "reasoning_gym"
        self.entry_column = entry_column
        self.__signature__ = keyword_signature("completions", entry_column)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        texts = completion_texts(completions)
        return [self.judge(text, entry) for text, entry in zip(texts, columns[self.entry_column], strict=True)]

    def judge(self, text: str, entry: Mapping[str, Any]) -> float:
        if not isinstance(entry, Mapping) or "source_dataset" not in entry.get("metadata", {}):
            raise RewardError(
                f"reasoning_gym needs the whole entry of the task in the column '{self.entry_column}', with its "
                "metadata; the task reasoning-gym:NAME makes such rows."
            )
        # Grids and boards have several lines.
        answer = written_answer(text, lines=max(1, len(str(entry.get("answer")).splitlines())))
        scorer, evaluates = _scorer(entry["metadata"]["source_dataset"])
        if not answer or (evaluates and may_run(answer)):
            return 0.0
        try:
            score = float(scorer(answer=answer, entry=entry))
        except Exception:  # scorers of many authors, on arbitrary text: an answer that they cannot read is not right
            return 0.0
        return min(max(score, 0.0), 1.0) if math.isfinite(score) else 0.0


@functools.cache
def _scorer(name: str) -> tuple[Callable[..., float], bool]:
    """The scorer of a reasoning-gym task, and whether its module evaluates text."""
    gym = import_reasoning_gym()
    try:
        scorer = gym.get_score_answer_fn(name)
    except ValueError as error:
        raise RewardError(f"reasoning_gym: the installed version has no task {name!r}.") from error
    module = inspect.getmodule(type(scorer.__self__))
    source = inspect.getsource(module) if module is not None else "eval("
    return scorer, re.search(r"\b(?:eval|exec|parse_expr|sympify)\(", source) is not None


def import_reasoning_gym() -> Any:
    """The package `reasoning_gym`, which is slow to import.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError("It needs the package reasoning-gym: pip install reasoning-gym") from error
    return reasoning_gym


def reasoning_gym(entry_column: str = "entry") -> ReasoningGym:
    """The score of reasoning-gym's own scorer for its tasks, from 0 to 1; 0 for an empty answer.

    The answer is the last `<answer>` block, else the last box, else the last line or lines. Some of the scorers
    evaluate the answer as Python; they do not see an answer with calls, attributes, loops or large powers, which gets
    0.
    """
    return ReasoningGym(entry_column)
