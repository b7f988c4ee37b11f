"""The rubric of small checks."""

from __future__ import annotations

from typing import Any

import pytest

from grupo.errors import ConfigError, RewardError
from grupo.rewards import Check, RewardRunner, make_reward, rubric


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
            {"name": "word", "points": 0, "contains_column": "word"},
            {"name": "same", "points": 0, "equals_column": "ask"},
        ],
        name="polite",
    )
    assert polite.value_range == (-1.5, 4.0)
    table = RewardRunner(polite).score(
        prompts=["p"] * 4,
        completions=["Thank  you", "sorry, but no", "GO AWAY!\nnow", "ae"],
        completion_ids=[[1]] * 4,
        columns={
            "ask": [None, "no", "GO  AWAY! now", None],
            "word": ["YO", ["no", "orry"], "GO AWAY! now", [" ", None]],
        },
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
        "polite/word": [1 / 3],
        "polite/same": [0.5],
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
        ([{"name": "a", "points": 1, "contains": "x"}] * 2, "unique name"),
        ([{"name": "a", "contains": "x"}], "has a name, points, and one test"),
        ([{"name": "a", "points": 1}], "has a name, points, and one test"),
        ([{"name": "a", "points": 1, "contains": "x", "pattern": "y"}], "one test of contains"),
        ([{"name": "a", "points": 1, "contain": "x"}], "Did you mean 'contains'"),
        ([{"name": "a", "points": 1, "pattern": "("}], "is not a regular expression"),
        ([{"name": "a", "points": 1, "pattern": 5}], "is not a regular expression"),
        ([{"name": "a", "points": 1, "contains": []}], "requires nothing"),
        ([{"name": "a", "points": 1, "contains": ["", "x"]}], "requires nothing"),
        ([{"name": "a", "points": 1, "contains": 5}], "requires nothing"),
        ([{"name": "a", "points": 1, "contains_column": "my column"}], "Column 'my column'"),
        (["polite"], "this one is 'polite'"),
        ([{"name": "a", "points": 1, "longer_than": -1}], "not a limit"),
        ([{"name": "a", "points": float("nan"), "contains": "x"}], "finite"),
        ([{"name": "a", "points": "many", "contains": "x"}], "finite"),
    ],
)
def test_rubrics_without_a_meaning_are_refused(checks: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rubric(checks)


def test_a_test_must_return_a_share() -> None:
    with pytest.raises(RewardError, match=r"Check 'a' returned 2\.0: .* set by its points"):
        rubric([Check("a", 1.0, lambda text, row: 2.0)])(["x"])
