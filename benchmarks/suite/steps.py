"""Whole GRPO steps, TRL's trainer and ours, on the same prompts, lengths and reward."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from transformers import PrinterCallback, TrainerCallback

from suite.measure import MIB, MemoryAbove, Stopwatch
from suite.models import load, lora
from suite.recipes import GROUP_SIZE, RECIPES

WARM_UP_TOKENS = 16


class DistinctTokens:
    """Rewards variety, which differs within every group, and counts the tokens it is shown."""

    __name__ = "distinct_tokens"

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []
        """Of the completions of each call."""

    def __call__(self, completions: list[Any], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        self.lengths.append([len(ids) for ids in completion_ids])
        return [len(set(ids)) / len(ids) for ids in completion_ids]


class StepClock(TrainerCallback):
    """Seconds of every optimizer step, from the end of one to the end of the next. The first has short completions:
    it warms up what is made on first use, and costs little.

    Args:
        set_length: tells the trainer how many tokens completions have from now on.
    """

    def __init__(self, set_length: Callable[[int], None], length: int) -> None:
        self.set_length, self.length = set_length, length
        self.marks: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.set_length(min(WARM_UP_TOKENS, self.length))
        self.marks.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.set_length(self.length)
        self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [end - start for start, end in zip(self.marks, self.marks[1:], strict=False)]


def measure_recipe(
    *, folder: str, recipe: str, side: str, checkpointing: bool, steps: int, tokens: int | None = None
) -> dict[str, Any]:
    """One warm-up step and `steps` timed ones.

    Args:
        side: "trl" or "ours".
        tokens: of each completion, instead of the recipe's.
    """
    spec = RECIPES[recipe]
    length = tokens or spec.completion_tokens
    model, tokenizer = load(folder)
    reward, watch = DistinctTokens(), Stopwatch()
    settings: dict[str, Any] = {
        "output_dir": "run",
        "max_steps": steps + 1,
        "learning_rate": 2e-5,
        "per_device_train_batch_size": GROUP_SIZE,
        "gradient_accumulation_steps": spec.accumulation,
        "num_generations": GROUP_SIZE,
        "max_completion_length": length,
        "temperature": 1.0,
        "gradient_checkpointing": checkpointing,
        "shuffle_dataset": False,
        "seed": 0,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    make_trainer = _trl_trainer if side == "trl" else _our_trainer
    trainer, set_length = make_trainer(model, tokenizer, spec.rows(), reward, settings, watch)
    clock = StepClock(set_length, length)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(clock)
    memory = MemoryAbove(trainer.model)
    trainer.train()
    peak = memory.bytes()
    timed_lengths = {tokens for lengths in reward.lengths[1:] for tokens in lengths}
    if timed_lengths != {length}:
        raise AssertionError(f"completions of {sorted(timed_lengths)} tokens, where all must have {length}")
    prompts = [_prompt_tokens(tokenizer, row["prompt"]) for row in spec.rows()]
    first, *timed = clock.seconds()
    return {
        "side": side,
        "recipe": recipe,
        "checkpointing": checkpointing,
        "first_step_s": first,
        "steps_s": timed,
        "step_s": statistics.median(timed),
        "generating_s": statistics.median(watch.seconds[1:]),
        "peak_mib": peak / MIB,
        "prompt_tokens": statistics.mean(prompts),
        "completions": len(reward.lengths[-1]),
        "completion_tokens": length,
    }


def _prompt_tokens(tokenizer: Any, prompt: list[dict[str, str]]) -> int:
    return len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))


def _trl_trainer(
    model: Any, tokenizer: Any, rows: list[dict[str, Any]], reward: Any, settings: dict[str, Any], watch: Stopwatch
) -> tuple[Any, Callable[[int], None]]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[reward],
        args=GRPOConfig(**settings),
        train_dataset=Dataset.from_list(rows),
        peft_config=lora(),
    )

    def set_length(tokens: int) -> None:
        # No stop token before the last one: all completions have the same length.
        trainer.generation_config.min_new_tokens = trainer.generation_config.max_new_tokens = tokens

    trainer._generate = watch.wrap(trainer._generate)
    return trainer, set_length


def _our_trainer(
    model: Any, tokenizer: Any, rows: list[dict[str, Any]], reward: Any, settings: dict[str, Any], watch: Stopwatch
) -> tuple[Any, Callable[[int], None]]:
    from grupo import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[reward],
        args=GRPOConfig(**settings),
        train_dataset=rows,
        peft_config=lora(),
    )

    def set_length(tokens: int) -> None:
        trainer.config.max_completion_length = tokens

    trainer.engine.stop_token_ids = ()
    trainer.engine.generate = watch.wrap(trainer.engine.generate)
    return trainer, set_length
