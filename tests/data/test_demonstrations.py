"""Demonstrations: prompt and answer of each form of row, with one BOS and one end token."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from grupo.data.demonstrations import (
    Demonstration,
    demonstrations,
    dialogues,
    drop_too_long,
    render_answer,
    sample_rows,
)
from grupo.data.prompts import PromptTokenizer
from grupo.errors import DataError
from grupo.tasks.registry import make_task
from tiny import BOS_CHAT_TEMPLATE, tiny_tokenizer

TEXT = [{"prompt": "2+2=", "completion": " 4"}, {"prompt": "a longer prompt:", "completion": " yes</s>"}]
MESSAGES = [
    {
        "prompt": [{"role": "user", "content": question}],
        "completion": [{"role": "assistant", "content": answer}],
    }
    for question, answer in (("2+2?", "4"), ("What is the sum of 10 and 11?", "[21]"))
]
# Opens the tag of the reasoning in the prompt, and removes the reasoning from past answers.
THINKING = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<a>{{ m['content'].split('</B>')[-1] }}</s>"
    "{% else %}<u>{{ m['content'] }}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<a><B>\n{% endif %}"
)
# As in chat models: a line break after the end of an answer.
ROLES = (
    "{% for m in messages %}{{ '<a>' if m['role'] == 'assistant' else '<u>' }}{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def shown(rows: Any, template: str | None = None, **tokenizer: Any) -> list[Demonstration]:
    return demonstrations(dialogues(rows, template), PromptTokenizer(tiny_tokenizer(**tokenizer)))


def texts(item: Demonstration, **tokenizer: Any) -> tuple[str, str]:
    return tuple(tiny_tokenizer(**tokenizer).decode(list(ids)) for ids in (item.prompt_ids, item.answer_ids))  # type: ignore[return-value]


def test_each_form_of_row() -> None:
    assert [texts(item) for item in shown(TEXT)] == [("2+2=", " 4</s>"), ("a longer prompt:", " yes</s>")]
    conversation = [{"messages": [*MESSAGES[1]["prompt"], *MESSAGES[1]["completion"]]}]
    for rows in (MESSAGES[1:], conversation, [{**MESSAGES[1], "completion": "[21]"}]):
        (item,) = shown(rows, chat_template=ROLES)
        assert texts(item) == ("<u>What is the sum of 10 and 11?<end>\n<a>", "[21]<end>\n")
    task = make_task("times-tables")
    row = task.train[5]
    (item,) = shown([row], "{question} [{answer}]", chat_template=BOS_CHAT_TEMPLATE)
    question = row["prompt"][0]["content"]
    assert texts(item) == (f"<s><u>{question}<end><a>", f"{question} [{row['answer']}]</s>")


def test_the_prompt_is_the_one_that_grpo_samples_from() -> None:
    for rows in (TEXT, MESSAGES):
        tokenizer = PromptTokenizer(tiny_tokenizer())
        assert [item.prompt_ids for item in demonstrations(dialogues(rows), tokenizer)] == [
            tokenizer(r["prompt"]) for r in rows
        ]


@pytest.mark.parametrize("adds_bos", [False, True])
def test_text_ends_and_begins_once(adds_bos: bool) -> None:
    for item in shown(TEXT, adds_bos=adds_bos):
        ids = [*item.prompt_ids, *item.answer_ids]
        assert ids.count(0) == adds_bos and ids.count(1) == 1 and ids[-1] == 1


def test_answers_are_appended_where_the_template_changes_the_prompt(caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="grupo")
    rows = [{"prompt": MESSAGES[0]["prompt"], "completion": text} for text in ("<B>\nsum</B>4", "sum</B>4")]
    for item in shown(rows, chat_template=THINKING):
        assert texts(item, chat_template=THINKING) == ("<u>2+2?<end><a><B>\n", "sum</B>4</s>")
    assert caplog.text.count("Answers are appended to the prompts unchanged") == 1


def test_templates_of_answers() -> None:
    row = {"prompt": "How many?", "answer": 42, "steps": "6 * 7"}
    assert render_answer(r"{steps}, so \boxed{{answer}}", row, 0) == r"6 * 7, so \boxed{42}"
    assert render_answer("{question} {answer}", row, 0) == "How many? 42"
    assert render_answer("{question}", {**row, "question": "own"}, 0) == "own"


@pytest.mark.parametrize(
    ("rows", "template", "said"),
    [
        ([], None, "no rows"),
        ([{"prompt": "a"}], None, r"Row 0 has no `completion`.*sft.answer"),
        ([{"prompt": "a", "answer": 1}], "{gold}", r"has \{gold\}, and row 0 has no such column.*answer"),
        ([{"prompt": "a", "answer": None}], "{answer}", "no value in it"),
        ([{"prompt": "a", "completion": " "}], None, "The answer of row 0 is empty"),
        ([{"prompt": "a", "completion": MESSAGES[0]["completion"]}], None, "both must be of the same form"),
        ([{"question": "a"}], None, "Row 0 has no `prompt`"),
        ([{"messages": MESSAGES[0]["prompt"]}], None, "must end with a message"),
        ([{"prompt": "a", "completion": 4}], None, "The completion of row 0 is int"),
    ],
)
def test_rows_without_an_answer_are_refused(rows: Any, template: str | None, said: str) -> None:
    with pytest.raises(DataError, match=said):
        shown(rows, template)


def test_demonstrations_that_do_not_fit_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    items = shown(TEXT)
    assert drop_too_long(items, context_length=10, vocabulary_size=128) == items[:1]
    assert "1 of 2 demonstrations are longer than the model's context of 10 tokens" in caplog.text
    with pytest.raises(DataError, match="the shortest has 7"):
        drop_too_long(items, context_length=3, vocabulary_size=None)
    with pytest.raises(DataError, match="embeddings for 20 tokens"):
        drop_too_long(items, context_length=None, vocabulary_size=20)


def test_rows_are_drawn_by_the_seed() -> None:
    rows = [{"prompt": str(number)} for number in range(20)]
    assert sample_rows(rows, None, 0) == sample_rows(rows, 99, 0) == rows
    some = sample_rows(rows, 5, 0)
    assert some == sample_rows(rows, 5, 0) != sample_rows(rows, 5, 1)
    assert (
        [row["prompt"] for row in some]
        == [str(index) for index in some.indices]
        == sorted((row["prompt"] for row in some), key=int)
    )
