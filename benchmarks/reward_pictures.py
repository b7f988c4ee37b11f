"""Draw the pictures of `docs/rewards.md`: what the rewards of the library pay, by answer and by length.

Needs the extra `bench`. Run it after a change of a reward: `python benchmarks/reward_pictures.py`. The same rewards
give the same files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grupo.rewards import (
    banded_answer,
    get_cosine_scaled_reward,
    get_soft_overlong_punishment,
    number_score,
    proximity,
    token_length,
)

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "rewards"


def by_answer() -> tuple[list[float], dict[str, list[float]]]:
    """(answers, name -> scores) where the gold number is 10."""
    answers = [number / 10 for number in range(-50, 301, 2)]
    texts = [f"<SOLUTION>{answer}</SOLUTION>" for answer in answers]
    rewards = {
        "proximity": proximity(),
        "proximity, halfway=0.1": proximity(halfway=0.1),
        "banded_answer": banded_answer(),
        "number_score": number_score(),
    }
    gold = ["10"] * len(texts)
    return answers, {name: reward(texts, answer=gold) for name, reward in rewards.items()}  # type: ignore[misc]


def by_length() -> tuple[list[int], dict[str, list[float]]]:
    """(tokens, name -> scores) for a limit of 200 tokens."""
    lengths = list(range(0, 261, 2))
    ids = [[0] * length for length in lengths]
    cosine = get_cosine_scaled_reward(200)
    found: dict[str, list[float]] = {
        "cosine_scaled, right": [cosine.scaled(True, length) for length in lengths],
        "cosine_scaled, wrong": [cosine.scaled(False, length) for length in lengths],
        "soft_overlong_punishment": get_soft_overlong_punishment(200, 80)(completion_ids=ids),
        "token_length, target=100, scale=0.01": token_length(100, scale=0.01)(completion_ids=ids),
    }
    return lengths, found


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "grupo"
    matplotlib.rcParams["svg.fonttype"] = "none"
    from matplotlib import pyplot

    FOLDER.mkdir(exist_ok=True)
    answers, scores = by_answer()
    figure, (near, steps) = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    for name, values in scores.items():
        (near if "proximity" in name else steps).plot(answers, values, label=name)
    for panel in (near, steps):
        _label(panel, "answer, where 10 is right", "upper right")
    _save(figure, "answers.svg")

    lengths, scores = by_length()
    figure, panel = pyplot.subplots(figsize=(6.5, 3.2), layout="constrained")
    for name, values in scores.items():
        panel.plot(lengths, values, label=name)
    _label(panel, "tokens of the completion, where 200 is the limit", "lower left")
    _save(figure, "lengths.svg")


def _label(panel: Any, axis: str, legend: str) -> None:
    panel.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    panel.set_xlabel(axis)
    panel.set_ylabel("score")
    panel.legend(loc=legend, frameon=False, fontsize="small")


def _save(figure: Any, name: str) -> None:
    from matplotlib import pyplot

    figure.savefig(FOLDER / name, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
