"""Rewards for prose: in which script it is written, and how easy its sentences are to read."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Sequence
from typing import Any

from grupo.errors import ConfigError
from grupo.rewards.answers.extraction import completion_texts
from grupo.utils.messages import did_you_mean

SCRIPTS = (
    "arabic", "armenian", "bengali", "bopomofo", "cjk", "cyrillic", "devanagari", "ethiopic", "georgian", "greek",
    "gujarati", "gurmukhi", "hangul", "hebrew", "hiragana", "kannada", "katakana", "khmer", "lao", "latin", "malayalam",
    "mongolian", "myanmar", "sinhala", "tamil", "telugu", "thai", "tibetan",
)  # fmt: skip
"""As Unicode names letters; Japanese is hiragana, katakana and cjk, Korean is hangul, Chinese is cjk."""

_FORMULAS = re.compile(r"<[^<>\n]{1,40}>|\$[^$\n]{1,400}\$|\\[A-Za-z]+")
_SENTENCE_END = re.compile(r"[.!?…]+(?=[\s\"')\]»”]|$)|[。！？]+|\n\s*\n")
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")
LONG_WORD = 6
"""A word of more letters is a long one."""


class LanguageConsistency:
    """See `language_consistency`."""

    def __init__(self, scripts: str | Sequence[str]) -> None:
        self.__name__ = "language_consistency"
        self.value_range = (0.0, 1.0)
        self.scripts = frozenset((scripts,) if isinstance(scripts, str) else scripts)
        unknown = sorted(self.scripts.difference(SCRIPTS))
        if unknown or not self.scripts:
            raise ConfigError(
                f"language_consistency knows no script {unknown[0] if unknown else scripts!r}."
                f"{did_you_mean(unknown[0], SCRIPTS) if unknown else ''} Known scripts: {', '.join(SCRIPTS)}."
            )

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        return [self.share(text) for text in completion_texts(completions)]

    def share(self, text: str) -> float:
        letters = [script_of(letter) for letter in _FORMULAS.sub(" ", text) if letter.isalpha()]
        return sum(script in self.scripts for script in letters) / len(letters) if letters else 0.0


@functools.lru_cache(maxsize=1 << 16)
def script_of(letter: str) -> str:
    """The script of a letter, as Unicode names it, in lower case; wide and decorated letters are as plain ones."""
    name = unicodedata.name(unicodedata.normalize("NFKC", letter)[0], "")
    script = re.split("[ -]", name, maxsplit=1)[0].lower()
    return "cjk" if script == "ideographic" else script


class Readability:
    """See `readability`."""

    def __init__(self, easy: float, hard: float, min_words: int) -> None:
        if not 0 <= easy < hard < float("inf") or min_words < 1:
            raise ConfigError(
                f"readability(easy={easy}, hard={hard}, min_words={min_words}) has no slope: 0 <= easy < hard, as in "
                "easy=40, hard=60, and min_words is at least 1."
            )
        self.__name__ = "readability"
        self.value_range = (0.0, 1.0)
        self.easy, self.hard, self.min_words = easy, hard, min_words

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        return [self.score(text) for text in completion_texts(completions)]

    def score(self, text: str) -> float:
        if len(_WORD.findall(text)) < self.min_words:
            return 0.0
        return min(1.0, max(0.0, (self.hard - lix(text)) / (self.hard - self.easy)))


def lix(text: str) -> float:
    """Words per sentence + percentage of words of more than six letters (C.-H. Björnsson, Läsbarhet, 1968); 0.0 without
    words. A sentence ends at `.`, `!`, `?`, their wide forms, and blank lines."""
    sentences = [words for part in _SENTENCE_END.split(text) if (words := _WORD.findall(part))]
    words = [word for sentence in sentences for word in sentence]
    if not words:
        return 0.0
    return len(words) / len(sentences) + 100 * sum(len(word) > LONG_WORD for word in words) / len(words)


def language_consistency(scripts: str | Sequence[str] = "latin") -> LanguageConsistency:
    r"""The share of letters that are of these scripts: 1.0 for text in one of them throughout, 0.0 without any letter.

    It finds a chain of thought that changes to another script half-way, as of models trained on English and Chinese.
    It can not tell languages of one script apart: English, Indonesian and German are all Latin, and Latin names and
    units count against a Chinese text. `<tags>`, `$formulas$` and `\\macros` are left out.

    Args:
        scripts: one or several of `SCRIPTS`: `"cyrillic"`, or `["hiragana", "katakana", "cjk"]` for Japanese.
    """
    return LanguageConsistency(scripts)


def readability(easy: float = 40.0, hard: float = 60.0, min_words: int = 5) -> Readability:
    """1.0 for text that is easy to read, falling linearly to 0.0 for text that is hard: LIX from `easy` to `hard`.

    LIX is the number of words per sentence plus the percentage of words of more than six letters. About 30 is a
    children's book, 40 a novel, 50 a newspaper, 60 a law. It needs no dictionary, and was made for European languages
    with spaces between words: Chinese, Japanese and Thai count as few, long words.

    It knows nothing about sense: short words with full stops between them score best. Use it with a small weight,
    beside a reward for the content.

    Args:
        min_words: shorter texts, empty ones among them, get 0.0.
    """
    return Readability(easy, hard, min_words)
