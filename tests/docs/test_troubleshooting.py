"""The messages that docs/troubleshooting.md explains are messages of the code, and its settings and metrics exist."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path

import pytest

import grupo
from grupo.config import GRPOConfig
from grupo.utils.messages import pluralize

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
CELLS = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
QUOTED = [quoted for row in CELLS for cell in row for quoted in re.findall(r"`([^`]+)`", cell)]
MESSAGES = [quoted for quoted in QUOTED if "…" in quoted or (quoted.endswith(".") and " " in quoted)]


def filled(part: ast.expr) -> str:
    """A part of a string, … for what a run fills in; of `pluralize(number, noun)` the noun is known."""
    if isinstance(part, ast.Constant):
        return str(part.value)
    value = part.value if isinstance(part, ast.FormattedValue) else part
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "pluralize":
        return pluralize(2, ast.literal_eval(value.args[1])).replace("2", "…")
    return "…"


def texts() -> list[str]:
    """Every string of the package, with … in the places that a run fills in."""
    found = []
    for path in Path(grupo.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else filled(part) for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%\S*?[dsrf]", "…", node.value))
    return found


TEXTS = texts()


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_are_those_of_the_code(message: str) -> None:
    pieces = [piece.strip() for piece in message.split("…")]
    pattern = ".*?".join(map(re.escape, pieces))
    candidates = [text for text in TEXTS if all(piece in text for piece in pieces)]
    assert any(re.search(pattern, text, re.S) for text in candidates)


def test_settings_exist() -> None:
    fields = {field.name for field in dataclasses.fields(GRPOConfig)}
    named = {re.match(r"(\w+)=", quoted)[1] for quoted in QUOTED if re.match(r"\w+=", quoted)}  # type: ignore[index]
    named |= {quoted for quoted in QUOTED if re.fullmatch(r"[a-z]+(_[a-z]+)+", quoted)}
    others = {"completions", "frac_reward_zero_std", "math_verify", "math_accuracy", "peft_config"}
    others |= {"base_model_name_or_path", "processing_class", "attn_implementation", "chat_template"}
    assert named - others <= fields


def test_there_are_enough_messages_to_check() -> None:
    assert len(MESSAGES) > 25
