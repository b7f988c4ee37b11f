r"""Gold answers as datasets hold them: numbers, formulas, whole solutions that end in `#### 72` or in `\boxed{72}`.

What is a number and nothing else, `answers.gold_number` reads.
"""

from __future__ import annotations

from typing import Any

from grupo.rewards.answers.exact_numbers import ExactNumber, NotExact
from grupo.rewards.answers.extraction import Extraction, gold_number, plain_scalar, shown_value
from grupo.rewards.answers.latex import Answer, is_prose, read_answer

ANSWER_NEEDED = (
    "A gold answer is a number, a text with a number or formula and no sentence around it, or a solution that ends in "
    "\\boxed{...} or in '#### answer'."
)
"""What `read_gold` reads, as messages say it."""

_AT_THE_END = Extraction(("boxed", "hash"), strict=False)
_IN_GOLD = Extraction(("boxed", "hash", "phrase"))


def final_answer(gold: Any) -> Any:
    r"""The answer at the end of a written solution, its last box or what follows its last `####`; else `gold` itself.

    Of a sentence in these places its last number counts. A text whose only box is not closed stays as it is, and the
    rewards say that they cannot read it.
    """
    if not isinstance(gold, str):
        return gold
    answer = _AT_THE_END.find(gold).answer
    return gold if answer is None else answer.strip()


def gold_text(gold: Any) -> str | None:
    """What a gold answer of text says: its last box, else what follows `####` or "answer is"; a number in digits."""
    if not isinstance(gold, str):
        number = gold_number(gold)
        return None if number is None else str(number)
    found = _IN_GOLD.find(gold)
    return gold if found.source is None else found.answer


def read_gold(gold: Any) -> Answer | None:
    """A gold answer in normal form; None where it is empty, a sentence, or no text and no number.

    Of a solution, its last box counts, else what follows its last `####`, else its last "answer is".
    """
    gold = plain_scalar(gold)
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
    # A number with a unit of several words (`5 square miles`, `5 hundred million`) is no sentence.
    return None if is_prose(written) and not isinstance(answer.form, ExactNumber) else answer


def shown_gold(gold: Any) -> str:
    """A gold answer as messages quote it."""
    return shown_value(gold)
