"""The stop token is part of the completion, every stop id counts, and the pad id has no meaning.

TRL PR #4970 (mask from the pad id), #6357 (pad = eos hid the EOS), #7039 (one of several stop ids), #3046, #2892.

x, y, z are tokens 10, 11, 12. Completions come out of the in-process engine, whose model is made to sample them.
"""

from __future__ import annotations

import pytest
import torch

from harness import (
    END,
    EOS,
    PAD,
    completions_of,
    given,
    gradient_of,
    ids_of,
    logs_of,
    make_trainer,
    never_stopping,
    recorded_batches,
    relative_error,
    scripted_sampling,
    snapshot,
    token_logprobs,
    train,
    unchanged,
)
from tiny import tiny_model, tiny_tokenizer

X, Y, Z = 10, 11, 12
SCORES = [0.0, 1.0, 1.0, 2.0]
ONE_PROMPT = {"per_device_train_batch_size": 4, "logprob_gap_warn": 1e3, "logprob_gap_stop": 1e3}


class Kept:
    """Returns the rewards 0, 1, 1, 2 and records texts and ids."""

    def __call__(self, completions, completion_ids, **columns):
        self.texts, self.ids = completions, completion_ids
        return SCORES


def sample(folder, monkeypatch, ids, *, stops=None, prompt="ab", tokenizer=None, **settings):
    """One step on four completions that are all sampled as `ids`: trainer, recorded rewards, micro-batch."""
    tokenizer = tokenizer or tiny_tokenizer()
    length = len(tokenizer(prompt)["input_ids"])
    model = scripted_sampling(tiny_model(), ids, length)
    if stops is not None:
        model.generation_config.eos_token_id = stops
    kept, batches = Kept(), recorded_batches(monkeypatch)
    trainer = make_trainer(
        folder,
        kept,
        [{"prompt": prompt}],
        model=model,
        tokenizer=tokenizer,
        max_completion_length=len(ids),
        **{**ONE_PROMPT, **settings},
    )
    train(trainer)
    (batch,) = [batch for batch in batches if batch.advantages.any()]
    return trainer, kept, batch


STOPPED = {
    "eos": ([X, Y, EOS, Z, Z], None, "xy"),
    "list with eos and end": ([X, Y, END, Z, Z], [EOS, END], "xy"),
    "list of one": ([X, Y, EOS, Z, Z], [EOS], "xy"),
    "list without the tokenizer's own": ([X, Y, EOS, Z, Z], [END], "xy"),
    "another one than the tokenizer's": ([X, Y, END, Z, Z], END, "xy"),
    "first of several": ([X, Y, END, EOS, Z], [EOS, END], "xy"),
    "pads after it": ([X, Y, EOS, PAD, PAD], None, "xy"),
    "no special token": ([X, Y, Z, X, X], [EOS, Z], "xy"),
    "no special token, and nothing else": ([X, Y, Z, X, X], Z, "xy"),
}


@pytest.mark.parametrize("ids, stops, text", STOPPED.values(), ids=STOPPED)
def test_the_stop_token_ends_a_completion_and_is_trained_on(tmp_path, monkeypatch, ids, stops, text):
    trainer, kept, batch = sample(tmp_path, monkeypatch, ids, stops=stops, mask_truncated_completions=True)
    assert batch.completion_ids.tolist() == [ids[:3]] * 2, "two of four rewards differ from the mean"
    assert batch.loss_mask.tolist() == [[True] * 3] * 2
    assert kept.ids == [ids[:3]] * 4 and kept.texts == [tiny_tokenizer().decode(ids[:2])] * 4
    (line,) = logs_of(trainer)
    assert line["completions/clipped_ratio"] == 0 and line["completions/mean_terminated_length"] == 3
    assert line["grad_norm"] == pytest.approx(0, abs=1e-6), "A and -A on one text"
    assert {completion["finish_reason"] for completion in completions_of(trainer)} == {"stop"}


def test_pad_is_eos(tmp_path, monkeypatch):
    """The same id ends a turn in the prompt, is the stop token, and pads: attended to, trained on, ignored."""
    tokenizer = tiny_tokenizer(pad="</s>")
    short, long = "a</s>b</s>c", "a much longer prompt</s>"
    script = {short: ["xy</s>", "x</s>", "xyz</s>", "xyzxyzxy"], long: ["</s>", "zzz</s>", "zz</s>", "z</s>"]}
    rewards = [3.0, 0.0, 1.0, 0.0, 0.0, 1.0, 5.0, 2.0]
    batches = recorded_batches(monkeypatch)
    trainer = make_trainer(
        tmp_path,
        given(rewards),
        [{"prompt": short}, {"prompt": long}],
        script=script,
        tokenizer=tokenizer,
        loss_type="dapo",
        scale_rewards="none",
    )
    watch = train(trainer)
    (batch,) = [batch for batch in batches if batch.advantages.any()]
    texts = [(prompt, text) for prompt in (short, long) for text in script[prompt]]
    advantages = [2.0, -1, 0, -1, -2, -1, 3, 0]
    lengths = [len(ids_of(text)) for _, text in texts]
    computed = [length for length, advantage in zip(lengths, advantages, strict=True) if advantage]
    assert sorted(batch.loss_mask.sum(1).tolist()) == sorted(computed), "pads are out, stop tokens are in"
    model = tiny_model()
    total = 0.0
    for (prompt, text), advantage in zip(texts, advantages, strict=True):
        logprobs = token_logprobs(model, ids_of(prompt), ids_of(text))
        total = total - advantage * torch.exp(logprobs - logprobs.detach()).sum() / sum(lengths)
    assert relative_error(watch.gradients[0], gradient_of(total, model)) <= 1e-5
    assert logs_of(trainer)[0]["completions/clipped_ratio"] == 1 / 8, "the one that reached the cap"


@pytest.mark.parametrize("pad", [None, "</s>"])
def test_the_pad_token_changes_nothing(tmp_path, pad):
    """Nor does its absence: sampled tokens, gradients and weights are the same."""
    results = []
    for name, tokenizer in (("own", tiny_tokenizer()), ("variant", tiny_tokenizer(pad=pad))):
        trainer = make_trainer(
            tmp_path / name,
            lambda completion_ids, **columns: [float(sum(ids)) for ids in completion_ids],
            tokenizer=tokenizer,
            max_steps=2,
            rows=[{"prompt": "ab"}, {"prompt": "a longer prompt</s>"}],
        )
        train(trainer)
        rewards = [completion["reward"] for completion in completions_of(trainer)]
        results.append((rewards, snapshot(trainer.model)))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


def test_a_stop_token_first_is_an_empty_completion_of_one_token(tmp_path, monkeypatch):
    trainer, kept, batch = sample(tmp_path, monkeypatch, [EOS, Z, Z, Z, Z])
    assert batch.loss_mask.tolist() == [[True]] * 2 and batch.completion_ids.tolist() == [[EOS]] * 2
    assert kept.texts == [""] * 4 and kept.ids == [[EOS]] * 4
    (line,) = logs_of(trainer)
    assert (
        line["completions/mean_length"] == line["completions/min_length"] == 1
        and line["completions/clipped_ratio"] == 0
    )


def test_empty_answers_are_trained_on(tmp_path):
    """Completions of one token with a reward: the stop token is learned."""
    script = {"ab": ["</s>", "xy</s>", "xyzxyzxy", "x</s>"], "cde": ["</s>"] * 4}
    rewards = [1.0, 0, 0, 0, 1.0, 1.0, 1.0, 1.0]
    trainer = make_trainer(tmp_path, given(rewards), script=script, max_steps=8, optim="sgd", learning_rate=0.5)
    before = float(token_logprobs(trainer.model, ids_of("ab"), [EOS]))
    train(trainer)
    assert float(token_logprobs(trainer.model, ids_of("ab"), [EOS])) > before + 0.1


@pytest.mark.parametrize("masked", [False, True], ids=["", "mask_truncated"])
def test_without_a_stop_token_everything_is_truncated(tmp_path, monkeypatch, masked):
    model = never_stopping(tiny_model())
    batches = recorded_batches(monkeypatch)
    trainer = make_trainer(
        tmp_path,
        given([float(index % 4) for index in range(8)]),
        model=model,
        mask_truncated_completions=masked,
        max_completion_length=5,
    )
    before = snapshot(model)
    watch = train(trainer)
    (line,) = logs_of(trainer)
    assert line["completions/clipped_ratio"] == 1 and line["completions/mean_length"] == 5
    assert "completions/mean_terminated_length" not in line
    if masked:
        assert unchanged(model, before) and all(gradient.abs().max() == 0 for gradient in watch.gradients[0].values())
    else:
        (batch,) = batches
        assert batch.loss_mask.all() and batch.loss_mask.shape == (8, 5)
        assert not unchanged(model, before)


def test_a_second_stop_id_keeps_its_gradient_under_masking(tmp_path):
    """A completion ended by <end> is not truncated (TRL PR #7039); one that reaches the limit has no gradient."""
    script = {"ab": ["xy<end>", "z<end>", "xyzxyzxy", "</s>"], "cde": ["x<end>"] * 4}
    rewards = [3.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    trainer = make_trainer(
        tmp_path,
        given(rewards),
        script=script,
        stops=(EOS, END),
        loss_type="dapo",
        mask_truncated_completions=True,
        scale_rewards="none",
    )
    watch = train(trainer)
    model = tiny_model()
    total, tokens = 0.0, 3 + 2 + 1 + 4 * 2
    for text, advantage in (("xy<end>", 2.0), ("z<end>", 0.0), ("</s>", -1.0)):
        logprobs = token_logprobs(model, ids_of("ab"), ids_of(text))
        total = total - advantage * torch.exp(logprobs - logprobs.detach()).sum() / tokens
    assert relative_error(watch.gradients[0], gradient_of(total, model)) <= 1e-5
    assert logs_of(trainer)[0]["completions/clipped_ratio"] == 1 / 8
    assert (
        logs_of(trainer)[0]["completions/max_length"] == 8
        and logs_of(trainer)[0]["completions/max_terminated_length"] == 3
    )


def test_further_stop_ids_by_setting(tmp_path, monkeypatch):
    _, kept, batch = sample(
        tmp_path,
        monkeypatch,
        [X, Y, Z, Z, Z],
        generation_kwargs={"stop_token_ids": [Z]},
        mask_truncated_completions=True,
    )
    assert (
        kept.ids == [[X, Y, Z]] * 4
        and kept.texts == [tiny_tokenizer().decode([X, Y])] * 4
        and batch.loss_mask.tolist() == [[True] * 3] * 2
    )


def test_a_missing_stop_token_is_logged(tmp_path, caplog):
    tokenizer, model = tiny_tokenizer(), tiny_model()
    tokenizer.eos_token = None
    model.generation_config.eos_token_id = None
    trainer = make_trainer(tmp_path, given([0.0] * 8), model=model, tokenizer=tokenizer)
    train(trainer)
    assert "names an end-of-sequence token" in caplog.text
    assert logs_of(trainer)[0]["completions/clipped_ratio"] == 1


def test_evaluation_stops_at_the_same_tokens(tmp_path):
    model = scripted_sampling(tiny_model(), [X, Y, END, Z, Z], 2)
    model.generation_config.eos_token_id = [EOS, END]
    kept = Kept()
    trainer = make_trainer(tmp_path, kept, model=model, eval_rows=[{"prompt": "ab"}], max_completion_length=5)
    metrics = trainer.evaluate()
    assert kept.ids == [[X, Y, END]] * 4
    assert metrics["eval_completions/clipped_ratio"] == 0 and metrics["eval_completions/mean_length"] == 3
