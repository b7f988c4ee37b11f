"""The README.md of a run folder: what the model is, its results, and how to load it without grupo."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grupo._version import __version__
from grupo.runs.plots import REWARD_CURVE, metrics_table, training_log
from grupo.utils.messages import pluralize

TAGS = ("grpo", "grupo")


def model_card(
    *,
    title: str,
    folder: str,
    base_model: str,
    is_adapter: bool,
    summary: str,
    results: Mapping[str, str],
    recipe: str | None,
    log: list[dict[str, Any]],
    example: str | list[dict[str, Any]] | None = None,
    max_new_tokens: int = 256,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> str:
    """A short model card in the Hub's format.

    Args:
        folder: path of the model in the example code.
        base_model: name or path of the model that was trained.
        summary: one sentence about the training.
        results: quantity -> value with interval; empty without a held-out evaluation.
        recipe: YAML text.
        log: lines of `metrics.jsonl` as `training_log` reads them.
        example: a prompt of the run, as it is in the dataset.
    """
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        base_model=base_model,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=[*TAGS, *(["lora"] if is_adapter else [])],
    )
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in results.items())]
    plot = [f"![mean reward by step]({REWARD_CURVE})", ""] if len(log) > 1 else []
    code = _loading(folder, is_adapter)
    if example is not None:
        code += [
            *_prompting(example, chat_template_kwargs),
            f"output = model.generate(**inputs, max_new_tokens={max_new_tokens})",
            'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
        ]
    return "\n".join(
        [
            *("---", data.to_yaml().strip(), "---", ""),
            *(f"# {title}", "", summary, ""),
            *(table if results else ["No held-out evaluation was made before and after training."]),
            *("", "## Use", "", "```python", *code, "```", ""),
            *(["## Training", "", *plot, *metrics_table(log), ""] if log else []),
            *([f"## Recipe (grupo {__version__})", "", "```yaml", recipe.strip(), "```", ""] if recipe else []),
        ]
    )


def card_from_files(folder: Path, run: Path, *, base_model: str | None, is_adapter: bool) -> str:
    """A card for a model that has none, from the card, recipe and metrics of its run."""
    recipe, log = run / "recipe.yaml", training_log(run / "metrics.jsonl")
    text = (run / "README.md").read_text(encoding="utf-8") if (run / "README.md").is_file() else ""
    if is_filled_in(text):
        # The run's own name for the base model: not the place where it was cached.
        base_model = _parse(text).data.get("base_model") or base_model
    steps = f"trained for {pluralize(log[-1]['step'], 'step')} of GRPO with grupo" if log else "trained with grupo"
    return model_card(
        title=folder.resolve().name,
        folder=folder.resolve().name,
        base_model=base_model or "unknown",
        is_adapter=is_adapter,
        summary=f"{base_model or 'A model'}, {steps}.",
        results=dict(re.findall(r"^\| (held-out [^|]+|change) \| ([^|]+) \|$", text, flags=re.MULTILINE)),
        recipe=recipe.read_text(encoding="utf-8") if recipe.is_file() else None,
        log=log,
    )


def is_filled_in(card: str) -> bool:
    """False for an empty card, and for PEFT's template with placeholders."""
    return bool(card.strip()) and "[More Information Needed]" not in card


def card_for_hub(text: str, tags: Sequence[str]) -> str:
    """The card with more tags, and without a base model that is a local path, which the Hub would refuse."""
    card = _parse(text)
    card.data.tags = list(dict.fromkeys([*(card.data.tags or []), *TAGS, *tags]))
    base = card.data.base_model
    if base is not None and not (isinstance(base, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", base)):
        card.data.base_model = None
    return str(card)


def _parse(text: str) -> Any:
    from huggingface_hub import ModelCard

    return ModelCard(text, ignore_metadata_errors=True)


def _loading(folder: str, is_adapter: bool) -> list[str]:
    imports = ["from transformers import AutoTokenizer"]
    if is_adapter:
        imports = ["from peft import AutoPeftModelForCausalLM", *imports]
        model = f"AutoPeftModelForCausalLM.from_pretrained({folder!r})  # the base model with the adapter"
    else:
        imports = ["from transformers import AutoModelForCausalLM, AutoTokenizer"]
        model = f"AutoModelForCausalLM.from_pretrained({folder!r})"
    return [*imports, "", f"model = {model}", f"tokenizer = AutoTokenizer.from_pretrained({folder!r})"]


def _prompting(example: str | list[dict[str, Any]], chat_template_kwargs: dict[str, Any] | None) -> list[str]:
    if isinstance(example, str):
        return [f'inputs = tokenizer({example!r}, return_tensors="pt")']
    more = "".join(f", {name}={value!r}" for name, value in (chat_template_kwargs or {}).items())
    return [
        f"messages = {example!r}",
        "inputs = tokenizer.apply_chat_template(",
        f'    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True{more}',
        ")",
    ]
