"""Completions that probe a reward function: right and wrong answers in many forms, and odd texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any

from grupo.rewards.answers.exact_numbers import MAX_BITS
from grupo.rewards.answers.extraction import MAX_DIGITS, gold_number, to_scalar
from grupo.rewards.answers.ground_truth import final_answer

REASONING = "I read the question with care.\nThen I work it out, step by step."
"""Reasoning without digits, so that no reward takes its answer from it."""
_FILLER = (
    "Before going on, it helps to say in plain words what is known and what is asked, and to look at every part of it "
    "again, so that nothing is left out by accident."
)
FILLER_WORDS = (5, 30, 120, 480)
"""Numbers of words of reasoning before the same answer."""


@dataclass(frozen=True)
class AnswerForm:
    """A way to write an answer: a template with `{reasoning}` and `{answer}`."""

    template: str
    one_line: bool = False
    """The reasoning has no line break."""

    def write(self, answer: str, extra_words: int = 0) -> str:
        reasoning = REASONING + (" " + filler(extra_words) if extra_words else "")
        if self.one_line:
            reasoning = reasoning.replace("\n", " ")
        if extra_words and "{reasoning}" not in self.template:
            return f"{reasoning}\n{self.template}".replace("{answer}", answer)
        return self.template.replace("{reasoning}", reasoning).replace("{answer}", answer)


ANSWER_ONLY = AnswerForm("{answer}")


def filler(words: int) -> str:
    """A text of `words` words without content."""
    sentence = _FILLER.split()
    return " ".join(sentence[index % len(sentence)] for index in range(words))


Delimiters = tuple[tuple[str, str], ...]
"""(opening, closing) delimiters of blocks, in their order; the last block holds the answer."""
_USUAL: list[Delimiters] = [
    tuple((f"<{name}>", f"</{name}>") for name in names) for names in (("think", "answer"), ("reasoning", "answer"))
]


def answer_forms(expected: Iterable[Delimiters] = ()) -> list[AnswerForm]:
    """Forms in which rewards may expect an answer; `expected`: blocks that some reward is known to require."""
    templates = [
        ANSWER_ONLY.template,
        "{reasoning}\n{answer}",
        "{reasoning}\nThe answer is {answer}.",
        "{reasoning}\nThe answer is \\boxed{{answer}}.",
        "{reasoning}\n#### {answer}",
        "<start_working_out>{reasoning}<end_working_out><SOLUTION>{answer}</SOLUTION>",
    ]
    for delimiters in dict.fromkeys([*expected, *_USUAL]):
        for answer in ("{answer}", "\\boxed{{answer}}"):
            contents = [*["{reasoning}"] * (len(delimiters) - 1), answer]
            blocks = [
                (opening, content, closing) for (opening, closing), content in zip(delimiters, contents, strict=True)
            ]
            templates.append("".join(map("".join, blocks)))
            templates.append("".join(f"{opening}\n{content}\n{closing}\n" for opening, content, closing in blocks))
            # For a prompt that ends in the first opening tag.
            templates.append(templates[-2].removeprefix(delimiters[0][0]))
    return [AnswerForm(template, one_line) for one_line in (False, True) for template in templates]


# Gold answers --------------------------------------------------------------------------------------------------------

_LAST_DIGITS = re.compile(r"[0-9]+(?=[^0-9]*\Z)")


def gold_text(gold: Any) -> str | None:
    """A gold answer as a completion would give it; None if it is neither text nor a number that can be written."""
    answer = to_scalar(final_answer(gold))
    if isinstance(answer, str):
        return answer.strip() or None
    number = gold_number(answer) if isinstance(answer, (Real, Decimal)) else None
    if number is None or max(number.numerator.bit_length(), number.denominator.bit_length()) > MAX_BITS:
        return None
    return str(answer)


def corrupted_answers(gold: str, others: Sequence[str]) -> dict[str, str]:
    """Wrong answers that resemble the right one: kind of change -> answer, the simplest change first.

    Args:
        gold: the right answer.
        others: answers of other questions, for answers without digits.
    """
    digits = _LAST_DIGITS.search(gold)
    if digits is None or len(digits[0]) > MAX_DIGITS:
        different = [other for other in others if other.casefold() != gold.casefold()]
        return {"the answer of another row": different[0]} if different else {"spelt backwards": gold[::-1] + "x"}
    number = gold_number(gold)

    def with_digits(text: str) -> str:
        return gold[: digits.start()] + text + gold[digits.end() :]  # type: ignore[union-attr]

    wrong = {
        "one more": with_digits(str(int(digits[0]) + 1).zfill(len(digits[0]))),
        "a digit in front": with_digits("1" + digits[0]),
    }
    if number != 0 and "." not in gold:
        wrong["a zero behind"] = with_digits(digits[0] + "0")
    if number is not None and number != 0:
        wrong["the other sign"] = gold[1:] if gold.startswith("-") else "-" + gold
    return wrong


def equivalent_forms(gold: str) -> list[str]:
    """Other ways to write the same whole number, all of which careful verifiers accept."""
    if not re.fullmatch(r"-?[0-9]{1,15}", gold):
        return []
    return [f"{gold}.0", f"**{gold}**", f"${gold}", *([f"{int(gold):,}"] if abs(int(gold)) >= 1000 else [])]


# Texts that break things ---------------------------------------------------------------------------------------------

EMPTY = ("", " \n\t ")
UNICODE = (
    "Η απάντηση είναι ٤٢ 🙂",
    "\uff17\uff12 \u00b2\u00b3 \u00bd \u216b 七十二",
    "a\u0301\u200b\ufeff\u202e\u2028 \x00\ufffd",
    "\\boxed{\u00b2} <answer>\u0664\u0662</answer>",
    "\u221272,\u00a0€ ½",
)
LONG = (
    filler(9000),
    "7" * 5000,
    "{" * 5000 + "<answer>" * 1000 + "\\boxed{" * 1000 + "1 + " * 2000,
    "<think>" + "\n" * 20000 + " " * 20000 + "</think",
)


def token_ids(text: str, vocabulary: dict[str, int]) -> list[int]:
    """Substitutes for the tokens of a text, about one per four characters; equal pieces get equal ids."""
    pieces = re.findall(r"\s?\w{1,6}|\s|[^\w\s]", text)
    return [vocabulary.setdefault(piece, len(vocabulary)) for piece in (*pieces, "")]  # "": the stop token


def as_completion(text: str, prompt: Any) -> Any:
    """The completion with this text: a string, or a message if the prompt is a conversation."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Dataset columns as lists, without the prompt and the sampled completions."""
    names = dict.fromkeys(name for row in rows for name in row if name not in ("prompt", "completion", "completions"))
    return {name: [row.get(name) for row in rows] for name in names}
