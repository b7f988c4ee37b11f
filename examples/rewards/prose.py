r"""Rewards for prose: the script it is written in, and how easy its sentences are to read.

rewards:
  - {name: examples/rewards/prose.py:language_consistency, arguments: {scripts: [latin]}}
  - {name: examples/rewards/prose.py:readability, weight: 0.1}
"""

import functools
import re
import unicodedata

from grupo.errors import ConfigError
from grupo.rewards import completion_text

SCRIPTS = (
    "arabic", "armenian", "bengali", "bopomofo", "cjk", "cyrillic", "devanagari", "ethiopic", "georgian", "greek",
    "gujarati", "gurmukhi", "hangul", "hebrew", "hiragana", "kannada", "katakana", "khmer", "lao", "latin", "malayalam",
    "mongolian", "myanmar", "sinhala", "tamil", "telugu", "thai", "tibetan",
)  # fmt: skip
"""Names of scripts in Unicode; Japanese is hiragana, katakana and cjk, Korean is hangul, Chinese is cjk."""
LONG_WORD = 6
"""A word of more letters is a long one."""

_NOT_PROSE = re.compile(r"<[^<>\n]{1,40}>|\$[^$\n]{1,400}\$|\\[A-Za-z]+")
_SENTENCE_END = re.compile(r"[.!?…]+(?=[\s\"')\]»”]|$)|[。！？]+|\n\s*\n")
_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)*")


def language_consistency(completions, scripts=("latin",), **columns):
    r"""The share of letters that belong to these scripts, 0 to 1; 0.0 without any letter.

    It detects reasoning that changes to another script half-way, as in models trained on English and Chinese. It cannot
    tell languages of one script apart: English, Indonesian and German are all Latin, and Latin names and units count
    against a Chinese text. `<tags>`, `$formulas$` and `\macros` are ignored.
    """
    unknown = set(scripts).difference(SCRIPTS)
    if unknown or not scripts:
        raise ConfigError(f"scripts={scripts!r} names no known script: give a list of {', '.join(SCRIPTS)}.")
    shares = []
    for completion in completions:
        text = _NOT_PROSE.sub(" ", completion_text(completion) or "")
        letters = [_script(letter) for letter in text if letter.isalpha()]
        shares.append(sum(script in scripts for script in letters) / len(letters) if letters else 0.0)
    return shares


language_consistency.value_range = (0.0, 1.0)


@functools.lru_cache(maxsize=1 << 16)
def _script(letter):
    """The script of a letter in lower case; wide and decorated letters count as plain ones."""
    name = unicodedata.name(unicodedata.normalize("NFKC", letter)[0], "")
    script = re.split("[ -]", name, maxsplit=1)[0].lower()
    return "cjk" if script == "ideographic" else script


def readability(completions, easy=40.0, hard=60.0, min_words=5, **columns):
    """1.0 for text that is easy to read, falling linearly to 0.0 for hard text: LIX from `easy` to `hard`.

    About 30 is a children's book, 40 a novel, 50 a newspaper, 60 a law. LIX needs no dictionary and was made for
    European languages with spaces between words. It knows nothing about meaning: short words with full stops between
    them score best, so use it with a small weight and a reward for the content. Texts of fewer than `min_words` words
    get 0.0.
    """
    if not 0 <= easy < hard:
        raise ConfigError(f"easy={easy}, hard={hard} leave no slope: set 0 <= easy < hard.")
    scores = []
    for completion in completions:
        text = completion_text(completion) or ""
        is_long_enough = len(_WORD.findall(text)) >= max(min_words, 1)
        scores.append(min(1.0, max(0.0, (hard - lix(text)) / (hard - easy))) if is_long_enough else 0.0)
    return scores


readability.value_range = (0.0, 1.0)


def lix(text):
    """Words per sentence + percentage of words of more than six letters (C.-H. Björnsson, Läsbarhet, 1968)."""
    sentences = [words for part in _SENTENCE_END.split(text) if (words := _WORD.findall(part))]
    words = [word for sentence in sentences for word in sentence]
    if not words:
        return 0.0
    return len(words) / len(sentences) + 100 * sum(len(word) > LONG_WORD for word in words) / len(words)
