r"""Gold answers as datasets hold them: numbers, formulas, whole solutions that end in `#### 72` or in `\boxed{72}`.

Gold answers that must be numbers are read by `extraction.gold_number`.
"""

from __future__ import annotations

from typing import Any

from grupo.rewards.answers.exact_numbers import ExactNumber, NotExact
from grupo.rewards.answers.extraction import Extraction, gold_number, to_scalar
from grupo.rewards.answers.latex import Answer, is_prose, read_answer

ANSWER_REQUIREMENT = (
    "A gold answer is a number, a text with a number or formula and no sentence around it, or a solution that ends in "
    "\\boxed{...} or in '#### answer'."
)
"""What `read_gold` reads, for messages."""

_AT_THE_END = Extraction(("boxed", "hash"), strict=False)
_IN_GOLD = Extraction(("boxed", "hash", "phrase"))


def final_answer(gold: Any) -> Any:
    r"""The answer at the end of a written solution, its last box or the text after its last `####`; else `gold` itself.

    Of a sentence in these places its last number counts. A text whose only box is not closed stays as it is, and
    rewards report that they cannot read it.
    """
    if not isinstance(gold, str):
        return gold
    answer = _AT_THE_END.find(gold).answer
    return gold if answer is None else answer.strip()


def gold_text(gold: Any) -> str | None:
    """The answer in a gold text: its last box, else the text after `####` or "answer is"; a number in digits."""
    if not isinstance(gold, str):
        number = gold_number(gold)
        return None if number is None else str(number)
    found = _IN_GOLD.find(gold)
    return gold if found.source is None else found.answer


def read_gold(gold: Any) -> Answer | None:
    """A gold answer in normal form; None where it is empty, a sentence, or neither text nor number.

    Of a solution, its last box counts, else the text after its last `####`, else after its last "answer is".
    """
    gold = to_scalar(gold)
    if not isinstance(gold, str):
        number = gold_number(gold)
        try:
            return None if number is None else Answer(ExactNumber.from_rational(number))
        except NotExact:
            return None
    written = gold_text(gold)
    answer = None if written is None else read_answer(written)
    if written is None or answer is None:
        return None
    # A number with a unit of several words (`5 square miles`, `5 hundred million`) is not a sentence.
    return None if is_prose(written) and not isinstance(answer.form, ExactNumber) else answer
