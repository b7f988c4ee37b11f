"""A rubric for replies to e-mails, for a dataset with the columns `keyword`, `ideal` and `recipient`.

rewards:
  - {name: examples/rewards/email_reply.py:email_reply, arguments: {max_words: 60}}
"""

import re

from grupo.rewards import Check, rubric

SIGNATURE_LINES = 8
"""Non-empty lines at the end in which the signature must be."""

_MAIL = re.compile(r"(?<![\w.+-])[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,6}")
_PHONE = re.compile(r"(?<![\w@.+/-])(?:\+|\(|0)?[0-9](?:[ ()/.\u2011-]{0,3}[0-9]){6,14}(?![\w@])")
_DATE = re.compile(r"[0-9]{4}([-/.])[0-9]{1,2}\1[0-9]{1,2}|[0-9]{1,2}([-/.])[0-9]{1,2}\2[0-9]{2,4}")
_STREETS = (
    "Street|St|Road|Rd|Avenue|Ave|Lane|Ln|Drive|Dr|Court|Ct|Way|Square|Sq|Boulevard|Blvd|Place|Pl|Terrace|Parkway"
)
_STRASSEN = "[Ss]traße|[Ss]trasse|[Ss]tr\\.|[Ww]eg|[Pp]latz|[Aa]llee|[Gg]asse|[Uu]fer"
ADDRESS = re.compile(
    rf"(?<!\w)[0-9]{{1,5}}[a-zA-Z]?,? (?:[A-Z0-9][\w.'-]{{0,29}} ){{1,4}}(?:{_STREETS})(?!\w)"
    rf"|[A-ZÄÖÜ][\w.-]{{1,40}}? ?(?:{_STRASSEN}) ?[0-9]{{1,4}}(?![0-9])"
    r"|(?<!\w)(?:P\.? ?O\.? Box|Postfach) ?[0-9]"
)
"""A postal address: `12 Elm Street`, `Ulmenweg 12` or a post-office box. Other countries need another pattern."""


def has_signature(text, row=None):
    """Whether the last lines hold a phone number, an e-mail address and a postal address.

    A phone number has 7 to 15 digits and starts with `+`, `(` or `0` or is written in groups; dates do not count, nor
    does a bare run of digits, which may be an order number.
    """
    last = [line[:400] for line in text.splitlines() if line.strip()][-SIGNATURE_LINES:]
    block = "\n".join(last)
    return bool(_MAIL.search(block) and ADDRESS.search(block)) and any(map(_has_phone, last))


def _has_phone(line):
    numbers = [match[0] for match in _PHONE.finditer(line) if not _DATE.fullmatch(match[0])]
    return any(number[0] in "+(0" or re.search(r"[0-9][^0-9]+[0-9]", number) for number in numbers)


def email_reply(completions, keyword, ideal, recipient, max_words=200, log_metric=None, **columns):
    """Required keyword +1, exactly the ideal answer +1, the recipient's name +1, a signature +1, too long -1.

    Keyword (a word, or a list of words, all required) and name are whole words in any case, and pay once however often
    they occur. Where a cell is empty, its check does not apply.
    """
    checks = rubric(
        [
            {"name": "keyword", "points": 1.0, "contains_column": "keyword"},
            {"name": "ideal", "points": 1.0, "equals_column": "ideal"},
            {"name": "too_long", "points": -1.0, "longer_than": max_words},
            {"name": "recipient", "points": 1.0, "contains_column": "recipient"},
            Check("signature", 1.0, has_signature),
        ],
        name="email_reply",
    )
    return checks(completions, log_metric, keyword=keyword, ideal=ideal, recipient=recipient)


email_reply.value_range = (-1.0, 4.0)
