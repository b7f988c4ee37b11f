"""Scripts and readability."""

from __future__ import annotations

from typing import Any

import pytest

from grupo.errors import ConfigError
from grupo.rewards import language_consistency, readability
from grupo.rewards.library.language import lix

EASY = "The cat sat on the mat. It saw a dog. The dog ran off. The cat was glad."
HARD = (
    "Notwithstanding contradictory jurisprudential considerations, administrative authorities occasionally "
    "promulgate comprehensive regulations governing intergovernmental telecommunications infrastructure procurement."
)


@pytest.mark.parametrize(
    ("text", "scripts", "share"),
    [
        ("We add two and two.", "latin", 1.0),
        ("Wir zählen: groß, élan, ﬁn, ｗｉｄｅ", "latin", 1.0),
        ("abc абв", "latin", 0.5),
        ("abc абв", "cyrillic", 0.5),
        ("abc абв", ["latin", "cyrillic"], 1.0),
        ("我们先加", "latin", 0.0),
        ("我们先加ab", "cjk", 4 / 6),
        ("ひらがなとカタカナーと漢字々", ["hiragana", "katakana", "cjk"], 1.0),
        ("한국어", "hangul", 1.0),
        ("答案是 $x + y$ 和 \\frac 了 <think>", "cjk", 1.0),
        ("नमस्ते", "devanagari", 1.0),
        ("42", "latin", 0.0),
        ("", "latin", 0.0),
        ("<think></think>", "latin", 0.0),
    ],
)
def test_language_consistency(text: str, scripts: Any, share: float) -> None:
    assert language_consistency(scripts)([text, [{"role": "assistant", "content": text}]]) == [share, share]


def test_what_it_can_not_tell() -> None:
    """Two languages of one script are one to it."""
    assert language_consistency()(["Saya menghitung dua", "I count to two"]) == [1.0, 1.0]


def test_lix_by_hand() -> None:
    assert lix("The cat sat. It ran off!") == 3.0
    assert lix("Interesting words. Yes.") == pytest.approx(1.5 + 100 / 3)
    assert lix("one two three four") == 4.0
    assert lix("one two\n\nthree four") == 2.0
    assert lix("3.5 apples cost two") == 3.0
    assert lix("!!! 123") == lix("") == 0.0


def test_readability_falls_from_easy_to_hard() -> None:
    assert readability()([EASY, HARD]) == [1.0, 0.0]
    for text, expected in [("word " * 50 + ".", 0.5), ("word " * 40 + ".", 1.0), ("word " * 60 + ".", 0.0)]:
        assert readability()([text]) == [expected]
    assert readability(easy=0, hard=100)(["word " * 25 + "."]) == [0.75]


def test_short_texts_are_not_readable() -> None:
    assert readability()(["Yes.", "", None, "1 2 3 4 5 6"]) == [0.0] * 4
    assert readability(min_words=1)(["Yes."]) == [1.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: language_consistency("latn"),
        lambda: language_consistency([]),
        lambda: readability(easy=60, hard=40),
        lambda: readability(min_words=0),
    ],
)
def test_settings_without_a_meaning_are_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()
