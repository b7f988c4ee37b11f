"""The rubric of small checks, and the e-mail rubric made of them."""

from __future__ import annotations

from typing import Any

import pytest

from grupo.errors import ConfigError, RewardError
from grupo.rewards import Check, RewardRunner, email_rubric, make_reward, rubric
from grupo.rewards.library.rubric import has_signature

BODY = "Dear Ann,\n\nyour refund is on its way.\n"
SIGNATURE = "\nKind regards\nBen Ode\nShop Ltd.\n12 Elm Street, Springfield\nPhone: +1 555 010 9999\nben@shop.example\n"
ROW = {"keyword": "refund", "ideal": "Dear Ann, your refund is on its way.", "recipient": "Ann"}


def email(text: str, **changed: Any) -> float:
    columns = {name: [value] for name, value in {**ROW, **changed}.items()}
    (points,) = email_rubric(max_words=50)([text], **columns)
    assert [points] == email_rubric(max_words=50)([[{"role": "assistant", "content": text}]], **columns)
    return points


def test_each_item_of_the_email_rubric_alone() -> None:
    assert email("Hello.") == 0.0
    assert email("The refund is on its way.") == 1.0  # keyword
    assert email("Hello Ann.") == 1.0  # recipient
    assert email("word " * 50) == 0.0
    assert email("word " * 51) == -1.0  # too long
    assert email("Hello." + SIGNATURE) == 1.0
    assert email("Hello there.", ideal="Hello\n there.") == 1.0
    assert email(BODY) == 3.0
    assert email(BODY + SIGNATURE, ideal=BODY + SIGNATURE) == 4.0
    assert email_rubric().value_range == (-1.0, 4.0)


def test_gaming_the_email_rubric() -> None:
    assert email("refund refund refund Ann Ann") == 2.0
    assert email("refunded to Annabel") == email("prefund, Joann") == 0.0
    assert email("REFUND for ann") == 2.0
    assert email("") == email("  \n") == 0.0
    # Phone, mail and address in the body, far above the end, are no signature.
    assert email(SIGNATURE + "and\n" * 9) == 0.0
    assert email("x", keyword=None, ideal="", recipient=[]) == 0.0
    assert email("a refund in May", keyword=["refund", "May"]) == 1.0
    assert email("a refund", keyword=["refund", "May"]) == 0.0


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (["12 Elm Street", "+1 555 010 9999", "ben@shop.example"], True),
        (["Ulmenweg 12", "12345 Berlin", "Tel. 030 1234567", "ben@shop.example"], True),
        (["Lange Straße 5", "Tel. (030) 123 45 67", "ben.ode@mail.shop.example"], True),
        (["P.O. Box 7", "555-010-9999", "ben@shop.example"], True),
        (["12 Elm Street", "ben@shop.example"], False),
        (["12 Elm Street", "+1 555 010 9999"], False),
        (["+1 555 010 9999", "ben@shop.example"], False),
        (["12 Elm Street", "Ordered on 2024-01-15 or 15.01.2024", "ben@shop.example"], False),
        (["12 Elm Street", "Order 123456789", "ben@shop.example"], False),
        (["I will drive 5 miles", "+1 555 010 9999", "ben@shop.example"], False),
        (["12 Elm Street", "+1 555 010 9999", "ben at shop"], False),
    ],
)
def test_signature_blocks(lines: list[str], found: bool) -> None:
    assert has_signature()("\n".join(["Regards", *lines]), {}) is found


def test_other_addresses_are_a_pattern() -> None:
    text = "Calle Mayor 5\n+34 91 123 45 67\nana@tienda.example"
    assert has_signature(r"Calle \w+ \d+")(text, {}) and not has_signature()(text, {})


def test_checks_are_metrics_and_points() -> None:
    polite = rubric(
        [
            {"name": "thanks", "points": 1.0, "contains": "thank you"},
            {"name": "sorry", "points": -0.5, "contains": ["sorry", "but"]},
            {"name": "shout", "points": -1, "pattern": "^[A-Z ]+!$"},
            {"name": "long", "points": 0.0, "longer_than": 3},
            Check("vowels", 2.0, lambda text, row: sum(c in "aeiou" for c in text) / max(len(text), 1)),
            Check(
                "only when asked", 1.0, lambda text, row: None if row["ask"] is None else row["ask"] in text, ("ask",)
            ),
        ],
        name="polite",
    )
    assert polite.value_range == (-1.5, 4.0)
    table = RewardRunner(polite).score(
        prompts=["p"] * 4,
        completions=["Thank  you", "sorry, but no", "GO AWAY!\nnow", "ae"],
        completion_ids=[[1]] * 4,
        columns={"ask": [None, "no", "yes", None]},
    )
    assert not table.failures
    shares = [3 / 10, 3 / 13, 1 / 12, 1.0]
    expected = [1 + 2 * shares[0], -0.5 + 2 * shares[1] + 1, -1 + 2 * shares[2], 2.0]
    assert [score for (score,) in table.scores] == pytest.approx(expected)
    assert {name: values for name, values in table.metrics.items() if name != "polite/vowels"} == {
        "polite/thanks": [0.25],
        "polite/sorry": [0.25],
        "polite/shout": [0.25],
        "polite/long": [0.0],
        "polite/only when asked": [0.5],
    }
    with pytest.raises(RewardError, match="requires 'ask'"):
        RewardRunner(polite).check_columns(["answer"])


def test_nothing_is_paid_for_an_empty_text() -> None:
    clean = rubric([{"name": "no digits", "points": 1.0, "pattern": r"\A\D*\Z"}])
    assert clean(["ok", "", " ", None, []]) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_rubric_of_a_recipe() -> None:
    reward = make_reward("rubric", name="tone", checks=[{"name": "thanks", "points": 1, "contains": "thanks"}])
    assert reward(["Thanks!", "no"]) == [1.0, 0.0] and reward.__name__ == "tone"


@pytest.mark.parametrize(
    ("checks", "message"),
    [
        ([], "at least one"),
        ([{"name": "a", "points": 1, "contains": "x"}] * 2, "name of its own"),
        ([{"name": "a", "contains": "x"}], "has a name, points, and one test"),
        ([{"name": "a", "points": 1}], "has a name, points, and one test"),
        ([{"name": "a", "points": 1, "contains": "x", "pattern": "y"}], "one test of contains"),
        ([{"name": "a", "points": 1, "contain": "x"}], "Did you mean 'contains'"),
        ([{"name": "a", "points": 1, "pattern": "("}], "no regular expression"),
        ([{"name": "a", "points": 1, "pattern": 5}], "no regular expression"),
        ([{"name": "a", "points": 1, "contains": []}], "asks for nothing"),
        ([{"name": "a", "points": 1, "contains": ["", "x"]}], "asks for nothing"),
        ([{"name": "a", "points": 1, "contains": 5}], "asks for nothing"),
        ([{"name": "a", "points": 1, "contains_column": "my column"}], "Column 'my column'"),
        (["polite"], "this one is 'polite'"),
        ([{"name": "a", "points": 1, "longer_than": -1}], "no limit"),
        ([{"name": "a", "points": float("nan"), "contains": "x"}], "finite"),
        ([{"name": "a", "points": "many", "contains": "x"}], "finite"),
    ],
)
def test_rubrics_without_a_meaning_are_refused(checks: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rubric(checks)


def test_a_test_that_gives_points_is_told_so() -> None:
    with pytest.raises(RewardError, match=r"Check 'a' returned 2\.0: .* said by its points"):
        rubric([Check("a", 1.0, lambda text, row: 2.0)])(["x"])
