"""`grupo rewards check`, and the lists of tasks and rewards, as the command line gives them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from grupo.cli import main
from grupo.rewards.registry import REWARDS
from grupo.tasks.registry import TASKS, make_task


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["rewards", "check", *arguments]) == 2
    return capsys.readouterr().err


def write_lines(path: Path, entries: list[object]) -> str:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")
    return str(path)


def test_every_task_is_listed_with_levels_and_a_sample(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks"]) == 0
    output = capsys.readouterr().out
    assert re.findall(r"^([\w-]+): ", output, re.M) == list(TASKS) and output.count("sample: ") == len(TASKS)
    task = make_task("times-tables")
    assert f"times-tables: {task.description} {len(task.train)} training prompts" in output
    assert f"sample: {task.train[0]['prompt'][0]['content']!r} -> {task.train[0]['answer']!r}" in output
    assert "level 4: 6 numbers up to 100" in output and "reasoning-gym:NAME" in output


def test_every_reward_is_listed_with_signature_and_range(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards"]) == 0
    output = capsys.readouterr().out
    assert re.findall(r"^(\w+)\(", output, re.M) == list(REWARDS)
    assert output.count("\n    range: ") == len(REWARDS)
    (block,) = re.findall(r"^countdown\(.*?\n(?=\S)", output, re.M | re.S)
    assert "countdown(numbers_column='numbers'" in block and "range: 0 to 1" in block


def test_a_clean_recipe_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rewards", "check", "quickstart"]) == 0
    output = capsys.readouterr().out
    assert "number_match: gold 1, wrong 0, empty 0" in output and output.endswith("no faults found\n")


def test_faults_end_with_1_and_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("task: countdown\nrewards: [countdown, {name: tag_format, weight: 5}]", encoding="utf-8")
    assert main(["rewards", "check", str(recipe)]) == 1
    assert "\nformat-over-correctness (tag_format): " in capsys.readouterr().out
    assert main(["rewards", "check", str(recipe), "--set", "rewards=[countdown]"]) == 0


def test_rewards_by_name_on_a_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        "def broken(completions, answer, **kwargs):\n    return [float(m[-1]['content'] == a) for m, a in "
        "zip(completions, answer)][:-1]\n",
        encoding="utf-8",
    )
    assert main(["rewards", "check", "number_match", "tag_format", "--task", "word-problems"]) == 0
    assert main(["rewards", "check", "number_match", f"{own}:broken"]) == 1
    assert "wrong-count (broken): " in capsys.readouterr().out


def test_a_form_can_be_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "mine.py"
    own.write_text(
        "def plus(completions, answer, **kwargs):\n"
        "    return [float(m[-1]['content'].endswith(f'+{a}+')) for m, a in zip(completions, answer)]\n",
        encoding="utf-8",
    )
    assert main(["rewards", "check", f"{own}:plus"]) == 1
    assert main(["rewards", "check", f"{own}:plus", "--gold-form", "+{answer}+"]) == 0
    assert "answers were written as '+{answer}+'" in capsys.readouterr().out


def test_completions_of_a_run_are_taken_by_their_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = make_task("times-tables", 0).train[:10]
    record = [
        {"step": 1, "row": 99, "prompt_id": 0, "prompt": row["prompt"],
         "completions": [{"text": f"I say {n}.", "tokens": 4} for n in (1, 2)]}
        for row in rows
    ]  # fmt: skip
    path = write_lines(tmp_path / "completions.jsonl", [*record, *record])
    assert main(["rewards", "check", "quickstart", "--completions", path]) == 1
    output = capsys.readouterr().out
    assert "40 of 40 sampled completions get its lowest value" in output and "sampled 0" in output


def test_completions_with_columns_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"prompt": f"{n}?", "answer": n, "completion": f"It is {n if n % 3 else 5}."} for n in range(30, 60)]
    path = write_lines(tmp_path / "mine.jsonl", lines)
    assert main(["rewards", "check", "number_match", "--completions", path]) == 0
    assert "sampled 0.667" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("not json", "line 1: expected a JSON object"),
        ('{"prompt": "a"}', "line 1: expected a JSON object"),
        ('["a"]', "line 1: expected a JSON object"),
        ('{"prompt": "a", "completion": "b", "step": 1}', "the prompt is not one of the 121 prompts"),
        ('{"prompt": "a", "completions": "b"}', "line 1: expected a JSON object"),
        ('{"prompt": "a", "completions": [5]}', "line 1: expected a JSON object"),
        ("", "is empty"),
    ],
)
def test_a_file_of_completions_that_cannot_be_used(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.jsonl").write_text(line + "\n", encoding="utf-8")
    assert said in refused(capsys, "quickstart", "--completions", str(tmp_path / "c.jsonl"))


def test_a_file_of_completions_in_another_encoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.jsonl").write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    assert "not in UTF-8 (byte 13)" in refused(capsys, "quickstart", "--completions", str(tmp_path / "c.jsonl"))


def test_completions_may_hold_line_separators_and_be_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (row, *_) = make_task("times-tables").train
    answer = f"first\u2028then\x85{row['answer']}"
    entries = [
        {"prompt": row["prompt"], "completions": [{"text": answer}]},
        {"prompt": row["prompt"], "completion": [{"role": "assistant", "content": answer}]},
    ]
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries), encoding="utf-8")
    assert main(["rewards", "check", "number_match", "--completions", str(path)]) == 0
    assert "sampled 1" in capsys.readouterr().out


def test_wrong_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Did you mean 'number_match'" in refused(capsys, "number_mach")
    assert "no recipe file" in refused(capsys, "absent.yaml")
    assert "is for rewards given by name" in refused(capsys, "quickstart", "--task", "countdown")
    assert "--set changes a recipe" in refused(capsys, "number_match", "--set", "seed=1")
    assert "There is no task 'sort'" in refused(capsys, "number_match", "--task", "sort")
    assert "the file does not exist" in refused(capsys, "quickstart", "--completions", "absent.jsonl")
    assert "missing a required argument: 'target'" in refused(capsys, "token_length")
