"""Demonstrations: prompts with the answers that a model is shown in supervised fine-tuning.

A row shows an answer in one of these ways:
    prompt and completion       both as text, or both as lists of messages
    messages                    a conversation, whose last message is the answer
    prompt and other columns    the answer is written from them by a form such as "<answer>{answer}</answer>"
"""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grupo.data.decontamination import question_text
from grupo.data.prompts import PromptTokenizer, Rows, checked_content, row_numbers
from grupo.errors import DataError

logger = logging.getLogger("grupo")


@dataclass(frozen=True)
class Dialogue:
    """A prompt and its answer: both text, or both lists of messages."""

    row: int
    """Of the dataset, counted from 0."""
    prompt: str | list[dict[str, Any]]
    answer: str | list[dict[str, Any]]


@dataclass(frozen=True)
class Demonstration:
    """A dialogue as token ids."""

    row: int
    """Of the dataset, counted from 0."""
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    """With what ends an answer; the loss is on these alone."""


def dialogues(rows: Rows, form: str | None = None) -> list[Dialogue]:
    """Prompt and answer of every row, without a tokenizer.

    Args:
        form: the answer as a text in which `{name}` stands for the column `name`, and `{question}` for the question;
            None: the rows have `completion` or `messages`.

    Raises:
        DataError: a row has no answer, or the form names a column that is not there.
    """
    if not len(rows):
        raise DataError("There are no rows to show answers from.")
    return [_dialogue(number, rows[index], form) for index, number in enumerate(row_numbers(rows))]


def _dialogue(number: int, row: Mapping[str, Any], form: str | None) -> Dialogue:
    if "prompt" not in row and "messages" in row and form is None:
        messages = checked_content(number, row["messages"], "conversation")
        if isinstance(messages, str) or len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise DataError(f"The conversation of row {number} must end with an answer of the role 'assistant'.")
        return Dialogue(number, messages[:-1], messages[-1:])
    if "prompt" not in row:
        raise DataError(f"Row {number} has no `prompt`, only {sorted(row)}.")
    prompt = checked_content(number, row["prompt"])
    if form is None and "completion" not in row:
        raise DataError(
            f"Row {number} has no `completion`, only {sorted(row)}. Write answers from its columns by a form, for "
            "example sft.answer: '<answer>{answer}</answer>'."
        )
    answer = checked_content(number, row["completion"], "completion") if form is None else written(form, row, number)
    if isinstance(answer, str) and not answer.strip():
        raise DataError(f"The answer of row {number} is empty.")
    if isinstance(answer, str) and not isinstance(prompt, str):
        answer = [{"role": "assistant", "content": answer}]
    if isinstance(prompt, str) and not isinstance(answer, str):
        raise DataError(
            f"The prompt of row {number} is text and its completion a list of messages: make both the same."
        )
    return Dialogue(number, prompt, answer)


def demonstrations(shown: Sequence[Dialogue], tokenizer: PromptTokenizer) -> list[Demonstration]:
    """Token ids of every dialogue.

    Raises:
        DataError: a prompt or an answer has none, or the tokenizer has no chat template for messages.
    """
    return [_demonstration(dialogue, tokenizer) for dialogue in shown]


def _demonstration(dialogue: Dialogue, tokenizer: PromptTokenizer) -> Demonstration:
    prompt_ids, answer_ids = tokenizer.answered(dialogue.prompt, dialogue.answer)
    if not prompt_ids or not answer_ids:
        raise DataError(f"The {'answer' if prompt_ids else 'prompt'} of row {dialogue.row} has no tokens.")
    return Demonstration(dialogue.row, prompt_ids, answer_ids)


def written(form: str, row: Mapping[str, Any], number: int) -> str:
    r"""An answer: `{name}` is its column, `{question}` its question, `\boxed{{answer}}` gives `\boxed{42}`."""

    def value(place: re.Match[str]) -> str:
        name = place[1]
        if name == "question" and name not in row:
            return question_text(row["prompt"])
        if row.get(name) is None:
            raise DataError(
                f"The form of the answers has {{{name}}}, and row {number} has no such column or no value in it; its "
                f"columns are {', '.join(sorted(set(row) - {'prompt'}))}, and {{question}} is the question."
            )
        return str(row[name])

    return re.sub(r"\{([A-Za-z_]\w*)\}", value, form)


def chosen_rows(rows: Sequence[Any], count: int | None, seed: int) -> list[int]:
    """Places of `count` rows, drawn by the seed, in order; all where there are no more."""
    if count is None or count >= len(rows):
        return list(range(len(rows)))
    return sorted(random.Random(f"demonstrations, seed {seed}").sample(range(len(rows)), count))


def that_fit(
    shown: Sequence[Demonstration], *, context_length: int | None, vocabulary_size: int | None
) -> list[Demonstration]:
    """Those that fit into the model's context; says how many do not.

    Raises:
        DataError: none fits, or a token has no embedding.
    """
    largest = max(max(*item.prompt_ids, *item.answer_ids) for item in shown)
    if vocabulary_size is not None and largest >= vocabulary_size:
        raise DataError(
            f"A demonstration has the token id {largest}, and the model has embeddings for {vocabulary_size} tokens. "
            "After adding tokens to the tokenizer call model.resize_token_embeddings(len(tokenizer))."
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
