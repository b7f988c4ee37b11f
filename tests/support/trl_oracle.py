"""TRL's own GRPOTrainer code, run on given tensors.

`_compute_loss` and `_generate_and_score_completions` are called unbound of any model: the stand-in has the attributes
that they read, and hands out the given log-probs, entropies and rewards where a model, an engine or reward functions
would.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from trl import GRPOTrainer

from loss_cases import Case, Result

LOSS_DEFAULTS = {
    "epsilon_high": None,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
}


class OneProcess:
    """accelerate.Accelerator on one process, as far as the loss reads it."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    sync_gradients = True

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        return tensor

    def pad_across_processes(self, tensor: torch.Tensor, dim: int, pad_index: float) -> torch.Tensor:
        return tensor


def trl_loss(case: Case, *, micro_batches: int = 1, steps_per_generation: int | None = None, **changes: Any) -> Result:
    """TRL's loss of one optimizer step of `micro_batches` micro-batches, which it adds up as they come.

    `steps_per_generation` None: as TRL, the number of micro-batches. `changes` are settings of TRL's alone.
    """
    options = {**vars(case.settings), **changes}
    trainer = loss_trainer(options, micro_batches, steps_per_generation or micro_batches)
    pieces = np.array_split(np.arange(len(case.advantages)), micro_batches)
    generation_tokens = torch.tensor(float(case.mask.sum())) * (steps_per_generation or micro_batches) / micro_batches
    loss, gradients = 0.0, []
    for piece in pieces:
        part = case.rows(piece)
        logits = torch.tensor(part.logits, requires_grad=True)
        with float64_scalars():
            share = trainer._compute_loss(None, trl_inputs(trainer, part, logits, generation_tokens))
        share.backward()
        assert logits.grad is not None
        gradients.append(logits.grad.numpy())
        loss += share.item()
    metrics = {name: float(np.mean(values)) for name, values in trainer._metrics["train"].items()}
    policy_loss = metrics.pop("policy_loss", loss)
    return Result(loss, np.concatenate(gradients), policy_loss, metrics)


@contextmanager
def float64_scalars() -> Any:
    """Without this, what TRL makes of Python numbers (1.05 in torch.where, n / (n - 1)) is rounded to float32."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def loss_trainer(options: dict[str, Any], micro_batches: int, steps_per_generation: int) -> Any:
    trainer = object.__new__(GRPOTrainer)
    epsilon_high = options["epsilon_high"]
    trainer.__dict__.update(
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(**{**LOSS_DEFAULTS, **options, "steps_per_generation": steps_per_generation}),
        current_gradient_accumulation_steps=micro_batches,
        epsilon_low=options["epsilon"],
        # As TRL's constructor resolves it, for CISPO too.
        epsilon_high=options["epsilon"] if epsilon_high is None else epsilon_high,
        aux_loss_enabled=False,
        use_vllm=False,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=options["entropy_coef"] != 0.0,
        _metrics={"train": defaultdict(list)},
    )
    for name in (
        "loss_type",
        "importance_sampling_level",
        "beta",
        "off_policy_mask_threshold",
        "max_completion_length",
        "entropy_coef",
        "top_entropy_quantile",
    ):
        setattr(trainer, name, options[name])
    return trainer


def trl_inputs(trainer: Any, case: Case, logits: torch.Tensor, generation_tokens: torch.Tensor) -> dict[str, Any]:
    logprobs = torch.log_softmax(logits, dim=-1)
    taken = logprobs.gather(2, torch.tensor(case.actions)[..., None])[..., 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (taken, entropy, None)
    rows = len(case.advantages)
    inputs = {
        "prompt_ids": torch.zeros(rows, 1, dtype=torch.long),
        "prompt_mask": torch.ones(rows, 1, dtype=torch.long),
        "completion_ids": torch.tensor(case.actions),
        "completion_mask": torch.tensor(case.mask, dtype=torch.long),
        "advantages": torch.tensor(case.advantages),
        "num_items_in_batch": generation_tokens,
        "ref_per_token_logps": torch.tensor(case.reference),
    }
    if case.old is not None:
        inputs["old_per_token_logps"] = torch.tensor(case.old)
    if case.behavior is not None:
        inputs["sampling_per_token_logps"] = torch.tensor(case.behavior)
    return inputs


def trl_advantages(
    scores: torch.Tensor,
    group_size: int,
    *,
    weights: Sequence[float] | None = None,
    scale_rewards: str = "group",
    multi_objective_aggregation: str = "sum_then_normalize",
) -> tuple[torch.Tensor, dict[str, float]]:
    """TRL's advantages (B,) and the reward metrics that it logs with them, in the dtype of `scores` (B, K)."""
    rows, functions = scores.shape
    trainer = object.__new__(GRPOTrainer)
    trainer.__dict__.update(
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
        args=SimpleNamespace(
            per_device_train_batch_size=rows,
            steps_per_generation=1,
            gradient_accumulation_steps=1,
            gradient_checkpointing_kwargs=None,
        ),
        num_iterations=1,
        num_generations=group_size,
        beta=0.0,
        environment_factories=None,
        environments=None,
        tools=None,
        use_vllm=False,
        mask_truncated_completions=False,
        pad_to_multiple_of=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        log_multimodal=False,
        reward_weights=torch.ones(functions, dtype=scores.dtype) if weights is None else scores.new_tensor(weights),
        reward_funcs=[None] * functions,
        reward_func_names=[f"reward_{k}" for k in range(functions)],
        scale_rewards=scale_rewards,
        multi_objective_aggregation=multi_objective_aggregation,
        _metrics={"train": defaultdict(list)},
        _logs={
            "prompt": [],
            "completion": [],
            "rewards": defaultdict(list),
            "advantages": [],
            "extra": defaultdict(list),
        },
        _pending_extra_logs={},
        _pending_metrics={},
    )
    one_token = [[1]] * rows
    trainer._generate = lambda prompts: (one_token, one_token, None, ["x"] * rows, None, {}, None, None)
    trainer._calculate_rewards = lambda *args: scores
    with float64_scalars() if scores.dtype == torch.float64 else nullcontext():
        outputs = trainer._generate_and_score_completions([{"prompt": "p"} for _ in range(rows)])
    return outputs["advantages"], {name: values[0] for name, values in trainer._metrics["train"].items()}
