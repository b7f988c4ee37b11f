"""Model cards: valid metadata for any name, and a round trip through a run folder and the Hub's form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from grupo.runs.model_card import card_for_hub, card_from_files, is_filled_in, model_card

RESULTS = {"held-out accuracy before": "10.0% (...)", "held-out accuracy after": "20.0% (...)", "change": "+10.0"}


def card(base_model: str, **changes: Any) -> str:
    values: dict[str, Any] = {
        "title": "run", "folder": "run", "is_adapter": True, "summary": "Trained.", "results": RESULTS,
        "recipe": "task: sums", "log": [],
    }  # fmt: skip
    return model_card(base_model=base_model, **{**values, **changes})


@pytest.mark.parametrize(
    "name", ["org/name", "C: a # b", "[x", "yes", "1e5", "@at", "- dash", 'a "quoted" name', "line\nbreak", "ünï"]
)
def test_any_base_model_survives(name: str, tmp_path: Path) -> None:
    """In the metadata of the card, and when another card is made from it."""
    (tmp_path / "README.md").write_text(card(name), encoding="utf-8")
    loaded = ModelCard.load(tmp_path / "README.md")
    assert loaded.data.base_model == name and loaded.data.library_name == "peft"
    assert loaded.data.tags == ["grpo", "grupo", "lora"] and loaded.data.pipeline_tag == "text-generation"
    exported = card_from_files(tmp_path / "merged", tmp_path, base_model="/where/it/was/cached", is_adapter=False)
    data = ModelCard(exported).data
    assert data.base_model == name and data.library_name == "transformers" and data.tags == ["grpo", "grupo"]
    assert all(f"| {quantity} | {value} |" in exported for quantity, value in RESULTS.items())


def test_only_a_name_on_the_hub_is_sent_there() -> None:
    assert ModelCard(card_for_hub(card("org/name"), ["mine"])).data.tags == ["grpo", "grupo", "lora", "mine"]
    assert ModelCard(card_for_hub(card("org/name"), [])).data.base_model == "org/name"
    assert ModelCard(card_for_hub(card("/home/me/model"), [])).data.base_model is None


def test_a_template_counts_as_no_card(tmp_path: Path) -> None:
    template = "---\nbase_model: other/name\n---\n[More Information Needed]"
    assert not is_filled_in(template) and not is_filled_in(" \n") and is_filled_in("mine")
    (tmp_path / "README.md").write_text(template, encoding="utf-8")
    made = card_from_files(tmp_path, tmp_path, base_model="org/name", is_adapter=True)
    assert ModelCard(made).data.base_model == "org/name" and "No held-out evaluation" in made
