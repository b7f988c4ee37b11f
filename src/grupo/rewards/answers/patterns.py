r"""Regular expressions that find answers and numbers in a text, each with an example and its match in `«»`."""

from __future__ import annotations

import re

EXAMPLES: list[tuple[re.Pattern[str], str]] = []
"""Every pattern of this module with its example, for the test."""


def _row(pattern: str, example: str, flags: int = 0) -> re.Pattern[str]:
    compiled = re.compile(pattern, flags)
    EXAMPLES.append((compiled, example))
    return compiled


MINUS = "\\-\u2010-\u2013\u2212\uff0d\ufe63"
"""Inside of brackets: the minus signs and dashes that are written for a minus."""
_SIGN = f"[+{MINUS}]"
_SPECIAL_SPACES = "\u00a0\u2009\u202f"

# Where an answer is: greedy from the start, as the last of its kind counts.
LAST_BOX = _row(r".*\\(?:boxed|fbox)(?![A-Za-z])\s*", r"«\boxed{1}, so \boxed»{2}", re.DOTALL)
BRACE = _row(r"\\.|[{}]", r"a«{»b\}c}", re.DOTALL)
ANSWER_PHRASE = _row(
    r"(?<![a-z])answer[*_]*(?:\s+is(?![a-z'])(?!\s+not\b)\s*:?|\s*[:=][*_]*|(?<=final answer)[*_]*[ \t]*\r?\n)\s*",
    "the «Answer is: »5",
    re.IGNORECASE,
)
STATEMENT = _row(r"(?:\$\$.*?\$\$|\\\[.*?\\\])?[^\r\n]*", "«$$\n5\n$$ apples»\nEnd", re.DOTALL)
STATEMENT_END = _row(r"[.?](?=[\"'*_)\]]*(?:\s|$))|,?\s(?:so|because|since|which)\s", "it is 5.2«.» That is all")

# Numbers. A sign counts only where no operand stands before it: "7-5" ends in 5, "= -5" and "= - 5" in -5. Three digits
# after a space may be thousands or a second number: both together are number-like, and no number.
NUMBER_LIKE = _row(
    rf"(?P<sign>(?<![\w)\]}}]){_SIGN}|(?<==)\ ?{_SIGN}\ )?(?:\\?[$€£¥])?(?P<second_sign>(?<=[$€£¥]){_SIGN})?"
    r"(?P<body>(?:[0-9]+\ )?[0-9][0-9.,]*\ ?/\ ?[0-9][0-9.,]*(?:/[0-9.,]+)*"
    r"|(?<![0-9.,])[1-9][0-9]{0,2}(?:\ [0-9]{3})+(?![0-9])[0-9.,]*"
    r"|(?:[0-9]|(?<![.\w])\.(?=[0-9]))[0-9.,]*(?:[eE][+-]?[0-9]{1,3}(?![\w.]))?)",
    "it costs «-$1,250.50» each",
)
BEFORE_NUMBER_LIKE = _row(rf".*[^0-9.,/ eE+$€£¥\\{MINUS}]", "«12 apples, so» 7", re.DOTALL)
THOUSANDS_MARK = _row(
    r"\{,\}(?:\\!)?|(?:\\!)?,\\!"
    rf"|(?<=[0-9])(?:\\[,:; ]|[~_'\u2019{_SPECIAL_SPACES}])(?=[0-9]{{3}}(?![0-9]))",
    r"10«\,»000",
)
IN_THOUSANDS_MARK = ("{,}", ",\\!", "\\,", "\\:", "\\;", "\\ ", "~", "_", "'", "\u2019", *_SPECIAL_SPACES)
"""One of them is in every match of that pattern, which is slow over a long text."""
GROUPED = _row(r"[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?", "«12,345.50»")
DECIMAL = _row(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?", "«1.5e3»")
RATIO = _row(r"(?:(?P<whole>[0-9]+) )?(?P<top>[0-9]+) ?/ ?(?P<bottom>[0-9]+)", "«1 3/4»")
FRACTION_OF_DIGITS = _row(
    r"(?P<whole>(?<=[0-9])\s*)?\\[dtc]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}", r"2« \frac{3}{4}»"
)

# What may stand around a number
INSIDE_FORMULA = _row(
    r"(?:\^|√|\\sqrt(?:\[[^\]]*\])?|\\[dt]?frac(?:\{(?:[^{}]|\{[^{}]*\})*\}|\s*[0-9])?)\s*\{?\s*$",
    r"2 «\frac{3}{»",
)
FORMULA_CONTINUES = _row(
    r"[,.]?\s?(?:\\?\^(?!\\circ|\{\\circ)|\\pi\b|π|√|\\sqrt|\\[dt]?frac|[²³⁴⁵⁶⁷⁸⁹]"
    r"|and an? (?:half|third|quarter)\b)",
    "2«^»10",
)
UNIT_POWER = _row(
    r"(?<=[0-9])((?:\\[ ,])?\ ?(?:\\(?:text|mathrm)\{\ ?)?"
    r"(?:[kcdm]?m|in|ft|yd|mi|inch(?:es)?|feet|met(?:er|re)s?|units?)(?:/[a-z]+)?(?:\ ?\})?)\^?\{?[23]\Z",
    r"58«\text{ cm}^2»",
)
BEFORE_SCALE = _row(r"(?:[$*~ \u00a0-]|\\[,;: ]|\\(?:text|textrm|mathrm|mbox)\s*\{)*", r"«\text{ »million}")
ALTERNATIVE = _row(
    r"(?P<other>[0-9][.,]?(?:\\?[$%*)}\]])*(?:\s\w+){0,2}),?\s*(?:(?<![\w\\])or\s|\\text\s*\{\s*or\s*\})\s*"
    r"(?:(?:maybe|perhaps|possibly|else)\s+)?(?:\\?[A-Za-z]\w*\s*=\s*)?[({\[*]*$",
    "it is «5 apples or maybe »",
)
