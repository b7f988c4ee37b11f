"""How long until the times tables are known: TRL's trainer and ours on the quickstart recipe.

Both get the same rows, reward, settings and held-out evaluation, which is done by our engine, outside the clock.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback

from grupo import GRPOConfig, GRPOTrainer
from grupo.data.prompts import PromptTokenizer, tokenize_rows
from grupo.evals.held_out import evaluate_held_out
from grupo.models.inspect import stop_token_ids
from grupo.recipes.data import recipe_rewards, recipe_rows
from grupo.recipes.schema import Recipe
from grupo.recipes.yaml_io import load_recipe
from grupo.rewards.execution.runner import RewardRunner
from grupo.rollout.collector import RolloutCollector
from grupo.rollout.local.engine import LocalEngine
from grupo.sampling import SamplingSpec
from suite.models import load, lora

GOAL = 0.7
EVALUATE_EVERY = 4


class LearningClock(TrainerCallback):
    """Evaluates every few steps, keeps the seconds in between, and stops the run at the goal."""

    def __init__(self, accuracy: Callable[[], float], goal: float) -> None:
        self.accuracy, self.goal = accuracy, goal
        self.seconds = 0.0
        self.curve: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluate(0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % EVALUATE_EVERY == 0:
            self.seconds += time.perf_counter() - self.mark
            control.should_training_stop |= self._evaluate(state.global_step) >= self.goal

    def _evaluate(self, step: int) -> float:
        accuracy = self.accuracy()
        self.curve.append({"step": step, "seconds": self.seconds, "accuracy": accuracy})
        print(self.curve[-1], flush=True)
        self.mark = time.perf_counter()
        return accuracy


def measure_learning(
    *,
    folder: str,
    side: str,
    max_steps: int,
    goal: float = GOAL,
) -> dict[str, Any]:
    """Seconds of training until held-out accuracy first reaches the goal; None if it does not in `max_steps`."""
    recipe = load_recipe("quickstart")
    settings: dict[str, Any] = {
        **recipe.training,
        "output_dir": "run",
        "max_steps": max_steps,
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
    }
    train, held_out = recipe_rows(recipe, seed=0)
    rewards, _ = recipe_rewards(recipe)
    model, tokenizer = load(folder)
    if side == "trl":
        trainer = _trl_trainer(model, tokenizer, rewards, settings, train)
    else:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=rewards,
            args=GRPOConfig(**settings),
            train_dataset=train,
            peft_config=lora(),
        )
    clock = LearningClock(_accuracy(trainer.model, tokenizer, rewards, held_out, recipe), goal)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(clock)
    trainer.train()
    reached = clock.curve[-1]["accuracy"] >= goal
    return {"side": side, "curve": clock.curve, "seconds": clock.seconds if reached else None}


def measure_quickstart(*, folder: str, tiny: bool) -> dict[str, Any]:
    """`grupo train` from its first line to its last, evaluations included; the caller's clock counts."""
    from grupo.cli import main

    smaller = ["--set", "training.max_steps=1", "--set", "eval.max_prompts=2"] if tiny else []
    code = main(["train", "quickstart", "--set", f"model={folder}", *smaller])
    if code != 0:
        raise RuntimeError(f"grupo train ended with {code}")
    (summary,) = Path("runs").glob("*/summary.json")
    return {"summary": json.loads(summary.read_text())}


def _trl_trainer(model: Any, tokenizer: Any, rewards: list[Any], settings: dict[str, Any], train: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=rewards,
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list(train),
        peft_config=lora(),
    )


def _accuracy(model: Any, tokenizer: Any, rewards: list[Any], rows: Any, recipe: Recipe) -> Callable[[], float]:
    """The recipe's own held-out evaluation of `model`, whoever trains it."""
    prompt_tokenizer = PromptTokenizer(tokenizer)
    engine = LocalEngine(
        model,
        decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        stop_token_ids=stop_token_ids(tokenizer, model),
    )
    collector = RolloutCollector(
        engine=engine,
        rewards=RewardRunner(rewards),
        prompt_text=prompt_tokenizer.text,
        all_gather=lambda item: [item],
        run_seed=0,
    )
    prompts = tokenize_rows(rows, prompt_tokenizer)
    sampling = SamplingSpec(
        temperature=recipe.eval.temperature, max_new_tokens=recipe.training["max_completion_length"]
    )

    def accuracy() -> float:
        result = evaluate_held_out(
            collector, prompts, samples_per_prompt=recipe.eval.samples_per_prompt, sampling=sampling
        )
        return result.interval.mean

    return accuracy
