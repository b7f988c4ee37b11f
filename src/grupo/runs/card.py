"""The README.md of a run folder: what the model is, what came out, and how to load it without grupo."""

from __future__ import annotations

from typing import Any

from grupo import __version__


def model_card(
    *,
    title: str,
    folder: str,
    base_model: str,
    is_adapter: bool,
    summary: str,
    results: dict[str, str],
    recipe: str,
    example: str | list[dict[str, Any]],
    max_new_tokens: int,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> str:
    """A short model card in the Hub's format.

    Args:
        folder: where the model is, as the code on the card names it.
        base_model: the model that was trained, by name or path.
        summary: what was done, one sentence.
        results: what was measured -> value with interval; empty where nothing was evaluated.
        recipe: YAML text.
        example: a prompt of the run, as the dataset gave it.
    """
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in results.items())]
    tags = ["grpo", "grupo", *(["lora"] if is_adapter else [])]
    return "\n".join(
        [
            "---",
            f"base_model: {base_model}",
            f"library_name: {'peft' if is_adapter else 'transformers'}",
            "pipeline_tag: text-generation",
            f"tags: [{', '.join(tags)}]",
            "---",
            "",
            f"# {title}",
            "",
            summary,
            "",
            *(table if results else ["No held-out evaluation was made before and after training."]),
            "",
            "## Use",
            "",
            "```python",
            *_loading(folder, is_adapter),
            *_prompting(example, chat_template_kwargs),
            f"output = model.generate(**inputs, max_new_tokens={max_new_tokens})",
            'print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
            "```",
            "",
            f"## Recipe (grupo {__version__})",
            "",
            "```yaml",
            recipe.strip(),
            "```",
            "",
        ]
    )


def _loading(folder: str, is_adapter: bool) -> list[str]:
    imports = ["from transformers import AutoTokenizer"]
    if is_adapter:
        imports = ["from peft import AutoPeftModelForCausalLM", *imports]
        model = f"AutoPeftModelForCausalLM.from_pretrained({folder!r})  # the base model and the adapter on top"
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
