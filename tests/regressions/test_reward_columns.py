"""Dataset columns and messages reach reward functions complete, aligned and unchanged.

TRL #2644 (columns), #4202 (shape of completions), #6636 (empty messages), PR #5067; MakazhanAlpamys/Soup #565.
"""

from __future__ import annotations

import copy

import datasets
import pandas as pd
import pytest

from grupo import GRPOConfig, GRPOTrainer
from grupo.errors import DataError, RewardError
from harness import SETTINGS, TOK, completions_of, make_trainer, train


def text_rows(count=6):
    return [
        {
            "prompt": f"{'ab' * index}{index}",
            "gold": index,
            "level": "hard" if index % 2 else "easy",
            "meta": {"id": index},
        }
        for index in range(count)
    ]


def chat_rows(count=6):
    return [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in text_rows(count)]


def listing(kind):
    return {"list": lambda rows: rows, "datasets": datasets.Dataset.from_list}[kind]


class Capture:
    """A reward function that records its arguments."""

    def __init__(self):
        self.calls = []

    def __call__(self, **keywords):
        self.calls.append(keywords)
        return [float(index % 2) for index in range(len(keywords["completions"]))]


@pytest.mark.parametrize("kind", ["list", "datasets"])
@pytest.mark.parametrize("rows", [text_rows(), chat_rows()], ids=["text", "messages"])
def test_every_column_arrives_aligned_with_its_prompt(tmp_path, kind, rows):
    capture = Capture()
    trainer = make_trainer(
        tmp_path,
        capture,
        listing(kind)(rows),
        eval_rows=listing(kind)(rows[:3]),
        shuffle_dataset=True,
        max_steps=3,
        num_generations_eval=3,
    )
    train(trainer)
    trainer.evaluate()
    by_id = {row["meta"]["id"]: row for row in rows}
    *training, evaluation = capture.calls
    assert len(training) == 3 and len(evaluation["prompts"]) == 9
    seen = []
    for call, size in [*((call, 4) for call in training), (evaluation, 3)]:
        ids = [meta["id"] for meta in call["meta"]]
        seen.append(ids[::size])
        assert ids == [number for number in ids[::size] for _ in range(size)], "each row G times, group after group"
        for position, number in enumerate(ids):
            for column in ("prompt", "gold", "level", "meta"):
                values = call["prompts" if column == "prompt" else column]
                assert values[position] == by_id[number][column]
        assert len(call["completions"]) == len(call["completion_ids"]) == len(ids)
    assert sorted(number for ids in seen[:3] for number in ids) == list(range(6)), "one epoch, every row once"
    assert [number for ids in seen[:3] for number in ids] != list(range(6)), "shuffled"
    assert seen[3] == [0, 1, 2]


def test_text_prompts_give_text_and_messages_give_messages(tmp_path):
    """One shape, the same in training and evaluation (TRL #4202)."""
    for rows, shaped in (
        (text_rows(), lambda text: text),
        (chat_rows(), lambda text: [{"role": "assistant", "content": text}]),
    ):
        capture = Capture()
        trainer = make_trainer(tmp_path / str(shaped("")), capture, rows, eval_rows=rows[:1])
        train(trainer)
        trainer.evaluate()
        for call in capture.calls:
            for completion, ids in zip(call["completions"], call["completion_ids"], strict=True):
                assert completion == shaped(TOK.decode(ids, skip_special_tokens=True))


def test_columns_by_name_by_keywords_and_with_defaults(tmp_path):
    seen = {}

    def by_name(completions, gold):
        seen["gold"] = gold
        return [0.0] * len(completions)

    def with_default(completions, bonus=3, level=None):
        seen["bonus"], seen["level"] = bonus, level
        return [1.0] * len(completions)

    def keyword_only(*, completion_ids, meta):
        seen["meta"] = meta
        return [float(len(ids)) for ids in completion_ids]

    train(make_trainer(tmp_path, [by_name, with_default, keyword_only], text_rows()))
    assert seen["gold"] == [0] * 4 + [1] * 4 and seen["bonus"] == 3
    assert seen["level"] == ["easy"] * 4 + ["hard"] * 4 and seen["meta"][4] == {"id": 1}


@pytest.mark.parametrize("name", ["completion", "prompt_id"])
def test_a_column_may_have_any_name_that_is_not_reserved(tmp_path, name):
    capture = Capture()
    train(make_trainer(tmp_path, capture, [{"prompt": "ab", name: "x"}, {"prompt": "cd", name: "y"}]))
    assert capture.calls[0][name] == ["x"] * 4 + ["y"] * 4


@pytest.mark.parametrize("where, name", [("training", "completion_ids"), ("evaluation", "log_extra")])
def test_a_column_named_like_an_argument_is_reported(tmp_path, name, where):
    rows = [{"prompt": "ab", name: "x"}] * 2
    data = {"rows": rows} if where == "training" else {"eval_rows": rows}
    with pytest.raises(DataError, match=f"Dataset column '{name}'.*Rename"):
        make_trainer(tmp_path, Capture(), **data)


class NoModel:
    """Fails the test on any access."""

    def __getattr__(self, name):
        raise AssertionError(f"the model was used: {name}")


def refuse_early(folder, rewards, rows, **more):
    """Constructs a trainer with a model that must not be used."""
    return GRPOTrainer(
        model=NoModel(),
        reward_funcs=rewards,
        args=GRPOConfig(output_dir=str(folder), **SETTINGS),
        train_dataset=rows,
        **more,
    )


@pytest.mark.parametrize("where, kind", [("training", "list"), ("evaluation", "datasets")])
def test_a_missing_column_is_named_with_its_function_before_the_model_is_used(tmp_path, where, kind):
    def judge(completions, solution, **columns):
        return [0.0] * len(completions)

    complete = [{"prompt": "ab", "solution": "x"}] * 2
    train_rows, eval_rows = (text_rows(), None) if where == "training" else (complete, listing(kind)(text_rows()))
    with pytest.raises(RewardError, match=r"'judge' requires 'solution'.*'gold', 'level', 'meta'"):
        refuse_early(tmp_path, judge, train_rows, eval_dataset=eval_rows)


@pytest.mark.parametrize("where, kind", [("training", "datasets"), ("evaluation", "list")])
def test_a_dataset_without_prompts_is_refused_before_the_model_is_used(tmp_path, where, kind):
    broken = listing(kind)([{"question": "ab", "gold": 1}] * 2)
    data = (broken, None) if where == "training" else (text_rows(), {"held-out": broken})
    with pytest.raises(DataError, match=r"no column `prompt`; its columns are \['gold', 'question'\].*rename_column"):
        refuse_early(tmp_path, Capture(), data[0], eval_dataset=data[1])


def test_a_dataset_with_splits_is_refused(tmp_path):
    """What load_dataset returns without split="train"."""
    splits = datasets.DatasetDict(
        {"train": datasets.Dataset.from_list(text_rows()), "test": datasets.Dataset.from_list([])}
    )
    with pytest.raises(DataError, match=r"several datasets: 'train', 'test'.*train_dataset=.*\['train'\]"):
        refuse_early(tmp_path, Capture(), splits)


def parquet(rows, folder):
    pd.DataFrame(rows).to_parquet(folder / "rows.parquet")
    return pd.read_parquet(folder / "rows.parquet")


HOLDERS = {
    "parquet in pandas": parquet,
    "tuples of messages": lambda rows, folder: [{**row, "prompt": tuple(row["prompt"])} for row in rows],
    **{
        f"datasets as {kind}": lambda rows, folder, kind=kind: datasets.Dataset.from_list(rows).with_format(kind)
        for kind in ("pandas", "arrow", "numpy", "torch")
    },
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_rows_are_the_same_in_every_container(tmp_path, holder):
    """Tables store lists as arrays, and a dataset may return its rows as tables."""
    rows = chat_rows(2)
    data, capture = holder(rows, tmp_path), Capture()
    trainer = make_trainer(tmp_path / "run", capture, data, eval_rows=data, num_generations_eval=1)
    train(trainer)
    trainer.evaluate()
    for call, size in zip(capture.calls, (4, 1), strict=True):
        assert call["prompts"] == [row["prompt"] for row in rows for _ in range(size)]
        assert [int(gold) for gold in call["gold"]] == [row["gold"] for row in rows for _ in range(size)]
        assert [int(meta["id"]) for meta in call["meta"]] == [row["gold"] for row in rows for _ in range(size)]


def test_a_column_without_a_name_is_refused_at_the_start(tmp_path):
    with pytest.raises(DataError, match="column named 3"):
        make_trainer(tmp_path, Capture(), [{"prompt": "ab", 3: 1}] * 2)


BROKEN_ROWS = {
    "empty messages": ({"prompt": [], "gold": 1}, "Row 1.*empty list of messages|prompt of row 1 is an empty list"),
    "no prompt": ({"gold": 1}, r"Row 1 .*prompt"),
    "none": ({"prompt": None, "gold": 1}, "prompt of row 1 is NoneType"),
    "number": ({"prompt": 7, "gold": 1}, "prompt of row 1 is int"),
    "texts": ({"prompt": ["ab"], "gold": 1}, "prompt of row 1 is list; it must be text, or a list of messages"),
    "no content": ({"prompt": [{"role": "user"}], "gold": 1}, "message of row 1 has no content"),
    "empty text": ({"prompt": "", "gold": 1}, "prompt of row 1 has no tokens"),
    "another column": ({"prompt": "ab", "gld": 1}, r"Row 1 .*'gld'.*'gold'"),
    "one column more": ({"prompt": "ab", "gold": 1, "extra": 2}, r"Row 1 .*'extra'"),
    "one column less": ({"prompt": "ab"}, r"Row 1 .*'gold'"),
}


@pytest.mark.parametrize("row, message", BROKEN_ROWS.values(), ids=BROKEN_ROWS)
def test_an_unusable_row_is_named_at_the_start(tmp_path, row, message):
    """Also in evaluation sets, which are used much later."""
    rows = [{"prompt": "ab", "gold": 0}, row, {"prompt": "cd", "gold": 2}]
    for name, data in (("train", {"rows": rows}), ("eval", {"eval_rows": {"held-out": rows}})):
        with pytest.raises(DataError, match=message):
            make_trainer(tmp_path / name, Capture(), **data)


def test_messages_without_a_chat_template_are_refused_at_the_start(tmp_path):
    plain = copy.deepcopy(TOK)
    plain.chat_template = None
    with pytest.raises(DataError, match="no chat template"):
        make_trainer(tmp_path, Capture(), chat_rows(), tokenizer=plain)
    with pytest.raises(DataError, match="no chat template"):
        make_trainer(tmp_path / "eval", Capture(), text_rows(), eval_rows=chat_rows(), tokenizer=plain)


def test_reward_functions_cannot_change_the_data(tmp_path):
    rows = chat_rows()
    before = copy.deepcopy(rows)

    def vandal(prompts, completions, completion_ids, meta, gold, **columns):
        for prompt in prompts:
            prompt[0]["content"] = "changed"
        for completion in completions:
            completion[0]["content"] = "changed"
        for ids in completion_ids:
            ids.clear()
        for entry in meta:
            entry["id"] = -1
        scores = [float(index) for index in range(len(prompts))]
        prompts.clear()
        gold.clear()
        return scores

    capture = Capture()
    trainer = make_trainer(tmp_path, [vandal, capture], rows, max_steps=6)
    train(trainer)
    assert rows == before
    for call in capture.calls:
        assert all(prompt[0]["content"] != "changed" for prompt in call["prompts"])
        assert all(len(ids) > 0 for ids in call["completion_ids"]) and len(call["gold"]) == 8
        assert all(meta["id"] >= 0 for meta in call["meta"])
    assert all(completion["text"] != "changed" for completion in completions_of(trainer))


def test_text_beyond_ascii_survives(tmp_path):
    from tiny import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["é", "λ", "你好", "🙂"])
    rows = [
        {"prompt": "λ你好", "gold": "é\u2028🙂"},
        {"prompt": [{"role": "user", "content": "🙂é"}], "gold": "\u202e"},
    ]
    capture = Capture()
    script = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in ("🙂</s>", "λé</s>")]
    trainer = make_trainer(
        tmp_path,
        capture,
        rows,
        tokenizer=tokenizer,
        script=lambda prompt, place: script[place % 2],
        log_completions=True,
    )
    train(trainer)
    (call,) = capture.calls
    assert call["prompts"] == [rows[0]["prompt"]] * 4 + [rows[1]["prompt"]] * 4
    assert call["completions"][:2] == ["🙂", "λé"] and call["completions"][4] == [
        {"role": "assistant", "content": "🙂"}
    ]
    assert call["gold"] == [rows[0]["gold"]] * 4 + [rows[1]["gold"]] * 4
    assert [completion["text"] for completion in completions_of(trainer)] == ["🙂", "λé"] * 4
