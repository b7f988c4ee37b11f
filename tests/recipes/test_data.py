"""Rows that a recipe names: files, columns, splits, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict

from grupo.data.decontamination import normalize_text
from grupo.data.prompts import PromptTokenizer, tokenize_rows
from grupo.errors import ConfigError, DataError
from grupo.recipes.data import recipe_rewards, recipe_rows
from grupo.recipes.schema import Recipe
from grupo.recipes.yaml_io import load_recipe
from grupo.rewards import make_reward
from tiny import tiny_tokenizer

QUESTIONS = [{"question": f"{n} + 1?", "gold": n + 1, "level": "easy"} for n in range(10)]


def dataset_recipe(path: Path, **spec: Any) -> Recipe:
    return Recipe.model_validate(
        {"dataset": {"path": str(path), "prompt": "question", **spec}, "rewards": ["number_match"]}
    )


def write_rows(path: Path, rows: list[dict[str, Any]] = QUESTIONS) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), encoding="utf-8")
    elif path.suffix == ".csv":
        Dataset.from_list(rows).to_csv(path)
    elif path.suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif path.name == "saved":
        Dataset.from_list(rows).save_to_disk(path)
    else:
        DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(path)
    return path


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.parquet", "saved", "saved-with-splits"])
def test_local_files_give_the_same_rows(name: str, tmp_path: Path) -> None:
    recipe = dataset_recipe(write_rows(tmp_path / name), rename={"gold": "answer"}, system="Be brief.")
    rows, held_out = recipe_rows(recipe, seed=0)
    assert held_out == []
    assert rows == [
        {
            "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": row["question"]}],
            "answer": row["gold"],
            "level": "easy",
        }
        for row in QUESTIONS
    ]


def test_a_split_of_a_local_file_is_honoured_or_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl")
    rows, _ = recipe_rows(dataset_recipe(path, split="train[2:5]"), seed=0)
    assert [row["gold"] for row in rows] == [3, 4, 5]
    for name, said in (
        ("rows.jsonl", 'Unknown split "test"'),
        ("saved", "without splits"),
        ("saved-with-splits", "test"),
    ):
        with pytest.raises(DataError, match=said):
            recipe_rows(dataset_recipe(write_rows(tmp_path / name), split="test"), seed=0)
        with pytest.raises(DataError, match=r"dataset.name='main' has no effect"):
            recipe_rows(dataset_recipe(tmp_path / name, name="main"), seed=0)


def test_questions_become_conversations_unless_chat_is_off(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl")
    assert recipe_rows(dataset_recipe(path), 0)[0][0]["prompt"] == [{"role": "user", "content": "0 + 1?"}]
    assert recipe_rows(dataset_recipe(path, chat=False), 0)[0][0]["prompt"] == "0 + 1?"


def test_held_out_rows_are_no_training_rows(tmp_path: Path) -> None:
    recipe = dataset_recipe(write_rows(tmp_path / "rows.jsonl"), held_out=4)
    rows, held_out = recipe_rows(recipe, seed=0)
    golds = [row["gold"] for row in rows], [row["gold"] for row in held_out]
    assert len(golds[1]) == 4 and sorted(golds[0] + golds[1]) == list(range(1, 11))
    assert recipe_rows(recipe, seed=0) == (rows, held_out)
    assert recipe_rows(recipe, seed=1) != (rows, held_out)


def test_rows_keep_their_numbers_behind_the_split(tmp_path: Path) -> None:
    tokenizer = PromptTokenizer(tiny_tokenizer())
    path = write_rows(tmp_path / "rows.jsonl")
    for part in recipe_rows(dataset_recipe(path, held_out=4, rename={"gold": "answer"}), seed=0):
        rows = tokenize_rows(part, tokenizer)
        assert [row.row for row in rows] == [row.columns["answer"] - 1 for row in rows], "answers are numbers + 1"
    broken = [*QUESTIONS[:7], {**QUESTIONS[7], "question": None}]
    path.write_text("".join(json.dumps(row) + "\n" for row in broken), encoding="utf-8")
    with pytest.raises(DataError, match="The prompt of row 7 is NoneType"):
        for part in recipe_rows(dataset_recipe(path, held_out=4), seed=0):
            tokenize_rows(part, tokenizer)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"prompt": "problem"}, "dataset.prompt='problem' is not a column"),
        (
            {"rename": {"answer": "gold"}},
            "dataset.rename names 'answer', which is not a column besides the question; those are ",
        ),
        ({"rename": {"gold": "level"}}, "would be called 'level'"),
        ({"rename": {"gold": "prompt"}}, "would be called 'prompt'"),
        ({"held_out": 10}, "dataset.held_out=10 leaves nothing to train on"),
    ],
)
def test_columns_that_do_not_fit_are_named(spec: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(said)):
        recipe_rows(dataset_recipe(write_rows(tmp_path / "rows.jsonl"), **spec), 0)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.jsonl", '{"question": "a", "gold": 1}\n{"question": "ä", "gold": 1}\n'),
        ("rows.csv", "question,gold\nä,1"),
    ],
)
def test_a_file_in_another_encoding_is_refused(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"line 2 is not in UTF-8 .*0xe4"):
        recipe_rows(dataset_recipe(path), 0)
    path.write_bytes(text.encode("utf-8"))
    assert recipe_rows(dataset_recipe(path), 0)[0][-1]["prompt"] == [{"role": "user", "content": "ä"}]


def test_planted_duplicates_are_left_out_whichever_side_they_come_to(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"prompt": f"What is {n} + {n}?", "answer": 2 * n} for n in range(20)]
    planted = [{"prompt": f"what  is {n}+{n}", "answer": 2 * n} for n in range(5)]
    clean, dirty = write_rows(tmp_path / "clean.jsonl", rows), write_rows(tmp_path / "dirty.jsonl", [*rows, *planted])
    found = 0
    for seed in range(5):
        _, held_out = recipe_rows(dataset_recipe(clean, prompt="prompt", held_out=8), seed)
        assert len(held_out) == 8 and not caplog.messages
        train, held_out = recipe_rows(dataset_recipe(dirty, prompt="prompt", held_out=8), seed)
        sides = [{normalize_text(row["prompt"][0]["content"]) for row in side} for side in (train, held_out)]
        assert not sides[0] & sides[1] and len(train) == 17
        found += 8 - len(held_out)
        assert bool(caplog.messages) is (len(held_out) < 8)
        caplog.clear()
    assert found > 5


GSM8K = [
    {"question": "Natalia sold 48 clips and then half as many. How many in all?",
     "answer": "She sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72.\n#### 72"},
    {"question": "A car costs $1,250 and tax is $3. What is paid?", "answer": "1250 + 3 = 1253\n#### 1,253"},
]  # fmt: skip
NUMINA = [
    {"problem": "What is the coefficient?", "solution": "Expand it.\nThe final answer is $\\boxed{\\frac{3}{8}}$.",
     "messages": [{"role": "user", "content": "..."}]},
    {"problem": "Evaluate.", "solution": "We get $\\boxed{12}$, no: $\\boxed{-4}$.",
     "messages": [{"role": "user", "content": "..."}]},
]  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_gsm8k_by_its_columns(suffix: str, tmp_path: Path) -> None:
    rows, _ = recipe_rows(dataset_recipe(write_rows(tmp_path / f"gsm8k{suffix}", GSM8K), gold="answer"), 0)
    assert [row["answer"] for row in rows] == ["72", "1,253"] and rows[0].keys() == {"prompt", "answer"}
    for name in ("number_match", "math_accuracy"):
        reward = make_reward(name)
        assert reward(completions=["It is 72.", "\\boxed{1253}"], answer=[row["answer"] for row in rows]) == [1.0, 1.0]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_numinamath_by_its_columns(suffix: str, tmp_path: Path) -> None:
    rows, _ = recipe_rows(
        dataset_recipe(write_rows(tmp_path / f"tir{suffix}", NUMINA), prompt="problem", gold="solution"), 0
    )
    assert [row["answer"] for row in rows] == ["\\frac{3}{8}", "-4"]
    assert rows[0]["solution"] == NUMINA[0]["solution"], "for rewards that take the whole solution"
    reward = make_reward("math_accuracy")
    assert reward(completions=["\\boxed{0.375}", "\\boxed{4}"], answer=[row["answer"] for row in rows]) == [1.0, 0.0]


def test_gold_columns_that_do_not_fit_are_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "a", "solution": "1", "answer": "x"}])
    for spec, said in (
        ({"gold": "gold"}, "dataset.gold='gold' is not a column"),
        ({"gold": "question"}, "dataset.gold='question' is not a column"),
        ({"gold": "solution"}, "would be called 'answer'"),
    ):
        with pytest.raises(DataError, match=said):
            recipe_rows(dataset_recipe(path, **spec), 0)
    rows, _ = recipe_rows(dataset_recipe(path, gold="solution", rename={"answer": "old"}), 0)
    assert rows[0]["answer"] == "1" and rows[0]["old"] == "x"


def test_recipes_give_arguments_to_a_task() -> None:
    recipe = load_recipe("quickstart", ["task=countdown", "task_arguments.level=2", "task_arguments.train=30"])
    rows, held_out = recipe_rows(recipe, 0)
    assert len(rows) == 30 and len(held_out) == 100 and len(rows[0]["numbers"]) == 4
    rewards, weights = recipe_rewards(recipe)
    assert [reward.__name__ for reward in rewards] == ["countdown"] and weights == [1.0]
    with pytest.raises(ConfigError, match="`task_arguments` and no `task`"):
        load_recipe("quickstart", ["task=null", "dataset={path: a.jsonl}", "task_arguments={level: 2}"])
