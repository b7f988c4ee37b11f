"""Demonstrations: prompts with answers, for supervised fine-tuning.

A row has its answer in one of these forms:
    prompt and completion       both as text, or both as lists of messages
    messages                    a conversation whose last message is the answer
    prompt and other columns    the answer is rendered from them by a template such as "<answer>{answer}</answer>"
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grupo.data.decontamination import question_text
from grupo.data.prompts import IndexedRows, PromptTokenizer, Rows, original_indices, select_rows, validate_content
from grupo.errors import DataError

logger = logging.getLogger("grupo")


@dataclass(frozen=True)
class Dialogue:
    """A prompt and its answer: both text, or both lists of messages."""

    row: int
    """Index in the dataset, from 0."""
    prompt: str | list[dict[str, Any]]
    answer: str | list[dict[str, Any]]


@dataclass(frozen=True)
class Demonstration:
    """A dialogue as token ids."""

    row: int
    """Index in the dataset, from 0."""
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    """Ids of the answer with its end token; the loss is on these only."""


def dialogues(rows: Rows, template: str | None = None) -> list[Dialogue]:
    """Prompt and answer of every row, without a tokenizer.

    Args:
        template: text of the answer, in which `{name}` stands for the column `name`, and `{question}` for the question;
            None: the rows have `completion` or `messages`.

    Raises:
        DataError: a row has no answer, or the template names a missing column.
    """
    if not len(rows):
        raise DataError("There are no rows with demonstrations.")
    return [_dialogue(index, rows[place], template) for place, index in enumerate(original_indices(rows))]


def _dialogue(index: int, row: Mapping[str, Any], template: str | None) -> Dialogue:
    if "prompt" not in row and "messages" in row and template is None:
        messages = validate_content(index, row["messages"], "conversation")
        if isinstance(messages, str) or len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise DataError(f"The conversation of row {index} must end with a message of the role 'assistant'.")
        return Dialogue(index, messages[:-1], messages[-1:])
    if "prompt" not in row:
        raise DataError(f"Row {index} has no `prompt`, only {sorted(row)}.")
    prompt = validate_content(index, row["prompt"])
    if template is None and "completion" not in row:
        raise DataError(
            f"Row {index} has no `completion`, only {sorted(row)}. Render answers from its columns by a template, for "
            "example sft.answer: '<answer>{answer}</answer>'."
        )
    answer = (
        validate_content(index, row["completion"], "completion")
        if template is None
        else render_answer(template, row, index)
    )
    if isinstance(answer, str) and not answer.strip():
        raise DataError(f"The answer of row {index} is empty.")
    if isinstance(answer, str) and not isinstance(prompt, str):
        answer = [{"role": "assistant", "content": answer}]
    if isinstance(prompt, str) and not isinstance(answer, str):
        raise DataError(
            f"The prompt of row {index} is text and its completion a list of messages: both must be of the same form."
        )
    return Dialogue(index, prompt, answer)


def demonstrations(shown: Sequence[Dialogue], tokenizer: PromptTokenizer) -> list[Demonstration]:
    """Token ids of every dialogue.

    Raises:
        DataError: a prompt or an answer has no tokens, or the tokenizer has no chat template for messages.
    """
    return [_demonstration(dialogue, tokenizer) for dialogue in shown]


def _demonstration(dialogue: Dialogue, tokenizer: PromptTokenizer) -> Demonstration:
    prompt_ids, answer_ids = tokenizer.encode_with_answer(dialogue.prompt, dialogue.answer)
    if not prompt_ids or not answer_ids:
        raise DataError(f"The {'answer' if prompt_ids else 'prompt'} of row {dialogue.row} has no tokens.")
    return Demonstration(dialogue.row, prompt_ids, answer_ids)


def render_answer(template: str, row: Mapping[str, Any], index: int) -> str:
    r"""Answer of a row: `{name}` is its column, `{question}` its question, `\boxed{{answer}}` gives `\boxed{42}`."""

    def value(field: re.Match[str]) -> str:
        name = field[1]
        if name == "question" and name not in row:
            return question_text(row["prompt"])
        if row.get(name) is None:
            raise DataError(
                f"The answer template has {{{name}}}, and row {index} has no such column or no value in it. Its "
                f"columns are {', '.join(sorted(set(row) - {'prompt'}))}, and {{question}} is the question."
            )
        return str(row[name])

    return re.sub(r"\{([A-Za-z_]\w*)\}", value, template)


def sample_rows(rows: Rows, count: int | None, seed: int) -> IndexedRows:
    """`count` rows drawn by the seed, in their order; all if `count` is None or more than there are."""
    if count is None or count >= len(rows):
        return select_rows(rows, range(len(rows)))
    return select_rows(rows, sorted(random.Random(f"demonstrations, seed {seed}").sample(range(len(rows)), count)))


def drop_too_long(
    shown: Sequence[Demonstration], *, context_length: int | None, vocabulary_size: int | None
) -> list[Demonstration]:
    """The demonstrations that fit the model's context; a warning counts the others.

    Raises:
        DataError: none fits, or a token has no embedding.
    """
    largest = max(max(*item.prompt_ids, *item.answer_ids) for item in shown)
    if vocabulary_size is not None and largest >= vocabulary_size:
        raise DataError(
            f"A demonstration has the token id {largest}, and the model has embeddings for {vocabulary_size} tokens. "
            "After adding tokens to the tokenizer, call model.resize_token_embeddings(len(tokenizer))."
        )
    lengths = [len(item.prompt_ids) + len(item.answer_ids) for item in shown]
    kept = [item for item, size in zip(shown, lengths, strict=True) if context_length is None or size <= context_length]
    if not kept:
        raise DataError(
            f"No demonstration fits the model's context of {context_length} tokens; the shortest has {min(lengths)}."
        )
    if len(kept) < len(shown):
        logger.warning(
            "%d of %d demonstrations are longer than the model's context of %d tokens and are left out.",
            len(shown) - len(kept), len(shown), context_length,
        )  # fmt: skip
    return kept
