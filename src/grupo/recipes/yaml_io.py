"""Recipes as YAML 1.2, in which 1e-4 is a number and `no` is text: reading, `--set` overrides, writing."""

from __future__ import annotations

import importlib.resources
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import YAMLError

from grupo.errors import ConfigError
from grupo.recipes.schema import Recipe, parse_recipe
from grupo.utils.messages import did_you_mean


def load_recipe(source: str | None, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file, or a built-in recipe by name, and applies `key.path=value` overrides.

    Raises:
        ConfigError: no such file, not YAML, an unknown key (with the nearest name) or a value of the wrong type.
    """
    name = source or "quickstart"
    values = _parse(_read(name), f"The recipe {name!r}")
    if not isinstance(values, dict):
        raise ConfigError(f"The recipe {name!r} must be a mapping with keys such as `model` and `task`.")
    for override in overrides:
        _apply_override(values, override)
    return parse_recipe(values)


def built_in_recipes() -> list[str]:
    folder = importlib.resources.files("grupo").joinpath("recipes")
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def built_in_text(name: str) -> str:
    """The YAML text of a built-in recipe.

    Raises:
        ConfigError: there is none of this name.
    """
    if name not in built_in_recipes():
        raise ConfigError(
            f"There is no built-in recipe {name!r}.{did_you_mean(name, built_in_recipes())} Built-in recipes: "
            f"{', '.join(built_in_recipes())}."
        )
    return importlib.resources.files("grupo").joinpath("recipes", f"{name}.yaml").read_text(encoding="utf-8")


def description(name: str) -> str:
    """The purpose of a built-in recipe: the comment in its first line."""
    return built_in_text(name).partition("\n")[0].removeprefix("#").strip()


def to_yaml(recipe: Recipe, *, with_defaults: bool = True) -> str:
    """The resolved recipe. It reads back as the same recipe, except for tokens of the Hub, where it may be uploaded."""
    values = recipe.model_dump(exclude_defaults=not with_defaults)
    for part in (values, values.get("sft") or {}):
        if "training" in part:
            part["training"] = _without_tokens(part["training"])
    text = io.StringIO()
    _yaml().dump(values, text)
    return text.getvalue()


def _without_tokens(training: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in training.items() if name not in ("hub_token", "token")}
    if isinstance(kept.get("model_init_kwargs"), dict):
        kept["model_init_kwargs"] = _without_tokens(kept["model_init_kwargs"])
    return kept


def _yaml() -> YAML:
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    return yaml


def _read(name: str) -> str | bytes:
    path = Path(name)
    if path.is_file():
        return path.read_bytes()
    if name in built_in_recipes():
        return built_in_text(name)
    raise ConfigError(
        f"There is no recipe file {name!r}, and no built-in recipe of that name."
        f"{did_you_mean(name, built_in_recipes())} Built-in recipes: {', '.join(built_in_recipes())}."
    )


def _parse(text: str | bytes, source: str) -> Any:
    try:
        return _yaml().load(text)
    except DuplicateKeyError as error:
        problem = f"line {error.problem_mark.line + 1}: {error.problem}. Remove one of them."
    except YAMLError as error:
        problem = f"{error}\nText with special characters needs quotes."
    raise ConfigError(f"{source} is not valid YAML: {problem}")


def _apply_override(values: dict[str, Any], override: str) -> None:
    path, separator, text = override.partition("=")
    keys = path.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"--set {override!r} is not of the form key=value, for example --set training.max_steps=6.")
    target = values
    for depth, key in enumerate(keys[:-1]):
        child = target.setdefault(key, {})
        if child is None:
            child = target[key] = {}
        if not isinstance(child, dict):
            place = ".".join(keys[: depth + 1])
            raise ConfigError(f"--set {override!r}: `{place}` is a value, not a group of settings.")
        target = child
    target[keys[-1]] = _parse(text, f"The value of --set {override!r}")
