"""Recipes: one small YAML file that says what to train on what. Imports no torch.

model: default                # name on the Hub, local folder, or `default`
task: times-tables            # a built-in task, or `dataset:` below
task_arguments: {level: 2}    # of the task
dataset: {path: data.jsonl, prompt: question, gold: solution, system: "...", held_out: 100}
rewards: [number_match, {name: tag_format, weight: 0.3, arguments: {tags: [think, answer]}}]
quantization: nf4             # of the frozen weights below the adapter: nf4, int8, or null
lora: {r: 16, alpha: 32}      # `lora: null` trains all weights
sft: {answer: "<answer>{answer}</answer>"}          # a short supervised phase before
training: {learning_rate: 1e-4, max_steps: 30}      # fields of GRPOConfig
eval: {enabled: true, samples_per_prompt: 4}
"""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from grupo.errors import ConfigError
from grupo.utils.messages import did_you_mean


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RewardSpec(_Part):
    """A built-in reward by name."""

    name: str
    weight: float = Field(default=1.0, allow_inf_nan=False)
    arguments: dict[str, Any] = Field(default_factory=dict)


class DatasetSpec(_Part):
    """Rows from a local file (.json, .jsonl, .csv, .parquet), a saved dataset folder, or the Hub."""

    path: str
    name: str | None = None
    """Configuration on the Hub."""
    split: str = "train"
    prompt: str = "prompt"
    """Column with the question: text, or a list of messages."""
    system: str | None = None
    """System message put before each question; text questions become conversations."""
    chat: bool = True
    """Text questions become conversations; False continues them as plain text."""
    rename: dict[str, str] = Field(default_factory=dict)
    """Old column name -> new one, for what the rewards expect."""
    gold: str | None = None
    """Column with gold answers or whole solutions; what follows `####`, or the last box, becomes `answer`."""
    held_out: int = Field(default=0, ge=0)
    """Rows that are kept for evaluation, chosen by the seed."""


class LoraSpec(_Part):
    """A fresh LoRA adapter. The names are shorter than peft's where those repeat `lora`."""

    r: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    target_modules: str | list[str] = "all-linear"
    exclude_modules: list[str] | None = None
    """Modules that `target_modules` would take in, and that are left as they are."""
    modules_to_save: list[str] | None = None
    """Modules that are trained whole beside the adapter, such as lm_head."""
    layers: list[int] | None = None
    """Numbers of the layers that get the adapter, from 0; None: all."""
    rslora: bool = False
    """Scales by alpha / sqrt(r) instead of alpha / r (arXiv 2312.03732)."""
    dora: bool = False
    """Trains the length of each row of the weights apart from its direction (arXiv 2402.09353)."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases of the base model are trained."""

    @model_validator(mode="after")
    def _layers_need_names(self) -> LoraSpec:
        if self.layers is not None and isinstance(self.target_modules, str):
            raise ValueError(
                "`layers` needs the modules in them by name, as in target_modules: [q_proj, v_proj, up_proj, down_proj]"
            )
        return self


class SftSpec(_Part):
    """A short supervised phase on demonstrations, on the same adapter, before GRPO."""

    answer: str | None = None
    """The answer to show, a text in which `{name}` stands for the column `name`; None: the column `completion`."""
    dataset: DatasetSpec | None = None
    """Where demonstrations come from; None: the training rows of the recipe."""
    rows: int | None = Field(default=200, ge=1)
    """So many of them, drawn by the seed; None: all."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Fields of transformers.TrainingArguments."""


class EvalSpec(_Part):
    """The evaluation on held-out prompts before and after training."""

    enabled: bool = True
    samples_per_prompt: int = Field(default=4, ge=1)
    max_prompts: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0.0)


class Recipe(_Part):
    """Everything `grupo train` needs to know."""

    model: str = "default"
    task: str | None = None
    task_arguments: dict[str, Any] = Field(default_factory=dict)
    dataset: DatasetSpec | None = None
    rewards: list[RewardSpec] = Field(default_factory=list)
    quantization: Literal["nf4", "int8"] | None = None
    """Of the frozen weights below the adapter; needs bitsandbytes."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Of the weights that are loaded, and of the arithmetic of quantised ones; None: float32, and for quantised ones on
    an accelerator bfloat16 or else float16."""
    lora: LoraSpec | None = Field(default_factory=LoraSpec)
    sft: SftSpec | None = None
    training: dict[str, Any] = Field(default_factory=dict)
    eval: EvalSpec = Field(default_factory=EvalSpec)

    @field_validator("rewards", mode="before")
    @classmethod
    def _names_are_rewards(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        return [{"name": item} if isinstance(item, str) else item for item in value]

    @model_validator(mode="after")
    def _one_source(self) -> Recipe:
        if self.task is None and self.dataset is None:
            raise ValueError("It names no data: give `task` (see `grupo tasks`) or `dataset`")
        if self.task is not None and self.dataset is not None:
            raise ValueError(f"It has `task` ({self.task}) and `dataset`: take one out, for example by --set task=null")
        if self.task is None and self.task_arguments:
            raise ValueError("`task_arguments` belong to a `task`, and there is none: take them out")
        if self.dataset is not None and not self.rewards:
            raise ValueError("A `dataset` needs `rewards`: name at least one (see `grupo rewards`)")
        return self


def load_recipe(source: str | None, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe file, or a built-in recipe by name, and applies `key.path=value` overrides.

    Raises:
        ConfigError: no such file, not YAML, an unknown key (with the nearest name) or a value of the wrong type.
    """
    values = _read(source)
    for override in overrides:
        _apply_override(values, override)
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


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
    """What a built-in recipe is for: the comment in its first line."""
    return built_in_text(name).partition("\n")[0].removeprefix("#").strip()


def _read(source: str | None) -> dict[str, Any]:
    name = source or "quickstart"
    path = Path(name)
    if path.is_file():
        text: str | bytes = path.read_bytes()
    elif name in built_in_recipes():
        text = built_in_text(name)
    else:
        raise ConfigError(
            f"There is no recipe file {name!r}, and no built-in recipe of that name."
            f"{did_you_mean(name, built_in_recipes())} Built-in recipes: {', '.join(built_in_recipes())}."
        )
    try:
        values = yaml.load(text, Loader=_Loader)
    except _DuplicateKey as error:
        raise ConfigError(f"In the recipe {name!r}, {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"The recipe {name!r} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"The recipe {name!r} must be a mapping with keys such as `model` and `task`.")
    return values


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads 1e-4 as text; everyone who writes it means the number. A key that is there twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if isinstance(key_node, yaml.ScalarNode) and key != "<<":
                if key in seen:
                    raise _DuplicateKey(key, seen[key], line)
                seen[key] = line
        return super().construct_mapping(node, deep)


class _DuplicateKey(yaml.YAMLError):
    def __init__(self, key: str, first_line: int, line: int) -> None:
        super().__init__(f"`{key}` is there twice, in lines {first_line} and {line}. Take one of them out.")


class _Dumper(yaml.SafeDumper):
    """Puts text that `_Loader` would read as a number in quotes."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
        list("-+0123456789."),
    )


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
    try:
        target[keys[-1]] = yaml.load(text, Loader=_Loader)
    except _DuplicateKey as error:
        raise ConfigError(f"--set {override!r}: {error}") from None
    except yaml.YAMLError:
        raise ConfigError(
            f"--set {override!r}: the value is not valid YAML. Put text with special characters in quotes."
        ) from None


def _explain(error: ValidationError) -> str:
    """The first problems in sentences, unknown keys with the nearest known one."""
    lines = []
    for problem in error.errors()[:5]:
        place = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            known = _fields_at(problem["loc"][:-1])
            lines.append(f"`{place}` is no setting of a recipe.{_hint(problem['loc'], known)}")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"`{place}`: {message}." if place else f"{message}.")
    return "The recipe cannot be used. " + " ".join(lines)


def _hint(location: tuple[int | str, ...], known: Mapping[str, Any]) -> str:
    """What the setting was meant to be, or where it belongs."""
    similar = did_you_mean(str(location[-1]), known)
    if similar:
        return similar
    if location[0] == "rewards":
        return " Arguments of a reward go under `arguments`, as in {name: token_length, arguments: {target: 50}}."
    if len(location) == 1:
        return f" Fields of GRPOConfig go under `training`: training.{location[0]}. Other keys are {', '.join(known)}."
    return f" `{location[0]}` has {', '.join(known)}."


def _fields_at(location: tuple[int | str, ...]) -> Mapping[str, Any]:
    parts: dict[str, type[BaseModel]] = {
        "dataset": DatasetSpec, "rewards": RewardSpec, "lora": LoraSpec, "sft": SftSpec, "eval": EvalSpec,
    }  # fmt: skip
    names = [part for part in location if isinstance(part, str)]
    model = parts.get(names[-1], Recipe) if names else Recipe
    return model.model_fields


def to_yaml(recipe: Recipe, *, with_defaults: bool = True) -> str:
    """The resolved recipe; reading it back gives the same one, but for tokens of the Hub, to which the text may go."""
    values = recipe.model_dump(exclude_defaults=not with_defaults)
    for part in (values, values.get("sft") or {}):
        if "training" in part:
            part["training"] = _without_tokens(part["training"])
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True))


def _without_tokens(training: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in training.items() if name not in ("hub_token", "token")}
    if isinstance(kept.get("model_init_kwargs"), dict):
        kept["model_init_kwargs"] = _without_tokens(kept["model_init_kwargs"])
    return kept
