"""What the documentation shows is run: Python and recipe examples, links, and the commands of the README."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from grupo.cli import _parser
from grupo.config import GRPOConfig
from grupo.data.tasks import TASKS
from grupo.recipe import DatasetSpec, EvalSpec, LoraSpec, Recipe, load_recipe
from grupo.rewards import FAULTS
from grupo.train_command import recipe_rewards
from tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_the_python_example_runs(tmp_path, monkeypatch):
    code, after = blocks(ROOT / "README.md", "python")
    model_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert model_id in code and "max_steps=20" in code
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code.replace(model_id, str(tmp_path / "model")).replace("max_steps=20", "max_steps=2"), names)
    trainer = names["trainer"]
    assert trainer.state.global_step == 2
    assert (tmp_path / "sums" / "metrics.jsonl").is_file()
    exec(after, names)
    assert type(names["merged"]).__name__ == "LlamaForCausalLM"


def test_the_recipe_example_is_a_recipe(tmp_path):
    (text,) = blocks(ROOT / "README.md", "yaml")
    recipe = Recipe.model_validate(yaml.safe_load(text))
    rewards, weights = recipe_rewards(recipe)
    assert [reward.__name__ for reward in rewards] == ["number_match", "tag_format"] and weights == [1.0, 0.3]
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    training = load_recipe(str(path)).training
    config = GRPOConfig(output_dir=str(tmp_path), **training)
    assert config.learning_rate == 1e-4


def test_recipe_page_names_every_key_and_its_example_loads(tmp_path, monkeypatch):
    page = ROOT / "docs" / "recipe.md"
    (text,), (code,) = blocks(page, "yaml"), blocks(page, "python")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_rewards.py").write_text(code, encoding="utf-8")
    (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
    rewards, _ = recipe_rewards(load_recipe("recipe.yaml"))
    apology, answer = [{"role": "assistant", "content": "Sorry, no."}], [{"role": "assistant", "content": "4"}]
    assert rewards[-1]([apology, answer]) == [0.0, 1.0]
    parts = {"dataset": DatasetSpec, "lora": LoraSpec, "eval": EvalSpec}
    keys = [*(key for key in Recipe.model_fields if key not in parts)]
    keys += [f"{part}.{field}" for part, spec in parts.items() for field in spec.model_fields]
    table = page.read_text(encoding="utf-8")
    assert [key for key in keys if f"`{key}`" not in table] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_commands(page):
    for block in blocks(page, "bash"):
        for line in block.splitlines():
            words = line.split("#")[0].split()
            if words[:1] == ["grupo"]:
                assert _parser().parse_args(words[1:]).command
            if words[:1] == ["make"]:
                assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_architecture_names_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for entry in (ROOT / "src" / "grupo").iterdir():
        if entry.suffix == ".py" and entry.name != "__init__.py":
            assert f"`{entry.name}`" in text, entry.name
        if entry.is_dir() and entry.name not in {"__pycache__", "recipes"}:
            assert f"`{entry.name}/`" in text, entry.name


@pytest.mark.parametrize("name", ["tasks.md", "reward_check.md"])
def test_pages_whose_examples_stand_alone(name, tmp_path, monkeypatch):
    page = ROOT / "docs" / name
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for example in blocks(page, "python"):
        exec(example, names)
    for text in blocks(page, "yaml"):
        (tmp_path / "recipe.yaml").write_text(text, encoding="utf-8")
        recipe_rewards(load_recipe("recipe.yaml"))


def test_every_task_and_every_fault_is_documented():
    tasks = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
    assert [name for name in TASKS if f"`{name}`" not in tasks] == []
    page = (ROOT / "docs" / "reward_check.md").read_text(encoding="utf-8")
    assert [name for name in FAULTS if f"| `{name}` |" not in page] == []


def test_the_examples_about_signal_run(tmp_path, monkeypatch):
    setup, *examples = blocks(ROOT / "docs" / "signal.md", "python")
    model_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert model_id in setup and '"max_steps": 20' in setup and len(examples) == 4
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(setup.replace(model_id, str(tmp_path / "model")).replace('"max_steps": 20', '"max_steps": 2'), names)
    for example in examples:
        exec(example, names)
    for folder, metric in (("refilled", "dynamic_sampling/rounds"), ("chosen", "loss"), ("course", "curriculum/level")):
        assert f'"{metric}"' in (tmp_path / folder / "metrics.jsonl").read_text()
    assert set(names["rates"]) <= {0.0, 0.25, 0.5, 0.75, 1.0} and len(names["rates"]) == len(names["sums"])
