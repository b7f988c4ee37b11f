"""The settings of a recipe, which says what to train on what. Imports no torch.

model: default                # name on the Hub, local folder, or `default`
task: times-tables            # a built-in task, or `dataset:` below
task_arguments: {level: 2}    # of the task
dataset: {path: data.jsonl, prompt: question, gold: solution, system: "...", held_out: 100}
rewards: [number_match, {name: tag_format, weight: 0.3, arguments: {tags: [think, answer]}}]
quantization: nf4             # of the frozen weights under the adapter: nf4, int8, or null
lora: {r: 16, alpha: 32}      # `lora: null` trains all weights
sft: {answer: "<answer>{answer}</answer>"}          # a short supervised phase before
training: {learning_rate: 1e-4, max_steps: 30}      # fields of GRPOConfig
eval: {enabled: true, samples_per_prompt: 4}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

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
    """Rows of a local file (.json, .jsonl, .csv, .parquet), of a saved dataset folder, or of a dataset on the Hub."""

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
    """Old column name -> new one, for the columns that rewards expect."""
    gold: str | None = None
    """Column with gold answers or whole solutions; the text after `####`, or the last box, becomes `answer`."""
    held_out: int = Field(default=0, ge=0)
    """Rows kept for evaluation, chosen by the seed."""


class LoraSpec(_Part):
    """A new LoRA adapter. Names are PEFT's, without a repeated `lora`."""

    r: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)
    target_modules: str | list[str] = "all-linear"
    exclude_modules: list[str] | None = None
    """Modules left without the adapter although `target_modules` includes them."""
    modules_to_save: list[str] | None = None
    """Modules trained in full in addition to the adapter, such as lm_head."""
    layers: list[int] | None = None
    """Indices of the layers that get the adapter, from 0; None: all."""
    rslora: bool = False
    """Scales by alpha / sqrt(r) instead of alpha / r (arXiv 2312.03732)."""
    dora: bool = False
    """Trains the magnitude of each row of the weights separately from its direction (arXiv 2402.09353)."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Biases of the base model that are trained."""

    @model_validator(mode="after")
    def _layers_need_names(self) -> LoraSpec:
        if self.layers is not None and isinstance(self.target_modules, str):
            raise ValueError(
                "`layers` needs the names of the modules in them: target_modules: [q_proj, v_proj, up_proj, down_proj]"
            )
        return self


class SftSpec(_Part):
    """A short supervised phase on demonstrations, on the same adapter, before GRPO."""

    answer: str | None = None
    """Template of the answer, in which `{name}` stands for the column `name`; None: the column `completion`."""
    dataset: DatasetSpec | None = None
    """Source of the demonstrations; None: the training rows of the recipe."""
    rows: int | None = Field(default=200, ge=1)
    """Number of demonstrations, drawn by the seed; None: all."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Fields of transformers.TrainingArguments."""


class EvalSpec(_Part):
    """The evaluation on held-out prompts before and after training."""

    enabled: bool = True
    samples_per_prompt: int = Field(default=4, ge=1)
    max_prompts: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0.0)


class Recipe(_Part):
    """All settings of `grupo train`."""

    model: str = "default"
    task: str | None = None
    task_arguments: dict[str, Any] = Field(default_factory=dict)
    dataset: DatasetSpec | None = None
    rewards: list[RewardSpec] = Field(default_factory=list)
    quantization: Literal["nf4", "int8"] | None = None
    """Quantization of the frozen weights under the adapter; needs bitsandbytes."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of the loaded weights, and of the arithmetic of quantized ones; None: float32, and for quantized weights on
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
            raise ValueError(
                f"It has both `task` ({self.task}) and `dataset`: remove one, for example by --set task=null"
            )
        if self.task is None and self.task_arguments:
            raise ValueError("It has `task_arguments` and no `task`: remove them, or name a task")
        if self.dataset is not None and not self.rewards:
            raise ValueError("A `dataset` needs `rewards`: name at least one (see `grupo rewards`)")
        return self


def parse_recipe(values: Mapping[str, Any]) -> Recipe:
    """The recipe with these settings.

    Raises:
        ConfigError: an unknown key (with the nearest name) or a value of the wrong type.
    """
    try:
        return Recipe.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def _explain(error: ValidationError) -> str:
    """The first problems in sentences, unknown keys with the nearest known one."""
    lines = []
    for problem in error.errors()[:5]:
        place = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"`{place}` is not a setting of a recipe.{_hint(problem['loc'])}")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"`{place}`: {message}." if place else f"{message}.")
    return "The recipe cannot be used. " + " ".join(lines)


def _hint(location: tuple[int | str, ...]) -> str:
    """The setting that an unknown one may stand for, or the place where it belongs."""
    parts: dict[str, type[BaseModel]] = {
        "dataset": DatasetSpec, "rewards": RewardSpec, "lora": LoraSpec, "sft": SftSpec, "eval": EvalSpec,
    }  # fmt: skip
    names = [part for part in location[:-1] if isinstance(part, str)]
    known = parts[names[-1]].model_fields if names else Recipe.model_fields
    similar = did_you_mean(str(location[-1]), known)
    if similar:
        return similar
    if location[0] == "rewards":
        return " Arguments of a reward go under `arguments`, as in {name: token_length, arguments: {target: 50}}."
    if len(location) == 1:
        return f" Fields of GRPOConfig go under `training`: training.{location[0]}. Other keys are {', '.join(known)}."
    return f" `{location[0]}` has {', '.join(known)}."
