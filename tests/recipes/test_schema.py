"""Recipes: how they are read, overridden and written, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from grupo.config import GRPOConfig
from grupo.errors import ConfigError
from grupo.recipes.data import recipe_rows
from grupo.recipes.schema import Recipe
from grupo.recipes.yaml_io import built_in_recipes, load_recipe, to_yaml
from grupo.rewards.registry import make_reward


def written(folder: Path, content: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(content, encoding="utf-8")
    return str(path)


def refused(source: str | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refusal:
        load_recipe(source, overrides)
    return str(refusal.value)


# ---- reading ---------------------------------------------------------------------------------------------------------


def test_without_a_name_it_is_the_quickstart() -> None:
    assert load_recipe(None) == load_recipe("quickstart")
    assert load_recipe(None).task == "times-tables"


@pytest.mark.parametrize("name", built_in_recipes())
def test_built_in_recipes_hold_real_settings(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    GRPOConfig(**{**recipe.training, "output_dir": str(tmp_path)})
    for spec in recipe.rewards:
        make_reward(spec.name, **spec.arguments)
    rows, held_out = recipe_rows(recipe, seed=0)
    assert rows and held_out


@pytest.mark.parametrize("text", ["1e-4", "1E-4", "1.e-4", ".1e-3", "1.0e-4", "0.0001", "+1e-4"])
def test_numbers_are_numbers_however_they_are_written(text: str, tmp_path: Path) -> None:
    from_file = load_recipe(written(tmp_path, f"task: times-tables\ntraining: {{learning_rate: {text}}}"))
    from_override = load_recipe(None, [f"training.learning_rate={text}"])
    for recipe in (from_file, from_override):
        value = recipe.training["learning_rate"]
        assert isinstance(value, float) and value == 1e-4


def test_overrides_reach_every_depth() -> None:
    recipe = load_recipe(
        None,
        [
            "model=some/model",
            "lora.r=4",
            "eval.enabled=false",
            "training.max_steps=6",
            "training.output_dir=a=b",
            "training.model_init_kwargs.dtype=bfloat16",
            "rewards=[number_match, {name: tag_format, weight: 0.3}]",
        ],
    )
    assert recipe.model == "some/model"
    assert recipe.lora is not None and recipe.lora.r == 4 and recipe.lora.alpha == 32
    assert recipe.eval.enabled is False and recipe.eval.samples_per_prompt == 4
    assert recipe.training["max_steps"] == 6
    assert recipe.training["output_dir"] == "a=b"
    assert recipe.training["model_init_kwargs"] == {"dtype": "bfloat16"}
    assert [(spec.name, spec.weight) for spec in recipe.rewards] == [("number_match", 1.0), ("tag_format", 0.3)]
    assert load_recipe(None, ["lora=null"]).lora is None
    assert load_recipe(None, ["task=null", "dataset.path=x.jsonl", "rewards=[number_match]"]).dataset is not None


def test_the_resolved_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    recipe = Recipe.model_validate(
        {
            "model": "1e5",  # text that looks like a number
            "dataset": {"path": "ä.jsonl", "system": "Think.\nThen answer: yes", "rename": {"1e3": "answer"}},
            "rewards": ["number_match", {"name": "tag_format", "weight": 1e-3, "arguments": {"tags": ["a", "b"]}}],
            "lora": None,
            "training": {"learning_rate": 1e-6, "report_to": [], "save_strategy": "no", "max_grad_norm": float("inf")},
            "eval": {"max_prompts": None, "temperature": 0.0},
        }
    )
    assert load_recipe(written(tmp_path, to_yaml(recipe))) == recipe
    assert load_recipe(written(tmp_path, to_yaml(load_recipe(None)))) == load_recipe(None)


def test_a_bare_no_is_text(tmp_path: Path) -> None:
    """In YAML 1.1 it was false. Where a setting is true or false, it still is."""
    text = "task: times-tables\ntraining: {save_strategy: no, optim: on}\neval: {enabled: no}"
    for recipe in (
        load_recipe(written(tmp_path, text)),
        load_recipe(None, ["training={save_strategy: no, optim: on}"]),
    ):
        assert recipe.training == {"save_strategy": "no", "optim": "on"}
    assert load_recipe(written(tmp_path, text)).eval.enabled is False


def test_anchors_and_merged_keys_are_no_duplicates(tmp_path: Path) -> None:
    text = "task: times-tables\nlora: &l {r: 4, alpha: 8}\ntraining: {<<: [*l, {seed: 1}], r: 5}"
    assert load_recipe(written(tmp_path, text)).training == {"r": 5, "alpha": 8, "seed": 1}


def test_the_yaml_of_a_recipe_is_plain() -> None:
    """Anything that reads YAML can read it."""
    assert yaml.safe_load(to_yaml(load_recipe(None)))["task"] == "times-tables"


def test_tokens_of_the_hub_are_not_written_down() -> None:
    """The file and the card with it go to the Hub."""
    secret = {"hub_token": "hf_secret", "max_steps": 3, "model_init_kwargs": {"token": "hf_secret", "revision": "main"}}
    recipe = Recipe.model_validate({"task": "times-tables", "training": secret, "sft": {"training": secret}})
    for with_defaults in (True, False):
        written = yaml.safe_load(to_yaml(recipe, with_defaults=with_defaults))
        for part in (written, written["sft"]):
            assert part["training"] == {"max_steps": 3, "model_init_kwargs": {"revision": "main"}}
    assert recipe.training == secret


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("task: times-tables\nmodle: x", "`modle` is not a setting of a recipe. Did you mean 'model'?"),
        ("task: times-tables\nlora: {alfa: 3}", "`lora.alfa` is not a setting of a recipe. Did you mean 'alpha'?"),
        (
            "task: times-tables\neval: {enable: no}",
            "`eval.enable` is not a setting of a recipe. Did you mean 'enabled'?",
        ),
        (
            "task: times-tables\nrewards: [number_match, {name: tag_format, wieght: 2}]",
            "`rewards.1.wieght` is not a setting of a recipe. Did you mean 'weight'?",
        ),
        ("task: times-tables\ndataset: {path: x.jsonl}", "It has both `task` (times-tables) and `dataset`"),
        ("model: x", "It names no data: give `task`"),
        ("dataset: {path: x.jsonl}", "A `dataset` needs `rewards`"),
        ("dataset: {prompt: x}\nrewards: [number_match]", "`dataset.path`: Field required."),
        ("task: times-tables\nlora: {r: many}", "`lora.r`: Input should be a valid integer"),
        ("task: times-tables\nlora: {r: 0}", "`lora.r`: Input should be greater than or equal to 1"),
        ("task: times-tables\nlora: {layers: [0]}", "`lora`: `layers` needs the names of the modules"),
        (
            "task: times-tables\nsft: {dataset: {pth: x}}",
            "`sft.dataset.pth` is not a setting of a recipe. Did you mean 'path'?",
        ),
        ("task: times-tables\nrewards: number_match", "`rewards`: Input should be a valid list"),
        ("task: times-tables\ntraining: 3", "`training`: Input should be a valid dictionary"),
        (
            "task: times-tables\neval: {samples_per_prompt: 2.5}",
            "`eval.samples_per_prompt`: Input should be a valid integer",
        ),
        ("task: times-tables\nmodel: a\nmodel: b", 'line 3: found duplicate key "model"'),
        (
            "task: times-tables\ntraining:\n  max_steps: 3\n  seed: 1\n  max_steps: 4",
            'line 5: found duplicate key "max_steps"',
        ),
        ("task: times-tables\nlora: {r: 1, r: 1}", 'line 2: found duplicate key "r"'),
        ("task: [", "is not valid YAML"),
        ("just text", "must be a mapping"),
        ("", "must be a mapping"),
    ],
)
def test_mistakes_are_named(content: str, said: str, tmp_path: Path) -> None:
    assert said in refused(written(tmp_path, content))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"task: \xff\xfe")
    assert "is not valid YAML" in refused(str(path))


def test_an_unknown_recipe_names_the_nearest() -> None:
    message = refused("quickstar")
    assert "Did you mean 'quickstart'?" in message and "Built-in recipes: " in message


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.max_steps", "is not of the form key=value"),
        ("=3", "is not of the form key=value"),
        ("training..max_steps=3", "is not of the form key=value"),
        ("model.name=x", "`model` is a value, not a group of settings"),
        ("training.max_steps.more=x", "`training.max_steps` is a value, not a group of settings"),
        ("rewards=[number_match", "is not valid YAML"),
        ("lora={r: 1, r: 2}", 'found duplicate key "r"'),
        ("trainin.max_steps=3", "`trainin` is not a setting of a recipe. Did you mean 'training'?"),
        ("dataset.path=x.jsonl", "remove one, for example by --set task=null"),
    ],
)
def test_overrides_with_mistakes_are_named(override: str, said: str) -> None:
    assert said in refused(None, override)


def test_a_weight_that_is_no_finite_number_is_refused() -> None:
    for weight in (".nan", ".inf"):
        assert "`rewards.0.weight`" in refused(None, f"rewards=[{{name: number_match, weight: {weight}}}]")
