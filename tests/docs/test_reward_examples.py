"""The reward files in `examples/rewards/` work as rewards of a recipe, and give the values that they promise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grupo.errors import ConfigError
from grupo.rewards import RewardRunner, make_reward

FOLDER = Path(__file__).parents[2] / "examples" / "rewards"


def scores(name: str, completions: list[Any], columns: dict[str, list[Any]] | None = None, **arguments: Any) -> Any:
    """The scores of an example, the same for texts and for messages."""
    runner = RewardRunner(make_reward(f"{FOLDER}/{name}", **arguments), timeout=None)
    tables = [
        runner.score(
            prompts=["p"] * len(completions), completions=given, completion_ids=[[1]] * len(completions),
            columns=columns or {},
        )
        for given in (completions, [[{"role": "assistant", "content": text}] for text in completions])
    ]  # fmt: skip
    assert not tables[0].failures and tables[0].scores == tables[1].scores
    return [score for (score,) in tables[0].scores]


# prose.py ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "scripts", "share"),
    [
        ("Wir zählen: groß, élan, ﬁn, ｗｉｄｅ", ["latin"], 1.0),
        ("Saya menghitung dua", ["latin"], 1.0),
        ("abc абв", ["latin"], 0.5),
        ("abc абв", ["latin", "cyrillic"], 1.0),
        ("我们先加ab", ["cjk"], 4 / 6),
        ("ひらがなとカタカナーと漢字々", ["hiragana", "katakana", "cjk"], 1.0),
        ("答案是 $x + y$ 和 \\frac 了 <think>", ["cjk"], 1.0),
        ("42", ["latin"], 0.0),
        ("<think></think>", ["latin"], 0.0),
        ("", ["latin"], 0.0),
    ],
)
def test_language_consistency(text: str, scripts: list[str], share: float) -> None:
    assert scores("prose.py:language_consistency", [text], scripts=scripts) == [share]


def test_readability() -> None:
    easy = "The cat sat on the mat. It saw a dog. The dog ran off. The cat was glad."
    hard = "Notwithstanding contradictory jurisprudential considerations, authorities promulgate regulations."
    words = [f"{'word ' * count}." for count in (40, 50, 60)]
    assert scores("prose.py:readability", [easy, hard, *words, "Yes.", ""]) == [1.0, 0.0, 1.0, 0.5, 0.0, 0.0, 0.0]
    assert scores("prose.py:readability", ["Yes."], min_words=1) == [1.0]
    lix = make_reward(f"{FOLDER}/prose.py:lix")
    assert lix("The cat sat. It ran off!") == 3.0 and lix("one two\n\nthree four") == 2.0
    assert lix("Interesting words. Yes.") == pytest.approx(1.5 + 100 / 3) and lix("!!! 123") == 0.0
    assert lix("3.5 apples cost two") == 3.0


def test_settings_without_a_meaning_end_the_run() -> None:
    for name, arguments in (("language_consistency", {"scripts": ["latn"]}), ("readability", {"easy": 60, "hard": 40})):
        with pytest.raises(ConfigError):
            scores(f"prose.py:{name}", ["text"], **arguments)


# email_reply.py ------------------------------------------------------------------------------------------------------

BODY = "Dear Ann,\n\nyour refund is on its way.\n"
SIGNATURE = "\nKind regards\nBen Ode\n12 Elm Street, Springfield\nPhone: +1 555 010 9999\nben@shop.example\n"


@pytest.mark.parametrize(
    ("text", "changed", "points"),
    [
        ("Hello.", {}, 0.0),
        ("The refund is on its way.", {}, 1.0),
        ("REFUND for ann", {}, 2.0),
        ("refunded to Annabel", {}, 0.0),
        ("refund refund Ann Ann", {}, 2.0),
        ("word " * 51, {}, -1.0),
        ("Hello." + SIGNATURE, {}, 1.0),
        ("Hello there.", {"ideal": "Hello\n there."}, 1.0),
        (BODY + SIGNATURE, {"ideal": BODY + SIGNATURE}, 4.0),
        (SIGNATURE + "and\n" * 9, {}, 0.0),
        ("x", {"keyword": None, "ideal": "", "recipient": []}, 0.0),
        ("a refund", {"keyword": ["refund", "May"]}, 0.0),
        ("", {}, 0.0),
    ],
)
def test_the_points_of_a_reply(text: str, changed: dict[str, Any], points: float) -> None:
    row = {"keyword": "refund", "ideal": "Dear Ann, your refund is on its way.", "recipient": "Ann", **changed}
    columns = {name: [value] for name, value in row.items()}
    assert scores("email_reply.py:email_reply", [text], columns, max_words=50) == [points]


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["12 Elm Street", "+1 555 010 9999", "ben@shop.example"], True),
        (["Ulmenweg 12", "12345 Berlin", "Tel. 030 1234567", "ben@shop.example"], True),
        (["P.O. Box 7", "555-010-9999", "ben@shop.example"], True),
        (["12 Elm Street", "ben@shop.example"], False),
        (["12 Elm Street", "+1 555 010 9999"], False),
        (["+1 555 010 9999", "ben@shop.example"], False),
        (["12 Elm Street", "Ordered on 2024-01-15 or 15.01.2024", "ben@shop.example"], False),
        (["12 Elm Street", "Order 123456789", "ben@shop.example"], False),
        (["I will drive 5 miles", "+1 555 010 9999", "ben@shop.example"], False),
    ],
)
def test_signature_blocks(lines: list[str], found: bool) -> None:
    assert make_reward(f"{FOLDER}/email_reply.py:has_signature")("\n".join(["Regards", *lines])) is found


# gsm8k_tutorial.py ---------------------------------------------------------------------------------------------------

PERFECT = "<reasoning>\n8 * 9\n</reasoning>\n<answer>\n72\n</answer>\n"
NO_LINE_END = PERFECT.rstrip()


@pytest.mark.parametrize(
    ("text", "expected"),
    [  # tags, soft format, strict format, whole number, right answer
        (PERFECT, (0.5, 0.0, 0.5, 0.5, 2.0)),
        (NO_LINE_END, (0.501 - 0.001 * len(NO_LINE_END), 0.0, 0.0, 0.5, 2.0)),
        (PERFECT.replace("\n", ""), (0.0, 0.5, 0.0, 0.5, 2.0)),
        (PERFECT.replace("8 * 9", "8\n9"), (0.5, 0.0, 0.0, 0.5, 2.0)),
        (PERFECT + "x" * 1000, (-1.5, 0.0, 0.0, 0.5, 2.0)),
        (PERFECT.replace("72", "72.0"), (0.5, 0.0, 0.5, 0.0, 0.0)),
        (PERFECT.replace("72", "-4"), (0.5, 0.0, 0.5, 0.0, 0.0)),
        (PERFECT.replace("72", "²"), (0.5, 0.0, 0.5, 0.5, 0.0)),
        ("72", (0.0, 0.0, 0.0, 0.5, 2.0)),
        ("<answer>72", (0.0, 0.0, 0.0, 0.5, 2.0)),
    ],
)
def test_the_tutorial_code_computes_what_published_runs_had(text: str, expected: tuple[float, ...]) -> None:
    names = [f"{name}_reward_func" for name in ("xmlcount", "soft_format", "strict_format", "int", "correctness")]
    found = [scores(f"gsm8k_tutorial.py:{name}", [text], {"answer": ["72"]})[0] for name in names]
    assert found == pytest.approx(expected, abs=1e-12)
