"""From dataset rows to `Prompt` records: the only place that calls the chat template.

The ids made here are used everywhere: the engine continues them, and all log-probs are computed on them.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jinja2 import TemplateError

from grupo.chat_templates import fitting_templates
from grupo.errors import DataError, UnsupportedError
from grupo.types import Prompt

logger = logging.getLogger("grupo")


class Rows(Protocol):
    """A dataset: a length, and rows by index (`datasets.Dataset`, a list of dicts)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


class IndexedRows(list[dict[str, Any]]):
    """A part of a dataset whose rows keep their indices in it, for messages about them."""

    def __init__(self, rows: Iterable[dict[str, Any]], indices: Iterable[int]) -> None:
        super().__init__(rows)
        self.indices = tuple(indices)


def original_indices(dataset: Rows) -> Sequence[int]:
    """The index of each row in the dataset that the user has, from 0."""
    return dataset.indices if isinstance(dataset, IndexedRows) else range(len(dataset))


def select_rows(dataset: Rows, positions: Iterable[int]) -> IndexedRows:
    """The rows at these positions, with their original indices."""
    indices = original_indices(dataset)
    positions = list(positions)
    return IndexedRows(
        [dict(dataset[position]) for position in positions], [indices[position] for position in positions]
    )


@dataclass(frozen=True)
class TokenizedRow:
    """A dataset row with the token ids of its prompt."""

    row: int
    """Index in the dataset that the user has, from 0."""
    token_ids: tuple[int, ...]
    content: str | list[dict[str, Any]]
    columns: Mapping[str, Any]

    def to_prompt(self, draw_id: int) -> Prompt:
        return Prompt(id=draw_id, row=self.row, token_ids=self.token_ids, content=self.content, columns=self.columns)


class PromptTokenizer:
    """Turns the `prompt` of a row, text or messages, into token ids.

    Text gets the tokenizer's special tokens, except an EOS that it appends to every text. Messages go through its chat
    template with the generation prompt, and the template alone decides on special tokens. A text that already starts
    with the text of the BOS token gets one BOS, not two.
    """

    def __init__(self, tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        # After the end of a text a model would start a new one.
        self._adds_eos = tokenizer("a")["input_ids"][-1:] == [tokenizer.eos_token_id]
        self._warned_about_bos = False
        self._warned_about_answers = False

    def __call__(self, content: str | Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        if isinstance(content, str):
            return self._encode_text(content)
        return self._encode_messages(content)

    def encode_with_answer(
        self, content: str | Sequence[Mapping[str, Any]], answer: str | Sequence[Mapping[str, Any]]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids of a prompt, as `__call__` returns them, and those of the answer that follows, with its end token.

        Prompt and answer are rendered as one text or conversation. If that does not start with the ids of the prompt,
        the text of the answer is appended to the prompt, as a sampled answer would be.
        """
        prompt_ids = self(content)
        if isinstance(content, str):
            assert isinstance(answer, str)
            eos = self.tokenizer.eos_token or ""
            ended = answer if answer.endswith(eos) else answer + eos
            whole = self._encode_text(content + ended)
        else:
            whole = self._encode_messages([*content, *answer], add_generation_prompt=False)  # type: ignore[list-item]
        if whole[: len(prompt_ids)] == prompt_ids:
            return prompt_ids, whole[len(prompt_ids) :]
        return prompt_ids, self._appended(prompt_ids, answer if isinstance(answer, str) else _only_text(answer))

    def _appended(self, prompt_ids: Sequence[int], text: str) -> tuple[int, ...]:
        """The ids of an answer as a model would sample them after a prompt: its text and the end token."""
        if not self._warned_about_answers:
            self._warned_about_answers = True
            logger.info(
                "The chat template renders a prompt differently when its answer follows: some templates drop past "
                "reasoning, or open its tag in the prompt. Answers are appended to the prompts unchanged."
            )
        # A tag that the prompt has already opened is not opened again.
        opening = re.match(r"\s*(<[^<>/]+>)\n?", text)
        if opening and self.tokenizer.decode(list(prompt_ids)).rstrip().endswith(opening[1]):
            text = text[opening.end() :]
        ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        eos = self.tokenizer.eos_token_id
        return tuple(ids if eos is None or ids[-1:] == [eos] else [*ids, eos])

    def text(self, prompt: Prompt) -> str:
        """The rendered prompt as the model reads it, special tokens included."""
        return str(self.tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False))

    def _encode_text(self, text: str) -> tuple[int, ...]:
        ids = list(self.tokenizer(text)["input_ids"])
        if self._adds_eos:
            ids.pop()
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
            if not self._warned_about_bos:
                self._warned_about_bos = True
                logger.info(
                    "Prompts start with the text of the BOS token, and the tokenizer adds another one: one BOS is kept."
                )
        return tuple(ids)

    def _encode_messages(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> tuple[int, ...]:
        if not getattr(self.tokenizer, "chat_template", None):
            names = ", ".join(map(repr, fitting_templates(self.tokenizer)))
            raise DataError(
                "The dataset has conversational prompts (lists of messages), but the tokenizer has no chat template. "
                "Set chat_template (in GRPOConfig, or under `training` in a recipe) to a ready-made one that fits this "
                f"tokenizer: {names}. Or use the tokenizer of an instruct model, or give prompts as plain text."
            )
        encoded = self.tokenizer.apply_chat_template(
            # Datasets give all messages the same keys, with None for missing values; templates may test for a key.
            [
                {key: value for key, value in message.items() if value is not None or key == "content"}
                for message in messages
            ],
            add_generation_prompt=add_generation_prompt,
            tokenize=True,
            return_dict=True,
            **self.chat_template_kwargs,
        )
        return tuple(encoded["input_ids"])


def _only_text(answer: Sequence[Mapping[str, Any]]) -> str:
    if len(answer) != 1 or not isinstance(answer[0].get("content"), str):
        raise DataError(
            f"An answer has {len(answer)} messages; with this chat template it must be one message of text. Give the "
            "answer as plain text."
        )
    return str(answer[0]["content"])


def as_row_dataset(dataset: Any) -> Any:
    """The same data as rows that are dicts: a pandas table as a list, with None for missing values, and a dataset that
    is formatted as tables without that format; other data unchanged."""
    if getattr(dataset, "format", None) and dataset.format["type"] in ("pandas", "polars", "arrow"):
        return dataset.with_format(None)
    if hasattr(dataset, "iloc") and hasattr(dataset, "columns"):
        return dataset.astype(object).where(dataset.notna(), None).to_dict("records")
    return dataset


def column_names(dataset: Rows) -> list[str]:
    """The columns of a dataset that reward functions get: all except `prompt`. Reads at most the first row.

    Raises:
        DataError: the dataset is empty, its rows are not dicts, or it has no `prompt`.
    """
    if not len(dataset):
        raise DataError("The dataset has no rows. It needs at least as many prompts as one rollout.")
    names = getattr(dataset, "column_names", None)
    if not names:
        first = dataset[0]
        if not isinstance(first, Mapping):
            raise DataError(
                f"The rows of the dataset are {type(first).__name__}; they must be dicts with a `prompt`, as in "
                '[{"prompt": "..."}] or a datasets.Dataset.'
            )
        names = list(first)
    if nameless := [name for name in names if not isinstance(name, str)]:
        raise DataError(
            f"The dataset has a column named {nameless[0]!r}, which is not text. Reward functions get columns by name: "
            "rename it."
        )
    if "prompt" not in names:
        raise DataError(
            f"The dataset has no column `prompt`; its columns are {sorted(names)}. Rename the column with the "
            "question, for example dataset.rename_column('question', 'prompt')."
        )
    return [name for name in names if name != "prompt"]


def tokenize_rows(dataset: Rows, tokenizer: PromptTokenizer) -> list[TokenizedRow]:
    """Checks and tokenizes every row once, before the first step.

    Raises:
        DataError: the dataset is empty, a row has no usable `prompt` or other columns than the first row, or its prompt
            has no tokens.
    """
    names = column_names(dataset)
    indices = original_indices(dataset)
    return [_tokenize_row(index, dataset[place], names, indices[0], tokenizer) for place, index in enumerate(indices)]


def _tokenize_row(
    index: int, row: Mapping[str, Any], names: Sequence[str], first: int, tokenizer: PromptTokenizer
) -> TokenizedRow:
    """The tokenized row `index`, which must have the columns `names` of the row `first`."""
    if row.keys() != {"prompt", *names}:
        raise DataError(
            f"Row {index} has the columns {sorted(row)}, and row {first} has {sorted(['prompt', *names])}. Reward "
            "functions get one list per column: give every row the same columns, with None for missing values."
        )
    content = validate_content(index, row["prompt"])
    try:
        token_ids = tokenizer(content)
    except TemplateError as error:  # templates raise it for what they do not support, such as a system message
        raise DataError(
            f"The chat template cannot render the prompt of row {index}: {error}. Change its messages, or set "
            "tokenizer.chat_template to a template that takes them."
        ) from error
    if not token_ids:
        raise DataError(f"The prompt of row {index} has no tokens, so the model has nothing to continue: {content!r}.")
    columns = {name: row[name] for name in names}
    return TokenizedRow(row=index, token_ids=token_ids, content=content, columns=columns)


def validate_content(index: int, content: Any, what: str = "prompt") -> str | list[dict[str, Any]]:
    """The content of row `index`, messages as plain dicts.

    Raises:
        DataError: it is neither text nor messages of text.
    """
    if isinstance(content, str):
        return content
    if getattr(content, "ndim", 0) == 1:  # numpy, as tables hold lists
        content = content.tolist()
    if not isinstance(content, Sequence) or not all(isinstance(message, Mapping) for message in content):
        raise DataError(
            f"The {what} of row {index} is {type(content).__name__}; it must be text, or a list of messages like "
            '[{"role": "user", "content": "..."}].'
        )
    if not content:
        raise DataError(f"The {what} of row {index} is an empty list of messages. Remove the row or add a message.")
    for message in content:
        missing = {"role", "content"} - set(message)
        if missing:
            raise DataError(f"A message of row {index} has no {' and no '.join(sorted(missing))}: {dict(message)!r}.")
        _check_message_content(index, message)
    return [dict(message) for message in content]


def _check_message_content(index: int, message: Mapping[str, Any]) -> None:
    """Chat templates of text models would render other content than text as Python prints it, or leave it out."""
    content = message["content"]
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return
    parts = content if isinstance(content, Sequence) else []
    if any(isinstance(part, Mapping) and "image" in str(part.get("type")) for part in parts):
        raise UnsupportedError(f"A message of row {index} has an image. This version of grupo does not support images.")
    raise DataError(
        f"The content of a message of row {index} is {type(content).__name__}, not text: {content!r}. Give it as a "
        "single text; join the texts of content parts."
    )


def check_for_images(columns: Iterable[str]) -> None:
    """
    Raises:
        UnsupportedError: there is a column of images, which the model would not read.
    """
    found = sorted({"image", "images"}.intersection(columns))
    if found:
        raise UnsupportedError(
            f"The dataset has the column '{found[0]}'. Images are not supported by this version of grupo; remove the "
            "column to train on the text alone."
        )


def check_token_ids(rows: Sequence[TokenizedRow], vocabulary_size: int | None) -> None:
    """
    Raises:
        DataError: the model has no embedding for a token of a prompt, usually because only the tokenizer got new ones.
    """
    if vocabulary_size is None:
        return
    for row in rows:
        largest = max(row.token_ids)
        if largest >= vocabulary_size:
            raise DataError(
                f"The prompt of row {row.row} has the token id {largest}, and the model has embeddings for "
                f"{vocabulary_size} tokens. After adding tokens to the tokenizer, call "
                "model.resize_token_embeddings(len(tokenizer)); or use the tokenizer of the model."
            )


def apply_length_policy(
    rows: Sequence[TokenizedRow],
    *,
    max_prompt_length: int | None,
    overlong_prompts: str,
    max_completion_length: int,
    context_length: int | None,
    what: str = "training",
) -> list[TokenizedRow]:
    """Filters, refuses or truncates prompts longer than `max_prompt_length` tokens; never silently.

    A prompt that leaves no room for a whole completion in the model's context is refused.

    Raises:
        DataError: a prompt is too long; with the counts and with settings that would fit.
    """
    if max_prompt_length is not None:
        rows = _OVERLONG_POLICIES[overlong_prompts](rows, max_prompt_length, what)
    if context_length is not None:
        longest = max(len(row.token_ids) for row in rows)
        if longest + max_completion_length > context_length:
            count = sum(len(row.token_ids) + max_completion_length > context_length for row in rows)
            raise DataError(
                f"{count} of {len(rows)} {what} prompts do not fit: the longest has {longest} tokens, and with "
                f"max_completion_length={max_completion_length} that exceeds the model's context of {context_length}. "
                f"{_room(context_length - max_completion_length, context_length - longest)}"
            )
    return list(rows)


def _room(prompt_tokens: int, completion_tokens: int) -> str:
    """Settings that would fit: the longest prompts for these completions, the longest completions for these prompts."""
    ways = []
    if prompt_tokens > 0:
        ways.append(f"max_prompt_length={prompt_tokens} to filter them")
    if completion_tokens > 0:
        ways.append(f"max_completion_length={completion_tokens} to make room")
    return f"Set {', or '.join(ways)}." if ways else "Set both max_prompt_length and max_completion_length lower."


def _filter_overlong(rows: Sequence[TokenizedRow], limit: int, what: str) -> list[TokenizedRow]:
    kept = [row for row in rows if len(row.token_ids) <= limit]
    if not kept:
        shortest = min(len(row.token_ids) for row in rows)
        raise DataError(
            f"None of the {what} prompts ({len(rows)}) fits max_prompt_length={limit} tokens; the shortest has "
            f"{shortest}. Set max_prompt_length to at least {shortest}."
        )
    if len(kept) < len(rows):
        logger.warning(
            "%d of %d %s prompts are longer than max_prompt_length=%d tokens and are left out.",
            len(rows) - len(kept), len(rows), what, limit,
        )  # fmt: skip
    return kept


def _refuse_overlong(rows: Sequence[TokenizedRow], limit: int, what: str) -> list[TokenizedRow]:
    count = sum(len(row.token_ids) > limit for row in rows)
    if count:
        longest = max(len(row.token_ids) for row in rows)
        raise DataError(
            f"{count} of {len(rows)} {what} prompts are longer than max_prompt_length={limit} tokens; the longest has "
            f"{longest}. Set max_prompt_length={longest}, or overlong_prompts='filter' to drop them."
        )
    return list(rows)


def _truncate_left(rows: Sequence[TokenizedRow], limit: int, what: str) -> list[TokenizedRow]:
    count = sum(len(row.token_ids) > limit for row in rows)
    if count:
        logger.warning(
            "%d of %d %s prompts are longer than max_prompt_length=%d tokens; their first tokens are cut off, "
            "including special tokens of the chat template.",
            count, len(rows), what, limit,
        )  # fmt: skip
    return [
        TokenizedRow(row=row.row, token_ids=row.token_ids[-limit:], content=row.content, columns=row.columns)
        for row in rows
    ]


_OVERLONG_POLICIES = {"filter": _filter_overlong, "refuse": _refuse_overlong, "truncate_left": _truncate_left}


@dataclass(frozen=True)
class PromptOutcome:
    """The result of a prompt in a rollout."""

    prompt: Prompt
    rewards: tuple[float | None, ...]
    """(G,) total reward of each completion; None if unknown."""


def reward_columns(prompts: Sequence[Prompt]) -> dict[str, list[Any]]:
    """The dataset columns as reward functions get them: one list per column, with one entry per completion."""
    names = dict.fromkeys(name for prompt in prompts for name in prompt.columns)
    return {name: [prompt.columns.get(name) for prompt in prompts] for name in names}


def rows_hash(rows: Iterable[TokenizedRow]) -> str:
    """BLAKE2 hash of the training prompts, of their indices, and of the columns that reward functions get."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        # Without the memory addresses in the default repr of objects.
        text = re.sub(" at 0x[0-9a-f]+", "", repr((row.row, row.token_ids, row.columns)))
        digest.update(f"{text}\n".encode("utf-8", "backslashreplace"))
    return digest.hexdigest()
