"""The example in one file and the package compute the same thing, and the example alone learns its task."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tiny import tiny_model
from tiny_trainer import EOS, TOKENIZER, Spy, distance, make_trainer, weights

PATH = Path(__file__).parents[2] / "examples" / "grpo_one_file.py"
QUESTIONS = ["a", "some longer question", "xyz", "?", "and one more", "the last"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_one_file", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_it_is_one_readable_file_that_needs_torch_and_transformers_alone() -> None:
    source = PATH.read_text()
    assert len(source.splitlines()) < 250
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    packages = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert packages == {"torch", "transformers"}


def score(ids: list[int]) -> float:
    return sum(ids) % 7 / 3


@pytest.mark.parametrize("updates_per_round", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_and_weights_equal_those_of_the_package(
    tmp_path: Path, example: ModuleType, dtype: torch.dtype, updates_per_round: int
) -> None:
    """Three rounds of 2 questions with 4 answers each. The package replays what the example sampled."""
    settings = example.Settings(
        rounds=3, questions_per_round=2, group_size=4, updates_per_round=updates_per_round, max_answer_tokens=8,
        temperature=0.8, learning_rate=3e-3, max_grad_norm=0.3, epsilon_low=0.2, epsilon_high=0.28,
    )  # fmt: skip
    policy = tiny_model(dtype=dtype)
    start = weights(policy)
    questions = [TOKENIZER(question)["input_ids"] for question in QUESTIONS]
    rounds = list(example.train(policy, questions, lambda question, answer: score(answer), EOS, settings))
    answers = [answer for one in rounds for group in one.answers for answer in group]
    assert len({len(answer) for answer in answers}) > 1, "rows differ in length, so masks and denominators matter"

    trainer = make_trainer(
        tmp_path,
        model=tiny_model(dtype=dtype),
        dataset=[{"prompt": question} for question in QUESTIONS],
        script=lambda prompt, place: rounds[prompt.id // 2].answers[prompt.id % 2][place],
        reward_funcs=lambda completion_ids, **_: [score(ids) for ids in completion_ids],
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_iterations=updates_per_round,
        max_steps=3 * updates_per_round,
        optim="adamw_torch",
        learning_rate=3e-3,
        max_grad_norm=0.3,
        temperature=0.8,
        epsilon_high=0.28,
        loss_type="dapo",
    )
    spy = Spy(trainer)
    trainer.train()
    losses = [loss for one in rounds for loss in one.losses]
    assert [step.loss for step in spy.steps] == pytest.approx(losses, rel=1e-5, abs=1e-6)
    assert max(map(abs, losses)) > 1e-2

    moved, moved_here = (
        {name: tensor - start[name] for name, tensor in weights(model).items()} for model in (trainer.model, policy)
    )
    # AdamW divides by the gradient's own size, which makes much of the rounding of the smallest ones.
    assert distance(moved, moved_here) < (1e-5 if dtype is torch.float64 else 1e-3)
    assert distance(weights(trainer.model), weights(policy)) < 1e-5


def test_it_learns_to_answer_in_digits(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A share of about 0.1 of the characters are digits at the start."""
    monkeypatch.setattr(sys, "argv", ["grpo_one_file.py", "--rounds", "20"])
    example.main()
    rewards = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines() if line.startswith("round")]
    assert len(rewards) == 20
    assert rewards[0] < 0.3 and rewards[-1] > 0.8


def test_an_answer_keeps_its_stop_token_and_nothing_after_it(example: ModuleType) -> None:
    assert example.cut_after(1, [5, 1, 7, 1]) == [5, 1]
    assert example.cut_after(1, [5, 7]) == [5, 7]


def test_a_round_is_sampled_from_the_policy_alone(example: ModuleType) -> None:
    """The model's own generation config, greedy here, does not change the distribution."""
    model: Any = tiny_model()
    model.generation_config.top_k = 1
    settings = example.Settings(group_size=8, max_answer_tokens=4)
    questions = [TOKENIZER(question)["input_ids"] for question in QUESTIONS[:2]]
    torch.manual_seed(0)
    groups = example.sample(model, questions, EOS, settings)
    assert all(len({tuple(answer) for answer in group}) > 1 for group in groups)
