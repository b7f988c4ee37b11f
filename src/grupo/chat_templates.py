"""Built-in chat templates for tokenizers that have none. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grupo.errors import ConfigError
from grupo.utils.messages import did_you_mean

logger = logging.getLogger("grupo")


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template and the tokens that it needs."""

    jinja: str
    needed_tokens: tuple[str, ...] = ()
    """Tokens that must be in the vocabulary: otherwise they would be split, and no answer could end."""
    end_of_turn: str | None = None
    """Token that ends an answer; None: the end-of-sequence token of the tokenizer."""


_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\n' + message['content'] | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""

_LLAMA_3 = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

# Gemma has no system role: system messages are prepended to the first user message.
_GEMMA = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{%- set ns.system = message['content'] | trim + '\n\n' %}
{%- else %}
{{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' }}
{{- ns.system + message['content'] | trim + '<end_of_turn>\n' }}
{%- set ns.system = '' %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}"""

_MISTRAL = """\
{{- bos_token }}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
{%- if message['role'] == 'system' %}{%- set ns.system = message['content'] | trim + '\n\n' %}
{%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] | trim + eos_token }}
{%- else %}{{- '[INST] ' + ns.system + message['content'] | trim + ' [/INST]' }}{%- set ns.system = '' %}
{%- endif %}
{%- endfor %}"""

_PLAIN = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}{{- 'Assistant: ' + message['content'] | trim + eos_token + '\n\n' }}
{%- else %}{{- message['role'] | capitalize + ': ' + message['content'] | trim + '\n\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}"""

CHAT_TEMPLATES: dict[str, ChatTemplate] = {
    "chatml": ChatTemplate(_CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "llama-3": ChatTemplate(_LLAMA_3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "gemma": ChatTemplate(_GEMMA, ("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "mistral": ChatTemplate(_MISTRAL),
    "plain": ChatTemplate(_PLAIN),
}


def check_template_name(template: str | None) -> None:
    """
    Raises:
        ConfigError: neither the name of a built-in template nor a Jinja template.
    """
    if template is None or template in CHAT_TEMPLATES or "{" in template:
        return
    raise ConfigError(
        f"chat_template={template!r} is not one of {', '.join(map(repr, CHAT_TEMPLATES))}, and not a Jinja template."
        f"{did_you_mean(template, CHAT_TEMPLATES)}"
    )


def fitting_templates(tokenizer: Any) -> list[str]:
    """Names of the built-in templates whose tokens the tokenizer has."""
    return [name for name, template in CHAT_TEMPLATES.items() if not _missing_tokens(tokenizer, template)]


def set_chat_template(tokenizer: Any, template: str) -> Any:
    """Sets the chat template of the tokenizer and returns the tokenizer.

    The token that ends an answer in a built-in template becomes the end-of-sequence token. Both are saved with the
    tokenizer.

    Args:
        template: name of a built-in template, or a Jinja template.

    Raises:
        ConfigError: the name is unknown, or the tokenizer lacks tokens of the template.
    """
    check_template_name(template)
    built_in = CHAT_TEMPLATES.get(template)
    if built_in is not None:
        missing = _missing_tokens(tokenizer, built_in)
        if missing:
            raise ConfigError(
                f"chat_template={template!r} needs {', '.join(missing)}, which are not in the vocabulary of this "
                "tokenizer: they would be split into several tokens, and no answer could end. Templates that fit: "
                f"{', '.join(map(repr, fitting_templates(tokenizer)))}."
            )
    if tokenizer.chat_template:
        logger.warning("chat_template replaces the tokenizer's own chat template.")
    tokenizer.chat_template = template if built_in is None else built_in.jinja
    if built_in is not None and built_in.end_of_turn is not None:
        tokenizer.eos_token = built_in.end_of_turn
    return tokenizer


def get_chat_template(
    tokenizer: Any,
    chat_template: str = "chatml",
    mapping: Mapping[str, str] | None = None,
    map_eos_token: bool = True,
    system_message: str | None = None,
) -> Any:
    """`set_chat_template` with the name and arguments of Unsloth.

    Raises:
        ConfigError: also where another argument is set to something that is not supported.
    """
    if any(name != meant for name, meant in (mapping or {}).items() if name in ("role", "content")):
        raise ConfigError(
            f"mapping={mapping!r}: messages must have the keys role and content. Rename them in the data."
        )
    if not map_eos_token:
        raise ConfigError(
            "map_eos_token=False is not supported: the token that ends an answer is always the end-of-sequence token."
        )
    if system_message is not None:
        raise ConfigError(
            "system_message is not supported: put it into the data as the first message of each conversation."
        )
    return set_chat_template(tokenizer, chat_template)


def _missing_tokens(tokenizer: Any, template: ChatTemplate) -> list[str]:
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in template.needed_tokens if token not in vocabulary]
    has_end = template.end_of_turn is not None or tokenizer.eos_token
    return missing if has_end else [*missing, "an end-of-sequence token"]
