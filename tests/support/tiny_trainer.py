"""GRPOTrainer on a tiny model with replayed completions, and what a test wants to see of its steps.

G = 4 completions per prompt unless a test says otherwise.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from grupo import GRPOConfig, GRPOTrainer
from grupo.rollout.scripted import ScriptedEngine
from grupo.types import TrainingSample
from tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = 1

# Two live groups, a dead one (equal rewards), and one more live one: 16 completions, one optimizer step.
PROMPTS = [
    {"prompt": "a", "dead": False},
    {"prompt": "some longer prompt", "dead": False},
    {"prompt": "dead", "dead": True},
    {"prompt": "xyz", "dead": False},
]


def scripted_ids(prompt: Any, place: int) -> list[int]:
    """1 to 9 tokens that depend on the prompt's text and the place alone; about half of them end with EOS."""
    generator = random.Random(f"{prompt.content}/{place}")
    ids = [generator.randrange(6, 100) for _ in range(generator.randrange(1, 10))]
    return [*ids, EOS] if generator.random() < 0.5 else ids


def reward(completion_ids: list[list[int]], dead: list[bool], **_: Any) -> list[float]:
    return [0.5 if is_dead else sum(ids) % 7 / 3 for ids, is_dead in zip(completion_ids, dead, strict=True)]


def make_trainer(
    folder: Path,
    *,
    model: torch.nn.Module | None = None,
    dataset: list[dict[str, Any]] | None = None,
    eval_dataset: list[dict[str, Any]] | None = None,
    reward_funcs: Any = reward,
    script: Any = scripted_ids,
    callbacks: list[TrainerCallback] | None = None,
    peft_config: Any = None,
    **settings: Any,
) -> GRPOTrainer:
    """A trainer whose engine replays `script`; `script=None`: the model itself samples."""
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "num_generations": 4,
        "max_completion_length": 8,
        "learning_rate": 0.3,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "max_steps": 1,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return GRPOTrainer(
        model if model is not None else tiny_model(),
        reward_funcs,
        GRPOConfig(str(folder), **{**defaults, **settings}),
        train_dataset=dataset or PROMPTS,
        eval_dataset=eval_dataset,
        processing_class=TOKENIZER,
        callbacks=callbacks,
        peft_config=peft_config,
        engine=script and ScriptedEngine(script, decode=TOKENIZER.decode, stop_token_ids=(EOS,)),
    )


@dataclasses.dataclass(frozen=True)
class Step:
    """What one optimizer step was given and what it left, before clipping."""

    samples: list[TrainingSample]
    gradients: dict[str, torch.Tensor | None]
    loss: float
    metrics: dict[str, float]


class Spy:
    """Stands in for a trainer's ForwardBackward and writes down every step."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self.update = trainer.forward_backward
        self.model = trainer.model
        self.steps: list[Step] = []
        trainer.forward_backward = self  # type: ignore[assignment]

    def __call__(self, model: torch.nn.Module, samples: list[TrainingSample], *, entropy_coef: float = 0.0) -> Any:
        result = self.update(model, samples, entropy_coef=entropy_coef)
        self.steps.append(Step(list(samples), gradients(self.model), float(result.loss), result.metrics.means()))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.update, name)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def run(folder: Path, **settings: Any) -> list[Step]:
    trainer = make_trainer(folder, **settings)
    spy = Spy(trainer)
    trainer.train()
    return spy.steps


def distance(left: dict[str, torch.Tensor | None], right: dict[str, torch.Tensor | None]) -> float:
    """|left - right| / |right| over all parameters together."""
    assert left.keys() == right.keys()
    assert all(tensor is not None for tensor in (*left.values(), *right.values()))
    flat_left, flat_right = (torch.cat([t.flatten().double() for t in side.values()]) for side in (left, right))
    assert flat_right.norm() > 0, "nothing to compare"
    return float((flat_left - flat_right).norm() / flat_right.norm())
